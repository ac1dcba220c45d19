// Processes made by threads while others allocate and spin: fork, fork in a child that makes
// threads again, vfork and exec, posix_spawn, and at the end execve from a thread that is not the
// first.
//
// Hard for a translator: another thread may hold one of its locks at the fork.
#define _GNU_SOURCE
#include <pthread.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
static volatile int stop;
static const char *self;

static void *busy(void *argument) {
    unsigned seed = (unsigned)(long)argument;
    void *kept[16] = {0};
    while (!stop) {
        int i = rand_r(&seed) % 16;
        free(kept[i]);
        kept[i] = malloc(rand_r(&seed) % 5000);
        memset(kept[i], i, 1);
        if (i == 3) getppid();
    }
    for (int i = 0; i < 16; i++) free(kept[i]);
    return NULL;
}

static void *add(void *argument) { return (void *)((long)argument + 1); }

static int child_of_thread(int depth) {
    // The child has one thread, and everything works in it.
    char *text = malloc(100);
    snprintf(text, 100, "%d", depth);
    pthread_t threads[2];
    long sum = atoi(text);
    for (long i = 0; i < 2; i++)
        if (pthread_create(&threads[i], NULL, add, (void *)i) != 0) return 100;
    for (int i = 0; i < 2; i++) {
        void *result;
        pthread_join(threads[i], &result);
        sum += (long)result;
    }
    if (depth > 0) {
        pid_t child = fork();
        if (child == 0) _exit(child_of_thread(depth - 1));
        int status;
        if (waitpid(child, &status, 0) != child || !WIFEXITED(status)) return 101;
        sum += WEXITSTATUS(status);
    }
    free(text);
    return (int)sum;
}

static long finish(pid_t child) {
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child) abort();
    if (WIFSIGNALED(status)) return 1000 + WTERMSIG(status);
    return WEXITSTATUS(status);
}

static void *maker(void *argument) {
    volatile long sum = 0;
    for (volatile int i = 0; i < 2; i++) {
        pid_t child = fork();
        if (child == 0) _exit(child_of_thread(i % 2));
        sum += finish(child);
        char *arguments[] = {(char *)self, "exit", "7", NULL};
        if (posix_spawn(&child, self, NULL, NULL, arguments, environ) != 0) abort();
        sum += finish(child);
        child = vfork();
        if (child == 0) {
            if (argument == NULL) _exit(3);
            execv(self, arguments);
            _exit(99);
        }
        sum += finish(child);
    }
    return (void *)sum;
}

static void *replace(void *unused) {
    (void)unused;
    char *arguments[] = {(char *)self, "last", NULL};
    execv(self, arguments);
    abort();
}

int main(int count, char **arguments) {
    alarm(120);
    self = arguments[0];
    if (count > 2 && strcmp(arguments[1], "exit") == 0) return atoi(arguments[2]);
    if (count > 1 && strcmp(arguments[1], "last") == 0) {
        printf("replaced by a thread, %s\n", getpid() == gettid() ? "alone" : "not alone");
        return 13;
    }
    pthread_t busy_threads[3], makers[2];
    for (long i = 0; i < 3; i++) pthread_create(&busy_threads[i], NULL, busy, (void *)(i + 1));
    for (long i = 0; i < 2; i++) pthread_create(&makers[i], NULL, maker, (void *)i);
    for (int i = 0; i < 2; i++) {
        void *sum;
        pthread_join(makers[i], &sum);
        printf("maker %d: %ld\n", i, (long)sum);
    }
    fflush(stdout);
    // One more thread never ends by itself; execve ends it.
    pthread_t thread;
    pthread_create(&thread, NULL, replace, NULL);
    for (;;) pause();
}
