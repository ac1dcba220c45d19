/* Recursive Fibonacci numbers and Ackermann's function: calls and returns, hardly anything else. */
#include "kernel.h"

__attribute__((noinline)) static uint64_t fib(uint64_t n) {
    return n < 2 ? n : fib(n - 1) + fib(n - 2);
}

__attribute__((noinline)) static uint64_t ackermann(uint64_t m, uint64_t n) {
    if (m == 0) return n + 1;
    return ackermann(m - 1, n == 0 ? 1 : ackermann(m, n - 1));
}

int main(int argc, char **argv) {
    long n = rounds(argc, argv, 800);
    uint64_t sum = 1;
    for (long r = 0; r < n; r++) sum = mix(sum, fib(26 + (uint64_t)r % 4) + ackermann(2, 200));
    return report("fib", n, sum);
}
