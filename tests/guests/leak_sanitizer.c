/* LeakSanitizer: a process that shares the memory stops this one by ptrace and looks for
 * pointers in its memory and registers.
 *
 * Hard for a translator: ptrace sees the host's registers, and the tracing process runs
 * translated code, too. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char *kept;

/* Names of functions in the report would make it read and inflate the debug information of all
 * libraries: nine tenths of the time, and no part of what this guest tests. */
const char *__lsan_default_options(void) { return "symbolize=0"; }

__attribute__((noinline)) static void leak(size_t size) {
    char *volatile lost = malloc(size);
    memset(lost, 1, size);
    lost = NULL;
}

int main(void) {
    /* The report names addresses. */
    int nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, 2);
    kept = malloc(100);
    for (int i = 0; i < 100; i++) leak(1000 + i);
    printf("kept: %d\n", kept != NULL);
    fflush(stdout);
    /* The check runs now and finds the leak: exit status 23. */
    return 0;
}
