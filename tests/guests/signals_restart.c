/* Which calls a handler ends with EINTR and which are restarted, with and without SA_RESTART;
 * calls that measure time; stopping and continuing during a call. A timer interrupts each call;
 * at its third tick the handler causes the event that the call waits for.
 *
 * Hard for a translator: the kernel restarts the host's call, while the guest's handler runs
 * later. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <mqueue.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "guest.h"

static volatile int ticks, release_at;
static void (*volatile release)(void);
static int ends[2], sockets[2], to_child[2], event, listener, queue_id, semaphores, lock_file;
static uint32_t word;
static pid_t child;
static struct sockaddr_un address;
static char fifo[64];

static void on_tick(int signal) {
    (void)signal;
    int saved = errno;
    if (++ticks == release_at && release) release();
    errno = saved;
}

static void every(long microseconds) {
    struct itimerval timer = {{0, microseconds}, {0, microseconds}};
    CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
}

static void feed_pipe(void) { CHECK(write(ends[1], "x", 1) == 1); }
static void feed_socket(void) { CHECK(write(sockets[1], "y", 1) == 1); }
static void feed_event(void) { eventfd_write(event, 5); }
static void drain_pipe(void) {
    char buffer[8192];
    CHECK(read(ends[0], buffer, sizeof buffer) > 0);
}
static void drain_socket(void) {
    char buffer[8192];
    for (int i = 0; i < 64; i++) recv(sockets[1], buffer, sizeof buffer, MSG_DONTWAIT);
}
static void connect_one(void) {
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    connect(fd, (struct sockaddr *)&address, sizeof address);
    close(fd);
}
static void feed_child(void) { CHECK(write(to_child[1], "z", 1) == 1); }
static void wake_word(void) {
    word = 1;
    syscall(SYS_futex, &word, FUTEX_WAKE, 1, NULL, NULL, 0);
}
static void open_fifo(void) { CHECK(open(fifo, O_RDWR | O_NONBLOCK) >= 0); }
static void send_message(void) {
    struct { long type; char text[4]; } message = {1, "abc"};
    msgsnd(queue_id, &message, sizeof message.text, IPC_NOWAIT);
}
static void raise_semaphore(void) {
    struct sembuf up = {0, 1, IPC_NOWAIT};
    semop(semaphores, &up, 1);
}

static int timer;
static void feed_timer(void) {
    struct itimerspec spec = {{0, 0}, {0, 1}};
    timerfd_settime(timer, 0, &spec, NULL);
}
static mqd_t queue = -1;
static void feed_queue(void) { mq_send(queue, "message", 8, 0); }

/* Starts the timer immediately before a call. */
static void go(void) {
    ticks = 0;
    every(3000);
}

