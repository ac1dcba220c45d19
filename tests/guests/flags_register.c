/* The flags register as a whole: pushf, popf, lahf, sahf; the bits ID, DF and AC; flags that
 * live long and cross calls.
 *
 * Hard for a translator: flags are live across blocks, calls and its own code, which changes
 * flags. */
#include "guest.h"

static uint64_t read_flags(void) {
    uint64_t f;
    __asm__ volatile("pushfq\n\tpopq %0" : "=r"(f) : : "memory");
    return f;
}

static uint64_t write_flags(uint64_t f) {
    uint64_t got;
    __asm__ volatile("pushq %1\n\tpopfq\n\tpushfq\n\tpopq %0\n\tpushq $0x202\n\tpopfq" : "=r"(got) : "r"(f) : "cc", "memory");
    return got;
}

/* A routine that only uses lea and mov: flags pass through it. */
__asm__(".text\npass_through: lea 1(%rax), %rax\n\tmov %rax, %rdx\n\tnot %rdx\n\tmovzbl %dl, %edx\n\tret\n");

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 500);
    printf("initial %lx\n", read_flags() & ~0x8d5UL);
    printf("all arithmetic %lx\n", write_flags(0x202 | 0x8d5));
    printf("none %lx\n", write_flags(0x202));
    printf("id %lx\n", write_flags(0x200202));
    printf("df %lx\n", write_flags(0x602));
    printf("ac %lx\n", write_flags(0x40202));
    printf("nt %lx\n", write_flags(0x4202));
    printf("reserved bits %lx\n", write_flags(0x20a | 0x28) & 0xfff);
    printf("iopl and if are kept %lx\n", write_flags(0x3002) & 0x3200);
    uint64_t sum = 1, seed = 17;
    for (long i = 0; i < n; i++) {
        uint64_t set = next_random(&seed) & 0x8d5, got, ah = set & 0xff, back;
        __asm__ volatile("pushq %[s]\n\tpopfq\n\tcall pass_through\n\tpushfq\n\tpopq %[g]"
                         : [g] "=&r"(got), "+a"(seed) : [s] "r"(set | 0x202) : "rdx", "cc", "memory");
        CHECK((got & 0x8d5) == set);
        seed--;
        __asm__ volatile("movb %b[ah], %%ah\n\tsahf\n\tlahf\n\tmovzbl %%ah, %%eax\n\tmovq %%rax, %[b]"
                         : [b] "=r"(back) : [ah] "q"(ah) : "rax", "cc");
        CHECK(back == (set & 0xd5 ) + 2);
        /* Flags that are only partly overwritten. */
        uint64_t a = set, f;
        __asm__ volatile("cmp %[s], %[seed]\n\tinc %[a]\n\tstc\n\tdec %[a]\n\tcmc\n\trol $1, %[a]\n\tpushfq\n\tpopq %[f]"
                         : [a] "+&r"(a), [f] "=&r"(f) : [s] "r"(set), [seed] "r"(seed) : "cc", "memory");
        sum = mix(mix(sum, f & 0x8d5), a);
        __asm__ volatile("pushfw\n\tpopw %w0\n\tpushw %w1\n\tpopfw\n\tpushfq\n\tpopq %0" : "=&r"(f) : "r"(set | 0x202) : "cc", "memory");
        sum = mix(sum, f & 0xfff);
    }
    printf("sum %016lx\n", sum);
    /* A std/cld pair around string stores, without a system call in between. */
    char text[8] = "abcdefg";
    char *p = text + 6;
    __asm__ volatile("std\n\tmovl $3, %%ecx\n\tmovb $'x', %%al\n\trep stosb\n\tcld" : "+D"(p) : : "rcx", "rax", "memory");
    printf("%s %ld\n", text, p - text);
    return 0;
}
