// Threads and their means of synchronisation: joins, mutexes of each kind, conditions, barriers,
// rwlocks, semaphores, once, keys and thread-local variables, detached threads.
//
// Hard for a translator: locked operations and futexes must keep their order and atomicity.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define THREADS 8
#define ROUNDS 2000

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t recursive, checking;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
static pthread_rwlock_t rwlock = PTHREAD_RWLOCK_INITIALIZER;
static pthread_spinlock_t spinlock;
static pthread_barrier_t barrier;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static sem_t semaphore, detached_ended;
static long counter, spun, written, readers_saw_odd, onces, destroyed;
static __thread long mine = 5;
static __thread char buffer[300] = "initialised";
static int turn;

static void initialise(void) { onces++; }

static void destroy(void *value) { __atomic_fetch_add(&destroyed, (long)value, __ATOMIC_SEQ_CST); }

static void *body(void *argument) {
    long number = (long)argument;
    pthread_once(&once, initialise);
    pthread_setspecific(key, (void *)(number + 1));
    if (mine != 5 || strcmp(buffer, "initialised") != 0) abort();
    snprintf(buffer, sizeof buffer, "thread %ld", number);
    for (long i = 0; i < ROUNDS; i++) {
        mine += number;
        pthread_mutex_lock(&mutex);
        counter++;
        pthread_mutex_unlock(&mutex);
        pthread_mutex_lock(&recursive);
        pthread_mutex_lock(&recursive);
        pthread_mutex_unlock(&recursive);
        pthread_mutex_unlock(&recursive);
        pthread_spin_lock(&spinlock);
        spun++;
        pthread_spin_unlock(&spinlock);
        if (i % 16 == 0) {
            pthread_rwlock_wrlock(&rwlock);
            written++;
            written++;
            pthread_rwlock_unlock(&rwlock);
        } else {
            pthread_rwlock_rdlock(&rwlock);
            if (written & 1) __atomic_fetch_add(&readers_saw_odd, 1, __ATOMIC_RELAXED);
            pthread_rwlock_unlock(&rwlock);
        }
    }
    int serial = pthread_barrier_wait(&barrier) == PTHREAD_BARRIER_SERIAL_THREAD;
    if (pthread_mutex_lock(&checking) == 0 && pthread_mutex_lock(&checking) != EDEADLK) abort();
    pthread_mutex_unlock(&checking);
    char expected[32];
    snprintf(expected, sizeof expected, "thread %ld", number);
    if (strcmp(buffer, expected) != 0) abort();
    sem_post(&semaphore);
    return (void *)(mine + (serial ? 1000000 : 0));
}

static void *ping_pong(void *argument) {
    int own = (int)(long)argument;
    for (int i = 0; i < 500; i++) {
        pthread_mutex_lock(&mutex);
        while (turn != own) pthread_cond_wait(&condition, &mutex);
        turn = !own;
        pthread_cond_signal(&condition);
        pthread_mutex_unlock(&mutex);
    }
    return NULL;
}

static void *detached(void *argument) {
    pthread_detach(pthread_self());
    if (argument == NULL) sem_post(&detached_ended);
    pthread_exit(NULL);
}

static int tasks(void) {
    int count = 0;
    DIR *directory = opendir("/proc/self/task");
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;) count += entry->d_name[0] != '.';
    closedir(directory);
    return count;
}

int main(void) {
    alarm(120);
    pthread_t threads[THREADS];
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&recursive, &attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ERRORCHECK);
    pthread_mutex_init(&checking, &attributes);
    pthread_spin_init(&spinlock, 0);
    pthread_barrier_init(&barrier, NULL, THREADS);
    pthread_key_create(&key, destroy);
    sem_init(&semaphore, 0, 0);
    sem_init(&detached_ended, 0, 0);

    for (long i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, body, (void *)i) != 0) abort();
    for (int i = 0; i < THREADS; i++) sem_wait(&semaphore);
    long sum = 0;
    for (int i = 0; i < THREADS; i++) {
        void *result;
        pthread_join(threads[i], &result);
        sum += (long)result;
    }
    printf("counter %ld spun %ld written %ld odd %ld onces %ld destroyed %ld sum %ld mine %ld\n", counter, spun, written,
           readers_saw_odd, onces, destroyed, sum, mine);

    for (long i = 0; i < 2; i++) pthread_create(&threads[i], NULL, ping_pong, (void *)i);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    printf("turn %d\n", turn);

    struct timespec soon;
    clock_gettime(CLOCK_REALTIME, &soon);
    soon.tv_nsec += 2000000;
    if (soon.tv_nsec >= 1000000000) soon.tv_sec++, soon.tv_nsec -= 1000000000;
    pthread_mutex_lock(&mutex);
    int timed = pthread_cond_timedwait(&condition, &mutex, &soon);
    pthread_mutex_unlock(&mutex);
    printf("timed wait: %s\n", strerror(timed));

    for (int i = 0; i < 20; i++) {
        pthread_create(&threads[0], NULL, detached, NULL);
        sem_wait(&detached_ended);
    }
    // While they end they use what the end of the process takes away.
    while (tasks() > 1) sched_yield();
    puts("detached");
    return 0;
}
