/* Every ALU operation at every width; after it every setcc, cmovcc and jcc, and the flags
 * themselves by pushf. Flags that the manual leaves undefined are included: they must be those
 * of this processor.
 *
 * Hard for a translator: it computes a condition from the operands rather than from flag bits. */
#include "guest.h"

static const uint64_t operands[] = {0, 1, 2, 0x7f, 0x80, 0x81, 0xff, 0x7fff, 0x8000, 0xffff, 0x7fffffff, 0x80000000,
                                    0xffffffff, 0x7fffffffffffffff, 0x8000000000000000, 0xffffffffffffffff,
                                    0x123456789abcdef0, 0x0f0f0f0f0f0f0f0f};
enum { COUNT = sizeof operands / sizeof *operands };

static uint64_t sum_set, sum_flags, sum_value;

/* One probe runs the operation anew, so that each condition reads flags straight from it. */
#define SET_PROBE(op, cc, n, a, b)                                                                                    \
    ({                                                                                                                \
        uint64_t x = (a), y = (b);                                                                                    \
        uint8_t bit;                                                                                                  \
        __asm__ volatile(op "set" cc " %b[bit]" : [x] "+&r"(x), [y] "+&r"(y), [bit] "=&r"(bit) : "c"((uint8_t)y) : "cc"); \
        (uint64_t)bit << (n);                                                                                         \
    })
#define CMOV_PROBE(op, cc, n, a, b)                                                                      \
    ({                                                                                                   \
        uint64_t x = (a), y = (b), bit = 0, one = 1;                                                     \
        __asm__ volatile(op "cmov" cc " %[one], %[bit]"                                                  \
                         : [x] "+&r"(x), [y] "+&r"(y), [bit] "+&r"(bit) : [one] "r"(one), "c"((uint8_t)y) : "cc"); \
        bit << (n);                                                                                      \
    })
#define FLAGS_OF(op, a, b, value)                                                                     \
    ({                                                                                                \
        uint64_t x = (a), y = (b), flags;                                                             \
        __asm__ volatile(op "pushfq\n\tpopq %[flags]"                                                 \
                         : [x] "+&r"(x), [y] "+&r"(y), [flags] "=&r"(flags) : "c"((uint8_t)y) : "cc", "memory"); \
        value = x;                                                                                    \
        flags & 0x8d5;                                                                                \
    })

/* The conditions that follow from the flags' bits, computed without any condition code. */
static uint64_t conditions_of(uint64_t flags) {
    unsigned cf = flags & 1, pf = flags >> 2 & 1, zf = flags >> 6 & 1, sf = flags >> 7 & 1, of = flags >> 11 & 1;
    unsigned holds[8] = {of, cf, zf, cf | zf, sf, pf, sf ^ of, (sf ^ of) | zf};
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++) bits |= (uint64_t)(holds[i] ? 1 : 2) << (2 * i);
    return bits;
}

