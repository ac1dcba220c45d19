/* Filters of system calls: each verdict, several filters, refusals, threads, filters inherited
 * by forks and executed programs; the strict mode; system calls that become signals
 * (PR_SET_SYSCALL_USER_DISPATCH).
 *
 * Hard for a translator: a filter applies to its own system calls as well, and sees their
 * addresses. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>
#include "guest.h"

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define SAY(what) BPF_STMT(BPF_RET | BPF_K, what)
/* Says `what` of one call. */
#define OF(number, what) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1), SAY(what)

static int install(struct sock_filter *program, size_t size, unsigned flags) {
    struct sock_fprog all = {(unsigned short)(size / sizeof *program), program};
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &all);
}
#define INSTALL(flags, ...) install((struct sock_filter[]){__VA_ARGS__}, sizeof((struct sock_filter[]){__VA_ARGS__}), flags)

static long ask(long number, long argument) {
    long result = syscall(number, argument, 2, 3, 4, 5, 6);
    return result == -1 ? -errno : result;
}

/* Runs `what` in a child and shows how that ends. */
static void child(const char *name, void (*what)(void)) {
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        what();
        fflush(stdout);
        _exit(0);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    printf("%s: exit %d, signal %d\n", name, WIFEXITED(status) ? WEXITSTATUS(status) : -1, WIFSIGNALED(status) ? WTERMSIG(status) : 0);
    fflush(stdout);
}

static void errors(void) {
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(INSTALL(0, LOAD(arch), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0), SAY(SECCOMP_RET_KILL), LOAD(nr),
                  OF(__NR_getppid, SECCOMP_RET_ERRNO | EXDEV), OF(__NR_getuid, SECCOMP_RET_TRACE), OF(__NR_getgid, SECCOMP_RET_LOG),
                  OF(__NR_getpgid, SECCOMP_RET_ERRNO | 0xffff), SAY(SECCOMP_RET_ALLOW)) == 0);
    printf("%ld %ld %d %ld, mode %d\n", ask(SYS_getppid, 0), ask(SYS_getuid, 0), ask(SYS_getgid, 0) >= 0, ask(SYS_getpgid, 0), prctl(PR_GET_SECCOMP));
    /* A second filter looks at an argument; the verdict with the higher precedence counts. */
    CHECK(INSTALL(0, LOAD(nr), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_alarm, 0, 3), LOAD(args[0]),
                  BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, 1000, 0, 1), SAY(SECCOMP_RET_ERRNO | ERANGE), SAY(SECCOMP_RET_ALLOW)) == 0);
    printf("%ld %ld %ld\n", ask(SYS_alarm, 0), ask(SYS_alarm, 2000), ask(SYS_getppid, 0));
    printf("not strict now: %d\n", prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) == -1 && errno == EINVAL);
}

static void killed(void) {
    CHECK(INSTALL(0, LOAD(nr), OF(__NR_getppid, SECCOMP_RET_KILL_PROCESS), SAY(SECCOMP_RET_ALLOW)) == 0);
    getppid();
}

static void killed_thread(void) {
    CHECK(INSTALL(0, LOAD(nr), OF(__NR_getppid, SECCOMP_RET_KILL_THREAD), SAY(SECCOMP_RET_ALLOW)) == 0);
    getppid();
}

static void strict(void) {
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) == 0);
    CHECK(write(1, "strict\n", 7) == 7);
    syscall(SYS_exit, 5);
}

static void strict_killed(void) {
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) == 0);
    getppid();
}

static volatile struct { int code, detail, number, behind; unsigned arch; long rax; } seen;
static void on_sys(int signal, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    seen.code = info->si_code;
    seen.detail = info->si_errno;
    seen.number = info->si_syscall;
    seen.arch = info->si_arch;
    seen.behind = (greg_t)info->si_call_addr == registers[REG_RIP];
    seen.rax = registers[REG_RAX];
    registers[REG_RAX] = 4000 + signal + registers[REG_RDI];
}

static void catch(void) {
    struct sigaction action = {.sa_sigaction = on_sys, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGSYS, &action, NULL) == 0);
}

static void trapped(void) {
    catch();
    CHECK(INSTALL(0, LOAD(nr), OF(__NR_getpgid, SECCOMP_RET_TRAP | 77), SAY(SECCOMP_RET_ALLOW)) == 0);
    long sum = 0;
    for (int i = 0; i < 300; i++) sum += ask(SYS_getpgid, i);
    printf("%ld: code %d, data %d, call %d, arch %x, rax %ld, address %d\n", sum, seen.code, seen.detail, seen.number, seen.arch, seen.rax, seen.behind);
    signal(SIGSYS, SIG_IGN);
    ask(SYS_getpgid, 1);
}

static void *asks_late(void *gate) {
    long before = prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0);
    pthread_barrier_wait(gate);
    pthread_barrier_wait(gate);
    return (void *)(ask(SYS_getppid, 0) * 100 - 10 * before - prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0));
}

static void *dies(void *flag) {
    syscall(SYS_getppid);
    *(int *)flag = 1;
    return NULL;
}

