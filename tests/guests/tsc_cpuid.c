/* rdtsc and rdtscp never go back; cpuid is stable and names the vendor; rdrand fills; xgetbv
 * agrees with cpuid. */
#include <cpuid.h>
#include "guest.h"

static inline uint64_t rdtsc(void) {
    uint32_t low, high;
    __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
    return (uint64_t)high << 32 | low;
}

static inline uint64_t rdtscp(uint32_t *processor) {
    uint32_t low, high;
    __asm__ volatile("rdtscp" : "=a"(low), "=d"(high), "=c"(*processor));
    return (uint64_t)high << 32 | low;
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 300);
    uint64_t last = rdtsc(), first = last;
    for (long i = 0; i < n; i++) {
        uint64_t now = rdtsc();
        CHECK(now >= last);
        last = now;
    }
    CHECK(last > first);
    uint32_t processor;
    uint64_t with_processor = rdtscp(&processor);
    CHECK(with_processor >= last);
    unsigned a, b, c, d, a2, b2, c2, d2;
    __cpuid(0, a, b, c, d);
    printf("vendor %.4s%.4s%.4s, leaves %d\n", (char *)&b, (char *)&d, (char *)&c, a > 6);
    for (int i = 0; i < 10; i++) {
        __cpuid(0, a2, b2, c2, d2);
        CHECK(a == a2 && b == b2 && c == c2 && d == d2);
    }
    __cpuid(1, a, b, c, d);
    printf("signature %08x features %08x %d\n", a, d, (c >> 27) & 1);
    if (c >> 27 & 1) {
        uint32_t low, high;
        __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        printf("xcr0 %08x%08x\n", high, low);
    }
    if (c >> 30 & 1) {
        unsigned long one = 0, two = 0;
        unsigned char ok1, ok2;
        __asm__ volatile("rdrand %0\n\tsetc %1" : "=r"(one), "=qm"(ok1) : : "cc");
        __asm__ volatile("rdrand %0\n\tsetc %1" : "=r"(two), "=qm"(ok2) : : "cc");
        printf("rdrand ok %d, differs %d\n", ok1 && ok2, one != two);
    }
    return 0;
}
