// Threads that do everything at once for a while, at random from a seed: allocate, map and unmap,
// change protections, write code in every way and run it, fork, spawn threads, fault, queue signals
// for each other under timers of their own. Arguments: seed, milliseconds, threads. Each result is
// checked where it arises; no queued signal and no expiration of a timer may be lost; a watchdog
// names the thread that gets stuck, and its operation.
//
// Hard for a translator: all its locks and protocols meet each other at random times.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 64, PAGE = 4096, SLOT = 64, STUCK_SECONDS = 60 };
#define QUEUED (SIGRTMIN + 1)
#define TIMER (SIGRTMIN + 2)

typedef int function(void);

static struct worker {
    pthread_t thread;
    uint64_t random;
    // The number of the loop's iterations, and the current operation.
    long turns;
    const char *operation;
    // Queued signals.
    long sent, received;
    // The timer: reported expirations, and the two times between which it was started.
    timer_t timer;
    long expirations, earliest, latest, period, wrong;
    sigjmp_buf recover;
    volatile int recovers;
    int pipe[2];
} workers[MOST];

static int count;
static volatile int stop, ready;
static int started, quiet;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_rwlock_t code_lock = PTHREAD_RWLOCK_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static long balance, ticks;
static unsigned char *own_slots, *common;
static int common_value, memory_file;
static char *program;
static __thread struct worker *self;

static void fail(const char *what) {
    dprintf(1, "failed: %s (%s)\n", what, strerror(errno));
    _exit(99);
}

static long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000 + time.tv_nsec;
}

static uint64_t next(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

// Handlers.

static void on_tick(int signo) {
    (void)signo;
    __atomic_fetch_add(&ticks, 1, __ATOMIC_RELAXED);
}

static void on_queued(int signo, siginfo_t *info, void *context) {
    (void)signo, (void)context;
    if (info->si_code != SI_QUEUE || info->si_value.sival_ptr != self) fail("a signal for another");
    self->received++;
}

// Reported are all expirations until now and no others: each signal has its overrun count.
static void on_timer(int signo, siginfo_t *info, void *context) {
    (void)signo, (void)context;
    int saved = errno;
    self->expirations += 1 + info->si_overrun;
    if (self->expirations > (now() - self->earliest) / self->period) self->wrong++;
    errno = saved;
}

static void on_fault(int signo) {
    (void)signo;
    if (self == NULL || !self->recovers) {
        signal(SIGSEGV, SIG_DFL);
        return;
    }
    siglongjmp(self->recover, 1);
}

// Operations.

static void use_memory(uint64_t *random) {
    size_t size = 1 + next(random) % 20000;
    unsigned char *block = malloc(size);
    memset(block, (int)size, size);
    for (size_t i = 0; i < size; i += 97)
        if (block[i] != (unsigned char)size) fail("memory of another");
    free(block);
}

static void use_mapping(uint64_t *random) {
    size_t pages = 1 + next(random) % 4;
    long *page = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) fail("mmap");
    page[3] = (long)pages;
    if (mprotect(page, PAGE, PROT_READ) != 0 || page[3] != (long)pages) fail("mprotect");
    if (next(random) % 2 && madvise(page, pages * PAGE, MADV_DONTNEED) == 0 && page[3] != 0) fail("madvise");
    munmap(page, pages * PAGE);
}

static void constant(unsigned char *at, int value) {
    at[0] = 0xb8; // mov $value, %eax; ret
    memcpy(at + 1, &value, 4);
    at[5] = 0xc3;
}

static int call(unsigned char *at) { return ((function *)(uintptr_t)at)(); }

static void use_code(uint64_t *random) {
    int value = (int)next(random);
    unsigned char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) fail("mmap");
    constant(page, value);
    mprotect(page, PAGE, PROT_READ | PROT_EXEC);
    for (int i = 0; i < 20; i++)
        if (call(page) != value) fail("code of another");
    if (next(random) % 2) {
        mprotect(page, PAGE, PROT_READ | PROT_WRITE);
        constant(page, ++value);
        mprotect(page, PAGE, PROT_READ | PROT_EXEC);
        if (call(page) != value) fail("code that was there before");
    }
    munmap(page, PAGE);
}

