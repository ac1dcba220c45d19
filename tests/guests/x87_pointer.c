/* The x87 instruction pointer, opcode and data pointer that fnstenv, fnsave, fxsave, xsave and the
 * frame of a SIGFPE show: the processor notes the address of the copy that it executes, not the
 * guest's. Straight line, hot loops, across calls, after fldenv, frstor and fninit, and with operands
 * that a translator encodes differently (relative to rip, in TLS). */
#include "guest.h"
#include <signal.h>
#include <string.h>
#include <ucontext.h>

extern char start[];
asm(".globl start\nstart:");

struct environment {
    uint32_t control, status, tag, ip, cs_opcode, data, ds;
};

/* FSAVE's image: the environment and eight registers of ten bytes. */
struct image {
    struct environment environment;
    char registers[80];
};

static double zero = 0, number = 1.5;
static __thread double in_tls = 2.5;
static struct {
    char bytes[4096];
} area __attribute__((aligned(64)));

static long from_start(uint32_t ip) {
    return ip == 0 ? -1 : (int32_t)(ip - (uint32_t)(uintptr_t)start);
}

static __attribute__((noinline)) void environment_of(struct environment *e) {
    asm volatile("fnstenv %0\n fldcw %0" : "=m"(*e));
}

static void show(const char *name, long pointer, unsigned opcode, long data) {
    printf("%s %ld %x %ld\n", name, pointer, opcode, data);
}

/* A divide by zero that is pending: only then all processors save all three, and the last one only if
 * the instruction has an operand in memory. */
static long pend(void) {
    long at;
    uint16_t control = 0x37b;
    asm volatile("fninit\n fldcw %1\n fld1\n lea 1f(%%rip), %0\n1: fdivl %2\n"
                 : "=r"(at)
                 : "m"(control), "m"(zero));
    return at - (long)start;
}

static volatile int faults;
static long expected;

static void on_fpe(int signo, siginfo_t *info, void *context) {
    ucontext_t *c = context;
    struct _libc_fpstate *state = c->uc_mcontext.fpregs;
    show("frame", (long)state->rip - (long)start - expected, state->fop, (long)state->rdp - (long)&zero);
    printf("signal %d %d %d\n", signo, info->si_code, (long)info->si_addr > (long)state->rip);
    asm volatile("fninit");
    state->swd &= ~0x80ff;
    state->cwd = 0x37f;
    faults++;
}

int main(void) {
    struct environment e;
    struct image image;
    long at;

    /* In one block, in a loop that gets hot, and with what was executed in another block. */
    for (int round = 0; round < 3000; round++) {
        asm volatile("fninit\n fldz\n lea 1f(%%rip), %1\n1: fld1\n fnstcw %0\n fnstenv %0\n fninit"
                     : "=m"(e), "=&r"(at));
        if (round % 1000 == 0)
            show("block", (int32_t)(e.ip - (uint32_t)at), 0, 0);
    }
    for (int round = 0; round < 3000; round++) {
        asm volatile("fldl %1\n lea 1f(%%rip), %0\n1: fstp %%st(0)" : "=&r"(at) : "m"(number));
        environment_of(&e);
        if (round % 1000 == 0)
            show("call", (int32_t)(e.ip - (uint32_t)at), 0, 0);
    }
    for (int round = 0; round < 3000; round++) {
        long last = 0;
        asm volatile("mov $5, %%ecx\n1: fldl %1\n lea 2f(%%rip), %0\n faddl %%fs:(%2)\n2: fstp %%st(0)\n"
                     "loop 1b\n"
                     : "=&r"(last)
                     : "m"(number), "r"((long)&in_tls - (long)__builtin_thread_pointer())
                     : "ecx", "cc");
        asm volatile("fnsave %0" : "=m"(image));
        if (round % 1000 == 0)
            show("save", (int32_t)(image.environment.ip - (uint32_t)last), 0, 0);
        asm volatile("fnstenv %0" : "=m"(e));
        if (round % 1000 == 0)
            show("initial", from_start(e.ip), 0, 0);
        asm volatile("frstor %0" : : "m"(image));
    }

    /* Loaded, then shown again; 14 bytes. */
    asm volatile("fldl %0\n fstp %%st(0)\n fnstenv %1\n fldcw %1" : : "m"(number), "m"(e));
    e.ip = 0x12345678;
    asm volatile("fldenv %0" : : "m"(e));
    memset(&e, 0, sizeof e);
    environment_of(&e);
    show("loaded", e.ip, 0, 0);
    uint16_t small[7];
    asm volatile("fldl %2\n lea 1f(%%rip), %1\n1: fstp %%st(0)\n .byte 0x66\n fnstenv %0\n fldcw %0"
                 : "=m"(small), "=&r"(at)
                 : "m"(number));
    show("small", (int16_t)(small[3] - (uint16_t)at), 0, 0);

    /* With an exception pending. */
    for (int round = 0; round < 200; round++) {
        at = pend();
        environment_of(&e);
        long fnstenv = from_start(e.ip) - at;
        unsigned opcode = e.cs_opcode >> 16;
        asm volatile("fnclex\n fninit");
        pend();
        asm volatile("fxsave64 %0\n fninit" : "=m"(area));
        struct _libc_fpstate *state = (void *)&area;
        if (round % 100 == 0) {
            show("fnstenv", fnstenv, opcode, e.data ? (int32_t)(e.data - (uint32_t)(uintptr_t)&zero) : -1);
            show("fxsave", (long)state->rip - (long)start - at, state->fop, (long)state->rdp - (long)&zero);
        }
        pend();
        memset(&area, 0, sizeof area);
        asm volatile("xsave64 %0\n fninit" : "=m"(area) : "a"(3), "d"(0));
        if (round % 100 == 0)
            show("xsave", (long)state->rip - (long)start - at, state->fop, (long)state->rdp - (long)&zero);
    }
    struct sigaction action = { .sa_sigaction = on_fpe, .sa_flags = SA_SIGINFO };
    sigaction(SIGFPE, &action, 0);
    for (int round = 0; round < 3; round++) {
        expected = pend();
        asm volatile("fwait\n fninit");
    }
    printf("%d faults\n", faults);
    return 0;
}
