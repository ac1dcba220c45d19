/* Long additions and subtractions through adc and sbb; carries kept over inc, dec, lea and loop;
 * adcx and adox if the processor has them.
 *
 * Hard for a translator: the carry lives across a loop's back edge while other instructions
 * write the other flags. */
#include <cpuid.h>
#include "guest.h"

enum { WORDS = 24 };

__attribute__((noinline)) static unsigned long_add(uint64_t *to, const uint64_t *from, long words) {
    uint64_t t;
    unsigned char carry;
    __asm__ volatile(
        "clc\n"
        "1: movq (%[from]), %[t]\n\t"
        "adcq %[t], (%[to])\n\t"
        "lea 8(%[from]), %[from]\n\t"
        "lea 8(%[to]), %[to]\n\t"
        "dec %[words]\n\t" /* keeps the carry */
        "jnz 1b\n\t"
        "setc %[carry]"
        : [to] "+r"(to), [from] "+r"(from), [words] "+r"(words), [t] "=&r"(t), [carry] "=q"(carry) : : "cc", "memory");
    return carry;
}

__attribute__((noinline)) static unsigned long_sub(uint64_t *to, const uint64_t *from, long words) {
    uint64_t t, i = 0;
    unsigned char borrow;
    __asm__ volatile(
        "clc\n"
        "1: movq (%[from], %[i], 8), %[t]\n\t"
        "sbbq %[t], (%[to], %[i], 8)\n\t"
        "inc %[i]\n\t"
        "loop 1b\n\t"
        "setc %[borrow]"
        : [i] "+&r"(i), [t] "=&r"(t), [borrow] "=q"(borrow), "+c"(words) : [to] "r"(to), [from] "r"(from) : "cc", "memory");
    return borrow;
}

static uint64_t by_hand(uint64_t *to, const uint64_t *from) {
    uint64_t carry = 0;
    for (int i = 0; i < WORDS; i++) {
        unsigned __int128 t = (unsigned __int128)to[i] + from[i] + carry;
        to[i] = (uint64_t)t;
        carry = (uint64_t)(t >> 64);
    }
    return carry;
}

__attribute__((noinline)) static void multiply(uint64_t *product, const uint64_t *a, const uint64_t *b, int words) {
    memset(product, 0, 16 * (size_t)words);
    for (int i = 0; i < words; i++) {
        uint64_t carry = 0;
        for (int j = 0; j < words; j++) {
            unsigned __int128 t = (unsigned __int128)a[i] * b[j] + product[i + j] + carry;
            product[i + j] = (uint64_t)t;
            carry = (uint64_t)(t >> 64);
        }
        product[i + words] = carry;
    }
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 60);
    uint64_t seed = 99, a[WORDS], b[WORDS], c[WORDS], product[2 * WORDS], sum = 1;
    for (long round = 0; round < n; round++) {
        for (int i = 0; i < WORDS; i++) {
            a[i] = round % 3 == 0 ? ~0UL : next_random(&seed);
            b[i] = round % 3 == 0 ? (i == 0) : next_random(&seed);
            c[i] = a[i];
        }
        unsigned carry = long_add(a, b, WORDS);
        CHECK(carry == by_hand(c, b));
        CHECK(memcmp(a, c, sizeof a) == 0);
        unsigned borrow = long_sub(a, b, WORDS);
        CHECK(borrow == carry);
        multiply(product, a, b, WORDS / 2);
        sum = mix_bytes(mix(sum, carry), product, sizeof(uint64_t) * WORDS);
    }
    printf("chains %016lx\n", sum);
    /* 8, 16 and 32 bits wide chains. */
    uint64_t narrow = 0x00ff00ff80ff7fff, other = 0x0101010101010101;
    for (int i = 0; i < 100; i++) {
        __asm__ volatile("addb %b1, %b0\n\tadcw %w1, %w0\n\tsbbl %k1, %k0\n\tadcq %1, %0\n\tsbbb $3, %b0\n\tadcw $-1, %w0"
                         : "+q"(narrow) : "q"(other) : "cc");
        other = other * 3 + narrow;
    }
    printf("narrow %016lx\n", narrow);
    /* cmc, stc, clc; salc's replacement by sbb of itself. */
    uint64_t mask, carries = 0;
    for (int i = 0; i < 16; i++) {
        unsigned char out;
        __asm__ volatile("bt $0, %k[i]\n\tcmc\n\tsbb %[mask], %[mask]\n\tsetc %[out]" : [mask] "=&r"(mask), [out] "=q"(out) : [i] "r"(i) : "cc");
        CHECK(mask == (i & 1 ? 0 : ~0UL));
        carries = carries << 1 | out;
    }
    printf("carries %04lx\n", carries);
    unsigned eax, ebx, ecx, edx;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & (1 << 19))) {
        uint64_t x = 0xfffffffffffffff0, y = 0x8000000000000000, flags;
        __asm__ volatile("xor %%eax, %%eax\n\tstc\n\tadcx %[k], %[x]\n\tadox %[k], %[y]\n\tadcx %[k], %[y]\n\tadox %[x], %[x]\n\t"
                         "pushfq\n\tpopq %[flags]"
                         : [x] "+&r"(x), [y] "+&r"(y), [flags] "=&r"(flags) : [k] "r"(0x1fUL) : "rax", "cc", "memory");
        printf("adx %lx %lx %lx\n", x, y, flags & 0x8d5);
    } else {
        printf("no adx\n");
    }
    return 0;
}
