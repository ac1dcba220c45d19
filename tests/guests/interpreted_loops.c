/* Interpreters whose programs change, nest loops, branch on data, and store into their own code.
 *
 * Hard for a translator: a trace along a loop of the interpreted program takes that program for
 * constant and must detect each change. */
#include "guest.h"

enum { ADD, SUB, XOR, SETN, LOOP, IFODD, POKE, SKIP, CALL, RET, OUT, END };

static uint64_t outputs = 1;

/* The program is in writable memory; registers r[0..7]; a stack of returns. Each instruction is
 * four bytes. */
__attribute__((noinline)) static uint64_t run(unsigned char *code, uint64_t *r) {
    unsigned char *pc = code, *returns[16];
    int depth = 0;
    for (;;) {
        unsigned char *i = pc;
        pc += 4;
        switch (i[0]) {
            case ADD: r[i[1]] += r[i[2]] + i[3]; break;
            case SUB: r[i[1]] -= r[i[2]] + i[3]; break;
            case XOR: r[i[1]] ^= r[i[2]] << i[3]; break;
            case SETN: r[i[1]] = i[2] * 256u + i[3]; break;
            case LOOP: if (--r[i[1]]) pc = code + 4 * i[2]; break;
            case IFODD: if (r[i[1]] & 1) pc = code + 4 * i[2]; break;
            case POKE: code[4 * i[1] + 3] = (unsigned char)r[i[2]]; break;
            case SKIP: pc = code + 4 * i[1]; break;
            case CALL: returns[depth++] = pc; pc = code + 4 * i[1]; break;
            case RET: pc = returns[--depth]; break;
            case OUT: outputs = mix(outputs, r[i[1]]); break;
            default: return r[0];
        }
    }
}

/* The same threaded through a table of functions, as perl does. */
struct machine { const unsigned char *pc; uint64_t a, b, n; };
typedef const unsigned char *(*handler)(struct machine *);
static const unsigned char *h_add(struct machine *m) { m->a += m->b; return m->pc + 1; }
static const unsigned char *h_mul(struct machine *m) { m->b = m->b * 3 + 1; return m->pc + 1; }
static const unsigned char *h_swap(struct machine *m) { uint64_t t = m->a; m->a = m->b; m->b = t ^ m->n; return m->pc + 1; }
static const unsigned char *h_odd(struct machine *m) { return m->a & 1 ? m->pc + 2 : m->pc + 1; }
static const unsigned char *h_back(struct machine *m) { return --m->n ? m->pc - m->pc[1] : m->pc + 2; }
static const unsigned char *h_end(struct machine *m) { (void)m; return NULL; }
static const handler handlers[] = {h_add, h_mul, h_swap, h_odd, h_back, h_end};

__attribute__((noinline)) static uint64_t threaded(const unsigned char *code, uint64_t n) {
    struct machine m = {code, 1, 2, n};
    while ((m.pc = handlers[*m.pc](&m))) {}
    return mix(m.a, m.b);
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 1500);
    uint64_t r[8] = {0};
    unsigned char nested[] = {
        SETN, 1, 0, 9,                                     /* 0: outer */
        SETN, 2, 0, 30,                                    /* 1: inner */
        ADD, 0, 2, 7, XOR, 3, 0, 3, ADD, 4, 3, 1,          /* 2 */
        IFODD, 4, 8, 0, SUB, 0, 2, 1, SKIP, 9, 0, 0,       /* 5 */
        CALL, 13, 0, 0,                                    /* 8 */
        LOOP, 2, 2, 0, OUT, 3, 0, 0, LOOP, 1, 1, 0,        /* 9 */
        END, 0, 0, 0,                                      /* 12 */
        XOR, 5, 4, 1, ADD, 5, 0, 2, RET, 0, 0, 0,          /* 13 */
    };
    for (long i = 0; i < n / 100; i++) run(nested, r);
    printf("nested %016lx %016lx\n", r[0], mix(outputs, r[5]));
    /* The operand of the second instruction changes in each iteration, the first one's operation
     * now and then. */
    unsigned char poked[] = {
        SETN, 1, 4, 0, ADD, 0, 1, 5, XOR, 3, 0, 1, POKE, 1, 3, 0, LOOP, 1, 1, 0, END, 0, 0, 0,
    };
    for (long i = 0; i < n / 50; i++) {
        poked[8] = i % 7 == 6 ? SUB : XOR;
        poked[16 + 0] = LOOP;
        run(poked, r);
        outputs = mix(outputs, r[0] ^ r[3]);
    }
    printf("poked %016lx\n", outputs);
    static const unsigned char straight[] = {0, 1, 2, 3, 1, 0, 4, 6, 5}, other[] = {1, 0, 0, 3, 2, 4, 5, 5};
    for (long i = 1; i < 12; i++) {
        outputs = mix(outputs, threaded(straight, (uint64_t)(n + i)));
        outputs = mix(outputs, threaded(other, (uint64_t)(n / 2 + i)));
    }
    printf("threaded %016lx\n", outputs);
    return 0;
}
