/* Random programs, made at run time from a seed: nested loops, branches on flags of all kinds,
 * calls, indirect jumps and calls, overlapping memory accesses of all widths, divisions that
 * fault, pages that a handler has to unprotect. All registers, the flags and the memory that
 * they leave are printed as a checksum.
 *
 * random_code SEED PROGRAMS [MASK]: MASK forbids kinds of instructions (a bit per kind of
 * `instruction`), to narrow a failure down. Everything lies at fixed addresses, so that values
 * that depend on addresses agree as well.
 *
 * Hard for a translator: combinations of instructions that no compiler makes and no test lists. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include "guest.h"

enum { RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8, R9, R10, R11, R12, R13, R14, R15 };
enum { FUNCTIONS = 5, CODE_SIZE = 1 << 20, BUDGET = 60000, MAX_DEPTH = 3 };

/* Four pages: data, data, one that is taken away now and then, data; then the stack. */
#define CODE ((unsigned char *)0x6100000000)
#define DATA ((unsigned char *)0x6200000000)
#define TRAP (DATA + 8192)
#define STACK ((unsigned char *)0x6300000000)
enum { DATA_SIZE = 4 * 4096, STACK_SIZE = 1 << 16 };

static unsigned char *at, *functions[FUNCTIONS];
static uint64_t seed;
static unsigned forbidden;
static long spent[FUNCTIONS]; /* instructions that a call of the function takes, roughly */
static int function;          /* the one being made */
static volatile int divisions, traps;

static uint32_t draw(uint32_t below) { return (uint32_t)(next_random(&seed) >> 33) % below; }
static int one_in(uint32_t n) { return draw(n) == 0; }

static void byte(unsigned b) { *at++ = (unsigned char)b; }
static void word(uint32_t w, int size) {
    memcpy(at, &w, (size_t)size);
    at += size;
}

/* A register that may be changed: rbp is the data's base, r13 to r15 count loops. */
static int any(void) {
    static const int free_registers[] = {RAX, RCX, RDX, RBX, RSI, RDI, R8, R9, R10, R11, R12};
    return free_registers[draw(11)];
}

/* Where the operand of an instruction is: a register or memory of the data. */
typedef struct {
    int base, index, scale;
    int32_t disp;
} place;

static place in_register(int r) { return (place){r, -1, -1, 0}; }

/* Opcode with ModRM; `size` 1, 2, 4, 8 chooses prefixes and the opcode's low bit, `wide` opcodes
 * have no byte form. */
static void encode(unsigned opcode, int size, int reg, place p, int wide) {
    int rex = (size == 8) << 3 | (reg >> 3) << 2 | (p.index > 0 ? p.index >> 3 : 0) << 1 | p.base >> 3;
    if (size == 2) byte(0x66);
    /* With REX, registers 4 to 7 are spl to dil; without, ah to bh: both happen. spl is never
     * drawn. */
    if (rex || (size == 1 && (reg == RSI || reg == RDI || (p.scale < 0 && (p.base == RSI || p.base == RDI)))))
        byte(0x40u | (unsigned)rex);
    if (opcode > 0xff) byte(opcode >> 8);
    byte((opcode & 0xff) | (unsigned)(!wide && size > 1));
    unsigned r = (unsigned)(reg & 7) << 3;
    if (p.scale < 0) {
        byte(0xc0u | r | (unsigned)(p.base & 7));
    } else if (p.index < 0) {
        byte(0x80u | r | RBP);
        word((uint32_t)p.disp, 4);
    } else {
        byte(0x84u | r);
        byte((unsigned)p.scale << 6 | (unsigned)(p.index & 7) << 3 | (unsigned)(p.base & 7));
        word((uint32_t)p.disp, 4);
    }
}

static int width(void) {
    static const int widths[] = {1, 2, 4, 4, 4, 8, 8, 8};
    return widths[draw(8)];
}

/* A place in the data; with an index sometimes, which is masked first. Accesses are close, so
 * that they overlap. */
static place memory(void) {
    if (one_in(3)) {
        int index = any();
        encode(0x80, 4, 4, in_register(index), 0); /* and index, 0x38: 0x81 with imm32 */
        word(0x38, 4);
        return (place){RBP, index, (int)draw(4), (int32_t)draw(24)};
    }
    return (place){RBP, -1, 0, (int32_t)(one_in(4) ? draw(64) : draw(8) * 8)};
}

