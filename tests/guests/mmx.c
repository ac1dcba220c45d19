/* MMX: integer arithmetic in the x87 registers, the tag word, emms, and switching between MMX
 * and x87.
 *
 * Hard for a translator: both sets of registers are one state, and each MMX instruction changes
 * tags and top of stack. */
#include <mmintrin.h>
#include "guest.h"

#define TAKE(name, v)                                                    \
    do {                                                                 \
        uint64_t bits_ = (uint64_t)(v);                                  \
        _mm_empty();                                                     \
        sum = mix(sum, bits_);                                           \
        printf("%-10s %016lx\n", name, bits_);                           \
    } while (0)

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 1000);
    uint64_t sum = 1;
    volatile uint64_t sa = 0x80007fff00ff1234, sb = 0x0001ffff80017777;
#define A ((__m64)sa)
#define B ((__m64)sb)
    TAKE("paddw", _mm_add_pi16(A, B));
    TAKE("paddsw", _mm_adds_pi16(A, B));
    TAKE("psubusb", _mm_subs_pu8(A, B));
    TAKE("pmaddwd", _mm_madd_pi16(A, B));
    TAKE("pmulhw", _mm_mulhi_pi16(A, B));
    TAKE("packuswb", _mm_packs_pu16(A, B));
    TAKE("punpckhwd", _mm_unpackhi_pi16(A, B));
    TAKE("pcmpgtb", _mm_cmpgt_pi8(A, B));
    TAKE("psrlq", _mm_srli_si64(A, 13));
    TAKE("psraw", _mm_srai_pi16(A, 3));
    TAKE("pandn", _mm_andnot_si64(A, B));
    unsigned char environment[28];
    __asm__ volatile("movq %1, %%mm3\n\tfnstenv %0\n\temms" : "=m"(environment) : "m"(sb) : "mm3");
    printf("tag after mmx %02x%02x\n", environment[9], environment[8]);
    __asm__ volatile("fnstenv %0" : "=m"(environment));
    printf("tag after emms %02x%02x\n", environment[9], environment[8]);
    long double ten;
    __asm__ volatile("movq %1, %%mm0\n\tfstpt %0\n\temms" : "=m"(ten) : "m"(sa) : "mm0");
    unsigned char bytes[10];
    memcpy(bytes, &ten, 10);
    printf("as x87: exponent %02x%02x, mantissa %016lx\n", bytes[9], bytes[8], *(uint64_t *)bytes);
    uint64_t state = sa;
    double total = 0;
    for (long i = 0; i < n; i++) {
        __m64 s = (__m64)state;
        s = _mm_xor_si64(_mm_add_pi32(s, B), _mm_slli_si64(s, 5));
        state = (uint64_t)s + (uint64_t)i;
        _mm_empty();
        long double t = (long double)(state & 0xffff);
        total = (double)(t * 0.5L + total * 0.25L);
    }
    printf("loop %016lx %a\n", state, total);
    printf("sum %016lx\n", sum);
    return 0;
}
