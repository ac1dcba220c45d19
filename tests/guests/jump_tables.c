/* Dense, sparse, fall-through and nested switches: jump tables, comparison trees, bit tests.
 *
 * Hard for a translator: an indirect jump whose target follows the data. */
#include "guest.h"

#define CASE(n) case n: x = x * (2 * n + 1) + ((n) ^ 0x55); break;
#define CASE4(n) CASE(n) CASE(n + 1) CASE(n + 2) CASE(n + 3)
#define CASE16(n) CASE4(n) CASE4(n + 4) CASE4(n + 8) CASE4(n + 12)
#define CASE64(n) CASE16(n) CASE16(n + 16) CASE16(n + 32) CASE16(n + 48)

__attribute__((noinline)) static uint64_t dense(uint64_t x, unsigned selector) {
    switch (selector) {
        CASE64(0) CASE64(64) CASE64(128) CASE64(192)
        default: x ^= 0xdeadbeef;
    }
    return x;
}

__attribute__((noinline)) static int sparse(int key) {
    switch (key) {
        case -1000000: return 1;
        case -7: return 2;
        case 0: return 3;
        case 13: return 4;
        case 1000: return 5;
        case 1001: return 6;
        case 65536: return 7;
        case 2147483647: return 8;
        case -2147483647 - 1: return 9;
        default: return 0;
    }
}

__attribute__((noinline)) static unsigned duff(unsigned char *to, const unsigned char *from, unsigned count) {
    unsigned n = (count + 7) / 8, done = 0;
    switch (count % 8) {
        case 0: do { *to++ = *from++; done++; /* fall through */
        case 7: *to++ = *from++; done++; /* fall through */
        case 6: *to++ = *from++; done++; /* fall through */
        case 5: *to++ = *from++; done++; /* fall through */
        case 4: *to++ = *from++; done++; /* fall through */
        case 3: *to++ = *from++; done++; /* fall through */
        case 2: *to++ = *from++; done++; /* fall through */
        case 1: *to++ = *from++; done++;
                } while (--n > 0);
    }
    return done;
}

__attribute__((noinline)) static int character_class(char c) {
    switch (c) {
        case 'a': case 'e': case 'i': case 'o': case 'u': return 1;
        case '0' ... '9': return 2;
        case ' ': case '\t': case '\n': return 3;
        case '_': case '$': return 4;
        default: return 0;
    }
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 6000);
    uint64_t x = 1, seed = 42;
    for (long i = 0; i < n; i++) x = dense(x, (unsigned)(next_random(&seed) % 260));
    printf("dense, random order %016lx\n", x);
    for (long i = 0; i < n; i++) x = dense(x, (unsigned)i & 255);
    printf("dense, ascending %016lx\n", x);
    for (long i = 0; i < n; i++) x = dense(x, 77);
    printf("dense, constant %016lx\n", x);
    static const int keys[] = {-1000000, -7, 0, 13, 1000, 1001, 65536, 2147483647, -2147483647 - 1, 1, -8, 999, 65535};
    for (unsigned i = 0; i < sizeof keys / sizeof *keys; i++) printf("%d ", sparse(keys[i]));
    printf("\n");
    unsigned char from[100], to[100];
    for (int i = 0; i < 100; i++) from[i] = (unsigned char)(i * 37);
    for (unsigned count = 1; count < 100; count++) {
        memset(to, 0, sizeof to);
        CHECK(duff(to, from, count) == count);
        CHECK(memcmp(to, from, count) == 0);
    }
    int classes[5] = {0};
    for (const char *p = "the 3 quick_brown foxes\tjumped $over 12 lazy dogs\n"; *p; p++) classes[character_class(*p)]++;
    for (int i = 0; i < 5; i++) printf("class %d: %d\n", i, classes[i]);
    return 0;
}
