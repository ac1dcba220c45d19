/* Hot system calls behind short instructions, before short and longer ones, and behind instructions
 * that do not set the number: with several numbers, alone, under signals, in threads and children, entered in the middle, with
 * a fault in the instruction behind, and while their page changes. Registers, flags, results and
 * the states that handlers see must be those of the processor. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#define CHECK(c) \
    do { \
        if (!(c)) { \
            printf("line %d: %s\n", __LINE__, #c); \
            exit(1); \
        } \
    } while (0)

/* rcx, r11, flags, r9 and rdi behind the call. */
struct state {
    uint64_t rcx, r11, flags, r9, rdi;
};

/* long name(a, b, c, nr, state): `before; syscall; after`, with 0x77 in rcx before. */
#define SITE(name, before, after) \
    __asm__(".text\n.globl " #name "\n.type " #name ",@function\n" #name ":\n" \
            "push %rbx\nmov %r8, %rbx\nmov %rcx, %rax\nmov $0x77, %ecx\nxor %r10d, %r10d\n" \
            "xor %r9d, %r9d\nstc\n.globl " #name "_at\n" #name "_at:\n" before \
            "\n.globl " #name "_call\n" #name "_call:\nsyscall\n.globl " #name "_end\n" #name \
            "_end:\n" after "\n.globl " #name "_next\n" #name "_next:\n" \
            "mov %rcx, (%rbx)\nmov %r11, 8(%rbx)\npushfq\npopq 16(%rbx)\nmov %r9, 24(%rbx)\n" \
            "mov %rdi, 32(%rbx)\npop %rbx\nret\n.globl " #name "_over\n" #name "_over:\n" \
            /* The same, entered at the call and behind it. */ \
            #name "_at_call:\npush %rbx\nmov %r8, %rbx\nmov %rcx, %rax\nmov $0x77, %ecx\n" \
            "xor %r9d, %r9d\n" \
            "jmp " #name "_call\n" \
            #name "_at_end:\npush %rbx\nmov %r8, %rbx\nmov $-5, %rax\nlea " #name \
            "_end(%rip), %rcx\nxor %r11d, %r11d\nxor %r9d, %r9d\njmp " #name "_end\n"); \
    extern function name, name##_at_call, name##_at_end; \
    extern char name##_at[], name##_call[], name##_end[], name##_next[], name##_over[];

typedef long function(long, long, long, long, struct state *);

SITE(zero, "xor %eax, %eax", "cmp $-4096, %rax")
SITE(zero_other_way, ".byte 0x33, 0xc0", "mov %rcx, (%rbx)")
SITE(zero_short, "xor %eax, %eax", "nop")
SITE(two, "mov %edi, %edi", "mov %rcx, (%rbx)")
SITE(three, "mov %rdx, %r9", "cmp $-4096, %rax")
SITE(four, "lea 8(%rdx), %r9", "cmp $-4096, %rax")
SITE(five, "mov 8(%rsp), %r9", "cmp $-4096, %rax")
SITE(two_short, "mov %edi, %edi", "nop")
SITE(three_short, "mov %rdx, %r9", "nop")
SITE(four_short, "lea 8(%rdx), %r9", "nop")
SITE(five_short, "mov 8(%rsp), %r9", "nop")
SITE(seven, "cmpq $0x1234, 8(%rsp)", "setc %r9b")

struct site {
    const char *name;
    function *call, *at_call, *at_end;
    char *at, *syscall, *end, *next;
};
#define ROW(n) {#n, n, n##_at_call, n##_at_end, n##_at, n##_call, n##_end, n##_next}
static const struct site sites[] = {
    ROW(zero), ROW(zero_other_way), ROW(zero_short), ROW(two), ROW(three), ROW(four), ROW(five),
    ROW(two_short), ROW(three_short), ROW(four_short), ROW(five_short), ROW(seven),
};
#define SITES ((int)(sizeof sites / sizeof *sites))
#define IS_ZERO(s) ((s) < 3)

static const long numbers[] = {SYS_getppid, SYS_gettid,  SYS_getuid,
                               SYS_geteuid, SYS_getpgrp, SYS_getegid};
#define NUMBERS ((int)(sizeof numbers / sizeof *numbers))

static volatile int seen, wrong, faults;
static int pipe_ends[2], zeros;
static int handler_writes;
static struct state elsewhere;

static void handler(int signo, siginfo_t *info, void *context) {
    (void)signo, (void)info;
    ucontext_t *c = context;
    char *rip = (char *)c->uc_mcontext.gregs[REG_RIP];
    char *rcx = (char *)c->uc_mcontext.gregs[REG_RCX];
    for (int s = 0; s < SITES; s++) {
        if (rip < sites[s].at || rip > sites[s].next) continue;
        if (rip != sites[s].at && rip != sites[s].syscall && rip != sites[s].end &&
            rip != sites[s].next)
            wrong = 1;
        if (rip == sites[s].at && rcx != (char *)0x77) wrong = 2;
        if (rip == sites[s].syscall && rcx != (char *)0x77 && rcx != sites[s].end) wrong = 3;
        if (rip == sites[s].syscall && IS_ZERO(s) && c->uc_mcontext.gregs[REG_RAX] != 0) wrong = 4;
        if ((rip == sites[s].end || rip == sites[s].next) && rcx != sites[s].end) wrong = 5;
    }
    seen++;
    if (handler_writes && seen % 3 == 0 && write(pipe_ends[1], "x", 1) != 1) wrong = 6;
}

/* The instruction behind the call stores through rbx. */
static void fault(int signo, siginfo_t *info, void *context) {
    (void)signo;
    ucontext_t *c = context;
    greg_t *regs = c->uc_mcontext.gregs;
    faults++;
    CHECK(info->si_addr == (void *)16);
    CHECK(regs[REG_RIP] == (greg_t)two_end || regs[REG_RIP] == (greg_t)zero_other_way_end);
    CHECK(regs[REG_RCX] == regs[REG_RIP]);
    regs[REG_RBX] = (greg_t)&elsewhere;
}

static void timer(int microseconds) {
    struct itimerval value = {{0, microseconds}, {0, microseconds}};
    setitimer(ITIMER_REAL, &value, NULL);
}

static void handle(int flags) {
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | flags};
    sigaction(SIGALRM, &action, NULL);
}

