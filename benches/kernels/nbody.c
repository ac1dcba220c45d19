/* Five bodies under gravity: long straight-line floating-point code, division and square root. */
#include "kernel.h"

enum { BODIES = 5 };
typedef struct {
    double x[3], v[3], mass;
} body;

static body bodies[BODIES] = {
    {{0, 0, 0}, {0, 0, 0}, 39.5},          {{4.8, -1.2, -0.1}, {0.6, 2.8, -0.02}, 0.038},
    {{8.3, 4.1, -0.4}, {-1.0, 1.8, 0.01}, 0.011}, {{12.9, -15.1, -0.2}, {1.1, 0.9, -0.01}, 0.0017},
    {{15.4, -25.9, 0.2}, {1.0, 0.6, -0.03}, 0.002},
};

/* The square root by Newton's iteration: it needs no libm and is the same on every host. */
static double root(double x) {
    double r = x > 1 ? x / 2 : 1;
    for (int i = 0; i < 8; i++) r = 0.5 * (r + x / r);
    return r;
}

static void advance(double dt) {
    for (int i = 0; i < BODIES; i++)
        for (int j = i + 1; j < BODIES; j++) {
            double d[3], square = 0;
            for (int k = 0; k < 3; k++) {
                d[k] = bodies[i].x[k] - bodies[j].x[k];
                square += d[k] * d[k];
            }
            double scale = dt / (square * root(square) + 0.01);
            for (int k = 0; k < 3; k++) {
                bodies[i].v[k] -= d[k] * bodies[j].mass * scale;
                bodies[j].v[k] += d[k] * bodies[i].mass * scale;
            }
        }
    for (int i = 0; i < BODIES; i++)
        for (int k = 0; k < 3; k++) bodies[i].x[k] += dt * bodies[i].v[k];
}

int main(int argc, char **argv) {
    long n = rounds(argc, argv, 2000);
    for (long r = 0; r < n; r++)
        for (int i = 0; i < 1000; i++) advance(0.001);
    uint64_t sum = 1, bits;
    for (int i = 0; i < BODIES; i++)
        for (int k = 0; k < 3; k++) {
            memcpy(&bits, &bodies[i].x[k], 8);
            sum = mix(sum, bits);
        }
    return report("nbody", n, sum);
}
