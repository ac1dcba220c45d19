/* SIGFPE of integer division: by zero and overflow, several widths; the handler skips or repairs
 * the division.
 *
 * Hard for a translator: the frame must hold the precise state before the division, in hot code,
 * too. */
#define _GNU_SOURCE
#include <signal.h>
#include <ucontext.h>
#include "guest.h"

static volatile int faults, code, length, repair;
static uint64_t state[3];

static void on_fault(int signal, siginfo_t *info, void *context) {
    (void)signal;
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    faults++;
    code = info->si_code;
    if ((greg_t)info->si_addr != regs[REG_RIP]) _Exit(97);
    state[0] = (uint64_t)regs[REG_RAX];
    state[1] = (uint64_t)regs[REG_RDX];
    if (repair) regs[REG_RCX] = 3;
    else regs[REG_RIP] += length;
}

#define DIVIDE(instruction, bytes, a, d, c)                                                                        \
    ({                                                                                                             \
        uint64_t rax = (uint64_t)(a), rdx = (uint64_t)(d), rcx = (uint64_t)(c);                                    \
        length = bytes;                                                                                            \
        __asm__ volatile(instruction : "+a"(rax), "+d"(rdx), "+c"(rcx) : : "cc", "memory");                        \
        mix(mix(rax, rdx), rcx);                                                                                   \
    })

__attribute__((noinline)) static int quotient(int a, int b) {
    int result = a, rest;
    length = 2;
    __asm__ volatile("cltd\n\tidivl %%ecx" : "+a"(result), "=&d"(rest) : "c"(b) : "cc", "memory");
    return result;
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 300);
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGFPE, &action, NULL) == 0);
    printf("div64 by zero  %016lx faults %d code %d\n", DIVIDE("divq %%rcx", 3, 7, 0, 0), faults, code);
    printf("div64 overflow %016lx faults %d code %d\n", DIVIDE("divq %%rcx", 3, 7, 9, 9), faults, code);
    printf("idiv64 min/-1  %016lx faults %d code %d\n", DIVIDE("idivq %%rcx", 3, 1UL << 63, -1, -1), faults, code);
    printf("idiv32 min/-1  %016lx faults %d code %d\n", DIVIDE("idivl %%ecx", 2, 1UL << 31, 0xffffffff, -1), faults, code);
    printf("div16 by zero  %016lx faults %d code %d\n", DIVIDE("divw %%cx", 3, 7, 0, 0x10000), faults, code);
    printf("div8 overflow  %016lx faults %d code %d\n", DIVIDE("divb %%cl", 2, 0x300, 0, 3), faults, code);
    printf("idiv8 overflow %016lx faults %d code %d\n", DIVIDE("idivb %%cl", 2, 0x8000, 0, 2), faults, code);
    printf("no fault       %016lx faults %d\n", DIVIDE("idivq %%rcx", 3, -1000, -1, 7), faults);
    CHECK(faults == 7);
    repair = 1;
    printf("repaired       %016lx faults %d\n", DIVIDE("divq %%rcx", 3, 300, 0, 0), faults);
    repair = 0;
    uint64_t sum = 1;
    int before = faults;
    /* A hot division that fails in every tenth iteration. */
    for (long i = 0; i < n; i++) sum = mix(sum, (uint64_t)quotient((int)(i * 1000003), (int)(i % 10)));
    printf("hot loop %016lx faults %d\n", sum, faults - before);
    return 0;
}
