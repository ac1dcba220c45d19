// Threads that do everything at once for a while, at random from a seed: allocate, map and unmap, change protections of
// code and data, generate code, fork, spawn threads, send each other signals, under a timer. Arguments: seed, milliseconds,
// threads. Whatever happens is checked where it happens; a watchdog ends what hangs.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MOST 64

static pthread_t threads[MOST];
static int count;
static volatile int stop, ready;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static long balance, sent, received, ticks;

static void fail(const char *what) {
    dprintf(1, "failed: %s (%s)\n", what, strerror(errno));
    _exit(99);
}

static void on_signal(int signo) {
    int saved = errno;
    __atomic_fetch_add(signo == SIGALRM ? &ticks : &received, 1, __ATOMIC_RELAXED);
    errno = saved;
}

static uint64_t next(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

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
    long *page = mmap(NULL, pages * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) fail("mmap");
    page[3] = (long)pages;
    if (mprotect(page, 4096, PROT_READ) != 0 || page[3] != (long)pages) fail("mprotect");
    if (next(random) % 2 && madvise(page, pages * 4096, MADV_DONTNEED) == 0 && page[3] != 0) fail("madvise");
    munmap(page, pages * 4096);
}

static void use_code(uint64_t *random) {
    int value = (int)next(random);
    unsigned char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) fail("mmap");
    page[0] = 0xb8;
    memcpy(page + 1, &value, 4);
    page[5] = 0xc3;
    mprotect(page, 4096, PROT_READ | PROT_EXEC);
    int (*function)(void) = (int (*)(void))(uintptr_t)page;
    for (int i = 0; i < 20; i++)
        if (function() != value) fail("code of another");
    munmap(page, 4096);
}

static void use_lock(uint64_t *random) {
    long amount = (long)(next(random) % 100);
    pthread_mutex_lock(&mutex);
    balance += amount;
    pthread_mutex_unlock(&mutex);
    sched_yield();
    pthread_mutex_lock(&mutex);
    balance -= amount;
    pthread_mutex_unlock(&mutex);
}

static void *child_thread(void *argument) { return (void *)((long)argument * 3); }

static void use_thread(uint64_t *random) {
    long number = (long)(next(random) % 1000);
    pthread_t thread;
    void *result;
    if (pthread_create(&thread, NULL, child_thread, (void *)number) != 0) fail("pthread_create");
    pthread_join(thread, &result);
    if ((long)result != number * 3) fail("pthread_join");
}

static void use_fork(uint64_t *random) {
    int status, expected = (int)(next(random) % 200);
    pid_t child = fork();
    if (child < 0) fail("fork");
    if (child == 0) {
        uint64_t own = next(random) | 1;
        use_memory(&own);
        use_code(&own);
        use_thread(&own);
        _exit(expected);
    }
    pid_t ended;
    while ((ended = waitpid(child, &status, 0)) < 0 && errno == EINTR) {}
    if (ended != child || !WIFEXITED(status) || WEXITSTATUS(status) != expected) fail("child");
}

static void use_signal(uint64_t *random) {
    if (pthread_kill(threads[next(random) % (uint64_t)count], SIGUSR1) == 0)
        __atomic_fetch_add(&sent, 1, __ATOMIC_RELAXED);
}

static uint64_t compute(uint64_t *random) {
    uint64_t sum = next(random);
    for (int i = 0; i < 3000; i++) sum = sum * 6364136223846793005u + (uint64_t)i;
    return sum;
}

static void *body(void *argument) {
    uint64_t random = (uint64_t)argument * 0x9e3779b97f4a7c15u | 1;
    uint64_t sum = 0;
    while (!ready) sched_yield();
    while (!stop) {
        switch (next(&random) % 32) {
        case 0: use_fork(&random); break;
        case 1: case 2: use_thread(&random); break;
        case 3: case 4: case 5: use_code(&random); break;
        case 6: case 7: case 8: use_mapping(&random); break;
        case 9: case 10: case 11: case 12: use_signal(&random); break;
        case 13: case 14: case 15: case 16: use_lock(&random); break;
        case 17: case 18: case 19: use_memory(&random); break;
        default: sum += compute(&random);
        }
    }
    return (void *)sum;
}

static void on_hang(int signo) {
    (void)signo;
    dprintf(1, "hangs\n");
    _exit(98);
}

int main(int argc, char **argv) {
    long seed = argc > 1 ? atol(argv[1]) : 1, milliseconds = argc > 2 ? atol(argv[2]) : 300;
    count = argc > 3 ? atoi(argv[3]) : 8;
    if (count > MOST) count = MOST;
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
    action.sa_handler = on_hang;
    sigaction(SIGRTMIN + 5, &action, NULL);
    timer_t watchdog;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + 5};
    struct itimerspec limit = {.it_value.tv_sec = 60 + milliseconds / 100};
    timer_create(CLOCK_MONOTONIC, &event, &watchdog);
    timer_settime(watchdog, 0, &limit, NULL);
    for (long i = 0; i < count; i++)
        if (pthread_create(&threads[i], NULL, body, (void *)(seed * 1000 + i)) != 0) fail("pthread_create");
    struct itimerval often = {{0, 1000}, {0, 1000}}, never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &often, NULL);
    ready = 1;
    struct timespec left = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {}
    stop = 1;
    for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
    setitimer(ITIMER_REAL, &never, NULL);
    printf("balance %ld, %s, %s\n", balance, received <= sent && (sent == 0 || received > 0) ? "signals" : "no signals",
           ticks > 0 ? "ticks" : "no ticks");
    return 0;
}
