/* A thread that computes for a while blocks SIGBUS and SIGTRAP, and asks a signalfd and sigtimedwait
 * for them all the time. Nobody sends any.
 *
 * Hard for a translator: signals by which it samples the thread must not be seen. */
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>
#include "guest.h"

static double used(void) {
    struct timespec time;
    CHECK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time) == 0);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

int main(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGBUS);
    sigaddset(&set, SIGTRAP);
    CHECK(sigprocmask(SIG_BLOCK, &set, NULL) == 0);
    volatile unsigned long sum = 0;
    while (used() < 0.06) {
        for (int i = 0; i < 100000; i++) sum += i;
    }
    int seen = 0;
    struct timespec none = {0}, little = {.tv_nsec = 100};
    while (used() < 0.16) {
        for (int i = 0; i < 1000; i++) seen += sigtimedwait(&set, NULL, i & 1 ? &none : &little) != -1;
    }
    printf("sigtimedwait: %d\n", seen);
    int fd = signalfd(-1, &set, SFD_NONBLOCK);
    CHECK(fd >= 0);
    seen = 0;
    while (used() < 0.3) {
        struct signalfd_siginfo info;
        struct pollfd file = {.fd = fd, .events = POLLIN};
        for (int i = 0; i < 1000; i++) seen += read(fd, &info, sizeof info) != -1 || poll(&file, 1, 0) != 0;
    }
    printf("signalfd: %d\n", seen);
    sigset_t pending;
    CHECK(sigpending(&pending) == 0);
    printf("pending: %d %d\n", sigismember(&pending, SIGBUS), sigismember(&pending, SIGTRAP));
    return 0;
}
