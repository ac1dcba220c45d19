/* Leaf code that keeps data below the stack pointer while signals arrive: nothing may write
 * there.
 *
 * Hard for a translator: its own code must not push anything onto the guest's stack. */
#include <signal.h>
#include <sys/time.h>
#include "guest.h"

static volatile sig_atomic_t ticks;
static void on_alarm(int signal) {
    volatile char noise[600];
    (void)signal;
    for (unsigned i = 0; i < sizeof noise; i++) noise[i] = (char)0xee;
    ticks++;
}

uint64_t leaf(uint64_t seed, uint64_t n);
__asm__(
    ".text\nleaf:\n\t"
    "movq %rdi, -8(%rsp)\n\tmovq %rsi, -16(%rsp)\n\tmovq $0, -128(%rsp)\n\tmovq $1, -64(%rsp)\n\t"
    "movb $0, -100(%rsp)\n"
    "1: movq -8(%rsp), %rax\n\timulq $77, %rax, %rax\n\taddq -64(%rsp), %rax\n\tmovq %rax, -8(%rsp)\n\t"
    "xorq %rax, -128(%rsp)\n\trolq $9, -64(%rsp)\n\tmovb -3(%rsp), %cl\n\taddb %cl, -100(%rsp)\n\t"
    "movzbl -100(%rsp), %ecx\n\taddq %rcx, -128(%rsp)\n\tmovb $0, -100(%rsp)\n\t"
    "decq -16(%rsp)\n\tjnz 1b\n\t"
    "movq -128(%rsp), %rax\n\tret\n");

int main(int argc, char **argv) {
    long want = iterations(argc, argv, 5);
    uint64_t expected = leaf(5, 400);
    printf("quiet %016lx\n", expected);
    signal(SIGALRM, on_alarm);
    struct itimerval timer = {{0, 1500}, {0, 1500}};
    setitimer(ITIMER_REAL, &timer, NULL);
    while (ticks < want) CHECK(leaf(5, 400) == expected);
    timer = (struct itimerval){{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &timer, NULL);
    printf("disturbed the same\n");
    return 0;
}
