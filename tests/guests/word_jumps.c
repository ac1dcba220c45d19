/* Jumps through words that may be written at any time, such as those of a procedure linkage
 * table. Each must go to the address in the word at that moment, with all registers and flags
 * unchanged. If the word cannot be read, the jump itself must fault.
 *
 * Hard for a translator: it may compare the word with the target that it knows, but may not
 * assume it. */
#define _GNU_SOURCE
#include <ctype.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include "guest.h"

enum { PAGE = 4096 };

__attribute__((aligned(4096))) uint64_t word[PAGE / 8] = {1};
extern char functions[], jump[];

/* The function n, 16 bytes each: returns n in rdx. Then the jump; and what calls it with rcx and
 * flags that must come through. */
uint64_t come_through(uint64_t rcx, uint64_t *flags);
__asm__(".text\n.balign 16\nfunctions:\n"
        ".set n, 0\n.rept 16\n.balign 16\nmov $n, %edx\nret\n.set n, n + 1\n.endr\n"
        ".balign 16\njump: jmp *word(%rip)\n"
        "come_through:\n"
        "push %rbx\n mov %rsi, %rbx\n mov %rdi, %rcx\n"
        "push (%rbx)\n popf\n call jump\n pushf\n pop (%rbx)\n"
        "cmp %rdi, %rcx\n jne 1f\n mov %rdx, %rax\n pop %rbx\n ret\n"
        "1: mov $-1, %rax\n pop %rbx\n ret\n");

static uint64_t address(int n) { return (uint64_t)(uintptr_t)functions + 16 * (uint64_t)n; }

static void expect(int n, int times) {
    static const uint64_t flags[] = {0x246, 0x2, 0x8d7, 0x893, 0x3};
    for (int i = 0; i < times; i++) {
        uint64_t now = flags[i % 5];
        CHECK(come_through(0x123456789abcdef0 + (uint64_t)i, &now) == (uint64_t)n);
        CHECK((now & 0x8d5) == (flags[i % 5] & 0x8d5));
    }
}

static int faults;

static void on_fault(int signal, siginfo_t *info, void *context) {
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    CHECK(signal == SIGSEGV && info->si_addr == word && (char *)regs[REG_RIP] == jump);
    CHECK((uint64_t)regs[REG_RCX] == 0x123456789abcdef0 && (regs[REG_EFL] & 0x8d5) == 0x44);
    faults++;
    CHECK(mprotect(word, PAGE, PROT_READ | PROT_WRITE) == 0);
}

static int stop;

static void *writer(void *unused) {
    (void)unused;
    for (int n = 0; !__atomic_load_n(&stop, __ATOMIC_RELAXED); n = (n + 1) % 16) {
        __atomic_store_n(&word[0], address(n), __ATOMIC_RELAXED);
        for (volatile int i = 0; i < 500; i++) {}
    }
    return NULL;
}

/* The linker binds these functions when they are first called. */
static uint64_t call_library(void) {
    uint64_t sum = 0;
    for (int i = 0; i < 2000; i++) {
        char text[32];
        snprintf(text, sizeof text, "%d %x", i, i * 77);
        sum = mix(sum, strlen(text) + (uint64_t)toupper(text[0]) + (uint64_t)strtol(text, NULL, 10));
        if (i % 500 == 0) free(malloc((size_t)i + 1));
    }
    return sum;
}

int main(int argc, char **argv) {
    int rounds = (int)iterations(argc, argv, 200);
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);

    word[0] = address(3);
    expect(3, rounds);
    for (int n = 0; n < 16; n++) {
        word[0] = address(n);
        expect(n, 7);
    }
    puts("word changed: each time to where it said");

    word[0] = address(3);
    for (int i = 0; i < 20; i++) {
        CHECK(mprotect(word, PAGE, PROT_NONE) == 0);
        uint64_t flags = 0x246;
        CHECK(come_through(0x123456789abcdef0, &flags) == 3);
        expect(3, 3);
    }
    printf("word not readable: %d faults\n", faults);

    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, writer, NULL) == 0);
    for (int i = 0; i < 50 * rounds; i++) {
        uint64_t flags = 0x202;
        CHECK(come_through((uint64_t)i, &flags) < 16);
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    CHECK(pthread_join(thread, NULL) == 0);
    puts("word written by another thread");

    printf("library %016llx\n", (unsigned long long)call_library());
    return 0;
}