static void threads(void) {
    pthread_t other;
    pthread_barrier_t gate;
    pthread_barrier_init(&gate, NULL, 2);
    CHECK(pthread_create(&other, NULL, asks_late, &gate) == 0);
    pthread_barrier_wait(&gate);
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(INSTALL(SECCOMP_FILTER_FLAG_TSYNC, LOAD(nr), OF(__NR_getppid, SECCOMP_RET_ERRNO | EBUSY), SAY(SECCOMP_RET_ALLOW)) == 0);
    pthread_barrier_wait(&gate);
    void *result;
    pthread_join(other, &result);
    printf("the other thread: %ld, this one: %ld\n", (long)result, ask(SYS_getppid, 0));
    CHECK(INSTALL(0, LOAD(nr), OF(__NR_getppid, SECCOMP_RET_KILL_THREAD), SAY(SECCOMP_RET_ALLOW)) == 0);
    int flag = 0;
    CHECK(pthread_create(&other, NULL, dies, &flag) == 0);
    pthread_join(other, NULL);
    printf("went on: %d\n", flag);
}

static const char *self;
static void executes(void) {
    CHECK(INSTALL(0, LOAD(nr), OF(__NR_getppid, SECCOMP_RET_ERRNO | ENOTTY), SAY(SECCOMP_RET_ALLOW)) == 0);
    CHECK(INSTALL(0, LOAD(nr), OF(__NR_getuid, SECCOMP_RET_ERRNO | ENOSPC), SAY(SECCOMP_RET_ALLOW)) == 0);
    execl("/nowhere", "nowhere", NULL);
    CHECK(errno == ENOENT);
    execl(self, self, "executed", NULL);
}

static volatile char selector;
/* One call, either from the only address range whose calls are not dispatched, or from outside. */
static long call_from(int spared, long number) {
    long result = number;
    if (spared) __asm__ volatile("spared_call: syscall" : "+a"(result) : : "rcx", "r11", "memory");
    else __asm__ volatile("syscall" : "+a"(result) : "D"(number) : "rcx", "r11", "memory");
    return result;
}
extern char spared_call[];

static void on_dispatched(int signal, siginfo_t *info, void *context) {
    selector = SYSCALL_DISPATCH_FILTER_ALLOW;
    on_sys(signal, info, context);
}

static void *other_thread(void *unused) {
    CHECK(unused == NULL);
    return (void *)call_from(0, SYS_getpid);
}

static void dispatched(void) {
    struct sigaction action = {.sa_sigaction = on_dispatched, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGSYS, &action, NULL) == 0);
    CHECK(prctl(PR_SET_SYSCALL_USER_DISPATCH, 2, 0, 0, 0) == -1 && errno == EINVAL);
    CHECK(prctl(PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_ON, 5, -5L, 0) == -1 && errno == EINVAL);
    CHECK(prctl(PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_OFF, 5, 0, 0) == -1 && errno == EINVAL);
    CHECK(prctl(PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_ON, spared_call, 3, &selector) == 0);
    long sum = 0, own = getpid();
    for (int i = 0; i < 300; i++) {
        selector = SYSCALL_DISPATCH_FILTER_BLOCK;
        sum += call_from(0, 100000 + i);
        selector = SYSCALL_DISPATCH_FILTER_BLOCK;
        CHECK(call_from(1, SYS_getpid) == own);
        selector = SYSCALL_DISPATCH_FILTER_ALLOW;
        CHECK(call_from(0, SYS_getpid) == own);
    }
    printf("%ld: code %d, data %d, call %d, rax %ld, address %d\n", sum, seen.code, seen.detail, seen.number, seen.rax, seen.behind);
    pthread_t other;
    void *result;
    CHECK(pthread_create(&other, NULL, other_thread, NULL) == 0 && pthread_join(other, &result) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        selector = SYSCALL_DISPATCH_FILTER_BLOCK;
        _exit(call_from(0, SYS_getpid) == getpid());
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    printf("not in a thread: %d, not in a child: %d\n", (long)result == own, WEXITSTATUS(status));
    fflush(stdout);
    selector = 2;
    call_from(0, SYS_getpid);
}

int main(int argc, char **argv) {
    self = argv[0];
    if (argc > 1) {
        printf("executed: %ld %ld %d\n", ask(SYS_getppid, 0), ask(SYS_getuid, 0), ask(SYS_getgid, 0) >= 0);
        return 6;
    }
    CHECK(prctl(PR_GET_SECCOMP) == 0);
    child("errors", errors);
    child("threads", threads);
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    child("process", killed);
    child("thread", killed_thread);
    child("strict", strict);
    child("strict, killed", strict_killed);
    child("trapped", trapped);
    child("executes", executes);
    child("dispatched", dispatched);
    unsigned known = SECCOMP_RET_TRAP, unknown = 0x12340000;
    CHECK(syscall(SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &known) == 0);
    CHECK(syscall(SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &unknown) == -1 && errno == EOPNOTSUPP);
    CHECK(INSTALL(0, LOAD(nr)) == -1 && errno == EINVAL);
    CHECK(INSTALL(1u << 20, SAY(SECCOMP_RET_ALLOW)) == -1 && errno == EINVAL);
    CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, NULL) == -1 && errno == EFAULT);
    CHECK(install(NULL, 8, 0) == -1 && errno == EINVAL);
    CHECK(install((struct sock_filter *)64, 8, 0) == -1 && errno == EFAULT);
    printf("mode %d\n", prctl(PR_GET_SECCOMP));
}
