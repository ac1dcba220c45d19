/* SSE to SSE4.2: packed and scalar arithmetic, shuffles, comparisons into flags, conversions,
 * moves of all sizes, masks.
 *
 * Hard for a translator: many forms, each with its own operand sizes, alignment rules and flags. */
#include <emmintrin.h>
#include <nmmintrin.h>
#include <smmintrin.h>
#include <tmmintrin.h>
#include "guest.h"

static uint64_t sum = 1;
static void take(const char *name, __m128i v) {
    uint64_t parts[2];
    _mm_storeu_si128((__m128i *)parts, v);
    sum = mix(mix(sum, parts[0]), parts[1]);
    printf("%-10s %016lx%016lx\n", name, parts[1], parts[0]);
}
static void taked(const char *name, __m128d v) { take(name, _mm_castpd_si128(v)); }
static void takes(const char *name, __m128 v) { take(name, _mm_castps_si128(v)); }

__attribute__((noinline)) static unsigned compare(double a, double b) {
    unsigned bits = 0;
    bits |= (unsigned)(a < b) | (unsigned)(a <= b) << 1 | (unsigned)(a > b) << 2 | (unsigned)(a >= b) << 3;
    bits |= (unsigned)(a == b) << 4 | (unsigned)(a != b) << 5 | (unsigned)__builtin_isunordered(a, b) << 6;
    uint64_t flags;
    __asm__ volatile("comisd %[b], %[a]\n\tpushfq\n\tpopq %0" : "=r"(flags) : [a] "x"(a), [b] "x"(b) : "cc", "memory");
    return bits << 12 | (flags & 0x8d5);
}

