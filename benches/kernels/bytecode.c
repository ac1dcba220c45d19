/* An interpreter as a guest: a stack machine in a switch loop. Its program counts the steps of
 * Collatz sequences. */
#include "kernel.h"

enum { PUSH, LOAD, STORE, ADD, MUL, SHIFT, ODD, LESS, JUMP, BRANCH, HALT };

/* The interpreted program. Variable 0 is the limit, 1 the start, 2 the value, 3 the steps; comments
 * begin with the index of their line's first word. */
static const int code[] = {
    PUSH, 0, STORE, 3, PUSH, 1, STORE, 1,                    /*  0: steps = 0; start = 1 */
    LOAD, 1, STORE, 2,                                       /*  8: value = start */
    LOAD, 2, PUSH, 2, LESS, BRANCH, 44,                      /* 12: while value >= 2 */
    LOAD, 2, ODD, BRANCH, 31,                                /* 19 */
    LOAD, 2, SHIFT, STORE, 2, JUMP, 38,                      /* 24: even: halve */
    LOAD, 2, PUSH, 3, MUL, JUMP, 56,                         /* 31: odd: 3 n + 1 at 56 */
    LOAD, 3, JUMP, 63, HALT, HALT,                           /* 38: steps + 1 at 63 */
    LOAD, 1, PUSH, 1, ADD, STORE, 1, LOAD, 1, JUMP, 70,      /* 44: start + 1, test at 70 */
    HALT, PUSH, 1, ADD, STORE, 2, JUMP,                      /* 55: entered at 56 */
    38, PUSH, 1, ADD, STORE, 3, JUMP,                        /* 62: entered at 63 */
    12, LOAD, 0, LESS, BRANCH, 8, HALT,                      /* 69: entered at 70 */
};

static int64_t run(int64_t limit) {
    int64_t stack[16], variable[4] = {limit, 0, 0, 0};
    int64_t *top = stack;
    const int *pc = code;
    for (;;) {
        switch (*pc++) {
        case PUSH: *top++ = *pc++; break;
        case LOAD: *top++ = variable[*pc++]; break;
        case STORE: variable[*pc++] = *--top; break;
        case ADD: top--; top[-1] += *top; break;
        case MUL: top--; top[-1] *= *top; break;
        case SHIFT: top[-1] >>= 1; break;
        case ODD: top[-1] &= 1; break;
        case LESS: top--; top[-1] = top[-1] < *top; break;
        case JUMP: pc = code + *pc; break;
        case BRANCH: pc = *--top ? code + *pc : pc + 1; break;
        default: return variable[3];
        }
    }
}

int main(int argc, char **argv) {
    long n = rounds(argc, argv, 200);
    uint64_t sum = 1;
    for (long r = 0; r < n; r++) sum = mix(sum, (uint64_t)run(3000 + r % 10));
    return report("bytecode", n, sum);
}