#define TEST(name, op_text)                                                     \
    __attribute__((noinline)) static void name(void) {                          \
        for (int i = 0; i < COUNT; i++)                                         \
            for (int j = 0; j < COUNT; j++) {                                   \
                uint64_t a = operands[i], b = operands[j], value, set = 0, cmov = 0; \
                uint64_t flags = FLAGS_OF(op_text, a, b, value);                \
                CONDITIONS_SET(op_text)                                         \
                CONDITIONS_CMOV(op_text)                                        \
                uint64_t expected = conditions_of(flags);                       \
                CHECK(set == expected);                                         \
                CHECK(cmov == expected);                                        \
                sum_flags = mix(sum_flags, flags);                              \
                sum_value = mix(sum_value, value);                              \
                sum_set = mix(sum_set, set);                                    \
            }                                                                   \
        printf("%-8s flags %016lx values %016lx conditions %016lx\n", #name, sum_flags, sum_value, sum_set); \
    }
#define CONDITIONS_SET(op)                                                                                       \
    set = SET_PROBE(op, "o", 0, a, b) | SET_PROBE(op, "no", 1, a, b) | SET_PROBE(op, "b", 2, a, b) |             \
          SET_PROBE(op, "ae", 3, a, b) | SET_PROBE(op, "e", 4, a, b) | SET_PROBE(op, "ne", 5, a, b) |            \
          SET_PROBE(op, "be", 6, a, b) | SET_PROBE(op, "a", 7, a, b) | SET_PROBE(op, "s", 8, a, b) |             \
          SET_PROBE(op, "ns", 9, a, b) | SET_PROBE(op, "p", 10, a, b) | SET_PROBE(op, "np", 11, a, b) |          \
          SET_PROBE(op, "l", 12, a, b) | SET_PROBE(op, "ge", 13, a, b) | SET_PROBE(op, "le", 14, a, b) |         \
          SET_PROBE(op, "g", 15, a, b);
#define CONDITIONS_CMOV(op)                                                                                      \
    cmov = CMOV_PROBE(op, "o", 0, a, b) | CMOV_PROBE(op, "no", 1, a, b) | CMOV_PROBE(op, "b", 2, a, b) |         \
           CMOV_PROBE(op, "ae", 3, a, b) | CMOV_PROBE(op, "e", 4, a, b) | CMOV_PROBE(op, "ne", 5, a, b) |        \
           CMOV_PROBE(op, "be", 6, a, b) | CMOV_PROBE(op, "a", 7, a, b) | CMOV_PROBE(op, "s", 8, a, b) |         \
           CMOV_PROBE(op, "ns", 9, a, b) | CMOV_PROBE(op, "p", 10, a, b) | CMOV_PROBE(op, "np", 11, a, b) |      \
           CMOV_PROBE(op, "l", 12, a, b) | CMOV_PROBE(op, "ge", 13, a, b) | CMOV_PROBE(op, "le", 14, a, b) |     \
           CMOV_PROBE(op, "g", 15, a, b);

#define WIDTHS(name, op)                       \
    TEST(name##_b, op "b %b[y], %b[x]\n\t")    \
    TEST(name##_w, op "w %w[y], %w[x]\n\t")    \
    TEST(name##_l, op "l %k[y], %k[x]\n\t")    \
    TEST(name##_q, op "q %q[y], %q[x]\n\t")
#define WIDTHS1(name, op)             \
    TEST(name##_b, op "b %b[x]\n\t")  \
    TEST(name##_w, op "w %w[x]\n\t")  \
    TEST(name##_l, op "l %k[x]\n\t")  \
    TEST(name##_q, op "q %q[x]\n\t")

WIDTHS(add, "add")
WIDTHS(sub, "sub")
WIDTHS(cmp, "cmp")
WIDTHS(and, "and")
WIDTHS(or, "or")
WIDTHS(xor, "xor")
WIDTHS(test, "test")
WIDTHS1(inc, "stc\n\tinc")
WIDTHS1(dec, "stc\n\tdec")
WIDTHS1(neg, "neg")
WIDTHS1(not, "test %%cl, %%cl\n\tnot")
WIDTHS(adc0, "clc\n\tadc")
WIDTHS(adc1, "stc\n\tadc")
WIDTHS(sbb0, "clc\n\tsbb")
WIDTHS(sbb1, "stc\n\tsbb")
WIDTHS(xadd, "xadd")

#define RUN(name) name##_b(), name##_w(), name##_l(), name##_q()

/* The 16 conditional jumps, in a loop whose direction changes with the data. */
__attribute__((noinline)) static uint64_t jumps(uint64_t a, uint64_t b) {
    uint64_t bits;
    __asm__ volatile(
        "xor %%eax, %%eax\n\t"
#define J(cc, bit) "cmpq %[b], %[a]\n\tj" cc " 1f\n\tjmp 2f\n\t1: or $" bit ", %%eax\n\t2:\n\t"
        J("o", "1") J("no", "2") J("b", "4") J("ae", "8") J("e", "16") J("ne", "32") J("be", "64") J("a", "128")
        J("s", "256") J("ns", "512") J("p", "1024") J("np", "2048") J("l", "4096") J("ge", "8192") J("le", "16384")
        J("g", "32768")
        : "=&a"(bits) : [a] "r"(a), [b] "r"(b) : "cc");
    return bits;
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 1);
    for (long round = 0; round < n; round++) {
        RUN(add), RUN(sub), RUN(cmp), RUN(and), RUN(or), RUN(xor), RUN(test);
        RUN(inc), RUN(dec), RUN(neg), RUN(not);
        RUN(adc0), RUN(adc1), RUN(sbb0), RUN(sbb1), RUN(xadd);
    }
    uint64_t sum = 1, value;
    for (int i = 0; i < COUNT; i++)
        for (int j = 0; j < COUNT; j++) {
            uint64_t bits = jumps(operands[i], operands[j]);
            uint64_t flags = FLAGS_OF("cmpq %q[y], %q[x]\n\t", operands[i], operands[j], value);
            CHECK(bits == conditions_of(flags));
            sum = mix(sum, bits);
        }
    printf("jumps %016lx\n", sum);
    return 0;
}
