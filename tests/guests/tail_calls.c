/* Tail calls: mutual, through pointers, with stack arguments; continuation passing; deep enough
 * to fail if a frame stayed.
 *
 * Hard for a translator: a jump into another function is no loop, and its return belongs to an
 * older call. */
#include "guest.h"

typedef uint64_t (*state)(uint64_t, uint64_t, long);
static state volatile table[4];

__attribute__((noinline, optimize("O2"))) static uint64_t s0(uint64_t a, uint64_t b, long n) {
    if (n == 0) return a ^ b;
    return table[(a ^ (uint64_t)n) & 3](a + b, b * 3, n - 1);
}
__attribute__((noinline, optimize("O2"))) static uint64_t s1(uint64_t a, uint64_t b, long n) {
    if (n == 0) return a + b;
    return s0(b, a ^ 0x55, n - 1);
}
__attribute__((noinline, optimize("O2"))) static uint64_t s2(uint64_t a, uint64_t b, long n) {
    if (n == 0) return a - b;
    return (a & 1 ? s0 : s1)(a >> 1 | a << 63, b, n - 1);
}
__attribute__((noinline, optimize("O2"))) static uint64_t s3(uint64_t a, uint64_t b, long n) {
    if (n == 0) return b;
    return table[n & 3](b, a, n - 1);
}

typedef uint64_t (*continuation)(void *, uint64_t);
struct frame { continuation next; struct frame *outer; uint64_t n; };
static struct frame pool[64];
static uint64_t finish(void *f, uint64_t value) { (void)f; return value; }
static uint64_t times(void *f, uint64_t value) {
    struct frame *frame = f;
    return frame->outer->next(frame->outer, value * frame->n + 1);
}
static uint64_t factorial(uint64_t n, struct frame *k) {
    if (n == 0) return k->next(k, 1);
    struct frame *f = k + 1;
    *f = (struct frame){times, k, n};
    return factorial(n - 1, f);
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 3000);
    table[0] = s0, table[1] = s1, table[2] = s2, table[3] = s3;
    for (uint64_t i = 0; i < 4; i++) printf("%016lx\n", table[i](i, 77, n));
    pool[0].next = finish;
    uint64_t sum = 1;
    for (uint64_t i = 0; i < 40; i++) sum = mix(sum, factorial(i, pool));
    printf("factorials %016lx\n", sum);
    return 0;
}
