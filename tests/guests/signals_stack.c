/* Alternate signal stacks: which signals run on which stack, nested and full ones,
 * SS_AUTODISARM, refusals, jumps off the stack, contexts that are switched on it, and frames
 * that cannot be written.
 *
 * Hard for a translator: the kernel knows only the translator's stack, so each of these rules is
 * its own. */
#define _GNU_SOURCE
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>
#include "guest.h"
#ifndef SS_AUTODISARM
#define SS_AUTODISARM (1U << 31)
#endif

enum { SIZE = 1 << 16 };
static char first[SIZE] __attribute__((aligned(64))), second[SIZE] __attribute__((aligned(64)));
static char text[1 << 14];
static int length;

static int where(const void *p) {
    const char *c = p;
    return c >= first && c < first + SIZE ? 1 : c >= second && c < second + SIZE ? 2 : 0;
}
static void report(const char *what) {
    stack_t now;
    CHECK(sigaltstack(NULL, &now) == 0);
    char local;
    length += sprintf(text + length, " %s(on %d, stack %d size %lu flags %x)", what, where(&local), where(now.ss_sp), now.ss_size, now.ss_flags);
}
static int set(void *sp, size_t size, int flags) {
    stack_t new = {.ss_sp = sp, .ss_size = size, .ss_flags = flags};
    return sigaltstack(&new, NULL) == 0 ? 0 : -errno;
}
static void show(const char *what) {
    printf("%s:%s\n", what, text);
    text[0] = length = 0;
}

static void (*volatile inside)(int, siginfo_t *, ucontext_t *);
static void handler(int signo, siginfo_t *info, void *context) {
    char name[32];
    sprintf(name, "%d", signo);
    report(name);
    ucontext_t *uc = context;
    length += sprintf(text + length, " frame %d/%lu/%x", where(uc->uc_stack.ss_sp), uc->uc_stack.ss_size, uc->uc_stack.ss_flags);
    if (inside) inside(signo, info, uc);
}
static void handle(int signo, int flags) {
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | flags};
    CHECK(sigaction(signo, &action, NULL) == 0);
}

static void raise_next(int signo, siginfo_t *info, ucontext_t *uc) {
    if (signo == SIGUSR1) raise(SIGUSR2);
    if (signo == SIGUSR2) raise(SIGHUP);
    if (signo == SIGHUP) raise(SIGTERM);
}
static void try_to_change(int signo, siginfo_t *info, ucontext_t *uc) {
    length += sprintf(text + length, " change %d", set(second, SIZE, 0));
    length += sprintf(text + length, " disable %d", set(NULL, 0, SS_DISABLE));
    length += sprintf(text + length, " same %d", set(first, SIZE, 0));
    report("then");
}
static void edit_frame(int signo, siginfo_t *info, ucontext_t *uc) {
    uc->uc_stack.ss_sp = second;
    uc->uc_stack.ss_size = SIZE;
    uc->uc_stack.ss_flags = 0;
}
static sigjmp_buf out;
static void jump(int signo, siginfo_t *info, ucontext_t *uc) { siglongjmp(out, 1); }

static void on_the_stack(void) {
    struct { void *sp; size_t size; int flags; } tries[] = {
        {first, 2047, 0}, {first, 2048, 0}, {first, SIZE, 4}, {first, SIZE, SS_DISABLE}, {first, SIZE, SS_ONSTACK},
        {first, SIZE, SS_ONSTACK | (int)SS_AUTODISARM}, {first, 0, SS_DISABLE | (int)SS_AUTODISARM}, {first, SIZE, 0},
    };
    report("none");
    for (int i = 0; i < 8; i++) {
        length += sprintf(text + length, " set %d", set(tries[i].sp, tries[i].size, tries[i].flags));
        report("now");
    }
    length += sprintf(text + length, " bad %d %d", sigaltstack((void *)8, NULL) ? errno : 0, sigaltstack(NULL, (void *)8) ? errno : 0);
    show("setting");
    handle(SIGUSR1, SA_ONSTACK), handle(SIGUSR2, 0), handle(SIGHUP, SA_ONSTACK), handle(SIGTERM, SA_ONSTACK);
    inside = NULL;
    raise(SIGUSR1), raise(SIGUSR2);
    show("with and without SA_ONSTACK");
    inside = raise_next;
    raise(SIGUSR1);
    show("nested");
    inside = try_to_change;
    raise(SIGUSR1);
    report("afterwards");
    show("changing it while on it");
    inside = edit_frame;
    raise(SIGUSR1);
    report("afterwards");
    show("the frame's stack is installed");
    set(first, SIZE, 0);
    inside = edit_frame;
    raise(SIGUSR2);
    report("afterwards");
    set(first, SIZE, 0);
    show("the frame's stack, not on it");
    inside = jump;
    for (int i = 0; i < 3; i++)
        if (sigsetjmp(out, 1) == 0) raise(SIGUSR1);
    report("afterwards");
    show("jumped off");
}

