/* Corner cases of old instructions: FS and GS on implicit operands, also where they fault;
 * locked bit strings with 32-bit addresses; loope and loopne with repeat prefixes; xlat above
 * 127; instructions that cross into a page that cannot be executed.
 *
 * Hard for a translator: a decoder reports such prefixes and operands in unusual ways. */
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>
#include "guest.h"

static sigjmp_buf escape;
static volatile struct {
    int signal, code;
    uint64_t address, rip, rcx, rsi, rdi, trap, error;
} fault;

static void on_fault(int signal, siginfo_t *info, void *context) {
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    fault.signal = signal;
    fault.code = info->si_code;
    fault.address = (uint64_t)info->si_addr;
    fault.rip = (uint64_t)regs[REG_RIP];
    fault.rcx = (uint64_t)regs[REG_RCX];
    fault.rsi = (uint64_t)regs[REG_RSI];
    fault.rdi = (uint64_t)regs[REG_RDI];
    fault.trap = (uint64_t)regs[REG_TRAPNO];
    fault.error = (uint64_t)regs[REG_ERR];
    siglongjmp(escape, 1);
}

static void set_gs(const void *base) { CHECK(syscall(SYS_arch_prctl, ARCH_SET_GS, base) == 0); }

static uint64_t strings(char *pages) {
    uint64_t sum = 1;
    set_gs(pages);
    for (int i = 0; i < 4096; i++) pages[i] = (char)(i * 7);
    char out[64] = {0};
    for (uint64_t at = 0; at < 60; at += 13) {
        uint64_t from = at, count = at / 2, value = 0;
        void *to = out;
        __asm__ volatile("rep movsb %%gs:(%%rsi), (%%rdi)" : "+S"(from), "+D"(to), "+c"(count)::"memory");
        sum = mix(mix(sum, from), (uint64_t)((char *)to - out));
        __asm__ volatile("lodsl %%gs:(%%rsi), %%eax" : "+S"(from), "=a"(value));
        sum = mix(sum, value);
        count = 40;
        to = out;
        from = at;
        uint8_t equal;
        __asm__ volatile("repe cmpsb (%%rdi), %%gs:(%%rsi)\n\tsete %0"
                         : "=q"(equal), "+S"(from), "+D"(to), "+c"(count)::"cc", "memory");
        sum = mix(mix(mix(sum, count), from), equal);
    }
    /* The thread's own storage through FS: its first word is its address. */
    uint64_t zero = 0, self, direct;
    __asm__ volatile("lodsq %%fs:(%%rsi), %%rax" : "+S"(zero), "=a"(self));
    __asm__ volatile("mov %%fs:0, %0" : "=r"(direct));
    CHECK(self == direct && zero == 8);
    return mix_bytes(sum, out, sizeof out);
}

static uint64_t masked(char *pages) {
    set_gs(pages + 100);
    uint64_t where = 24;
    __asm__ volatile("pcmpeqd %%xmm0, %%xmm0\n\tmovdqa %%xmm0, %%xmm1\n\tpsrlq $40, %%xmm1\n\t"
                     ".byte 0x65\n\tmaskmovdqu %%xmm1, %%xmm0" ::"D"(where)
                     : "xmm0", "xmm1", "memory");
    return mix_bytes(2, pages + 100, 64);
}

static uint64_t gathered(char *pages) {
    if (!__builtin_cpu_supports("avx2")) return 3;
    uint32_t result[8];
    set_gs(pages);
    __asm__ volatile("vpcmpeqd %%ymm2, %%ymm2, %%ymm2\n\tvpsrld $28, %%ymm2, %%ymm1\n\tvpcmpeqd %%ymm2, %%ymm2, %%ymm2\n\t"
                     "vpgatherdd %%ymm2, %%gs:16(%1,%%ymm1,4), %%ymm0\n\tvmovdqu %%ymm0, %0\n\tvzeroupper"
                     : "=m"(result)
                     : "r"(32L)
                     : "xmm0", "xmm1", "xmm2");
    return mix_bytes(3, result, sizeof result);
}

/* The next page cannot be read: the copy stops there, and its registers tell the progress. */
static uint64_t faulting(char *pages) {
    char out[64];
    set_gs(pages + 2048);
    if (sigsetjmp(escape, 1) == 0) {
        uint64_t from = 2048 - 21, count = 64;
        void *to = out;
        __asm__ volatile("rep movsb %%gs:(%%rsi), (%%rdi)" : "+S"(from), "+D"(to), "+c"(count)::"memory");
        CHECK(0);
    }
    CHECK(fault.signal == SIGSEGV && fault.code == SEGV_ACCERR && fault.address == (uint64_t)pages + 4096);
    CHECK(fault.rcx == 64 - 21 && fault.rsi == 2048 && fault.rdi == (uint64_t)out + 21);
    return mix_bytes(4, out, 21);
}

