/* Shared by the guests: a checksum that depends on order, self-checks that name their line, a
 * small generator of pseudo-random numbers. */
#ifndef GUEST_H
#define GUEST_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline uint64_t mix(uint64_t sum, uint64_t value) {
    sum ^= value;
    sum *= 0x100000001b3ULL;
    return sum ^ (sum >> 29);
}

static inline uint64_t mix_bytes(uint64_t sum, const void *data, size_t size) {
    const unsigned char *bytes = (const unsigned char *)data;
    for (size_t i = 0; i < size; i++) sum = mix(sum, bytes[i]);
    return sum;
}

static inline uint64_t next_random(uint64_t *state) {
    uint64_t x = *state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return *state = x;
}

/* The first argument as a number of iterations. */
static inline long iterations(int argc, char **argv, long otherwise) {
    return argc > 1 ? atol(argv[1]) : otherwise;
}

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fflush(stdout);                                                         \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
            _Exit(99);                                                              \
        }                                                                           \
    } while (0)
#endif
