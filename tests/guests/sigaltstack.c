/* Stack overflow caught on an alternate stack; sigaltstack's reports inside and outside
 * handlers.
 *
 * Hard for a translator: its own handlers run on a stack of its own, which the guest must not
 * see. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <sys/resource.h>
#include "guest.h"

static sigjmp_buf recover;
static char alternate[65536] __attribute__((aligned(64)));
static volatile int on_alternate, flags_inside, change_refused;

static void on_overflow(int signal, siginfo_t *info, void *context) {
    char here;
    (void)info;
    (void)context;
    on_alternate = &here >= alternate && &here < alternate + sizeof alternate;
    stack_t now, other = {.ss_sp = alternate, .ss_size = sizeof alternate};
    sigaltstack(NULL, &now);
    flags_inside = now.ss_flags;
    change_refused = sigaltstack(&other, NULL) != 0;
    siglongjmp(recover, signal);
}

static void on_usr1(int signal) {
    char here;
    (void)signal;
    on_alternate = &here >= alternate && &here < alternate + sizeof alternate;
}

static volatile unsigned long sink;
__attribute__((noinline)) static void overflow(unsigned long n) {
    volatile char frame[512];
    frame[n & 511] = (char)n;
    overflow(n + 1);
    sink += (unsigned long)frame[n & 511];
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 2);
    struct rlimit limit = {256 * 1024, 256 * 1024};
    CHECK(setrlimit(RLIMIT_STACK, &limit) == 0);
    stack_t stack = {.ss_sp = alternate, .ss_size = sizeof alternate}, previous;
    CHECK(sigaltstack(&stack, &previous) == 0);
    printf("before: flags %d\n", previous.ss_flags);
    struct sigaction action = {.sa_sigaction = on_overflow, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    for (volatile long i = 0; i < n; i++) {
        on_alternate = 0;
        int signal = sigsetjmp(recover, 1);
        if (signal == 0) overflow(0);
        printf("overflow %ld: signal %d, on alternate %d, flags %d, change refused %d\n", i, signal, on_alternate,
               flags_inside, change_refused);
    }
    CHECK(sigaltstack(NULL, &previous) == 0);
    CHECK(previous.ss_sp == (void *)alternate && previous.ss_flags == 0);
    struct sigaction usr1 = {.sa_handler = on_usr1, .sa_flags = SA_ONSTACK};
    sigaction(SIGUSR1, &usr1, NULL);
    raise(SIGUSR1);
    printf("usr1 with SA_ONSTACK: %d\n", on_alternate);
    usr1.sa_flags = 0;
    sigaction(SIGUSR1, &usr1, NULL);
    raise(SIGUSR1);
    printf("usr1 without: %d\n", on_alternate);
    stack.ss_flags = SS_DISABLE;
    CHECK(sigaltstack(&stack, NULL) == 0);
    usr1.sa_flags = SA_ONSTACK;
    sigaction(SIGUSR1, &usr1, NULL);
    raise(SIGUSR1);
    printf("disabled: %d\n", on_alternate);
    stack_t small = {.ss_sp = alternate, .ss_size = 100};
    printf("too small is refused: %d\n", sigaltstack(&small, NULL) != 0);
    return 0;
}