// Each thread has a function of its own in a page that all write to.
static void use_own_slot(uint64_t *random) {
    unsigned char *at = own_slots + SLOT * (self - workers);
    int value = (int)next(random);
    constant(at, value);
    for (int i = 0; i < 5; i++)
        if (call(at) != value) fail("own code");
    unsigned char bytes[6];
    constant(bytes, value + 1);
    if (next(random) % 2) {
        if (pwrite(memory_file, bytes, 6, (off_t)(uintptr_t)at) != 6) fail("/proc/self/mem");
    } else {
        if (write(self->pipe[1], bytes, 6) != 6) fail("pipe");
        ssize_t got;
        while ((got = read(self->pipe[0], at, 6)) < 0 && errno == EINTR) {}
        if (got != 6) fail("pipe into code");
    }
    if (call(at) != value + 1) fail("own code, written by the kernel");
}

// One function that all threads call, and that the holder of the lock rewrites.
static void use_common(uint64_t *random) {
    if (next(random) % 4 == 0) {
        pthread_rwlock_wrlock(&code_lock);
        common_value = (int)next(random);
        constant(common, common_value);
    } else {
        pthread_rwlock_rdlock(&code_lock);
    }
    for (int i = 0; i < 5; i++)
        if (call(common) != common_value) fail("common code");
    pthread_rwlock_unlock(&code_lock);
}

static void use_lock(uint64_t *random) {
    long amount = (long)(next(random) % 100);
    pthread_mutex_lock(&mutex);
    balance += amount;
    pthread_mutex_unlock(&mutex);
    sched_yield();
    pthread_mutex_lock(&mutex);
    balance -= amount;
    if (amount < 30) {
        struct timespec soon;
        clock_gettime(CLOCK_REALTIME, &soon);
        soon.tv_nsec = (soon.tv_nsec + 200000) % 1000000000;
        pthread_cond_timedwait(&changed, &mutex, &soon);
    } else {
        pthread_cond_signal(&changed);
    }
    pthread_mutex_unlock(&mutex);
}

static void *child_thread(void *argument) { return (void *)((long)argument * 3); }

static void use_thread(uint64_t *random) {
    long number = (long)(next(random) % 1000);
    pthread_t thread;
    void *result;
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); // what is queued is not for the new thread
    if (pthread_create(&thread, NULL, child_thread, (void *)number) != 0) fail("pthread_create");
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_join(thread, &result);
    if ((long)result != number * 3) fail("pthread_join");
}

static void wait_for(pid_t child, int expected) {
    int status;
    pid_t ended;
    while ((ended = waitpid(child, &status, 0)) < 0 && errno == EINTR) {}
    if (ended != child || !WIFEXITED(status) || WEXITSTATUS(status) != expected) fail("child");
}

static void use_fork(uint64_t *random) {
    int expected = (int)(next(random) % 90);
    pid_t child = fork();
    if (child < 0) fail("fork");
    if (child == 0) {
        uint64_t own = next(random) | 1;
        use_memory(&own);
        use_code(&own);
        use_thread(&own);
        _exit(expected);
    }
    wait_for(child, expected);
}

static void use_program(uint64_t *random) {
    (void)random;
    pid_t child;
    char *arguments[] = {program, "program", NULL};
    if (posix_spawn(&child, program, NULL, NULL, arguments, environ) != 0) fail("posix_spawn");
    wait_for(child, 7);
}

static void use_signal(uint64_t *random) {
    struct worker *other = &workers[next(random) % (uint64_t)count];
    __atomic_fetch_add(&other->sent, 1, __ATOMIC_SEQ_CST);
    if (pthread_sigqueue(other->thread, QUEUED, (union sigval){.sival_ptr = other}) != 0)
        __atomic_fetch_sub(&other->sent, 1, __ATOMIC_SEQ_CST);
    if (next(random) % 8 == 0) kill(getpid(), SIGUSR1);
}

