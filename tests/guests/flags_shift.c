/* Shifts, rotates and double shifts: every width, every count 0 to 70, by cl and by immediate,
 * with the carry in both states.
 *
 * Hard for a translator: a shift by a masked count of zero leaves all flags as they were. */
#include "guest.h"

static const uint64_t operands[] = {0, 1, 0x80, 0x8000, 0x80000000, 0x8000000000000000, 0xffffffffffffffff,
                                    0x123456789abcdef0, 0xa5a5a5a55a5a5a5a};
enum { COUNT = sizeof operands / sizeof *operands };

#define SHIFT(op, carry, reg)                                                                                     \
    do {                                                                                                          \
        uint64_t sum = 1;                                                                                         \
        for (int i = 0; i < COUNT; i++)                                                                           \
            for (int count = 0; count <= 70; count++) {                                                           \
                uint64_t x = operands[i], flags;                                                                  \
                __asm__ volatile("cmp %%edi, %%edi\n\t" carry "\n\t" op " %%cl, " reg "\n\tpushfq\n\tpopq %[flags]" \
                                 : [x] "+&r"(x), [flags] "=&r"(flags) : "c"(count), "D"(i) : "cc", "memory");     \
                sum = mix(mix(sum, x), flags & 0x8d5);                                                            \
            }                                                                                                     \
        printf("%-5s %s %-5s %016lx\n", op, carry, reg, sum);                                                     \
    } while (0)
#define SHIFTS(op)                                                                                    \
    SHIFT(op "b", "clc", "%b[x]"); SHIFT(op "b", "stc", "%b[x]"); SHIFT(op "w", "clc", "%w[x]");      \
    SHIFT(op "w", "stc", "%w[x]"); SHIFT(op "l", "clc", "%k[x]"); SHIFT(op "l", "stc", "%k[x]");      \
    SHIFT(op "q", "clc", "%q[x]"); SHIFT(op "q", "stc", "%q[x]")

#define IMMEDIATE(op, count, reg)                                                                          \
    do {                                                                                                   \
        for (int i = 0; i < COUNT; i++) {                                                                  \
            uint64_t x = operands[i], flags;                                                               \
            __asm__ volatile("cmp $1, %%edi\n\t" op " $" #count ", " reg "\n\tpushfq\n\tpopq %[flags]"     \
                             : [x] "+&r"(x), [flags] "=&r"(flags) : "D"(i) : "cc", "memory");              \
            sum = mix(mix(sum, x), flags & 0x8d5);                                                         \
        }                                                                                                  \
    } while (0)
#define IMMEDIATES(op, reg)                                                                                     \
    IMMEDIATE(op, 0, reg); IMMEDIATE(op, 1, reg); IMMEDIATE(op, 2, reg); IMMEDIATE(op, 7, reg);                 \
    IMMEDIATE(op, 8, reg); IMMEDIATE(op, 9, reg); IMMEDIATE(op, 15, reg); IMMEDIATE(op, 16, reg);               \
    IMMEDIATE(op, 17, reg); IMMEDIATE(op, 31, reg); IMMEDIATE(op, 32, reg); IMMEDIATE(op, 33, reg);             \
    IMMEDIATE(op, 63, reg); IMMEDIATE(op, 64, reg); IMMEDIATE(op, 255, reg)

#define DOUBLE(op, limit, x_reg, y_reg)                                                                           \
    do {                                                                                                          \
        uint64_t sum = 1;                                                                                         \
        for (int i = 0; i < COUNT; i++)                                                                           \
            for (int j = 0; j < COUNT; j++)                                                                       \
                for (int count = 0; count <= limit; count++) {                                                    \
                    uint64_t x = operands[i], y = operands[j], flags;                                             \
                    __asm__ volatile("cmp $3, %%cl\n\t" op " %%cl, " y_reg ", " x_reg "\n\tpushfq\n\tpopq %[flags]" \
                                     : [x] "+&r"(x), [flags] "=&r"(flags) : [y] "r"(y), "c"(count) : "cc", "memory"); \
                    sum = mix(mix(sum, x), flags & 0x8d5);                                                        \
                }                                                                                                 \
        printf("%-6s %016lx\n", op, sum);                                                                         \
    } while (0)

int main(void) {
    SHIFTS("shl");
    SHIFTS("shr");
    SHIFTS("sar");
    SHIFTS("rol");
    SHIFTS("ror");
    SHIFTS("rcl");
    SHIFTS("rcr");
    uint64_t sum = 1;
#define ALL(op) IMMEDIATES(op "b", "%b[x]"); IMMEDIATES(op "w", "%w[x]"); IMMEDIATES(op "l", "%k[x]"); IMMEDIATES(op "q", "%q[x]")
    ALL("shl");
    ALL("shr");
    ALL("sar");
    ALL("rol");
    ALL("ror");
    ALL("rcl");
    ALL("rcr");
    printf("immediates %016lx\n", sum);
    DOUBLE("shldw", 16, "%w[x]", "%w[y]");
    DOUBLE("shldl", 34, "%k[x]", "%k[y]");
    DOUBLE("shldq", 66, "%q[x]", "%q[y]");
    DOUBLE("shrdw", 16, "%w[x]", "%w[y]");
    DOUBLE("shrdl", 34, "%k[x]", "%k[y]");
    DOUBLE("shrdq", 66, "%q[x]", "%q[y]");
    /* In memory, where a zero count still reads but changes nothing. */
    static uint32_t cell[4] = {0x89abcdef, 1, 2, 3};
    for (int count = 0; count < 40; count++) {
        __asm__ volatile("shll %%cl, %0\n\trorw %%cl, %1\n\tsarb %%cl, %2\n\trcll %%cl, %3"
                         : "+m"(cell[0]), "+m"(cell[1]), "+m"(cell[2]), "+m"(cell[3]) : "c"(count) : "cc");
        cell[0] += (unsigned)count * 77777;
        cell[2] |= 0x80;
    }
    printf("memory %08x %08x %08x %08x\n", cell[0], cell[1], cell[2], cell[3]);
    return 0;
}
