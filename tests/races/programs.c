/* An interpreter that executes two programs, a short one and a long one. Prints a result that depends on every
 * step. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { SET, ADD, XOR, SUB, MIX, TURN, HALF, NEXT, END };

static int64_t run(const int32_t *at, int64_t count) {
    int64_t sum = 0;
    for (;;) {
        switch (*at++) {
        case SET: sum = *at++; break;
        case ADD: sum += count; break;
        case XOR: sum ^= sum >> *at++; break;
        case SUB: sum -= *at++; break;
        case MIX: sum = sum * 31 + count; break;
        case TURN: sum = -sum; break;
        case HALF: sum /= 2; break;
        case NEXT: at = --count ? at - *at : at + 1; break;
        default: return sum;
        }
    }
}

int main(int argc, char **argv) {
    int64_t count = argc > 1 ? atoll(argv[1]) : 3000;
    static const int32_t first[] = {SET, 7, /* the loop: */ ADD, XOR, 3, MIX, NEXT, 5, END};
    static const int32_t second[] = {SET, 9, /* the loop: */ XOR, 5, SUB, 4, TURN, HALF, ADD, NEXT, 8, END};
    int64_t all = run(first, count);
    all = all * 31 + run(second, count * 8);
    printf("%lld\n", (long long)all);
    return 0;
}
