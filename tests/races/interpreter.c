/* A small interpreter, whose loop is a trace that pays, in many short runs with a system call after
 * each that comes to the translator. Prints a result that depends on every step. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include "interpreter.h"

int main(int argc, char **argv) {
    int runs = argc > 1 ? atoi(argv[1]) : 3000;
    static const int32_t code[] = {SET, 7, /* 2: */ ADD, XOR, 3, ADD, NEXT, 2, END};
    int64_t all = 0;
    /* With a second argument: a plain loop, whose variables are in memory without optimisation. */
    if (argc > 2) {
        for (int64_t i = 0; i < runs * 1000ll; i++)
            all = all * 31 + (i ^ (all >> 3));
        runs = 1;
    }
    for (int k = 0; k < runs; k++) {
        sigset_t set;
        all = all * 31 + run(code, 300 + k % 5);
        sigprocmask(SIG_BLOCK, NULL, &set);
    }
    printf("%lld\n", (long long)all);
    return 0;
}
