/* Scalar floating point that goes through memory, as code without optimisation has it: values that a translator may
 * keep in vector registers of its own must be where they belong whenever somebody looks: at a fault, in a signal
 * handler, behind a loop, in registers that the loop does not use.
 *
 * Each part prints its result; the same as natively. */
#include "guest.h"

#include <fenv.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

static uint64_t bits(double value) {
    uint64_t word;
    memcpy(&word, &value, 8);
    return word;
}

static uint32_t bits_of_float(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    return word;
}

/* Arguments and results of such functions go through general registers. */
__attribute__((noinline)) static double average(double a, double b) {
    double sum = a + b;
    return sum / 2;
}

/* Sums, products and conversions of both widths through variables in memory. */
static void mixed(int rounds) {
    double sum = 0, last = 1.5;
    float small = 1, other = 0.25f;
    long whole = 3;
    int half = 7;
    for (int i = 0; i < rounds; i++) {
        last = last * 1.0000001 + i;
        sum += last / (i + 3);
        small = small * 0.9999f + other;
        other = (float)(sum - (double)(long)sum);
        whole += (long)last & 0xff;
        half ^= (int)small + (int)whole;
        sum -= half & 3;
        sum = average(sum, average(last, sum));
        if (last > 1e9)
            last = last / 1e8;
    }
    printf("mixed %016lx %016lx %08x %08x %ld %d\n", bits(sum), bits(last), bits_of_float(small), bits_of_float(other), whole, half);
}

/* What is stored as a float is loaded as an integer, and the other way round, and in parts. */
static void punned(int rounds) {
    union {
        double d;
        float f[2];
        uint64_t q;
        uint32_t w[2];
        uint8_t b[8];
    } u, v;
    u.d = 1.25;
    v.q = 0x3ff0000000000000;
    uint64_t sum = 0;
    for (int i = 0; i < rounds; i++) {
        u.d = u.d * 1.0000003;
        sum += u.q ^ u.w[1];
        sum += u.b[3];
        v.q = (u.q & 0xfffffffffffff) | 0x3ff0000000000000;
        v.d = v.d + u.d;
        v.w[0] ^= i;
        sum ^= bits(v.d);
        u.f[0] = u.f[0] * 0.5f;
        u.w[0] &= 0x7fffff;
        u.w[0] |= 0x3f800000;
        if (u.d > 2)
            u.d = u.d - 1;
    }
    printf("punned %016lx %016lx %016lx\n", sum, u.q, v.q);
}

static sigjmp_buf out;
static volatile sig_atomic_t faults;
static uint64_t seen[2];

static void on_fault(int signal, siginfo_t *info, void *context) {
    ucontext_t *uc = context;
    faults++;
    /* xmm15 and xmm14 as the guest has them. */
    memcpy(&seen[0], &uc->uc_mcontext.fpregs->_xmm[15], 8);
    memcpy(&seen[1], &uc->uc_mcontext.fpregs->_xmm[14], 8);
    (void)info;
    siglongjmp(out, signal);
}

static void handle(int signal) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(signal, &action, NULL);
}

