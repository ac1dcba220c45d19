/* The stack machine that switch.c, goto.c and threaded.c interpret: its instructions, an assembler,
 * four programs, and main.
 *
 * A program is an array of words: an instruction, then its operands. A function has its arguments
 * and variables at fp; its intermediate values are above them, up to sp. An interpreter defines
 *   encode: the word that stands for an instruction, namely its opcode or the address of its code;
 *   run: executes a program whose main function has the argument n, and returns its result.
 *
 * `switch fib 100` runs the program fib for 100 rounds and prints its result. */
#ifndef MACHINE_H
#define MACHINE_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

struct frame { const int64_t *pc; int64_t *fp; };

static int64_t stack[1 << 10], memory[1 << 13], code[256];
static struct frame frames[1 << 8];

/* INSTRUCTION(name, number of operands, effect). pc is at the operands; the operand of a jump or
 * call is the distance from there to the target. */
#define INSTRUCTIONS(INSTRUCTION) \
    INSTRUCTION(PUSH, 1, *sp++ = *pc++;) \
    INSTRUCTION(LOAD, 1, *sp++ = fp[*pc++];) \
    INSTRUCTION(STORE, 1, fp[*pc++] = *--sp;) \
    INSTRUCTION(RESERVE, 1, sp += *pc++;) \
    INSTRUCTION(ADD, 0, sp--; sp[-1] += *sp;) \
    INSTRUCTION(SUB, 0, sp--; sp[-1] -= *sp;) \
    INSTRUCTION(MUL, 0, sp--; sp[-1] *= *sp;) \
    INSTRUCTION(AND, 0, sp--; sp[-1] &= *sp;) \
    INSTRUCTION(HALVE, 0, sp[-1] >>= 1;) \
    INSTRUCTION(LESS, 0, sp--; sp[-1] = sp[-1] < *sp;) \
    INSTRUCTION(GET, 0, sp[-1] = memory[sp[-1]];) \
    INSTRUCTION(PUT, 0, sp -= 2; memory[*sp] = sp[1];) \
    INSTRUCTION(JUMP, 1, pc += *pc;) \
    INSTRUCTION(JUMP_IF, 1, pc += *--sp ? *pc : 1;) \
    INSTRUCTION(CALL, 2, frame->pc = pc + 2; frame++->fp = fp; fp = sp - pc[1]; pc += *pc;) \
    INSTRUCTION(RETURN, 0, *fp = sp[-1]; sp = fp + 1; pc = (--frame)->pc; fp = frame->fp;) \
    INSTRUCTION(HALT, 0, return sp[-1];)

enum opcode {
#define OPCODE(name, operands, ...) name,
    INSTRUCTIONS(OPCODE)
};

static int64_t encode(enum opcode op);
static int64_t run(const int64_t *pc, int64_t n);

static const struct { const char *name; int operands; } instruction[] = {
#define DESCRIPTION(name, operands, ...) {#name, operands},
    INSTRUCTIONS(DESCRIPTION)
};

/* The programs. Variable 0 of main is n; `name:` is a label. */
static const struct { const char *name, *text; } programs[] = {
    /* for i < n, j < 1000: sum = (31 sum + i j) & mask */
    {"nested", "reserve 3 push 0 store 1 push 0 store 3 "
               "outer: push 0 store 2 "
               "inner: load 3 push 31 mul load 1 load 2 mul add push 1048575 and store 3 "
               "load 2 push 1 add store 2 load 2 push 1000 less jump_if inner "
               "load 1 push 1 add store 1 load 1 load 0 less jump_if outer load 3 halt"},
    /* n times: the primes below 8192; sum = (3 sum + prime + round) & mask */
    {"sieve", "reserve 4 push 0 store 1 push 0 store 4 "
              "round: push 2 store 2 "
              "clear: load 2 push 0 put "
              "load 2 push 1 add store 2 load 2 push 8192 less jump_if clear "
              "push 2 store 2 "
              "number: load 2 get jump_if next "
              "load 4 push 3 mul load 2 add load 1 add push 1048575 and store 4 "
              "load 2 load 2 add store 3 jump test "
              "mark: load 3 push 1 put load 3 load 2 add store 3 "
              "test: load 3 push 8192 less jump_if mark "
              "next: load 2 push 1 add store 2 load 2 push 8192 less jump_if number "
              "load 1 push 1 add store 1 load 1 load 0 less jump_if round load 4 halt"},
    /* the steps of the Collatz sequences that start at 1 to n - 1 */
    {"collatz", "reserve 3 push 1 store 1 push 0 store 3 "
                "start: load 1 store 2 "
                "step: load 2 push 2 less jump_if end load 2 push 1 and jump_if odd "
                "load 2 halve store 2 jump count "
                "odd: load 2 push 3 mul push 1 add store 2 "
                "count: load 3 push 1 add store 3 jump step "
                "end: load 1 push 1 add store 1 load 1 load 0 less jump_if start load 3 halt"},
    /* for i < n: sum = sum + fib(15 + (i & 7)), by recursion */
    {"fib", "reserve 2 push 0 store 1 push 0 store 2 "
            "round: load 2 push 15 load 1 push 7 and add call fib 1 add store 2 "
            "load 1 push 1 add store 1 load 1 load 0 less jump_if round load 2 halt "
            "fib: load 0 push 2 less jump_if small "
            "load 0 push 1 sub call fib 1 load 0 push 2 sub call fib 1 add return "
            "small: load 0 return"},
};

/* The value of an operand at index `at`: a number, or the distance to a label. */
static int64_t operand(const char *word, int64_t at, char labels[][16], const int64_t *places,
                       int count) {
    for (int i = 0; i < count; i++)
        if (!strcmp(labels[i], word)) return places[i] - at;
    return atol(word);
}

/* Fills `code`. The first pass finds the labels, the second uses them. */
static void assemble(const char *text) {
    char labels[16][16], word[16];
    int64_t places[16];
    int count = 0, length, operands = 0;
    for (int pass = 0; pass < 2; pass++) {
        int64_t at = 0;
        for (const char *p = text; sscanf(p, "%15s%n", word, &length) == 1; p += length) {
            char *colon = strchr(word, ':');
            if (colon && pass == 0) {
                *colon = 0;
                strcpy(labels[count], word);
                places[count++] = at;
            } else if (!colon && operands > 0) {
                operands--;
                code[at] = operand(word, at, labels, places, count);
                at++;
            } else if (!colon) {
                int op = 0;
                while (strcasecmp(instruction[op].name, word)) op++;
                operands = instruction[op].operands;
                code[at++] = encode(op);
            }
        }
    }
}

int main(int argc, char **argv) {
    for (size_t i = 0; argc == 3 && i < sizeof programs / sizeof *programs; i++) {
        if (strcmp(programs[i].name, argv[1])) continue;
        assemble(programs[i].text);
        printf("%s %s %lld\n", argv[1], argv[2], (long long)run(code, atol(argv[2])));
        return 0;
    }
    fprintf(stderr, "usage: %s nested|sieve|collatz|fib ROUNDS\n", argv[0]);
    return 2;
}
#endif
