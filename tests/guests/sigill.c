/* SIGILL and SIGTRAP caught: ud2, ud1, undefined opcodes, privileged instructions, int3, skipped
 * by their handlers.
 *
 * Hard for a translator: it must raise the signal for an instruction that it cannot decode. */
#define _GNU_SOURCE
#include <signal.h>
#include <ucontext.h>
#include "guest.h"

static volatile int last_signal, last_code, skip;
static volatile long address_offset;

static void on_signal(int signal, siginfo_t *info, void *context) {
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    last_signal = signal;
    last_code = info->si_code;
    address_offset = signal == SIGILL ? (long)info->si_addr - (long)regs[REG_RIP] : 0;
    regs[REG_RIP] += skip;
    regs[REG_RAX] += 1;
}

#define TRY(name, bytes, text)                                                                             \
    do {                                                                                                   \
        long rax = 100;                                                                                    \
        skip = bytes;                                                                                      \
        last_signal = 0;                                                                                   \
        __asm__ volatile(text : "+a"(rax) : : "memory", "cc");                                             \
        printf("%-10s signal %d code %d offset %ld rax %ld\n", name, last_signal, last_code, address_offset, rax); \
    } while (0)

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 60);
    struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGILL, &action, NULL) == 0);
    CHECK(sigaction(SIGTRAP, &action, NULL) == 0);
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    TRY("ud2", 2, "ud2");
    TRY("ud1", 3, ".byte 0x0f, 0xb9, 0xc0");
    TRY("invalid", 1, ".byte 0x06"); /* push es: not in 64-bit mode */
    TRY("hlt", 1, "hlt");
    TRY("cli", 1, "cli");
    TRY("in", 1, "in %%dx, %%al");
    TRY("mov cr0", 3, "mov %%cr0, %%rax");
    TRY("int3", 0, "int3");
    TRY("lock mov", 3, ".byte 0xf0, 0x89, 0xc0");
    long caught = 0;
    for (long i = 0; i < n; i++) {
        skip = 2;
        last_signal = 0;
        if (i % 3 == 0) __asm__ volatile("ud2" : : : "rax", "memory");
        caught += last_signal == SIGILL;
    }
    printf("caught %ld of %ld\n", caught, n);
    return 4;
}
