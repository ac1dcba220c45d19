/* x87: long double arithmetic, the register stack, control and status words, transcendental
 * functions, fcmov, fnsave.
 *
 * Hard for a translator: the stack's top is state, and the instruction pointer that fnsave
 * stores is the guest's. */
#include "guest.h"

static uint64_t sum = 1;
static void take(const char *name, long double v) {
    unsigned char bytes[16] = {0};
    memcpy(bytes, &v, 10);
    sum = mix_bytes(sum, bytes, 10);
    printf("%-8s %La\n", name, v);
}

#define UNARY(text, in) ({ long double r_; __asm__ volatile(text : "=t"(r_) : "0"((long double)(in)) : "memory"); r_; })
#define BINARY(text, x, y) \
    ({ long double r_; __asm__ volatile(text : "=t"(r_) : "0"((long double)(x)), "u"((long double)(y)) : "st(1)"); r_; })

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 1500);
    take("fsin", UNARY("fsin", 0.5));
    take("fcos", UNARY("fcos", 2.0));
    take("fsqrt", UNARY("fsqrt", 2.0));
    take("f2xm1", UNARY("f2xm1", 0.3));
    take("frndint", UNARY("frndint", 2.5));
    take("fchs", UNARY("fchs", -0.0));
    take("fpatan", BINARY("fpatan", 1.0, 3.0));
    take("fyl2x", BINARY("fyl2x", 7.0, 2.0));
    long double rest;
    __asm__ volatile("fprem" : "=t"(rest) : "0"(17.3L), "u"(5.0L));
    take("fprem", rest);
    __asm__ volatile("fscale" : "=t"(rest) : "0"(1.25L), "u"(-70.0L));
    take("fscale", rest);
    long double third = 1.0L / 3;
    take("third", third);
    unsigned short control, changed;
    __asm__ volatile("fnstcw %0" : "=m"(control));
    printf("control word %04x\n", control);
    static const unsigned short precision[] = {0x000, 0x200, 0x300};
    for (int p = 0; p < 3; p++)
        for (int r = 0; r < 4; r++) {
            changed = (unsigned short)((control & ~0xf00) | precision[p] | r << 10);
            long double q, one = 1, three = 3;
            int integer;
            __asm__ volatile("fldcw %[c]\n\tfldt %[one]\n\tfldt %[three]\n\tfdivrp\n\tfstpt %[q]\n\tfldl %[h]\n\tfistpl %[i]\n\tfldcw %[old]"
                             : [q] "=m"(q), [i] "=m"(integer)
                             : [c] "m"(changed), [old] "m"(control), [one] "m"(one), [three] "m"(three), [h] "m"((double){-2.5}) : "memory");
            printf("precision %d rounding %d: %La %d\n", p, r, q, integer);
        }
    unsigned short status;
    for (int i = 0; i < 4; i++) {
        static const long double pairs[4][2] = {{1, 2}, {2, 1}, {2, 2}, {__builtin_nanl(""), 1}};
        uint64_t flags;
        __asm__ volatile("fnclex\n\tfucom\n\tfnstsw %%ax" : "=a"(status) : "t"(pairs[i][0]), "u"(pairs[i][1]));
        __asm__ volatile("fucomi %%st(1), %%st\n\tpushfq\n\tpopq %0" : "=r"(flags) : "t"(pairs[i][0]), "u"(pairs[i][1]) : "cc", "memory");
        printf("compare %04x %02lx\n", status & 0x4500, flags & 0x45);
    }
    __asm__ volatile("fnclex\n\tfldz\n\tfld1\n\tfdivp\n\tfstp %%st(0)\n\tfnstsw %0\n\tfnclex" : "=a"(status));
    printf("division by zero: status %02x\n", status & 0x3f);
    /* Eight deep, rotated and exchanged. */
    double out[8];
    __asm__ volatile(
        "fld1\n\tfldl2t\n\tfldl2e\n\tfldpi\n\tfldlg2\n\tfldln2\n\tfldz\n\tfld1\n\t"
        "fxch %%st(5)\n\tfadd %%st(3), %%st\n\tfmul %%st, %%st(2)\n\tfincstp\n\tfdecstp\n\t"
        "fstpl 0(%0)\n\tfstpl 8(%0)\n\tfstpl 16(%0)\n\tfstpl 24(%0)\n\tfstpl 32(%0)\n\tfstpl 40(%0)\n\tfstpl 48(%0)\n\tfstpl 56(%0)"
        : : "r"(out) : "memory");
    for (int i = 0; i < 8; i++) printf("%a ", out[i]);
    printf("\n");
    unsigned char area[108];
    memset(area, 0, sizeof area);
    __asm__ volatile("fninit\n\tfld1\n\tfldpi\n\tfnsave %0\n\tfrstor %0\n\tfstp %%st(0)\n\tfstp %%st(0)\n\tfldcw %1"
                     : "+m"(area) : "m"(control));
    printf("fnsave tag %02x%02x status %02x%02x st0 %016lx\n", area[9], area[8], area[5], area[4], *(uint64_t *)(area + 28));
    __asm__ volatile("fildl %1\n\tfbstp %0" : "=m"(area) : "m"((int){-123456789}));
    printf("bcd %02x%02x%02x%02x%02x sign %02x\n", area[4], area[3], area[2], area[1], area[0], area[9]);
    long double x = 0.1L, total = 0;
    for (long i = 1; i <= n; i++) {
        x = x * 3.9L * (1 - x);
        total += x / (long double)i;
        if (x < 0.2L) total -= (long double)(i % 7);
    }
    take("loop", total);
    printf("sum %016lx\n", sum);
    return 0;
}
