/* Everything at once: fast timers, queued signals that must come in order, faults in hot loops
 * and in handlers, jumps out of handlers, masks, interrupted calls, all vector registers. Every
 * computation checks itself.
 *
 * Hard for a translator: each of these has its own path, and here the paths interrupt each
 * other. */
#define _GNU_SOURCE
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>
#include "guest.h"

enum { PAGE = 4096 };
static volatile long ticks, faults, nested, queued, out_of_order, while_blocked, jumps, turns;
static volatile sig_atomic_t blocked, may_jump, expected_value = 1;
static sigjmp_buf restart;
static char *page;

static void disturb(void) {
    static volatile double x = 3.5;
    double y = x;
    __asm__ volatile("movapd %0, %%xmm1; movapd %0, %%xmm6; movapd %0, %%xmm7; movapd %0, %%xmm12; movapd %0, %%xmm15; fninit; fldpi; stc; std; cld"
                     : : "x"(y) : "xmm1", "xmm6", "xmm7", "xmm12", "xmm15", "cc", "memory");
}

static void on_tick(int signo, siginfo_t *info, void *context) {
    (void)info;
    int saved = errno;
    ticks++;
    while_blocked += blocked;
    disturb();
    if (ticks % 3 == 0) *(volatile char *)page = (char)signo; /* a fault in the handler */
    if (ticks % 7 == 0) raise(SIGUSR1);
    if (ticks % 11 == 0) {
        ucontext_t *uc = context;
        CHECK(uc->uc_mcontext.gregs[REG_CSGSFS] == 0x2b000000000033 && uc->uc_mcontext.fpregs != NULL);
    }
    errno = saved;
    if (may_jump && ticks % 13 == 0) {
        jumps++;
        siglongjmp(restart, 1);
    }
}

static void on_nested(int signo) {
    (void)signo;
    nested++;
    disturb();
}

/* Makes the page accessible, so that the instruction is repeated; the main loop closes it again. */
static void on_fault(int signo, siginfo_t *info, void *context) {
    ucontext_t *uc = context;
    faults++;
    disturb();
    CHECK(signo == SIGSEGV && (char *)info->si_addr >= page && (char *)info->si_addr < page + 2 * PAGE);
    if (uc->uc_mcontext.gregs[REG_R13] == 0x1313131313131313) {
        /* The hot loop's load: the value comes from here. */
        uc->uc_mcontext.gregs[REG_R12] = 42;
        uc->uc_mcontext.gregs[REG_RIP] += 4;
        return;
    }
    CHECK(mprotect(page, PAGE, PROT_READ | PROT_WRITE) == 0);
}

static void on_queued(int signo, siginfo_t *info, void *context) {
    (void)signo, (void)context;
    queued++;
    while_blocked += blocked;
    out_of_order += info->si_value.sival_int != expected_value;
    expected_value = info->si_value.sival_int + 1;
    disturb();
}

