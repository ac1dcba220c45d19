/* Code in shared anonymous memory: written and protected again and again, written while it may be
 * executed, through a second mapping of the same memory, and by a child. Each call must execute what
 * is there. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

#define SIZE 8192

typedef int function(int *);

/* `add dword [rdi], 1; mov eax, value; ret`, with a store before the value. */
static void write_function(unsigned char *at, int value) {
    const unsigned char code[] = {0x83, 0x07, 1, 0xb8, 0, 0, 0, 0, 0xc3};
    memcpy(at, code, sizeof code);
    memcpy(at + 4, &value, sizeof value);
}

static int call(const unsigned char *at) {
    int stores = 0, value = ((function *)(uintptr_t)at)(&stores);
    CHECK(stores == 1);
    return value;
}

static long call_often(const unsigned char *at, int times) {
    long sum = 0;
    for (int i = 0; i < times; i++) sum += call(at);
    return sum;
}

static unsigned char *map(int prot) {
    unsigned char *at = mmap(NULL, SIZE, prot, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    return at;
}

static unsigned char *code;
static volatile int stop;

static void *calls(void *argument) {
    (void)argument;
    int last = 0;
    while (!stop) {
        int value = call(code);
        CHECK(value >= last);
        last = value;
    }
    return NULL;
}

int main(void) {
    const int rw = PROT_READ | PROT_WRITE, rx = PROT_READ | PROT_EXEC;
    code = map(rw);
    for (int i = 1; i <= 50; i++) {
        CHECK(mprotect(code, SIZE, rw) == 0);
        write_function(code, i);
        write_function(code + 4090, -i);
        CHECK(mprotect(code, SIZE, rx) == 0);
        CHECK(call_often(code, 100) == 100L * i && call_often(code + 4090, 100) == -100L * i);
    }
    puts("protected: ok");

    CHECK(mprotect(code, SIZE, rw | PROT_EXEC) == 0);
    for (int i = 1; i <= 200; i++) {
        memcpy(code + 4, &i, sizeof i);
        CHECK(call(code) == i && call_often(code, i % 7) == (long)i * (i % 7));
    }
    puts("written: ok");

    /* A second mapping of the same memory, and the first one that cannot be written. */
    unsigned char *other = mremap(code, 0, SIZE, MREMAP_MAYMOVE);
    CHECK(other != MAP_FAILED && mprotect(code, SIZE, rx) == 0);
    for (int i = 1; i <= 200; i++) {
        memcpy(other + 4, &i, sizeof i);
        CHECK(call(code) == i && call_often(code, i % 7) == (long)i * (i % 7));
    }
    puts("a second mapping: ok");

    unsigned char *moved = map(rw);
    write_function(moved, 1);
    CHECK(mprotect(moved, SIZE, rx) == 0 && call_often(moved, 100) == 100);
    /* To where the other one was; what was there is not executed any more. */
    CHECK(mremap(moved, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, other) == other);
    CHECK(call_often(other, 100) == 100);
    CHECK(mprotect(other, SIZE, rw) == 0);
    write_function(other, 2);
    CHECK(mprotect(other, SIZE, rx) == 0 && call_often(other, 100) == 200);
    puts("moved: ok");

    /* A thread executes it while it is written. */
    code = map(rw | PROT_EXEC);
    write_function(code, 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, calls, NULL) == 0);
    for (int i = 1; i <= 300; i++) {
        __atomic_store_n((int *)(void *)(code + 4), i, __ATOMIC_RELAXED);
        if (i % 10 == 0) usleep(200);
        CHECK(call(code) == i);
    }
    stop = 1;
    CHECK(pthread_join(thread, NULL) == 0);
    puts("a thread: ok");

    /* Children write it, the parent executes it, and the other way round. */
    unsigned char *late = map(rw);
    write_function(late, 0);
    CHECK(mprotect(late, SIZE, rx) == 0 && call_often(late, 100) == 0);
    for (int i = 1; i <= 20; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            CHECK(call(late) == i - 1);
            CHECK(mprotect(late, SIZE, rw) == 0);
            write_function(late, i);
            CHECK(mprotect(late, SIZE, rx) == 0);
            _exit(call(late) == i ? 7 : 8);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 7);
        CHECK(call(late) == i && call_often(late, 50) == 50L * i);
    }
    unsigned char *last = map(rw | PROT_EXEC);
    write_function(last, 5);
    CHECK(call_often(last, 100) == 500);
    puts("children: ok");
    return 0;
}
