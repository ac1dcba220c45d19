/* Operands relative to GS, of every form, executed often: their results, the state that a fault
 * reports, and a base that changes.
 *
 * Hard for a translator: it may use GS for its own data and must then add the guest's base
 * itself. */
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>
#include "guest.h"

static void set_gs(uint64_t base) { CHECK(syscall(SYS_arch_prctl, ARCH_SET_GS, base) == 0); }

/* Once more with other numbers: loads, changes in memory, stores, with a base, an index, both
 * and neither. */
static uint64_t forms(uint64_t i, char *data) {
    uint64_t a = i * 8 % 512, b = 3, c = ~i, sum = i;
    __asm__ volatile("mov %%gs:(%1), %%rax; add %%rax, %0\n"
                     "mov %%gs:16(%1,%2,8), %%eax; add %%rax, %0\n"
                     "movzbl %%gs:-1(%1,%2), %%eax; add %%rax, %0\n"
                     "mov %%gs:0x40, %%rax; add %%rax, %0\n"
                     "mov %%gs:0x40(,%2,4), %%rax; add %%rax, %0\n"
                     "mov %3, %%gs:0x700(%1)\n"
                     "movb $7, %%gs:0x300(%2)\n"
                     "addq $5, %%gs:0x708(%1)\n"
                     ".byte 0x65; lea 9(%1,%2,2), %%rax; add %%rax, %0\n"
                     "imul $3, %%gs:0x80(%2), %%rax; add %%rax, %0\n"
                     "shll %%gs:0x304(%2)\n"
                     "sbb %%gs:0x20(%1), %0\n"
                     : "+r"(sum)
                     : "r"(a), "r"(b), "r"(c)
                     : "rax", "memory", "cc");
    return mix_bytes(sum, data + 0x300, 64);
}

static uint64_t registers(uint64_t i, uint64_t sum) {
    uint64_t out, flags;
    /* The stack as a base, from which the base of GS is as far as the data is. */
    uint64_t stacked;
    __asm__ volatile("mov %%rsp, %%rcx; neg %%rcx; mov %%gs:8(%%rsp,%%rcx), %0; add %%gs:16(%%rsp,%%rcx), %0"
                     : "=&r"(stacked)
                     :
                     : "rcx", "memory", "cc");
    sum = mix(sum, stacked);
    /* Bases and indices with a meaning of their own; high bytes; the stack; what uses many
     * registers; flags that pass by. */
    __asm__ volatile("push %%rbx; push %%r12; push %%r13\n"
                     "mov %2, %%r12; mov %2, %%r13; mov %2, %%rbx\n"
                     "mov %%gs:(%%r12), %%rax; add %%gs:(%%r13), %%rax; xor %%gs:8(%%r12,%%r13), %%rax\n"
                     "mov %%rax, %%rcx; mov %%ah, %%gs:0x500(%%rbx); mov %%gs:0x500(%%rbx), %%ch; add %%rcx, %0\n"
                     "mov %2, %%rcx; lock xadd %%rax, %%gs:0x510(%%rcx); add %%rax, %0\n"
                     "push %%gs:(%%rcx); pop %%gs:0x520; push %%gs:0x528; add (%%rsp), %0; pop %%rax\n"
                     "mov %2, %%rsi; mov $1, %%ebx; mov $2, %%ecx; mov %%gs:0x600(%%rsi), %%rax; mov %%gs:0x608(%%rsi), %%rdx\n"
                     "lock cmpxchg16b %%gs:0x600(%%rsi); setz %%al; movzbl %%al, %%eax; add %%rax, %0\n"
                     "cmp $1, %0; mov %%gs:(%%rsi), %%rax; mov %%rax, %%gs:0x610; pushf; pop %1\n"
                     "pop %%r13; pop %%r12; pop %%rbx\n"
                     : "+r"(sum), "=&r"(flags)
                     : "r"((i & 3) * 16)
                     : "rax", "rcx", "rdx", "rsi", "memory", "cc");
    __asm__ volatile("movdqu %%gs:(%1), %%xmm0; paddq %%gs:0x20, %%xmm0; movq %%xmm0, %0; movdqu %%xmm0, %%gs:0x620(%1)\n"
                     "addr32 mov %%gs:(%k1), %%rax; add %%rax, %0; xor %%eax, %%eax; xlatb %%gs:(%%rbx); add %%rax, %0\n"
                     : "=&r"(out)
                     : "r"((i & 3) * 8), "b"(5L)
                     : "rax", "xmm0", "memory", "cc");
    return mix(mix(sum, flags & 0xcd5), out);
}

