/* LeakSanitizer in a process with threads: one computes, one makes system calls, one allocates, one
 * sleeps in a call. The check stops each of them by ptrace, finds the leak, and ends the process.
 *
 * Hard for a translator: a thread must not be stopped while it holds a lock of the translator's,
 * which the tracing process needs, too. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

const char *__lsan_default_options(void) { return "symbolize=0"; }

static pthread_barrier_t started;
static volatile unsigned long sum;

static void *computes(void *_) {
    pthread_barrier_wait(&started);
    for (unsigned long i = 1;; i++) sum += i % 7 ? i : i * 3;
}

static void *calls(void *_) {
    pthread_barrier_wait(&started);
    for (;;) syscall(SYS_getppid);
}

static void *allocates(void *_) {
    pthread_barrier_wait(&started);
    for (size_t size = 1;; size = size * 5 % 4099) {
        char *volatile memory = malloc(size);
        memset(memory, 1, size);
        free(memory);
    }
}

static void *sleeps(void *_) {
    pthread_barrier_wait(&started);
    for (;;) pause();
}

__attribute__((noinline)) static void leak(size_t size) {
    char *volatile lost = malloc(size);
    memset(lost, 1, size);
    lost = NULL;
}

int main(void) {
    /* The report names addresses. */
    int nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, 2);
    void *(*const bodies[])(void *) = {computes, calls, allocates, sleeps};
    pthread_barrier_init(&started, NULL, 5);
    for (int i = 0; i < 4; i++) {
        pthread_t thread;
        pthread_create(&thread, NULL, bodies[i], NULL);
    }
    pthread_barrier_wait(&started);
    for (int i = 0; i < 100; i++) leak(1000 + i);
    puts("leaked");
    fflush(stdout);
    /* The check runs now and finds the leak: exit status 23. */
    return 0;
}
