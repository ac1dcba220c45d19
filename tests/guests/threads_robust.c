// Robust mutexes whose owners end without unlocking: threads, and processes that share memory.
//
// Hard for a translator: the kernel walks the guest's list when the host's thread ends.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static pthread_mutex_t *mutexes;
static int owned;
#define COUNT 20

static void *own_all(void *unused) {
    (void)unused;
    for (int i = 0; i < COUNT; i++) pthread_mutex_lock(&mutexes[i]);
    return NULL;
}

static void *wait_for(void *mutex) {
    long result = pthread_mutex_lock(mutex);
    if (result == EOWNERDEAD) pthread_mutex_consistent(mutex);
    pthread_mutex_unlock(mutex);
    return (void *)result;
}

static void *own_first(void *unused) {
    (void)unused;
    pthread_mutex_lock(&mutexes[0]);
    __atomic_store_n(&owned, 1, __ATOMIC_SEQ_CST);
    usleep(20000);
    return NULL;
}

static void recover(const char *from) {
    int dead = 0, consistent = 0, again = 0;
    for (int i = 0; i < COUNT; i++) {
        dead += pthread_mutex_lock(&mutexes[i]) == EOWNERDEAD;
        consistent += pthread_mutex_consistent(&mutexes[i]) == 0;
        pthread_mutex_unlock(&mutexes[i]);
        again += pthread_mutex_lock(&mutexes[i]) == 0;
        pthread_mutex_unlock(&mutexes[i]);
    }
    printf("%s: %d dead, %d consistent, %d again\n", from, dead, consistent, again);
    fflush(stdout);
}

int main(void) {
    alarm(60);
    mutexes = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    for (int i = 0; i < COUNT; i++) pthread_mutex_init(&mutexes[i], &attributes);

    pthread_t thread, other;
    pthread_create(&thread, NULL, own_all, NULL);
    pthread_join(thread, NULL);
    recover("thread");

    // Another thread already waits when the owner ends.
    pthread_create(&thread, NULL, own_first, NULL);
    while (!__atomic_load_n(&owned, __ATOMIC_SEQ_CST)) sched_yield();
    pthread_create(&other, NULL, wait_for, &mutexes[0]);
    void *result;
    pthread_join(other, &result);
    pthread_join(thread, NULL);
    printf("waiter: %s\n", (long)result == EOWNERDEAD ? "owner dead" : "no");
    fflush(stdout);

    for (int way = 0; way < 3; way++) {
        pid_t child = fork();
        if (child == 0) {
            if (way == 2) {
                // A thread of the child's has them, and the process ends.
                pthread_create(&thread, NULL, own_all, NULL);
                pthread_join(thread, NULL);
                for (int i = 0; i < COUNT; i++) pthread_mutex_consistent(&mutexes[i]), pthread_mutex_unlock(&mutexes[i]);
                own_all(NULL);
                _exit(0);
            }
            own_all(NULL);
            if (way == 0) _exit(0);
            abort();
        }
        waitpid(child, NULL, 0);
        recover("process");
    }

    // A mutex that is not made consistent cannot be used any more.
    pthread_create(&thread, NULL, own_all, NULL);
    pthread_join(thread, NULL);
    printf("%d ", pthread_mutex_lock(&mutexes[3]) == EOWNERDEAD);
    pthread_mutex_unlock(&mutexes[3]);
    printf("%d\n", pthread_mutex_lock(&mutexes[3]) == ENOTRECOVERABLE);
    return 0;
}
