/* A loop whose shift count stays the same for a long time and then changes at each run; the count is
 * in rcx, where a trace of the loop may assume its value. Prints a result that depends on every step. */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>

static uint64_t run(uint64_t sum, uint64_t count, uint64_t shift) {
    __asm__ volatile("1: rol %%cl, %0\n\t"
                     "lea 3(%0, %0, 2), %0\n\t"
                     "dec %1\n\t"
                     "jnz 1b"
                     : "+r"(sum), "+r"(count)
                     : "c"(shift)
                     : "cc");
    return sum;
}

int main(void) {
    uint64_t all = 1;
    for (int k = 0; k < 8000; k++) {
        sigset_t set;
        all = run(all, 300 + k % 5, k < 2000 ? 7 : k % 60 + 1);
        sigprocmask(SIG_BLOCK, NULL, &set);
    }
    printf("%llx\n", (unsigned long long)all);
    return 0;
}
