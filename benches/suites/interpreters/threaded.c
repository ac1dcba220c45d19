/* Direct-threaded code: the words of a program are addresses of functions, and each instruction
 * ends with a call of the next one in tail position. The calls become jumps only if the compiler
 * optimises sibling calls (gcc: from -O2 on); without it the C stack overflows. */
#include "machine.h"

#define STATE const int64_t *pc, int64_t *sp, int64_t *fp, struct frame *frame
typedef int64_t function(STATE);

#define FUNCTION(name, operands, ...) \
    static int64_t do_##name(STATE) { \
        __VA_ARGS__ \
        return ((function *)*pc)(pc + 1, sp, fp, frame); \
    }
INSTRUCTIONS(FUNCTION)

static int64_t encode(enum opcode op) {
#define ADDRESS(name, operands, ...) do_##name,
    static function *const functions[] = {INSTRUCTIONS(ADDRESS)};
    return (int64_t)functions[op];
}

static int64_t run(const int64_t *pc, int64_t n) {
    *stack = n;
    return ((function *)*pc)(pc + 1, stack + 1, stack, frames);
}
