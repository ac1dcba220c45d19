/* A small interpreter, whose program changes one of its own operands from some time on, and leaves the
 * others as they are. Prints a result that depends on every step. */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>

enum { SET, ADD, XOR, NEXT, NEGATE, TWICE, END };

static int64_t run(const int32_t *code, int64_t count) {
    int64_t sum = 0;
    /* In a register, as in optimised interpreters. */
    for (register const int32_t *at = code;;) {
        switch (*at) {
        case SET:
            sum = at[1];
            at += 2;
            break;
        case ADD:
            sum += at[1];
            at += 2;
            break;
        case XOR:
            sum ^= sum >> at[1];
            at += 2;
            break;
        case NEXT:
            at = --count ? code + at[1] : at + 2;
            break;
        case NEGATE:
            sum = -sum;
            at += 1;
            break;
        case TWICE:
            sum *= 2;
            at += 1;
            break;
        default:
            return sum;
        }
    }
}

int main(void) {
    static int32_t code[] = {SET, 7, /* 2: */ ADD, 11, XOR, 3, NEGATE, ADD, 5, TWICE, NEXT, 2, END};
    int64_t all = 0;
    for (int k = 0; k < 8000; k++) {
        sigset_t set;
        if (k >= 2000)
            code[3] = k;
        all = all * 31 + run(code, 300 + k % 5);
        sigprocmask(SIG_BLOCK, NULL, &set);
    }
    printf("%lld\n", (long long)all);
    return 0;
}
