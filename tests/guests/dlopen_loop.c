/* A library is loaded, used until its code is hot, and unloaded, many times: the same addresses
 * hold it again and again.
 *
 * Hard for a translator: munmap must drop the code of a mapping whose code is hot, each time. */
#include <dlfcn.h>
#include <unistd.h>
#include "guest.h"

int shared_with_library = 5;
static long call_back(long x) { return x * 3 + shared_with_library; }

int main(int argc, char **argv) {
    CHECK(argc > 1);
    long rounds = argc > 2 ? atol(argv[2]) : 1000;
    uint64_t sum = 1;
    for (long round = 0; round < rounds; round++) {
        void *library = dlopen(argv[1], round % 2 ? RTLD_NOW : RTLD_LAZY);
        CHECK(library);
        long (*work)(long (*)(long), long) = (long (*)(long (*)(long), long))dlsym(library, "library_work");
        int *state = dlsym(library, "library_state");
        CHECK(work && state && *state == 40);
        sum = mix(sum, (uint64_t)work(call_back, round % 100 ? 2 : 120));
        CHECK(*state != 40);
        /* The library reports its end on stdout, which is kept for the last one. */
        if (round + 1 < rounds) *state = 0;
        fflush(stdout);
        int kept = dup(1);
        if (round + 1 < rounds) CHECK(kept >= 0 && freopen("/dev/null", "w", stdout));
        CHECK(dlclose(library) == 0);
        fflush(stdout);
        if (round + 1 < rounds) CHECK(dup2(kept, 1) == 1);
        close(kept);
    }
    printf("%016lx\n", (unsigned long)sum);
    return 0;
}
