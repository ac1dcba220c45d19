/* A loop that calls through a pointer, which changes four times. Between, it asks the kernel for
 * something, so that it comes out of native code. Prints a checksum. */
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

typedef uint64_t operation(uint64_t, uint64_t);

static uint64_t scaled(uint64_t x, uint64_t y) {
    return x * 3 + y;
}

static uint64_t mixed(uint64_t x, uint64_t y) {
    return (x ^ y) + 7;
}

static operation *volatile current;

int main(void) {
    uint64_t x = 1;
    for (int phase = 0; phase < 4; phase++) {
        current = phase % 2 ? mixed : scaled;
        for (int round = 0; round < 200; round++) {
            for (uint64_t i = 0; i < 500; i++) x = current(x, i);
            x += (uint64_t)(getppid() > 0);
        }
    }
    printf("%llu\n", (unsigned long long)x);
    return 0;
}
