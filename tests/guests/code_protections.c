/* A thread stores into its own code and calls it, while another thread makes calls about these
 * pages that change nothing: mprotect with the protection that they have, an mprotect that the
 * kernel refuses, an mremap to the same address, madvise that keeps contents.
 *
 * Hard for a translator: such calls must neither lose its write protection of translated code
 * (stale code) nor show it to the guest (spurious SIGSEGV). */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>
#include "guest.h"

enum { PAGES = 60, PAGE = 4096, RWX = PROT_READ | PROT_WRITE | PROT_EXEC, CALLS = 300 };

typedef unsigned (*function)(void);

static uint8_t *all;
static int kind;
static volatile int stop;

static void *disturb(void *unused) {
    while (!stop) {
        switch (kind) {
        case 0: CHECK(mprotect(all, (long)PAGE * PAGES, RWX) == 0); break;
        case 1: CHECK(mprotect(all, (long)PAGE * PAGES, RWX | 0x100) != 0); break;
        case 2: CHECK(mremap(all, (long)PAGE * PAGES, (long)PAGE * PAGES, 0) == all); break;
        case 3: CHECK(madvise(all, (long)PAGE * PAGES, MADV_WILLNEED) == 0); break;
        default:
            for (int page = 0; page < PAGES; page += 2)
                CHECK(mprotect(all + (long)PAGE * page, PAGE, RWX) == 0);
        }
        nanosleep(&(struct timespec){.tv_nsec = 200000}, 0);
    }
    return unused;
}

int main(int argc, char **argv) {
    long rounds = iterations(argc, argv, 100);
    kind = argc > 2 ? atoi(argv[2]) : 0;
    all = mmap(0, (long)PAGE * PAGES, RWX, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int page = 0; page < PAGES; page++) {
        uint8_t *code = all + (long)PAGE * page;
        memset(code, 0x90, 64);
        code[7] = 0xb8; /* mov eax, 0 */
        memset(code + 8, 0, 4);
        code[12] = 0xc3;
    }
    pthread_t thread;
    CHECK(pthread_create(&thread, 0, disturb, 0) == 0);
    static unsigned values[PAGES];
    unsigned stale = 0;
    for (long round = 1; round <= rounds; round++) {
        for (int page = 0; page < PAGES; page++) {
            if (((function)(all + (long)PAGE * page))() != values[page]) stale++;
        }
        int page = round % PAGES;
        function code = (function)(all + (long)PAGE * page);
        for (int call = 0; call < CALLS; call++) {
            if (code() != values[page]) stale++;
        }
        values[page] = round;
        __atomic_store_n((uint32_t *)(all + (long)PAGE * page + 8), round, __ATOMIC_SEQ_CST);
        if (code() != round) stale++;
    }
    stop = 1;
    pthread_join(thread, 0);
    printf("%ld rounds, %u stale\n", rounds, stale);
    return stale != 0;
}
