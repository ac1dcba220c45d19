// Ends of threads and processes in different orders, chosen by the first argument.
//
// Hard for a translator: the last user of its tables may be any thread, also one that is not the
// first.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static volatile long spinning;
static pthread_t first;

static void *spin(void *unused) {
    (void)unused;
    for (;;) spinning++;
    return NULL;
}

static void *sleeper(void *unused) {
    (void)unused;
    for (;;) pause();
    return NULL;
}

static void *join_first(void *status) {
    void *result;
    pthread_join(first, &result);
    // The first thread has ended; /proc/self describes that thread, so /proc/thread-self is read.
    char link[256];
    ssize_t length = readlink("/proc/thread-self/exe", link, sizeof link);
    printf("joined %ld %s\n", (long)result, length > 0 ? "exe" : "no exe");
    void *page = malloc(1 << 20);
    memset(page, 1, 1 << 20);
    free(page);
    fflush(stdout);
    if (status != NULL) exit((int)(long)status);
    return NULL;
}

static void *exit_process(void *status) {
    usleep(1000);
    exit((int)(long)status);
}

static void *exit_by_call(void *status) {
    usleep(1000);
    syscall(SYS_exit_group, (long)status);
    return NULL;
}

static void *abort_process(void *unused) {
    (void)unused;
    usleep(1000);
    abort();
}

static void *crash(void *unused) {
    (void)unused;
    usleep(1000);
    volatile int *volatile nowhere = (volatile int *)8;
    *nowhere = 1;
    return NULL;
}

static void start(void *(*body)(void *), long argument) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, body, (void *)argument) != 0) abort();
}

int main(int count, char **arguments) {
    alarm(60);
    const char *order = count > 1 ? arguments[1] : "";
    first = pthread_self();
    setvbuf(stdout, NULL, _IOLBF, 0);
    puts(order);
    if (strcmp(order, "main_returns") == 0) {
        start(spin, 0);
        start(sleeper, 0);
        while (spinning < 1000) usleep(100);
        return 21;
    }
    if (strcmp(order, "main_first_then_exit") == 0) {
        start(join_first, 22);
        pthread_exit((void *)5);
    }
    if (strcmp(order, "main_first_then_return") == 0) {
        start(join_first, 0);
        pthread_exit((void *)6);
    }
    if (strcmp(order, "thread_exits") == 0) {
        start(spin, 0);
        start(exit_process, 23);
        for (;;) spinning++;
    }
    if (strcmp(order, "thread_exits_while_main_sleeps") == 0) {
        start(exit_by_call, 24);
        for (;;) pause();
    }
    if (strcmp(order, "thread_aborts") == 0) {
        start(spin, 0);
        start(abort_process, 0);
        for (;;) spinning++;
    }
    if (strcmp(order, "thread_crashes") == 0) {
        start(spin, 0);
        start(crash, 0);
        for (;;) pause();
    }
    return 1;
}