__attribute__((target("sse4.2"))) static void sse4(void) {
    __m128i a = _mm_set_epi32(-7, 100000, 3, -2000000000), b = _mm_set_epi32(5, -100000, 3, 77);
    take("pmulld", _mm_mullo_epi32(a, b));
    take("pminsd", _mm_min_epi32(a, b));
    take("pblendvb", _mm_blendv_epi8(a, b, _mm_set1_epi16((short)0x80ff)));
    take("pmovsxbd", _mm_cvtepi8_epi32(_mm_set1_epi32(0x80ff7f01)));
    take("pshufb", _mm_shuffle_epi8(a, _mm_set_epi8(0, 5, -1, 15, 14, 3, 2, 1, 9, 9, -128, 8, 7, 6, 5, 4)));
    take("pcmpgtq", _mm_cmpgt_epi64(a, b));
    taked("roundpd", _mm_round_pd(_mm_set_pd(2.5, -3.5), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    takes("dpps", _mm_dp_ps(_mm_set_ps(1, 2, 3, 4), _mm_set_ps(5, 6, 7, 8), 0x7a));
    printf("ptest %d %d %d\n", _mm_testz_si128(a, b), _mm_testc_si128(a, a), _mm_testnzc_si128(a, b));
    printf("pextr %d %x insert", _mm_extract_epi32(a, 2), _mm_extract_epi8(a, 11));
    take("", _mm_insert_epi64(a, 0x1122334455667788, 1));
    const char *haystack = "the needle is in here somewhere";
    __m128i h = _mm_loadu_si128((const __m128i *)haystack), n = _mm_setr_epi8('n', 'e', 'e', 'd', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    printf("pcmpistri %d %d\n", _mm_cmpistri(n, h, _SIDD_CMP_EQUAL_ORDERED), _mm_cmpistrc(n, h, _SIDD_CMP_EQUAL_ANY));
    take("pcmpestrm", _mm_cmpestrm(n, 4, h, 16, _SIDD_CMP_EQUAL_ANY | _SIDD_UNIT_MASK));
}

__attribute__((target("aes,pclmul"))) static void crypto(void);

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 2000);
    __m128i a = _mm_set_epi64x(0x8000123400ff7f80, 0x0123456789abcdef), b = _mm_set_epi64x(-3, 0x00ff00ff80008000);
    take("paddusb", _mm_adds_epu8(a, b));
    take("psubsw", _mm_subs_epi16(a, b));
    take("pmaddwd", _mm_madd_epi16(a, b));
    take("pmuludq", _mm_mul_epu32(a, b));
    take("packssdw", _mm_packs_epi32(a, b));
    take("punpck", _mm_unpacklo_epi8(a, b));
    take("pshufd", _mm_shuffle_epi32(a, 0x39));
    take("pshuflw", _mm_shufflelo_epi16(a, 0x1b));
    take("psllq", _mm_sll_epi64(a, _mm_cvtsi32_si128(13)));
    take("psrad", _mm_srai_epi32(a, 40));
    take("pslldq", _mm_slli_si128(a, 5));
    take("psadbw", _mm_sad_epu8(a, b));
    take("pavgb", _mm_avg_epu8(a, b));
    take("pcmpeqb", _mm_cmpeq_epi8(a, _mm_shuffle_epi32(a, 0x4e)));
    printf("pmovmskb %x movmskpd %x\n", _mm_movemask_epi8(a), _mm_movemask_pd(_mm_castsi128_pd(a)));
    __m128d x = _mm_set_pd(1.5, -0.0), y = _mm_set_pd(3.25, __builtin_nan(""));
    taked("divpd", _mm_div_pd(y, x));
    taked("minpd", _mm_min_pd(x, y));
    taked("maxpd", _mm_max_pd(y, x));
    taked("sqrtpd", _mm_sqrt_pd(_mm_set_pd(2, -1)));
    taked("cmpltpd", _mm_cmplt_pd(x, y));
    takes("addps", _mm_add_ps(_mm_set_ps(1e30f, 1, -1, 1e-40f), _mm_set_ps(1e30f, 2, 1, 1e-40f)));
    takes("mulss", _mm_mul_ss(_mm_set_ps(4, 3, 2, 1e20f), _mm_set_ps(1, 1, 1, 1e30f)));
    takes("shufps", _mm_shuffle_ps(_mm_set_ps(4, 3, 2, 1), _mm_set_ps(8, 7, 6, 5), 0x2d));
    take("cvtps2dq", _mm_cvtps_epi32(_mm_set_ps(2.5f, 3.5f, -1e20f, 1e9f)));
    take("cvttpd2dq", _mm_cvttpd_epi32(_mm_set_pd(-2.9, 1e10)));
    taked("cvtdq2pd", _mm_cvtepi32_pd(a));
    volatile double big = 1e19, negative = -7.9, tiny = 0.1;
    volatile float single = 3.7f;
    printf("conversions %ld %ld %d %ld %a %a\n", (long)big, (long)negative, (int)single, _mm_cvtsd_si64(_mm_set_sd(tiny * 35)), (double)(float)tiny,
           (double)(unsigned long)big);
    static const double values[] = {0.0, -0.0, 1.0, -1.0, 1e308, -1e-308, __builtin_inf(), -__builtin_inf(), __builtin_nan("")};
    for (int i = 0; i < 9; i++)
        for (int j = 0; j < 9; j++) sum = mix(sum, compare(values[i], values[j]));
    printf("comparisons %016lx\n", sum);
    if (__builtin_cpu_supports("sse4.2")) sse4();
    if (__builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul")) crypto();
    /* A hot loop with vectors, scalars and integers together, and moves between the register
     * files. */
    __m128i state = a;
    double total = 0;
    for (long i = 0; i < n; i++) {
        state = _mm_add_epi32(_mm_xor_si128(_mm_slli_epi32(state, 7), _mm_srli_epi32(state, 9)), _mm_set1_epi32((int)i));
        total = total * 0.5 + (double)(_mm_cvtsi128_si32(state) & 0xffff);
        if (total > 40000) state = _mm_shuffle_epi32(state, 0x93);
    }
    take("loop", state);
    printf("total %a, sum %016lx\n", total, sum);
    return 0;
}

#include <wmmintrin.h>
static void crypto(void) {
    __m128i a = _mm_set_epi64x(0x1122334455667788, 0x99aabbccddeeff00), k = _mm_set_epi64x(5, 6);
    take("aesenc", _mm_aesenc_si128(a, k));
    take("aesdeclast", _mm_aesdeclast_si128(a, k));
    take("aeskeygen", _mm_aeskeygenassist_si128(a, 0x1b));
    take("pclmulqdq", _mm_clmulepi64_si128(a, k, 0x11));
}
