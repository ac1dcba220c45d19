/* Floating point: n-body, mandelbrot, matrices, FFT by recursion, libm, printing and reading of
 * doubles.
 *
 * Hard for a translator: each result must have native's bits, so no operation may be replaced or
 * reordered. */
#include <complex.h>
#include <math.h>
#include "guest.h"

struct body { double x[3], v[3], mass; };
static struct body bodies[4] = {{{0, 0, 0}, {0, 0, 0}, 39.5},
                                {{4.84, -1.16, -0.10}, {0.606, 2.81, -0.02}, 0.0377},
                                {{8.34, 4.12, -0.40}, {-1.01, 1.82, 0.008}, 0.0113},
                                {{12.9, -15.1, -0.22}, {1.08, 0.868, -0.01}, 0.0017}};

static double energy(void) {
    double e = 0;
    for (int i = 0; i < 4; i++) {
        struct body *a = &bodies[i];
        e += 0.5 * a->mass * (a->v[0] * a->v[0] + a->v[1] * a->v[1] + a->v[2] * a->v[2]);
        for (int j = i + 1; j < 4; j++) {
            double d = 0;
            for (int k = 0; k < 3; k++) d += (a->x[k] - bodies[j].x[k]) * (a->x[k] - bodies[j].x[k]);
            e -= a->mass * bodies[j].mass / sqrt(d);
        }
    }
    return e;
}

static void advance(double dt) {
    for (int i = 0; i < 4; i++)
        for (int j = i + 1; j < 4; j++) {
            double d[3], square = 0;
            for (int k = 0; k < 3; k++) d[k] = bodies[i].x[k] - bodies[j].x[k], square += d[k] * d[k];
            double f = dt / (square * sqrt(square));
            for (int k = 0; k < 3; k++) bodies[i].v[k] -= d[k] * bodies[j].mass * f, bodies[j].v[k] += d[k] * bodies[i].mass * f;
        }
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 3; k++) bodies[i].x[k] += dt * bodies[i].v[k];
}

static void fft(double complex *v, int n) {
    if (n == 1) return;
    double complex even[n / 2], odd[n / 2];
    for (int i = 0; i < n / 2; i++) even[i] = v[2 * i], odd[i] = v[2 * i + 1];
    fft(even, n / 2);
    fft(odd, n / 2);
    for (int i = 0; i < n / 2; i++) {
        double angle = -2 * 3.14159265358979323846 * i / n;
        double complex t = (cos(angle) + sin(angle) * I) * odd[i];
        v[i] = even[i] + t;
        v[i + n / 2] = even[i] - t;
    }
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 100);
    printf("energy %.12f\n", energy());
    for (long i = 0; i < n; i++) advance(0.001);
    printf("energy %.12f\n", energy());
    int inside = 0;
    for (int py = 0; py < 16; py++)
        for (int px = 0; px < 16; px++) {
            double cx = px / 8.0 - 1.5, cy = py / 8.0 - 1, x = 0, y = 0;
            int k = 0;
            while (x * x + y * y < 4 && k < 50) {
                double t = x * x - y * y + cx;
                y = 2 * x * y + cy;
                x = t;
                k++;
            }
            inside = inside * 3 % 1000003 + k;
        }
    printf("mandelbrot %d\n", inside);
    enum { N = 16 };
    static float a[N][N], b[N][N], c[N][N];
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++) a[i][j] = (float)(i * j % 7) / 3, b[i][j] = (float)(i - j) / 5;
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++)
            for (int k = 0; k < N; k++) c[i][j] += a[i][k] * b[k][j];
    printf("matrix %016lx %a\n", mix_bytes(1, c, sizeof c), (double)c[3][5]);
    double complex v[32];
    for (int i = 0; i < 32; i++) v[i] = i % 5 + (i % 3) * I;
    fft(v, 32);
    printf("fft %.9f %.9f\n", creal(v[3]), cimag(v[7]));
    volatile double x = 0.7;
    printf("libm %a %a %a %a %a %a\n", sin(x), exp(x), log(x), pow(x, 3.3), tanh(x), tgamma(x));
    printf("libm %a %a %a %a %ld %a\n", fmod(17.7, x), cbrt(x), atan2(x, -x), hypot(x, 3), lround(x * 5), ldexp(x, -1070));
    char text[64];
    uint64_t sum = 1, seed = 11;
    for (long i = 0; i < n / 2; i++) {
        uint64_t bits = next_random(&seed);
        double d;
        memcpy(&d, &bits, 8);
        if (!isfinite(d)) continue;
        int length = snprintf(text, sizeof text, "%.17g", d);
        CHECK(strtod(text, NULL) == d);
        sum = mix_bytes(sum, text, (size_t)length);
    }
    printf("round trips %016lx\n", sum);
    return 0;
}
