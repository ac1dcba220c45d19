/* Handlers that edit the interrupted state: skip an instruction, redirect to another address,
 * change registers and flags.
 *
 * Hard for a translator: after the handler the trace that faulted cannot go on, since its facts
 * may not hold. */
#define _GNU_SOURCE
#include <signal.h>
#include <ucontext.h>
#include "guest.h"

extern char fault_load[], fault_load_end[], fault_store[], fault_store_end[], landing[];
static volatile int mode;
static volatile uint64_t seen[4];

static void on_fault(int signal, siginfo_t *info, void *context) {
    (void)signal;
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    seen[0] = (uint64_t)info->si_addr;
    seen[1] = (uint64_t)regs[REG_RBX];
    seen[2] = (uint64_t)regs[REG_EFL] & 0xcd5;
    switch (mode) {
        case 0: /* provide the loaded value and skip the load */
            seen[3] = (uint64_t)(regs[REG_RIP] - (greg_t)fault_load);
            regs[REG_RAX] = 0x1234567890;
            regs[REG_RIP] = (greg_t)fault_load_end;
            break;
        case 1: /* skip the store */
            seen[3] = (uint64_t)(regs[REG_RIP] - (greg_t)fault_store);
            regs[REG_RIP] = (greg_t)fault_store_end;
            break;
        case 2: /* repair the base register and repeat */
            regs[REG_RCX] = (greg_t)&seen[0];
            break;
        case 3: /* go somewhere else with other flags */
            regs[REG_RIP] = (greg_t)landing;
            regs[REG_EFL] = (regs[REG_EFL] & ~0x8d5) | 0x881; /* OF SF CF */
            regs[REG_R15] = 0x5151;
            break;
    }
}

/* One routine with a load and a store through rcx, all registers live, flags live across both. */
__attribute__((noinline)) static uint64_t attempt(uint64_t *where, uint64_t store_to) {
    uint64_t result, flags, r15 = 15;
    __asm__ volatile(
        "mov $0x77, %%ebx\n\t"
        "mov %[where], %%rcx\n\t"
        "mov $5, %%edx\n\t"
        "cmp $9, %%edx\n\t" /* flags of 5 - 9 */
        ".globl fault_load\nfault_load: mov (%%rcx), %%rax\n.globl fault_load_end\nfault_load_end:\n\t"
        "mov %[to], %%rdx\n\t"
        ".globl fault_store\nfault_store: movq $3, 8(%%rdx)\n.globl fault_store_end\nfault_store_end:\n\t"
        ".globl landing\nlanding: pushfq\n\tpopq %[flags]\n\t"
        "add %%rbx, %%rax\n\t"
        : "=&a"(result), [flags] "=&r"(flags), "+r"(r15)
        : [where] "r"(where), [to] "r"(store_to)
        : "rbx", "rcx", "rdx", "memory", "cc");
    return mix(result, flags & 0xcd5);
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 100);
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    uint64_t good[2] = {41, 0}, sum = 1;
    for (long i = 0; i < n; i++) {
        sum = mix(sum, attempt(good, (uint64_t)good)); /* no fault: the path gets hot */
        CHECK(good[1] == 3);
        mode = 0;
        sum = mix(sum, attempt((uint64_t *)(8 * (i + 1)), (uint64_t)good));
        CHECK(seen[0] == (uint64_t)(8 * (i + 1)) && seen[1] == 0x77 && seen[3] == 0);
        sum = mix(sum, seen[2]);
        mode = 1;
        sum = mix(sum, attempt(good, 0x1000));
        CHECK(seen[0] == 0x1008 && seen[3] == 0);
        sum = mix(sum, seen[2]);
    }
    printf("loads and stores skipped: %016lx\n", sum);
    mode = 2;
    attempt((uint64_t *)16, (uint64_t)good);
    printf("repaired base: saw %lx\n", seen[0]);
    mode = 3;
    printf("landing pad: %016lx\n", attempt((uint64_t *)24, (uint64_t)good));
    /* A non-canonical address gives a general protection fault: SIGSEGV with address 0 and
     * SI_KERNEL. */
    mode = 0;
    attempt((uint64_t *)0x8000000000000000, (uint64_t)good);
    printf("non-canonical: address %lx\n", seen[0]);
    return 0;
}
