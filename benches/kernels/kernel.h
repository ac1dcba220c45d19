/* Shared by the kernels: the number of rounds from the command line, a small generator of random
 * numbers, a checksum that depends on the order of its values. */
#ifndef KERNEL_H
#define KERNEL_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The number of rounds that the command line asks for. */
static inline long rounds(int argc, char **argv, long otherwise) {
    return argc > 1 ? atol(argv[1]) : otherwise;
}

/* Marsaglia's xorshift32; the state must not be 0. */
static inline uint32_t next_random(uint32_t *state) {
    uint32_t x = *state;
    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    return *state = x;
}

/* The checksum with one more value, by the FNV-1a prime and a shift. */
static inline uint64_t mix(uint64_t sum, uint64_t value) {
    sum = (sum ^ value) * 0x100000001b3ULL;
    return sum ^ (sum >> 29);
}

/* Prints the result line; returns the exit status. */
static inline int report(const char *name, long n, uint64_t sum) {
    printf("%s %ld %016llx\n", name, n, (unsigned long long)sum);
    return 0;
}
#endif
