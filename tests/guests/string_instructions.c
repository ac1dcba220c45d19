/* movs, stos, lods, scas, cmps at every width, with and without rep, in both directions,
 * overlapping, with count 0.
 *
 * Hard for a translator: one instruction is a loop whose copies may overlap. */
#include "guest.h"

static unsigned char buffer[512], other[512];
static uint64_t sum = 1;

static void fill(void) {
    for (int i = 0; i < 512; i++) {
        buffer[i] = (unsigned char)(i * 7 + (i >> 3));
        other[i] = (unsigned char)(i < 300 ? i * 7 + (i >> 3) : i);
    }
}

/* Runs `text` with the registers given and mixes everything it leaves. */
#define RUN(text, di, si, count, ax)                                                                          \
    do {                                                                                                      \
        fill();                                                                                               \
        uint64_t rdi = (uint64_t)(di), rsi = (uint64_t)(si), rcx = (uint64_t)(count), rax = (ax), flags;      \
        __asm__ volatile("cmp $5, %%rcx\n\t" text "\n\tpushfq\n\tpopq %[f]\n\tcld"                            \
                         : "+D"(rdi), "+S"(rsi), "+c"(rcx), "+a"(rax), [f] "=&r"(flags) : : "cc", "memory");  \
        sum = mix(mix_bytes(sum, buffer, 512), flags & 0xcd5);                                                \
        sum = mix(mix(mix(mix(sum, rdi - (uint64_t)(di)), rsi - (uint64_t)(si)), rcx), rax);                  \
    } while (0)

#define ALL_WIDTHS(prefix, op, di, si, count, ax)                                     \
    do {                                                                              \
        RUN(prefix op "b", di, si, count, ax);                                        \
        RUN(prefix op "w", di, si, count, ax);                                        \
        RUN(prefix op "l", di, si, count, ax);                                        \
        RUN(prefix op "q", di, si, count, ax);                                        \
        RUN("std\n\t" prefix op "b", (di) + 200, (si) + 200, count, ax);              \
        RUN("std\n\t" prefix op "w", (di) + 200, (si) + 200, count, ax);              \
        RUN("std\n\t" prefix op "l", (di) + 200, (si) + 200, count, ax);              \
        RUN("std\n\t" prefix op "q", (di) + 200, (si) + 200, count, ax);              \
    } while (0)

static void show(const char *name) { printf("%-10s %016lx\n", name, sum); }

__attribute__((noinline)) static size_t length(const char *s) {
    size_t count = (size_t)-1;
    __asm__ volatile("repne scasb" : "+D"(s), "+c"(count) : "a"(0) : "cc", "memory");
    return ~count - 1;
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 100);
    static const int counts[] = {0, 1, 2, 3, 8, 17, 24};
    for (int i = 0; i < 7; i++) {
        int c = counts[i];
        ALL_WIDTHS("rep ", "movs", buffer + 20, other + 10, c, 0);
        ALL_WIDTHS("rep ", "movs", buffer + 21, buffer + 20, c, 0); /* overlap: propagates the first bytes */
        ALL_WIDTHS("rep ", "movs", buffer + 20, buffer + 23, c, 0);
        ALL_WIDTHS("rep ", "stos", buffer + 20, 0, c, 0x1122334455667788);
        ALL_WIDTHS("rep ", "lods", 0, buffer + 20, c, 1);
        ALL_WIDTHS("repne ", "scas", buffer + 20, 0, c, buffer[20 + 5]);
        ALL_WIDTHS("repe ", "scas", buffer + 20, 0, c, buffer[20]);
        ALL_WIDTHS("repe ", "cmps", buffer + 20, other + 20, c, 0);
        ALL_WIDTHS("repe ", "cmps", buffer + 290, other + 290, c, 0);
        ALL_WIDTHS("repne ", "cmps", buffer + 20, other + 50, c, 0);
    }
    show("rep");
    ALL_WIDTHS("", "movs", buffer + 20, other + 10, 5, 0);
    ALL_WIDTHS("", "stos", buffer + 20, 0, 5, 0x8877665544332211);
    ALL_WIDTHS("", "lods", 0, buffer + 33, 5, 0xffffffffffffffff);
    ALL_WIDTHS("", "scas", buffer + 20, 0, 5, 0x41);
    ALL_WIDTHS("", "cmps", buffer + 20, other + 21, 5, 0);
    show("single");
    CHECK(length("") == 0 && length("twelve chars") == 12);
    /* 32-bit addresses: only ecx counts, and the count register is cleared to 32 bits. */
    RUN("movl $3, %%ecx\n\tlock addl $0, (%%rdi)\n\trep stosb", buffer + 40, 0, 0x700000000, 0x5a);
    show("mixed");
    /* A copy loop in a hot loop, counts that vary. */
    fill();
    for (long i = 0; i < n; i++) {
        void *to = buffer + (i * 13) % 200;
        const void *from = other + (i * 29) % 200;
        size_t count = (size_t)(i * 7) % 90;
        __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(count) : : "memory");
        CHECK(count == 0);
        sum = mix(sum, (uint64_t)buffer[i % 512]);
    }
    show("hot");
    return 0;
}
