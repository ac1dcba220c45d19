/* Jumps and calls through words in read-only pages, as in programs linked with -z now. The words
 * can still change in all the ways in which a page's contents can; a change must take effect at
 * once, also in other threads.
 *
 * Hard for a translator: it takes such words for constants, and must notice every one of those
 * ways. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include "guest.h"

enum { PAGE = 4096, FUNCTIONS = 64, R = PROT_READ, RW = PROT_READ | PROT_WRITE };

/* A page of the file, and a page of no file. */
__attribute__((aligned(4096))) uint64_t slot_of_file[PAGE / 8] = {1};
__attribute__((aligned(4096))) uint64_t slot_of_none[PAGE / 8];

typedef uint32_t function(void);
extern char functions[];
extern char jumps_file[], jumps_none[], calls_file[], calls_none[], loads[];
uint32_t jump_file(void), jump_none(void), call_file(void), call_none(void), load_jump(void);

/* The function n, 16 bytes each: returns n. */
__asm__(".text\n.balign 16\nfunctions:\n"
        ".set n, 0\n.rept 64\n.balign 16\nmov $n, %eax\nret\n.set n, n + 1\n.endr\n"
        "jump_file:\njumps_file: jmp *slot_of_file(%rip)\n"
        "jump_none:\njumps_none: jmp *slot_of_none(%rip)\n"
        "call_file:\nsub $8, %rsp\ncalls_file: call *slot_of_file(%rip)\nadd $8, %rsp\nret\n"
        "load_jump:\nxor %ecx, %ecx\nloads: mov 0x20(%rcx), %edx\njmp *slot_of_file(%rip)\n"
        "call_none:\nsub $8, %rsp\ncalls_none: call *slot_of_none(%rip)\nadd $8, %rsp\nret\n");

static const struct {
    uint64_t *slot;
    function *jump, *call;
    char *jumps, *calls;
} ways[2] = {{slot_of_file, jump_file, call_file, jumps_file, calls_file},
             {slot_of_none, jump_none, call_none, jumps_none, calls_none}};

static uint64_t number(uint32_t n) { return (uint64_t)(uintptr_t)functions + 16 * n; }

static void protect(uint64_t *slot, int protection) { CHECK(mprotect(slot, PAGE, protection) == 0); }

/* Both ways come to the function n, again and again. */
static void expect(int way, uint32_t n) {
    for (int again = 0; again < 30; again++) CHECK(ways[way].jump() == n && ways[way].call() == n);
}

static sigjmp_buf back;
static struct { int code; uint64_t address, rip; } fault;

static void on_fault(int signal, siginfo_t *info, void *context) {
    (void)signal;
    fault.code = info->si_code;
    fault.address = (uint64_t)(uintptr_t)info->si_addr;
    fault.rip = (uint64_t)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
    siglongjmp(back, 1);
}

static void expect_fault(function *f, int code, uint64_t address, uint64_t rip) {
    if (sigsetjmp(back, 1) == 0) {
        f();
        CHECK(0);
    }
    CHECK(fault.code == code && fault.address == address && fault.rip == rip);
}

static int running = 1;
static uint32_t generation;
static long calls;

