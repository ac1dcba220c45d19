/* Recursion several megabytes deep: the stack must grow under translation as it does natively.
 *
 * Hard for a translator: the guest's stack may be a mapping that the kernel does not grow by
 * itself. */
#include <sys/resource.h>
#include "guest.h"

__attribute__((noinline)) static uint64_t dive(uint64_t depth, uint64_t x) {
    volatile uint64_t frame[20];
    frame[depth % 20] = x;
    if (depth == 0) return x;
    uint64_t below = dive(depth - 1, mix(x, depth));
    return below + frame[depth % 20];
}

__attribute__((noinline)) static int wide(int levels) {
    char block[200 * 1024]; /* steps over pages that were never touched */
    memset(block, levels, sizeof block);
    if (levels == 0) return block[100];
    return wide(levels - 1) + block[sizeof block - 1];
}

int main(int argc, char **argv) {
    long depth = iterations(argc, argv, 20000);
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_STACK, &limit) == 0);
    CHECK(limit.rlim_cur >= 8 << 20);
    printf("deep %016lx\n", dive((uint64_t)depth, 1));
    printf("again %016lx\n", dive((uint64_t)depth / 2, 2));
    printf("wide %d\n", wide(20));
    return 0;
}
