/* Prints all that execve lets a program inherit. With arguments: `under PROG ARG...` changes
 * most of it first and becomes PROG.
 *
 * Hard for a translator: execve executes the translator, whose own state is inherited as well. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

extern char **environ;

static void become(char **command) {
    umask(027);
    CHECK(chdir("/usr/lib") == 0);
    signal(SIGUSR1, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGFPE, SIG_IGN);
    signal(SIGINT, exit); /* execve resets handlers to the default */
    signal(SIGRTMIN + 3, SIG_IGN);
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGUSR2);
    sigaddset(&mask, SIGSEGV);
    sigaddset(&mask, SIGTERM);
    sigaddset(&mask, SIGRTMIN + 4);
    sigprocmask(SIG_SETMASK, &mask, NULL);
    CHECK(kill(getpid(), SIGUSR2) == 0); /* stays pending */
    CHECK(nice(3) != -1);
    struct rlimit files = {100, 200}, core = {0, 0}, stack = {4 << 20, RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0 && setrlimit(RLIMIT_CORE, &core) == 0);
    CHECK(setrlimit(RLIMIT_STACK, &stack) == 0);
    CHECK(personality(ADDR_NO_RANDOMIZE | UNAME26) >= 0);
    CHECK(dup2(open("/dev/null", O_RDONLY), 7) == 7 && dup2(1, 50) == 50);
    CHECK(fcntl(open("/dev/zero", O_RDWR | O_APPEND), F_DUPFD_CLOEXEC, 60) == 60);
    struct itimerval timer = {{0, 0}, {1000, 0}};
    CHECK(setitimer(ITIMER_VIRTUAL, &timer, NULL) == 0);
    CHECK(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0 && prctl(PR_SET_TIMERSLACK, 12345) == 0);
    CHECK(setpgid(0, 0) == 0 || errno == EPERM);
    execv(command[0], command);
    CHECK(!"execv returned");
}

static int by_number(const struct dirent **a, const struct dirent **b) { return atoi((*a)->d_name) - atoi((*b)->d_name); }

static void descriptors(void) {
    struct dirent **entries;
    int count = scandir("/proc/self/fd", &entries, NULL, by_number);
    for (int i = 0; i < count; i++) {
        int fd = atoi(entries[i]->d_name);
        struct stat status;
        if (entries[i]->d_name[0] == '.' || fstat(fd, &status) != 0) continue;
        printf("fd %d type %o flags %o %d\n", fd, status.st_mode & S_IFMT, fcntl(fd, F_GETFL), fcntl(fd, F_GETFD));
    }
    int next = open("/dev/null", O_RDONLY);
    printf("next %d\n", next);
}

int main(int argc, char **argv) {
    if (argc > 1) {
        CHECK(!strcmp(argv[1], "under") && argc > 2);
        become(argv + 2);
    }
    descriptors();
    char directory[4096];
    mode_t mode = umask(0);
    /* The harness gives each run a directory of its own. */
    CHECK(getcwd(directory, sizeof directory));
    printf("umask %o directory %s\n", mode, strncmp(directory, "/usr", 4) ? "other" : directory);
    for (int signo = 1; signo < 65; signo++) {
        struct sigaction action;
        if (sigaction(signo, NULL, &action) != 0) continue;
        CHECK(action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN);
        if (action.sa_handler == SIG_IGN || action.sa_flags) printf("signal %d %d %x\n", signo, action.sa_handler == SIG_IGN, action.sa_flags);
    }
    sigset_t mask, pending;
    sigprocmask(SIG_SETMASK, NULL, &mask);
    sigpending(&pending);
    for (int signo = 1; signo < 65; signo++) {
        if (sigismember(&mask, signo) > 0) printf("blocked %d\n", signo);
        if (sigismember(&pending, signo) > 0) printf("pending %d\n", signo);
    }
    stack_t stack;
    CHECK(sigaltstack(NULL, &stack) == 0);
    printf("altstack %d %zu\n", stack.ss_flags, stack.ss_size);
    for (int resource = 0; resource < RLIM_NLIMITS; resource++) {
        struct rlimit limit;
        CHECK(getrlimit(resource, &limit) == 0);
        printf("limit %d %ld %ld\n", resource, (long)limit.rlim_cur, (long)limit.rlim_max);
    }
    errno = 0;
    printf("priority %d policy %d\n", getpriority(PRIO_PROCESS, 0), sched_getscheduler(0));
    printf("personality %x\n", personality(0xffffffff));
    struct itimerval timer;
    for (int which = ITIMER_REAL; which <= ITIMER_PROF; which++) {
        CHECK(getitimer(which, &timer) == 0);
        printf("timer %d %d\n", which, timer.it_value.tv_sec > 0);
    }
    int subreaper = -1, death = -1;
    prctl(PR_GET_CHILD_SUBREAPER, &subreaper);
    prctl(PR_GET_PDEATHSIG, &death);
    printf("subreaper %d death signal %d dumpable %d slack %d no new privileges %d\n", subreaper, death, prctl(PR_GET_DUMPABLE),
           prctl(PR_GET_TIMERSLACK), prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0));
    printf("leader %d %d\n", getpgrp() == getpid(), getsid(0) == getpid());
    printf("tid is pid %d\n", gettid() == getpid());
    char name[17] = "";
    prctl(PR_GET_NAME, name);
    printf("name %s children %d\n", name, waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD);
    unsigned short control;
    unsigned mxcsr;
    unsigned long flags;
    __asm__("fnstcw %0; stmxcsr %1; pushfq; popq %2" : "=m"(control), "=m"(mxcsr), "=r"(flags));
    printf("x87 %x mxcsr %x direction %ld\n", control, mxcsr, flags & 0x40400);
    int variables = 0;
    while (environ[variables]) variables++;
    printf("%d arguments, environment of %d, %s\n", argc, variables, argv[0] ? strrchr(argv[0], '/') : "none");
    return 0;
}