/* The calls. Each returns the kernel's answer. */
static char buffer[1 << 16];
static struct timespec long_time = {20, 0};
static long result(long value) { return value < 0 ? -errno : value; }
static long c_read(void) { go(); return result(read(ends[0], buffer, 1)); }
static long c_readv(void) {
    struct iovec vector = {buffer, 1};
    go();
    return result(readv(ends[0], &vector, 1));
}
static long c_write(void) {
    fcntl(ends[1], F_SETFL, O_NONBLOCK);
    while (write(ends[1], buffer, 4096) > 0) {}
    fcntl(ends[1], F_SETFL, 0);
    go();
    return result(write(ends[1], buffer, 4096));
}
static long c_recv(void) { go(); return result(recv(sockets[0], buffer, 1, 0)); }
static long c_recvmsg(void) {
    struct iovec vector = {buffer, 1};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};
    go();
    return result(recvmsg(sockets[0], &message, 0));
}
static long c_recv_timeout(void) {
    struct timeval limit = {20, 0}, none = {0, 0};
    setsockopt(sockets[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    go();
    long r = result(recv(sockets[0], buffer, 1, 0));
    setsockopt(sockets[0], SOL_SOCKET, SO_RCVTIMEO, &none, sizeof none);
    return r;
}
static long c_send(void) {
    while (send(sockets[0], buffer, 4096, MSG_DONTWAIT) > 0) {}
    go();
    return result(send(sockets[0], buffer, 4096, 0));
}
static long c_accept(void) {
    go();
    long r = result(accept(listener, NULL, NULL));
    if (r >= 0) close((int)r), r = 0;
    return r;
}
static long c_poll(void) {
    struct pollfd p = {ends[0], POLLIN, 0};
    go();
    return result(poll(&p, 1, 20000));
}
static long c_ppoll(void) {
    struct pollfd p = {ends[0], POLLIN, 0};
    sigset_t none;
    sigemptyset(&none);
    go();
    return result(ppoll(&p, 1, &long_time, &none));
}
static long c_select(void) {
    fd_set set;
    FD_ZERO(&set);
    FD_SET(ends[0], &set);
    struct timeval limit = {20, 0};
    go();
    return result(select(ends[0] + 1, &set, NULL, NULL, &limit));
}
static long c_pselect(void) {
    fd_set set;
    FD_ZERO(&set);
    FD_SET(ends[0], &set);
    sigset_t none;
    sigemptyset(&none);
    go();
    return result(pselect(ends[0] + 1, &set, NULL, NULL, &long_time, &none));
}
static long epoll_with(int how) {
    int fd = epoll_create1(0);
    struct epoll_event e = {.events = EPOLLIN};
    epoll_ctl(fd, EPOLL_CTL_ADD, ends[0], &e);
    sigset_t none;
    sigemptyset(&none);
    go();
    long r = how == 0 ? epoll_wait(fd, &e, 1, -1) : how == 1 ? epoll_pwait(fd, &e, 1, 20000, &none) : syscall(SYS_epoll_pwait2, fd, &e, 1, &long_time, &none, 8);
    r = result(r);
    close(fd);
    return r;
}
static long c_epoll(void) { return epoll_with(0); }
static long c_epoll_pwait(void) { return epoll_with(1); }
static long c_epoll_pwait2(void) { return epoll_with(2); }
static long c_nanosleep(void) {
    struct timespec rest = {0, 0};
    go();
    long r = result(syscall(SYS_nanosleep, &long_time, &rest));
    CHECK(rest.tv_sec == 19);
    return r;
}
static long c_clock_relative(void) {
    struct timespec rest = {0, 0};
    go();
    long r = -clock_nanosleep(CLOCK_MONOTONIC, 0, &long_time, &rest);
    CHECK(rest.tv_sec == 19);
    return r;
}
static long c_clock_absolute(void) {
    struct timespec when, rest = {77, 0};
    clock_gettime(CLOCK_MONOTONIC, &when);
    when.tv_sec += 20;
    go();
    long r = -clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, &rest);
    CHECK(rest.tv_sec == 77);
    return r;
}
static void start_child(void) {
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        char byte;
        every(0);
        if (lock_file >= 0) close(lock_file);
        while (read(to_child[0], &byte, 1) != 1) {}
        _exit(3);
    }
}
static long c_wait4(void) {
    int status = 0;
    start_child();
    go();
    long r = result(waitpid(child, &status, 0));
    if (r == child) return WEXITSTATUS(status);
    feed_child();
    CHECK(waitpid(child, &status, __WALL) == child || errno == EINTR || 1);
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    return r;
}
static long c_waitid(void) {
    siginfo_t info = {0};
    start_child();
    go();
    long r = result(waitid(P_PID, child, &info, WEXITED));
    if (r == 0) return info.si_pid == child ? info.si_status : -1000;
    feed_child();
    while (waitpid(child, NULL, 0) < 0 && errno == EINTR) {}
    return r;
}
static long c_futex(void) {
    word = 0;
    go();
    return result(syscall(SYS_futex, &word, FUTEX_WAIT, 0, NULL, NULL, 0));
}
static long c_futex_timeout(void) {
    word = 0;
    go();
    return result(syscall(SYS_futex, &word, FUTEX_WAIT, 0, &long_time, NULL, 0));
}
static long c_futex_bitset(void) {
    word = 0;
    struct timespec when;
    clock_gettime(CLOCK_MONOTONIC, &when);
    when.tv_sec += 20;
    go();
    return result(syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, 0, &when, NULL, 1));
}
static long c_msgrcv(void) {
    struct { long type; char text[4]; } message;
    go();
    return result(msgrcv(queue_id, &message, sizeof message.text, 0, 0));
}
static long c_semop(void) {
    struct sembuf down = {0, -1, 0};
    go();
    return result(semop(semaphores, &down, 1));
}
static long c_semtimedop(void) {
    struct sembuf down = {0, -1, 0};
    go();
    return result(semtimedop(semaphores, &down, 1, &long_time));
}
static pid_t locker;
static void unlock(void) { CHECK(write(to_child[1], "u", 1) == 1); }
static long locked(int how) {
    int fd = memfd_create("lock", 0), ready[2];
    CHECK(pipe(ready) == 0);
    char path[64];
    sprintf(path, "/proc/self/fd/%d", fd);
    locker = fork();
    if (locker == 0) {
        char byte;
        every(0);
        int own = open(path, O_RDWR);
        struct flock all = {.l_type = F_WRLCK};
        if (how) fcntl(own, F_SETLK, &all); else flock(own, LOCK_EX);
        if (write(ready[1], "r", 1) != 1) _exit(1);
        while (read(to_child[0], &byte, 1) != 1) {}
        _exit(0);
    }
    char byte;
    while (read(ready[0], &byte, 1) != 1) {}
    int own = open(path, O_RDWR);
    struct flock all = {.l_type = F_WRLCK};
    go();
    long r = result(how ? fcntl(own, F_SETLKW, &all) : flock(own, LOCK_EX));
    if (r < 0) unlock();
    while (waitpid(locker, NULL, 0) < 0 && errno == EINTR) {}
    close(own), close(fd), close(ready[0]), close(ready[1]);
    return r;
}
static long c_flock(void) { return locked(0); }
static long c_setlkw(void) { return locked(1); }
static long c_open_fifo(void) {
    go();
    long r = result(open(fifo, O_RDONLY));
    if (r >= 0) close((int)r), r = 0;
    return r;
}
static long c_eventfd(void) {
    eventfd_t value = 0;
    go();
    long r = result(read(event, &value, sizeof value));
    return r < 0 ? r : (long)value;
}
static long c_timerfd(void) {
    timer = timerfd_create(CLOCK_MONOTONIC, 0);
    uint64_t value = 0;
    go();
    long r = result(read(timer, &value, sizeof value));
    close(timer);
    return r < 0 ? r : (long)value;
}
static long c_pause(void) { go(); return result(pause()); }
static long c_sigsuspend(void) {
    sigset_t none;
    sigemptyset(&none);
    go();
    return result(sigsuspend(&none));
}
static long c_sigtimedwait(void) {
    sigset_t some;
    sigemptyset(&some);
    sigaddset(&some, SIGUSR2);
    go();
    return result(sigtimedwait(&some, NULL, &long_time));
}
static long c_mq(void) {
    char name[32];
    sprintf(name, "/dynasour-%d", getpid());
    struct mq_attr attributes = {.mq_maxmsg = 2, .mq_msgsize = 8};
    queue = mq_open(name, O_RDWR | O_CREAT, 0600, &attributes);
    if (queue < 0) return 0;
    mq_unlink(name);
    struct timespec when;
    clock_gettime(CLOCK_REALTIME, &when);
    when.tv_sec += 20;
    go();
    long r = result(mq_timedreceive(queue, buffer, 8, NULL, &when));
    mq_close(queue);
    return r;
}