static place operand(void) { return one_in(3) ? memory() : in_register(any()); }

static void immediate(int size) { word(one_in(2) ? (uint32_t)next_random(&seed) : draw(16) - 8, size == 8 ? 4 : size); }

/* One random instruction, or a few that belong together. */
static void instruction(void) {
    unsigned kind;
    do kind = draw(26);
    while (forbidden >> kind & 1);
    int size = width(), reg = any();
    place p;
    switch (kind) {
    case 0: case 1: case 2: /* add or adc sbb and sub xor cmp, both directions */
        p = operand();
        encode(draw(8) << 3 | (one_in(2) ? 2 : 0), size, reg, p, 0);
        break;
    case 3: /* the same with an immediate */
        p = operand();
        encode(0x80, size, (int)draw(8), p, 0);
        immediate(size);
        break;
    case 4: /* mov */
        p = operand();
        encode(one_in(2) ? 0x88 : 0x8a, size, reg, p, 0);
        break;
    case 5: /* mov imm */
        p = operand();
        encode(0xc6, size, 0, p, 0);
        immediate(size);
        break;
    case 6: /* shifts and rotates by an immediate, rcl and rcr included */
        p = operand();
        encode(0xc0, size, (int)draw(8), p, 0);
        byte(one_in(4) ? draw(256) : draw(8));
        break;
    case 7: /* by cl */
        p = operand();
        encode(0xd2, size, (int)draw(8), p, 0);
        break;
    case 8: /* inc dec */
        p = operand();
        encode(0xfe, size, (int)draw(2), p, 0);
        break;
    case 9: /* not neg */
        p = operand();
        encode(0xf6, size, 2 + (int)draw(2), p, 0);
        break;
    case 10: /* mul imul */
        p = operand();
        encode(0xf6, size, 4 + (int)draw(2), p, 0);
        break;
    case 11: /* imul with two operands */
        p = operand();
        encode(0x0faf, size == 1 ? 4 : size, reg, p, 1);
        break;
    case 12: /* setcc */
        p = operand();
        encode(0x0f90 | draw(16), 1, 0, p, 1);
        break;
    case 13: /* cmovcc */
        p = operand();
        encode(0x0f40 | draw(16), size == 1 ? 8 : size, reg, p, 1);
        break;
    case 14: /* movzx movsx */
        p = operand();
        encode((one_in(2) ? 0x0fb6 : 0x0fbe) | draw(2), size < 4 ? 4 : size, reg, p.scale < 0 ? in_register(any()) : p, 1);
        break;
    case 15: /* lea */
        p = (place){one_in(2) ? RBP : any(), any(), (int)draw(4), (int32_t)draw(4096) - 2048};
        encode(0x8d, size == 1 ? 8 : size, reg, p, 1);
        break;
    case 16: /* xchg */
        p = operand();
        encode(0x86, size, reg, p, 0);
        break;
    case 17: /* lock xadd, lock cmpxchg */
        p = memory();
        byte(0xf0);
        encode(one_in(2) ? 0x0fc0 : 0x0fb0, size, reg, p, 0);
        break;
    case 18: /* bt bts btr btc on a register; bsf bsr tzcnt lzcnt popcnt */
        if (one_in(2)) {
            encode(0x0fba, size == 8 ? 8 : 4, 4 + (int)draw(4), in_register(reg), 1);
            byte(draw(64));
        } else {
            static const unsigned opcodes[] = {0x0fbc, 0x0fbd, 0x0fb8};
            unsigned choice = draw(3);
            p = operand();
            if (choice == 2 || one_in(2)) byte(0xf3);
            encode(opcodes[choice], size == 8 ? 8 : 4, reg, p, 1);
        }
        break;
    case 19: /* push and pop around something */
        if (reg > 7) byte(0x41);
        byte(0x50u + (unsigned)(reg & 7));
        encode(0x00, size, any(), in_register(reg), 0);
        reg = any();
        if (reg > 7) byte(0x41);
        byte(0x58u + (unsigned)(reg & 7));
        break;
    case 20: /* pushf, change what is pushed, popf: CF PF AF ZF SF OF only */
        byte(0x9c);
        encode(0x80, 4, 6, (place){RSP, RSP, 0, 0}, 0); /* xor dword [rsp], imm32; index rsp is none */
        word((uint32_t)next_random(&seed) & 0x8d5, 4);
        byte(0x9d);
        break;
    case 21: /* cmc clc stc, lahf sahf, cbw and cwd */
        byte((const unsigned char[]){0xf5, 0xf8, 0xf9, 0x9f, 0x9e, 0x98, 0x99}[draw(7)]);
        break;
    case 22: /* division; always three bytes long, because the handler skips it after a fault */
        byte(size == 8 ? 0x48 : 0x40);
        byte(0xf7);
        byte(0xf0u | draw(2) << 3 | (const unsigned char[]){RCX, RBX, RSI, RDI}[draw(4)]);
        break;
    case 23: /* vectors: movq and pshufd, paddd, pxor, addss and back */
        p = memory();
        byte(0x66);
        encode(0x0f6e, 8, (int)draw(4), in_register(reg), 1);
        byte(0x66);
        byte(0x0f);
        byte((const unsigned char[]){0xfe, 0xef, 0xf4, 0x61, 0xd4}[draw(5)]);
        byte(0xc0u | draw(64) % 4 << 3 | draw(4));
        if (one_in(2)) {
            byte(0xf3);
            encode(0x0f7f, 4, (int)draw(4), p, 1);
        }
        byte(0x66);
        encode(0x0f7e, 8, (int)draw(4), in_register(any()), 1);
        break;
    case 24: /* shld shrd */
        p = operand();
        encode(one_in(2) ? 0x0fa4 : 0x0fac, size < 4 ? 4 : size, reg, p, 1);
        byte(draw(70));
        break;
    default: /* rep movsb, stosq and scasb over a few bytes of the second half of the first page */
        encode(0x8d, 8, RSI, (place){RBP, -1, 0, 2048 + (int32_t)draw(64)}, 1);
        encode(0x8d, 8, RDI, (place){RBP, -1, 0, 2048 + (int32_t)draw(64)}, 1);
        byte(0xb9);
        word(draw(20), 4);
        byte(one_in(3) ? 0xf2 : 0xf3);
        if (one_in(2)) byte(0x48);
        byte((const unsigned char[]){0xa4, 0xa5, 0xaa, 0xab, 0xae, 0xa6}[draw(6)]);
        break;
    }
}

