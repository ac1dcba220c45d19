/* Signals that are usually faults, but here are sent and blocked: a signalfd of them says that
 * they are there and describes them; a signal that is not read stays pending, over execve too;
 * an unblocked one comes to its handler.
 *
 * Hard for a translator: it keeps these signals unblocked for faults of its own code. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "guest.h"

static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
enum { COUNT = sizeof signals / sizeof *signals };

static volatile int handled, value;
static void handler(int signal, siginfo_t *info, void *context) {
    (void)context;
    handled = handled * 100 + signal;
    value = info->si_value.sival_int;
}

static int is_pending(int signal) {
    sigset_t set;
    sigpending(&set);
    return sigismember(&set, signal);
}

static void show(int fd, const char *what) {
    struct signalfd_siginfo info;
    ssize_t got = read(fd, &info, sizeof info);
    if (got < 0) printf("%s: %s\n", what, strerror(errno));
    else printf("%s: %zd bytes, signal %u, code %d, value %d\n", what, got, info.ssi_signo, info.ssi_code, info.ssi_int);
}

static void *sender(void *to) {
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, 0);
    kill(getpid(), *(int *)to);
    return 0;
}

int main(int argc, char **argv) {
    sigset_t all;
    sigemptyset(&all);
    for (int i = 0; i < COUNT; i++) sigaddset(&all, signals[i]);
    if (argc > 1 && !strcmp(argv[1], "after")) {
        for (int i = 0; i < COUNT; i++) printf("after execve: %d %d\n", signals[i], is_pending(signals[i]));
        int fd = signalfd(-1, &all, SFD_NONBLOCK);
        show(fd, "read after execve");
        show(fd, "read after execve");
        return 0;
    }
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO};
    for (int i = 0; i < COUNT; i++) sigaction(signals[i], &action, 0);
    sigprocmask(SIG_BLOCK, &all, 0);
    int fd = signalfd(-1, &all, SFD_NONBLOCK);
    int both = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN};
    epoll_ctl(both, EPOLL_CTL_ADD, fd, &event);
    show(fd, "nothing");
    for (int i = 0; i < COUNT; i++) {
        int s = signals[i];
        struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
        kill(getpid(), s);
        printf("%d: pending %d, poll %d", s, is_pending(s), poll(&poll_fd, 1, 1000));
        printf(", ppoll %d", ppoll(&poll_fd, 1, &(struct timespec){1, 0}, &all));
        printf(", epoll %d", epoll_wait(both, &event, 1, 1000));
        fd_set set;
        FD_ZERO(&set);
        FD_SET(fd, &set);
        printf(", select %d\n", select(fd + 1, &set, 0, 0, &(struct timeval){1, 0}));
        show(fd, "sent to the process");
        show(fd, "once");
        printf("pending %d\n", is_pending(s));
        syscall(SYS_tgkill, getpid(), syscall(SYS_gettid), s);
        show(fd, "sent to the thread");
        sigqueue(getpid(), s, (union sigval){.sival_int = 1000 + s});
        sigqueue(getpid(), s, (union sigval){.sival_int = 2000 + s});
        show(fd, "queued");
        show(fd, "standard signals do not queue");
        sigqueue(getpid(), s, (union sigval){.sival_int = 3000 + s});
        siginfo_t info;
        int got = sigtimedwait(&all, &info, &(struct timespec){1, 0});
        printf("sigtimedwait %d %d\n", got, info.si_value.sival_int);
        /* Unblocked, it comes to the handler. */
        sigqueue(getpid(), s, (union sigval){.sival_int = 4000 + s});
        handled = 0;
        sigprocmask(SIG_UNBLOCK, &all, 0);
        printf("handled %d %d\n", handled, value);
        sigprocmask(SIG_BLOCK, &all, 0);
        /* A read that has to wait for the signal. */
        int blocking = signalfd(-1, &all, 0);
        pthread_t thread;
        pthread_create(&thread, 0, sender, &s);
        struct signalfd_siginfo waited;
        CHECK(read(blocking, &waited, sizeof waited) == sizeof waited);
        printf("waited for %u\n", waited.ssi_signo);
        pthread_join(thread, 0);
        close(blocking);
        /* And a fault is still one. */
    }
    fflush(stdout);
    kill(getpid(), SIGSEGV);
    sigqueue(getpid(), SIGFPE, (union sigval){.sival_int = 77});
    execl("/proc/self/exe", "signalfd_faults", "after", (char *)0);
    return 1;
}
