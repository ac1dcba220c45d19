/* Calls that block until another thread or process lets them go on. A translator that interrupts
 * threads by signals of its own must not make any of them end early. The argument is how often each
 * call is made. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int ends[2], sockets[2], polled, semaphores, queue, locked, lock_fd;
static pthread_t waiter;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
static sem_t semaphore;
static volatile int ready;
static char path[4096];

/* Sleeps for some milliseconds. A relative sleep would begin anew each time that it is interrupted. */
static int rest(void) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += 3000000;
    if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
    return clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
}

/* Each kind: what the waiting thread does (0 if right), and what lets it go on. */
static int take(void) { char c; return read(ends[0], &c, 1) == 1 ? 0 : errno; }
static void put(void) { if (write(ends[1], "x", 1) != 1) exit(3); }

static int by_read(void) { return take(); }
static int by_readv(void) { char c; struct iovec v = {&c, 1}; return readv(ends[0], &v, 1) == 1 ? 0 : errno; }
static int by_recv(void) { char c; return recv(sockets[0], &c, 1, 0) == 1 ? 0 : errno; }
static int by_recvmsg(void) {
    char c;
    struct iovec v = {&c, 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
    return recvmsg(sockets[0], &m, 0) == 1 ? 0 : errno;
}
static void send_one(void) { if (send(sockets[1], "x", 1, 0) != 1) exit(3); }
static int by_poll(void) { struct pollfd p = {ends[0], POLLIN, 0}; return poll(&p, 1, -1) == 1 ? take() : errno; }
static int by_ppoll(void) { struct pollfd p = {ends[0], POLLIN, 0}; return ppoll(&p, 1, NULL, NULL) == 1 ? take() : errno; }
static int by_select(void) {
    fd_set set;
    FD_ZERO(&set);
    FD_SET(ends[0], &set);
    return select(ends[0] + 1, &set, NULL, NULL, NULL) == 1 ? take() : errno;
}
static int by_epoll(void) { struct epoll_event e; return epoll_wait(polled, &e, 1, -1) == 1 ? take() : errno; }
static int by_condition(void) {
    pthread_mutex_lock(&mutex);
    while (!ready) pthread_cond_wait(&condition, &mutex);
    ready = 0;
    return pthread_mutex_unlock(&mutex);
}
static void signal_condition(void) {
    pthread_mutex_lock(&mutex);
    ready = 1;
    pthread_cond_signal(&condition);
    pthread_mutex_unlock(&mutex);
}
static int by_semaphore(void) { return sem_wait(&semaphore) == 0 ? 0 : errno; }
static void post(void) { sem_post(&semaphore); }
static int by_semop(void) { struct sembuf b = {0, -1, 0}; return semop(semaphores, &b, 1) == 0 ? 0 : errno; }
static void up(void) { struct sembuf b = {0, 1, 0}; if (semop(semaphores, &b, 1) != 0) exit(3); }
static int by_msgrcv(void) { struct { long type; char c; } m; return msgrcv(queue, &m, 1, 0, 0) == 1 ? 0 : errno; }
static void msgsnd_one(void) { struct { long type; char c; } m = {1, 'x'}; if (msgsnd(queue, &m, 1, 0) != 0) exit(3); }
static int by_waitpid(void) {
    pid_t child = fork();
    if (child == 0) {
        rest();
        _exit(7);
    }
    int status;
    return waitpid(child, &status, 0) != child ? errno : WEXITSTATUS(status) != 7;
}
static void nothing(void) {}
static int by_flock(void) {
    int result = flock(locked, LOCK_EX) == 0 ? 0 : errno;
    flock(locked, LOCK_UN);
    ready = 1;
    return result;
}
static void unlock(void) {
    flock(lock_fd, LOCK_UN);
    while (!ready) rest();
    ready = 0;
    flock(lock_fd, LOCK_EX);
}
static int by_signal(void) {
    sigset_t set;
    sigemptyset(&set), sigaddset(&set, SIGUSR1);
    return sigwaitinfo(&set, NULL) == SIGUSR1 ? 0 : errno;
}
static void send_signal(void) { pthread_kill(waiter, SIGUSR1); }
static const struct kind {
    const char *name;
    int (*wait)(void);
    void (*let_go)(void);
} kinds[] = {{"read", by_read, put},           {"readv", by_readv, put},         {"recv", by_recv, send_one},
             {"recvmsg", by_recvmsg, send_one}, {"poll", by_poll, put},           {"ppoll", by_ppoll, put},
             {"select", by_select, put},        {"epoll_wait", by_epoll, put},    {"futex", by_condition, signal_condition},
             {"sem_wait", by_semaphore, post},  {"semop", by_semop, up},          {"msgrcv", by_msgrcv, msgsnd_one},
             {"waitpid", by_waitpid, nothing},  {"flock", by_flock, unlock},      {"sigwaitinfo", by_signal, send_signal},
             {"clock_nanosleep", rest, nothing}};

static int rounds;
static pthread_barrier_t barrier;

static void *other(void *unused) {
    for (unsigned k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int i = 0; i < rounds; i++) {
            pthread_barrier_wait(&barrier);
            rest();
            kinds[k].let_go();
        }
    return unused;
}

int main(int argc, char **argv) {
    rounds = argc > 1 ? atoi(argv[1]) : 10;
    sigset_t set;
    sigemptyset(&set), sigaddset(&set, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    struct epoll_event event = {.events = EPOLLIN};
    union { int value; } one = {0};
    snprintf(path, sizeof path, "%s.lock", argc > 2 ? argv[2] : "calls_sampled");
    waiter = pthread_self();
    polled = epoll_create1(0), semaphores = semget(IPC_PRIVATE, 1, 0600), queue = msgget(IPC_PRIVATE, 0600);
    lock_fd = open(path, O_RDWR | O_CREAT, 0600), locked = open(path, O_RDWR);
    if (pipe(ends) || socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) || epoll_ctl(polled, EPOLL_CTL_ADD, ends[0], &event) ||
        semctl(semaphores, 0, SETVAL, one) || queue < 0 || lock_fd < 0 || locked < 0 || flock(lock_fd, LOCK_EX))
        return 2;
    sem_init(&semaphore, 0, 0);
    pthread_barrier_init(&barrier, NULL, 2);
    pthread_t thread;
    pthread_create(&thread, NULL, other, NULL);
    for (unsigned k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        int ended_early = 0;
        for (int i = 0; i < rounds; i++) {
            pthread_barrier_wait(&barrier);
            ended_early += kinds[k].wait() != 0;
        }
        printf("%s: %d of %d\n", kinds[k].name, ended_early, rounds);
    }
    pthread_join(thread, NULL);
    semctl(semaphores, 0, IPC_RMID), msgctl(queue, IPC_RMID, NULL), unlink(path);
    return 0;
}
