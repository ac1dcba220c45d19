/* Recursive quicksort of random values: unpredictable branches in short loops, self-recursion. */
#include "kernel.h"

enum { COUNT = 20000 };
static uint32_t values[COUNT];

static void sort(uint32_t *v, long low, long high) {
    while (low < high) {
        uint32_t pivot = v[(low + high) / 2];
        long i = low, j = high;
        while (i <= j) {
            while (v[i] < pivot) i++;
            while (v[j] > pivot) j--;
            if (i <= j) {
                uint32_t t = v[i];
                v[i++] = v[j];
                v[j--] = t;
            }
        }
        sort(v, low, j);
        low = i;
    }
}

int main(int argc, char **argv) {
    long n = rounds(argc, argv, 500);
    uint64_t sum = 1;
    uint32_t seed = 2463534242u;
    for (long r = 0; r < n; r++) {
        for (int i = 0; i < COUNT; i++) values[i] = next_random(&seed);
        sort(values, 0, COUNT - 1);
        for (int i = 0; i < COUNT; i += 997) sum = mix(sum, values[i]);
    }
    return report("quicksort", n, sum);
}
