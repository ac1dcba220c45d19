/* Dies of a signal, in the way that its first argument names. Nothing may be printed after that,
 * and what was written stays.
 *
 * Hard for a translator: it catches faults itself, and the process must still end by the guest's
 * signal. */
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#include "guest.h"

__attribute__((noinline)) static uint64_t overflow(uint64_t n) {
    volatile char frame[4000];
    frame[n % 4000] = (char)n;
    return n == 0 ? 0 : overflow(n + 1) + (uint64_t)frame[n % 4000];
}

int main(int argc, char **argv) {
    const char *how = argc > 1 ? argv[1] : "";
    uint64_t sum = 1;
    for (int i = 0; i < 3000; i++) sum = mix(sum, (uint64_t)i);
    printf("before %s %016lx\n", how, sum);
    fflush(stdout);
    volatile int zero = 0;
    if (!strcmp(how, "null")) *(volatile int *)(uintptr_t)zero = 1;
    if (!strcmp(how, "hot")) {
        /* A hot loop runs over the end of a mapping. */
        char *page = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        munmap(page + 4096, 4096);
        for (volatile char *p = page;; p++) *p = (char)(*p + 1);
    }
    if (!strcmp(how, "call")) ((void (*)(void))(uintptr_t)(zero + 8))();
    if (!strcmp(how, "data")) {
        static char code[16] = {(char)0xc3};
        ((void (*)(void))(uintptr_t)code)();
    }
    if (!strcmp(how, "stack")) return (int)overflow(1);
    if (!strcmp(how, "abort")) abort();
    if (!strcmp(how, "divide")) return 5 / zero;
    if (!strcmp(how, "ud2")) __asm__ volatile("ud2");
    if (!strcmp(how, "int3")) __asm__ volatile("int3");
    if (!strcmp(how, "bus")) {
        FILE *f = tmpfile();
        char *p = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fileno(f), 0);
        return *(volatile char *)p;
    }
    if (!strcmp(how, "kill")) kill(getpid(), SIGKILL);
    if (!strcmp(how, "rt")) raise(SIGRTMAX);
    if (!strcmp(how, "privileged")) __asm__ volatile("hlt");
    if (!strcmp(how, "handler")) {
        /* A handler that returns without repair faults again; with SA_RESETHAND the second time
         * is the end. */
        struct sigaction action = {.sa_handler = (void (*)(int))(uintptr_t)getpid, .sa_flags = SA_RESETHAND};
        sigaction(SIGSEGV, &action, NULL);
        *(volatile int *)(uintptr_t)(zero + 16) = 1;
    }
    if (!strcmp(how, "blocked")) {
        sigset_t set;
        sigemptyset(&set);
        sigaddset(&set, SIGSEGV);
        sigprocmask(SIG_BLOCK, &set, NULL);
        *(volatile int *)(uintptr_t)(zero + 16) = 1;
    }
    if (!strcmp(how, "exit")) _exit(atoi(argv[2]));
    if (!strcmp(how, "syscall_exit")) __asm__ volatile("syscall" : : "a"(60), "D"(atoi(argv[2])) : "rcx", "r11", "memory");
    printf("still alive\n");
    return 1;
}
