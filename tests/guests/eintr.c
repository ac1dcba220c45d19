/* System calls that signals interrupt: EINTR without SA_RESTART, restart with it; pipe reads,
 * nanosleep, waitpid, poll.
 *
 * Hard for a translator: a signal may come between its last look at pending signals and the
 * kernel's call. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "guest.h"

static volatile sig_atomic_t ticks;
static int fds[2];
static volatile int write_on_tick;

static void on_alarm(int signal) {
    int saved = errno;
    (void)signal;
    ticks++;
    if (write_on_tick && ticks == write_on_tick && write(fds[1], "x", 1) != 1) _Exit(97);
    errno = saved;
}

static void arm(int flags, int write_at) {
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = flags};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    ticks = 0;
    write_on_tick = write_at;
    struct itimerval timer = {{0, 2000}, {0, 2000}};
    CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
}

static void disarm(void) {
    struct itimerval none = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &none, NULL);
}

int main(void) {
    char byte = 0;
    CHECK(pipe(fds) == 0);
    arm(0, 0);
    ssize_t n = read(fds[0], &byte, 1);
    int error = errno;
    disarm();
    printf("read without SA_RESTART: %zd, EINTR %d, ticks %d\n", n, error == EINTR, ticks >= 1);

    arm(SA_RESTART, 3);
    n = read(fds[0], &byte, 1);
    disarm();
    printf("read with SA_RESTART: %zd '%c', ticks %d\n", n, byte, ticks >= 3);

    arm(0, 0);
    struct timespec want = {5, 0}, rest = {0, 0};
    int result = nanosleep(&want, &rest);
    error = errno;
    disarm();
    /* If the signal comes at once, the kernel's rest is longer than the sleep, by the timer's slack of 50 us. */
    int is_rest = rest.tv_sec == 4 ? rest.tv_nsec > 0 : rest.tv_sec == 5 && rest.tv_nsec < 50000;
    printf("nanosleep: %d, EINTR %d, rest %d\n", result, error == EINTR, is_rest);

    arm(SA_RESTART, 0);
    struct pollfd poller = {.fd = fds[0], .events = POLLIN};
    result = poll(&poller, 1, 5000);
    error = errno;
    disarm();
    printf("poll is never restarted: %d, EINTR %d\n", result, error == EINTR);

    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        /* Repeats until the parent has been interrupted, even if it is not scheduled for long. */
        _exit(read(fds[0], &byte, 1) == 1 ? 9 : 10);
    }
    int status = 0, interrupted = 0;
    arm(0, 10);
    while (waitpid(child, &status, 0) < 0) {
        CHECK(errno == EINTR);
        interrupted = 1;
    }
    disarm();
    printf("waitpid: interrupted %d, status %d\n", interrupted, WEXITSTATUS(status));
    child = fork();
    if (child == 0) {
        struct timespec pause = {0, 10000000};
        nanosleep(&pause, NULL);
        _exit(8);
    }
    arm(SA_RESTART, 0);
    pid_t got = waitpid(child, &status, 0);
    disarm();
    printf("waitpid restarted: %d, status %d\n", got == child, WEXITSTATUS(status));
    return 0;
}
