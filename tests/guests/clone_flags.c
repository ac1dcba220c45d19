/* Processes by clone and clone3 with all flags that need no thread: what is shared and what is
 * not; calls about the process itself.
 *
 * Hard for a translator: each flag decides whether its own tables are copied or shared, too. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

static volatile int shared;
static int descriptor_flags;
static char stack[1 << 16] __attribute__((aligned(64)));

static int finish(pid_t child, int options) {
    int status;
    while (waitpid(child, &status, options) == -1) {
        if (errno != EINTR) return -errno;
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static long raw_clone(unsigned long flags, void *sp, int *parent, int *child, unsigned long tls) {
    return syscall(SYS_clone, flags, sp, parent, child, tls);
}

static int on_own_stack(void *argument) {
    char local;
    int inside = &local >= stack && &local < stack + sizeof stack;
    shared += 5;
    return inside ? *(int *)argument : 99;
}

static void on_signal(int signal) { shared = signal; }

int main(void) {
    setvbuf(stdout, NULL, _IOFBF, 1 << 16);
    int parent_tid = 0, child_tid = 0;

    long child = raw_clone(CLONE_PARENT_SETTID | CLONE_CHILD_SETTID | SIGCHLD, NULL, &parent_tid, &child_tid, 0);
    if (child == 0) _Exit(child_tid == getpid() ? 11 : 12);
    printf("settid: %d %d %d\n", finish(child, 0), parent_tid == child, child_tid);

    /* The exit signal: none, or another. */
    child = raw_clone(0, NULL, NULL, NULL, 0);
    if (child == 0) _Exit(13);
    printf("no signal: %d\n", finish(child, __WALL));
    signal(SIGUSR1, on_signal);
    child = raw_clone(SIGUSR1, NULL, NULL, NULL, 0);
    if (child == 0) _Exit(14);
    int result = finish(child, __WCLONE);
    printf("another signal: %d %d\n", result, shared == SIGUSR1);

    /* Shared directory and descriptors. */
    CHECK(chdir("/") == 0);
    child = raw_clone(CLONE_FS | CLONE_FILES | SIGCHLD, NULL, NULL, NULL, 0);
    if (child == 0) _Exit(chdir("/usr") == 0 && dup2(1, 77) == 77 ? 15 : 1);
    char directory[100];
    result = finish(child, 0);
    printf("shared: %d %s %d\n", result, getcwd(directory, sizeof directory), fcntl(77, F_GETFD));
    close(77);

    /* clone on another stack without sharing memory, and with it while the parent waits. */
    int code = 16;
    shared = 1;
    child = clone(on_own_stack, stack + sizeof stack, SIGCHLD, &code);
    result = finish(child, 0);
    printf("own stack: %d %d\n", result, shared);
    child = clone(on_own_stack, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, &code);
    result = finish(child, 0);
    printf("parent's memory: %d %d\n", result, shared);

    /* clone3. */
    int pidfd = -1;
    signal(SIGUSR2, on_signal);
    struct clone_args args = {.flags = CLONE_PIDFD | CLONE_CLEAR_SIGHAND, .pidfd = (uint64_t)&pidfd, .exit_signal = SIGCHLD};
    child = syscall(SYS_clone3, &args, sizeof args);
    if (child == 0) {
        struct sigaction action;
        sigaction(SIGUSR2, NULL, &action);
        _Exit(action.sa_handler == SIG_DFL ? 17 : 1);
    }
    struct pollfd ready = {pidfd, POLLIN, 0};
    CHECK(poll(&ready, 1, 10000) == 1);
    siginfo_t info;
    CHECK(waitid(P_PIDFD, pidfd, &info, WEXITED) == 0);
    printf("clone3: %d %d\n", info.si_status, info.si_pid == child);
    close(pidfd);
    struct { struct clone_args args; uint64_t more; } bigger = {{.exit_signal = SIGCHLD}, 1};
    printf("clone3 errors:");
    printf(" %d", syscall(SYS_clone3, &bigger, sizeof bigger) == -1 ? errno : 0);
    printf(" %d", syscall(SYS_clone3, &args, 8) == -1 ? errno : 0);
    printf(" %d", syscall(SYS_clone3, (void *)8, sizeof args) == -1 ? errno : 0);
    args.flags = CLONE_SIGHAND;
    printf(" %d", syscall(SYS_clone3, &args, sizeof args) == -1 ? errno : 0);
    args.flags = 1ULL << 60;
    printf(" %d", syscall(SYS_clone3, &args, sizeof args) == -1 ? errno : 0);
    printf(" clone errors: %d", raw_clone(CLONE_SIGHAND | SIGCHLD, NULL, NULL, NULL, 0) == -1 ? errno : 0);
    printf(" %d\n", raw_clone(CLONE_NEWNS | CLONE_FS | SIGCHLD, NULL, NULL, NULL, 0) == -1 ? errno : 0);

    /* Children have the same parent: only the parent's parent may wait. */
    fflush(stdout);
    if ((child = fork()) == 0) {
        long sibling = raw_clone(CLONE_PARENT | SIGCHLD, NULL, NULL, NULL, 0);
        if (sibling == 0) _Exit(18);
        _Exit(finish(sibling, 0) == -ECHILD ? 19 : 1);
    }
    int statuses = 0;
    for (int i = 0; i < 2; i++) statuses += finish(-1, 0);
    printf("siblings: %d\n", statuses);

    /* Calls about the process itself. */
    char name[17] = "";
    CHECK(prctl(PR_SET_NAME, "a longer name than fits") == 0 && prctl(PR_GET_NAME, name) == 0);
    printf("name %s\n", name);
    CHECK(prctl(PR_SET_PDEATHSIG, SIGTERM) == 0 && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    int death = 0;
    prctl(PR_GET_PDEATHSIG, &death);
    printf("death signal %d, no new privileges %d, bad option %d\n", death, prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0),
           prctl(99999, 0, 0, 0, 0) == -1 ? errno : 0);
    void *head[3] = {head, 0, 0}, *got = NULL;
    size_t length = 0;
    CHECK(syscall(SYS_set_robust_list, head, 24) == 0 && syscall(SYS_get_robust_list, 0, &got, &length) == 0);
    printf("robust list %d %zu %d\n", got == head, length, syscall(SYS_set_robust_list, head, 23) == -1 ? errno : 0);
    printf("tid address %d\n", syscall(SYS_set_tid_address, &child_tid) == getpid());
    struct rlimit64 limit, again;
    CHECK(syscall(SYS_prlimit64, 0, RLIMIT_NOFILE, NULL, &limit) == 0);
    limit.rlim_cur = 64;
    CHECK(syscall(SYS_prlimit64, getpid(), RLIMIT_NOFILE, &limit, NULL) == 0);
    CHECK(syscall(SYS_prlimit64, 0, RLIMIT_NOFILE, NULL, &again) == 0);
    printf("limit %ld, descriptor %d\n", (long)again.rlim_cur, fcntl(1, F_DUPFD, 64) == -1 ? errno : 0);
    CHECK(personality(ADDR_COMPAT_LAYOUT) >= 0);
    printf("personality %x\n", personality(0xffffffff));
    child = fork();
    if (child == 0) {
        prctl(PR_GET_NAME, name);
        _Exit(strcmp(name, "a longer name t") == 0 && personality(0xffffffff) == ADDR_COMPAT_LAYOUT ? 21 : 1);
    }
    printf("inherited %d\n", finish(child, 0));
    return 0;
}
