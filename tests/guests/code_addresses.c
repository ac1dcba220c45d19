/* Threads that map pages of code, call it in a loop that they share, and unmap it. The same
 * addresses hold one thread's code and later another's: a trace of the loop with the old code
 * must not run with the new one.
 *
 * Hard for a translator: the loop's trace has the callee inlined, and its own page never
 * changes. */
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include "guest.h"

enum { THREADS = 8, PAGE = 4096 };
typedef uint32_t function(void);

static void *work(void *number) {
    uint64_t random = 88172645463325252ULL * (2 * (uint64_t)number + 3);
    for (long round = 0; round < 250; round++) {
        uint32_t value = (uint32_t)next_random(&random);
        unsigned char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(page != MAP_FAILED);
        page[0] = 0xb8; /* mov $value, %eax; ret */
        memcpy(page + 1, &value, 4);
        page[5] = 0xc3;
        CHECK(mprotect(page, PAGE, PROT_READ | PROT_EXEC) == 0);
        for (int i = 0; i < 20; i++) CHECK(((function *)page)() == value);
        CHECK(munmap(page, PAGE) == 0);
    }
    return NULL;
}

int main(int argc, char **argv) {
    long repeats = iterations(argc, argv, 4);
    for (long i = 0; i < repeats; i++) {
        pthread_t threads[THREADS];
        for (long t = 0; t < THREADS; t++) CHECK(pthread_create(&threads[t], NULL, work, (void *)(t + i * THREADS)) == 0);
        for (long t = 0; t < THREADS; t++) CHECK(pthread_join(threads[t], NULL) == 0);
    }
    puts("each its own");
    return 0;
}
