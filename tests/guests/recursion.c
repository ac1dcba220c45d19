/* Recursion of several shapes: binary, nested, mutual, through a pointer to itself.
 *
 * Hard for a translator: a trace follows calls only to some depth, and one return has several
 * targets. */
#include "guest.h"

__attribute__((noinline)) static unsigned fib(unsigned n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }

__attribute__((noinline)) static unsigned ackermann(unsigned m, unsigned n) {
    if (m == 0) return n + 1;
    if (n == 0) return ackermann(m - 1, 1);
    return ackermann(m - 1, ackermann(m, n - 1));
}

__attribute__((noinline)) static int is_odd(unsigned n);
__attribute__((noinline)) static int is_even(unsigned n) { return n == 0 ? 1 : is_odd(n - 1); }
__attribute__((noinline)) static int is_odd(unsigned n) { return n == 0 ? 0 : is_even(n - 1); }

static unsigned long moves;
__attribute__((noinline)) static void hanoi(int n, int from, int to, int via) {
    if (n == 0) return;
    hanoi(n - 1, from, via, to);
    moves = moves * 31 + (unsigned long)(from * 3 + to);
    hanoi(n - 1, via, to, from);
}

static int queens(int n, int row, unsigned columns, unsigned left, unsigned right) {
    if (row == n) return 1;
    int count = 0;
    for (int column = 0; column < n; column++) {
        unsigned bit = 1u << column;
        if ((columns | left | right) & bit) continue;
        count += queens(n, row + 1, columns | bit, (left | bit) << 1, (right | bit) >> 1);
    }
    return count;
}

typedef long (*step)(void *, long);
static long collatz(void *self, long n) {
    if (n == 1) return 0;
    return 1 + ((step)self)(self, n % 2 ? 3 * n + 1 : n / 2);
}

int main(int argc, char **argv) {
    unsigned n = (unsigned)iterations(argc, argv, 16);
    printf("fib(%u) = %u\n", n, fib(n));
    CHECK(fib(10) == 55);
    printf("ackermann(2, 6) = %u\n", ackermann(2, 6));
    CHECK(ackermann(2, 3) == 9);
    CHECK(is_even(1000) && is_odd(777) && !is_even(3));
    hanoi((int)(n / 2), 1, 3, 2);
    printf("hanoi %lx\n", moves);
    printf("queens(6) = %d\n", queens(6, 0, 0, 0, 0));
    step volatile through_pointer = collatz;
    printf("collatz(27) = %ld\n", through_pointer((void *)collatz, 27));
    return 0;
}