static void disarmed(void) {
    CHECK(set(first, SIZE, (int)SS_AUTODISARM) == 0);
    handle(SIGUSR1, SA_ONSTACK), handle(SIGUSR2, SA_ONSTACK | SA_NODEFER), handle(SIGHUP, SA_ONSTACK);
    inside = NULL;
    raise(SIGUSR1);
    report("afterwards");
    show("disarmed");
    inside = raise_next;
    raise(SIGUSR1);
    report("afterwards");
    show("disarmed, nested");
    inside = try_to_change;
    raise(SIGUSR1);
    report("afterwards");
    show("disarmed, changed");
    set(first, SIZE, (int)SS_AUTODISARM);
    inside = jump;
    if (sigsetjmp(out, 1) == 0) raise(SIGUSR1);
    report("afterwards");
    show("disarmed, jumped off");
    CHECK(set(NULL, 0, SS_DISABLE) == 0);
}

/* Contexts made of handlers' contexts, and switches between them on the alternate stack. */
static ucontext_t main_context, other_context, saved;
static volatile int turns;
static void other(void) {
    for (;;) {
        turns++;
        report("other");
        swapcontext(&other_context, &main_context);
    }
}
static void keep(int signo, siginfo_t *info, ucontext_t *uc) {
    swapcontext(&main_context, &other_context);
}
static void contexts(void) {
    static char stack[SIZE];
    CHECK(getcontext(&other_context) == 0);
    other_context.uc_stack.ss_sp = stack;
    other_context.uc_stack.ss_size = sizeof stack;
    other_context.uc_link = &main_context;
    makecontext(&other_context, other, 0);
    CHECK(set(first, SIZE, 0) == 0);
    inside = keep;
    handle(SIGUSR1, SA_ONSTACK);
    for (int i = 0; i < 3; i++) raise(SIGUSR1);
    length += sprintf(text + length, " turns %d", turns);
    show("switched in handlers");
    inside = NULL;
}

/* Each fault's handler faults itself, until the stack is full: then the process dies of SIGSEGV. */
static char *none;
static void fault_again(int signo, siginfo_t *info, ucontext_t *uc) { none[0] = 1; }
static void die_of(const char *what, void (*how)(void)) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        how();
        _exit(77);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    printf("%s: %s %d\n", what, WIFSIGNALED(status) ? "signal" : "exit", WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
}
static void full(void) {
    CHECK(set(first, 16384, 0) == 0);
    handle(SIGSEGV, SA_ONSTACK | SA_NODEFER);
    inside = fault_again;
    none[0] = 1;
}
static volatile int segv_count;
static void count_and_leave(int signo, siginfo_t *info, void *context) {
    _exit(signo == SIGSEGV && info->si_code == SI_KERNEL ? 50 : 51);
}
static void with_bad_stack(int segv_flags, int usr_flags) {
    struct sigaction action = {.sa_sigaction = count_and_leave, .sa_flags = SA_SIGINFO | segv_flags};
    sigaction(SIGSEGV, &action, NULL);
    action.sa_flags = SA_SIGINFO | usr_flags;
    sigaction(SIGUSR1, &action, NULL);
    set(first, SIZE, 0);
    long pid = getpid();
    __asm__ volatile("mov %0, %%rsp\n syscall\n" : : "r"(none + (1 << 16)), "a"(62L), "D"(pid), "S"((long)SIGUSR1) : "rcx", "r11", "memory");
    _exit(52);
}
static void frame_segv_on_stack(void) { with_bad_stack(SA_ONSTACK, 0); }
static void frame_segv_nowhere(void) { with_bad_stack(0, 0); }
static void frame_fits(void) { with_bad_stack(SA_ONSTACK, SA_ONSTACK); }
static void frame_segv_blocked(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGSEGV);
    sigprocmask(SIG_BLOCK, &set, NULL);
    with_bad_stack(SA_ONSTACK, 0);
}
static void bad_return(void) {
    handle(SIGSEGV, SA_ONSTACK);
    struct sigaction action = {.sa_sigaction = count_and_leave, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaction(SIGSEGV, &action, NULL);
    set(first, SIZE, 0);
    __asm__ volatile("mov %0, %%rsp\n mov $15, %%eax\n syscall\n" : : "r"(none + (1 << 16)) : "rax", "rcx", "r11", "memory");
}

int main(void) {
    none = mmap(NULL, 1 << 17, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int round = 0; round < 3; round++) {
        CHECK(set(NULL, 0, SS_DISABLE) == 0);
        on_the_stack();
        disarmed();
        contexts();
        CHECK(set(NULL, 0, SS_DISABLE) == 0);
    }
    die_of("the stack is full", full);
    die_of("no frame, SIGSEGV on the alternate stack", frame_segv_on_stack);
    die_of("no frame, SIGSEGV nowhere", frame_segv_nowhere);
    die_of("the frame goes to the alternate stack", frame_fits);
    die_of("no frame, SIGSEGV blocked", frame_segv_blocked);
    die_of("bad return", bad_return);
    return 0;
}
