/* A small interpreter that executes two programs, a short one and a long one. Prints a result that depends on
 * every step. */
#include <stdio.h>
#include <stdlib.h>
#include "interpreter.h"

int main(int argc, char **argv) {
    int64_t count = argc > 1 ? atoll(argv[1]) : 3000;
    static const int32_t first[] = {SET, 7, /* 2: */ ADD, XOR, 3, ADD, NEXT, 2, END};
    static const int32_t second[] = {SET, 9, /* 2: */ XOR, 5, ADD, ADD, XOR, 2, ADD, NEXT, 2, END};
    int64_t all = run(first, count);
    all = all * 31 + run(second, count * 8);
    printf("%lld\n", (long long)all);
    return 0;
}
