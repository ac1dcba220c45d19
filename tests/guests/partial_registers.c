/* 8- and 16-bit operations, high-byte registers, zero and sign extension, xchg of parts: what is
 * kept and what is cleared.
 *
 * Hard for a translator: a part of a register is not a variable of its own. */
#include "guest.h"

static uint64_t sum = 1;
#define ONE(name, text)                                                                                     \
    do {                                                                                                    \
        uint64_t a = 0x1122334455667788, b = 0x99aabbccddeeff01, c = 0x0123456789abcdef, d = 0xfedcba9876543210; \
        uint64_t flags;                                                                                     \
        for (int i = 0; i < 5; i++) {                                                                       \
            __asm__ volatile("cmp %%rbx, %%rax\n\t" text "\n\tpushfq\n\tpopq %[f]"                          \
                             : "+a"(a), "+b"(b), "+c"(c), "+d"(d), [f] "=&S"(flags) : : "cc", "memory", "r8"); \
            sum = mix(mix(mix(mix(mix(sum, a), b), c), d), flags & 0x8d5);                                  \
        }                                                                                                   \
        printf("%-10s %016lx %016lx %016lx %016lx %03lx\n", name, a, b, c, d, flags & 0x8d5);               \
    } while (0)

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 300);
    ONE("mov", "movb %%ah, %%bl\n\tmovb %%cl, %%dh\n\tmovw %%dx, %%ax\n\tmovl %%ecx, %%ebx");
    ONE("add high", "addb %%ah, %%bh\n\taddb %%ch, %%dl\n\taddb %%al, %%ch\n\tadcb %%dh, %%ah");
    ONE("sub high", "subb %%bh, %%ah\n\tsbbb %%ch, %%bh\n\tcmpb %%dh, %%ch");
    ONE("logic", "xorb %%ah, %%al\n\tandb %%ch, %%bh\n\torb %%dl, %%dh\n\ttestb %%ah, %%bh");
    ONE("inc", "incb %%ah\n\tdecb %%bh\n\tnegb %%ch\n\tnotb %%dh\n\tincw %%cx\n\tdecw %%dx");
    ONE("shift", "shlb $3, %%ah\n\tsarb $1, %%bh\n\trorb $2, %%ch\n\trclb $1, %%dh\n\tshlw $4, %%ax");
    ONE("xchg", "xchgb %%ah, %%al\n\txchgb %%bh, %%cl\n\txchgw %%cx, %%dx\n\txchgl %%eax, %%ebx");
    ONE("movzx", "movzbl %%ah, %%eax\n\tmovzbw %%bh, %%cx\n\tmovzwl %%dx, %%edx\n\tmovzbl %%bl, %%ebx");
    ONE("movsx", "movsbl %%ah, %%eax\n\tmovsbw %%bh, %%cx\n\tmovswq %%dx, %%rdx\n\tmovsbq %%bl, %%rbx");
    ONE("cbw", "cbtw\n\tcwtd\n\txchgw %%cx, %%ax\n\tcwtl\n\tcltd");
    ONE("cdqe", "cltq\n\tcqto\n\tmovslq %%ebx, %%rcx");
    ONE("set", "seta %%ah\n\tsetb %%bh\n\tcmp %%ecx, %%edx\n\tsetl %%cl\n\tsetge %%dh");
    ONE("cmov", "cmovbw %%cx, %%ax\n\tcmoval %%ecx, %%ebx\n\tcmovbl %%edx, %%edx"); /* a false 32-bit cmov still clears */
    ONE("xadd", "xaddb %%ah, %%bl\n\txaddw %%cx, %%dx\n\txaddb %%ch, %%ch");
    ONE("cmpxchg", "cmpxchgb %%bh, %%cl\n\tcmpxchgw %%dx, %%bx\n\tcmpxchgl %%ecx, %%edx");
    ONE("mul", "movb $3, %%bh\n\tmulb %%bh\n\timulw %%cx, %%dx\n\timulb %%dh");
    ONE("lea", "leaw 3(%%rax,%%rbx), %%cx\n\tleal -1(%%rcx,%%rdx,4), %%eax\n\tleal (%%ebx,%%edx,2), %%ebx");
    ONE("lahf", "lahf\n\tincb %%ah\n\tsahf\n\tsetp %%bl");
    ONE("xlat", "lea letters(%%rip), %%rbx\n\tmovzbl %%dl, %%eax\n\tandb $15, %%al\n\txlatb\n\tmovl $77, %%ebx");
    ONE("rex byte", "movzbl %%sil, %%esi\n\tmovb %%al, %%r8b\n\taddb %%bl, %%r8b\n\tmovb %%r8b, %%cl");
    /* The same mixture in a loop that gets hot. */
    uint64_t a = 1, b = 2, c = 3, d = 4;
    for (long i = 0; i < n; i++) {
        __asm__ volatile(
            "addb %%al, %%ah\n\tadcb %%bh, %%cl\n\tmovb %%ah, %%dh\n\tincw %%bx\n\tmovzbl %%ch, %%esi\n\taddq %%rsi, %%rdx\n\t"
            "imull $77, %%ecx, %%ecx\n\trolw $5, %%ax\n\txorb %%dl, %%bh\n\taddq $0x12345, %%rax"
            : "+a"(a), "+b"(b), "+c"(c), "+d"(d) : : "rsi", "cc");
    }
    printf("loop %016lx %016lx %016lx %016lx\n", a, b, c, d);
    printf("sum %016lx\n", sum);
    return 0;
}

__asm__(".data\nletters: .ascii \"dynasour-letters\"\n.text");
