// A thread that overflows its stack. With an argument a handler on another stack takes it back;
// without, the process dies.
//
// Hard for a translator: its own handler must not need the guest's stack.
#define _GNU_SOURCE
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static __thread sigjmp_buf back;
static int recovers;

static void on_fault(int signo) { siglongjmp(back, signo); }

__attribute__((noinline)) static long deeper(long depth) {
    volatile char frame[512];
    frame[depth % 512] = (char)depth;
    long result = deeper(depth + 1);
    return result + frame[(depth + 1) % 512];
}

static void *body(void *argument) {
    if (recovers) {
        stack_t stack = {.ss_sp = malloc(65536), .ss_size = 65536};
        sigaltstack(&stack, NULL);
    }
    for (int i = 0; i < 3; i++) {
        int signo = sigsetjmp(back, 1);
        if (signo == 0) deeper(1);
        if (signo != SIGSEGV) abort();
    }
    return argument;
}

int main(int count, char **arguments) {
    (void)arguments;
    alarm(60);
    recovers = count > 1;
    if (recovers) {
        struct sigaction action = {.sa_handler = on_fault, .sa_flags = SA_ONSTACK};
        sigaction(SIGSEGV, &action, NULL);
    }
    puts("overflow");
    fflush(stdout);
    pthread_t threads[2];
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    long sum = 0;
    for (long i = 0; i < 2; i++) pthread_create(&threads[i], &attributes, body, (void *)(i + 4));
    for (int i = 0; i < 2; i++) {
        void *result;
        pthread_join(threads[i], &result);
        sum += (long)result;
    }
    printf("recovered, %ld\n", sum);
    return 0;
}
