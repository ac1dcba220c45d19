/* Many signals during everything that a program can be doing: computing in registers of all
 * kinds, sleeping, reading, waiting. Each must arrive exactly once: a lost wake-up hangs, a
 * disturbed register changes the sums.
 *
 * Hard for a translator: a signal can arrive at any instruction of its own. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/select.h>
#include <sys/signalfd.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "guest.h"

static volatile sig_atomic_t ticks, kills;
static int self_pipe[2];

static void on_tick(int signal) {
    (void)signal;
    ticks++;
    /* The handler changes everything that it may change. */
    double garbage[8];
    for (int i = 0; i < 8; i++) garbage[i] = ticks * 0.1 + i;
    __asm__ volatile("movupd (%0), %%xmm0; movupd (%0), %%xmm7; movupd 16(%0), %%xmm15; fninit; fldpi; fld1; stc; std; cld" : : "r"(garbage)
                     : "xmm0", "xmm7", "xmm15", "cc", "memory");
}

static void on_tick_write(int signal) {
    on_tick(signal);
    if (write(self_pipe[1], "x", 1) != 1 && errno != EAGAIN) _Exit(98);
}

static void on_kill(int signal) {
    (void)signal;
    kills++;
}

static void every(long microseconds) {
    struct itimerval timer = {{0, microseconds}, {0, microseconds}};
    CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
}

static void handle(int signo, void (*handler)(int), int flags) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
    CHECK(sigaction(signo, &action, NULL) == 0);
}

/* Integer, SSE, x87 and string work with values that live over many iterations. */
static uint64_t compute(int rounds) {
    uint64_t a = 1, b = 2, c = 3, d = 4, sum = 0;
    double x = 1.0, y = 0.5;
    long double z = 1.0L;
    char buffer[96], copy[96];
    for (int i = 0; i < rounds; i++) {
        a = a * 6364136223846793005ULL + 1442695040888963407ULL;
        b ^= b << 13, b ^= b >> 7, b ^= b << 17;
        c += a ^ (b >> 3);
        d = (d << 5 | d >> 59) + (c < a);
        x = x * 0.999 + y * (double)(a >> 40) * 1e-7;
        y = y * 0.5 + x * 0.25;
        z = z * 0.75L + (long double)x;
        if (i % 64 == 0) {
            memset(buffer, i, sizeof buffer);
            void *from = buffer, *to = copy;
            size_t left = sizeof copy;
            __asm__ volatile("rep movsb" : "+S"(from), "+D"(to), "+c"(left) : : "memory");
            sum = mix_bytes(sum, copy, sizeof copy);
        }
    }
    sum = mix(mix(mix(mix(sum, a), b), c), d);
    long scaled = (long)(x * 1e9) ^ (long)(y * 1e9) ^ (long)(z * 1e9L);
    return mix(sum, (uint64_t)scaled);
}

