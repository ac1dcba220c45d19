/* Leaving SIGSEGV and SIGFPE handlers by siglongjmp, many times, with the mask restored each
 * time.
 *
 * Hard for a translator: no sigreturn ends the handler, so nothing of its own may wait for one. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include "guest.h"

static sigjmp_buf recover;
static volatile int depth;

static void on_fault(int signal) {
    volatile char local[128];
    memset((void *)local, signal, sizeof local);
    siglongjmp(recover, signal);
}

__attribute__((noinline)) static long probe(volatile long *p, long divisor, int down) {
    if (down > 0) {
        depth++;
        long result = probe(p, divisor, down - 1) + 1;
        depth--;
        return result;
    }
    return *p / divisor;
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 200);
    signal(SIGSEGV, on_fault);
    signal(SIGFPE, on_fault);
    long values[4] = {1000, 2000, 3000, 4000};
    volatile long ok = 0, segv = 0, fpe = 0, total = 0;
    for (volatile long i = 0; i < n; i++) {
        int signal = sigsetjmp(recover, 1);
        if (signal == 0) {
            long *p = i % 5 == 3 ? (long *)(i * 8) : &values[i & 3];
            total += probe(p, i % 7 == 2 ? 0 : i + 1, (int)(i % 9));
            ok++;
        } else if (signal == SIGSEGV) {
            segv++;
        } else {
            fpe++;
        }
        sigset_t mask;
        sigprocmask(SIG_SETMASK, NULL, &mask);
        CHECK(!sigismember(&mask, SIGSEGV) && !sigismember(&mask, SIGFPE));
    }
    printf("ok %ld, segv %ld, fpe %ld, total %ld, depth %d\n", ok, segv, fpe, total, depth);
    return 0;
}
