/* An interval timer interrupts a hot loop that makes no system call; the loop's arithmetic must
 * not notice.
 *
 * Hard for a translator: a hot loop must look for signals, and the frame needs the precise
 * state. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>
#include "guest.h"

static volatile sig_atomic_t ticks;
static void on_alarm(int signal) {
    (void)signal;
    ticks++;
    __asm__ volatile("" : : : "rax", "rbx", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15",
                     "xmm0", "xmm1", "xmm15");
}

__attribute__((noinline)) static uint64_t step(uint64_t x) { return x * 6364136223846793005ULL + 1442695040888963407ULL; }

int main(int argc, char **argv) {
    long want = iterations(argc, argv, 5);
    struct sigaction action = {.sa_handler = on_alarm};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    struct itimerval timer = {{0, 2000}, {0, 1000}};
    CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
    /* Two computations of the same sequence, in step with each other, for as long as it takes. */
    uint64_t a = 1, b = 1;
    double fa = 1, fb = 1;
    long rounds = 0;
    while (ticks < want) {
        for (int i = 0; i < 100; i++) {
            a = step(a);
            fa = fa * 0.75 + (double)(a >> 40);
        }
        for (int i = 0; i < 100; i++) {
            b = step(b);
            fb = fb * 0.75 + (double)(b >> 40);
        }
        CHECK(a == b && fa == fb);
        rounds++;
    }
    timer = (struct itimerval){{0, 0}, {0, 0}};
    CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
    printf("ticks enough: %d, rounds some: %d\n", ticks >= want, rounds > 0);
    /* A loop that only a handler can end: nothing in it but a test. */
    ticks = 0;
    ualarm(2000, 0);
    while (!ticks) {
    }
    printf("left the empty loop\n");
    alarm(0);
    /* pause is ended by the signal, with EINTR. */
    ticks = 0;
    timer = (struct itimerval){{0, 0}, {0, 3000}};
    sigset_t block, old;
    sigemptyset(&block);
    sigaddset(&block, SIGALRM);
    sigprocmask(SIG_BLOCK, &block, &old);
    setitimer(ITIMER_REAL, &timer, NULL);
    while (!ticks) sigsuspend(&old);
    printf("suspended until the tick\n");
    return 0;
}
