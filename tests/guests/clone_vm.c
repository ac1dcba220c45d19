/* Processes that share memory without being threads (CLONE_VM alone): what is shared and what is
 * not, how they end, and code that all of them run and change.
 *
 * Hard for a translator: they share its code cache and tables, but have signal actions,
 * descriptors and ends of their own. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

enum { STACK = 1 << 16, MOST = 12 };
static char stacks[MOST][STACK] __attribute__((aligned(64)));
static char *top(int n) { return stacks[n] + STACK; }

/* Children share the parent's thread-local storage, so they must not touch errno. */
static long raw(long nr, long a, long b, long c, long d) {
    long result;
    register long r10 __asm__("r10") = d;
    __asm__ volatile("syscall" : "=a"(result) : "a"(nr), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
    return result;
}

static void quit(int status) {
    for (;;) raw(SYS_exit_group, status, 0, 0, 0);
}

static int finish_with(pid_t child, int options) {
    int status;
    while (waitpid(child, &status, options) == -1) {
        if (errno != EINTR) return -errno;
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static int finish(pid_t child) { return finish_with(child, 0); }

static void await(volatile int *word, int value) {
    int now;
    while ((now = __atomic_load_n(word, __ATOMIC_SEQ_CST)) != value) raw(SYS_futex, (long)word, FUTEX_WAIT, now, 0);
}

static void say(volatile int *word, int value) {
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
    raw(SYS_futex, (long)word, FUTEX_WAKE, 64, 0);
}

static volatile int shared, turn, gone;

/* Shared memory; waiting for the child. */
static int adds(void *argument) {
    shared += *(int *)argument;
    return 11;
}

static int ping_pong(void *argument) {
    for (int i = 0; i < 500; i++) {
        await(&turn, 1);
        shared++;
        say(&turn, 0);
    }
    return shared == *(int *)argument ? 12 : 1;
}

static void memory(void) {
    int more = 5;
    shared = 1;
    pid_t child = clone(adds, top(0), CLONE_VM | SIGCHLD, &more);
    int status = finish(child);
    printf("memory: %d %d %d\n", status, shared, child != getpid());
    int total = 1000;
    shared = 0;
    child = clone(ping_pong, top(0), CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | SIGCHLD, &total);
    for (int i = 0; i < 500; i++) {
        shared++;
        say(&turn, 1);
        await(&turn, 0);
    }
    status = finish(child);
    printf("ping-pong: %d %d\n", status, shared);
}

/* Signal actions, masks. */
static volatile int seen[3];
static void first_handler(int signal) { seen[0] += signal; }
static void second_handler(int signal) { seen[1] += signal; }
static void fault_handler(int signal, siginfo_t *info, void *context) {
    seen[2] += signal;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    registers[REG_RIP] += 3;
    (void)info;
}

/* A load of three bytes that faults. */
static void fault(void) {
    long address = 8;
    __asm__ volatile("mov (%%rax), %%rax" : "+a"(address) : : "memory");
}

struct action { void *handler; unsigned long flags; void *restorer; unsigned long mask; };

static int own_actions(void *argument) {
    struct action action;
    raw(SYS_rt_sigaction, SIGUSR1, 0, (long)&action, 8);
    action.handler = second_handler;
    raw(SYS_rt_sigaction, SIGUSR1, (long)&action, 0, 8);
    raw(SYS_tkill, raw(SYS_gettid, 0, 0, 0, 0), SIGUSR1, 0, 0);
    fault();
    (void)argument;
    return 13;
}

static void actions(void) {
    struct sigaction action = {.sa_handler = first_handler};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    action.sa_sigaction = fault_handler;
    action.sa_flags = SA_SIGINFO;
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    for (int round = 0; round < 2; round++) {
        int status = finish(clone(own_actions, top(0), CLONE_VM | (round ? CLONE_SIGHAND : 0) | SIGCHLD, NULL));
        raise(SIGUSR1);
        fault();
        printf("actions: %d, %d %d %d\n", status, seen[0], seen[1], seen[2]);
    }
    signal(SIGUSR1, SIG_DFL);
    signal(SIGSEGV, SIG_DFL);
}

/* Directory, descriptors, the program break. */
static int moves(void *argument) {
    (void)argument;
    return raw(SYS_chdir, (long)"/usr", 0, 0, 0) == 0 && raw(SYS_dup2, 1, 77, 0, 0) == 77 ? 14 : 1;
}

static int grows(void *argument) {
    long now = raw(SYS_brk, 0, 0, 0, 0);
    long grown = raw(SYS_brk, now + 40000, 0, 0, 0);
    *(volatile int *)(grown - 8) = 4711;
    *(long *)argument = grown;
    return 15;
}

static void resources(void) {
    char directory[100];
    for (int round = 0; round < 2; round++) {
        CHECK(chdir("/") == 0);
        int status = finish(clone(moves, top(0), CLONE_VM | (round ? CLONE_FS | CLONE_FILES : 0) | SIGCHLD, NULL));
        printf("resources: %d %s %d\n", status, getcwd(directory, sizeof directory), fcntl(77, F_GETFD));
    }
    close(77);
    long grown;
    int status = finish(clone(grows, top(0), CLONE_VM | SIGCHLD, &grown));
    printf("break: %d %d %d\n", status, raw(SYS_brk, 0, 0, 0, 0) == grown, *(int *)(grown - 8));
}

/* How such processes end. */
static int ends(void *argument) {
    int way = *(int *)argument;
    long own = raw(SYS_getpid, 0, 0, 0, 0);
    struct itimerval soon = {.it_value = {0, 20000}};
    if (way == 0) quit(256 + 16);
    if (way == 1) fault();
    if (way == 2) raw(SYS_kill, own, SIGKILL, 0, 0);
    if (way == 3) raw(SYS_kill, own, SIGTERM, 0, 0);
    if (way == 4) __asm__ volatile("ud2");
    if (way == 5) raw(SYS_setitimer, ITIMER_REAL, (long)&soon, 0, 0);
    if (way == 7) raw(SYS_exit, 17, 0, 0, 0);
    while (way == 5) shared++;
    while (way == 6) raw(SYS_pause, 0, 0, 0, 0);
    return 1;
}

static void on_child(int signal) { seen[0] = signal; }

static void all_ends(void) {
    for (int way = 0; way < 8; way++) {
        pid_t child = clone(ends, top(0), CLONE_VM | SIGCHLD, &way);
        if (way == 6) kill(child, SIGUSR2);
        printf("end %d: %d\n", way, finish(child));
    }
    int way = 0;
    pid_t child = clone(ends, top(0), CLONE_VM, &way);
    int result = finish_with(child, 0);
    printf("no signal: %d %d\n", result, finish_with(child, __WCLONE));
    signal(SIGUSR2, on_child);
    child = clone(ends, top(0), CLONE_VM | SIGUSR2, &way);
    result = finish_with(child, __WALL);
    printf("another signal: %d %d\n", result, seen[0] == SIGUSR2);
    int pidfd = -1;
    child = clone(ends, top(0), CLONE_VM | CLONE_PIDFD | SIGCHLD, &way, &pidfd);
    struct pollfd ready = {pidfd, POLLIN, 0};
    CHECK(poll(&ready, 1, 20000) == 1);
    close(pidfd);
    printf("descriptor: %d\n", finish(child));
}

/* Identity: thread ids that the kernel writes and clears; thread-local storage of its own. */
static long storage[2] = {0, 18};
static int tells(void *argument) {
    int value;
    __asm__("movl %%fs:8, %0" : "=r"(value));
    return value + (*(volatile int *)argument == raw(SYS_gettid, 0, 0, 0, 0) ? 0 : 100);
}

static int brings_forth(void *argument) {
    *(pid_t *)argument = raw(SYS_clone, CLONE_PARENT | CLONE_VM | CLONE_VFORK, 0, 0, 0);
    if (*(pid_t *)argument == 0) quit(19);
    return 20;
}

static void identity(void) {
    int parent_tid = 0;
    static volatile int child_tid;
    storage[0] = (long)storage;
    pid_t child = clone(tells, top(0),
                        CLONE_VM | CLONE_PARENT_SETTID | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | CLONE_SETTLS | SIGCHLD,
                        (void *)&child_tid, &parent_tid, storage, &child_tid);
    await(&child_tid, 0);
    printf("identity: %d %d\n", finish(child), parent_tid == child);
    int way = 2;
    child_tid = 1;
    child = clone(ends, top(0), CLONE_VM | CLONE_CHILD_CLEARTID | SIGCHLD, &way, NULL, NULL, &child_tid);
    await(&child_tid, 0);
    printf("killed: %d\n", finish(child));
    child_tid = 1;
    child = clone(adds, top(0), CLONE_VM | CLONE_VFORK | CLONE_CHILD_CLEARTID | SIGCHLD, &way, NULL, NULL, &child_tid);
    int result = finish(child);
    printf("vfork: %d %d\n", result, child_tid);
    pid_t sibling;
    child = clone(brings_forth, top(0), CLONE_VM | SIGCHLD, &sibling);
    result = finish(child);
    printf("siblings: %d %d\n", result, finish_with(sibling, __WALL));
}

/* Parent or child ends first; a child executes a program, forks, has companions of its own. */
static int pipes[2][2];
static int outlives(void *argument) {
    char byte;
    (void)argument;
    raw(SYS_read, pipes[0][0], (long)&byte, 1, 0);
    byte += (char)shared;
    raw(SYS_write, pipes[1][1], (long)&byte, 1, 0);
    return 1;
}

static volatile int cleared = 1;
static char *const program[] = {"clone_vm", "executed", NULL}, *const nothing[] = {NULL};
static int executes(void *argument) {
    (void)argument;
    raw(SYS_execve, (long)"/no/such/program", (long)program, (long)nothing, 0);
    raw(SYS_execve, (long)"/proc/self/exe", (long)program, (long)nothing, 0);
    return 1;
}

static int forks(void *argument) {
    int status, private = shared;
    (void)argument;
    long child = raw(SYS_fork, 0, 0, 0, 0);
    if (child == 0) {
        shared += 100;
        quit(shared == private + 100 ? 21 : 1);
    }
    raw(SYS_wait4, child, (long)&status, 0, 0);
    return shared == private ? WEXITSTATUS(status) : 1;
}

static int nests(void *argument) {
    int level = *(int *)argument, status, next = level + 1;
    if (level == 4) {
        shared++;
        return 22;
    }
    pid_t child = clone(nests, top(next), CLONE_VM | SIGCHLD, &next);
    raw(SYS_wait4, child, (long)&status, __WALL, 0);
    shared++;
    return WEXITSTATUS(status);
}

static void families(void) {
    CHECK(pipe(pipes[0]) == 0 && pipe(pipes[1]) == 0);
    fflush(stdout);
    pid_t parent = fork();
    if (parent == 0) {
        shared = 2;
        clone(outlives, top(0), CLONE_VM | SIGCHLD, NULL);
        quit(23);
    }
    int status = finish(parent);
    char byte = 'a';
    close(pipes[1][1]);
    CHECK(write(pipes[0][1], &byte, 1) == 1 && read(pipes[1][0], &byte, 1) == 1);
    int rest = read(pipes[1][0], &byte, 1);
    printf("outlives: %d %c %d\n", status, byte, rest);
    pid_t child = clone(executes, top(0), CLONE_VM | CLONE_CHILD_CLEARTID | SIGCHLD, NULL, NULL, NULL, &cleared);
    await(&cleared, 0);
    printf("executes: %d\n", finish(child));
    for (int i = 0; i < 3; i++) CHECK(finish(clone(executes, top(0), CLONE_VM | SIGCHLD, NULL)) == 24);
    printf("forks: %d\n", finish(clone(forks, top(0), CLONE_VM | SIGCHLD, NULL)));
    int level = 0;
    shared = 0;
    status = finish(clone(nests, top(0), CLONE_VM | SIGCHLD, &level));
    printf("nests: %d %d\n", status, shared);
}

/* The same code executed by all processes, and code that changes. */
static uint64_t results[MOST];
static uint64_t __attribute__((noinline)) work(uint64_t seed, long rounds) {
    uint64_t sum = 0;
    for (long i = 0; i < rounds; i++) {
        uint64_t value = next_random(&seed);
        sum = mix(sum, value & 1 ? value : value >> 3);
    }
    return sum;
}

static int works(void *argument) {
    int n = *(int *)argument;
    results[n] = work(n + 1, 20000);
    return n;
}

static unsigned char *code;
static void write_code(int slot, int value) {
    static const unsigned char bytes[6] = {0xb8, 0, 0, 0, 0, 0xc3};
    unsigned char *at = code + slot * 64;
    memcpy(at, bytes, sizeof bytes);
    memcpy(at + 1, &value, 4);
}

static int call_code(int slot) { return ((int (*)(void))(code + slot * 64))(); }

static int calls(void *argument) {
    int rounds = *(int *)argument;
    long sum = 0;
    for (int i = 1; i <= rounds; i++) {
        await(&turn, 1);
        for (int k = 0; k < 60; k++) sum += call_code(0);
        say(&turn, 0);
    }
    shared = (int)sum;
    return 25;
}

static int patches(void *argument) {
    int slot = *(int *)argument;
    for (int i = 0; i < 150; i++) {
        write_code(slot, i * slot);
        for (int k = 0; k < 20; k++) {
            if (call_code(slot) != i * slot) return 99;
        }
    }
    return slot;
}

static void code_of_all(void) {
    int numbers[MOST], sum = 0;
    pid_t children[MOST];
    for (int n = 0; n < MOST; n++) {
        numbers[n] = n;
        children[n] = clone(works, top(n), CLONE_VM | (n & 1 ? CLONE_SIGHAND : 0) | SIGCHLD, &numbers[n]);
    }
    uint64_t all = work(99, 20000);
    for (int n = 0; n < MOST; n++) {
        sum += finish(children[n]);
        all = mix(all, results[n]);
    }
    printf("together: %d %llx\n", sum, (unsigned long long)all);

    code = mmap(NULL, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(code != MAP_FAILED);
    int rounds = 60;
    turn = 0;
    pid_t child = clone(calls, top(0), CLONE_VM | SIGCHLD, &rounds);
    for (int i = 1; i <= rounds; i++) {
        write_code(0, i);
        say(&turn, 1);
        await(&turn, 0);
        CHECK(call_code(0) == i);
    }
    int status = finish(child);
    printf("changed code: %d %d\n", status, shared);
    sum = 0;
    for (int n = 0; n < 3; n++) children[n] = clone(patches, top(n), CLONE_VM | SIGCHLD, &numbers[n + 1]);
    sum += patches(&numbers[4]);
    for (int n = 0; n < 3; n++) sum += finish(children[n]);
    printf("patches: %d\n", sum);
}

/* Threads of a companion. */
enum { THREAD = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD };
static int spins(void *argument) {
    say(&turn, 1);
    for (int calls_kernel = *(int *)argument;; shared++) {
        if (calls_kernel) raw(SYS_brk, 0, 0, 0, 0);
    }
    return 1;
}

/* Whoever ends first has the kernel clear `gone`; the other waits for that. */
static int stops(void *argument) {
    if (*(int *)argument == 5) raw(SYS_set_tid_address, (long)&gone, 0, 0, 0);
    else await(&gone, 0);
    raw(SYS_exit, 26, 0, 0, 0);
    return 1;
}

static int has_threads(void *argument) {
    int way = *(int *)argument, calls_kernel = way & 1;
    turn = 0;
    if (way < 4) {
        clone(spins, top(1), THREAD, &calls_kernel);
        clone(spins, top(2), THREAD, &calls_kernel);
        await(&turn, 1);
        if (way < 2) quit(27);
        raw(SYS_execve, (long)"/proc/self/exe", (long)program, (long)nothing, 0);
    }
    gone = 1;
    if (way == 4) raw(SYS_set_tid_address, (long)&gone, 0, 0, 0);
    clone(stops, top(1), THREAD, &way);
    if (way == 5) await(&gone, 0);
    raw(SYS_exit, 28, 0, 0, 0);
    return 1;
}

static void threads(void) {
    for (int way = 0; way < 6; way++) {
        int status = finish(clone(has_threads, top(0), CLONE_VM | SIGCHLD, &way));
        int slot = 5;
        printf("threads %d: %d %d\n", way, status, patches(&slot));
    }
    for (int way = 4; way < 6; way++) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) has_threads(&way);
        printf("threads of a fork: %d\n", finish(child));
    }
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "executed") == 0) return 24;
    setvbuf(stdout, NULL, _IOFBF, 1 << 16);
    memory();
    actions();
    resources();
    all_ends();
    identity();
    families();
    code_of_all();
    threads();
    return 29;
}
