/* Indirect jumps, calls and returns that mostly lead to their function and now and then to a
 * non-canonical address. The handler must find the state before the transfer and rip at the
 * transfer; it repairs the target and lets the transfer happen. The same code is executed again
 * at addresses that do not fit 32 bits. With an argument, signals of a timer arrive all the time.
 *
 * Hard for a translator: its own transfer sequence faults, or a lookup has already begun. */
#define _GNU_SOURCE
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include "guest.h"

enum { ROUNDS = 3000 };

/* long attempt_NAME(uint64_t *targets, long rounds): each round goes from NAME_at to NAME_next,
 * where targets[round] says so. */
#define ATTEMPT(name, before, jump, after)                                                                  \
    __asm__(".pushsection .text\n.globl attempt_" name ", " name "_at, " name "_next, " name "_end\n"       \
            "attempt_" name ": push %rbp; push %rbx; mov %rsp, %rbp; xor %r8d, %r8d; xor %ebx, %ebx\n"      \
            "1: mov (%rdi,%r8,8), %rax; mov %rax, %r9\n" before "\n"                                        \
            "cmp $1500, %r8\n" name "_at: " jump "\n"                                                       \
            "ud2\n" name "_next: " after "\n"                                                               \
            "lea 3(%rbx,%rbx,4), %rbx; xor %r8, %rbx; inc %r8; cmp %rsi, %r8; jb 1b\n"                      \
            "mov %rbx, %rax; pop %rbx; pop %rbp; ret\n" name "_end:\n.popsection")

static uint64_t word __asm__("noncanonical_word") __attribute__((used));

ATTEMPT("low", "", "jmp *%rax", "");
ATTEMPT("high", "", "jmp *%r9", "");
ATTEMPT("memory", "lea -8(%rdi,%r8,8), %rcx", "jmp *8(%rcx)", "");
ATTEMPT("indexed", "", "jmp *(%rdi,%r8,8)", "");
ATTEMPT("word", "mov %rax, noncanonical_word(%rip); test %rdi, %rdi; jz 1b; nop", "jmp *noncanonical_word(%rip)", "");
ATTEMPT("return", "push %rax", "ret", "");
ATTEMPT("returns", "sub $24, %rsp; mov %rax, (%rsp)", "ret $16", "");
ATTEMPT("call", "", "call *%rax", "add $8, %rsp");
ATTEMPT("calls", "", "call *(%rdi,%r8,8)", "add $8, %rsp");
/* What it pushes lies over what it goes through. */
ATTEMPT("over", "mov %rax, -8(%rsp)", "call *-8(%rsp)", "add $8, %rsp");
/* As functions do; the return goes where the call came from. */
ATTEMPT("function", "call 2f; function_back: jmp function_next; 2: mov %rax, (%rsp)", "ret", "");

#define LABELS(name) long attempt_##name(uint64_t *, long); extern char name##_at[], name##_next[], name##_end[]
#define ENTRY(name, leads) {#name, attempt_##name, name##_at, leads, name##_end}
LABELS(low); LABELS(high); LABELS(memory); LABELS(indexed); LABELS(word); LABELS(return); LABELS(returns); LABELS(call);
LABELS(calls); LABELS(over); LABELS(function);
extern char function_back[];
static const struct attempt {
    const char *name;
    long (*run)(uint64_t *, long);
    char *at, *next, *end;
} attempts[] = {ENTRY(low, low_next),         ENTRY(high, high_next),       ENTRY(memory, memory_next),
                ENTRY(indexed, indexed_next), ENTRY(word, word_next),       ENTRY(return, return_next),
                ENTRY(returns, returns_next), ENTRY(call, call_next),       ENTRY(calls, calls_next),
                ENTRY(over, over_next),       ENTRY(function, function_back)};

static uint64_t targets[ROUNDS], *list = targets, at, next, faults, seen;

static void on_fault(int signal, siginfo_t *info, void *context) {
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    CHECK(signal == SIGSEGV && info->si_addr == NULL);
    uint64_t *stack = (uint64_t *)r[REG_RSP], round = r[REG_R8];
    const uint64_t state[] = {r[REG_RIP] - at,  r[REG_RBP] - r[REG_RSP], round,           r[REG_RAX],    r[REG_R9], r[REG_RBX],
                              r[REG_EFL] & 0xcd5, info->si_code,           r[REG_TRAPNO], r[REG_ERR], list[round]};
    for (unsigned i = 0; i < sizeof state / sizeof *state; i++) seen = mix(seen, state[i]);
    faults++;
    if (*stack == list[round]) *stack = next;
    stack[-1] = next;
    r[REG_RAX] = r[REG_R9] = list[round] = word = next;
}

static void attempt(const char *where, const struct attempt *a, char *code) {
    static const uint64_t nowhere[] = {0x8000000000000000, 0x4141414141414141, 0xff00000000000010};
    at = (uint64_t)(code + (a->at - (char *)a->run)), next = (uint64_t)(code + (a->next - (char *)a->run));
    for (int again = 0; again < 2; again++) {
        for (int i = 0; i < ROUNDS; i++) targets[i] = i % 127 == 7 || i == 1500 ? nowhere[i % 3] : next;
        faults = seen = 0;
        long sum = ((long (*)(uint64_t *, long))code)(targets, ROUNDS);
        printf("%s %s: %ld, %lu faults, %lx\n", where, a->name, sum, (unsigned long)faults, (unsigned long)seen);
    }
}

static void on_tick(int signal) { CHECK(signal == SIGALRM); }

int main(int argc, char **argv) {
    (void)argv;
    static char alternate[65536];
    stack_t stack = {.ss_sp = alternate, .ss_size = sizeof alternate};
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    unsigned count = sizeof attempts / sizeof *attempts;
    /* What was copied before there was a handler says nothing of itself. */
    for (int i = 0; i < ROUNDS; i++) targets[i] = (uint64_t)low_next;
    CHECK(attempt_low(targets, ROUNDS) != 0);
    CHECK(sigaltstack(&stack, NULL) == 0 && sigaction(SIGSEGV, &action, NULL) == 0);
    if (argc > 1) {
        struct sigaction tick = {.sa_handler = on_tick, .sa_flags = SA_RESTART | SA_ONSTACK};
        struct itimerval often = {{0, 50}, {0, 50}};
        CHECK(sigaction(SIGALRM, &tick, NULL) == 0 && setitimer(ITIMER_REAL, &often, NULL) == 0);
    }
    char *far = mmap((void *)0x7abc12340000, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    CHECK(far == (char *)0x7abc12340000);
    char *end = far;
    for (unsigned i = 0; i < count; i++)
        if (strcmp(attempts[i].name, "word") != 0) end = mempcpy(end, attempts[i].run, attempts[i].end - (char *)attempts[i].run);
    CHECK(end <= far + 4096 && mprotect(far, 4096, PROT_READ | PROT_EXEC) == 0);
    for (unsigned i = 0; i < count; i++) attempt("here", &attempts[i], (char *)attempts[i].run);
    for (unsigned i = 0; i < count; i++)
        if (strcmp(attempts[i].name, "word") != 0) {
            attempt("far", &attempts[i], far);
            far += attempts[i].end - (char *)attempts[i].run;
        }
    return 0;
}
