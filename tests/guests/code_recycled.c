/* Code that is mapped, executed and unmapped 10,000 times, mostly at the same address. The code
 * that is mapped at the moment must be executed, and memory must not grow.
 *
 * Hard for a translator: all that it keeps for an address must be found and freed at each
 * munmap. */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <unistd.h>
#include "guest.h"

#define SIZE 8192

static void constant(uint8_t *at, uint32_t value) {
    at[0] = 0xb8;
    memcpy(at + 1, &value, 4);
    at[5] = 0xc3;
}

/* Kilobytes of memory in use by this process, a translator included. */
static long resident(void) {
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%*d %ld", &pages) == 1);
    fclose(file);
    return pages * 4;
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 10000), before = 0;
    uint64_t sum = 1;
    for (long i = 0; i < n; i++) {
        int write = i % 2 ? PROT_WRITE : 0;
        uint8_t *code = mmap(NULL, SIZE, PROT_READ | PROT_WRITE | (write ? PROT_EXEC : 0), MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(code != MAP_FAILED);
        for (uint32_t f = 0; f < 4; f++) constant(code + 2000 * f, (uint32_t)i * 4 + f);
        if (!write) CHECK(mprotect(code, SIZE, PROT_READ | PROT_EXEC) == 0);
        for (int calls = 0; calls < (i % 50 ? 4 : 240); calls++)
            sum = mix(sum, ((uint32_t(*)(void))(uintptr_t)(code + 2000 * (calls & 3)))());
        CHECK(munmap(code, SIZE) == 0);
        if (i == n / 2) before = resident();
    }
    CHECK(resident() - before < 16384);
    printf("%016lx\n", (unsigned long)sum);
    return 0;
}