/* Calls the site: by entry 0, 1 (the call) or 2 (behind it). Everything must be as expected. */
static void call(int s, long nr, int entry, int prints) {
    struct state state = {0};
    char byte = 1;
    long expected = nr, result;
    if (IS_ZERO(s)) {
        expected = 1;
        if (entry == 1) nr = SYS_read;
    } else {
        expected = syscall(nr);
    }
    function *f = entry == 0 ? sites[s].call : entry == 1 ? sites[s].at_call : sites[s].at_end;
    result = f(zeros, (long)&byte, 1, nr, &state);
    if (entry == 2) expected = -5;
    CHECK(result == expected);
    CHECK(!IS_ZERO(s) || entry == 2 || byte == 0);
    CHECK(state.rcx == (uint64_t)sites[s].end);
    if ((sites[s].call == five || sites[s].call == five_short) && entry == 0) {
        CHECK(state.r9 != 0);
        state.r9 = 0;
    }
    if (prints)
        printf("%s, entry %d: r11 %lx, flags %lx, r9 %lx, rdi %d\n", sites[s].name, entry,
               (long)state.r11 & 0xcd5, (long)state.flags & 0xcd5, (long)state.r9,
               state.rdi == (uint64_t)zeros);
}

static void call_often(int times) {
    for (int i = 0; i < times; i++)
        for (int s = 0; s < SITES; s++)
            call(s, numbers[i / 40 % NUMBERS], i % 16 == 3 ? 1 : i % 16 == 7 ? 2 : 0, 0);
}

static void *caller(void *argument) {
    call_often((int)(long)argument);
    return NULL;
}

static function *moved;
static long moved_end;
static int moved_is_zero;
static volatile int stop;

static void *calls_moved(void *argument) {
    struct state state;
    long parent = getppid(), n = 0;
    (void)argument;
    while (!stop || n < 2000) {
        char byte = 1;
        long result = moved(zeros, (long)&byte, 1, SYS_getppid, &state);
        CHECK(result == (moved_is_zero ? 1 : parent));
        CHECK(state.rcx == (uint64_t)moved + moved_end);
        n++;
    }
    return NULL;
}

/* Copies of functions, made before they are hot, at the beginning of a page and over its end. */
static const struct site copied[] = {ROW(zero), ROW(five), ROW(zero_short), ROW(five_short)};
#define COPIED ((int)(sizeof copied / sizeof *copied))
static char copies[COPIED][128];

static void changing_page(int which, int offset) {
    const struct site *site = &copied[which];
    char *pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED);
    memcpy(pages + offset, copies[which], sizeof copies[which]);
    CHECK(mprotect(pages, 8192, PROT_READ | PROT_EXEC) == 0);
    moved = (function *)(pages + offset);
    moved_end = site->end - (char *)site->call;
    moved_is_zero = which % 2 == 0;
    stop = 0;
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, calls_moved, NULL);
    for (int i = 0; i < 12; i++) {
        char *page = pages + (offset && i % 2 ? 4096 : 0);
        usleep(500);
        CHECK(mprotect(page, 4096, PROT_READ | PROT_WRITE | PROT_EXEC) == 0);
        CHECK(memcmp(pages + offset, copies[which], sizeof copies[which]) == 0 || offset);
        CHECK(mprotect(page, 4096, PROT_READ | PROT_EXEC) == 0);
    }
    stop = 1;
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    munmap(pages, 8192);
}

