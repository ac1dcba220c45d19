/* The system calls about signals, mostly without libc's wrappers: results, errors, the pending
 * set, the order of delivery, and the contents of siginfo.
 *
 * Hard for a translator: it answers these calls itself, since the kernel's actions are its own. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>
#include "guest.h"

struct kernel_action {
    void *handler;
    unsigned long flags;
    void *restorer;
    uint64_t mask;
};
#define BIT(signo) (1UL << ((signo) - 1))
extern void restorer(void);
__asm__(".text\nrestorer: mov $15, %eax\nsyscall\n");

static pid_t self;
static long call(long nr, long a, long b, long c, long d, long e) {
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    __asm__ volatile("syscall" : "=a"(result) : "a"(nr), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
    return result;
}
static long action(int signo, const struct kernel_action *new, struct kernel_action *old) {
    return call(SYS_rt_sigaction, signo, (long)new, (long)old, 8, 0);
}
static uint64_t mask(int how, uint64_t set) {
    uint64_t old = 0;
    CHECK(call(SYS_rt_sigprocmask, how, (long)&set, (long)&old, 8, 0) == 0);
    return old;
}
static uint64_t current(void) {
    uint64_t old = 0;
    CHECK(call(SYS_rt_sigprocmask, 0, 0, (long)&old, 8, 0) == 0);
    return old;
}
static uint64_t pending(void) {
    uint64_t set = 0;
    CHECK(call(SYS_rt_sigpending, (long)&set, 8, 0, 0, 0) == 0);
    return set;
}

/* What handlers saw, in order. */
static volatile int count;
static char seen[1 << 15];
static int length;
static void note(int signo, siginfo_t *info, void *context) {
    uint64_t inside, frame = *(uint64_t *)&((ucontext_t *)context)->uc_sigmask;
    call(SYS_rt_sigprocmask, 0, 0, (long)&inside, 8, 0);
    count++;
    if (length < (int)sizeof seen - 200)
        length += sprintf(seen + length, " %d(code %d value %d pid %d mask %lx inside %lx)", signo, info->si_code, info->si_value.sival_int,
                          info->si_pid == self, frame, inside);
}
static void handle(int signo, unsigned long flags, uint64_t blocked) {
    struct kernel_action new = {note, flags | SA_SIGINFO | 0x04000000, restorer, blocked};
    CHECK(action(signo, &new, NULL) == 0);
}
static void reset(int signo, void *handler) {
    struct kernel_action new = {handler, 0, 0, 0};
    CHECK(action(signo, &new, NULL) == 0);
}
static void show(const char *what) {
    printf("%s: %d%s\n", what, count, seen);
    count = length = 0;
    seen[0] = 0;
}
static void queue(int signo, int value) {
    union sigval v = {.sival_int = value};
    CHECK(sigqueue(self, signo, v) == 0);
}

static void actions(void) {
    struct kernel_action new = {note, ~0UL, restorer, ~0UL}, old = {0};
    CHECK(action(SIGUSR1, &new, NULL) == 0 && action(SIGUSR1, NULL, &old) == 0);
    printf("kept flags %lx mask %lx handler %d restorer %d\n", old.flags, old.mask, old.handler == note, old.restorer == restorer);
    printf("errors");
    int bad[] = {0, -1, 65, 64, SIGKILL, SIGSTOP, 32, 33};
    for (int i = 0; i < 8; i++) printf(" %ld/%ld", action(bad[i], NULL, &old), i < 3 || (i > 3 && i < 6) ? action(bad[i], &new, NULL) : 0);
    printf(" %ld", call(SYS_rt_sigaction, SIGUSR1, (long)&new, 0, 16, 0));
    printf(" %ld %ld\n", action(SIGUSR1, (void *)8, NULL), action(SIGUSR1, NULL, (void *)8));
    /* If the old action cannot be written out, the new one is installed nevertheless. */
    struct kernel_action ignore = {SIG_IGN, 0, 0, 0};
    long result = action(SIGUSR1, &ignore, (void *)8);
    action(SIGUSR1, NULL, &old);
    printf("half done %ld %d\n", result, old.handler == SIG_IGN);
    /* Ignoring discards what is pending; so does the default of what is ignored by default. */
    mask(SIG_SETMASK, BIT(SIGUSR1) | BIT(SIGCHLD) | BIT(40) | BIT(SIGSEGV) | BIT(SIGTERM));
    handle(SIGUSR1, 0, 0), handle(SIGCHLD, 0, 0), handle(40, 0, 0), handle(SIGSEGV, 0, 0), handle(SIGTERM, 0, 0);
    int sent[] = {SIGUSR1, SIGCHLD, 40, SIGSEGV, SIGTERM};
    for (int i = 0; i < 5; i++) kill(self, sent[i]);
    queue(40, 1), queue(40, 2);
    printf("pending %lx", pending());
    reset(SIGUSR1, SIG_IGN), reset(SIGCHLD, SIG_DFL), reset(40, SIG_IGN), reset(SIGSEGV, SIG_IGN);
    printf(" then %lx\n", pending());
    handle(SIGUSR1, 0, 0), handle(SIGCHLD, 0, 0), handle(40, 0, 0), handle(SIGSEGV, 0, 0);
    mask(SIG_SETMASK, 0);
    show("after discarding");
    /* A signal that is ignored while blocked stays discarded. */
    reset(SIGUSR1, SIG_IGN), reset(SIGBUS, SIG_IGN);
    mask(SIG_BLOCK, BIT(SIGUSR1) | BIT(SIGBUS));
    kill(self, SIGUSR1), kill(self, SIGBUS);
    printf("ignored and blocked %lx\n", pending());
    handle(SIGUSR1, 0, 0), handle(SIGBUS, 0, 0);
    mask(SIG_SETMASK, 0);
    show("none of them");
}

