/* A hot loop loads with `lodsl` and `lodsq`, whose old rax is not an operand. Some of the loads fault; the handler
 * hashes rax, and goes on with another address.
 *
 * Hard for a translator: rax is written by the instruction, but not if it faults. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include "guest.h"

enum { PAGE = 4096, WORDS = 64 };

static uint64_t words[WORDS];
static unsigned char *hole;
static uint64_t seen;
static long faults;

static void fault(int signal, siginfo_t *info, void *state) {
    (void)signal;
    greg_t *registers = ((ucontext_t *)state)->uc_mcontext.gregs;
    CHECK(info->si_addr == hole && registers[REG_RSI] == (greg_t)(uintptr_t)hole);
    seen = seen * 37 + (uint64_t)registers[REG_RAX];
    registers[REG_RSI] = (greg_t)(uintptr_t)words;
    faults++;
}

int main(int argc, char **argv) {
    long rounds = iterations(argc, argv, 3000);
    struct sigaction action = {.sa_sigaction = fault, .sa_flags = SA_SIGINFO};
    hole = mmap(NULL, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(hole != MAP_FAILED && sigaction(SIGSEGV, &action, NULL) == 0);
    for (int i = 0; i < WORDS; i++) words[i] = (uint64_t)(i + 1) * 0x9e3779b97f4a7c15;
    uint64_t hash = 0;
    for (long i = 0; i < rounds; i++) {
        const void *from = i % 97 == 96 ? (const void *)hole : &words[i % WORDS];
        uint64_t loaded = hash * 5 + (uint64_t)i;
        __asm__ volatile("lodsl" : "+S"(from), "+a"(loaded) : : "memory");
        hash = hash * 31 + loaded + (uint64_t)((const char *)from - (const char *)words);
        from = i % 89 == 88 ? (const void *)hole : &words[i % (WORDS - 1)];
        loaded = hash * 7 - (uint64_t)i;
        __asm__ volatile("lodsq" : "+S"(from), "+a"(loaded) : : "memory");
        hash = hash * 33 + loaded + (uint64_t)((const char *)from - (const char *)words);
    }
    printf("%016llx, %016llx in %ld faults\n", (unsigned long long)hash, (unsigned long long)seen, faults);
    return 0;
}