static uint64_t bit_strings(void) {
    uint32_t *low = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
    CHECK(low != MAP_FAILED);
    uint64_t sum = 5;
    for (int64_t bit = -3000; bit < 3000; bit += 611) {
        uint64_t base = (uint64_t)(low + 1024) | 0xabcd00000000;
        uint8_t old;
        __asm__ volatile("lock btsl %k2, (%k1)\n\tsetc %0" : "=q"(old) : "r"(base), "r"(bit) : "cc", "memory");
        sum = mix(sum, old);
        __asm__ volatile("lock btcq %2, 8(%1)\n\tsetc %0" : "=q"(old) : "r"(low + 1000), "r"(bit) : "cc", "memory");
        sum = mix(sum, old);
        __asm__ volatile("lock btrw %w2, (%1)\n\tsetc %0" : "=q"(old) : "r"(low + 1024), "r"(bit) : "cc", "memory");
        sum = mix(sum, old);
    }
    sum = mix_bytes(sum, low, 8192);
    munmap(low, 8192);
    return sum;
}

/* What a prefix does to loope and loopne depends on the processor, so only its own answer
 * counts. */
#define LOOP(bytes)                                                                                      \
    for (uint64_t zf = 0; zf < 2; zf++)                                                                  \
        for (uint64_t n = 1; n < 4; n++) {                                                               \
            uint64_t count = n, turns = 0;                                                               \
            __asm__ volatile("1: inc %0\n\tcmp $1, %2\n\t.byte " bytes ", 1b - 2f\n2:"                   \
                             : "+r"(turns), "+c"(count)                                                  \
                             : "r"(zf)                                                                   \
                             : "cc");                                                                    \
            sum = mix(mix(sum, turns), count);                                                           \
        }

static uint64_t loops(void) {
    uint64_t sum = 6;
    LOOP("0xe0")
    LOOP("0xf2, 0xe0")
    LOOP("0xf3, 0xe0")
    LOOP("0xe1")
    LOOP("0xf2, 0xe1")
    LOOP("0xf3, 0xe1")
    LOOP("0xf2, 0xf3, 0xe1")
    LOOP("0xf3, 0xf2, 0xe1")
    LOOP("0xf2, 0xe2")
    LOOP("0xf3, 0xe2")
    LOOP("0x67, 0xf3, 0xe1")
    return sum;
}

static uint64_t translated(void) {
    uint8_t table[256];
    uint64_t sum = 7;
    for (int i = 0; i < 256; i++) table[i] = (uint8_t)(i * 91 + 5);
    for (uint64_t i = 0; i < 256; i += 17) {
        uint64_t value = 0x1100 | i;
        __asm__ volatile("xlatb" : "+a"(value) : "b"(table) : "memory");
        CHECK(value == (0x1100u | table[i]));
        sum = mix(sum, value);
    }
    return sum;
}

/* Runs `length` bytes of a long mov that end where the first page ends. */
static void fetch_across(char *pages, int length, int code) {
    static const uint8_t mov[10] = {0x48, 0xb8, 1, 2, 3, 4, 5, 6, 7, 8};
    char *start = pages + 4096 - length;
    memcpy(start, mov, (size_t)length);
    __builtin___clear_cache(start, pages + 4096);
    if (sigsetjmp(escape, 1) == 0) {
        ((void (*)(void))start)();
        CHECK(0);
    }
    CHECK(fault.signal == SIGSEGV && fault.code == code && fault.trap == 14);
    CHECK(fault.address == (uint64_t)pages + 4096 && fault.rip == (uint64_t)start);
    CHECK(fault.error == (code == SEGV_MAPERR ? 0x14 : 0x15));
}

static void fetching(void) {
    char *pages = mmap(NULL, 3 * 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED);
    pages[4096] = 0;
    CHECK(mprotect(pages + 4096, 4096, PROT_READ | PROT_WRITE) == 0);
    for (int length = 0; length < 10; length++) fetch_across(pages, length, SEGV_ACCERR);
    CHECK(munmap(pages + 4096, 4096) == 0);
    for (int length = 0; length < 10; length++) fetch_across(pages, length, SEGV_MAPERR);
    munmap(pages, 4096);
    munmap(pages + 8192, 4096);
}

int main(void) {
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    char *pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED);
    CHECK(mprotect(pages + 4096, 4096, PROT_NONE) == 0);
    for (int round = 0; round < 60; round++) {
        uint64_t sums[] = {strings(pages), masked(pages), gathered(pages), faulting(pages),
                           bit_strings(),  loops(),       translated()};
        if (round % 20 == 0)
            for (size_t i = 0; i < sizeof sums / sizeof sums[0]; i++) printf("%zu %016lx\n", i, (unsigned long)sums[i]);
        if (round % 20 == 0) fetching();
    }
    puts("done");
    return 0;
}
