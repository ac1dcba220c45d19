/* Loops whose closing jumps have 32-bit displacements, conditional or not, and begin with short
 * instructions; one is also entered at its second instruction. A second thread executes them; their
 * page changes between them.
 *
 * Hard for a translator: a patch at the head covers several instructions; at the closing jump it
 * changes a displacement under other threads. */
#define _GNU_SOURCE
#include "guest.h"
#include <pthread.h>
#include <sys/mman.h>

/* Each takes the number of iterations and a start value, and returns a sum. */
uint64_t conditional(uint64_t n, uint64_t x);
uint64_t unconditional(uint64_t n, uint64_t x);
uint64_t two_entries(uint64_t n, uint64_t x, uint64_t second);
extern const unsigned char code_start[], code_end[];

/* The padding is work that the loop passes, so that it is longer than 128 bytes. */
__asm__(".pushsection .text.back_edges, \"ax\", @progbits\n"
        ".balign 4096\n"
        "code_start:\n"
        ".macro pad\n"
        ".rept 18\n"
        "  imul $31, %rax, %rax\n"
        "  lea 7(%rax), %rax\n"
        ".endr\n"
        ".endm\n"
        "conditional:\n"
        "  mov %rsi, %rax\n"
        "1: inc %rax\n"
        "  pad\n"
        "  xor %rdi, %rax\n"
        "  dec %rdi\n"
        "  jnz 1b\n"
        "  ret\n"
        "unconditional:\n"
        "  mov %rsi, %rax\n"
        "2: dec %rdi\n"
        "  js 3f\n"
        "  pad\n"
        "  xor %rdi, %rax\n"
        "  jmp 2b\n"
        "3: ret\n"
        "two_entries:\n"
        "  mov %rsi, %rax\n"
        "  test %rdx, %rdx\n"
        "  jnz 5f\n"
        "4: inc %rax\n"
        "5: not %rax\n"
        "  pad\n"
        "  dec %rdi\n"
        "  jnz 4b\n"
        "  ret\n"
        "code_end:\n"
        ".balign 4096\n"
        ".popsection\n");

static uint64_t reference(int which, uint64_t n, uint64_t x, int second) {
    uint64_t sum = x;
    for (uint64_t i = n; i > 0; i--) {
        if (which == 0 || (which == 2 && (i < n || !second))) sum++;
        if (which == 2) sum = ~sum;
        for (int k = 0; k < 18; k++) sum = sum * 31 + 7;
        if (which == 0) sum ^= i;
        if (which == 1) sum ^= i - 1;
    }
    return sum;
}

static uint64_t all(uint64_t n, uint64_t x) {
    uint64_t a = conditional(n, x), b = unconditional(n, x);
    uint64_t c = two_entries(n, x, 0), d = two_entries(n, x, 1);
    CHECK(a == reference(0, n, x, 0));
    CHECK(b == reference(1, n, x, 0));
    CHECK(c == reference(2, n, x, 0));
    CHECK(d == reference(2, n, x, 1));
    return mix(mix(mix(mix(0, a), b), c), d);
}

static long rounds;

static void *other(void *sums) {
    for (long r = 0; r < rounds; r++) *(uint64_t *)sums = mix(*(uint64_t *)sums, all(40 + r % 7, r));
    return NULL;
}

int main(int argc, char **argv) {
    rounds = iterations(argc, argv, 300);
    size_t size = code_end - code_start;
    uint64_t sum = 0, others = 0;
    sum = mix(sum, all(20000, 5));
    for (long r = 0; r < rounds; r++) sum = mix(sum, all(r % 50 + 1, r));
    printf("alone %016lx\n", sum);

    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, other, &others) == 0);
    for (long r = 0; r < rounds; r++) sum = mix(sum, all(40 + r % 5, r));
    CHECK(pthread_join(thread, NULL) == 0);
    printf("beside another thread %016lx %016lx\n", sum, others);

    /* The page changes, and changes back, and is used again each time. */
    CHECK(mprotect((void *)code_start, 4096, PROT_READ | PROT_WRITE) == 0);
    unsigned char *constant = memmem((void *)code_start, size, "\x48\x6b\xc0\x1f", 4);
    CHECK(constant != NULL);
    constant[3] = 29;
    CHECK(mprotect((void *)code_start, 4096, PROT_READ | PROT_EXEC) == 0);
    for (long r = 0; r < rounds; r++) sum = mix(sum, conditional(400, r));
    CHECK(mprotect((void *)code_start, 4096, PROT_READ | PROT_WRITE) == 0);
    constant[3] = 31;
    CHECK(mprotect((void *)code_start, 4096, PROT_READ | PROT_EXEC) == 0);
    for (long r = 0; r < rounds; r++) sum = mix(sum, all(r % 40 + 100, r));
    printf("after changes %016lx\n", sum);
    return 0;
}
