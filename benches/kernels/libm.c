/* A loop in SSE code that calls the C library's sin, exp, log and pow, which use wider vectors
 * where the machine has them. */
#include "kernel.h"
#include <math.h>

int main(int argc, char **argv) {
    long n = rounds(argc, argv, 400);
    uint64_t sum = 0;
    for (long round = 0; round < n; round++) {
        double total = 0.0, x = 0.001 * (double)(round % 97);
        for (int i = 0; i < 20000; i++) {
            x += 0.01;
            if (x > 3.0) x -= 2.99;
            total += sin(x) * 0.5 + exp(-x);
            if (i % 4 == 0) total += log(1.0 + x) - pow(x, 1.5);
        }
        uint64_t bits;
        memcpy(&bits, &total, sizeof bits);
        sum = mix(sum, bits);
    }
    return report("libm", n, sum);
}
