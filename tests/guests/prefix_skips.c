/* Loops whose heads are an instruction with a prefix and the same instruction without it, as in
 * glibc, which jumps over `lock` while there is one thread; and heads that are reached inside.
 *
 * Hard for a translator: two instructions overlap. What replaces one of them must not change what the
 * other one does. */
#include "guest.h"

/* Adds 5 to *at `rounds` times; every second time the loop goes on behind the prefix. */
static uint64_t skipped(uint64_t *at, uint64_t rounds) {
    uint64_t with = 0;
    __asm__ volatile("1: add $1, %[with]\n"
                     "   .p2align 4\n"
                     "2: .byte 0xf0\n"
                     "3: addq $5, (%[at])\n"
                     "   dec %[rounds]\n"
                     "   jz 4f\n"
                     "   test $1, %b[rounds]\n"
                     "   jz 3b\n"
                     "   test $64, %b[rounds]\n"
                     "   jz 1b\n"
                     "   jmp 2b\n"
                     "4:\n"
                     : [with] "+r"(with), [rounds] "+r"(rounds)
                     : [at] "r"(at)
                     : "memory", "cc");
    return with;
}

/* The loop's head is `test; jne`, and other code jumps to the branch with flags of its own. */
static uint64_t inside(uint64_t rounds) {
    uint64_t a = 0, b = 0;
    __asm__ volatile("   .p2align 4\n"
                     "1: test $3, %b[rounds]\n"
                     "2: jne 3f\n"
                     "   add $7, %[a]\n"
                     "3: lea 1(%[b]), %[b]\n"
                     "   dec %[rounds]\n"
                     "   jz 5f\n"
                     "   cmp $1000, %[rounds]\n"
                     "   ja 1b\n"
                     "   test $1, %b[rounds]\n"
                     "   jmp 2b\n"
                     "5:\n"
                     : [a] "+r"(a), [b] "+r"(b), [rounds] "+r"(rounds)
                     :
                     : "cc");
    return a * 1000003 + b;
}

int main(void) {
    uint64_t sum = 0, word = 1;
    for (int i = 0; i < 20; i++) {
        sum = sum * 31 + skipped(&word, 5000 + (uint64_t)i);
        sum = sum * 31 + inside(3000 + (uint64_t)i);
    }
    printf("%llu %llu\n", (unsigned long long)sum, (unsigned long long)word);
    return 0;
}