static void nothing(void) {}
static const struct {
    const char *name;
    long (*call)(void);
    void (*release)(void);
} calls[] = {
    {"read", c_read, feed_pipe}, {"readv", c_readv, feed_pipe}, {"write", c_write, drain_pipe}, {"recv", c_recv, feed_socket},
    {"recvmsg", c_recvmsg, feed_socket}, {"recv with SO_RCVTIMEO", c_recv_timeout, feed_socket}, {"send", c_send, drain_socket},
    {"accept", c_accept, connect_one}, {"poll", c_poll, nothing}, {"ppoll", c_ppoll, nothing}, {"select", c_select, nothing},
    {"pselect6", c_pselect, nothing}, {"epoll_wait", c_epoll, nothing}, {"epoll_pwait", c_epoll_pwait, nothing},
    {"epoll_pwait2", c_epoll_pwait2, nothing}, {"nanosleep", c_nanosleep, nothing}, {"clock_nanosleep", c_clock_relative, nothing},
    {"clock_nanosleep absolute", c_clock_absolute, nothing}, {"wait4", c_wait4, feed_child}, {"waitid", c_waitid, feed_child},
    {"futex", c_futex, wake_word}, {"futex with timeout", c_futex_timeout, nothing}, {"futex bitset", c_futex_bitset, nothing},
    {"msgrcv", c_msgrcv, nothing}, {"semop", c_semop, nothing}, {"semtimedop", c_semtimedop, nothing},
    {"flock", c_flock, unlock}, {"F_SETLKW", c_setlkw, unlock}, {"open of a fifo", c_open_fifo, open_fifo},
    {"eventfd", c_eventfd, feed_event}, {"timerfd", c_timerfd, feed_timer}, {"pause", c_pause, nothing},
    {"sigsuspend", c_sigsuspend, nothing}, {"sigtimedwait", c_sigtimedwait, nothing}, {"mq_timedreceive", c_mq, feed_queue},
};