static void *caller(void *argument) {
    int way = (int)(long)argument;
    while (__atomic_load_n(&running, __ATOMIC_ACQUIRE)) {
        uint32_t before = __atomic_load_n(&generation, __ATOMIC_ACQUIRE);
        uint32_t found = before & 1 ? ways[way].jump() : ways[way].call();
        uint32_t after = __atomic_load_n(&generation, __ATOMIC_ACQUIRE);
        /* Neither older than what was there before nor newer than what is there now. */
        CHECK((found - before) % FUNCTIONS <= (after + 1 - before));
        __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

static void threads(int way, long rounds) {
    uint64_t *slot = ways[way].slot;
    protect(slot, RW);
    generation = 0;
    running = 1;
    *slot = number(0);
    protect(slot, R);
    pthread_t ids[2];
    for (int i = 0; i < 2; i++) CHECK(pthread_create(&ids[i], NULL, caller, (void *)(long)way) == 0);
    for (uint32_t round = 1; round < (uint32_t)rounds; round++) {
        protect(slot, RW);
        __atomic_store_n(slot, number(round % FUNCTIONS), __ATOMIC_RELEASE);
        __atomic_store_n(&generation, round, __ATOMIC_RELEASE);
        protect(slot, R);
        long seen = __atomic_load_n(&calls, __ATOMIC_RELAXED);
        while (round % 8 == 0 && __atomic_load_n(&calls, __ATOMIC_RELAXED) < seen + 20) sched_yield();
        CHECK(ways[way].call() == round % FUNCTIONS);
    }
    __atomic_store_n(&running, 0, __ATOMIC_RELEASE);
    for (int i = 0; i < 2; i++) CHECK(pthread_join(ids[i], NULL) == 0);
}

int main(int argc, char **argv) {
    long rounds = iterations(argc, argv, 100);
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    for (int way = 0; way < 2; way++) {
        uint64_t *slot = ways[way].slot, address = (uint64_t)(uintptr_t)slot;
        uint64_t jumps = (uint64_t)(uintptr_t)ways[way].jumps, calls_at = (uint64_t)(uintptr_t)ways[way].calls;
        for (uint32_t n = 0; n < FUNCTIONS; n++) {
            *slot = number(n);
            if (n % 3 == 0) expect(way, n);
            protect(slot, R);
            expect(way, n);
            protect(slot, n % 2 ? RW | PROT_EXEC : RW);
            expect(way, n);
        }
        /* The word holds an address where nothing is mapped. */
        *slot = 0x10;
        protect(slot, R);
        expect_fault(ways[way].jump, SEGV_MAPERR, 0x10, 0x10);
        protect(slot, RW);
        *slot = number(5);
        protect(slot, R);
        expect(way, 5);
        /* The code that the word leads to faults. */
        expect_fault(load_jump, SEGV_MAPERR, 0x20, (uint64_t)(uintptr_t)loads);
        protect(slot, PROT_NONE);
        expect_fault(ways[way].jump, SEGV_ACCERR, address, jumps);
        expect_fault(ways[way].call, SEGV_ACCERR, address, calls_at);
        protect(slot, R);
        expect(way, 5);
        /* Written through /proc/self/mem. */
        int memory = open("/proc/self/mem", O_RDWR);
        uint64_t other = number(6);
        if (memory >= 0 && pwrite(memory, &other, 8, (off_t)address) == 8) expect(way, 6);
        if (memory >= 0) close(memory);
        /* Another page is moved to this address. */
        uint64_t *page = mmap(NULL, PAGE, RW, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(page != MAP_FAILED);
        *page = number(7);
        protect(page, R);
        CHECK(mremap(page, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, slot) == slot);
        expect(way, 7);
        CHECK(madvise(slot, PAGE, MADV_DONTNEED) == 0);
        expect_fault(ways[way].jump, SEGV_MAPERR, 0, 0);
        CHECK(munmap(slot, PAGE) == 0);
        expect_fault(ways[way].jump, SEGV_MAPERR, address, jumps);
        expect_fault(ways[way].call, SEGV_MAPERR, address, calls_at);
        CHECK(mmap(slot, PAGE, RW, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == slot);
        *slot = number(8);
        protect(slot, R);
        expect(way, 8);
        /* A key takes away what the protection gives. */
        int key = pkey_alloc(0, 0);
        if (key > 0) {
            CHECK(pkey_mprotect(slot, PAGE, R, key) == 0);
            expect(way, 8);
            CHECK(pkey_set(key, PKEY_DISABLE_ACCESS) == 0);
            expect_fault(ways[way].jump, SEGV_PKUERR, address, jumps);
            CHECK(pkey_set(key, 0) == 0);
            expect(way, 8);
            CHECK(mprotect(slot, PAGE, R) == 0 && pkey_free(key) == 0);
        }
        threads(way, rounds);
        protect(slot, RW);
    }
    puts("constant slots: obeyed");
    return 0;
}
