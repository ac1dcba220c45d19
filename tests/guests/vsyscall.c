/* Calls and jumps to the vsyscall page, as old static programs make them: three functions, by
 * themselves and in a loop, their registers, and what the kernel refuses. On a system without
 * that page every attempt faults.
 *
 * Hard for a translator: the page cannot be read, and the kernel emulates its functions by their
 * address. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <sys/time.h>
#include <ucontext.h>
#include "guest.h"

#define PAGE 0xffffffffff600000UL

static sigjmp_buf escape;

static void on_fault(int signal, siginfo_t *info, void *context) {
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    printf("  signal %d code %d rip %llx trap %lld\n", signal, info->si_code, (long long)regs[REG_RIP], (long long)regs[REG_TRAPNO]);
    siglongjmp(escape, 1);
}

/* rax, and whether any other register but it has changed. */
static long call(uint64_t function, void *first, void *second, int *changed) {
    uint64_t result, rcx = 0x1111, r11 = 0x2222, rdi = (uint64_t)first, rsi = (uint64_t)second;
    __asm__ volatile("mov %4, %%r11; call *%%rax; mov %%r11, %4"
                     : "=a"(result), "+c"(rcx), "+D"(rdi), "+S"(rsi), "+r"(r11)
                     : "0"(function)
                     : "r11", "memory", "cc");
    *changed = rcx != 0x1111 || r11 != 0x2222 || rdi != (uint64_t)first || rsi != (uint64_t)second;
    return (long)result;
}

static void attempt(const char *what, uint64_t function, void *first, void *second) {
    int changed;
    printf("%s\n", what);
    if (sigsetjmp(escape, 1) == 0) {
        long result = call(function, first, second, &changed);
        printf("  %s, changed %d\n", result < 0 ? "negative" : result == 0 ? "zero" : "positive", changed);
    }
}

int main(void) {
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    struct timeval now = {0};
    time_t seconds = 0;
    unsigned cpu = ~0u, node = ~0u;
    attempt("gettimeofday", PAGE, &now, NULL);
    attempt("time", PAGE + 0x400, &seconds, NULL);
    attempt("getcpu", PAGE + 0x800, &cpu, &node);
    printf("together: %d, both or none: %d\n", seconds - now.tv_sec <= 1, (cpu != ~0u) == (now.tv_sec != 0));
    attempt("no such function", PAGE + 0xc00, NULL, NULL);
    attempt("not its beginning", PAGE + 2, NULL, NULL);
    attempt("nowhere", PAGE + 0x400, (void *)0x10, NULL);
    long sum = 0;
    int changed = 0;
    if (sigsetjmp(escape, 1) == 0)
        for (int i = 0; i < 3000; i++) {
            sum += call(PAGE + 0x400, NULL, NULL, &changed) > 0;
            CHECK(!changed);
        }
    printf("often: %ld\n", sum);
    return 0;
}