static void fresh(void) {
    CHECK(pipe(ends) == 0 && pipe(to_child) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    event = eventfd(0, 0);
    lock_file = -1;
}
static void stale(void) {
    close(ends[0]), close(ends[1]), close(to_child[0]), close(to_child[1]), close(sockets[0]), close(sockets[1]), close(event);
}

/* Waits until the process is asleep: however busy the machine is, it is in its call then. */
static void wait_asleep(pid_t pid) {
    char name[32], text[256], *behind = NULL;
    sprintf(name, "/proc/%d/stat", pid);
    do {
        usleep(5000);
        FILE *file = fopen(name, "r");
        CHECK(file && fgets(text, sizeof text, file));
        fclose(file);
        behind = strrchr(text, ')');
    } while (!behind || behind[2] != 'S');
}

/* A child sleeps in a call while it is stopped and continued; with a handler for SIGCONT the
 * call ends. */
static void stopped(int handled, int call) {
    int ready[2];
    CHECK(pipe(ready) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        struct sigaction action = {.sa_handler = on_tick, .sa_flags = SA_RESTART};
        if (handled) sigaction(SIGCONT, &action, NULL);
        struct timespec time = {0, 500000000}, start, end;
        ticks = release_at = 0;
        long r;
        clock_gettime(CLOCK_MONOTONIC, &start);
        if (write(ready[1], "r", 1) != 1) _exit(1);
        if (call == 0) {
            r = result(syscall(SYS_nanosleep, &time, &time));
        } else if (call == 1) {
            r = result(poll(NULL, 0, 500));
        } else if (call == 2) {
            word = 0;
            r = result(syscall(SYS_futex, &word, FUTEX_WAIT, 0, &time, NULL, 0));
        } else {
            r = result(select(0, NULL, NULL, NULL, &(struct timeval){0, 500000}));
        }
        clock_gettime(CLOCK_MONOTONIC, &end);
        long elapsed = (end.tv_sec - start.tv_sec) * 1000 + (end.tv_nsec - start.tv_nsec) / 1000000;
        /* The call ended by the handler, or after its whole time. */
        if (r == -EINTR) _exit(handled && ticks > 0 ? 1 : 2);
        _exit(elapsed >= 499 ? (r == (call == 2 ? -ETIMEDOUT : 0) ? 3 : 4) : 5);
    }
    char byte;
    CHECK(read(ready[0], &byte, 1) == 1);
    int status;
    struct timespec moment = {0, 30000000};
    wait_asleep(pid);
    kill(pid, SIGSTOP);
    CHECK(waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
    nanosleep(&moment, NULL);
    kill(pid, SIGCONT);
    CHECK(waitpid(pid, &status, 0) == pid);
    printf("stopped in call %d%s: %d\n", call, handled ? ", continued with a handler" : "", WEXITSTATUS(status));
    close(ready[0]), close(ready[1]);
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 1 << 12);
    address.sun_family = AF_UNIX;
    snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "dynasour-%d", getpid());
    listener = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(bind(listener, (struct sockaddr *)&address, sizeof address) == 0 && listen(listener, 8) == 0);
    queue_id = msgget(IPC_PRIVATE, 0600);
    semaphores = semget(IPC_PRIVATE, 1, 0600);
    sprintf(fifo, "/tmp/dynasour-fifo-%d", getpid());
    CHECK(mkfifo(fifo, 0600) == 0);
    for (unsigned i = 0; i < sizeof calls / sizeof *calls; i++) {
        for (int restart = 0; restart < 2; restart++) {
            fresh();
            struct sigaction action = {.sa_handler = on_tick, .sa_flags = restart ? SA_RESTART : 0};
            CHECK(sigaction(SIGALRM, &action, NULL) == 0);
            release_at = restart ? 3 : -1;
            release = calls[i].release;
            long r = calls[i].call();
            every(0);
            int after = ticks;
            printf("%s%s: %ld, ticks %s\n", calls[i].name, restart ? ", SA_RESTART" : "", r, after >= 3 && r != -EINTR ? "many" : after >= 1 ? "some" : "none");
            stale();
        }
    }
    unlink(fifo);
    msgctl(queue_id, IPC_RMID, NULL);
    semctl(semaphores, 0, IPC_RMID);
    for (int call = 0; call < 4; call++) stopped(0, call), stopped(1, call);
    return 0;
}
