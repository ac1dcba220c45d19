// What threads see of each other's memory: store buffering with and without fences, message
// passing, atomic operations of each width, and 16-byte ones. Only results that the processor
// forbids are counted.
//
// Hard for a translator: loads and stores that it removes, moves or defers change the order.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define ROUNDS 20000

static struct {
    volatile int x __attribute__((aligned(64)));
    volatile int y __attribute__((aligned(64)));
    volatile int started __attribute__((aligned(64)));
} cells;
static volatile int results[2];
static pthread_barrier_t barrier;
static long forbidden;

static void meet(void) { pthread_barrier_wait(&barrier); }

static void *buffering(void *argument) {
    long number = (long)argument;
    for (int round = 0; round < ROUNDS / 100; round++) {
        if (number == 0) cells.x = cells.y = cells.started = 0;
        meet();
        __atomic_fetch_add(&cells.started, 1, __ATOMIC_SEQ_CST);
        while (cells.started < 2) {}
        if (number == 0) {
            cells.x = 1;
            __atomic_thread_fence(__ATOMIC_SEQ_CST);
            results[0] = cells.y;
        } else {
            cells.y = 1;
            __atomic_thread_fence(__ATOMIC_SEQ_CST);
            results[1] = cells.x;
        }
        meet();
        if (number == 0 && results[0] == 0 && results[1] == 0) forbidden++;
    }
    return NULL;
}

// The writer sets x and then y to ever greater numbers; a thread that reads y and then x sees no
// smaller x.
static void *passing(void *argument) {
    long wrong = 0;
    if (argument == NULL) {
        for (int i = 1; i <= ROUNDS * 5; i++) {
            cells.x = i;
            cells.y = i;
        }
    } else {
        int y;
        do {
            y = cells.y;
            int x = cells.x;
            if (x < y) wrong++;
        } while (y < ROUNDS * 5);
    }
    return (void *)wrong;
}

static uint8_t bytes;
static uint16_t words;
static uint32_t doubles;
static uint64_t quads, swapped, bits;
static __int128 wide __attribute__((aligned(16)));

static int wide_compare_exchange(__int128 *at, __int128 *old, __int128 new) {
    uint64_t low = (uint64_t)*old, high = (uint64_t)(*old >> 64);
    uint8_t done;
    __asm__ volatile("lock cmpxchg16b %1; sete %0"
                     : "=q"(done), "+m"(*at), "+a"(low), "+d"(high)
                     : "b"((uint64_t)new), "c"((uint64_t)(new >> 64))
                     : "memory");
    *old = (__int128)high << 64 | low;
    return done;
}

static void *atomics(void *argument) {
    long number = (long)argument;
    for (int i = 0; i < ROUNDS; i++) {
        __atomic_fetch_add(&bytes, 1, __ATOMIC_SEQ_CST);
        __atomic_fetch_sub(&words, 3, __ATOMIC_SEQ_CST);
        __atomic_fetch_add(&doubles, 5, __ATOMIC_RELAXED);
        __atomic_fetch_xor(&bits, (uint64_t)i << (number * 8), __ATOMIC_SEQ_CST);
        uint64_t old = __atomic_load_n(&quads, __ATOMIC_RELAXED);
        while (!__atomic_compare_exchange_n(&quads, &old, old + 7, 1, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {}
        __int128 seen = wide;
        while (!wide_compare_exchange(&wide, &seen, seen + ((__int128)1 << 64) + 1)) {}
    }
    // A thread that takes a token puts one back: none is lost.
    uint64_t token = (uint64_t)number + 1;
    for (int i = 0; i < ROUNDS; i++) token = __atomic_exchange_n(&swapped, token, __ATOMIC_ACQ_REL);
    return (void *)token;
}

int main(void) {
    alarm(120);
    pthread_t threads[4];
    void *result;
    pthread_barrier_init(&barrier, NULL, 2);
    for (long i = 0; i < 2; i++) pthread_create(&threads[i], NULL, buffering, (void *)i);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    printf("store buffering with fences: %ld forbidden\n", forbidden);
    cells.x = cells.y = 0;
    long wrong = 0;
    for (long i = 0; i < 3; i++) pthread_create(&threads[i], NULL, passing, (void *)i);
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], &result);
        wrong += (long)result;
    }
    printf("message passing: %ld forbidden\n", wrong);
    for (long i = 0; i < 4; i++) pthread_create(&threads[i], NULL, atomics, (void *)i);
    uint64_t tokens = 0;
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], &result);
        tokens += (uint64_t)result;
    }
    printf("%u %u %u %lu %lu %lu %lu %lu\n", bytes, words, doubles, quads, bits, (uint64_t)wide, (uint64_t)(wide >> 64),
           tokens + swapped);
    return 0;
}