static uint64_t called;
static void __attribute__((used)) callee(void) { called++; }

static volatile uint64_t faults;
static uint64_t seen, pages;

static void on_fault(int signal, siginfo_t *info, void *context) {
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    seen = mix(mix(seen, (uint64_t)signal), (uint64_t)info->si_code);
    uint64_t address = (uint64_t)info->si_addr;
    seen = mix(seen, address ? address - pages : 1);
    static const int all[] = {REG_RBX, REG_RCX, REG_RDX, REG_RSI, REG_R8, REG_R9, REG_R10, REG_R11};
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++) seen = mix(seen, (uint64_t)r[all[i]]);
    seen = mix(mix(seen, (uint64_t)r[REG_EFL] & 0xcd5), (uint64_t)r[REG_TRAPNO] << 8 | (uint64_t)r[REG_ERR]);
    faults++;
    r[REG_RCX] = 8;
    r[REG_RDX] = 0;
}

/* rcx and rdx lead behind what may be read or nowhere at all; the handler makes them good, and
 * the access is done again. */
static uint64_t faulting(uint64_t i) {
    uint64_t sum = i, bad = i % 50 == 7 ? 2048 : i % 50 == 13 ? 0x4141414141410000 : 0;
    __asm__ volatile("mov $0x11, %%r8; mov $0x22, %%r9; mov $0x33, %%r10; mov $0x44, %%r11; mov $0x55, %%esi; cmp %1, %%r8\n"
                     "add %%gs:4(%%rcx,%%rdx,2), %%r8; mov %%r8, %%gs:0x100(%%rcx,%%rdx,2); add %%r8, %0\n"
                     : "+a"(sum)
                     : "b"(i & 31), "c"(8L), "d"(bad)
                     : "rsi", "r8", "r9", "r10", "r11", "memory", "cc");
    return sum;
}

int main(int argc, char **argv) {
    long rounds = iterations(argc, argv, 3000);
    char *data = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(data != MAP_FAILED && mprotect(data + 4096, 4096, PROT_NONE) == 0);
    pages = (uint64_t)data;
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    uint64_t sum = 0;
    for (int i = 0; i < 4096; i++) data[i] = (char)(i * 7 + i / 256);
    set_gs(pages);
    for (long i = 0; i < rounds; i++) sum = mix(sum, forms((uint64_t)i, data));
    printf("forms %lx\n", (unsigned long)sum);
    for (long i = 0; i < rounds; i++) sum = registers((uint64_t)i, sum);
    printf("registers %lx\n", (unsigned long)sum);
    *(uint64_t *)(data + 0x900) = (uint64_t)callee;
    for (long i = 0; i < rounds; i++)
        __asm__ volatile("sub $128, %%rsp; call *%%gs:0x900; call *%%gs:0x8f8(%0); add $128, %%rsp" ::"r"(8L)
                         : "rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11", "memory", "cc");
    printf("calls %lu\n", (unsigned long)called);
    for (long i = 0; i < rounds; i++) sum = mix(sum, faulting((uint64_t)i));
    printf("faults %lu: %lx %lx\n", (unsigned long)faults, (unsigned long)seen, (unsigned long)sum);
    for (long i = 0; i < rounds; i++) {
        if (i % 8 == 0) set_gs(pages + (uint64_t)(i % 1024));
        uint64_t value;
        __asm__ volatile("mov %%gs:8, %0" : "=r"(value));
        sum = mix(sum, value);
    }
    printf("bases %lx\n", (unsigned long)sum);
    return 0;
}