int main(int argc, char **argv) {
    long many = iterations(argc, argv, 4000);

    /* A timer of 1 kHz interrupts loops until enough ticks have come; results do not depend on
     * it. */
    handle(SIGALRM, on_tick, SA_RESTART);
    uint64_t expected = compute(3000);
    every(1000);
    int wrong = 0;
    while (ticks < 100) wrong += compute(3000) != expected;
    every(0);
    printf("computing: %d wrong, %016lx\n", wrong, expected);

    /* Signals to itself: each is delivered before kill returns. */
    handle(SIGUSR1, on_kill, 0);
    long late = 0;
    for (long i = 0; i < many; i++) {
        CHECK((i & 1 ? raise(SIGUSR1) : kill(getpid(), SIGUSR1)) == 0);
        late += kills != i + 1;
    }
    printf("to itself: %ld late\n", late);

    /* Blocked, sent, let in by the call itself: sigsuspend, ppoll, pselect, unblocking. */
    sigset_t block, open;
    sigemptyset(&block);
    sigaddset(&block, SIGUSR1);
    sigprocmask(SIG_BLOCK, &block, &open);
    kills = 0;
    long errors = 0;
    for (long i = 0; i < many / 4; i++) {
        CHECK(kill(getpid(), SIGUSR1) == 0);
        errors += kills != 4 * i;
        errors += !(sigsuspend(&open) == -1 && errno == EINTR && kills == 4 * i + 1);
        raise(SIGUSR1);
        errors += !(ppoll(NULL, 0, NULL, &open) == -1 && errno == EINTR && kills == 4 * i + 2);
        raise(SIGUSR1);
        errors += !(pselect(0, NULL, NULL, NULL, NULL, &open) == -1 && errno == EINTR && kills == 4 * i + 3);
        raise(SIGUSR1);
        sigprocmask(SIG_SETMASK, &open, NULL);
        errors += kills != 4 * i + 4;
        sigprocmask(SIG_BLOCK, &block, NULL);
    }
    printf("let in: %ld errors\n", errors);

    /* Taken without a handler. */
    int fd = signalfd(-1, &block, SFD_CLOEXEC);
    for (long i = 0; i < many / 4; i++) {
        siginfo_t info;
        struct signalfd_siginfo read_info;
        union sigval value = {.sival_int = (int)i};
        CHECK(sigqueue(getpid(), SIGUSR1, value) == 0);
        if (i & 1) {
            errors += !(sigwaitinfo(&block, &info) == SIGUSR1 && info.si_value.sival_int == i && info.si_pid == getpid());
        } else {
            errors += read(fd, &read_info, sizeof read_info) != sizeof read_info || read_info.ssi_int != i;
        }
    }
    printf("taken: %ld errors, %d handled\n", errors, kills - (int)(many / 4 * 4));
    sigprocmask(SIG_SETMASK, &open, NULL);

    /* A one-shot timer races with sigsuspend: whether it comes before or in the call, the call
     * ends. */
    handle(SIGALRM, on_tick, 0);
    sigaddset(&block, SIGALRM);
    sigprocmask(SIG_BLOCK, &block, &open);
    ticks = 0;
    for (int i = 0; i < 300; i++) {
        struct itimerval once = {{0, 0}, {0, 1 + i % 50}};
        CHECK(setitimer(ITIMER_REAL, &once, NULL) == 0);
        compute(i % 7);
        while (ticks == i) sigsuspend(&open);
    }
    sigprocmask(SIG_SETMASK, &open, NULL);
    printf("one-shot: %d\n", ticks);

    /* The pipe to itself: a byte for each tick, and reads that restart or fail. */
    CHECK(pipe2(self_pipe, O_NONBLOCK | O_CLOEXEC) == 0);
    handle(SIGALRM, on_tick_write, 0);
    ticks = 0;
    every(700);
    long bytes = 0, interrupted = 0;
    while (bytes < 100) {
        struct pollfd poll_fd = {self_pipe[0], POLLIN, 0};
        int ready = poll(&poll_fd, 1, -1);
        if (ready == -1) {
            CHECK(errno == EINTR);
            interrupted++;
            continue;
        }
        char buffer[16];
        ssize_t got = read(self_pipe[0], buffer, sizeof buffer);
        CHECK(got > 0);
        bytes += got;
    }
    every(0);
    char rest[256];
    ssize_t got = read(self_pipe[0], rest, sizeof rest);
    bytes += got > 0 ? got : 0;
    printf("pipe: %d\n", bytes == ticks);

    /* Children and parents that get many signals. */
    handle(SIGALRM, on_tick, SA_RESTART);
    every(500);
    int statuses = 0;
    for (int i = 0; i < 12; i++) {
        pid_t child = fork();
        if (child == 0) {
            uint64_t sum = compute(3000);
            _Exit(sum == expected ? i : 99);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        statuses += WIFEXITED(status) && WEXITSTATUS(status) == i;
    }
    every(0);
    printf("children: %d\n", statuses);
    return 0;
}
