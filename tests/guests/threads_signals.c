// Signals and threads: signals for one thread, masks of each thread, alternate stacks of each
// thread, sigwait, cancellation of both kinds with clean-up handlers, and calls that the C library
// carries out in all threads.
//
// Hard for a translator: the thread that takes a signal must be the one that the kernel would
// choose.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define THREADS 4

static sem_t ready;
static volatile int stop;
static __thread volatile sig_atomic_t received;
static __thread volatile long spun;
static pid_t handled_by[THREADS];
static __thread int number;

static void count(int signo) {
    (void)signo;
    received++;
    handled_by[number] = (pid_t)syscall(SYS_gettid);
}

static void *target(void *argument) {
    number = (int)(long)argument;
    pid_t own = (pid_t)syscall(SYS_gettid);
    sem_post(&ready);
    // Half of them spin in translated code, half sleep.
    while (received < 50) {
        if (number % 2 == 0) spun++;
        else usleep(100);
    }
    if (handled_by[number] != own) abort();
    return (void *)(long)received;
}

static void *waiter(void *unused) {
    (void)unused;
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR2);
    long sum = 0;
    for (int i = 0; i < 10; i++) {
        int signo;
        if (sigwait(&set, &signo) != 0) abort();
        sum += signo;
        sem_post(&ready);
    }
    return (void *)sum;
}

static char *stack_of[2];
static int on_own_stack[2];

static void check_stack(int signo) {
    (void)signo;
    char here;
    on_own_stack[number] = &here >= stack_of[number] && &here < stack_of[number] + 65536;
}

static void *alternate(void *argument) {
    number = (int)(long)argument;
    stack_t stack = {.ss_sp = malloc(65536), .ss_size = 65536}, old;
    if (sigaltstack(NULL, &old) != 0 || old.ss_flags != SS_DISABLE) abort();
    stack_of[number] = stack.ss_sp;
    sigaltstack(&stack, NULL);
    pthread_kill(pthread_self(), SIGRTMIN);
    stack.ss_flags = SS_DISABLE;
    sigaltstack(&stack, NULL);
    return NULL;
}

static int cleaned;

static void clean(void *amount) { __atomic_fetch_add(&cleaned, (int)(long)amount, __ATOMIC_SEQ_CST); }

static void *cancelled_in_read(void *fd) {
    char byte;
    pthread_cleanup_push(clean, (void *)1);
    sem_post(&ready);
    read((int)(long)fd, &byte, 1);
    pthread_cleanup_pop(0);
    return NULL;
}

static void *cancelled_in_loop(void *unused) {
    (void)unused;
    pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, NULL);
    pthread_cleanup_push(clean, (void *)10);
    sem_post(&ready);
    for (;;) spun++;
    pthread_cleanup_pop(0);
    return NULL;
}

static void *cancelled_at_test(void *unused) {
    (void)unused;
    pthread_cleanup_push(clean, (void *)100);
    sem_post(&ready);
    for (;;) {
        spun++;
        pthread_testcancel();
    }
    pthread_cleanup_pop(0);
    return NULL;
}

static void unlock(void *mutex) { pthread_mutex_unlock(mutex); }

static void *cancelled_while_waiting(void *unused) {
    (void)unused;
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static pthread_cond_t never = PTHREAD_COND_INITIALIZER;
    pthread_mutex_lock(&mutex);
    pthread_cleanup_push(unlock, &mutex);
    pthread_cleanup_push(clean, (void *)1000);
    sem_post(&ready);
    for (;;) pthread_cond_wait(&never, &mutex);
    pthread_cleanup_pop(0);
    pthread_cleanup_pop(0);
    return NULL;
}

static void *identity(void *unused) {
    (void)unused;
    sem_post(&ready);
    while (!stop) spun++;
    return (void *)(long)(getegid() * 1000 + geteuid());
}

static void *own_tid(void *unused) {
    (void)unused;
    return (void *)syscall(SYS_gettid);
}

static void cancel(void *(*body)(void *), void *argument) {
    pthread_t thread;
    void *result;
    pthread_create(&thread, NULL, body, argument);
    sem_wait(&ready);
    usleep(500);
    pthread_cancel(thread);
    pthread_join(thread, &result);
    printf("cancelled %d, cleaned %d\n", result == PTHREAD_CANCELED, cleaned);
}

int main(void) {
    alarm(120);
    sem_init(&ready, 0, 0);
    struct sigaction action = {.sa_handler = count};
    sigaction(SIGUSR1, &action, NULL);
    pthread_t threads[THREADS];
    for (long i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, target, (void *)i);
    for (int i = 0; i < THREADS; i++) sem_wait(&ready);
    for (int i = 0; i < THREADS; i++) {
        void *result;
        while (pthread_tryjoin_np(threads[i], &result) == EBUSY) {
            pthread_kill(threads[i], SIGUSR1);
            sched_yield();
        }
        printf("thread %d got enough: %d\n", i, (long)result >= 50);
    }

    sigset_t set, old;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR2);
    pthread_sigmask(SIG_BLOCK, &set, &old);
    pthread_create(&threads[0], NULL, waiter, NULL);
    for (int i = 0; i < 10; i++) {
        if (i % 2 == 0) kill(getpid(), SIGUSR2);
        else pthread_kill(threads[0], SIGUSR2);
        sem_wait(&ready);
    }
    void *sum;
    pthread_join(threads[0], &sum);
    printf("waited for %ld\n", (long)sum);
    pthread_sigmask(SIG_SETMASK, &old, NULL);

    action.sa_handler = check_stack;
    action.sa_flags = SA_ONSTACK;
    sigaction(SIGRTMIN, &action, NULL);
    for (long i = 0; i < 2; i++) pthread_create(&threads[i], NULL, alternate, (void *)i);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    printf("own stacks %d %d\n", on_own_stack[0], on_own_stack[1]);

    int pipes[2];
    if (pipe(pipes) != 0) return 1;
    cancel(cancelled_in_read, (void *)(long)pipes[0]);
    cancel(cancelled_in_loop, NULL);
    cancel(cancelled_at_test, NULL);
    cancel(cancelled_while_waiting, NULL);

    // The C library makes every thread set its ids, by a signal of its own.
    for (int i = 0; i < 3; i++) pthread_create(&threads[i], NULL, identity, NULL);
    for (int i = 0; i < 3; i++) sem_wait(&ready);
    int set_group = setegid(getegid()), set_user = seteuid(geteuid());
    printf("set %d %d\n", set_group, set_user);
    stop = 1;
    long expected = getegid() * 1000 + geteuid();
    for (int i = 0; i < 3; i++) {
        void *result;
        pthread_join(threads[i], &result);
        if ((long)result != expected) abort();
    }

    if (pthread_kill(pthread_self(), 0) != 0) abort();
    pid_t gone;
    pthread_create(&threads[0], NULL, own_tid, NULL);
    void *tid;
    pthread_join(threads[0], &tid);
    gone = (pid_t)(long)tid;
    int result;
    // A joined thread may take a moment to go.
    while ((result = (int)syscall(SYS_tgkill, getpid(), gone, 0)) == 0) sched_yield();
    printf("gone: %s\n", strerror(errno));
    return 0;
}
