/* `enter` with a 16-bit operand at several levels, `enter` whose frame cannot be written, and
 * `smsw`, `sldt`, `str` into registers of each size, whose results must be the machine's.
 *
 * Hard for a translator: under UMIP the kernel emulates the last three, and the upper halves
 * differ. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include "guest.h"

static sigjmp_buf back;
static void handler(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)info, (void)context;
    siglongjmp(back, 1);
}

#define ENTER(bytes, level)                                                                                       \
    __asm__ volatile("mov %%rsp, %%r12; mov %%rbp, %%r13; mov %2, %%rsp; mov %3, %%rbp; " bytes ", " #level       \
                     "; mov %%rsp, %0; mov %%rbp, %1; mov %%r12, %%rsp; mov %%r13, %%rbp"                         \
                     : "=&r"(rsp), "=&r"(rbp)                                                                     \
                     : "r"(sp), "r"(frame)                                                                        \
                     : "r12", "r13", "memory")

#define INTO(instruction)                                                                                \
    do {                                                                                                 \
        uint64_t value = 0x1122334455667788;                                                             \
        if (!sigsetjmp(back, 1)) {                                                                       \
            __asm__ volatile(instruction : "+a"(value));                                                 \
            printf("%s %016llx\n", instruction, (unsigned long long)value);                              \
        } else {                                                                                         \
            printf("%s faults\n", instruction);                                                          \
        }                                                                                                \
    } while (0)

int main(void) {
    static char alternate[65536];
    stack_t stack = {.ss_sp = alternate, .ss_size = sizeof alternate};
    sigaltstack(&stack, 0);
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaction(SIGSEGV, &action, 0);
    sigaction(SIGILL, &action, 0);
    uint8_t *memory = mmap(0, 3 * 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mprotect(memory + 8192, 4096, PROT_READ | PROT_WRITE) == 0);
    uint64_t base = (uint64_t)memory + 8192, rsp, rbp;
    for (int round = 0; round < 30; round++) {
        uint64_t sp = base + 2048, frame = sp + 512, sum = 0;
        for (int level = 0; level < 4; level++) {
            memset(memory + 8192, 0x11 + round, 4096);
            for (int i = 0; i < 64; i++) memory[8192 + 2048 + 400 + i * 2] = i;
            switch (level) {
            case 0: ENTER(".byte 0x66, 0xc8, 0x20, 0x00", 0); break;
            case 1: ENTER(".byte 0x66, 0xc8, 0x21, 0x00", 1); break;
            case 2: ENTER(".byte 0x66, 0xc8, 0x22, 0x00", 2); break;
            default: ENTER(".byte 0x66, 0xc8, 0x23, 0x00", 31);
            }
            for (int at = 1; at <= 40; at++) {
                uint16_t word;
                memcpy(&word, (void *)(sp - 2 * at), 2);
                /* A value that depends on the address of the memory is printed relative to it. */
                if (word == (uint16_t)frame) word = 0xbbbb;
                if (word == (uint16_t)(sp - 2)) word = 0xaaaa;
                sum = mix(sum, word);
            }
            sum = mix(mix(sum, rsp - sp), rbp - sp);
        }
        if (round % 10 == 0) printf("words %016llx\n", (unsigned long long)sum);
        uint64_t low = base + 256;
        for (int wide = 0; wide < 2; wide++) {
            sp = low, frame = low;
            if (!sigsetjmp(back, 1)) {
                if (wide) ENTER(".byte 0xc8, 0x00, 0x10", 0);
                else ENTER(".byte 0x66, 0xc8, 0x00, 0x10", 0);
                printf("no fault\n");
            } else if (round % 10 == 0) {
                printf("fault\n");
            }
        }
    }
    INTO("smsw %k0");
    INTO("smsw %q0");
    INTO("smsw %w0");
    INTO("sldt %k0");
    INTO("rex64 sldt %k0");
    INTO("sldt %w0");
    INTO("str %k0");
    INTO("rex64 str %k0");
    INTO("str %w0");
    return 0;
}
