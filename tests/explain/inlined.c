#include <stdio.h>
#include <stdlib.h>

/* Called eight times in each iteration: its branch stands eight times on the path of the loop. */
__attribute__((noinline)) long step(long sum, long n)
{
    if (n & 1024)
        sum ^= n;
    else
        sum += n;
    return sum;
}

__attribute__((noinline)) long work(long n)
{
    long sum = 0;
    for (long i = 0; i < n; i++) {
        sum = step(step(sum, i), i);
        sum = step(step(sum, i), i);
        sum = step(step(sum, i), i);
        sum = step(step(sum, i), i);
    }
    return sum;
}

int main(int argc, char **argv)
{
    printf("%ld\n", work(argc > 1 ? atol(argv[1]) : 1000000));
    return 0;
}
