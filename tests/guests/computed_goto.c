/* An interpreter threaded by computed gotos: an indirect jump at the end of each operation.
 *
 * Hard for a translator: many indirect jumps, each with many targets, and no single dispatch
 * head. */
#include "guest.h"

__attribute__((noinline)) static uint64_t run(const unsigned char *code, uint64_t x, long fuel) {
    static void *const labels[] = {&&add, &&xor_, &&rotate, &&mul, &&loop, &&half, &&swap, &&end};
    uint64_t y = 0x9e3779b97f4a7c15;
    const unsigned char *pc = code;
#define NEXT goto *labels[*pc++]
    NEXT;
add: x += y; NEXT;
xor_: x ^= y >> 3; NEXT;
rotate: x = x << 11 | x >> 53; NEXT;
mul: x *= y | 1; NEXT;
half: if (x & 1) pc++; x >>= 1; NEXT;
swap: { uint64_t t = x; x = y; y = t; } NEXT;
loop: if (--fuel > 0) { pc = code; } NEXT;
end: return x ^ y;
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 300);
    static const unsigned char a[] = {0, 2, 1, 3, 6, 0, 5, 1, 2, 4, 7}, b[] = {5, 6, 5, 0, 3, 4, 7}, c[] = {2, 4, 7};
    uint64_t sum = 1;
    sum = mix(sum, run(a, 1, n));
    printf("%016lx\n", sum);
    sum = mix(sum, run(b, 2, n));
    printf("%016lx\n", sum);
    sum = mix(sum, run(c, 3, n * 5));
    printf("%016lx\n", sum);
    /* A state machine over text, one label per state. */
    const char *p = "12 + 34*(5 - 6) / foo_7 == 0x8f";
    int numbers = 0, words = 0, others = 0;
start:
    switch (*p) {
        case 0: goto done;
        case ' ': p++; goto start;
        case '0' ... '9': numbers++; goto number;
        case 'a' ... 'z': words++; goto word;
        default: others++; p++; goto start;
    }
number:
    while ((*p >= '0' && *p <= '9') || *p == 'x' || (*p >= 'a' && *p <= 'f')) p++;
    goto start;
word:
    while ((*p >= 'a' && *p <= 'z') || *p == '_' || (*p >= '0' && *p <= '9')) p++;
    goto start;
done:
    printf("%d numbers, %d words, %d others\n", numbers, words, others);
    return 0;
}
