/* Indirect jumps of every kind, with live flags: one jump with many targets, a jump to itself,
 * and jumps whose targets have the same low bits.
 *
 * Hard for a translator: the lookup of a target must preserve the flags, and a hash of the
 * target collides. */
#include "guest.h"

/* Targets 64 KiB apart: all have the same low 16 bits. Each adds its number and returns. */
__asm__(".pushsection .text\n"
        ".balign 65536\n"
        "far_apart:\n"
        ".set i, 0\n"
        ".rept 6\n"
        "  lea 1+i(%rdi,%rdi,2), %rax\n"
        "  ret\n"
        "  .balign 65536\n"
        "  .set i, i + 1\n"
        ".endr\n"
        ".popsection\n");
extern char far_apart[];

/* 1,024 targets of 16 bytes. */
__asm__(".pushsection .text\n"
        ".balign 16\n"
        "many:\n"
        ".set i, 0\n"
        ".rept 1024\n"
        "  .balign 16\n"
        "  lea i(%rdi), %rax\n"
        "  xor $i, %rax\n"
        "  ret\n"
        "  .set i, i + 1\n"
        ".endr\n"
        ".popsection\n");
extern char many[];

typedef uint64_t (*function)(uint64_t);

/* Jumps by a register to one of four labels, with carry, zero, sign and overflow from the
 * comparison, which they read. */
__attribute__((noinline)) static uint64_t flags_live(uint64_t a, uint64_t b, unsigned which) {
    uint64_t result = 0;
    __asm__ volatile(
        "lea 9f(%%rip), %%rdx\n"
        "movslq (%%rdx,%q[which],4), %%rcx\n"
        "add %%rdx, %%rcx\n"
        "cmp %[b], %[a]\n"
        "jmp *%%rcx\n"
        "1: setb %b[result]\n"
        "jmp 8f\n"
        "2: sete %b[result]\n"
        "rcl $3, %[result]\n"
        "jmp 8f\n"
        "3: setl %b[result]\n"
        "adc $5, %[result]\n"
        "jmp 8f\n"
        "4: seto %b[result]\n"
        "jmp 8f\n"
        ".balign 4\n"
        "9: .long 1b - 9b, 2b - 9b, 3b - 9b, 4b - 9b\n"
        "8:\n"
        : [result] "+r"(result)
        : [a] "r"(a), [b] "r"(b), [which] "r"((uint64_t)which)
        : "rcx", "rdx", "cc");
    return result;
}

/* A jump whose target is itself, until a count is up. */
__attribute__((noinline)) static uint64_t itself(uint64_t n) {
    uint64_t steps = 0;
    __asm__ volatile(
        "lea 1f(%%rip), %%rdx\n"
        "lea 2f(%%rip), %%rax\n"
        "1: inc %[steps]\n"
        "dec %[n]\n"
        "cmovz %%rax, %%rdx\n"
        "jmp *%%rdx\n"
        "2:\n"
        : [steps] "+r"(steps), [n] "+r"(n)
        :
        : "rax", "rdx", "cc");
    return steps;
}

/* Returns that no call belongs to: to pushed addresses, past frames, and with bytes popped. */
__attribute__((noinline)) static uint64_t odd_returns(uint64_t n) {
    uint64_t sum = 0;
    __asm__ volatile(
        "sub $128, %%rsp\n"
        "1:\n"
        "lea 2f(%%rip), %%rax\n"
        "lea 3f(%%rip), %%rdx\n"
        "test $1, %[n]\n"
        "cmovnz %%rdx, %%rax\n"
        "push $7\n"
        "push %%rax\n"
        "ret $8\n"
        "2: add $3, %[sum]\n"
        "call 5f\n"
        "ud2\n"
        "5: pop %%rax\n"
        "lea 4f(%%rip), %%rax\n"
        "push %%rax\n"
        "ret\n"
        "3: lea (%[sum],%[sum],4), %[sum]\n"
        "4: dec %[n]\n"
        "jnz 1b\n"
        "add $128, %%rsp\n"
        : [sum] "+r"(sum), [n] "+r"(n)
        :
        : "rax", "rdx", "cc", "memory");
    return sum;
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 3000);
    uint64_t sum = 1, seed = 88172645463325252ULL;
    for (long i = 0; i < n; i++) {
        function f = (function)(far_apart + 65536 * (i % 6));
        sum = mix(sum, f(sum & 0xffff));
    }
    printf("far apart %016lx\n", sum);
    for (long i = 0; i < 4 * n; i++) sum = mix(sum, ((function)(many + 16 * (next_random(&seed) % 1024)))(sum & 0xff));
    printf("many %016lx\n", sum);
    for (long i = 0; i < n; i++) {
        uint64_t a = next_random(&seed) >> (i % 64), b = i % 5 ? next_random(&seed) >> (i % 61) : a;
        sum = mix(sum, flags_live(a, b, (unsigned)(next_random(&seed) % 4)));
    }
    printf("flags %016lx\n", sum);
    printf("itself %lu\n", itself((uint64_t)n));
    printf("returns %016lx\n", odd_returns((uint64_t)n));
    return 0;
}
