/* AVX-512, if the processor has it: 512-bit arithmetic, mask registers, compress and expand,
 * embedded rounding, ternary logic.
 *
 * Hard for a translator: 32 vector registers and 8 mask registers are state that must survive
 * every exit. */
#include <immintrin.h>
#include "guest.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512cd")))
static uint64_t sum = 1;

TARGET static void take(const char *name, __m512i v) {
    uint64_t parts[8];
    _mm512_storeu_si512(parts, v);
    sum = mix_bytes(sum, parts, sizeof parts);
    printf("%-12s %016lx %016lx .. %016lx\n", name, parts[7], parts[6], parts[0]);
}

TARGET static void avx512(long n) {
    __m512i a = _mm512_set_epi64(1, -2, 3, -4, 0x5555555555555555, 6, 0x7000000000000007, -8);
    __m512i b = _mm512_set_epi64(8, 7, 6, 5, 4, 3, 2, 1);
    take("vpaddq", _mm512_add_epi64(a, b));
    take("vpmullq", _mm512_mullo_epi64(a, b));
    take("vpternlog", _mm512_ternarylogic_epi64(a, b, _mm512_set1_epi64(0x0ff0), 0xca));
    __mmask8 less = _mm512_cmplt_epi64_mask(a, b);
    printf("mask %02x\n", less);
    take("merge", _mm512_mask_sub_epi64(a, less, b, a));
    take("zero", _mm512_maskz_sub_epi64(less, b, a));
    take("vpcompress", _mm512_maskz_compress_epi64(less, a));
    take("vpexpand", _mm512_mask_expand_epi64(b, 0x5a, a));
    take("vpconflict", _mm512_conflict_epi64(_mm512_set_epi64(1, 2, 1, 2, 3, 1, 2, 1)));
    take("vplzcnt", _mm512_lzcnt_epi64(a));
    take("vpermi2q", _mm512_permutex2var_epi64(a, _mm512_set_epi64(0, 9, 2, 11, 4, 13, 6, 15), b));
    take("vprolvq", _mm512_rolv_epi64(a, b));
    __m512d x = _mm512_set1_pd(1.0 / 3), y = _mm512_set1_pd(-2.0 / 7);
    take("round up", _mm512_castpd_si512(_mm512_add_round_pd(x, y, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC)));
    take("round down", _mm512_castpd_si512(_mm512_add_round_pd(x, y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)));
    take("vrndscale", _mm512_castpd_si512(_mm512_roundscale_pd(_mm512_mul_pd(x, _mm512_set1_pd(100)), 0x20)));
    take("vgetexp", _mm512_castpd_si512(_mm512_getexp_pd(_mm512_set1_pd(12345.678))));
    take("vcvtqq2pd", _mm512_castpd_si512(_mm512_cvtepi64_pd(a)));
    uint64_t masks, other = 0xf0f0f0f012345678, flags;
    __asm__ volatile(
        "kmovq %[m], %%k1\n\tkshiftrq $4, %%k1, %%k2\n\tkxorq %%k1, %%k2, %%k3\n\tkaddq %%k3, %%k1, %%k4\n\t"
        "knotq %%k4, %%k5\n\tkortestq %%k5, %%k1\n\tkmovq %%k5, %[out]\n\tpushfq\n\tpopq %[f]"
        : [out] "=&r"(masks), [f] "=&r"(flags) : [m] "r"(other) : "k1", "k2", "k3", "k4", "k5", "memory", "cc");
    printf("masks %016lx flags %lx\n", masks, flags & 0x8d5);
    /* A masked load across the end of what is mapped must not fault; here: only lanes in bounds. */
    uint64_t few[3] = {11, 22, 33};
    take("masked load", _mm512_maskz_loadu_epi64(7, few));
    /* Registers 16 to 31 and an EVEX-only loop. */
    uint64_t result[8];
    __asm__ volatile(
        "vpbroadcastq %[seed], %%zmm17\n\tvpternlogd $255, %%zmm30, %%zmm30, %%zmm30\n\tmov %[n], %%rcx\n"
        "1: vpsllq $3, %%zmm17, %%zmm18\n\tvpaddq %%zmm18, %%zmm17, %%zmm17\n\tvpsubq %%zmm30, %%zmm17, %%zmm17\n\t"
        "vptestmq %%zmm17, %%zmm30, %%k3\n\tvpaddq %%zmm17, %%zmm17, %%zmm17%{%%k3%}\n\tdec %%rcx\n\tjnz 1b\n\t"
        "vmovdqu64 %%zmm17, %[result]"
        : [result] "=m"(result) : [seed] "r"(77UL), [n] "r"(n) : "xmm17", "xmm18", "xmm30", "k3", "rcx", "cc");
    printf("loop %016lx\n", mix_bytes(1, result, sizeof result));
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 1000);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
        avx512(n);
    else
        printf("no avx512\n");
    printf("sum %016lx\n", sum);
    return 0;
}
