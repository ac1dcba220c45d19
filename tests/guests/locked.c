/* Atomic read-modify-write: cmpxchg, cmpxchg8b, cmpxchg16b, xadd, xchg, lock with every
 * operation that takes it.
 *
 * Hard for a translator: the memory operand must be accessed once, with the flags of the
 * instruction. */
#include <stdatomic.h>
#include "guest.h"

static uint64_t sum = 1;

#define LOCKED(text, init, operand)                                                                        \
    do {                                                                                                   \
        uint64_t cell = (init), reg = (operand), flags;                                                    \
        __asm__ volatile("cmpq $0, %[r]\n\tclc\n\t" text "\n\tpushfq\n\tpopq %[f]"                                          \
                         : [m] "+m"(cell), [r] "+&r"(reg), [f] "=&r"(flags) : : "cc", "memory");           \
        sum = mix(mix(mix(sum, cell), reg), flags & 0x8d5);                                                \
        printf("%-28s %016lx %016lx %03lx\n", text, cell, reg, flags & 0x8d5);                             \
    } while (0)

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 1500);
    const uint64_t a = 0x80000000ffffff80, b = 0x7fffffff0000017f;
    LOCKED("lock addq %[r], %[m]", a, b);
    LOCKED("lock addb %b[r], %[m]", a, b);
    LOCKED("lock adcl %k[r], %[m]", a, b);
    LOCKED("lock subw %w[r], %[m]", a, b);
    LOCKED("lock sbbq %[r], %[m]", a, b);
    LOCKED("lock andl $0xff0, %[m]", a, b);
    LOCKED("lock orq %[r], %[m]", a, b);
    LOCKED("lock xorw %w[r], %[m]", a, b);
    LOCKED("lock incb %[m]", a, b);
    LOCKED("lock decq %[m]", a, b);
    LOCKED("lock negl %[m]", a, b);
    LOCKED("lock notw %[m]", a, b);
    LOCKED("lock btsq $63, %[m]", a, b);
    LOCKED("lock btrl $7, %[m]", a, b);
    LOCKED("lock btcw $0, %[m]", a, b);
    LOCKED("lock xaddq %[r], %[m]", a, b);
    LOCKED("lock xaddb %b[r], %[m]", a, b);
    LOCKED("xchgq %[r], %[m]", a, b);
    LOCKED("xchgw %w[r], %[m]", a, b);
    for (int equal = 0; equal < 2; equal++) {
        uint64_t cell = 100, rax = equal ? 100 : 0xffffffff00000064, flags;
        __asm__ volatile("lock cmpxchgq %[new], %[m]\n\tpushfq\n\tpopq %[f]"
                         : [m] "+m"(cell), "+a"(rax), [f] "=&r"(flags) : [new] "r"(7UL) : "cc", "memory");
        printf("cmpxchgq %d: %lx %lx %03lx\n", equal, cell, rax, flags & 0x8d5);
        cell = 0x1122334400000064;
        __asm__ volatile("lock cmpxchgl %k[new], %k[m]\n\tpushfq\n\tpopq %[f]"
                         : [m] "+m"(cell), "+a"(rax), [f] "=&r"(flags) : [new] "r"(7UL) : "cc", "memory");
        printf("cmpxchgl %d: %lx %lx %03lx\n", equal, cell, rax, flags & 0x8d5);
    }
    uint64_t pair[2] __attribute__((aligned(16))) = {1, 2};
    for (int i = 0; i < 2; i++) {
        uint64_t low = 1, high = 2, flags;
        __asm__ volatile("lock cmpxchg16b %[m]\n\tpushfq\n\tpopq %[f]"
                         : [m] "+m"(pair), "+a"(low), "+d"(high), [f] "=&S"(flags) : "b"(30UL), "c"(40UL) : "cc", "memory");
        printf("cmpxchg16b: %lu %lu, %lu %lu, zf %lu\n", pair[0], pair[1], low, high, flags >> 6 & 1);
        uint32_t l = 30, h = 0;
        __asm__ volatile("lock cmpxchg8b %[m]\n\tpushfq\n\tpopq %[f]"
                         : [m] "+m"(pair[0]), "+a"(l), "+d"(h), [f] "=&S"(flags) : "b"(50U), "c"(60U) : "cc", "memory");
        printf("cmpxchg8b: %lx, %u %u, zf %lu\n", pair[0], l, h, flags >> 6 & 1);
    }
    _Atomic uint64_t counter = 0;
    _Atomic uint32_t maximum = 0;
    uint64_t seed = 5;
    for (long i = 0; i < n; i++) {
        uint32_t value = (uint32_t)next_random(&seed), seen = atomic_load(&maximum);
        while (seen < value && !atomic_compare_exchange_weak(&maximum, &seen, value)) {
        }
        atomic_fetch_add(&counter, value & 255);
        atomic_fetch_xor(&counter, (uint64_t)i << 32);
        if (i % 16 == 0) atomic_thread_fence(memory_order_seq_cst);
    }
    printf("atomics %016lx %08x sum %016lx\n", counter, maximum, sum);
    return 0;
}