/* A jump whose distance is filled in by `land`. */
static unsigned char *jump_if(unsigned condition) {
    byte(0x0f);
    byte(0x80 | condition);
    word(0, 4);
    return at;
}

static unsigned char *jump(void) {
    byte(0xe9);
    word(0, 4);
    return at;
}

static void land(unsigned char *from) {
    int32_t distance = (int32_t)(at - from);
    memcpy(from - 4, &distance, 4);
}

/* movabs scratch, table; and index, 3; jmp or call [scratch + index * 8]. */
static void through_table(const uint64_t *table, unsigned extension) {
    int index = one_in(2) ? RCX : RBX;
    encode(0x80, 4, 4, in_register(index), 0);
    word(3, 4);
    byte(0x48);
    byte(0xb8 | RDX);
    uint64_t address = (uint64_t)table;
    memcpy(at, &address, 8);
    at += 8;
    byte(0xff);
    byte(extension << 3 | 4);
    byte(3u << 6 | (unsigned)index << 3 | RDX);
}

/* The tables of this program stand behind the data that random accesses reach. */
static uint64_t *tables;
#define TABLES_END ((uint64_t *)(DATA + DATA_SIZE))

static void system_call_protecting(void) {
    byte(0xb8); word(SYS_mprotect, 4);                               /* mov eax, mprotect */
    encode(0x8d, 8, RDI, (place){RBP, -1, 0, 8192 - 1024}, 1);       /* lea rdi, TRAP */
    byte(0xbe); word(4096, 4);                                       /* mov esi, 4096 */
    byte(0xba); word(PROT_NONE, 4);                                  /* mov edx, PROT_NONE */
    byte(0x0f); byte(0x05);                                          /* syscall */
}

static long block(int depth, long weight);

