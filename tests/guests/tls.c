/* Thread-local variables through fs, in the program and in libc (errno), and addresses that
 * agree between both ways to get them.
 *
 * Hard for a translator: its own thread-local variables want the same register. */
#include <errno.h>
#include <unistd.h>
#include "guest.h"

static __thread int counter = 41;
static __thread char text[32] = "initialised";
static __thread uint64_t table[64];
__thread int exported = 7;

__attribute__((noinline)) static int *address_of_counter(void) { return &counter; }

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 2000);
    printf("%d %s %d %lu\n", counter, text, exported, table[63]);
    for (long i = 0; i < n; i++) {
        counter += (int)i & 3;
        table[i & 63] += (uint64_t)i * (uint64_t)counter;
        exported ^= counter;
        text[i % 11] ^= 1;
    }
    CHECK(address_of_counter() == &counter);
    uint64_t self, canary;
    __asm__("movq %%fs:0, %0" : "=r"(self));
    __asm__("movq %%fs:0x28, %0" : "=r"(canary));
    CHECK(*(uint64_t *)self == self);
    CHECK((canary & 0xff) == 0 && canary == *(uint64_t *)(self + 0x28));
    int direct;
    uint64_t offset = (uint64_t)&counter - self;
    __asm__("movl %%fs:(%1), %0" : "=r"(direct) : "r"(offset));
    CHECK(direct == counter);
    uint32_t small;
    __asm__ volatile("addl $5, %%fs:(%[o])\n\tmovl %%fs:(%[o]), %[v]" : [v] "=r"(small) : [o] "r"(offset) : "memory", "cc");
    printf("counter %d, via fs %u, exported %d, text %s\n", counter, small, exported, text);
    printf("table %016lx\n", mix_bytes(1, table, sizeof table));
    errno = 0;
    CHECK(close(-1) == -1);
    printf("EBADF %d\n", errno == EBADF);
    return 0;
}