int main(void) {
    zeros = open("/dev/zero", O_RDONLY);
    CHECK(zeros >= 0 && pipe(pipe_ends) == 0);
    CHECK(zero_over - (char *)zero <= 128 && five_over - (char *)five <= 128);
    for (int which = 0; which < COPIED; which++)
        memcpy(copies[which], (char *)copied[which].call, sizeof copies[which]);
    for (int entry = 0; entry < 3; entry++)
        for (int s = 0; s < SITES; s++) call(s, SYS_getuid, entry, 1);
    for (int s = 0; s < SITES; s++)
        for (int n = 0; n < NUMBERS; n++)
            for (int i = 0; i < 300; i++) call(s, numbers[n], 0, 0);
    for (int entry = 0; entry < 3; entry++)
        for (int s = 0; s < SITES; s++) call(s, SYS_getuid, entry, 1);
    puts("alone: ok");

    struct state state;
    for (int i = 0; i < 40; i++) {
        char byte;
        CHECK(zero(zeros, 8, 1, 0, &state) == -EFAULT && state.rcx == (uint64_t)zero_end);
        CHECK(zero(-1, (long)&byte, 1, 0, &state) == -EBADF);
        CHECK(five(-1, 0, SEEK_SET, SYS_lseek, &state) == -EBADF);
        CHECK(five(SIG_SETMASK, 0, 0, SYS_rt_sigprocmask, &state) == -EINVAL ||
              five(SIG_SETMASK, 0, 0, SYS_rt_sigprocmask, &state) == 0);
        CHECK(five(0, 0, 0, 9999, &state) == -ENOSYS && state.rcx == (uint64_t)five_end);
    }
    puts("results: ok");

    struct sigaction action = {.sa_sigaction = fault, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
    for (int i = 0; i < 20; i++) {
        char byte = 1;
        elsewhere.rcx = 0;
        CHECK(zero_other_way(zeros, (long)&byte, 1, 0, (struct state *)16) == 1 && byte == 0);
        CHECK(elsewhere.rcx == (uint64_t)zero_other_way_end);
        CHECK(two(0, 0, 0, SYS_getppid, (struct state *)16) == getppid());
        CHECK(elsewhere.rcx == (uint64_t)two_end);
    }
    CHECK(faults == 40);
    puts("faults behind: ok");

    handle(SA_RESTART);
    timer(700);
    for (int i = 0; i < 20 || seen < 100; i++) call_often(40);
    timer(0);
    if (wrong) printf("wrong %d\n", wrong);
    CHECK(wrong == 0);
    puts("under signals: ok");

    handle(0);
    timer(1500);
    struct timespec second = {1, 0};
    for (int i = 0; i < 30; i++) {
        char byte;
        struct timespec left = {0, 0};
        CHECK(zero(pipe_ends[0], (long)&byte, 1, 0, &state) == -EINTR);
        CHECK(state.rcx == (uint64_t)zero_end);
        CHECK(three((long)&second, (long)&left, 0, SYS_nanosleep, &state) == -EINTR);
        CHECK(state.rcx == (uint64_t)three_end && left.tv_nsec > 0);
    }
    timer(0);
    puts("interrupted calls: ok");

    handle(SA_RESTART);
    handler_writes = 1;
    timer(1500);
    for (int i = 0; i < 30; i++) {
        char byte = 0;
        CHECK(zero(pipe_ends[0], (long)&byte, 1, 0, &state) == 1 && byte == 'x');
        CHECK(four(pipe_ends[0], (long)&byte, 1, SYS_read, &state) == 1 && byte == 'x');
    }
    timer(0);
    handler_writes = 0;
    CHECK(wrong == 0);
    puts("restarted calls: ok");

    pthread_t threads[4];
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, caller, (void *)300);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    puts("threads: ok");

    for (int i = 0; i < 5; i++) {
        /* The child is made by the site itself. */
        pid_t child = (pid_t)five(SIGCHLD, 0, 0, SYS_clone, &state);
        CHECK(child >= 0 && state.rcx == (uint64_t)five_end);
        if (child == 0) {
            call_often(60);
            _exit(7);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 7);
    }
    puts("children: ok");

    for (int which = 0; which < COPIED; which++) {
        const struct site *site = &copied[which];
        changing_page(which, 0);
        /* The page ends before the call, and behind it. */
        changing_page(which, (int)(4096 - (site->syscall - (char *)site->call)));
        changing_page(which, (int)(4095 - (site->end - (char *)site->call)));
    }
    puts("changing pages: ok");
    return 0;
}
