/* Threads write code that other threads are executing at that moment, without telling them. Each
 * thread must see the last state in the end, and never a state that was not written. The code is
 * in pages that are writable and executable at once, and is also written through another mapping
 * of the same memory.
 *
 * Hard for a translator: no call announces the change, and writes through the other mapping do
 * not fault on the page that was translated. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>
#include "guest.h"

enum { PAGE = 4096, READERS = 3 };

/* The mapping that is written, and the one that is executed. */
static uint8_t *written, *executed;
static int rounds, seen[READERS], wanted;

/* mov $value, %eax; ret: the value lies in one aligned word, which is stored at once. */
static void constant(uint8_t *at, uint32_t value) {
    memset(at, 0x90, 7);
    at[7] = 0xb8;
    memcpy(at + 8, &value, 4);
    at[12] = 0xc3;
}

static void change(uint8_t *at, uint32_t value) { __atomic_store_n((uint32_t *)(at + 8), value, __ATOMIC_SEQ_CST); }

static uint32_t call(const uint8_t *at) { return ((uint32_t(*)(void))(uintptr_t)at)(); }

static void *reader(void *argument) {
    long number = (long)argument;
    for (int round = 1; round <= rounds; round++) {
        uint32_t last = 0, now;
        int turns = 0;
        do {
            if (++turns % 8 == 0) sched_yield();
            now = call(executed);
            CHECK(now >= last && now <= (uint32_t)__atomic_load_n(&wanted, __ATOMIC_SEQ_CST));
            last = now;
        } while (now < (uint32_t)round);
        __atomic_store_n(&seen[number], (int)now, __ATOMIC_SEQ_CST);
    }
    return NULL;
}

/* A loop that a writer ends: it runs until nops have replaced its jump back. */
static void *looper(void *unused) {
    (void)unused;
    call(executed + 64);
    return NULL;
}

static void run(const char *name) {
    pthread_t threads[READERS + 1];
    wanted = 0;
    memset(seen, 0, sizeof seen);
    constant(written, 0);
    /* 1: inc %eax; pause; jmp 1b; the jump lies in one word */
    memcpy(written + 64, "\x90\x31\xc0\xff\xc0\xf3\x90\x90\xeb\xf9\xc3", 11);
    for (long i = 0; i < READERS; i++) CHECK(pthread_create(&threads[i], NULL, reader, (void *)i) == 0);
    CHECK(pthread_create(&threads[READERS], NULL, looper, NULL) == 0);
    for (int round = 1; round <= rounds; round++) {
        __atomic_store_n(&wanted, round, __ATOMIC_SEQ_CST);
        change(written, (uint32_t)round);
        CHECK(call(executed) == (uint32_t)round);
        for (int i = 0; i < READERS; i++)
            while (__atomic_load_n(&seen[i], __ATOMIC_SEQ_CST) < round) sched_yield();
        if (round == 5) __atomic_store_n((uint16_t *)(written + 64 + 8), 0x9090, __ATOMIC_SEQ_CST);
    }
    for (int i = 0; i <= READERS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    printf("%s: %d rounds\n", name, rounds);
}

int main(int argc, char **argv) {
    alarm(120);
    rounds = (int)iterations(argc, argv, 60);
    written = executed = mmap(NULL, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(written != MAP_FAILED);
    run("written and executed");
    int memory = memfd_create("code", 0);
    CHECK(memory >= 0 && ftruncate(memory, PAGE) == 0);
    written = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    executed = mmap(NULL, PAGE, PROT_READ | PROT_EXEC, MAP_SHARED, memory, 0);
    CHECK(written != MAP_FAILED && executed != MAP_FAILED);
    run("written here, executed there");
    return 0;
}