/* Numbers in all registers that the loops do not use. */
#define FILL(n) __asm__ volatile("movq %0, %%xmm" #n "\n\tpunpcklqdq %%xmm" #n ", %%xmm" #n : : "r"(0x1111111111111111ul * (n) + 5) : "xmm" #n)
#define LOOK(n) \
    do { \
        uint64_t low, high; \
        __asm__ volatile("movq %%xmm" #n ", %0\n\tmovhlps %%xmm" #n ", %%xmm0\n\tmovq %%xmm0, %1" : "=r"(low), "=r"(high) : : "xmm0"); \
        wrong += low != 0x1111111111111111ul * (n) + 5 || high != low; \
    } while (0)

static void fill(void) {
    FILL(4); FILL(5); FILL(6); FILL(7); FILL(8); FILL(9);
    FILL(10); FILL(11); FILL(12); FILL(13); FILL(14); FILL(15);
}

static int look(void) {
    int wrong = 0;
    LOOK(4); LOOK(5); LOOK(6); LOOK(7); LOOK(8); LOOK(9);
    LOOK(10); LOOK(11); LOOK(12); LOOK(13); LOOK(14); LOOK(15);
    return wrong;
}

/* Both loops keep several variables in memory; the calls between them are none, so registers survive. */
static double kept(int rounds, double *volatile cells) {
    double a = 1, b = 2, c = 3, d = 0.5;
    for (int i = 0; i < rounds; i++) {
        a = a + b * d;
        b = b - c * 0.125;
        c = c + 0.0625;
        d = d * 0.99999;
        cells[i & 7] = a;
        if (c > 100)
            c = c - 99;
    }
    return a + b + c + d;
}

static void borrowed(int rounds) {
    static double cells[8];
    int wrong = 0;
    double sum = 0;
    for (int i = 0; i < 40; i++) {
        fill();
        double result = kept(rounds / 40 + i, cells);
        wrong += look();
        sum += result;
    }
    printf("borrowed %016lx wrong %d\n", bits(sum), wrong);
}

/* A store in the loop faults after many iterations. */
static void faulting(int rounds) {
    long page = sysconf(_SC_PAGESIZE);
    size_t length = ((size_t)rounds * 8 + page - 1) / page * page;
    char *memory = mmap(NULL, length + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        exit(1);
    mprotect(memory + length, page, PROT_NONE);
    double *volatile values = (double *)memory;
    volatile int reached = 0;
    static double carried, stepped;
    carried = 1;
    stepped = 0.5;
    handle(SIGSEGV);
    if (sigsetjmp(out, 1) == 0) {
        fill();
        for (int i = 0;; i++) {
            carried = carried * 1.00001 + stepped;
            stepped = stepped + 0.25;
            reached = i;
            values[i] = carried;
        }
    }
    printf("faulting %d %d %016lx %016lx %016lx %016lx\n", (int)faults, reached, bits(carried), bits(stepped), seen[0], seen[1]);
    munmap(memory, length + page);
}

/* A division by zero traps once it is unmasked, in a loop that ran before without. */
static double divide(int rounds, double by) {
    double sum = 0, step = by;
    for (int i = 0; i < rounds; i++) {
        step = step - 1;
        sum = sum + 1 / step;
    }
    return sum;
}

static void trapping(int rounds) {
    double before = divide(rounds, 1e7);
    feclearexcept(FE_ALL_EXCEPT);
    handle(SIGFPE);
    feenableexcept(FE_DIVBYZERO);
    faults = 0;
    if (sigsetjmp(out, 1) == 0) {
        fill();
        divide(rounds, rounds / 2);
        puts("no trap");
    }
    fedisableexcept(FE_DIVBYZERO);
    feclearexcept(FE_ALL_EXCEPT);
    printf("trapping %016lx %d %016lx %016lx\n", bits(before), (int)faults, seen[0], seen[1]);
}

static volatile sig_atomic_t ticks;
static int wrong_ticks;

static void on_tick(int signal, siginfo_t *info, void *context) {
    ucontext_t *uc = context;
    uint64_t words[2];
    memcpy(words, &uc->uc_mcontext.fpregs->_xmm[13], 16);
    if (words[0] != 0x1111111111111111ul * 13 + 5 || words[1] != words[0])
        wrong_ticks++;
    /* The handler's own use of registers is its own. */
    FILL(9);
    ticks++;
    (void)signal;
    (void)info;
}

static void interrupted(int rounds) {
    static double cells[8];
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_tick;
    action.sa_flags = SA_SIGINFO | SA_RESTART;
    double expected = kept(rounds, cells);
    sigaction(SIGVTALRM, &action, NULL);
    struct itimerval every = {{0, 2000}, {0, 2000}}, never = {{0, 0}, {0, 0}};
    int differing = 0;
    setitimer(ITIMER_VIRTUAL, &every, NULL);
    while (ticks < 20) {
        fill();
        double result = kept(rounds, cells);
        int wrong = look();
        differing += bits(result) != bits(expected) || wrong != 0;
    }
    setitimer(ITIMER_VIRTUAL, &never, NULL);
    printf("interrupted %016lx differing %d, in handlers %d\n", bits(expected), differing, wrong_ticks);
}

/* Flags of exceptions are raised by what is computed, however often it is loaded. */
static void flagged(int rounds) {
    feclearexcept(FE_ALL_EXCEPT);
    double value = 1;
    for (int i = 0; i < rounds; i++)
        value = value + 2;
    int exact = fetestexcept(FE_ALL_EXCEPT);
    for (int i = 0; i < rounds; i++)
        value = value / 3;
    int after = fetestexcept(FE_ALL_EXCEPT);
    feclearexcept(FE_ALL_EXCEPT);
    fesetround(FE_UPWARD);
    double up = 0;
    for (int i = 0; i < rounds; i++)
        up = up + 0.1;
    fesetround(FE_TONEAREST);
    printf("flagged %x %x %016lx %016lx\n", exact, after, bits(value), bits(up));
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 20000;
    mixed(rounds);
    punned(rounds);
    borrowed(rounds);
    faulting(rounds);
    trapping(rounds);
    interrupted(rounds);
    flagged(rounds);
    return 0;
}
