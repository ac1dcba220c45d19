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
