/* A bytecode interpreter with a switch in a loop.
 *
 * Hard for a translator: one indirect jump has many targets in turn, so a trace that follows the
 * target taken last (next-executing-tail selection) is left at once. */
#include "guest.h"

enum op { PUSH, LOAD, STORE, ADD, SUB, MUL, MOD, LESS, EQUAL, JUMP, BRANCH_IF_ZERO, CALL, RETURN, PRINT, HALT, DUP };
struct instruction { enum op op; long operand; };

static long run(const struct instruction *code, long *variables) {
    long stack[256];
    int sp = 0, calls[64], cp = 0;
    long executed = 0;
    for (int pc = 0;;) {
        struct instruction i = code[pc++];
        executed++;
        switch (i.op) {
            case PUSH: stack[sp++] = i.operand; break;
            case LOAD: stack[sp++] = variables[i.operand]; break;
            case STORE: variables[i.operand] = stack[--sp]; break;
            case ADD: sp--; stack[sp - 1] += stack[sp]; break;
            case SUB: sp--; stack[sp - 1] -= stack[sp]; break;
            case MUL: sp--; stack[sp - 1] *= stack[sp]; break;
            case MOD: sp--; stack[sp - 1] %= stack[sp]; break;
            case LESS: sp--; stack[sp - 1] = stack[sp - 1] < stack[sp]; break;
            case EQUAL: sp--; stack[sp - 1] = stack[sp - 1] == stack[sp]; break;
            case DUP: stack[sp] = stack[sp - 1]; sp++; break;
            case JUMP: pc = (int)i.operand; break;
            case BRANCH_IF_ZERO: if (!stack[--sp]) pc = (int)i.operand; break;
            case CALL: calls[cp++] = pc; pc = (int)i.operand; break;
            case RETURN: pc = calls[--cp]; break;
            case PRINT: printf("%ld\n", stack[--sp]); break;
            case HALT: return executed;
        }
    }
}

/* primes below v0 counted in v1, and their sum in v2, with a subroutine that tests v3 */
static const struct instruction primes[] = {
    {PUSH, 2}, {STORE, 3},
    /* 2 */ {LOAD, 3}, {LOAD, 0}, {LESS, 0}, {BRANCH_IF_ZERO, 22},
    {CALL, 25},
    /* 7 */ {LOAD, 5}, {BRANCH_IF_ZERO, 17},
    {LOAD, 1}, {PUSH, 1}, {ADD, 0}, {STORE, 1}, {LOAD, 2}, {LOAD, 3}, {ADD, 0}, {STORE, 2},
    /* 17 */ {LOAD, 3}, {PUSH, 1}, {ADD, 0}, {STORE, 3}, {JUMP, 2},
    /* 22 */ {LOAD, 1}, {PRINT, 0}, {HALT, 0},
    /* 25: v5 = v3 is prime */ {PUSH, 2}, {STORE, 4},
    /* 27 */ {LOAD, 4}, {DUP, 0}, {MUL, 0}, {LOAD, 3}, {SUB, 0}, {PUSH, 1}, {LESS, 0}, {BRANCH_IF_ZERO, 47},
    /* 35 */ {LOAD, 3}, {LOAD, 4}, {MOD, 0}, {BRANCH_IF_ZERO, 44},
    {LOAD, 4}, {PUSH, 1}, {ADD, 0}, {STORE, 4}, {JUMP, 27},
    /* 44 */ {PUSH, 0}, {STORE, 5}, {RETURN, 0},
    /* 47 */ {PUSH, 1}, {STORE, 5}, {RETURN, 0},
};

int main(int argc, char **argv) {
    long variables[8] = {iterations(argc, argv, 400)};
    long executed = run(primes, variables);
    printf("executed %ld, sum %ld\n", executed, variables[2]);
    return 0;
}
