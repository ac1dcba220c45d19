/* Coroutines by switching stacks: generators, a scheduler, ucontext.
 *
 * Hard for a translator: returns do not match calls, so a return stack predicts each of them
 * wrongly. */
#include <ucontext.h>
#include "guest.h"

struct coroutine { void *stack_pointer; char *stack; long value; int done; };
void switch_stacks(void **save, void *to);
__asm__(
    ".text\n.globl switch_stacks\nswitch_stacks:\n\t"
    "push %rbx\n\tpush %rbp\n\tpush %r12\n\tpush %r13\n\tpush %r14\n\tpush %r15\n\t"
    "mov %rsp, (%rdi)\n\tmov %rsi, %rsp\n\t"
    "pop %r15\n\tpop %r14\n\tpop %r13\n\tpop %r12\n\tpop %rbp\n\tpop %rbx\n\tret\n");

static struct coroutine coroutines[4], *running;
static void *scheduler;
static long rounds;

static void yield(long value) {
    struct coroutine *self = running;
    self->value = value;
    switch_stacks(&self->stack_pointer, scheduler);
}

static void visit(long low, long high) { /* recursive generator */
    if (low > high) return;
    long middle = (low + high) / 2;
    visit(low, middle - 1);
    yield(middle * 7);
    visit(middle + 1, high);
}

static void body(void) {
    long id = running - coroutines;
    if (id == 0) visit(1, rounds);
    else for (long i = 0, a = 0, b = 1; i < rounds * id; i++) {
            yield(a % 1000003);
            long t = a + b;
            a = b, b = t % 1000000007;
        }
    running->done = 1;
    yield(0);
    _Exit(97);
}

static ucontext_t main_context, other_context;
static long transfers;
static void other(void) {
    for (;;) {
        transfers++;
        swapcontext(&other_context, &main_context);
    }
}

int main(int argc, char **argv) {
    rounds = iterations(argc, argv, 60);
    for (int i = 0; i < 4; i++) {
        coroutines[i].stack = malloc(65536);
        void **top = (void **)(coroutines[i].stack + 65536 - 16);
        *--top = NULL;         /* keeps the alignment that a call would give */
        *--top = (void *)body; /* where ret goes */
        for (int k = 0; k < 6; k++) *--top = (void *)(uintptr_t)k;
        coroutines[i].stack_pointer = top;
    }
    uint64_t sum = 1;
    long switches = 0;
    for (int alive = 4; alive > 0;) {
        for (int i = 0; i < 4; i++) {
            if (coroutines[i].done) continue;
            running = &coroutines[i];
            switch_stacks(&scheduler, running->stack_pointer);
            switches++;
            sum = mix(sum, (uint64_t)running->value);
            alive -= running->done;
        }
    }
    printf("switches %ld sum %016lx\n", switches, sum);
    getcontext(&other_context);
    other_context.uc_stack.ss_sp = coroutines[0].stack;
    other_context.uc_stack.ss_size = 65536;
    makecontext(&other_context, other, 0);
    for (long i = 0; i < rounds; i++) swapcontext(&main_context, &other_context);
    CHECK(transfers == rounds);
    return 0;
}
