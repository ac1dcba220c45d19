/* A program at fixed addresses, without randomisation, has its break directly behind its data, with
 * room to grow there. (GNU Common Lisp starts itself anew in this way, and keeps its heap there.) */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/personality.h>
#include <unistd.h>

extern char end[];
static char zeroed[100000], buffer[4096];

int main(int argc, char **argv) {
    (void)argc;
    const uintptr_t page = 4096;
    int persona = personality(0xffffffff);
    if (!(persona & ADDR_NO_RANDOMIZE)) {
        /* A container may refuse. The rest then holds without this part. */
        if (personality((unsigned long)persona | ADDR_NO_RANDOMIZE) != -1 &&
            personality(0xffffffff) & ADDR_NO_RANDOMIZE) {
            execv("/proc/self/exe", argv);
            return 2;
        }
    }
    /* Printing must not move the break. */
    setvbuf(stdout, buffer, _IOFBF, sizeof buffer);
    char *start = sbrk(0);
    if (personality(0xffffffff) & ADDR_NO_RANDOMIZE) {
        /* Nothing but the C library's start has moved it. */
        uintptr_t behind = ((uintptr_t)end + page - 1) / page * page;
        if ((uintptr_t)start < behind || (uintptr_t)start - behind > 64 * page)
            printf("the break is at %p, the data end at %p\n", (void *)start, (void *)end);
    }
    const size_t size = 48 << 20;
    if (sbrk((intptr_t)size) != start) puts("it does not grow");
    memset(start, 7, size);
    if (start[size - 1] != 7 || zeroed[sizeof zeroed - 1] != 0) puts("wrong memory");
    if (sbrk(-(intptr_t)size) != start + size || sbrk(0) != start) puts("it does not shrink");
    /* Most of the low 2 GiB. */
    const size_t much = (size_t)1600 << 20;
    if (sbrk((intptr_t)much) != start) puts("it does not grow far");
    start[much - 1] = 7;
    if (sbrk(-(intptr_t)much) != start + much) puts("it does not shrink again");
    puts("ok");
    return 0;
}
