/* A small just-in-time compiler. 10,000 functions are compiled into a few pages one after
 * another and called, some of them until they are hot; they are compiled again when their
 * constants change. The pages are always writable and executable or, with an argument, alternate
 * between the two.
 *
 * Hard for a translator: each new function invalidates its page, where hot functions remain. */
#define _GNU_SOURCE
#include <sys/mman.h>
#include "guest.h"

#define FUNCTIONS 64
#define STRIDE 96

typedef uint64_t (*function)(uint64_t);

static uint8_t *arena;
static int flips;

/* x -> (x * factor + term) rotated, repeated `times` times. */
static function compile(int index, uint32_t factor, uint32_t term, uint8_t rotate, uint32_t times) {
    uint8_t *start = arena + (size_t)index * STRIDE, *to = start;
    if (flips) CHECK(mprotect(arena, FUNCTIONS * STRIDE, PROT_READ | PROT_WRITE) == 0);
    *to++ = 0x48, *to++ = 0x89, *to++ = 0xf8;                     /* mov %rdi, %rax */
    *to++ = 0xb9, memcpy(to, &times, 4), to += 4;                 /* mov $times, %ecx */
    uint8_t *loop = to;
    *to++ = 0x48, *to++ = 0x69, *to++ = 0xc0, memcpy(to, &factor, 4), to += 4; /* imul $factor, %rax, %rax */
    *to++ = 0x48, *to++ = 0x05, memcpy(to, &term, 4), to += 4;    /* add $term, %rax */
    *to++ = 0x48, *to++ = 0xc1, *to++ = 0xc0, *to++ = rotate;     /* rol $rotate, %rax */
    *to++ = 0xff, *to++ = 0xc9;                                   /* dec %ecx */
    *to++ = 0x75, *to = (uint8_t)(loop - (to + 1)), to++;         /* jnz loop */
    *to++ = 0xc3;
    if (flips) CHECK(mprotect(arena, FUNCTIONS * STRIDE, PROT_READ | PROT_EXEC) == 0);
    return (function)(uintptr_t)start;
}

static uint64_t model(uint64_t x, uint32_t factor, uint32_t term, uint8_t rotate, uint32_t times) {
    while (times--) {
        x = x * factor + term;
        x = rotate ? x << rotate | x >> (64 - rotate) : x;
    }
    return x;
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 10000);
    flips = argc > 2;
    size_t size = (FUNCTIONS * STRIDE + 4095) & ~(size_t)4095;
    arena = mmap(NULL, size, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(arena != MAP_FAILED);
    function functions[FUNCTIONS];
    struct { uint32_t factor, term, times; uint8_t rotate; } made[FUNCTIONS];
    uint64_t random = 88172645463325252ULL, x = 1;
    for (long i = 0; i < n; i++) {
        int index = (int)(i % FUNCTIONS);
        uint64_t r = next_random(&random);
        made[index].factor = (uint32_t)(r & 0x7fffffff);
        made[index].term = (uint32_t)(r >> 33);
        made[index].rotate = (uint8_t)(r >> 20 & 63);
        made[index].times = i % 37 ? 1 + (uint32_t)(r & 3) : 80;
        functions[index] = compile(index, made[index].factor, made[index].term, made[index].rotate, made[index].times);
        for (int calls = 0; calls < 3; calls++) {
            int which = calls ? (int)(next_random(&random) % (uint64_t)(i < FUNCTIONS ? i + 1 : FUNCTIONS)) : index;
            uint64_t expected = model(x, made[which].factor, made[which].term, made[which].rotate, made[which].times);
            x = functions[which](x);
            CHECK(x == expected);
        }
    }
    printf("%016lx\n", (unsigned long)x);
    return 0;
}
