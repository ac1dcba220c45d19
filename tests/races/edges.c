/* A loop whose body is longer than 128 bytes, unoptimised: its closing jump has a displacement of
 * 32 bits, and its head begins with a short instruction. */
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
    long rounds = argc > 1 ? atol(argv[1]) : 20000;
    unsigned long a = 1, b = 2, c = 3, d = 4;
    for (long i = 0; i < rounds; i++) {
        a += b * 3 + (unsigned long)i;
        b ^= a >> 3;
        c += b + 7;
        d = d * 5 + c;
        a ^= d >> 11;
        b += c ^ d;
        c -= a << 2;
        d += b ^ a;
        a += c >> 5;
    }
    printf("%lx %lx %lx %lx\n", a, b, c, d);
    return 0;
}
