/* String instructions that fault in the middle, at every element and in both directions,
 * repeated until they are hot. The handler must find the progress in rsi, rdi and rcx, and the
 * flags, which depend on the processor once an element has been compared.
 *
 * Hard for a translator: one instruction has partial effects, unlike all others. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include "guest.h"

enum { PAGE = 4096, COUNT = 100 };

static sigjmp_buf back;
static volatile uint64_t rsi, rdi, rcx, rax, flags;

static void on_fault(int signo, siginfo_t *info, void *context) {
    (void)signo, (void)info;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    rsi = (uint64_t)registers[REG_RSI], rdi = (uint64_t)registers[REG_RDI];
    rcx = (uint64_t)registers[REG_RCX], rax = (uint64_t)registers[REG_RAX];
    flags = (uint64_t)registers[REG_EFL] & 0xed5; /* not RF, which is set after a fault */
    siglongjmp(back, 1);
}

#define INSTRUCTIONS(X)                                                                                             \
    X(cmpsb, "repe cmpsb", 1) X(cmpsw, "repe cmpsw", 2) X(cmpsl, "repe cmpsl", 4) X(cmpsq, "repe cmpsq", 8)         \
    X(scasb, "repe scasb", 1) X(scasw, "repe scasw", 2) X(scasl, "repe scasl", 4) X(scasq, "repe scasq", 8)         \
    X(until_cmpsb, "repne cmpsb", 1) X(until_scasb, "repne scasb", 1) X(one_cmpsb, "cmpsb", 1) X(one_scasq, "scasq", 8) \
    X(movsb, "rep movsb", 1) X(movsq, "rep movsq", 8) X(stosb, "rep stosb", 1) X(stosq, "rep stosq", 8)             \
    X(lodsb, "rep lodsb", 1) X(lodsl, "rep lodsl", 4)

/* The comparison in front leaves flags of its own, which popf replaces. */
#define DEFINE(name, instruction, size)                                                             \
    static __attribute__((noinline)) void name(void *from, void *to, uint64_t initially) {          \
        uint64_t count = COUNT, value = 0;                                                          \
        __asm__ volatile("cmp %2, %3; push %4; popf; " instruction "; cld"                          \
                         : "+S"(from), "+D"(to), "+c"(count), "+a"(value)                           \
                         : "r"(initially)                                                           \
                         : "cc", "memory");                                                         \
    }
INSTRUCTIONS(DEFINE)

static const struct {
    const char *name;
    void (*run)(void *, void *, uint64_t);
    int size;
} all[] = {
#define ROW(name, instruction, size) {#name, name, size},
    INSTRUCTIONS(ROW)
};

static __attribute__((noinline)) int faulted(size_t i, void *from, void *to, uint64_t initially) {
    if (sigsetjmp(back, 1) != 0) return 1;
    all[i].run(from, to, initially);
    return 0;
}

int main(int argc, char **argv) {
    long rounds = iterations(argc, argv, 3);
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    /* Pages 1 and 3 are not accessible. */
    char *area = mmap(NULL, 5 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(area != MAP_FAILED && mprotect(area + PAGE, PAGE, PROT_NONE) == 0 && mprotect(area + 3 * PAGE, PAGE, PROT_NONE) == 0);
    static const uint64_t images[] = {0x202, 0xad7, 0x203, 0x242, 0x602, 0xed7};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        uint64_t sum = 1, faults = 0;
        for (long round = 0; round < rounds; round++)
            for (int done = 0; done < 4; done++)
                for (int which = 0; which < 3; which++) /* source, destination or both fault after `done` elements */
                    for (size_t k = 0; k < sizeof images / sizeof *images; k++) {
                        int size = all[i].size, down = (images[k] & 0x400) != 0;
                        memset(area, 0, PAGE), memset(area + 2 * PAGE, 0, PAGE), memset(area + 4 * PAGE, 0, PAGE);
                        int near = down ? (done - 1) * size : -done * size, far = down ? 400 : -400;
                        char *from = area + (down ? 2 : 1) * PAGE + (which == 1 ? far : near);
                        char *to = area + (down ? 4 : 3) * PAGE + (which == 0 ? far : near);
                        /* repne finds no equal byte before the fault. */
                        if (all[i].name[0] == 'u')
                            for (int j = 0; j < done; j++) to[down ? -j : j] = (char)(j + 1);
                        if (faulted(i, from, to, images[k])) {
                            faults++;
                            sum = mix(mix(sum, rsi - (uintptr_t)from), rdi - (uintptr_t)to);
                            sum = mix(mix(mix(sum, rcx), rax), flags);
                        }
                        sum = mix_bytes(sum, area + (down ? 4 * PAGE : 3 * PAGE - 64), 64);
                    }
        printf("%s: %lu faults, %016lx\n", all[i].name, (unsigned long)faults, (unsigned long)sum);
    }
    return 0;
}
