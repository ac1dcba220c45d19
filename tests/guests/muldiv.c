/* Multiplication and division in every form and width, with all flags; checked by schoolbook
 * arithmetic where there is room.
 *
 * Hard for a translator: fixed registers, partial results, and flags that the manual leaves
 * undefined. */
#include "guest.h"

static const uint64_t operands[] = {0, 1, 2, 3, 7, 0x7f, 0x80, 0xff, 0x100, 0x7fff, 0x8000, 0xffff, 0x12345, 0x7fffffff,
                                    0x80000000, 0xffffffff, 0x100000000, 0x7fffffffffffffff, 0x8000000000000000,
                                    0xfffffffffffffffe, 0xffffffffffffffff};
enum { COUNT = sizeof operands / sizeof *operands };

#define MULTIPLY(op, reg)                                                                                          \
    do {                                                                                                           \
        uint64_t sum = 1;                                                                                          \
        for (int i = 0; i < COUNT; i++)                                                                            \
            for (int j = 0; j < COUNT; j++) {                                                                      \
                uint64_t a = operands[i], d = 0x5555555555555555, flags;                                           \
                __asm__ volatile("cmp %%rcx, %%rax\n\t" op " " reg "\n\tpushfq\n\tpopq %[flags]"                   \
                                 : "+&a"(a), "+&d"(d), [flags] "=&r"(flags) : "c"(operands[j]) : "cc", "memory");  \
                sum = mix(mix(mix(sum, a), d), flags & 0x8d5);                                                     \
            }                                                                                                      \
        printf("%-6s %016lx\n", op, sum);                                                                          \
    } while (0)

#define MULTIPLY2(op, x_reg, y_reg)                                                                               \
    do {                                                                                                          \
        uint64_t sum = 1;                                                                                         \
        for (int i = 0; i < COUNT; i++)                                                                           \
            for (int j = 0; j < COUNT; j++) {                                                                     \
                uint64_t x = operands[i], flags, z;                                                               \
                __asm__ volatile(op " " y_reg ", " x_reg "\n\tpushfq\n\tpopq %[flags]"                            \
                                 : [x] "+&r"(x), [flags] "=&r"(flags) : [y] "r"(operands[j]) : "cc", "memory");   \
                sum = mix(mix(sum, x), flags & 0x8d5);                                                            \
                __asm__ volatile(op " $-77, " y_reg ", " x_reg "\n\tpushfq\n\tpopq %[flags]"                      \
                                 : [x] "=&r"(z), [flags] "=&r"(flags) : [y] "r"(operands[j]), "0"(x) : "cc", "memory"); \
                sum = mix(mix(sum, z), flags & 0x8d5);                                                            \
            }                                                                                                     \
        printf("%-6s %016lx (two and three operands)\n", op, sum);                                                \
    } while (0)

/* 64 x 64 -> 128 by 32-bit halves. */
static void school(uint64_t a, uint64_t b, uint64_t *high, uint64_t *low) {
    uint64_t a0 = (uint32_t)a, a1 = a >> 32, b0 = (uint32_t)b, b1 = b >> 32;
    uint64_t middle = a1 * b0 + (a0 * b0 >> 32);
    uint64_t other = a0 * b1 + (uint32_t)middle;
    *low = other << 32 | (uint32_t)(a0 * b0);
    *high = a1 * b1 + (middle >> 32) + (other >> 32);
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 300);
    MULTIPLY("mulb", "%%cl");
    MULTIPLY("mulw", "%%cx");
    MULTIPLY("mull", "%%ecx");
    MULTIPLY("mulq", "%%rcx");
    MULTIPLY("imulb", "%%cl");
    MULTIPLY("imulw", "%%cx");
    MULTIPLY("imull", "%%ecx");
    MULTIPLY("imulq", "%%rcx");
    MULTIPLY2("imulw", "%w[x]", "%w[y]");
    MULTIPLY2("imull", "%k[x]", "%k[y]");
    MULTIPLY2("imulq", "%q[x]", "%q[y]");
    uint64_t sum = 1, seed = 12345, high, low;
    for (long i = 0; i < n; i++) {
        uint64_t a = next_random(&seed), b = next_random(&seed) >> (i & 63), hardware_high, hardware_low;
        __asm__("mulq %[b]" : "=a"(hardware_low), "=&d"(hardware_high) : "a"(a), [b] "r"(b) : "cc");
        school(a, b, &high, &low);
        CHECK(high == hardware_high && low == hardware_low);
        if (b) {
            uint64_t quotient, rest;
            /* (a * b + r) / b, with r < b, gives back a. */
            uint64_t r = next_random(&seed) % b;
            unsigned __int128 product = (unsigned __int128)a * b + r;
            __asm__("divq %[b]" : "=a"(quotient), "=d"(rest)
                    : "a"((uint64_t)product), "d"((uint64_t)(product >> 64)), [b] "r"(b) : "cc");
            CHECK(quotient == a && rest == r);
            int64_t sq = (int64_t)a / ((int64_t)b | 1), sr = (int64_t)a % ((int64_t)b | 1);
            CHECK(sq * ((int64_t)b | 1) + sr == (int64_t)a);
            sum = mix(mix(sum, (uint64_t)sq), (uint64_t)sr);
            int32_t q32 = (int32_t)a / ((int32_t)b | 1), r32 = (int32_t)a % ((int32_t)b | 1);
            uint32_t uq = (uint32_t)a / ((uint32_t)b | 1);
            int16_t q16 = (int16_t)((int16_t)a / ((int16_t)b | 1));
            int8_t q8 = (int8_t)((int8_t)a / ((int8_t)b | 1));
            sum = mix(mix(mix(mix(mix(sum, (uint32_t)q32), (uint32_t)r32), uq), (uint16_t)q16), (uint8_t)q8);
        }
        sum = mix(mix(sum, high), low);
    }
    printf("checked %016lx\n", sum);
#define DIVIDE(op, a0, d0, c0)                                                                          \
    do {                                                                                                \
        uint64_t a = a0, d = d0, c = c0, flags;                                                         \
        __asm__ volatile("cmp %%rax, %%rcx\n\t" op "\n\tpushfq\n\tpopq %[flags]"                        \
                         : "+&a"(a), "+&d"(d), [flags] "=&r"(flags) : "c"(c) : "cc", "memory");         \
        printf("%-11s %016lx %016lx\n", op, a, d);                                                      \
    } while (0)
    DIVIDE("divb %%cl", 0x123456789abc0123, 0x5555, 0x77);
    DIVIDE("idivb %%cl", 0x123456789abcff01, 0x5555, 0x77);
    DIVIDE("divw %%cx", 0x1111222233334444, 0xffff0012, 0x777);
    DIVIDE("idivw %%cx", 0x1111222233334444, 0xffffffffffffffff, 0x7777);
    DIVIDE("divl %%ecx", 0x1111222233334444, 0xffffffff00000012, 0x77777);
    DIVIDE("idivl %%ecx", 0x1111222233334444, 0xffffffffffffffff, 0x77777777);
    DIVIDE("divq %%rcx", 0x1111222233334444, 0x12, 0x7777777777);
    DIVIDE("idivq %%rcx", 0x1111222233334444, 0xffffffffffffffff, 0x7777777777777777);
    return 0;
}
