/* dlopen, dlsym, dlclose of a library beside the program: constructors, globals, calls back,
 * errors, a second load.
 *
 * Hard for a translator: code appears at addresses that it did not know when the program
 * started. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include "guest.h"

int shared_with_library = 5;
long call_back(long x) { return x * 3 + shared_with_library; }

int main(int argc, char **argv) {
    CHECK(argc > 1);
    void *none = dlopen("/nonexistent/library.so", RTLD_NOW);
    printf("missing library refused: %d\n", none == NULL && strstr(dlerror(), "nonexistent") != NULL);
    for (int round = 0; round < 2; round++) {
        void *library = dlopen(argv[1], round ? RTLD_NOW : RTLD_LAZY);
        if (!library) {
            fprintf(stderr, "%s\n", dlerror());
            return 1;
        }
        long (*work)(long (*)(long), long) = (long (*)(long (*)(long), long))dlsym(library, "library_work");
        int *state = dlsym(library, "library_state");
        CHECK(work && state);
        printf("state %d work %ld state %d\n", *state, work(call_back, 1000), *state);
        printf("missing symbol refused: %d\n", dlsym(library, "no_such_symbol") == NULL && dlerror() != NULL);
        Dl_info info;
        CHECK(dladdr((void *)work, &info) && strcmp(info.dli_sname, "library_work") == 0);
        CHECK(dlclose(library) == 0);
    }
    double (*cosine)(double) = (double (*)(double))dlsym(dlopen("libm.so.6", RTLD_NOW), "cos");
    printf("cos %.9f\n", cosine(1));
    return 0;
}
