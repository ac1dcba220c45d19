/* The library that dlopen.c loads. */
#include <stdio.h>
#include <stdlib.h>

int library_state = 1;
static __thread int calls;

__attribute__((constructor)) static void start(void) { library_state = 40; }
__attribute__((destructor)) static void end(void) { printf("library ends with %d\n", library_state); }

long library_work(long (*call_back)(long), long n) {
    long sum = 0;
    for (long i = 0; i < n; i++) sum = (sum + call_back(i)) % 1000003;
    calls++;
    library_state += calls + abs((int)(sum % 5));
    return sum;
}
