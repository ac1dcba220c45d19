/* Insertion, quick, merge, heap and radix sort of the same values must agree.
 *
 * Hard for a translator: branches that depend on random data, so no recorded path is taken for
 * long. */
#include "guest.h"

static void insertion(uint32_t *v, int n) {
    for (int i = 1; i < n; i++) {
        uint32_t x = v[i];
        int j = i;
        for (; j > 0 && v[j - 1] > x; j--) v[j] = v[j - 1];
        v[j] = x;
    }
}

static void quick(uint32_t *v, int n) {
    if (n < 2) return;
    uint32_t pivot = v[n / 2];
    int i = 0, j = n - 1;
    while (i <= j) {
        while (v[i] < pivot) i++;
        while (v[j] > pivot) j--;
        if (i <= j) {
            uint32_t t = v[i];
            v[i++] = v[j];
            v[j--] = t;
        }
    }
    quick(v, j + 1);
    quick(v + i, n - i);
}

static void merge(uint32_t *v, uint32_t *scratch, int n) {
    if (n < 2) return;
    int half = n / 2, i = 0, j = half, k = 0;
    merge(v, scratch, half);
    merge(v + half, scratch, n - half);
    while (i < half && j < n) scratch[k++] = v[i] <= v[j] ? v[i++] : v[j++];
    while (i < half) scratch[k++] = v[i++];
    while (j < n) scratch[k++] = v[j++];
    memcpy(v, scratch, (size_t)n * sizeof *v);
}

static void sift(uint32_t *v, int root, int n) {
    for (int child; (child = 2 * root + 1) < n; root = child) {
        if (child + 1 < n && v[child] < v[child + 1]) child++;
        if (v[root] >= v[child]) return;
        uint32_t t = v[root];
        v[root] = v[child];
        v[child] = t;
    }
}

static void heap(uint32_t *v, int n) {
    for (int i = n / 2; i-- > 0;) sift(v, i, n);
    for (int i = n; i-- > 1;) {
        uint32_t t = v[0];
        v[0] = v[i];
        v[i] = t;
        sift(v, 0, i);
    }
}

static void radix(uint32_t *v, uint32_t *scratch, int n) {
    for (int shift = 0; shift < 32; shift += 8) {
        int count[257] = {0};
        for (int i = 0; i < n; i++) count[(v[i] >> shift & 255) + 1]++;
        for (int i = 0; i < 256; i++) count[i + 1] += count[i];
        for (int i = 0; i < n; i++) scratch[count[v[i] >> shift & 255]++] = v[i];
        memcpy(v, scratch, (size_t)n * sizeof *v);
    }
}

int main(int argc, char **argv) {
    int n = (int)iterations(argc, argv, 800);
    size_t size = (size_t)n * sizeof(uint32_t);
    uint32_t *values = malloc(size), *sorted = malloc(size), *other = malloc(size), *scratch = malloc(size);
    uint64_t seed = 2024;
    for (int i = 0; i < n; i++) values[i] = (uint32_t)next_random(&seed) >> (i % 3 * 8);
    memcpy(sorted, values, size);
    quick(sorted, n);
    for (int i = 1; i < n; i++) CHECK(sorted[i - 1] <= sorted[i]);
    memcpy(other, values, size);
    merge(other, scratch, n);
    CHECK(memcmp(other, sorted, size) == 0);
    memcpy(other, values, size);
    heap(other, n);
    CHECK(memcmp(other, sorted, size) == 0);
    memcpy(other, values, size);
    radix(other, scratch, n);
    CHECK(memcmp(other, sorted, size) == 0);
    int few = n / 4;
    memcpy(other, values, (size_t)few * 4);
    insertion(other, few);
    for (int i = 1; i < few; i++) CHECK(other[i - 1] <= other[i]);
    printf("sorted %d: %016lx, first %u, last %u\n", n, mix_bytes(1, sorted, size), sorted[0], sorted[n - 1]);
    return 0;
}