// Blocks delivery for a while, then waits for the signals that came meanwhile.
static void use_mask(uint64_t *random) {
    sigset_t some, old;
    sigemptyset(&some);
    sigaddset(&some, QUEUED);
    pthread_sigmask(SIG_BLOCK, &some, &old);
    long before = self->received;
    use_signal(random);
    if (self->received != before) fail("delivered while blocked");
    struct timespec moment = {0, 300000};
    siginfo_t info;
    if (next(random) % 2 && sigtimedwait(&some, &info, &moment) == QUEUED) {
        if (info.si_value.sival_ptr != self) fail("waited for the signal of another");
        self->received++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

static void use_fault(uint64_t *random) {
    volatile char *page = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) fail("mmap");
    volatile uint64_t kept = next(random);
    uint64_t expected = kept;
    if (sigsetjmp(self->recover, 1) == 0) {
        self->recovers = 1;
        *page = 1;
        fail("no fault");
    }
    self->recovers = 0;
    if (kept != expected) fail("a fault changed a variable");
    munmap((void *)page, PAGE);
}

static void use_sleep(uint64_t *random) {
    struct timespec left = {0, (long)(next(random) % 400000)};
    while (nanosleep(&left, &left) != 0)
        if (errno != EINTR) fail("nanosleep");
}

static uint64_t compute(uint64_t *random) {
    uint64_t sum = next(random), again = sum;
    for (int i = 0; i < 3000; i++) sum = sum * 6364136223846793005u + (uint64_t)i;
    for (int i = 0; i < 3000; i++) again = again * 6364136223846793005u + (uint64_t)i;
    if (sum != again) fail("arithmetic");
    return sum;
}

static void use_arithmetic(uint64_t *random) { compute(random); }

static const struct operation {
    const char *name;
    void (*perform)(uint64_t *);
    int weight;
} operations[] = {
    {"fork", use_fork, 4},           {"program", use_program, 1},   {"thread", use_thread, 8},  {"code", use_code, 12},
    {"own slot", use_own_slot, 12},  {"common", use_common, 12},    {"mapping", use_mapping, 12}, {"signal", use_signal, 16},
    {"mask", use_mask, 8},           {"fault", use_fault, 8},       {"lock", use_lock, 16},     {"memory", use_memory, 12},
    {"sleep", use_sleep, 8},         {"arithmetic", use_arithmetic, 40},
};

static const struct operation *choose(uint64_t *random) {
    const struct operation *operation = operations;
    int total = 0;
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++) total += operations[i].weight;
    for (int at = (int)(next(random) % (uint64_t)total); at >= operation->weight; operation++) at -= operation->weight;
    return operation;
}

static void *body(void *argument) {
    self = argument;
    __atomic_fetch_add(&started, 1, __ATOMIC_SEQ_CST);
    struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = TIMER};
    event._sigev_un._tid = (int)syscall(SYS_gettid);
    self->period = 1000000 + 100000 * (self - workers);
    struct itimerspec often = {{0, self->period}, {0, self->period}}, never = {{0, 0}, {0, 0}};
    while (!ready) sched_yield();
    sigset_t timer, old;
    sigemptyset(&timer);
    sigaddset(&timer, TIMER);
    pthread_sigmask(SIG_BLOCK, &timer, &old);
    if (timer_create(CLOCK_MONOTONIC, &event, &self->timer) != 0) fail("timer_create");
    self->earliest = now();
    if (timer_settime(self->timer, 0, &often, NULL) != 0) fail("timer_settime");
    self->latest = now();
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    // Each thread makes some iterations, however short the time is.
    while (!stop || self->turns < 3 || *(volatile long *)&self->expirations == 0) {
        const struct operation *operation = choose(&self->random);
        __atomic_store_n(&self->operation, operation->name, __ATOMIC_RELAXED);
        operation->perform(&self->random);
        __atomic_fetch_add(&self->turns, 1, __ATOMIC_RELAXED);
    }
    // The last expiration: it tells of all up to a moment that is not before this one.
    __atomic_store_n(&self->operation, "the last expiration", __ATOMIC_RELAXED);
    long due = (now() - self->latest) / self->period;
    while (*(volatile long *)&self->expirations < due) sched_yield();
    pthread_sigmask(SIG_BLOCK, &timer, NULL);
    timer_settime(self->timer, 0, &never, NULL);
    timer_delete(self->timer);
    // All signals that were sent must arrive after the last thread has stopped sending.
    __atomic_store_n(&self->operation, "the last signals", __ATOMIC_RELAXED);
    __atomic_fetch_add(&quiet, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&quiet, __ATOMIC_SEQ_CST) < count) sched_yield();
    while (*(volatile long *)&self->received < __atomic_load_n(&self->sent, __ATOMIC_SEQ_CST)) sched_yield();
    if (self->received != self->sent) fail("more signals than were sent");
    return NULL;
}

