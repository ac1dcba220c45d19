/* An interpreter with one dispatch in each handler, whose frames are objects in a list: a call takes the
 * next frame, and saves where to go on in its own. Its programs are recursive: the same return goes to
 * different places, at different depths, and the operands of one place are in many objects.
 *
 * Hard for a translator: which loop the interpreted program is in does not follow from where it is, only
 * from what its frames hold. */
#include "guest.h"

enum { PUSH, LOCAL, SET, ADD, SUB, MUL, MOD, LESS, ZERO, JUMP, CALL, RETURN, HALT };

struct frame {
    struct frame *before, *next;
    const int *saved;
    long locals[4];
    long stack[8];
    long *top;
};

static struct frame *new_frame(struct frame *before) {
    struct frame *frame = calloc(1, sizeof *frame);
    CHECK(frame != NULL);
    frame->before = before;
    return frame;
}

/* Runs the program from `pc` on with three arguments, and counts its calls. */
__attribute__((noinline)) static long run(const int *program, const int *pc, const long *arguments,
                                          long *called) {
    static const void *const handlers[] = {&&push, &&local, &&set,  &&add,  &&sub,    &&mul, &&mod,
                                           &&less, &&zero,  &&jump, &&call, &&return_, &&halt};
    static struct frame *first;
    if (first == NULL) first = new_frame(NULL);
    struct frame *frame = first;
    memcpy(frame->locals, arguments, 3 * sizeof *arguments);
    frame->top = frame->stack;
    long *top = frame->top;
#define DISPATCH goto *handlers[*pc++]
    DISPATCH;
push:
    *top++ = *pc++;
    DISPATCH;
local:
    *top++ = frame->locals[*pc++];
    DISPATCH;
set:
    frame->locals[*pc++] = *--top;
    DISPATCH;
#define BINARY(name, expression)      \
    name: {                           \
        long b = *--top, a = top[-1]; \
        top[-1] = (expression);       \
        DISPATCH;                     \
    }
    BINARY(add, a + b)
    BINARY(sub, a - b)
    BINARY(mul, (long)((unsigned long)a * (unsigned long)b))
    BINARY(mod, a % b)
less: {
    long b = *--top, a = *--top;
    pc = a < b ? pc + 1 : program + *pc;
    DISPATCH;
}
zero: {
    long a = *--top;
    pc = a == 0 ? pc + 1 : program + *pc;
    DISPATCH;
}
jump:
    pc = program + *pc;
    DISPATCH;
call: {
    const int *callee = program + *pc++;
    int count = *pc++;
    struct frame *next = frame->next;
    if (next == NULL) next = frame->next = new_frame(frame);
    for (int i = count; i-- > 0;) next->locals[i] = *--top;
    frame->saved = pc;
    frame->top = top;
    frame = next;
    top = frame->stack;
    pc = callee;
    ++*called;
    DISPATCH;
}
return_: {
    long value = *--top;
    frame = frame->before;
    pc = frame->saved;
    top = frame->top;
    *top++ = value;
    DISPATCH;
}
halt:
    return *--top;
}

static int program[512], here;

static void emit(int op) { program[here++] = op; }
static void emit1(int op, int a) { emit(op), emit(a); }
/* A jump whose target is not known yet: returns its place. */
static int ahead(int op) { emit1(op, 0); return here - 1; }
static void land(int place) { program[place] = here; }
static void calls(int function, int count) { emit1(CALL, function), emit(count); }
static void local_minus(int local, int n) { emit1(LOCAL, local), emit1(PUSH, n), emit(SUB); }

/* fib(n) = n < 2 ? n : fib(n - 1) + fib(n - 2) */
static int make_fib(void) {
    int fib = here;
    emit1(LOCAL, 0), emit1(PUSH, 2);
    int recursive = ahead(LESS);
    emit1(LOCAL, 0), emit(RETURN);
    land(recursive);
    local_minus(0, 1), calls(fib, 1);
    local_minus(0, 2), calls(fib, 1);
    emit(ADD), emit(RETURN);
    return fib;
}

/* tree(d, x) = d == 0 ? x % 1009 : 3 * tree(d - 1, x + 1) + tree(d - 1, x * x) + fib(x % 7) */
static int make_tree(int fib) {
    int tree = here;
    emit1(LOCAL, 0);
    int inner = ahead(ZERO);
    emit1(LOCAL, 1), emit1(PUSH, 1009), emit(MOD), emit(RETURN);
    land(inner);
    emit1(PUSH, 3), local_minus(0, 1), emit1(LOCAL, 1), emit1(PUSH, 1), emit(ADD), calls(tree, 2);
    emit(MUL);
    local_minus(0, 1), emit1(LOCAL, 1), emit1(LOCAL, 1), emit(MUL), emit1(PUSH, 10007), emit(MOD);
    calls(tree, 2), emit(ADD);
    emit1(LOCAL, 1), emit1(PUSH, 7), emit(MOD), calls(fib, 1), emit(ADD);
    emit(RETURN);
    return tree;
}

/* The sum of twice(i) + square(i), where twice calls square, too. */
static int make_loop(void) {
    int square = here;
    emit1(LOCAL, 0), emit1(LOCAL, 0), emit(MUL), emit(RETURN);
    int twice = here;
    emit1(LOCAL, 0), calls(square, 1), emit1(LOCAL, 0), emit(ADD), calls(square, 1);
    emit1(PUSH, 9973), emit(MOD), emit(RETURN);
    int loop = here;
    emit1(PUSH, 0), emit1(SET, 1), emit1(PUSH, 0), emit1(SET, 2);
    int head = here;
    emit1(LOCAL, 1), emit1(LOCAL, 0);
    int out = ahead(LESS);
    emit1(LOCAL, 1), calls(twice, 1), emit1(LOCAL, 1), calls(square, 1), emit(ADD);
    emit1(LOCAL, 2), emit(ADD), emit1(PUSH, 1000003), emit(MOD), emit1(SET, 2);
    emit1(LOCAL, 1), emit1(PUSH, 1), emit(ADD), emit1(SET, 1);
    emit1(JUMP, head);
    land(out);
    emit1(LOCAL, 2), emit(RETURN);
    return loop;
}

/* The program's start: calls the function with its arguments. */
static int make_start(int function, int count) {
    int start = here;
    for (int i = 0; i < count; i++) emit1(LOCAL, i);
    calls(function, count), emit(HALT);
    return start;
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 17), called = 0;
    int fib = make_fib();
    int starts[] = {make_start(fib, 1), 0, 0};
    starts[1] = make_start(make_tree(fib), 2);
    starts[2] = make_start(make_loop(), 1);
    uint64_t sums[3] = {0, 0, 0};
    for (long i = 0; i < n; i++) {
        long arguments[][3] = {{i, 0, 0}, {i / 2, i, 0}, {i * 40, 0, 0}};
        for (int p = 0; p < 3; p++)
            sums[p] = mix(sums[p], (uint64_t)run(program, program + starts[p], arguments[p], &called));
    }
    printf("fib %016lx tree %016lx loop %016lx, %ld calls\n", sums[0], sums[1], sums[2], called);
    return 0;
}
