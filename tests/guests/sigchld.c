/* SIGCHLD: handlers that reap, siginfo of exits and kills, SIG_IGN and SA_NOCLDWAIT, waitid,
 * process groups, stopping and continuing.
 *
 * Hard for a translator: its own action for SIGCHLD decides in the kernel whether children
 * become zombies. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

static volatile sig_atomic_t reaped, exits, kills, last_status;
static void on_child(int signal, siginfo_t *info, void *context) {
    (void)signal;
    (void)info;
    (void)context;
    int status, saved = errno;
    while (waitpid(-1, &status, WNOHANG) > 0) {
        reaped++;
        if (WIFEXITED(status)) exits++, last_status += WEXITSTATUS(status);
        if (WIFSIGNALED(status)) kills++, last_status += 1000 * WTERMSIG(status);
    }
    errno = saved;
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 12);
    struct sigaction action = {.sa_sigaction = on_child, .sa_flags = SA_SIGINFO | SA_NOCLDSTOP};
    CHECK(sigaction(SIGCHLD, &action, NULL) == 0);
    sigset_t block, open;
    sigemptyset(&block);
    sigaddset(&block, SIGCHLD);
    sigprocmask(SIG_BLOCK, &block, &open);
    for (long i = 0; i < n; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            if (i % 4 == 3) {
                raise(SIGKILL);
            }
            _exit((int)i);
        }
    }
    while (reaped < n) sigsuspend(&open);
    printf("reaped %d: %d exited, %d killed, statuses %d\n", reaped, exits, kills, last_status);
    sigprocmask(SIG_SETMASK, &open, NULL);
    signal(SIGCHLD, SIG_DFL);

    // The child exits only when told to: waitpid(WCONTINUED) also returns for a child that has
    // ended already.
    int go[2];
    CHECK(pipe(go) == 0);
    pid_t child = fork();
    if (child == 0) {
        char byte;
        raise(SIGSTOP);
        CHECK(read(go[0], &byte, 1) == 1);
        _exit(21);
    }
    int status;
    CHECK(waitpid(child, &status, WUNTRACED) == child);
    printf("stopped %d by %d\n", WIFSTOPPED(status) != 0, WSTOPSIG(status));
    kill(child, SIGCONT);
    CHECK(waitpid(child, &status, WCONTINUED) == child);
    printf("continued %d\n", WIFCONTINUED(status) != 0);
    CHECK(write(go[1], "", 1) == 1);
    siginfo_t info = {0};
    CHECK(waitid(P_PID, (id_t)child, &info, WEXITED) == 0);
    printf("waitid code %d status %d own child %d\n", info.si_code, info.si_status, info.si_pid == child);

    signal(SIGCHLD, SIG_IGN);
    if ((child = fork()) == 0) _exit(1);
    CHECK(child > 0);
    errno = 0;
    pid_t none = waitpid(child, &status, 0);
    printf("ignored: %d, ECHILD %d\n", none, errno == ECHILD);
    return 0;
}
