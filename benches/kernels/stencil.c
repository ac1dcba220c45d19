/* A five-point stencil of floats on a plane, two buffers in turn: the loop that compilers
 * vectorise. */
#include "kernel.h"

enum { N = 256 };
static float planes[2][N][N];

static void step(float (*restrict to)[N], float (*restrict from)[N]) {
    for (int i = 1; i < N - 1; i++)
        for (int j = 1; j < N - 1; j++)
            to[i][j] = 0.5f * from[i][j] + 0.125f * (from[i - 1][j] + from[i + 1][j] +
                                                     from[i][j - 1] + from[i][j + 1]);
}

int main(int argc, char **argv) {
    long n = rounds(argc, argv, 12);
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++)
            planes[0][i][j] = planes[1][i][j] = (float)((i * 13 + j * 29) % 101);
    for (long r = 0; r < n * 1000; r++) step(planes[~r & 1], planes[r & 1]);
    uint64_t sum = 1;
    for (int i = 0; i < N; i += 3)
        for (int j = 0; j < N; j += 5) {
            uint32_t bits;
            memcpy(&bits, &planes[0][i][j], 4);
            sum = mix(sum, bits);
        }
    return report("stencil", n, sum);
}
