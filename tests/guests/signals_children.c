/* What parents learn of their children: SIGCHLD and waitid for every kind of end, stop and
 * continuation; SA_NOCLDSTOP, SA_NOCLDWAIT and ignored SIGCHLD; children that are killed by each
 * signal's default action.
 *
 * Hard for a translator: the end of the child must be the kernel's, with its status and core
 * flag. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "guest.h"

static volatile int count;
static volatile siginfo_t last;
static sigset_t child_set, open_set;

static void on_child(int signo, siginfo_t *info, void *context) {
    (void)signo;
    count++;
    last = *info;
}
static void handle(int flags) {
    struct sigaction action = {.sa_sigaction = on_child, .sa_flags = SA_SIGINFO | flags};
    CHECK(sigaction(SIGCHLD, &action, NULL) == 0);
}
static void await(int n) {
    while (count < n) sigsuspend(&open_set);
}
static void show(const char *what, pid_t child) {
    siginfo_t info = *(siginfo_t *)&last;
    printf("%s: count %d code %d status %d pid %d uid %d", what, count, info.si_code, info.si_status, info.si_pid == child, info.si_uid == getuid());
    siginfo_t waited = {0};
    int r = waitid(P_PID, child, &waited, WEXITED | WSTOPPED | WCONTINUED | WNOHANG | WNOWAIT);
    printf(", waitid %d: code %d status %d pid %d signo %d", r, waited.si_code, waited.si_status, waited.si_pid == child, waited.si_signo);
    int status = -1;
    pid_t got = waitpid(child, &status, WUNTRACED | WCONTINUED | WNOHANG);
    printf(", waitpid %d %x, then %d\n", got == child, status, waitpid(child, &status, WNOHANG | WUNTRACED | WCONTINUED) == 0 ? 0 : errno);
    count = 0;
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 1 << 12);
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    sigemptyset(&child_set);
    sigaddset(&child_set, SIGCHLD);
    CHECK(sigprocmask(SIG_BLOCK, &child_set, &open_set) == 0);
    handle(0);
    pid_t child = fork();
    if (child == 0) _exit(300);
    await(1);
    show("exited", child);
    child = fork();
    if (child == 0) kill(getpid(), SIGKILL);
    await(1);
    show("killed", child);
    child = fork();
    if (child == 0) __builtin_trap();
    await(1);
    show("trapped", child);
    child = fork();
    if (child == 0) for (;;) pause();
    kill(child, SIGSTOP);
    await(1);
    show("stopped", child);
    kill(child, SIGCONT);
    await(1);
    show("continued", child);
    kill(child, SIGTSTP);
    await(1);
    show("stopped by default", child);
    kill(child, SIGTERM); /* waits until it is continued */
    CHECK(waitpid(child, NULL, WNOHANG) == 0);
    kill(child, SIGCONT);
    while (waitpid(child, NULL, 0) != child) {}
    count = 0;
    siginfo_t drained;
    struct timespec zero = {0, 0};
    while (sigtimedwait(&child_set, &drained, &zero) > 0) {}

    /* Only ends. */
    handle(SA_NOCLDSTOP);
    child = fork();
    if (child == 0) for (;;) pause();
    kill(child, SIGSTOP);
    int status;
    CHECK(waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
    kill(child, SIGCONT);
    CHECK(waitpid(child, &status, WCONTINUED) == child && WIFCONTINUED(status));
    printf("without stops: %d pending %d\n", count, sigtimedwait(&child_set, NULL, &zero));
    kill(child, SIGTERM);
    await(1);
    show("ended", child);

    /* No zombies: with the flag there is a signal, ignored there is none. */
    handle(SA_NOCLDWAIT);
    for (int i = 0; i < 3; i++) {
        child = fork();
        if (child == 0) _exit(i);
        await(1);
        int r = waitpid(child, &status, 0);
        printf("not waited for: %d %d count %d status %d\n", r, errno == ECHILD, count, last.si_status);
        count = 0;
    }
    signal(SIGCHLD, SIG_IGN);
    child = fork();
    if (child == 0) _exit(1);
    printf("ignored: %d %d\n", waitpid(child, &status, 0), errno == ECHILD);
    signal(SIGCHLD, SIG_DFL);

    /* Many at once: a waiting parent misses none. */
    handle(SA_RESTART);
    sigprocmask(SIG_SETMASK, &open_set, NULL);
    int sum = 0;
    for (int i = 0; i < 12; i++)
        if ((child = fork()) == 0) _exit(i + 1);
    for (int i = 0; i < 12; i++) {
        CHECK(wait(&status) > 0);
        sum += WEXITSTATUS(status);
    }
    printf("many: %d, signals %d\n", sum, count > 0 && count <= 12);

    /* Default actions. */
    signal(SIGCHLD, SIG_DFL);
    for (int signo = 1; signo <= 64; signo++) {
        if (signo == SIGSTOP || signo == SIGTSTP || signo == SIGTTIN || signo == SIGTTOU || signo == 32 || signo == 33 || (signo > 36 && signo < 63)) continue;
        child = fork();
        if (child == 0) {
            signal(signo, SIG_DFL);
            kill(getpid(), signo);
            _exit(99);
        }
        CHECK(waitpid(child, &status, 0) == child);
        printf(" %d:%x", signo, status & ~0x80);
    }
    printf("\n");
    /* Default actions of signals from another process, in a loop and in a call. */
    for (int i = 0; i < 6; i++) {
        int signo = i % 3 == 0 ? SIGUSR1 : i % 3 == 1 ? SIGSEGV : SIGTRAP;
        child = fork();
        if (child == 0) {
            if (i < 3) for (;;) pause();
            for (volatile long n = 0;; n++) {}
        }
        struct timespec moment = {0, 5000000};
        nanosleep(&moment, NULL);
        kill(child, signo);
        CHECK(waitpid(child, &status, 0) == child);
        printf(" %x", status & ~0x80);
    }
    printf("\n");
    return 0;
}
