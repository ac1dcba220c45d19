/* A program that single-steps itself: the trap flag set by popf and by a handler's frame, the
 * trap after each instruction, the arguments of the handler, and that nothing else changes.
 *
 * Hard for a translator: one guest instruction is none or many host instructions. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>
#include "guest.h"

extern char stepped[], stepped_end[], from_frame[], from_frame_end[];
static int where[256], steps, bad, start_steps;
static uint64_t flags_seen;
static char *base;

static void on_trap(int signo, siginfo_t *info, void *context) {
    greg_t *g = ((ucontext_t *)context)->uc_mcontext.gregs;
    if (start_steps) {
        g[REG_EFL] |= 0x100;
        start_steps = 0;
        return;
    }
    long at = (long)((char *)g[REG_RIP] - base);
    bad += signo != SIGTRAP || info->si_code != TRAP_TRACE || info->si_addr != (void *)g[REG_RIP] || g[REG_TRAPNO] != 1 || !(g[REG_EFL] & 0x100);
    unsigned long now;
    __asm__ volatile("pushfq; popq %0" : "=r"(now));
    bad += (now & 0x100) != 0;
    flags_seen = mix(flags_seen, g[REG_EFL] & 0x10cd5);
    if (steps < 256) where[steps++] = at >= 0 && at < 256 ? (int)at : -1;
    if (at < 0 || at >= 256) g[REG_EFL] &= ~0x100L;
}

__attribute__((noinline)) static uint64_t by_popf(uint64_t n) {
    uint64_t result = 0, flags;
    __asm__ volatile("pushfq; orl $0x100, (%%rsp); popfq\n"
                     ".globl stepped\nstepped: mov %[n], %%rcx\n"
                     "1: add %%rcx, %[result]\n rol $3, %[result]\n call 2f\n dec %%rcx\n jnz 1b\n jmp 3f\n"
                     "2: xor $5, %[result]\n ret\n"
                     "3: mov $39, %%eax\n syscall\n nop\n pushfq\n popq %[flags]\n"
                     "pushfq; andl $~0x100, (%%rsp); popfq\n"
                     ".globl stepped_end\nstepped_end: nop\n"
                     : [result] "+&r"(result), [flags] "=&r"(flags) : [n] "r"(n) : "rax", "rcx", "r11", "memory", "cc");
    return mix(result, flags & 0x100);
}

__attribute__((noinline)) static uint64_t by_frame(void) {
    uint64_t result = 7;
    start_steps = 1;
    __asm__ volatile("int3\n.globl from_frame\nfrom_frame: shl $2, %0\n lea 3(%0), %0\n cmp $3, %0\n ja 1f\n ud2\n1: imul $77, %0\n"
                     "pushfq; andl $~0x100, (%%rsp); popfq\n.globl from_frame_end\nfrom_frame_end: nop\n"
                     : "+r"(result) : : "memory", "cc");
    return result;
}

static void show(const char *what, uint64_t result) {
    printf("%s: %016lx, %d steps, bad %d, flags %016lx:", what, result, steps, bad, flags_seen);
    for (int i = 0; i < steps; i++) printf(" %d", where[i]);
    printf("\n");
    steps = 0;
}

int main(void) {
    struct sigaction action = {.sa_sigaction = on_trap, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGTRAP, &action, NULL) == 0);
    for (int round = 0; round < 20; round++) {
        base = stepped;
        uint64_t result = by_popf(3);
        if (round % 10 == 0) show("popf", result); else steps = 0;
        base = from_frame;
        result = by_frame();
        if (round % 10 == 0) show("frame", result); else steps = 0;
    }
    printf("%d bad, flags %016lx\n", bad, flags_seen);
    return 0;
}
