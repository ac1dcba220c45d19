/* Hot system calls: each site is executed hundreds of times, alone, under a storm of signals, in
 * several threads, in children of fork, and while its page changes. Registers, results, restarts
 * and the states that handlers see must be those of the processor. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define CHECK(c) \
    do { \
        if (!(c)) { \
            printf("line %d: %s\n", __LINE__, #c); \
            exit(1); \
        } \
    } while (0)

/* site(nr): long site_nr(a, b, c, d, state): stores rcx, r11 and the flags behind the call. */
#define SITE(name, nr) \
    __asm__(".text\n.globl " #name "\n.type " #name ",@function\n" #name ":\n" \
            "push %rbx\nmov %r8, %rbx\nmov %rcx, %r10\nxor %r9d, %r9d\nstc\n.globl " #name "_at\n" #name \
            "_at:\nmov $" #nr ", %eax\nsyscall\n.globl " #name "_end\n" #name \
            "_end:\nmov %rcx, (%rbx)\nmov %r11, 8(%rbx)\npushfq\npopq 16(%rbx)\npop %rbx\nret\n" \
            ".globl " #name "_over\n" #name "_over:\n"); \
    extern long name(long, long, long, long, uint64_t *); \
    extern char name##_at[], name##_end[], name##_over[];

SITE(own_parent, 110)   /* getppid */
SITE(sleep_long, 35)    /* nanosleep */
SITE(read_vector, 19)   /* readv */
SITE(read_at, 17)       /* pread64 */
SITE(seek, 8)           /* lseek */
/* Calls that a translator may want to see. */
SITE(mask, 14)          /* rt_sigprocmask */
SITE(read_link, 89)     /* readlink */

static volatile int seen, wrong;
static int pipe_ends[2];
static int handler_writes;

static void handler(int signo, siginfo_t *info, void *context) {
    (void)signo, (void)info;
    ucontext_t *c = context;
    char *rip = (char *)c->uc_mcontext.gregs[REG_RIP];
    struct {
        char *at, *end;
        int nr;
    } sites[] = {{own_parent_at, own_parent_end, 110}, {mask_at, mask_end, 14}};
    for (int i = 0; i < 2; i++) {
        if (rip < sites[i].at || rip > sites[i].end) continue;
        if (rip != sites[i].at && rip != sites[i].at + 5 && rip != sites[i].end) wrong = 1;
        if (rip == sites[i].end && (char *)c->uc_mcontext.gregs[REG_RCX] != sites[i].end) wrong = 2;
        if (rip == sites[i].at + 5 && c->uc_mcontext.gregs[REG_RAX] != sites[i].nr) wrong = 3;
    }
    seen++;
    if (handler_writes && seen % 3 == 0) {
        ssize_t n = write(pipe_ends[1], "x", 1);
        if (n != 1) wrong = 4;
    }
}

static void timer(int microseconds) {
    struct itimerval value = {{0, microseconds}, {0, microseconds}};
    setitimer(ITIMER_REAL, &value, NULL);
}

static void handle(int flags) {
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | flags};
    sigaction(SIGALRM, &action, NULL);
}

static void call_often(int times) {
    uint64_t state[3];
    long parent = getppid();
    for (int i = 0; i < times; i++) {
        CHECK(own_parent(0, 0, 0, 0, state) == parent);
        CHECK(state[0] == (uint64_t)own_parent_end);
        CHECK((state[1] & 1) == 1 && (state[2] & 0xcd5) == (state[1] & 0xcd5));
        uint64_t old = ~0ul;
        CHECK(mask(SIG_BLOCK, 0, (long)&old, 8, state) == 0 && old == 0);
        CHECK(state[0] == (uint64_t)mask_end);
        CHECK((state[1] & 1) == 1 && (state[2] & 0xcd5) == (state[1] & 0xcd5));
    }
}

static void *caller(void *argument) {
    call_often((int)(long)argument);
    return NULL;
}

