/* Code made at run time: written to a page, made executable, called; several generations at
 * different addresses.
 *
 * Hard for a translator: the code is in no file and did not exist when the program started. */
#include <sys/mman.h>
#include "guest.h"

typedef uint64_t (*function)(uint64_t);

/* x -> x * factor + term, as machine code. */
static function generate(unsigned char *to, uint32_t factor, uint32_t term) {
    unsigned char *start = to;
    *to++ = 0x48, *to++ = 0x69, *to++ = 0xc7; /* imul $factor, %rdi, %rax */
    memcpy(to, &factor, 4), to += 4;
    *to++ = 0x48, *to++ = 0x05; /* add $term, %rax */
    memcpy(to, &term, 4), to += 4;
    *to++ = 0xc3;
    return (function)(uintptr_t)start;
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 300);
    uint64_t x = 1;
    for (uint32_t generation = 1; generation <= 5; generation++) {
        unsigned char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(page != MAP_FAILED);
        function functions[8];
        for (uint32_t i = 0; i < 8; i++) functions[i] = generate(page + 64 * i, generation * 3 + i, 77 * i);
        CHECK(mprotect(page, 4096, PROT_READ | PROT_EXEC) == 0);
        for (long i = 0; i < n; i++) {
            uint64_t expected = x * (generation * 3 + (uint64_t)(i & 7)) + 77 * (uint64_t)(i & 7);
            x = functions[i & 7](x);
            CHECK(x == expected);
        }
        printf("generation %u: %016lx\n", generation, x);
    }
    return 0;
}
