/* Dispatch by computed goto: each instruction ends with its own jump through a table of labels. */
#include "machine.h"

static int64_t encode(enum opcode op) { return op; }

static int64_t run(const int64_t *pc, int64_t n) {
    static const void *const labels[] = {
#define LABEL(name, operands, ...) &&name##_label,
        INSTRUCTIONS(LABEL)
    };
    int64_t *fp = stack, *sp = stack + 1;
    struct frame *frame = frames;
    *fp = n;
    goto *labels[*pc++];
#define CODE(name, operands, ...) name##_label: __VA_ARGS__ goto *labels[*pc++];
    INSTRUCTIONS(CODE)
}
