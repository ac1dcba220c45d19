/* Horspool's string search and a naive one over the same text: short inner loops that mostly fail
 * at once. */
#include "kernel.h"

enum { SIZE = 1 << 16 };
static char text[SIZE];

static long horspool(const char *word, long length) {
    long skip[256], found = 0;
    for (int i = 0; i < 256; i++) skip[i] = length;
    for (long i = 0; i < length - 1; i++) skip[(unsigned char)word[i]] = length - 1 - i;
    for (long at = 0; at + length <= SIZE; at += skip[(unsigned char)text[at + length - 1]]) {
        long i = length - 1;
        while (i >= 0 && text[at + i] == word[i]) i--;
        found += i < 0;
    }
    return found;
}

static long naive(const char *word, long length) {
    long found = 0;
    for (long at = 0; at + length <= SIZE; at++) {
        long i = 0;
        while (i < length && text[at + i] == word[i]) i++;
        found += i == length;
    }
    return found;
}

int main(int argc, char **argv) {
    long n = rounds(argc, argv, 3500);
    uint32_t seed = 362436069u;
    for (int i = 0; i < SIZE; i++) text[i] = "etaoin shrdlu"[next_random(&seed) % 13];
    uint64_t sum = 1;
    for (long r = 0; r < n; r++) {
        const char *word = text + r * 37 % (SIZE - 16);
        long length = 4 + r % 5;
        long a = horspool(word, length), b = naive(word, length);
        sum = mix(sum, (uint64_t)(a * 1000 + b));
    }
    return report("search", n, sum);
}