typedef long function(long, long, long, long, uint64_t *);

static function *moved;
static volatile int stop;

static void *calls_moved(void *argument) {
    uint64_t state[3];
    long parent = getppid(), n = 0;
    (void)argument;
    while (!stop || n < 2000) {
        CHECK(moved(0, 0, 0, 0, state) == parent);
        CHECK(state[0] == (uint64_t)moved + (own_parent_end - (char *)own_parent));
        n++;
    }
    return NULL;
}

/* A copy of own_parent, made before that is hot. */
static char copy[64];

static void changing_page(void) {
    char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    memcpy(page, copy, sizeof copy);
    CHECK(mprotect(page, 4096, PROT_READ | PROT_EXEC) == 0);
    moved = (function *)page;
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, calls_moved, NULL);
    for (int i = 0; i < 60; i++) {
        usleep(500);
        CHECK(mprotect(page, 4096, PROT_READ | PROT_WRITE | PROT_EXEC) == 0);
        CHECK(memcmp(page, copy, sizeof copy) == 0);
        CHECK(mprotect(page, 4096, PROT_READ | PROT_EXEC) == 0);
    }
    stop = 1;
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    munmap(page, 4096);
    puts("a changing page: ok");
}

int main(void) {
    uint64_t state[3];
    CHECK(own_parent_over - (char *)own_parent <= (long)sizeof copy);
    memcpy(copy, (char *)own_parent, sizeof copy);
    call_often(300);
    puts("alone: ok");

    handle(SA_RESTART);
    timer(700);
    for (int i = 0; i < 40 || seen < 100; i++) call_often(200);
    timer(0);
    CHECK(wrong == 0);
    puts("under signals: ok");

    handle(0);
    timer(1500);
    struct timespec second = {1, 0};
    for (int i = 0; i < 60; i++) {
        struct timespec left = {0, 0};
        CHECK(sleep_long((long)&second, (long)&left, 0, 0, state) == -EINTR);
        CHECK(state[0] == (uint64_t)sleep_long_end && left.tv_nsec > 0);
    }
    timer(0);
    puts("interrupted sleeps: ok");

    CHECK(pipe(pipe_ends) == 0);
    handle(SA_RESTART);
    handler_writes = 1;
    timer(1500);
    for (int i = 0; i < 40; i++) {
        char byte = 0;
        struct iovec vector = {&byte, 1};
        CHECK(read_vector(pipe_ends[0], (long)&vector, 1, 0, state) == 1 && byte == 'x');
    }
    timer(0);
    handler_writes = 0;
    CHECK(wrong == 0);
    puts("restarted reads: ok");

    FILE *file = tmpfile();
    fputs("0123456789", file);
    fflush(file);
    int fd = fileno(file);
    for (int i = 0; i < 100; i++) {
        char bytes[4];
        CHECK(read_at(fd, (long)bytes, 4, i % 6, state) == 4 && bytes[0] == '0' + i % 6);
        CHECK(read_at(fd, 8, 4, 0, state) == -EFAULT);
        CHECK(read_at(-1, (long)bytes, 4, 0, state) == -EBADF);
        CHECK(seek(fd, i, SEEK_SET, 0, state) == i);
        CHECK(mask(SIG_BLOCK, 0, 8, 8, state) == -EFAULT);
        CHECK(mask(SIG_BLOCK, 0, 0, 7, state) == -EINVAL);
        CHECK(read_link((long)"/proc/self/nothing", (long)bytes, 4, 0, state) == -ENOENT);
        CHECK(read_link(8, (long)bytes, 4, 0, state) == -EFAULT);
    }
    puts("results: ok");

    pthread_t threads[4];
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, caller, (void *)2000);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    puts("threads: ok");

    for (int i = 0; i < 5; i++) {
        pid_t child = fork();
        if (child == 0) {
            call_often(100);
            _exit(7);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 7);
    }
    puts("children: ok");
    changing_page();
    return 0;
}
