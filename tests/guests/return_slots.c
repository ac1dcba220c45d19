/* Return addresses on the stack: what a callee finds, what stays below the stack pointer, and
 * what a signal sees in between; returns from pages that cannot be written; calls that cannot
 * push; addresses that are pushed and returned to, popped, or replaced.
 *
 * Hard for a translator: it may put host addresses there, or push late, and none of that may be
 * seen. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include "guest.h"

/* Calls a function that does nothing much; gives back the word below the stack pointer, which
 * must still be where it returned to. */
uint64_t below_after_call(uint64_t (*f)(void));
uint64_t below_after_direct(void);
uint64_t found_by_callee(void);
uint64_t spin(uint64_t), through_pop(void), through_push(uint64_t);
uint64_t on_stack(void *top, uint64_t (*f)(void));
uint64_t return_from(void *slot);
extern char after_indirect[], after_direct[], after_found[], spin_begin[], spin_end[], after_spin[], pushing[], far_return[];
__asm__(".text\n"
        "nothing: ret\n"
        "below_after_call: sub $8, %rsp; call *%rdi; .globl after_indirect\nafter_indirect: mov -8(%rsp), %rax; add $8, %rsp; ret\n"
        ".globl below_after_direct\nbelow_after_direct: sub $8, %rsp; call nothing; .globl after_direct\nafter_direct: mov -8(%rsp), %rax; add $8, %rsp; ret\n"
        "own_return: mov (%rsp), %rax; ret\n"
        ".globl found_by_callee\nfound_by_callee: sub $8, %rsp; call own_return; .globl after_found\nafter_found: add $8, %rsp; ret\n"
        /* Calls back and forth, with nothing else on the way. */
        ".globl spin\nspin: push %rbx; mov %rdi, %rbx; xor %eax, %eax; .globl spin_begin\nspin_begin: \n1: call 2f; .globl after_spin\nafter_spin: dec %rbx; jnz 1b; .globl spin_end\nspin_end: pop %rbx; ret\n"
        "2: inc %rax; ret\n"
        ".globl through_pop\nthrough_pop: call 1f; 1: pop %rax; lea 1b(%rip), %rdx; sub %rdx, %rax; ret\n"
        ".globl through_push\nthrough_push: lea 1f(%rip), %rax; push %rax; lea (%rdi,%rdi,2), %rax; ret; ud2; 1: add $5, %rax; ret\n"
        /* Calls with a stack of its own. */
        ".globl on_stack\non_stack: push %rbp; mov %rsp, %rbp; mov %rdi, %rsp; .globl pushing\npushing: call *%rsi; mov %rbp, %rsp; pop %rbp; ret\n"
        /* Returns by the word at rdi. */
        ".globl return_from\nreturn_from: push %rbp; mov %rsp, %rbp; mov %rdi, %rsp; ret\n"
        ".globl far_return\nfar_return: mov %rbp, %rsp; pop %rbp; mov $77, %eax; ret\n");

static volatile sig_atomic_t ticks;
static char *guarded;

static void on_tick(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)info;
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    char *rip = (char *)r[REG_RIP];
    ticks++;
    if (rip >= spin_end + 2 && rip < spin_end + 6)
        /* In the callee: its return address is on top. */
        CHECK(*(char **)r[REG_RSP] == after_spin);
    else if (rip >= after_spin && rip < spin_end)
        /* After a return. */
        CHECK(((char **)r[REG_RSP])[-1] == after_spin);
}

static void on_fault(int signal, siginfo_t *info, void *context) {
    (void)signal;
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    CHECK((char *)r[REG_RIP] == pushing && info->si_code == SEGV_ACCERR);
    CHECK((char *)r[REG_RSP] == guarded + 4096 && (char *)info->si_addr == guarded + 4088);
    CHECK(mprotect(guarded, 4096, PROT_READ | PROT_WRITE) == 0);
    printf("opened\n");
}

static uint64_t forty_two(void) { return 42; }

int main(int argc, char **argv) {
    long rounds = iterations(argc, argv, 2000);
    for (long i = 0; i < rounds; i++) {
        CHECK(below_after_direct() == (uint64_t)after_direct);
        CHECK(below_after_call(found_by_callee) == (uint64_t)after_indirect);
        CHECK(found_by_callee() == (uint64_t)after_found);
        CHECK(through_pop() == 0 && through_push(i) == 3 * (uint64_t)i + 5);
    }
    puts("slots");

    /* Pages that cannot be written can be returned from. */
    uint64_t *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    page[5] = (uint64_t)far_return;
    CHECK(mprotect(page, 4096, PROT_READ) == 0);
    for (int i = 0; i < 100; i++) CHECK(return_from(page + 5) == 77);
    CHECK(page[5] == (uint64_t)far_return && page[4] == 0);
    puts("read-only");

    /* A call that cannot push is repeated after the handler. */
    static char alternate[65536];
    stack_t stack = {.ss_sp = alternate, .ss_size = sizeof alternate};
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    CHECK(sigaltstack(&stack, NULL) == 0 && sigaction(SIGSEGV, &action, NULL) == 0);
    guarded = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(guarded != MAP_FAILED);
    for (int i = 0; i < 3; i++) {
        CHECK(mprotect(guarded, 4096, PROT_READ) == 0);
        CHECK(on_stack(guarded + 4096, forty_two) == 42);
    }

    /* A handler finds the return addresses of the guest, also those already returned to. */
    struct sigaction tick = {.sa_sigaction = on_tick, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};
    CHECK(sigaction(SIGALRM, &tick, NULL) == 0);
    struct itimerval often = {{0, 200}, {0, 200}}, never = {{0, 0}, {0, 0}};
    CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
    uint64_t sum = 0;
    for (int i = 0; i < 100000 && ticks < 100; i++) sum += spin(5000) == 5000;
    CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0);
    CHECK(ticks >= 100 && sum > 0);
    puts("signals");
    return 0;
}
