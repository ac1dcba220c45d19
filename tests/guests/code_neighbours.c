/* Threads that write functions beside those that other threads are executing, as the threads of
 * a just-in-time compiler do. Each thread executes the function that it has just written and
 * must never get the bytes that were there before. One more thread never leaves its loop by
 * itself. Another one only makes system calls; no invalidation of code may interrupt them.
 *
 * Hard for a translator: an invalidation must wait for other threads, and some of them never
 * stop. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include "guest.h"

enum { PAGE = 4096, PAGES = 64, WRITERS = 4, SLOT = 32 };

static uint8_t *code;
static long rounds;
static int stop;
static unsigned long spins;

typedef uint32_t function(void);

/* mov $value, %eax; ret */
static void constant(uint8_t *at, uint32_t value) {
    at[0] = 0xb8;
    memcpy(at + 1, &value, 4);
    at[5] = 0xc3;
}

static uint32_t call(uint8_t *at) { return ((function *)(uintptr_t)at)(); }

static void *writer(void *argument) {
    uint32_t number = (uint32_t)(long)argument;
    for (uint32_t round = 0; round < (uint32_t)rounds; round++) {
        uint8_t *page = code + PAGE * (round / 4 % PAGES);
        uint8_t *own = page + SLOT * (1 + number);
        constant(own, round * WRITERS + number);
        for (int again = 0; again < 20; again++) {
            CHECK(call(own) == round * WRITERS + number);
            /* No thread changes this function. */
            CHECK(call(page) == 77);
        }
    }
    return NULL;
}

static void *spinner(void *unused) {
    (void)unused;
    unsigned long n = 0;
    do n++;
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED));
    spins = n;
    return NULL;
}

static void *sleeper(void *unused) {
    (void)unused;
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
        struct timespec time = {0, 50000};
        CHECK(nanosleep(&time, NULL) == 0);
        CHECK(poll(NULL, 0, 0) == 0);
    }
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t threads[WRITERS], others[2];
    rounds = iterations(argc, argv, 4000);
    code = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(code != MAP_FAILED);
    for (int page = 0; page < PAGES; page++) constant(code + PAGE * page, 77);
    CHECK(pthread_create(&others[0], NULL, spinner, NULL) == 0);
    CHECK(pthread_create(&others[1], NULL, sleeper, NULL) == 0);
    for (long i = 0; i < WRITERS; i++) CHECK(pthread_create(&threads[i], NULL, writer, (void *)i) == 0);
    for (int i = 0; i < WRITERS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < 2; i++) CHECK(pthread_join(others[i], NULL) == 0);
    CHECK(spins > 0);
    puts("all as written");
    return 0;
}
