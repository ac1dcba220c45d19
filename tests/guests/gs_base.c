/* The guest changes its GS base by wrgsbase and by a selector, with nothing of the kernel's in
 * between; then come system calls, faults and signals. Where user code may not use wrgsbase, the
 * guest does without. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

static uint64_t words[4] = {11, 22, 33, 44};
static int may_write;
static volatile int seen;

static uint64_t through_gs(void) {
    uint64_t value;
    __asm__ volatile("movq %%gs:8, %0" : "=r"(value));
    return value;
}

static void set(void *base) {
    if (may_write)
        __asm__ volatile("wrgsbase %0" ::"r"(base));
    else
        syscall(SYS_arch_prctl, 0x1001, base);
}

static uint64_t base(void) {
    uint64_t value = 1;
    syscall(SYS_arch_prctl, 0x1004, &value);
    return value;
}

static void handler(int signo, siginfo_t *info, void *context) {
    (void)info;
    ucontext_t *c = context;
    seen++;
    printf("signal %d, gs:8 is %lu\n", signo, through_gs());
    if (signo == SIGSEGV) c->uc_mcontext.gregs[REG_RIP] += 3;
}

int main(void) {
    may_write = getauxval(AT_HWCAP2) >> 1 & 1;
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO};
    sigaction(SIGUSR1, &action, NULL);
    sigaction(SIGSEGV, &action, NULL);
    for (int round = 0; round < 3; round++) {
        set(words + round % 2);
        printf("gs:8 is %lu\n", through_gs());
        printf("the kernel says %d\n", base() == (uint64_t)(words + round % 2));
        raise(SIGUSR1);
        __asm__ volatile("movq (%0), %%rax" ::"D"(8L) : "rax");
        printf("gs:8 is %lu after %d signals\n", through_gs(), seen);
    }
    __asm__ volatile("movw %0, %%gs" ::"r"((short)0));
    printf("null selector, base %lx\n", (unsigned long)base());
    set(words);
    __asm__ volatile("movw %0, %%gs" ::"r"((short)0));
    printf("null selector, base %lx\n", (unsigned long)base());
    return 0;
}
