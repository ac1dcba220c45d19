/* Threads that interpret the same program, or programs of their own, in many short runs with a system call
 * after each that comes to the translator. One ends early, one sleeps now and then, and a second generation
 * takes their places. Prints results that depend on every step. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "interpreter.h"

enum { THREADS = 4 };

static int runs;

static void *body(void *argument) {
    static const int32_t codes[2][16] = {
        {SET, 7, /* 2: */ ADD, XOR, 3, ADD, NEXT, 2, END},
        {SET, 9, /* 2: */ XOR, 5, ADD, ADD, XOR, 1, NEXT, 2, END},
    };
    long self = (long)argument;
    int64_t all = self;
    for (int k = 0; k < (self == 1 ? runs / 8 : runs); k++) {
        sigset_t set;
        all = all * 31 + run(codes[self & 1], 300 + k % 5);
        sigprocmask(SIG_BLOCK, NULL, &set);
        if (self == 2 && k % (runs / 3) == 0)
            nanosleep(&(struct timespec){0, 30000000}, NULL);
    }
    return (void *)all;
}

int main(int argc, char **argv) {
    runs = argc > 1 ? atoi(argv[1]) : 1500;
    for (int generation = 0; generation < 2; generation++) {
        pthread_t threads[THREADS];
        for (long n = 0; n < THREADS; n++)
            if (pthread_create(&threads[n], NULL, body, (void *)n) != 0)
                return 1;
        for (int n = 0; n < THREADS; n++) {
            void *result;
            pthread_join(threads[n], &result);
            printf("%lld\n", (long long)(intptr_t)result);
        }
    }
    return 0;
}