static void flags(void) {
    handle(SIGUSR1, SA_RESETHAND, 0);
    kill(self, SIGUSR1);
    struct kernel_action old;
    action(SIGUSR1, NULL, &old);
    printf("reset: handler %d flags %lx mask %lx\n", old.handler == SIG_DFL, old.flags, old.mask);
    handle(SIGUSR1, SA_NODEFER, 0), handle(SIGUSR2, SA_NODEFER, BIT(SIGUSR2) | BIT(SIGKILL) | BIT(SIGHUP));
    handle(SIGHUP, 0, ~0UL), handle(SIGSEGV, SA_NODEFER | SA_RESETHAND, BIT(SIGTRAP)), handle(SIGTRAP, 0, 0);
    kill(self, SIGUSR1), kill(self, SIGUSR2), kill(self, SIGHUP), kill(self, SIGSEGV), kill(self, SIGTRAP);
    action(SIGSEGV, NULL, &old);
    printf("segv handler %d flags %lx\n", old.handler == SIG_DFL, old.flags);
    show("masks");
    /* SA_SIGINFO or not: the registers are the same. */
    struct kernel_action plain = {note, 0x04000000, restorer, 0};
    CHECK(action(SIGUSR1, &plain, NULL) == 0);
}

static void masks(void) {
    uint64_t set = ~0UL, old = 0;
    printf("errors %ld %ld %ld %ld", call(SYS_rt_sigprocmask, 3, (long)&set, 0, 8, 0), call(SYS_rt_sigprocmask, 3, 0, (long)&old, 8, 0),
           call(SYS_rt_sigprocmask, 0, (long)&set, 0, 4, 0), call(SYS_rt_sigprocmask, 0, 8, 0, 8, 0));
    printf(" %ld", call(SYS_rt_sigprocmask, SIG_BLOCK, (long)&set, 8, 8, 0));
    printf(" mask %lx\n", current());
    mask(SIG_UNBLOCK, ~(BIT(SIGSEGV) | BIT(SIGUSR1) | BIT(33)));
    printf("left %lx\n", current());
    mask(SIG_SETMASK, 0);
    unsigned char bytes[8] = {7, 7, 7, 7, 7, 7, 7, 7};
    printf("pending sizes %ld %ld %ld %ld", call(SYS_rt_sigpending, (long)bytes, 9, 0, 0, 0), call(SYS_rt_sigpending, (long)bytes, 3, 0, 0, 0),
           call(SYS_rt_sigpending, 8, 8, 0, 0, 0), call(SYS_rt_sigpending, 8, 0, 0, 0, 0));
    printf(" %d %d\n", bytes[2], bytes[3]);
    printf("suspend %ld %ld %ld\n", call(SYS_rt_sigsuspend, (long)&set, 4, 0, 0, 0), call(SYS_rt_sigsuspend, 8, 8, 0, 0, 0), call(SYS_rt_sigsuspend, 0, 8, 0, 0, 0));
    struct timespec zero = {0, 0}, bad = {0, 2000000000};
    printf("ppoll %ld %ld %ld", call(SYS_ppoll, 0, 0, (long)&zero, (long)&set, 4), call(SYS_ppoll, 0, 0, (long)&zero, 8, 8), call(SYS_ppoll, 0, 0, (long)&bad, (long)&set, 8));
    printf(" %ld %ld\n", call(SYS_ppoll, 0, 0, (long)&zero, (long)&set, 8), call(SYS_ppoll, 8, 1, (long)&zero, (long)&set, 8));
    printf("waits %ld %ld %ld %ld %ld\n", call(SYS_rt_sigtimedwait, (long)&set, 0, (long)&zero, 8, 0), call(SYS_rt_sigtimedwait, (long)&set, 0, (long)&bad, 8, 0),
           call(SYS_rt_sigtimedwait, 8, 0, (long)&zero, 8, 0), call(SYS_rt_sigtimedwait, (long)&set, 0, (long)&zero, 7, 0),
           call(SYS_rt_sigtimedwait, (long)&set, 0, 8, 8, 0));
}

