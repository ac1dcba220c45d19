/* Product of matrices of doubles: three nested counted loops, scalar or packed SSE. */
#include "kernel.h"

enum { N = 96 };
static double a[N][N], b[N][N], c[N][N];

int main(int argc, char **argv) {
    long n = rounds(argc, argv, 1000);
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++) {
            a[i][j] = (i * 7 + j * 3) % 11 - 5;
            b[i][j] = (i * 5 + j) % 13 - 6;
        }
    uint64_t sum = 1;
    for (long r = 0; r < n; r++) {
        for (int i = 0; i < N; i++)
            for (int j = 0; j < N; j++) {
                double s = 0;
                for (int k = 0; k < N; k++) s += a[i][k] * b[k][j];
                c[i][j] = s;
            }
        /* Small integers make every product and sum exact: the checksum is the same everywhere. */
        a[r % N][r / N % N] = c[r % N][(r + 1) % N] > 0 ? 2 : -2;
        sum = mix(sum, (uint64_t)(int64_t)c[r * 31 % N][r * 17 % N]);
    }
    return report("matmul", n, sum);
}
