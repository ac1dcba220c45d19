/* A loop with several traces, each for one value of a register, in a page that is unmapped and
 * mapped again between calls. A failed test of the value leads to the next trace, that of the
 * last trace to the untraced code, and none to an earlier trace.
 *
 * Hard for a translator: links among the traces must not form a cycle in which no instruction
 * executes. */
#include <sys/mman.h>
#include "guest.h"

typedef uint64_t (*function)(uint64_t rounds, uint64_t factor, uint64_t start);

/* rax = start; do rax = rax * factor + rounds while (--rounds) */
static const unsigned char CODE[] = {
    0x48, 0x89, 0xd0,       /* mov %rdx, %rax */
    0x48, 0x0f, 0xaf, 0xc6, /* loop: imul %rsi, %rax */
    0x48, 0x01, 0xf8,       /* add %rdi, %rax */
    0x48, 0xff, 0xcf,       /* dec %rdi */
    0x75, 0xf4,             /* jne loop */
    0xc3,                   /* ret */
};

static uint64_t expected(uint64_t rounds, uint64_t factor, uint64_t start) {
    for (; rounds; rounds--) start = start * factor + rounds;
    return start;
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 200);
    unsigned char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    memcpy(page, CODE, sizeof CODE);
    function f = (function)(uintptr_t)page;
    uint64_t sum = 1;
    for (uint64_t generation = 0; generation < 6; generation++) {
        CHECK(mprotect(page, 4096, PROT_READ | PROT_WRITE) == 0);
        page[sizeof CODE + generation] = 1;
        CHECK(mprotect(page, 4096, PROT_READ | PROT_EXEC) == 0);
        for (uint64_t factor = 3 + generation % 2; factor < 3 + 5 * (generation + 1); factor += 5)
            for (long i = 0; i < n; i++) {
                uint64_t result = f(300, factor, sum);
                CHECK(result == expected(300, factor, sum));
                sum = mix(sum, result);
            }
    }
    printf("%016lx\n", (unsigned long)sum);
    return 0;
}