static void watch(long milliseconds) {
    static long turns[MOST];
    static const char *operation[MOST];
    static long since[MOST];
    long end = now() + milliseconds * 1000000;
    for (int i = 0; i < count; i++) since[i] = now();
    for (int ended = 0; !ended;) {
        struct timespec moment = {0, 5000000};
        nanosleep(&moment, NULL);
        stop = now() > end;
        ended = stop && __atomic_load_n(&quiet, __ATOMIC_SEQ_CST) == count;
        for (int i = 0; i < count; i++) {
            long n = __atomic_load_n(&workers[i].turns, __ATOMIC_RELAXED);
            const char *at = __atomic_load_n(&workers[i].operation, __ATOMIC_RELAXED);
            if (n != turns[i] || at != operation[i]) since[i] = now();
            turns[i] = n, operation[i] = at;
            if (now() - since[i] > STUCK_SECONDS * 1000000000L) {
                dprintf(1, "thread %d is stuck at %s: %ld of %ld signals, %ld expirations\n", i, at ? at : "its start",
                        workers[i].received, workers[i].sent, workers[i].expirations);
                _exit(98);
            }
        }
    }
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "program") == 0) return 7;
    program = argv[0];
    uint64_t seed = argc > 1 ? strtoul(argv[1], NULL, 10) : 1;
    long milliseconds = argc > 2 ? atol(argv[2]) : 300;
    count = argc > 3 ? atoi(argv[3]) : 8;
    if (count > MOST) count = MOST;
    struct sigaction action = {.sa_handler = on_tick, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
    action.sa_handler = on_fault;
    sigaction(SIGSEGV, &action, NULL);
    action.sa_flags |= SA_SIGINFO;
    action.sa_sigaction = on_queued;
    sigaction(QUEUED, &action, NULL);
    action.sa_sigaction = on_timer;
    sigaction(TIMER, &action, NULL);
    own_slots = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memory_file = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    if (own_slots == MAP_FAILED || memory_file < 0) fail("set-up");
    common = own_slots + PAGE;
    constant(common, common_value);
    for (int i = 0; i < count; i++) {
        workers[i].random = (seed * 1000 + (uint64_t)i) * 0x9e3779b97f4a7c15u | 1;
        if (pipe2(workers[i].pipe, O_CLOEXEC) != 0) fail("pipe");
    }
    for (int i = 0; i < count; i++)
        if (pthread_create(&workers[i].thread, NULL, body, &workers[i]) != 0) fail("pthread_create");
    // Signals are sent only when all threads exist.
    while (__atomic_load_n(&started, __ATOMIC_SEQ_CST) < count) sched_yield();
    struct itimerval often = {{0, 1000}, {0, 1000}}, never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &often, NULL);
    ready = 1;
    watch(milliseconds);
    for (int i = 0; i < count; i++) pthread_join(workers[i].thread, NULL);
    setitimer(ITIMER_REAL, &never, NULL);
    long wrong = 0, idle = 0, unheard = 0;
    for (int i = 0; i < count; i++) {
        wrong += workers[i].wrong;
        idle += workers[i].turns == 0;
        unheard += workers[i].expirations == 0;
    }
    printf("balance %ld, %ld sums of expirations wrong, %ld threads idle, %ld timers unheard, %s\n", balance, wrong, idle,
           unheard, ticks > 0 ? "ticks" : "no ticks");
    return 0;
}
