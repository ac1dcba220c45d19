/* Order and nesting of signals: masks, sa_mask, SA_NODEFER, SA_RESETHAND, pending sets, queued
 * real-time signals.
 *
 * Hard for a translator: a signal that it has taken and holds back must keep the kernel's order. */
#define _GNU_SOURCE
#include <signal.h>
#include <unistd.h>
#include "guest.h"

static char trace[256];
static volatile int level, budget;
static void note(char c) {
    size_t n = strlen(trace);
    if (n + 1 < sizeof trace) trace[n] = c;
}

static void on_usr1(int signal) {
    (void)signal;
    level++;
    note('(');
    if (budget > 0) {
        budget--;
        raise(SIGUSR1);
    }
    note((char)('0' + level));
    note(')');
    level--;
}

static void on_usr2(int signal) {
    (void)signal;
    note('<');
    raise(SIGUSR1);
    note('>');
}

static void on_rt(int signal, siginfo_t *info, void *context) {
    (void)signal;
    (void)context;
    note((char)('a' + info->si_value.sival_int));
}

static void show(const char *title) {
    printf("%-28s %s\n", title, trace);
    memset(trace, 0, sizeof trace);
}

static void install(int signal, void (*handler)(int), int flags, int also_masked) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
    if (also_masked) sigaddset(&action.sa_mask, also_masked);
    CHECK(sigaction(signal, &action, NULL) == 0);
}

int main(void) {
    install(SIGUSR1, on_usr1, 0, 0);
    budget = 2;
    raise(SIGUSR1);
    show("deferred while handled");
    install(SIGUSR1, on_usr1, SA_NODEFER, 0);
    budget = 2;
    raise(SIGUSR1);
    show("SA_NODEFER");
    install(SIGUSR2, on_usr2, 0, 0);
    raise(SIGUSR2);
    show("nested");
    install(SIGUSR2, on_usr2, 0, SIGUSR1);
    raise(SIGUSR2);
    show("nested, masked by sa_mask");
    install(SIGUSR1, on_usr1, SA_RESETHAND | SA_NODEFER, 0);
    level = 2;
    raise(SIGUSR1);
    level = 0;
    struct sigaction now;
    sigaction(SIGUSR1, NULL, &now);
    CHECK(now.sa_handler == SIG_DFL);
    show("SA_RESETHAND");

    sigset_t block, old, pending;
    sigemptyset(&block);
    sigaddset(&block, SIGUSR1);
    sigaddset(&block, SIGRTMIN);
    install(SIGUSR1, on_usr1, 0, 0);
    struct sigaction rt = {.sa_sigaction = on_rt, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGRTMIN, &rt, NULL) == 0);
    CHECK(sigprocmask(SIG_BLOCK, &block, &old) == 0);
    level = 2;
    for (int i = 0; i < 5; i++) {
        raise(SIGUSR1); /* coalesces */
        sigqueue(getpid(), SIGRTMIN, (union sigval){.sival_int = i}); /* queues */
    }
    sigpending(&pending);
    printf("pending usr1 %d, usr2 %d, rt %d\n", sigismember(&pending, SIGUSR1), sigismember(&pending, SIGUSR2),
           sigismember(&pending, SIGRTMIN));
    show("while blocked");
    CHECK(sigprocmask(SIG_SETMASK, &old, NULL) == 0);
    level = 0;
    show("after unblocking");
    install(SIGUSR1, SIG_IGN, 0, 0);
    raise(SIGUSR1);
    show("ignored");
    sigemptyset(&block);
    sigaddset(&block, SIGUSR2);
    sigprocmask(SIG_BLOCK, &block, NULL);
    kill(getpid(), SIGUSR2);
    siginfo_t info;
    int got = sigwaitinfo(&block, &info);
    printf("sigwaitinfo %d, own pid %d, code %d\n", got, info.si_pid == getpid(), info.si_code);
    struct timespec none = {0, 1000};
    printf("sigtimedwait %d\n", sigtimedwait(&block, NULL, &none));
    printf("kill with signal 0: %d, with a bad one: %d\n", kill(getpid(), 0), kill(getpid(), 200));
    install(SIGTERM, on_usr1, 0, 0);
    signal(SIGTERM, SIG_DFL);
    fflush(stdout);
    raise(SIGTERM);
    return 1;
}