static long statement(int depth, long weight) {
    long cost = weight;
    unsigned char *skip, *end, *top;
    switch (draw(14)) {
    case 0: case 1: /* if */
        skip = jump_if(draw(16));
        cost += block(depth, weight);
        land(skip);
        return cost;
    case 2: /* if else */
        skip = jump_if(draw(16));
        cost += block(depth, weight);
        end = jump();
        land(skip);
        cost += block(depth, weight);
        land(end);
        return cost;
    case 3: case 4: /* a loop: the trip count is a constant or varies with a register */
        if (depth < MAX_DEPTH && weight < BUDGET / 40) {
            int counter = R13 + depth, trips = 2 + (int)draw(30);
            if (one_in(3)) {
                encode(0x8a, 8, counter, in_register(any()), 0); /* mov counter, reg; and counter, 15; inc counter */
                encode(0x80, 8, 4, in_register(counter), 0);
                word(15, 4);
                encode(0xfe, 8, 0, in_register(counter), 0);
                trips = 16;
            } else {
                encode(0xc6, 8, 0, in_register(counter), 0);
                word((uint32_t)trips, 4);
            }
            top = at;
            cost += block(depth + 1, weight * trips);
            if (one_in(3)) {
                skip = jump_if(draw(16)); /* continue */
                cost += block(depth + 1, weight * trips);
                land(skip);
            }
            end = one_in(4) ? jump_if(draw(16)) : NULL; /* break */
            encode(0xfe, 8, 1, in_register(counter), 0);
            skip = jump_if(5);
            int32_t distance = (int32_t)(top - skip);
            memcpy(skip - 4, &distance, 4);
            if (end) land(end);
            return cost;
        }
        break;
    case 5: /* call of a function made before */
        if (function > 0) {
            int callee = (int)draw((uint32_t)function);
            if (weight * spent[callee] < BUDGET) {
                byte(0xe8);
                word((uint32_t)(functions[callee] - (at + 4)), 4);
                return cost + weight * spent[callee];
            }
        }
        break;
    case 6: /* indirect call of one of four; the table is made of functions that are cheap enough */
        if (function > 1 && tables < TABLES_END) {
            long most = 0;
            uint64_t *table = tables;
            for (int i = 0; i < 4; i++) {
                int callee = (int)draw((uint32_t)function);
                table[i] = (uint64_t)functions[callee];
                if (spent[callee] > most) most = spent[callee];
            }
            if (weight * most < BUDGET) {
                tables += 4;
                through_table(table, 2);
                return cost + weight * most;
            }
        }
        break;
    case 7: { /* switch */
        if (tables >= TABLES_END) break;
        uint64_t *table = tables;
        unsigned char *ends[4];
        tables += 4;
        through_table(table, 4);
        for (int i = 0; i < 4; i++) {
            table[i] = (uint64_t)at;
            cost += block(depth, weight) / 2;
            ends[i] = jump();
        }
        for (int i = 0; i < 4; i++) land(ends[i]);
        return cost;
    }
    case 8: /* an access to the page that may be away */
        if (!(forbidden >> 30 & 1) && one_in(2)) {
            encode(one_in(2) ? 0x8a : 0x00, width(), any(), (place){RBP, -1, 0, 8192 - 1024 + (int32_t)draw(64)}, 0);
            if (weight < 300 && one_in(2)) system_call_protecting();
        }
        break;
    default: break;
    }
    instruction();
    return cost;
}

static long block(int depth, long weight) {
    static int nesting;
    long cost = 0;
    for (int i = 1 + (int)draw(4); i-- > 0 && cost < BUDGET;) {
        if (nesting++ < 6) cost += statement(depth, weight);
        nesting--;
        for (int k = (int)draw(4); k-- > 0; cost += weight) instruction();
    }
    return cost;
}

static void make(void) {
    at = CODE;
    tables = (uint64_t *)(DATA + 3 * 4096);
    for (function = 0; function < FUNCTIONS; function++) {
        functions[function] = at;
        /* A callee keeps its caller's loop counters. */
        for (int r = R13; r <= R15; r++) { byte(0x41); byte(0x50u + (unsigned)(r & 7)); }
        spent[function] = 8;
        do spent[function] += block(0, 1);
        while (function == FUNCTIONS - 1 && spent[function] < BUDGET / 2 && at < CODE + CODE_SIZE / 2);
        for (int r = R15; r >= R13; r--) { byte(0x41); byte(0x58u + (unsigned)(r & 7)); }
        byte(0xc3);
    }
}

static void on_fault(int signal, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    if (signal == SIGFPE) {
        divisions++;
        registers[REG_RIP] += 3;
        return;
    }
    unsigned char *address = (unsigned char *)info->si_addr;
    if (address < TRAP || address >= TRAP + 4096) _Exit(98);
    traps++;
    mprotect(TRAP, 4096, PROT_READ | PROT_WRITE);
}