/* Several pending at once: the lowest number first, instances of one real-time signal in their
 * order, frames nested. */
static void order(void) {
    int signals[] = {64, 35, SIGTERM, 36, SIGHUP, 35, SIGUSR1, 34, 35, SIGHUP, SIGTRAP, SIGCHLD, 64};
    for (int i = 0; i < 13; i++) handle(signals[i], 0, 0);
    mask(SIG_SETMASK, ~0UL);
    for (int i = 0; i < 13; i++) queue(signals[i], 100 + i);
    printf("queued %lx\n", pending());
    mask(SIG_SETMASK, 0);
    show("nested");
    for (int i = 0; i < 13; i++) handle(signals[i], 0, ~0UL);
    mask(SIG_SETMASK, ~0UL);
    for (int i = 0; i < 13; i++) queue(signals[i], 200 + i);
    mask(SIG_SETMASK, 0);
    show("one after the other");
    /* Of standard signals the first counts, also if it was sent to the thread or the process. */
    mask(SIG_SETMASK, ~0UL);
    call(SYS_tgkill, self, self, SIGUSR1, 0, 0);
    queue(SIGUSR1, 1), queue(SIGUSR1, 2);
    kill(self, SIGTERM);
    call(SYS_tkill, self, SIGTERM, 0, 0, 0);
    mask(SIG_SETMASK, 0);
    show("thread and process");
    /* Signals sent while handlers run. */
    for (int i = 0; i < 3; i++) queue(35, i);
    show("at once");
}

