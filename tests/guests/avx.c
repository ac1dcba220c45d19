/* AVX, AVX2, FMA and F16C, if the processor has them: 256-bit arithmetic, permutations, gathers,
 * masked moves, upper halves.
 *
 * Hard for a translator: gathers and masked moves change their mask and fault by element, and
 * saving only 128 bits of a register loses its upper half. */
#include <immintrin.h>
#include "guest.h"

static uint64_t sum = 1;
__attribute__((target("avx"))) static void take(const char *name, __m256i v) {
    uint64_t parts[4];
    _mm256_storeu_si256((__m256i *)parts, v);
    sum = mix_bytes(sum, parts, sizeof parts);
    printf("%-11s %016lx %016lx %016lx %016lx\n", name, parts[3], parts[2], parts[1], parts[0]);
}

__attribute__((target("avx"))) static void avx(long n) {
    __m256d a = _mm256_set_pd(1.5, -2.25, 1e300, 0.1), b = _mm256_set_pd(3, 7, 1e300, -0.3);
    take("vmulpd", _mm256_castpd_si256(_mm256_mul_pd(a, b)));
    take("vhaddpd", _mm256_castpd_si256(_mm256_hadd_pd(a, b)));
    take("vcmppd", _mm256_castpd_si256(_mm256_cmp_pd(a, b, _CMP_NLE_UQ)));
    take("vblendvpd", _mm256_castpd_si256(_mm256_blendv_pd(a, b, _mm256_sub_pd(a, b))));
    take("vperm2f128", _mm256_castpd_si256(_mm256_permute2f128_pd(a, b, 0x21)));
    take("vroundpd", _mm256_castpd_si256(_mm256_round_pd(_mm256_mul_pd(a, b), 0x0b)));
    /* VEX.128 clears the upper half, legacy SSE keeps it. */
    uint64_t before[4] = {1, 2, 3, 4}, legacy[4], vex[4];
    __asm__ volatile(
        "vmovdqu %[before], %%ymm7\n\tpaddq %%xmm7, %%xmm7\n\tvmovdqu %%ymm7, %[legacy]\n\t"
        "vpaddq %%xmm7, %%xmm7, %%xmm7\n\tvmovdqu %%ymm7, %[vex]\n\tvzeroupper"
        : [legacy] "=m"(legacy), [vex] "=m"(vex) : [before] "m"(before) : "xmm7");
    printf("upper halves: legacy %lu %lu, vex %lu %lu\n", legacy[2], legacy[3], vex[2], vex[3]);
    double memory[4] = {1, 2, 3, 4};
    _mm256_maskstore_pd(memory, _mm256_set_epi64x(-1, 0, -1, 0), a);
    take("maskstore", _mm256_loadu_si256((__m256i *)memory));
    __m256d state = b;
    for (long i = 0; i < n; i++)
        state = _mm256_add_pd(_mm256_mul_pd(state, _mm256_set1_pd(0.75)), _mm256_permute_pd(_mm256_set1_pd((double)i), 5));
    take("loop", _mm256_castpd_si256(state));
    int carry = _mm256_testc_pd(a, b), zero = _mm256_testz_si256(_mm256_castpd_si256(a), _mm256_castpd_si256(b));
    printf("vtestpd %d vptest %d\n", carry, zero);
}

__attribute__((target("avx2,fma,f16c"))) static void avx2(long n) {
    __m256i a = _mm256_set_epi64x(0x1122334455667788, -2, 0x7fff800000ff0001, 42), b = _mm256_set_epi64x(1, 2, 3, -4);
    take("vpmullw", _mm256_mullo_epi16(a, b));
    take("vpermq", _mm256_permute4x64_epi64(a, 0x1b));
    take("vpermd", _mm256_permutevar8x32_epi32(a, _mm256_set_epi32(0, 2, 4, 6, 1, 3, 5, 7)));
    take("vpsllvd", _mm256_sllv_epi32(a, _mm256_set_epi32(1, 31, 32, 5, 0, 7, 8, 9)));
    take("vpalignr", _mm256_alignr_epi8(a, b, 5));
    take("vpbroadcast", _mm256_broadcastb_epi8(_mm_cvtsi32_si128(0x5a)));
    take("vphaddw", _mm256_hadd_epi16(a, b));
    int table[64];
    for (int i = 0; i < 64; i++) table[i] = i * i * 1000003;
    take("vpgatherdd", _mm256_i32gather_epi32(table, _mm256_set_epi32(0, 63, 5, 5, 17, 31, 2, 1), 4));
    take("masked", _mm256_mask_i32gather_epi32(a, table, _mm256_set_epi32(9, 8, 7, 6, 5, 4, 3, 2), b, 4));
    take("vfmadd", _mm256_castpd_si256(_mm256_fmadd_pd(_mm256_set1_pd(1.0 / 3), _mm256_set1_pd(3), _mm256_set1_pd(-1))));
    take("vfmaddsub", _mm256_castps_si256(_mm256_fmaddsub_ps(_mm256_set1_ps(0.1f), _mm256_set1_ps(0.2f), _mm256_set1_ps(7))));
    take("vcvtph2ps", _mm256_castps_si256(_mm256_cvtph_ps(_mm_set_epi64x(0x3c00bc0000017bff, 0x7c00fe0080004248))));
    printf("vpmovmskb %08x\n", (unsigned)_mm256_movemask_epi8(a));
    __m256i state = a;
    for (long i = 0; i < n; i++) {
        state = _mm256_add_epi64(_mm256_xor_si256(_mm256_slli_epi64(state, 13), _mm256_srli_epi64(state, 7)), b);
        if (_mm256_movemask_epi8(state) & 1) state = _mm256_permute4x64_epi64(state, 0x93);
    }
    take("loop", state);
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 1000);
    if (__builtin_cpu_supports("avx")) avx(n);
    else printf("no avx\n");
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) avx2(n);
    else printf("no avx2\n");
    printf("sum %016lx\n", sum);
    return 0;
}
