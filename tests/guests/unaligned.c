/* Unaligned accesses of every width, over cache lines and pages, next to a page that must not be
 * touched.
 *
 * Hard for a translator: an access may not be widened, and a fault on the second page must leave
 * the first unchanged. */
#include <sys/mman.h>
#include "guest.h"

enum { PAGE = 4096 };

#define WALK(type, name)                                                                       \
    do {                                                                                       \
        uint64_t sum = 1;                                                                      \
        for (long o = 0; o + (long)sizeof(type) <= span; o++) {                                \
            volatile type *p = (volatile type *)(end - span + o);                              \
            type old = *p;                                                                     \
            *p = (type)(old * 3 + (type)o);                                                    \
            sum = mix(sum, (uint64_t)*p);                                                      \
        }                                                                                      \
        printf("%-6s %016lx\n", name, sum);                                                    \
    } while (0)

typedef uint64_t __attribute__((aligned(1))) u64;
typedef uint32_t __attribute__((aligned(1))) u32;
typedef uint16_t __attribute__((aligned(1))) u16;
typedef double __attribute__((aligned(1))) f64;

int main(int argc, char **argv) {
    long span = iterations(argc, argv, 300);
    char *area = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(area != MAP_FAILED);
    CHECK(mprotect(area + 3 * PAGE, PAGE, PROT_NONE) == 0);
    for (int i = 0; i < 3 * PAGE; i++) area[i] = (char)(i * 31 + 7);
    char *end = area + 3 * PAGE; /* nothing may be read from here on */
    WALK(u64, "u64");
    WALK(u32, "u32");
    WALK(u16, "u16");
    WALK(uint8_t, "u8");
    end = area + 2 * PAGE + 100; /* over the border of two pages */
    WALK(u64, "u64");
    WALK(u16, "u16");
    uint64_t sum = 1;
    for (int o = -40; o <= 40; o++) {
        char *p = area + PAGE + o;
        uint64_t a[2], b;
        __asm__ volatile("movdqu (%1), %%xmm0\n\tpaddb %%xmm0, %%xmm0\n\tmovdqu %%xmm0, %0" : "=m"(a) : "r"(p) : "xmm0");
        __asm__ volatile("lock xaddq %0, (%1)" : "=r"(b) : "r"(p), "0"((uint64_t)o) : "memory", "cc");
        __asm__ volatile("xchgl %k0, 3(%1)" : "+r"(b) : "r"(p) : "memory");
        __asm__ volatile("rorw $3, 1(%0)\n\tnotq 5(%0)\n\tbtsl $9, -1(%0)\n\tpushq 2(%0)\n\tpopq 9(%0)" : : "r"(p) : "memory", "cc");
        sum = mix(mix(mix(sum, a[0]), a[1]), b);
    }
    printf("mixed  %016lx\n", sum);
    /* A stack that is not aligned. */
    uint64_t through;
    __asm__ volatile(
        "mov %%rsp, %%rbx\n\tsub $131, %%rsp\n\tmov $0x1122334455667788, %%rax\n\tpush %%rax\n\tpushw $0x99\n\t"
        "call 1f\n\tjmp 2f\n1: ret\n2: popw %%cx\n\tpop %%rax\n\tmovzwl %%cx, %%ecx\n\tadd %%rcx, %%rax\n\tmov %%rbx, %%rsp"
        : "=&a"(through) : : "rbx", "rcx", "memory", "cc");
    printf("stack  %016lx\n", through);
    printf("whole  %016lx\n", mix_bytes(1, area, 3 * PAGE));
    return 0;
}
