/* Bit tests and scans, counts, BMI and BMI2, byte swaps, movbe, crc32; results are checked
 * against plain C.
 *
 * Hard for a translator: a bit test in memory reaches beyond its operand, and scans of zero have
 * results that the manual leaves undefined. */
#define _GNU_SOURCE
#include <cpuid.h>
#include "guest.h"

static uint64_t sum = 1;

#define WITH_FLAGS(text, va, vb)                                                                                \
    ({                                                                                                        \
        uint64_t x_ = (va), flags_;                                                                            \
        __asm__ volatile("cmp $-1, %[y]\n\t" text "\n\tpushfq\n\tpopq %[f]"                                   \
                         : [x] "+&r"(x_), [f] "=&r"(flags_) : [y] "r"((uint64_t)(vb)) : "cc", "memory");       \
        sum = mix(mix(sum, x_), flags_ & 0x8d5);                                                              \
        x_;                                                                                                   \
    })

static int has(unsigned leaf, unsigned reg, unsigned bit) {
    unsigned r[4];
    if (!__get_cpuid_count(leaf, 0, &r[0], &r[1], &r[2], &r[3])) return 0;
    return r[reg] >> bit & 1;
}

static unsigned slow_crc32c(unsigned crc, const unsigned char *p, size_t n) {
    while (n--) {
        crc ^= *p++;
        for (int k = 0; k < 8; k++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78 : 0);
    }
    return crc;
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 150);
    uint64_t seed = 7;
    uint64_t memory[8] = {0};
    for (long i = 0; i < n; i++) {
        uint64_t x = next_random(&seed), y = i < 3 ? (uint64_t)i : next_random(&seed) >> (i & 63);
        CHECK(WITH_FLAGS("btq %[y], %[x]", x, y) == x);
        CHECK(WITH_FLAGS("btsq %[y], %[x]", x, y) == (x | 1UL << (y & 63)));
        CHECK(WITH_FLAGS("btrl %k[y], %k[x]", x, y) == (uint32_t)(x & ~(1UL << (y & 31))));
        WITH_FLAGS("btcw %w[y], %w[x]", x, y);
        WITH_FLAGS("btsw $9, %w[x]", x, y);
        WITH_FLAGS("btrq $63, %q[x]", x, y);
        /* With a source of zero the destination keeps its value on these processors. */
        WITH_FLAGS("bsfq %[y], %[x]", x, y);
        WITH_FLAGS("bsrq %[y], %[x]", x, y);
        WITH_FLAGS("bsfl %k[y], %k[x]", x, y);
        WITH_FLAGS("bsrw %w[y], %w[x]", x, y);
        CHECK(WITH_FLAGS("bswapq %[x]", x, y) == __builtin_bswap64(x));
        CHECK(WITH_FLAGS("bswapl %k[x]", x, y) == __builtin_bswap32((uint32_t)x));
        /* The bit string form reaches beyond its operand. */
        long bit = (long)(y & 511);
        __asm__ volatile("btcq %[bit], %[m]" : [m] "+m"(memory[0]), "+m"(memory) : [bit] "r"(bit) : "cc", "memory");
        long back = -(long)(y & 255) - 1;
        __asm__ volatile("btsl %k[bit], (%[m])" : : [m] "r"(&memory[4]), [bit] "r"(back) : "cc", "memory");
    }
    printf("tests and scans %016lx\n", sum);
    printf("bit strings %016lx\n", mix_bytes(1, memory, sizeof memory));
    if (has(1, 2, 23)) {
        for (long i = 0; i < n; i++) {
            uint64_t y = i == 0 ? 0 : next_random(&seed) & next_random(&seed);
            int count = 0;
            for (int k = 0; k < 64; k++) count += y >> k & 1;
            CHECK(WITH_FLAGS("popcntq %[y], %[x]", 5, y) == (uint64_t)count);
            WITH_FLAGS("popcntw %w[y], %w[x]", 0x1234567812345678, y);
        }
        printf("popcnt %016lx\n", sum);
    }
    if (has(7, 1, 3) && has(0x80000001, 2, 5)) {
        for (long i = 0; i < n; i++) {
            uint64_t y = i == 0 ? 0 : next_random(&seed) >> (i & 63), x = next_random(&seed);
            CHECK(WITH_FLAGS("tzcntq %[y], %[x]", 5, y) == (y ? (uint64_t)__builtin_ctzl(y) : 64));
            CHECK(WITH_FLAGS("lzcntq %[y], %[x]", 5, y) == (y ? (uint64_t)__builtin_clzl(y) : 64));
            WITH_FLAGS("tzcntw %w[y], %w[x]", x, y);
            WITH_FLAGS("lzcntl %k[y], %k[x]", x, y);
            CHECK(WITH_FLAGS("andnq %[y], %[x], %[x]", x, y) == (~x & y));
            CHECK(WITH_FLAGS("blsrq %[y], %[x]", x, y) == (y & (y - 1)));
            CHECK(WITH_FLAGS("blsiq %[y], %[x]", x, y) == (y & -y));
            CHECK(WITH_FLAGS("blsmskl %k[y], %k[x]", x, y) == (uint32_t)((uint32_t)y ^ ((uint32_t)y - 1)));
            WITH_FLAGS("bextrq %[x], %[y], %[x]", (x & 63) | 0x1100, y);
        }
        printf("bmi1 %016lx\n", sum);
    }
    if (has(7, 1, 8)) {
        for (long i = 0; i < n; i++) {
            uint64_t y = next_random(&seed), x = next_random(&seed), deposited = 0, extracted = 0;
            for (int k = 0, from = 0; k < 64; k++)
                if (y >> k & 1) {
                    deposited |= (x >> from & 1) << k;
                    extracted |= (x >> k & 1) << from++;
                }
            CHECK(WITH_FLAGS("pdepq %[y], %[x], %[x]", x, y) == deposited);
            CHECK(WITH_FLAGS("pextq %[y], %[x], %[x]", x, y) == extracted);
            CHECK(WITH_FLAGS("shlxq %[y], %[x], %[x]", x, y) == x << (y & 63));
            CHECK(WITH_FLAGS("sarxl %k[y], %k[x], %k[x]", x, y) == (uint32_t)((int32_t)x >> (y & 31)));
            CHECK(WITH_FLAGS("shrxq %[y], %[x], %[x]", x, y) == x >> (y & 63));
            CHECK(WITH_FLAGS("rorxq $13, %[y], %[x]", x, y) == (y >> 13 | y << 51));
            WITH_FLAGS("bzhiq %[y], %[x], %[x]", x, y & 127);
            uint64_t high, low;
            __asm__("mulxq %[y], %[low], %[high]" : [high] "=r"(high), [low] "=r"(low) : "d"(x), [y] "r"(y));
            CHECK(high == (uint64_t)((unsigned __int128)x * y >> 64) && low == x * y);
        }
        printf("bmi2 %016lx\n", sum);
    }
    if (has(1, 2, 22)) {
        uint64_t cell = 0x0102030405060708, x = 0;
        __asm__ volatile("movbeq %1, %0" : "=r"(x) : "m"(cell));
        __asm__ volatile("movbew %w1, %0" : "=m"(cell) : "r"(x));
        printf("movbe %016lx %016lx\n", x, cell);
    }
    if (has(1, 2, 20)) {
        unsigned char text[64];
        for (int i = 0; i < 64; i++) text[i] = (unsigned char)(i * i + 3);
        uint64_t crc = 0xffffffff;
        for (int i = 0; i < 7; i++) __asm__("crc32q %1, %0" : "+r"(crc) : "m"(*(uint64_t *)(text + 8 * i)));
        __asm__("crc32l %1, %k0" : "+r"(crc) : "m"(*(uint32_t *)(text + 56)));
        __asm__("crc32w %1, %k0" : "+r"(crc) : "m"(*(uint16_t *)(text + 60)));
        __asm__("crc32b %1, %k0" : "+r"(crc) : "m"(text[62]));
        CHECK(crc == slow_crc32c(0xffffffff, text, 63));
        printf("crc32 %08lx\n", crc);
    }
    return 0;
}
