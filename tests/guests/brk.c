/* brk and sbrk: growth, shrinking, contents after regrowth; malloc on top of it.
 *
 * Hard for a translator: it shares one address space with the guest, and the guest's break is
 * not its own. */
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>
#include "guest.h"

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 100);
    char *start = (char *)syscall(SYS_brk, 0);
    CHECK(start == sbrk(0));
    char *top = start + 300000;
    CHECK((char *)syscall(SYS_brk, top) == top);
    memset(start, 0x5a, 300000);
    CHECK((char *)syscall(SYS_brk, start + 4096) == start + 4096);
    CHECK(start[4095] == 0x5a);
    CHECK((char *)syscall(SYS_brk, top) == top);
    int kept = start[100], fresh = start[250000];
    /* Impossible requests leave the break alone. */
    CHECK((char *)syscall(SYS_brk, 1) == top);
    CHECK((char *)syscall(SYS_brk, 0xffff800000000000) == top);
    CHECK((char *)syscall(SYS_brk, start) == start);
    CHECK(sbrk(0) == start);
    /* Printed only after the checks, because printing allocates and so moves the break. */
    printf("kept %x, fresh %d\n", kept, fresh);
    uint64_t sum = 1, seed = 4;
    void *blocks[32] = {0};
    for (long i = 0; i < n; i++) {
        int slot = (int)(next_random(&seed) % 32);
        size_t size = next_random(&seed) % 20000 + 1;
        blocks[slot] = realloc(blocks[slot], size);
        CHECK(blocks[slot]);
        memset(blocks[slot], slot, size);
        sum = mix(sum, ((unsigned char *)blocks[slot])[size / 2]);
    }
    for (int i = 0; i < 32; i++) free(blocks[i]);
    void *large = malloc(3 << 20);
    memset(large, 1, 3 << 20);
    free(large);
    printf("malloc %016lx\n", sum);
    return 0;
}