/* Runs the last function with registers from memory; leaves registers and flags there. */
static struct {
    uint64_t r[16], flags, rsp;
} state __attribute__((used));
extern void run(void);
__asm__(
    ".text\nrun: push %rbx\n push %rbp\n push %r12\n push %r13\n push %r14\n push %r15\n"
    " mov %rsp, 136+state(%rip)\n lea state(%rip), %r15\n"
    " movq (%r15), %rax\n movq 8(%r15), %rcx\n movq 16(%r15), %rdx\n movq 24(%r15), %rbx\n movq 40(%r15), %rbp\n"
    " movq 48(%r15), %rsi\n movq 56(%r15), %rdi\n movq 64(%r15), %r8\n movq 72(%r15), %r9\n movq 80(%r15), %r10\n"
    " movq 88(%r15), %r11\n movq 96(%r15), %r12\n movq 32(%r15), %rsp\n push 128(%r15)\n popfq\n"
    " call *120(%r15)\n"
    " mov %rax, state(%rip)\n pushfq\n popq 128+state(%rip)\n mov %rcx, 8+state(%rip)\n mov %rdx, 16+state(%rip)\n"
    " mov %rbx, 24+state(%rip)\n mov %rbp, 40+state(%rip)\n mov %rsi, 48+state(%rip)\n mov %rdi, 56+state(%rip)\n"
    " mov %r8, 64+state(%rip)\n mov %r9, 72+state(%rip)\n mov %r10, 80+state(%rip)\n mov %r11, 88+state(%rip)\n"
    " mov %r12, 96+state(%rip)\n mov %rsp, 32+state(%rip)\n mov 136+state(%rip), %rsp\n"
    " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbp\n pop %rbx\n ret\n");

int main(int argc, char **argv) {
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    long programs = argc > 2 ? atol(argv[2]) : 3;
    forbidden = argc > 3 ? (unsigned)strtoul(argv[3], NULL, 0) : 0;
    int fixed = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, rw = PROT_READ | PROT_WRITE;
    CHECK(mmap(CODE, CODE_SIZE, rw, fixed, -1, 0) == CODE);
    CHECK(mmap(DATA, DATA_SIZE, rw, fixed, -1, 0) == DATA);
    CHECK(mmap(STACK, STACK_SIZE, rw, fixed, -1, 0) == STACK);
    static unsigned char alternate[1 << 16];
    stack_t stack = {.ss_sp = alternate, .ss_size = sizeof alternate};
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    CHECK(sigaltstack(&stack, NULL) == 0);
    CHECK(sigaction(SIGFPE, &action, NULL) == 0 && sigaction(SIGSEGV, &action, NULL) == 0);
    for (long p = 0; p < programs; p++) {
        seed = (first * 1000 + (uint64_t)p + 1) * 0x9e3779b97f4a7c15;
        CHECK(mprotect(CODE, CODE_SIZE, rw) == 0 && mprotect(TRAP, 4096, rw) == 0);
        memset(DATA, 0, DATA_SIZE);
        memset(STACK, 0, STACK_SIZE);
        make();
        CHECK(at < CODE + CODE_SIZE);
        CHECK(mprotect(CODE, CODE_SIZE, PROT_READ | PROT_EXEC) == 0);
        for (int i = 0; i < 1024; i++) DATA[i] = (unsigned char)next_random(&seed);
        uint64_t sum = 1;
        divisions = traps = 0;
        for (int round = 0; round < 3; round++) {
            for (int i = 0; i < 16; i++) state.r[i] = next_random(&seed) >> draw(60);
            /* Accesses have displacements of up to 1024 around the base. */
            state.r[RBP] = (uint64_t)(DATA + 1024);
            state.r[RSP] = (uint64_t)(STACK + STACK_SIZE - 256);
            state.r[R15] = (uint64_t)functions[FUNCTIONS - 1];
            state.flags = 0x202;
            run();
            for (int i = 0; i < 13; i++) sum = mix(sum, state.r[i]);
            sum = mix(sum, state.flags);
            mprotect(TRAP, 4096, rw);
            sum = mix_bytes(sum, DATA, 3 * 4096);
        }
        printf("%ld: %ld bytes, %016lx, divisions %d, traps %d\n", p, (long)(at - CODE), sum, divisions, traps);
    }
    return 0;
}
