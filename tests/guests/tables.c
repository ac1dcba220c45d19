/* An interpreter whose table of handlers and whose constants lie in read-only memory. The pages become
 * writable now and then, change, and are protected again; once they are mapped anew. What was read there
 * must be read again.
 *
 * Hard for a translator: what only a system call can change looks like a constant. */
#include <string.h>
#include <sys/mman.h>
#include "guest.h"

enum { PAGE = 4096, LENGTH = 6, ROUNDS = 400 };

typedef uint64_t handler(uint64_t value, const uint64_t *constants);

static uint64_t add(uint64_t value, const uint64_t *constants) { return value + constants[0]; }
static uint64_t multiply(uint64_t value, const uint64_t *constants) { return value * constants[1]; }
static uint64_t rotate(uint64_t value, const uint64_t *constants) {
    return value << 7 ^ value >> 57 ^ constants[2];
}
static uint64_t negate(uint64_t value, const uint64_t *constants) { return constants[3] - value; }

/* In the program's own file, so that it is protected with its data. */
static struct {
    handler *handlers[PAGE / 16];
    uint64_t constants[PAGE / 16];
} table __attribute__((aligned(PAGE))) = {{add, multiply, rotate, negate}, {3, 5, 7, 11}};

static const unsigned char program[LENGTH] = {0, 1, 2, 3, 1, 0};

static __attribute__((noinline)) uint64_t interpret(uint64_t value, long rounds) {
    for (long round = 0; round < rounds; round++)
        for (int i = 0; i < LENGTH; i++) value = table.handlers[program[i]](value, table.constants);
    return value;
}

static void protect(int protection) { CHECK(mprotect(&table, sizeof table, protection) == 0); }

int main(int argc, char **argv) {
    long changes = iterations(argc, argv, 40);
    uint64_t sum = 1;
    protect(PROT_READ);
    for (long change = 0; change < changes; change++) {
        sum = mix(sum, interpret(sum, ROUNDS));
        protect(PROT_READ | PROT_WRITE);
        if (change % 3 == 0) table.constants[change % 4]++;
        if (change % 3 == 1) {
            handler *first = table.handlers[0];
            memmove(table.handlers, table.handlers + 1, 3 * sizeof *table.handlers);
            table.handlers[3] = first;
        }
        sum = mix(sum, interpret(sum, ROUNDS / 4));
        protect(PROT_READ);
        if (change % 10 == 9) {
            /* Other memory with other constants at the same address. */
            static char copy[sizeof table];
            memcpy(copy, &table, sizeof table);
            CHECK(mmap(&table, sizeof table, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == (void *)&table);
            memcpy(&table, copy, sizeof table);
            table.constants[2] ^= change;
            protect(PROT_READ);
        }
    }
    printf("%lx\n", (unsigned long)sum);
    return 0;
}
