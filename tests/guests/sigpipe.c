/* SIGPIPE: if ignored the call fails with EPIPE, if handled the handler runs as well, by default
 * it kills. */
#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

static volatile sig_atomic_t hits;
static void on_pipe(int signal) {
    (void)signal;
    hits++;
}

int main(void) {
    int fds[2];
    struct sigaction initial;
    sigaction(SIGPIPE, NULL, &initial);
    printf("initially default: %d\n", initial.sa_handler == SIG_DFL);
    CHECK(pipe(fds) == 0);
    close(fds[0]);
    signal(SIGPIPE, SIG_IGN);
    ssize_t n = write(fds[1], "a", 1);
    printf("ignored: %zd EPIPE %d\n", n, errno == EPIPE);
    signal(SIGPIPE, on_pipe);
    n = write(fds[1], "a", 1);
    printf("handled: %zd EPIPE %d hits %d\n", n, errno == EPIPE, hits);
    fflush(stdout);
    signal(SIGPIPE, SIG_DFL);
    if (write(fds[1], "a", 1) < 0) printf("still here\n");
    return 0;
}
