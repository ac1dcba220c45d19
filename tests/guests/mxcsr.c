/* MXCSR: rounding modes, denormals with and without DAZ and FTZ, sticky flags, an unmasked
 * exception as SIGFPE.
 *
 * Hard for a translator: its own floating-point code must neither use nor change the guest's
 * MXCSR. */
#include <setjmp.h>
#include <signal.h>
#include <xmmintrin.h>
#include "guest.h"

static sigjmp_buf recover;
static volatile int code;
static volatile unsigned inside;
static void on_fpe(int signal, siginfo_t *info, void *context) {
    (void)signal;
    (void)context;
    code = info->si_code;
    inside = _mm_getcsr();
    siglongjmp(recover, 1);
}

__attribute__((noinline)) static double divide(double a, double b) { return a / b; }
__attribute__((noinline)) static float narrow(double a) { return (float)a; }
__attribute__((noinline)) static long integer(double a) { return _mm_cvtsd_si64((__m128d){a, 0}); }

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 300);
    printf("initial %04x\n", _mm_getcsr());
    volatile double one = 1, three = 3, small = 1e-310, half = 2.5;
    for (int mode = 0; mode < 4; mode++) {
        _mm_setcsr(0x1f80 | (unsigned)mode << 13);
        double q = divide(one, three), m = divide(-one, three);
        float f = narrow(0.1);
        long i = integer(half), j = integer(-half);
        double total = 0;
        for (long k = 1; k <= n; k++) total += divide(one, (double)k);
        unsigned now = _mm_getcsr();
        _mm_setcsr(0x1f80);
        printf("mode %d: %a %a %a %ld %ld %a csr %04x\n", mode, q, m, (double)f, i, j, total, now);
    }
    static const unsigned flush[] = {0x1f80, 0x1fc0, 0x9f80, 0x9fc0};
    for (int k = 0; k < 4; k++) {
        _mm_setcsr(flush[k]);
        double a = small * one, b = divide(small, three), c = divide(1e-300, 1e10), d = small * 1e20;
        unsigned now = _mm_getcsr();
        _mm_setcsr(0x1f80);
        printf("daz/ftz %04x: %a %a %a %a csr %04x\n", flush[k], a, b, c, d, now);
    }
    volatile double huge = 1e308, zero = 0;
    volatile double sink;
#define STICKY(name, expression)                           \
    _mm_setcsr(0x1f80);                                    \
    sink = (expression);                                   \
    printf("%-10s flags %02x\n", name, _mm_getcsr() & 0x3f);
    STICKY("exact", one + three)
    STICKY("inexact", one / three)
    STICKY("overflow", huge * huge)
    STICKY("underflow", small * 1e-10)
    STICKY("zero", one / zero)
    STICKY("invalid", zero / zero)
    STICKY("denormal", small + one)
    struct sigaction action = {.sa_sigaction = on_fpe, .sa_flags = SA_SIGINFO};
    sigaction(SIGFPE, &action, NULL);
    for (int k = 0; k < 3; k++) {
        static const unsigned unmasked[] = {0x0200, 0x0400, 0x0080};
        if (sigsetjmp(recover, 1) == 0) {
            _mm_setcsr(0x1f80 & ~unmasked[k]);
            sink = k == 0 ? divide(one, zero) : k == 1 ? huge * huge : divide(zero, zero);
            _mm_setcsr(0x1f80);
            printf("not reached\n");
        } else {
            _mm_setcsr(0x1f80);
            printf("unmasked %04x: code %d, csr in the handler %04x\n", unmasked[k], code, inside);
        }
    }
    (void)sink;
    return 0;
}
