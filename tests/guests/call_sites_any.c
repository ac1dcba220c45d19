/* One hot `syscall` instruction through which all calls go, as in libc's `syscall` and in the runtime of
 * Go: first calls that change the translator's own state (signal masks, mappings), then such that only
 * the kernel sees, then both by turns, with signals, threads, forked children and returns from handlers.
 *
 * Hard for a translator: whatever it has made of the instruction for the first numbers must do for the
 * others, too. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

/* long any(nr, a, b, c, d, e, f): all registers that the call must keep are compared. */
__asm__(".text\n.globl any\n.type any,@function\nany:\n"
        "mov %rdi, %rax\nmov %rsi, %rdi\nmov %rdx, %rsi\nmov %rcx, %rdx\nmov %r8, %r10\n"
        "mov %r9, %r8\nmov 8(%rsp), %r9\n"
        "syscall\n.globl any_behind\nany_behind:\ncmp $-4095, %rax\njae 1f\n"
        "lea any_behind(%rip), %rdx\ncmp %rdx, %rcx\njne 2f\nret\n"
        "1: neg %rax\nneg %rax\nret\n2: ud2\n");
extern long any(long nr, ...);

static volatile int handled;
static void on_signal(int signal) {
    handled += signal == SIGUSR1;
}

static uint64_t mask_now(void) {
    uint64_t mask = 0;
    CHECK(any(SYS_rt_sigprocmask, SIG_BLOCK, NULL, &mask, 8L) == 0);
    return mask;
}

/* Calls that a translator cannot leave to the kernel. */
static void emulated(int i) {
    uint64_t usr2 = 1ull << (SIGUSR2 - 1), before = ~0ull;
    int how = i % 2 ? SIG_UNBLOCK : SIG_BLOCK;
    CHECK(any(SYS_rt_sigprocmask, how, &usr2, &before, 8L) == 0 && (before == (i % 2 ? usr2 : 0)));
    char *page = (char *)any(SYS_mmap, NULL, 4096L, (long)(PROT_READ | PROT_WRITE),
                             (long)(MAP_PRIVATE | MAP_ANONYMOUS), -1L, 0L);
    CHECK((unsigned long)page < -4095ul && page[i % 4096] == 0);
    page[i % 4096] = 1;
    CHECK(any(SYS_munmap, page, 4096L) == 0);
}

static void passed(int i, int null) {
    char byte = 7;
    CHECK(any(SYS_getppid) == getppid());
    CHECK(any(SYS_write, (long)null, &byte, 1L) == 1);
    CHECK(any(SYS_write, -1L, &byte, 1L) == -9);
    CHECK(any(i % 3 ? SYS_getuid : SYS_getpgrp) == (i % 3 ? (long)getuid() : (long)getpgrp()));
}

static void *by_thread(void *start) {
    int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    for (int i = 0; i < 600; i++) {
        passed(i + *(int *)start, null);
        if (i % 4 == 0) emulated((i / 4) % 2);
    }
    CHECK(mask_now() == 0);
    close(null);
    return NULL;
}

int main(void) {
    int null = open("/dev/null", O_WRONLY);
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGUSR1, &action, NULL);
    for (int i = 0; i < 400; i++) emulated(i);
    for (int i = 0; i < 400; i++) passed(i, null);
    for (int i = 0; i < 400; i++) {
        passed(i, null);
        emulated(i);
        if (i % 8 == 0) CHECK(any(SYS_kill, (long)getpid(), (long)SIGUSR1) == 0 && handled == i / 8 + 1);
    }
    printf("%d signals, mask %llx\n", handled, (unsigned long long)mask_now());

    pthread_t threads[2];
    int starts[2] = {0, 1};
    for (int t = 0; t < 2; t++) CHECK(pthread_create(&threads[t], NULL, by_thread, &starts[t]) == 0);
    for (int t = 0; t < 2; t++) CHECK(pthread_join(threads[t], NULL) == 0);

    int sum = 0;
    for (int i = 0; i < 20; i++) {
        pid_t child = (pid_t)any(SYS_clone, (long)SIGCHLD, NULL, NULL, NULL, 0L);
        if (child == 0) {
            for (int k = 0; k < 40; k++) emulated(k), passed(k, null);
            any(SYS_exit_group, (long)i);
        }
        int status;
        CHECK(child > 0 && any(SYS_wait4, (long)child, &status, 0L, NULL) == child && WIFEXITED(status));
        sum += WEXITSTATUS(status);
    }
    printf("children: %d\n", sum);
    return 0;
}