static void information(void) {
    siginfo_t info = {0};
    info.si_code = -7;
    info.si_value.sival_int = 77;
    info.si_pid = self + 1;
    info.si_uid = 5678;
    handle(SIGUSR1, 0, 0), handle(50, 0, 0);
    long a = call(SYS_rt_sigqueueinfo, self, SIGUSR1, (long)&info, 0, 0), b = call(SYS_rt_tgsigqueueinfo, self, self, 50, (long)&info, 0);
    info.si_code = SI_USER;
    long c = call(SYS_rt_sigqueueinfo, self, 50, (long)&info, 0, 0), d = call(SYS_rt_sigqueueinfo, getppid(), 0, (long)&info, 0, 0);
    info.si_code = SI_TKILL;
    long e = call(SYS_rt_tgsigqueueinfo, self, self, 50, (long)&info, 0), f = call(SYS_rt_sigqueueinfo, self, 65, (long)&info, 0, 0);
    printf("queueinfo %ld %ld %ld %ld %ld %ld %ld %ld\n", a, b, c, d, e, f, call(SYS_rt_sigqueueinfo, self, 50, 8, 0, 0), call(SYS_rt_tgsigqueueinfo, 0, self, 50, (long)&info, 0));
    show("information");
    /* Signals that are sent with the codes of faults. */
    int five[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
    for (int i = 0; i < 5; i++) {
        handle(five[i], 0, 0);
        kill(self, five[i]);
        queue(five[i], i);
        info.si_code = 1;
        CHECK(call(SYS_rt_sigqueueinfo, self, five[i], (long)&info, 0, 0) == 0);
        call(SYS_tgkill, self, self, five[i], 0, 0);
    }
    show("sent faults");
    uint64_t all = 0;
    for (int i = 0; i < 5; i++) all |= BIT(five[i]);
    mask(SIG_BLOCK, all);
    for (int i = 4; i >= 0; i--) queue(five[i], i), kill(self, five[i]);
    printf("blocked faults %lx\n", pending());
    mask(SIG_UNBLOCK, all);
    show("let in");
}

static void waits(void) {
    struct timespec zero = {0, 0}, soon = {0, 5000000};
    uint64_t some = BIT(SIGUSR1) | BIT(41) | BIT(SIGSEGV) | BIT(SIGBUS) | BIT(SIGTERM);
    int signals[] = {SIGTERM, 41, SIGSEGV, 41, SIGUSR1, SIGBUS};
    for (int i = 0; i < 6; i++) handle(signals[i], 0, 0);
    mask(SIG_SETMASK, some);
    printf("nothing %ld %ld\n", call(SYS_rt_sigtimedwait, (long)&some, 0, (long)&zero, 8, 0), call(SYS_rt_sigtimedwait, (long)&some, 0, (long)&soon, 8, 0));
    for (int i = 0; i < 6; i++) queue(signals[i], i);
    printf("taken");
    for (int i = 0; i < 7; i++) {
        siginfo_t info;
        memset(&info, 0xee, sizeof info);
        long got = call(SYS_rt_sigtimedwait, (long)&some, (long)&info, (long)&zero, 8, 0);
        printf(" %ld", got);
        if (got > 0) {
            int rest = 0;
            for (unsigned at = 32; at < sizeof info; at++) rest |= ((char *)&info)[at];
            printf("/%d/%d/%d/%d/%d", info.si_signo, info.si_code, info.si_value.sival_int, info.si_pid == self, rest);
        }
    }
    printf("\n");
    /* The set may hold what is not blocked, and what is pending elsewhere stays. */
    queue(SIGUSR1, 3), queue(SIGTERM, 4);
    uint64_t one = BIT(SIGTERM);
    printf("only %ld", call(SYS_rt_sigtimedwait, (long)&one, 0, (long)&zero, 8, 0));
    printf(" left %lx\n", pending());
    uint64_t usr1 = BIT(SIGUSR1);
    printf("bad place %ld", call(SYS_rt_sigtimedwait, (long)&usr1, 8, (long)&zero, 8, 0));
    printf(" left %lx\n", pending());
    /* From another process, at any time: before, during, after the call; faults' signals too. */
    int bad = 0;
    for (int round = 0; round < 24; round++) {
        int signo = round % 3 == 0 ? SIGSEGV : round % 3 == 1 ? SIGUSR1 : 41;
        pid_t child = fork();
        if (child == 0) {
            for (volatile int i = 0; i < round * 60; i++) {}
            kill(getppid(), signo);
            _exit(0);
        }
        siginfo_t info;
        struct timespec long_time = {20, 0};
        long got = call(SYS_rt_sigtimedwait, (long)&some, (long)&info, (long)&long_time, 8, 0);
        bad += got != signo || info.si_pid != child || info.si_code != SI_USER;
        CHECK(waitpid(child, NULL, 0) == child);
    }
    printf("from children: %d bad\n", bad);
    /* A handler for another signal ends it. */
    bad = 0;
    handle(SIGUSR2, SA_RESTART, 0), handle(SIGFPE, 0, 0);
    for (int round = 0; round < 8; round++) {
        int before = count;
        pid_t child = fork();
        if (child == 0) {
            struct timespec pause = {0, 1000000};
            if (round & 1) nanosleep(&pause, NULL);
            kill(getppid(), round & 2 ? SIGFPE : SIGUSR2);
            _exit(0);
        }
        /* A signal that comes before the call does not end it. */
        struct timespec short_time = {0, 20000000};
        while (count == before) {
            long got = call(SYS_rt_sigtimedwait, (long)&some, 0, (long)&short_time, 8, 0);
            bad += got != -EINTR && got != -EAGAIN;
        }
        CHECK(waitpid(child, NULL, 0) == child);
    }
    printf("ended by others: %d bad\n", bad);
    count = length = 0;
    mask(SIG_SETMASK, 0);
}

static void descriptors(void) {
    uint64_t some = BIT(SIGUSR1) | BIT(42) | BIT(SIGTERM);
    mask(SIG_SETMASK, some);
    long fd = call(SYS_signalfd4, -1, (long)&some, 8, SFD_NONBLOCK | SFD_CLOEXEC, 0);
    CHECK(fd >= 0);
    struct signalfd_siginfo out[8];
    printf("empty %ld", (long)read(fd, out, sizeof out));
    queue(42, 1), queue(SIGUSR1, 2), queue(42, 3), queue(SIGUSR1, 4);
    ssize_t got = read(fd, out, sizeof out);
    printf(" read %ld:", (long)(got / (ssize_t)sizeof *out));
    for (int i = 0; i < got / (ssize_t)sizeof *out; i++) printf(" %d/%d/%d", out[i].ssi_signo, out[i].ssi_int, out[i].ssi_code);
    printf(" pending %lx\n", pending());
    close(fd);
    mask(SIG_SETMASK, 0);
    /* The signal that a descriptor sends: F_SETSIG. */
    int ends[2];
    CHECK(pipe(ends) == 0);
    handle(43, 0, 0);
    CHECK(fcntl(ends[0], F_SETOWN, self) == 0 && fcntl(ends[0], F_SETSIG, 43) == 0);
    CHECK(fcntl(ends[0], F_SETFL, O_ASYNC | O_NONBLOCK) == 0);
    CHECK(write(ends[1], "x", 1) == 1);
    printf("descriptor's signals %d, code %d\n", count, strstr(seen, "code 1 ") != NULL);
    count = length = 0;
}

int main(void) {
    self = getpid();
    setvbuf(stdout, NULL, _IOFBF, 1 << 16);
    mask(SIG_SETMASK, 0);
    for (int round = 0; round < 2; round++) {
        printf("round %d\n", round);
        actions();
        flags();
        masks();
        order();
        information();
        waits();
        descriptors();
        fflush(stdout);
    }
    return 0;
}
