/* Stopping and continuing: what a shell sees of its jobs, and what a job does about SIGTSTP.
 *
 * Hard for a translator: the default action of a signal that it has caught must still stop the
 * process. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "guest.h"

static volatile sig_atomic_t continued, asked;

static void on_continue(int signal) {
    (void)signal;
    continued++;
}

/* As editors do: clean up, stop by the default action, continue. */
static void on_stop_request(int signo) {
    int saved = errno;
    asked++;
    signal(signo, SIG_DFL);
    sigset_t set, before;
    sigemptyset(&set);
    sigaddset(&set, signo);
    raise(signo);
    sigprocmask(SIG_UNBLOCK, &set, &before); /* stops here */
    sigprocmask(SIG_SETMASK, &before, NULL);
    signal(signo, on_stop_request);
    errno = saved;
}

static void expect(pid_t child, int options, const char *what) {
    int status;
    CHECK(waitpid(child, &status, options) == child);
    if (WIFSTOPPED(status)) printf("%s: stopped by %d\n", what, WSTOPSIG(status));
    else if (WIFCONTINUED(status)) printf("%s: continued\n", what);
    else if (WIFSIGNALED(status)) printf("%s: killed by %d\n", what, WTERMSIG(status));
    else printf("%s: exited with %d\n", what, WEXITSTATUS(status));
}

static pid_t start(int (*body)(int), int gate[2]) {
    CHECK(pipe(gate) == 0);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        /* Stop requests of a terminal do nothing in an orphaned group; this one has its parent
         * in another. */
        setpgid(0, 0);
        _Exit(body(gate[1]));
    }
    char ready;
    close(gate[1]);
    CHECK(read(gate[0], &ready, 1) == 1);
    return child;
}

static int computing(int gate) {
    volatile uint64_t state = 88172645463325252ULL;
    CHECK(write(gate, "r", 1) == 1);
    for (;;) next_random((uint64_t *)&state);
}

static int sleeping(int gate) {
    CHECK(write(gate, "r", 1) == 1);
    /* Stops do not end a sleep. */
    struct timespec long_time = {100, 0};
    return nanosleep(&long_time, NULL) == -1 ? 40 + errno : 0;
}

static int careful(int gate) {
    signal(SIGTSTP, on_stop_request);
    signal(SIGCONT, on_continue);
    sigset_t block, open;
    sigemptyset(&block);
    sigaddset(&block, SIGTSTP);
    sigaddset(&block, SIGCONT);
    sigprocmask(SIG_BLOCK, &block, &open);
    sigset_t leave;
    sigemptyset(&leave);
    sigaddset(&leave, SIGUSR1);
    sigprocmask(SIG_BLOCK, &leave, NULL);
    CHECK(write(gate, "r", 1) == 1);
    for (int round = 1; round <= 2; round++) {
        while (asked < round || continued < round) sigsuspend(&open);
        CHECK(write(gate, "b", 1) == 1);
    }
    /* A child that ends at once is reported as ended if its parent has not yet asked whether it
     * continued. */
    int signo;
    CHECK(sigwait(&leave, &signo) == 0);
    return 10 * asked + continued;
}

static int ignoring(int gate) {
    signal(SIGTSTP, SIG_IGN);
    signal(SIGTTOU, SIG_IGN);
    signal(SIGTTIN, SIG_IGN);
    raise(SIGTSTP), raise(SIGTTOU), raise(SIGTTIN);
    CHECK(write(gate, "r", 1) == 1);
    return 7;
}

static volatile sig_atomic_t child_events;
static void on_child(int signal) {
    (void)signal;
    child_events++;
}

int main(void) {
    int gate[2];
    int stops[] = {SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU};
    setvbuf(stdout, NULL, _IOFBF, 1 << 16);
    for (int k = 0; k < 2; k++) {
        pid_t child = start(k ? sleeping : computing, gate);
        for (int i = 0; i < 4; i++) {
            CHECK(kill(child, stops[i]) == 0);
            expect(child, WUNTRACED, k ? "sleeper" : "worker");
            CHECK(kill(child, SIGCONT) == 0);
            expect(child, WCONTINUED, k ? "sleeper" : "worker");
        }
        CHECK(kill(child, SIGSTOP) == 0);
        expect(child, WUNTRACED, "last");
        /* A signal sent to a stopped process arrives when it continues; SIGKILL arrives at once. */
        CHECK(kill(child, k ? SIGTERM : SIGKILL) == 0);
        if (k) CHECK(kill(child, SIGCONT) == 0);
        expect(child, 0, "last");
    }

    pid_t child = start(careful, gate);
    for (int i = 0; i < 2; i++) {
        CHECK(kill(child, SIGTSTP) == 0);
        expect(child, WUNTRACED, "careful");
        CHECK(kill(child, SIGCONT) == 0);
        expect(child, WCONTINUED, "careful");
        /* Its handler has to have returned before the next request. */
        char back;
        CHECK(read(gate[0], &back, 1) == 1);
    }
    CHECK(kill(child, SIGUSR1) == 0);
    expect(child, WUNTRACED, "careful");
    child = start(ignoring, gate);
    expect(child, WUNTRACED, "ignoring");

    /* SIGCHLD tells of stops unless told not to. */
    for (int k = 0; k < 2; k++) {
        struct sigaction action = {.sa_handler = on_child, .sa_flags = k ? SA_NOCLDSTOP : 0};
        CHECK(sigaction(SIGCHLD, &action, NULL) == 0);
        child_events = 0;
        child = start(computing, gate);
        kill(child, SIGSTOP);
        int status;
        while (waitpid(child, &status, WUNTRACED) == -1) CHECK(errno == EINTR);
        CHECK(WIFSTOPPED(status));
        /* A stop can be waited for before its signal has been sent. */
        for (int i = 0; i < 2000 && k == 0 && child_events == 0; i++) {
            struct timespec moment = {0, 1000000};
            nanosleep(&moment, NULL);
        }
        int told_of_stop = child_events;
        kill(child, SIGKILL);
        while (waitpid(child, &status, 0) == -1) CHECK(errno == EINTR);
        printf("events: %d of a stop, %d of the end\n", told_of_stop, child_events - told_of_stop);
    }

    /* A process that stops itself, seen by its child. */
    fflush(stdout);
    signal(SIGCHLD, SIG_DFL);
    pid_t self = getpid();
    child = fork();
    if (child == 0) {
        for (int i = 0; i < 1000 && kill(self, SIGCONT) == 0 && getppid() == self; i++) {
            struct timespec moment = {0, 2000000};
            nanosleep(&moment, NULL);
        }
        _Exit(0);
    }
    raise(SIGSTOP);
    kill(child, SIGKILL);
    expect(child, 0, "waker");
    printf("went on\n");
    return 0;
}
