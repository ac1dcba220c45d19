/* Signals that are usually faults, sent and blocked while the main thread computes: a signal for
 * the process waits for the thread that asks, a signal for a thread for that thread; a signalfd
 * that was inherited shows the pending signals.
 *
 * Hard for a translator: it keeps these signals unblocked, so the kernel may deliver one to any
 * thread. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>
#include "guest.h"

static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
enum { COUNT = sizeof signals / sizeof *signals };

static sigset_t all;
static int fd;
static pthread_t first;
/* Whose turn it is: the main thread computes while it is even. */
static atomic_int turn;

static void show(const char *what, int timeout) {
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
    if (poll(&poll_fd, 1, timeout) == 0) {
        printf("%s: nothing\n", what);
        return;
    }
    struct signalfd_siginfo info;
    CHECK(read(fd, &info, sizeof info) == sizeof info);
    printf("%s: signal %u, code %d, own %d %d, value %d\n", what, info.ssi_signo, info.ssi_code,
           info.ssi_pid == (uint32_t)getpid(), info.ssi_uid == getuid(), info.ssi_int);
}

static void short_sleep(void) { nanosleep(&(struct timespec){.tv_nsec = 10000000}, 0); }

static void *late_sender(void *signal) {
    short_sleep();
    sigqueue(getpid(), *(const int *)signal, (union sigval){.sival_int = 300});
    return 0;
}

static void *other(void *unused) {
    (void)unused;
    for (int i = 0; i < COUNT; i++) {
        int s = signals[i];
        /* The main thread gets it, and goes on computing. */
        sigqueue(getpid(), s, (union sigval){.sival_int = 100});
        short_sleep();
        show("sent before this thread asked", 10000);
        show("once", 0);
        kill(getpid(), s);
        short_sleep();
        siginfo_t info;
        int got = sigtimedwait(&all, &info, &(struct timespec){10, 0});
        printf("sigtimedwait %d, code %d, own %d\n", got, info.si_code, info.si_pid == getpid());
        /* This thread waits for the signal. */
        pthread_t sender;
        pthread_create(&sender, 0, late_sender, (void *)&signals[i]);
        show("sent while this thread waits", 10000);
        pthread_join(sender, 0);
        pthread_create(&sender, 0, late_sender, (void *)&signals[i]);
        got = sigtimedwait(&all, &info, &(struct timespec){10, 0});
        printf("sigtimedwait %d, code %d, value %d\n", got, info.si_code, info.si_value.sival_int);
        pthread_join(sender, 0);
        /* A signal for the main thread alone. */
        pthread_sigqueue(first, s, (union sigval){.sival_int = 200});
        short_sleep();
        show("not for this thread", 0);
        turn++;
        while (turn % 2 == 1) sched_yield();
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "after")) {
        fd = atoi(argv[2]);
        show("inherited", 10000);
        show("inherited", 0);
        return 0;
    }
    sigemptyset(&all);
    for (int i = 0; i < COUNT; i++) sigaddset(&all, signals[i]);
    sigprocmask(SIG_BLOCK, &all, 0);
    fd = signalfd(-1, &all, 0);
    first = pthread_self();
    pthread_t thread;
    pthread_create(&thread, 0, other, 0);
    for (int i = 0; i < COUNT; i++) {
        while (turn % 2 == 0) {}
        show("for the main thread", 10000);
        turn++;
    }
    pthread_join(thread, 0);
    fflush(stdout);
    sigqueue(getpid(), SIGILL, (union sigval){.sival_int = 400});
    char number[16];
    snprintf(number, sizeof number, "%d", fd);
    execl("/proc/self/exe", "signalfd_threads", "after", number, (char *)0);
    return 1;
}
