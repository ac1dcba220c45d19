/* A loop that goes one way at first, and later three ways, as data says. Between, it asks the kernel
 * for something, so that it comes out of native code. Prints a checksum. */
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

static volatile uint8_t ways[64];

int main(void) {
    uint64_t x = 1;
    for (int phase = 0; phase < 4; phase++) {
        for (int i = 0; i < 64; i++) ways[i] = phase % 2 ? i * 7 % 3 : 0;
        for (int round = 0; round < 200; round++) {
            for (uint64_t i = 0; i < 500; i++) {
                switch (ways[i % 64]) {
                    case 0: x = x * 3 + i; break;
                    case 1: x ^= i << 3; break;
                    default: x -= i;
                }
            }
            x += (uint64_t)(getppid() > 0);
        }
    }
    printf("%llu\n", (unsigned long long)x);
    return 0;
}
