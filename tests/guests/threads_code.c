// Code that is mapped and unmapped while other threads run. A thread maps a function, publishes it,
// withdraws it when no thread uses it any more, and puts another one at the same address. No thread
// may ever execute an old one.
//
// Hard for a translator: other threads may be in translated code that is linked to the old
// function.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define READERS 3

typedef int function(void);
static function *current;
static int expected, generation, acknowledged[READERS + 1];
static volatile int stop;
static long calls[READERS], wrong;
static volatile long spun;

static void *reader(void *argument) {
    long number = (long)argument;
    int seen = 0;
    for (;;) {
        int now = __atomic_load_n(&generation, __ATOMIC_ACQUIRE);
        if (now < 0) return NULL;
        if (now % 2 == 1) {
            // A function is published; its result must be the value of this generation.
            int value = current();
            if (value != expected) __atomic_fetch_add(&wrong, 1, __ATOMIC_SEQ_CST);
            calls[number]++;
        }
        if (now != seen) {
            seen = now;
            __atomic_store_n(&acknowledged[number], now, __ATOMIC_RELEASE);
        }
    }
}

static void *spinner(void *unused) {
    (void)unused;
    while (!stop) spun++;
    return NULL;
}

static void advance(void) {
    int next = generation + 1;
    __atomic_store_n(&generation, next, __ATOMIC_RELEASE);
    for (int i = 0; i < READERS; i++)
        while (__atomic_load_n(&acknowledged[i], __ATOMIC_ACQUIRE) != next) usleep(10);
}

static void put(unsigned char *page, int value) {
    // mov eax, value; ret
    page[0] = 0xb8;
    memcpy(page + 1, &value, 4);
    page[5] = 0xc3;
}

int main(int count, char **arguments) {
    alarm(120);
    int rounds = count > 1 ? atoi(arguments[1]) : 60;
    pthread_t threads[READERS + 1];
    for (long i = 0; i < READERS; i++) pthread_create(&threads[i], NULL, reader, (void *)i);
    pthread_create(&threads[READERS], NULL, spinner, NULL);
    unsigned char *page = NULL;
    for (int round = 0; round < rounds; round++) {
        expected = round * 3 + 1;
        switch (round % 3) {
        case 0:
            page = mmap(page, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | (page ? MAP_FIXED : 0), -1, 0);
            put(page, expected);
            mprotect(page, 4096, PROT_READ | PROT_EXEC);
            break;
        case 1:
            mprotect(page, 4096, PROT_READ | PROT_WRITE);
            put(page, expected);
            mprotect(page, 4096, PROT_READ | PROT_EXEC);
            break;
        default:
            munmap(page, 4096);
            page = mmap(page, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
            put(page, expected);
        }
        current = (function *)(uintptr_t)page;
        advance();
        if (current() != expected) wrong++;
        usleep(200);
        advance();
    }
    __atomic_store_n(&generation, -1, __ATOMIC_RELEASE);
    stop = 1;
    for (int i = 0; i <= READERS; i++) pthread_join(threads[i], NULL);
    int all = 1;
    for (int i = 0; i < READERS; i++) all &= calls[i] >= rounds;
    printf("%d rounds, %ld wrong, %s\n", rounds, wrong, all ? "all called" : "somebody did not call");
    return 0;
}
