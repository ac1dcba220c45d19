/* Ping-pong of two processes by signals and sigsuspend: a single lost wake-up hangs.
 *
 * Hard for a translator: a signal may come between setting the mask and waiting. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

static volatile sig_atomic_t balls;
static void on_ball(int signal) {
    (void)signal;
    balls++;
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 200);
    struct sigaction action = {.sa_handler = on_ball};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    sigset_t block, open;
    sigemptyset(&block);
    sigaddset(&block, SIGUSR1);
    CHECK(sigprocmask(SIG_BLOCK, &block, &open) == 0);
    pid_t parent = getpid(), child = fork();
    CHECK(child >= 0);
    pid_t peer = child ? child : parent;
    if (child) kill(peer, SIGUSR1);
    for (long i = 0; i < n; i++) {
        while (balls <= i) sigsuspend(&open);
        if (child && i + 1 == n) break;
        kill(peer, SIGUSR1);
    }
    if (!child) _exit(balls == n ? 3 : 4);
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    printf("rounds %d, child %d\n", (int)balls, WEXITSTATUS(status));
    return 0;
}
