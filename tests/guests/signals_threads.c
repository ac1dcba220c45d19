/* Signals and threads: fast timers for each thread, each with its own count; signals queued to a
 * process whose threads come and go, none of which may be lost; signals that only one thread
 * leaves unblocked; faults, alternate stacks and jumps in all threads at once.
 *
 * Hard for a translator: a thread that has taken a signal may end before it has delivered it. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "guest.h"

enum { THREADS = 4, QUEUED = 300 };
static __thread int self = -1;
static atomic_long wrong, misdirected, handled[THREADS + 1], sums;
static atomic_int seen[QUEUED];
static pid_t tids[THREADS + 1];

static long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

static struct running {
    timer_t timer;
    long period, earliest, latest, total, last;
} running[THREADS];

/* As in signals_timers.c: what a timer has told of are all expirations until some moment since
 * the last signal. */
static void on_timer(int signo, siginfo_t *info, void *context) {
    (void)signo, (void)context;
    long arrived = now();
    struct running *r = &running[info->si_value.sival_int];
    misdirected += info->si_value.sival_int != self;
    r->total += 1 + info->si_overrun;
    sums += r->total > (arrived - r->earliest) / r->period || r->total < (r->last - r->latest) / r->period;
    r->last = arrived;
    __asm__ volatile("pxor %%xmm5, %%xmm5; fninit; fldpi; stc; std; cld" : : : "xmm5", "cc");
}

static uint64_t compute(long rounds) {
    uint64_t a = 1, b = 2, sum = 0;
    double x = 1;
    for (long i = 0; i < rounds; i++) {
        a = a * 6364136223846793005ULL + 1442695040888963407ULL;
        b ^= b << 13, b ^= b >> 7, b ^= b << 17;
        x = x * 0.75 + (double)(a >> 40) * (double)(b & 7);
        sum += a ^ b;
    }
    return mix(sum, (uint64_t)x);
}
static uint64_t expected;

static void *timed(void *argument) {
    self = (int)(long)argument;
    struct running *r = &running[self];
    struct sigevent e = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGRTMIN + 1, .sigev_value.sival_int = self};
    e._sigev_un._tid = (int)syscall(SYS_gettid);
    CHECK(timer_create(CLOCK_MONOTONIC, &e, &r->timer) == 0);
    sigset_t set, old;
    sigfillset(&set);
    pthread_sigmask(SIG_SETMASK, &set, &old);
    r->period = 100000 + 30000 * self;
    struct itimerspec spec = {{0, r->period}, {0, r->period}};
    r->earliest = now();
    CHECK(timer_settime(r->timer, 0, &spec, NULL) == 0);
    r->latest = r->last = now();
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    while (*(volatile long *)&r->total < 200) wrong += compute(3000) != expected;
    CHECK(timer_delete(r->timer) == 0);
    return NULL;
}

static void on_queued(int signo, siginfo_t *info, void *context) {
    (void)signo, (void)context;
    atomic_fetch_add(&seen[info->si_value.sival_int], 1);
}

static void *short_lived(void *argument) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGRTMIN + 2);
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    wrong += compute(3000) != expected;
    if ((long)argument & 1) {
        struct timespec moment = {0, 100000};
        nanosleep(&moment, NULL);
    }
    return NULL;
}

static atomic_int sending;
static void *sender(void *unused) {
    (void)unused;
    for (int i = 0; i < QUEUED; i++) {
        union sigval v = {.sival_int = i};
        while (sigqueue(getpid(), SIGRTMIN + 2, v) != 0) CHECK(errno == EAGAIN);
        if (i % 3 == 0) sched_yield();
    }
    sending = 0;
    return NULL;
}

static void on_directed(int signo) {
    (void)signo;
    if (self < 0 || syscall(SYS_gettid) != tids[self]) misdirected++;
    handled[self < 0 ? THREADS : self]++;
}

static atomic_int stage;
static void *alone(void *argument) {
    self = (int)(long)argument;
    tids[self] = (pid_t)syscall(SYS_gettid);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGRTMIN + 3);
    /* In turn each is the only one that lets the signal in. */
    while (stage != self) sched_yield();
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    while (handled[self] < 50) {
        if (handled[self] & 1) wrong += compute(3000) != expected;
        else usleep(100);
    }
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    stage++;
    return NULL;
}

static char *page;
static __thread sigjmp_buf out;
static __thread volatile long faults;
static __thread char *low, *high;
static void on_fault(int signo, siginfo_t *info, void *context) {
    char here;
    (void)context;
    faults++;
    if (signo != SIGSEGV || (char *)info->si_addr != page + 8 * self || &here < low || &here >= high) wrong++;
    siglongjmp(out, 1);
}
static void *faulty(void *argument) {
    self = (int)(long)argument;
    low = malloc(65536), high = low + 65536;
    stack_t stack = {low, 0, 65536};
    CHECK(sigaltstack(&stack, NULL) == 0);
    for (int i = 0; i < 300; i++) {
        if (sigsetjmp(out, 1) == 0) *(volatile long *)(page + 8 * self) = i;
        if (i % 16 == 0) wrong += compute(3000) != expected;
    }
    stack.ss_flags = SS_DISABLE;
    sigaltstack(&stack, NULL);
    wrong += faults != 300;
    return NULL;
}

static void handle(int signo, void (*handler)(int, siginfo_t *, void *), int flags) {
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | SA_RESTART | flags};
    CHECK(sigaction(signo, &action, NULL) == 0);
}
static void all(void *(*body)(void *)) {
    pthread_t threads[THREADS];
    for (long i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, body, (void *)i) == 0);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

int main(void) {
    expected = compute(3000);
    handle(SIGRTMIN + 1, on_timer, 0);
    all(timed);
    printf("timers: %ld wrong, %ld misdirected, %ld sums wrong\n", wrong, misdirected, sums);

    /* The main thread never lets it in. */
    handle(SIGRTMIN + 2, on_queued, 0);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGRTMIN + 2), sigaddset(&set, SIGRTMIN + 3);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    sending = 1;
    pthread_t from;
    CHECK(pthread_create(&from, NULL, sender, NULL) == 0);
    for (long i = 0; sending || i < 40; i++) {
        pthread_t two[2];
        for (int k = 0; k < 2; k++) CHECK(pthread_create(&two[k], NULL, short_lived, (void *)(i + k)) == 0);
        for (int k = 0; k < 2; k++) CHECK(pthread_join(two[k], NULL) == 0);
    }
    CHECK(pthread_join(from, NULL) == 0);
    struct timespec zero = {0, 0};
    siginfo_t info;
    while (sigtimedwait(&set, &info, &zero) > 0) atomic_fetch_add(&seen[info.si_value.sival_int], 1);
    long lost = 0, twice = 0;
    for (int i = 0; i < QUEUED; i++) lost += seen[i] == 0, twice += seen[i] > 1;
    printf("queued: %ld lost, %ld twice, %ld wrong\n", lost, twice, wrong);

    struct sigaction action = {.sa_handler = on_directed, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGRTMIN + 3, &action, NULL) == 0);
    pthread_t threads[THREADS];
    for (long i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, alone, (void *)i) == 0);
    while (stage < THREADS) {
        sigset_t pending;
        sigpending(&pending);
        if (!sigismember(&pending, SIGRTMIN + 3)) kill(getpid(), SIGRTMIN + 3);
        usleep(50);
    }
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    printf("directed: %ld misdirected, %ld elsewhere\n", misdirected, handled[THREADS]);

    page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    handle(SIGSEGV, on_fault, SA_ONSTACK);
    all(faulty);
    printf("faults: %ld wrong\n", wrong);
    return 0;
}
