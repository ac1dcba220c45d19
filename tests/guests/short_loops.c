/* Short inner loops whose trip counts are regular, then change; loops with two paths and many
 * live registers, under a timer; flags that loops leave unchanged, read at their ends and by
 * faults in between.
 *
 * Hard for a translator: it unrolls a loop by the trip count that it has seen. */
#define _GNU_SOURCE
#include "guest.h"
#include <signal.h>
#include <sys/time.h>
#include <ucontext.h>

static double field[8][3];

/* Runs of three iterations in runs of eight. */
static double regular(int rounds, int inner) {
    double sum = 0;
    for (int r = 0; r < rounds; r++)
        for (int i = 0; i < 8; i++) {
            double square = 0;
            for (int k = 0; k < inner; k++) {
                field[i][k] += (double)(r % 7) - k;
                square += field[i][k] * field[i][k];
            }
            sum = sum * 0.5 + square;
        }
    return sum;
}

/* An inner loop of four iterations for a long time, then of any number. */
static uint64_t changing(int rounds) {
    uint64_t sum = 1;
    for (int r = 0; r < rounds; r++) {
        int trips = r < rounds / 2 ? 4 : r % 23;
        for (int k = 0; k < trips; k++) sum = sum * 31 + (uint64_t)k;
        sum ^= sum >> 17;
    }
    return sum;
}

static volatile sig_atomic_t ticks;
static void tick(int signo) {
    (void)signo;
    ticks = ticks + 1;
}

/* Both directions of the branch lead back to the loop's head, with all registers in use. */
static uint64_t two_ways(int rounds, uint64_t x) {
    uint64_t a = x, b = x + 1, c = x + 2, d = x + 3, e = x + 4, f = x + 5, g = x + 6, h = x + 7;
    for (int r = 0; r < rounds; r++) {
        uint64_t t = a * 0x9e3779b97f4a7c15u + (uint64_t)r;
        if (t >> 62 == 1) {
            b += t ^ h;
            d = d * 3 + (f << 2);
            h ^= b + 8 * g;
        } else if (t >> 62 == 3) {
            f = f * 5 + (c << 3) + 7;
            g -= e ^ t;
        } else {
            c += t;
            e ^= d + (c << 1);
        }
        a = t ^ (b >> 3);
    }
    return a ^ b ^ c ^ d ^ e ^ f ^ g ^ h;
}

/* `loop` leaves the flags alone: what was set before it is there after it. */
static unsigned flags_through(uint64_t trips, uint64_t x, uint64_t y) {
    uint64_t flags, sum = 0;
    __asm__ volatile("cmp %[y], %[x]\n\t"
                     "1: lea 1(%[sum], %%rcx, 2), %[sum]\n\t"
                     "loop 1b\n\t"
                     "pushfq\n\t"
                     "pop %[flags]\n\t"
                     : [flags] "=&r"(flags), [sum] "+r"(sum), "+c"(trips)
                     : [x] "r"(x), [y] "r"(y)
                     : "cc", "memory");
    return (unsigned)(flags & 0x8d5) ^ (unsigned)sum;
}

static volatile unsigned seen;
static void skip(int signo, siginfo_t *info, void *context) {
    ucontext_t *c = context;
    (void)signo;
    (void)info;
    seen = seen * 33 + (unsigned)(c->uc_mcontext.gregs[REG_EFL] & 0x8d5);
    c->uc_mcontext.gregs[REG_RAX] = c->uc_mcontext.gregs[REG_RBX];
}

/* A load that faults now and then, before and after the flags of the comparison are overwritten. */
static uint64_t faulting(int rounds) {
    static uint64_t good = 5;
    uint64_t sum = 0;
    for (int r = 0; r < rounds; r++) {
        uint64_t *p = r % 400 == 399 ? (uint64_t *)16 : &good, v = 0;
        __asm__ volatile("cmp %[r], %[limit]\n\t"
                         "mov (%%rax), %[v]\n\t"
                         "setb %%cl\n\t"
                         "add %[v], %[sum]\n\t"
                         "add (%%rax), %[sum]\n\t"
                         : [v] "=&r"(v), [sum] "+r"(sum), "+a"(p)
                         : "b"(&good), [r] "r"((uint64_t)r), [limit] "r"(sum & 255)
                         : "cc", "rcx", "memory");
    }
    return sum;
}

int main(void) {
    double first = regular(3000, 3), second = regular(300, 2);
    printf("regular %.17g %.17g\n", first, second);
    printf("changing %016llx\n", (unsigned long long)changing(20000));
    struct sigaction action = {.sa_handler = tick};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval every = {{0, 500}, {0, 500}}, never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &every, NULL);
    uint64_t sum = 0;
    for (uint64_t i = 0; i < 40; i++) sum = sum * 7 + two_ways(5000, i);
    setitimer(ITIMER_REAL, &never, NULL);
    printf("two ways %016llx\n", (unsigned long long)sum);
    unsigned flags = 0;
    for (unsigned i = 0; i < 3000; i++) flags = flags * 5 + flags_through(1 + i % 9, i * 7919u, (i ^ 1234u) * 65537u);
    printf("flags %08x\n", flags);
    struct sigaction segv = {.sa_sigaction = skip, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &segv, NULL);
    uint64_t loaded = faulting(6000);
    printf("faulting %llu %08x\n", (unsigned long long)loaded, seen);
    return 0;
}
