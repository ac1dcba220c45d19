/* Primes below two hundred thousand by Eratosthenes: byte stores with a changing stride. */
#include "kernel.h"

enum { LIMIT = 200000 };
static unsigned char composite[LIMIT];

int main(int argc, char **argv) {
    long n = rounds(argc, argv, 2000);
    uint64_t sum = 1;
    for (long r = 0; r < n; r++) {
        memset(composite, 0, sizeof composite);
        int count = 0;
        for (int i = 2; i < LIMIT; i++) {
            if (composite[i]) continue;
            count++;
            for (long j = (long)i * i; j < LIMIT; j += i) composite[j] = 1;
        }
        sum = mix(sum, (uint64_t)count + (uint64_t)r);
    }
    return report("sieve", n, sum);
}
