/* Code in pages that are writable and executable at once: rewritten by stores and by the kernel,
 * also through another mapping of the same memory, also just ahead of the instruction that
 * writes.
 *
 * Hard for a translator: a store may change the next instruction of the block that it executes
 * in. */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <unistd.h>
#include "guest.h"

#define SIZE 4096

static uint8_t *both; /* written and executed */
static uint8_t *window, *behind; /* written here, executed there */

/* mov $value, %eax; ret */
static void emit(uint8_t *at, uint32_t value) {
    at[0] = 0xb8;
    memcpy(at + 1, &value, 4);
    at[5] = 0xc3;
}

static uint32_t call(const uint8_t *at) { return ((uint32_t (*)(void))(uintptr_t)at)(); }

/* Each round changes the constant under a caller that has become hot. */
static uint64_t rewritten(int rounds) {
    uint64_t sum = 1;
    for (int round = 0; round < rounds; round++) {
        emit(both, (uint32_t)round * 3);
        for (int i = 0; i < 80; i++) sum = mix(sum, call(both));
        CHECK(call(both) == (uint32_t)round * 3);
    }
    return sum;
}

static uint64_t aliased(int rounds) {
    uint64_t sum = 2;
    for (int round = 0; round < rounds; round++) {
        emit(window + 64, (uint32_t)round + 7);
        for (int i = 0; i < 60; i++) sum = mix(sum, call(behind + 64));
    }
    return sum;
}

/* A loop whose body increments its own immediate:
     xor %eax, %eax; mov $100, %ecx
   1: incl imm(%rip); add $0, %eax (the immediate); dec %ecx; jnz 1b; ret */
static uint64_t ahead(void) {
    static const uint8_t code[] = {0x31, 0xc0, 0xb9, 100, 0, 0, 0, 0xff, 0x05, 1, 0, 0, 0,
                                   0x05, 0, 0, 0, 0, 0xff, 0xc9, 0x75, 0xf1, 0xc3};
    memcpy(both + 128, code, sizeof code);
    uint32_t sum = call(both + 128);
    CHECK(sum == 100 * 101 / 2);
    return sum;
}

/* The kernel writes the code. */
static uint64_t read_in(int rounds) {
    int ends[2];
    uint64_t sum = 3;
    CHECK(pipe(ends) == 0);
    for (int round = 0; round < rounds; round++) {
        uint8_t code[6];
        emit(code, (uint32_t)round * 11);
        CHECK(write(ends[1], code, sizeof code) == sizeof code);
        CHECK(read(ends[0], both + 1024, sizeof code) == sizeof code);
        sum = mix(sum, call(both + 1024));
    }
    close(ends[0]);
    close(ends[1]);
    return sum;
}

/* A second instruction is made of what was the first one's operand, on two pages. */
static uint64_t overlapping(void) {
    uint64_t sum = 4;
    uint8_t *at = both + SIZE - 3;
    emit(at, 0x00c3ffff);
    at[1] = 0x31, at[2] = 0xc0; /* xor %eax, %eax at +1, then on the next page: ret */
    for (int i = 0; i < 100; i++) {
        sum = mix(mix(sum, call(at)), call(at + 1));
        at[4] = (uint8_t)i; /* only the first of them has this byte */
    }
    return sum;
}

int main(void) {
    both = mmap(NULL, 2 * SIZE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(both != MAP_FAILED);
    int memory = memfd_create("code", 0);
    CHECK(memory >= 0 && ftruncate(memory, SIZE) == 0);
    window = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    behind = mmap(NULL, SIZE, PROT_READ | PROT_EXEC, MAP_SHARED, memory, 0);
    CHECK(window != MAP_FAILED && behind != MAP_FAILED);
    printf("%016lx\n", (unsigned long)rewritten(50));
    printf("%016lx\n", (unsigned long)aliased(50));
    for (int i = 0; i < 5; i++) printf("%lu\n", (unsigned long)ahead());
    printf("%016lx\n", (unsigned long)read_in(50));
    printf("%016lx\n", (unsigned long)overlapping());
    return 0;
}