static uint64_t integers(long rounds) {
    uint64_t a = 1, b = 2, c = 3, d = 4, e = 5, f = 6;
    for (long i = 0; i < rounds; i++) {
        a += b * 3;
        __asm__("add %2, %0; adc %3, %1" : "+r"(b), "+r"(c) : "r"(a), "r"(d) : "cc");
        d ^= c << 7, e += d >> 3, f = f * 5 + (e > a);
        if (f & 1) b ^= e;
    }
    return mix(mix(mix(a, b), mix(c, d)), mix(e, f));
}
static uint64_t vectors(long rounds) {
    double v[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    float w[16];
    for (int i = 0; i < 16; i++) w[i] = (float)i;
    for (long i = 0; i < rounds; i++) {
        for (int k = 0; k < 8; k++) v[k] = v[k] * 0.5 + v[(k + 1) & 7] * 0.25 + 1;
        for (int k = 0; k < 16; k++) w[k] = w[k] * 0.75f + w[(k + 5) & 15] * 0.125f;
    }
    return mix(mix_bytes(1, v, sizeof v), mix_bytes(2, w, sizeof w));
}
static uint64_t strings(long rounds) {
    static unsigned char from[300], to[300];
    uint64_t sum = 1;
    for (long i = 0; i < rounds; i += 16) {
        for (int k = 0; k < 300; k++) from[k] = (unsigned char)(k * 7 + i);
        void *s = from, *t = to;
        size_t n = 300;
        __asm__ volatile("rep movsb" : "+S"(s), "+D"(t), "+c"(n) : : "memory");
        sum = mix_bytes(sum, to, 300);
    }
    return sum;
}
static uint64_t x87(long rounds) {
    long double z = 1, y = 3;
    for (long i = 0; i < rounds; i++) z = z * 0.75L + y, y = y * 0.5L + 1 / z;
    return (uint64_t)(z * 1e12L) ^ (uint64_t)(y * 1e12L);
}
static uint64_t calls(long rounds) {
    uint64_t sum = 0;
    pid_t parent = getppid();
    for (long i = 0; i < rounds; i += 32) {
        sum += (uint64_t)(getppid() == parent) * (uint64_t)i;
        sum ^= (uint64_t)syscall(SYS_getpid, i) == (uint64_t)getpid();
    }
    return sum;
}
static uint64_t loads(long rounds) {
    static long other[2] = {7, 9};
    uint64_t sum = 0;
    for (long i = 0; i < rounds; i++) {
        long *from = i % 512 == 511 ? (long *)(page + PAGE) : other;
        register long value __asm__("r12");
        register long mark __asm__("r13") = 0x1313131313131313;
        __asm__ volatile("movq 8(%1), %0" : "=r"(value) : "b"(from), "r"(mark) : "memory");
        sum = mix(sum, (uint64_t)value);
    }
    return sum;
}
static uint64_t masked(long rounds) {
    sigset_t all, old;
    sigfillset(&all);
    sigdelset(&all, SIGSEGV);
    uint64_t sum = 1;
    for (long i = 0; i < rounds; i += 128) {
        int jump = may_jump;
        sigprocmask(SIG_SETMASK, &all, &old);
        blocked = 1;
        sum = mix(sum, integers(20));
        blocked = 0;
        sigprocmask(SIG_SETMASK, &old, NULL);
        may_jump = jump;
    }
    return sum;
}

static uint64_t (*const works[])(long) = {integers, vectors, strings, x87, calls, loads, masked};

static void handle(int signo, void (*handler)(int, siginfo_t *, void *), int flags, int also, int and) {
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | SA_RESTART | flags};
    if (also) sigaddset(&action.sa_mask, also);
    if (and) sigaddset(&action.sa_mask, and);
    CHECK(sigaction(signo, &action, NULL) == 0);
}

int main(int argc, char **argv) {
    long enough = iterations(argc, argv, 300), rounds = 1500, wrong = 0;
    page = mmap(NULL, 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    uint64_t expected[7];
    static char alternate[1 << 16];
    stack_t stack = {alternate, 0, sizeof alternate};
    sigaltstack(&stack, NULL);
    handle(SIGSEGV, on_fault, SA_NODEFER, 0, 0);
    for (int i = 0; i < 7; i++) expected[i] = works[i](rounds);
    handle(SIGRTMIN + 1, on_tick, SA_ONSTACK, SIGRTMIN + 2, 0), handle(SIGRTMIN + 2, on_tick, 0, 0, 0);
    /* No handler jumps out of this one. */
    handle(SIGRTMIN + 3, on_queued, 0, SIGRTMIN + 1, SIGRTMIN + 2);
    signal(SIGUSR1, on_nested);
    /* A child queues numbers for as long as it can. */
    pid_t child = fork();
    if (child == 0) {
        pid_t parent = getppid();
        for (int i = 1; i <= 400; i++) {
            union sigval v = {.sival_int = i};
            while (sigqueue(parent, SIGRTMIN + 3, v) != 0) {
                if (errno != EAGAIN) _exit(1);
            }
            struct timespec moment = {0, 50000};
            if (i % 4 == 0) nanosleep(&moment, NULL);
        }
        _exit(0);
    }
    timer_t timers[2];
    for (int i = 0; i < 2; i++) {
        struct sigevent e = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + 1 + i};
        CHECK(timer_create(CLOCK_MONOTONIC, &e, &timers[i]) == 0);
        struct itimerspec spec = {{0, 100000 + 57000 * i}, {0, 100000}};
        CHECK(timer_settime(timers[i], 0, &spec, NULL) == 0);
    }
    sigset_t open_set;
    sigprocmask(SIG_SETMASK, NULL, &open_set);
    while (ticks < enough || queued < 400 || turns < 40) {
        turns++;
        for (int i = 0; i < 7; i++) {
            if (sigsetjmp(restart, 1) != 0) blocked = 0;
            CHECK(mprotect(page, PAGE, PROT_NONE) == 0);
            may_jump = jumps < enough / 4;
            uint64_t sum = works[i](rounds);
            may_jump = 0;
            if (sum != expected[i]) {
                wrong++;
                printf("work %d: %016lx instead of %016lx\n", i, sum, expected[i]);
            }
        }
    }
    timer_delete(timers[0]), timer_delete(timers[1]);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    printf("%ld wrong, %ld out of order, %ld queued, %ld while blocked, faults %d, nested %d\n", wrong, out_of_order, queued, while_blocked, faults > 20, nested > 5);
    return 0;
}
