/* Calls to non-canonical addresses. The handler must find the state before the call and rip at
 * the call, whether the target is in a register or in memory; in code that is not hot yet and in
 * hot code. A line is printed once; it is printed again only if it differs.
 *
 * Hard for a translator: its call sequence has pushed the return address before it looks at the
 * target. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>
#include "guest.h"

static sigjmp_buf escape;
static char line[512], printed[8][512];
extern char by_register[], by_high[], by_memory[], by_index[], by_stack[], by_far[];

static void on_fault(int signal, siginfo_t *info, void *context) {
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    char *rip = (char *)r[REG_RIP];
    const char *where = rip == by_register ? "by_register"
                        : rip == by_high   ? "by_high"
                        : rip == by_memory ? "by_memory"
                        : rip == by_index  ? "by_index"
                        : rip == by_stack  ? "by_stack"
                        : rip == by_far    ? "by_far"
                                           : "elsewhere";
    snprintf(line, sizeof line, "%s: signal %d code %#x address %p trap %lld error %llx flags %llx stack moved %lld", where,
             signal, (unsigned)info->si_code, info->si_addr, (long long)r[REG_TRAPNO], (long long)r[REG_ERR],
             (long long)r[REG_EFL] & 0xcd5, (long long)(r[REG_RBP] - r[REG_RSP]));
    siglongjmp(escape, 1);
}

#define ATTEMPT(name, call)                                                                            \
    static void attempt_##name(uint64_t target, uint64_t *table) {                                     \
        __asm__ volatile("push %%rbp; sub $256, %%rsp; mov %0, (%%rsp); mov %%rsp, %%rbp; xor %%r8d, %%r8d; mov %0, %%r9\n" \
                         "cmp $-1, %%r8; .globl " #name "\n" #name ": " call                           \
                         :: "a"(target), "c"(table), "d"(3L) : "r8", "r9", "memory", "cc");            \
    }
ATTEMPT(by_register, "call *%%rax")
ATTEMPT(by_high, "call *%%r9")
ATTEMPT(by_memory, "call *8(%%rcx)")
ATTEMPT(by_index, "call *(%%rcx,%%rdx,8)")
ATTEMPT(by_stack, "call *(%%rsp)")
ATTEMPT(by_far, "call *0x12345(%%rcx)")

int main(void) {
    static char alternate[65536];
    stack_t stack = {.ss_sp = alternate, .ss_size = sizeof alternate};
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    CHECK(sigaltstack(&stack, NULL) == 0 && sigaction(SIGSEGV, &action, NULL) == 0);
    static void (*const attempts[])(uint64_t, uint64_t *) = {attempt_by_register, attempt_by_high,  attempt_by_memory,
                                                             attempt_by_index,    attempt_by_stack, attempt_by_far};
    static const uint64_t targets[] = {0x8000000000000000, 0x4141414141414141, 0xff00000000000010};
    for (int round = 0; round < 200; round++)
        for (int i = 0; i < 6; i++) {
            uint64_t target = targets[round % 3], table[4] = {1, target, 2, target};
            uint64_t *base = i == 5 ? (uint64_t *)((char *)(table + 1) - 0x12345) : table;
            if (sigsetjmp(escape, 1) == 0) attempts[i](target, base);
            if (round == 0) puts(strcpy(printed[i], line));
            CHECK(strcmp(printed[i], line) == 0);
        }
    return 0;
}
