/* A small interpreter, whose loop is a trace that pays. */
#include <stdint.h>

enum { SET, ADD, XOR, NEXT, END };

static int64_t run(const int32_t *code, int64_t count) {
    int64_t sum = 0;
    for (const int32_t *at = code;;) {
        switch (*at) {
        case SET:
            sum = at[1];
            at += 2;
            break;
        case ADD:
            sum += count;
            at += 1;
            break;
        case XOR:
            sum ^= sum >> at[1];
            at += 2;
            break;
        case NEXT:
            at = --count ? code + at[1] : at + 2;
            break;
        default:
            return sum;
        }
    }
}
