/* Loops whose iterations go different ways, as data says: each way writes variables, arrays or memory
 * behind pointers that the others read. The sums depend on every iteration. */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>

/* A half of a word of another type. */
typedef uint32_t __attribute__((may_alias)) half_word;

static uint64_t seed = 88172645463325252ull;

static uint64_t next(void) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

/* Two branches, four ways; variables in memory if not optimised. */
static uint64_t two_branches(unsigned n) {
    uint64_t a = 1, b = 2, c = 3;
    for (unsigned i = 0; i < n; i++) {
        uint64_t x = next();
        if (x & 1) a += x & 255;
        else b ^= x * 3;
        if (x & 6) c += i;
        else c ^= a;
    }
    return a ^ b ^ c;
}

/* The ways write through pointers that may name the same words. */
static uint64_t pointers(unsigned n, uint64_t *p, uint64_t *q, half_word *half) {
    uint64_t sum = 0;
    for (unsigned i = 0; i < n; i++) {
        uint64_t x = next();
        *p += i;
        if (x % 3 == 0) *q ^= x;
        else if (x % 3 == 1) *half += (uint32_t)x;
        sum += *p + *q;
        if (x & 8) *q = sum >> 3;
    }
    return sum;
}

static uint64_t add(uint64_t a, uint64_t b) { return a + b; }
static uint64_t mix(uint64_t a, uint64_t b) { return (a ^ b) * 0x9e3779b97f4a7c15ull; }
static uint64_t turn(uint64_t a, uint64_t b) { return a << (b & 7) | a >> (64 - (b & 7) - ((b & 7) == 0)); }

/* Ways that part at an indirect call. */
static uint64_t calls(unsigned n) {
    static uint64_t (*const functions[])(uint64_t, uint64_t) = {add, mix, turn, add};
    uint64_t a = 5;
    for (unsigned i = 0; i < n; i++) {
        uint64_t x = next();
        a = functions[x >> 20 & 3](a, x);
        if ((int64_t)a < 0) a += i;
    }
    return a;
}

/* A switch, and ways that leave the loop's middle early. */
static uint64_t cases(unsigned n, const unsigned char *codes, unsigned length) {
    uint64_t stack[16] = {1, 2, 3}, top = 3, sum = 0;
    for (unsigned i = 0; i < n; i++) {
        unsigned char code = codes[i % length];
        switch (code) {
        case 0: if (top > 1) { top--; stack[top - 1] += stack[top]; } break;
        case 1: if (top < 16) stack[top++] = i; break;
        case 2: stack[top - 1] = stack[top - 1] * 31 + code; break;
        case 3: if (top > 1) { uint64_t t = stack[top - 1]; stack[top - 1] = stack[top - 2]; stack[top - 2] = t; } break;
        case 4: sum ^= stack[top - 1]; continue;
        default: sum += top;
        }
        sum = sum * 7 + stack[top - 1];
    }
    return sum;
}

/* Floats, and a division that one way only does. */
static uint64_t floats(unsigned n) {
    double a = 1, b = 1;
    uint64_t sum = 0;
    for (unsigned i = 1; i <= n; i++) {
        uint64_t x = next();
        if (x & 16) a = a * 0.75 + (double)(x & 1023);
        else b += a / (double)(i % 17 + 1);
        if (b > 1e6) b -= 1e6;
        if (x & 32) sum += x / (i % 13 + 1);
        sum ^= (uint64_t)b;
    }
    return sum;
}

/* A way that comes only in the second half. */
static uint64_t phases(unsigned n) {
    uint64_t a = 0;
    for (unsigned i = 0; i < n; i++) {
        uint64_t x = next();
        if (i > n / 2 && x & 2) a ^= x;
        else if (x & 4) a += 3;
        else a = a * 5 + 1;
    }
    return a;
}

static volatile sig_atomic_t ticks;

static void tick(int signo) {
    (void)signo;
    ticks++;
}

static volatile uint64_t sink;

/* Only a signal ends it, on whichever way it finds the loop, perhaps before the first round. */
static void until_a_signal(void) {
    sig_atomic_t before = ticks;
    uint64_t a = 0, b = 0;
    while (ticks == before) {
        uint64_t x = next();
        if (x & 1) a += x;
        else if (x & 2) b ^= x;
        else a *= 3;
    }
    sink = a + b;
}

int main(int argc, char **argv) {
    unsigned n = argc > 1 ? (unsigned)atoi(argv[1]) : 400000;
    static unsigned char codes[997];
    for (unsigned i = 0; i < sizeof codes; i++) codes[i] = (unsigned char)(next() % 6);
    uint64_t words[3] = {1, 2, 3};
    for (int round = 0; round < 3; round++) {
        if (round == 1) {
            signal(SIGALRM, tick);
            struct itimerval often = {{0, 1000}, {0, 1000}};
            setitimer(ITIMER_REAL, &often, NULL);
        }
        for (int i = 0; round > 0 && i < 5; i++) {
            uint64_t kept = seed;
            until_a_signal();
            seed = kept;
        }
        printf("%016lx\n", two_branches(n));
        printf("%016lx\n", pointers(n, &words[0], &words[1], (half_word *)&words[2]));
        /* The same word behind all of them. */
        printf("%016lx\n", pointers(n, &words[1], &words[1], (half_word *)&words[1]));
        printf("%016lx\n", calls(n));
        printf("%016lx\n", cases(n, codes, sizeof codes));
        printf("%016lx\n", floats(n));
        printf("%016lx\n", phases(n));
    }
    struct itimerval never;
    memset(&never, 0, sizeof never);
    setitimer(ITIMER_REAL, &never, NULL);
    printf("%s\n", ticks > 0 ? "signals came" : "no signal came");
    return 0;
}
