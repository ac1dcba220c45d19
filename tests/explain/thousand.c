#include <stdio.h>
#include <stdlib.h>

__attribute__((noinline)) static long rare(long sum) { return sum ^ 0x55; }

__attribute__((noinline)) long work(long n)
{
    long sum = 0;
    for (long i = 1; i <= n; i++) {
        sum += i;
        if (i % 1000 == 0)
            sum = rare(sum);
    }
    return sum;
}

int main(int argc, char **argv)
{
    printf("%ld\n", work(argc > 1 ? atol(argv[1]) : 1000000));
    return 0;
}
