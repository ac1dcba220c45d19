/* A plain loop, whose variables are in memory without optimisation, in many runs, and forks in between: a
 * child continues with what its parent has made, until it forks too, and ends. Prints results that depend on
 * every step. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { GENERATIONS = 2, CHILDREN = 6 };

static int64_t work(int64_t all) {
    for (int64_t i = 0; i < 1000; i++)
        all = all * 31 + (i ^ (all >> 3));
    return all;
}

static void live(int generation, int runs, int64_t all) {
    for (int k = 1; k <= runs; k++) {
        all = work(all);
        if (k % (runs / CHILDREN) != 0 || generation == GENERATIONS)
            continue;
        pid_t child = fork();
        if (child < 0)
            exit(1);
        if (child == 0)
            return live(generation + 1, runs / CHILDREN, all);
        int status;
        if (waitpid(child, &status, 0) != child || status != 0)
            exit(2);
    }
    printf("%d: %lld\n", generation, (long long)all);
    fflush(stdout);
    exit(0);
}

int main(int argc, char **argv) {
    live(0, argc > 1 ? atoi(argv[1]) : 6000, 1);
}
