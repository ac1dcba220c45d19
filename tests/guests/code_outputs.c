/* Threads with one function each in one page that all may write. Stores and the kernel (read)
 * change the functions in turn. Each thread must execute its own function as it was last
 * written, whatever the other threads are doing.
 *
 * Hard for a translator: the page is opened for one writer while another thread translates from
 * it. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#include "guest.h"

enum { THREADS = 6, SLOT = 64, PAGES = 8 };

static unsigned char *page;
static long rounds;

static void constant(unsigned char *at, int value) {
    at[0] = 0xb8; /* mov $value, %eax; ret */
    memcpy(at + 1, &value, 4);
    at[5] = 0xc3;
}

static int call(unsigned char *at) { return ((int (*)(void))(uintptr_t)at)(); }

static void *body(void *argument) {
    long number = (long)argument;
    unsigned char *at = page + SLOT * number, bytes[6];
    int ends[2];
    CHECK(pipe(ends) == 0);
    for (int i = 0; i < rounds; i++) {
        int value = (int)number << 24 | i << 1;
        constant(at, value);
        for (int n = 0; n < 3; n++) CHECK(call(at) == value);
        constant(bytes, value + 1);
        CHECK(write(ends[1], bytes, 6) == 6);
        ssize_t got;
        while ((got = read(ends[0], at, 6)) < 0 && errno == EINTR) {}
        CHECK(got == 6 && call(at) == value + 1);
    }
    close(ends[0]);
    close(ends[1]);
    return NULL;
}

int main(int argc, char **argv) {
    rounds = iterations(argc, argv, 100);
    for (int i = 0; i < PAGES; i++) {
        page = mmap(NULL, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(page != MAP_FAILED);
        pthread_t threads[THREADS];
        for (long n = 0; n < THREADS; n++) CHECK(pthread_create(&threads[n], NULL, body, (void *)n) == 0);
        for (int n = 0; n < THREADS; n++) CHECK(pthread_join(threads[n], NULL) == 0);
    }
    puts("done");
    return 0;
}
