/* Dispatch by one switch in a loop: all instructions share one indirect jump. */
#include "machine.h"

static int64_t encode(enum opcode op) { return op; }

static int64_t run(const int64_t *pc, int64_t n) {
    int64_t *fp = stack, *sp = stack + 1;
    struct frame *frame = frames;
    *fp = n;
    for (;;) {
        switch (*pc++) {
#define CASE(name, operands, ...) case name: __VA_ARGS__ break;
            INSTRUCTIONS(CASE)
        }
    }
}
