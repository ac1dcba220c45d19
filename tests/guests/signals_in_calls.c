/* A timer at 10 kHz over indirect jumps, calls and returns whose registers and flags are checked
 * all the time.
 *
 * Hard for a translator: a signal arrives between the instructions of one guest transfer. */
#include "guest.h"
#include <signal.h>
#include <sys/time.h>

static volatile sig_atomic_t ticks;
static void on_tick(int signo) { (void)signo; ticks++; }

/* Each keeps rcx, rax, rdx and rsi as they are, and flags; returns to where the caller's table
 * says. */
__asm__(".pushsection .text\n"
        "step_a: lea 1(%r8), %r8\n jmp *%r9\n"
        "step_b: lea 3(%r8), %r8\n call 1f\n jmp *%r9\n"
        "1: ret\n"
        "step_c: lea 5(%r8), %r8\n push %r9\n ret\n"
        ".popsection\n");
extern char step_a[], step_b[], step_c[];

__attribute__((noinline)) static uint64_t around(uint64_t n) {
    void *table[4] = {step_a, step_b, step_c, step_b};
    uint64_t bad = 0, sum = 0;
    __asm__ volatile(
        "sub $128, %%rsp\n"
        "xor %%r8d, %%r8d\n"
        "mov $0x1111, %%eax\n"
        "mov $0x2222, %%ecx\n"
        "mov $0x3333, %%edx\n"
        "mov $0x4444, %%esi\n"
        "1: mov %[n], %%r10\n"
        "and $3, %%r10\n"
        "lea 2f(%%rip), %%r9\n"
        "cmp $2, %%r10\n"
        "jmp *(%[table],%%r10,8)\n"
        "2: setb %%r11b\n"
        "jz 3f\n"
        "cmp $2, %%r10\n"
        "je 9f\n"
        "jmp 4f\n"
        "3: cmp $2, %%r10\n"
        "jne 9f\n"
        "4: setb %%r9b\n"
        "cmp %%r9b, %%r11b\n"
        "jne 9f\n"
        "cmp $0x1111, %%rax\n"
        "jne 9f\n"
        "cmp $0x2222, %%rcx\n"
        "jne 9f\n"
        "cmp $0x3333, %%rdx\n"
        "jne 9f\n"
        "cmp $0x4444, %%rsi\n"
        "jne 9f\n"
        "dec %[n]\n"
        "jnz 1b\n"
        "jmp 8f\n"
        "9: inc %[bad]\n"
        "8: mov %%r8, %[sum]\n"
        "add $128, %%rsp\n"
        : [n] "+r"(n), [bad] "+r"(bad), [sum] "=r"(sum)
        : [table] "r"(table)
        : "rax", "rcx", "rdx", "rsi", "r8", "r9", "r10", "r11", "cc", "memory");
    CHECK(bad == 0);
    return sum;
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 20000);
    struct sigaction action = {.sa_handler = on_tick, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval timer = {{0, 100}, {0, 100}};
    setitimer(ITIMER_REAL, &timer, NULL);
    uint64_t sum = 0;
    for (int i = 0; i < 10 || ticks < 20; i++) {
        uint64_t s = around((uint64_t)n);
        CHECK(sum == 0 || s == sum);
        sum = s;
    }
    printf("%lu\n", sum);
    return 0;
}
