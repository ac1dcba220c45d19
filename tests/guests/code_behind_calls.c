/* Code that changes while calls from it have not returned: by a store, by mprotect and a store,
 * by another mapping, by another thread. Also calls on stacks with equal low pointer bits, with
 * odd stack pointers, and in frames larger than the part of a stack that a translator may
 * remember.
 *
 * Hard for a translator: a remembered host return address must not lead to the translation of
 * the old code. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "guest.h"

typedef uint64_t caller(void (*)(void));

static unsigned char *page;
static long next;

/* sub $8, %rsp; call *%rdi; mov $value, %eax; add $8, %rsp; ret */
static void put_caller(unsigned char *at, uint32_t value) {
    unsigned char code[] = {0x48, 0x83, 0xec, 8, 0xff, 0xd7, 0xb8, 0, 0, 0, 0, 0x48, 0x83, 0xc4, 8, 0xc3};
    memcpy(code + 7, &value, 4);
    memcpy(at, code, sizeof code);
}

static void nothing(void) {}
static void by_store(void) { put_caller(page, next); }

static void by_protection(void) {
    CHECK(mprotect(page, 4096, PROT_READ | PROT_WRITE) == 0);
    put_caller(page, next);
    CHECK(mprotect(page, 4096, PROT_READ | PROT_EXEC) == 0);
}

static void by_mapping(void) {
    unsigned char *other = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(other != MAP_FAILED);
    put_caller(other, next);
    CHECK(mprotect(other, 4096, PROT_READ | PROT_EXEC) == 0);
    CHECK(mremap(other, 4096, 4096, MREMAP_MAYMOVE | MREMAP_FIXED, page) == page);
}

static void change(const char *how, int protection, void (*with)(void), long rounds) {
    page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    put_caller(page, 0);
    CHECK(mprotect(page, 4096, protection) == 0);
    for (long i = 1; i <= rounds; i++) {
        next = i;
        CHECK(((caller *)page)(with) == (uint64_t)i);
        CHECK(((caller *)page)(nothing) == (uint64_t)i);
    }
    CHECK(munmap(page, 4096) == 0);
    puts(how);
}

/* Another thread changes the code while this one is in the callee. */
static atomic_long wanted, done;

static void wait_for_change(void) {
    long round = atomic_fetch_add(&wanted, 1) + 1;
    while (atomic_load(&done) < round) sched_yield();
}

static void *changer(void *rounds) {
    for (long i = 1; i <= (long)rounds; i++) {
        while (atomic_load(&wanted) < i) sched_yield();
        next = i;
        by_protection();
        atomic_store(&done, i);
    }
    return NULL;
}

static void change_by_thread(long rounds) {
    page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    put_caller(page, 0);
    CHECK(mprotect(page, 4096, PROT_READ | PROT_EXEC) == 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, changer, (void *)rounds) == 0);
    for (long i = 1; i <= rounds; i++) CHECK(((caller *)page)(wait_for_change) == (uint64_t)i);
    CHECK(pthread_join(thread, NULL) == 0);
    puts("by a thread");
}

/* Frames of 8 KiB, nested; the way back is by returns, or by longjmp over them. */
static jmp_buf out;

__attribute__((noinline)) static uint64_t deep(int depth, int jump_at) {
    volatile char frame[8192];
    frame[depth] = (char)depth;
    if (depth == jump_at) longjmp(out, depth);
    if (depth == 0) return 1;
    uint64_t below = deep(depth - 1, jump_at);
    return below * 3 + (uint64_t)frame[depth];
}

/* Two stacks 64 KiB apart, or any: each step goes on on the other one. And pointers that are no
 * multiple of eight. */
uint64_t hop(void *other, uint64_t steps);
uint64_t odd(uint64_t offset, uint64_t depth);
__asm__(".text\n"
        /* Saves its stack in rax while it calls on the other. */
        ".globl hop\nhop: push %rbx; push %rbp; mov %rsp, %rbp; mov %rsi, %rbx; test %rbx, %rbx; jz 1f\n"
        "  mov %rsp, %rax; mov %rdi, %rsp; lea -256(%rax), %rdi; lea -1(%rbx), %rsi; call hop; mov %rbp, %rsp; add %rbx, %rax; jmp 2f\n"
        "1: xor %eax, %eax\n2: pop %rbp; pop %rbx; ret\n"
        ".globl odd\nodd: push %rbp; mov %rsp, %rbp; sub %rdi, %rsp; mov %rsi, %rcx; call 3f; mov %rbp, %rsp; pop %rbp; ret\n"
        "3: test %rcx, %rcx; jz 4f; dec %rcx; call 3b; lea 1(%rax,%rax), %rax; ret\n4: mov $1, %eax; ret\n");

int main(int argc, char **argv) {
    long rounds = iterations(argc, argv, 2000);
    change("by a store", PROT_READ | PROT_WRITE | PROT_EXEC, by_store, rounds);
    change("by protection", PROT_READ | PROT_EXEC, by_protection, rounds);
    change("by mapping", PROT_READ | PROT_EXEC, by_mapping, rounds / 4);
    change_by_thread(rounds / 4);

    uint64_t sum = 0;
    for (volatile int i = 0; i < 20; i++) {
        sum += deep(60, -1);
        int depth = setjmp(out);
        if (depth == 0) deep(60, 1 + i);
        CHECK(depth == 1 + i);
    }
    printf("deep %llx\n", (unsigned long long)sum);

    char *area = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(area != MAP_FAILED);
    for (long i = 0; i < 50; i++)
        for (long apart = 0; apart < 8; apart++) {
            char *here = __builtin_frame_address(0), *like = area + (1 << 19) + ((uintptr_t)here & 0xffff) - 64 * apart;
            CHECK(hop((void *)((uintptr_t)like & -16ul), 100) == 5050);
        }
    for (uint64_t offset = 0; offset < 16; offset++)
        for (int i = 0; i < 20; i++) CHECK(odd(offset, 40) == (1ul << 41) - 1);
    puts("stacks");
    return 0;
}
