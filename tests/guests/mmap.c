/* mmap, munmap, mremap, mprotect, madvise, file mappings shared and private, MAP_FIXED, hints,
 * errors.
 *
 * Hard for a translator: it decides where its own mappings lie, and the kernel sees both kinds. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#include "guest.h"

enum { PAGE = 4096 };
static sigjmp_buf recover;
static void on_fault(int signal) { siglongjmp(recover, signal); }

static int probe(volatile char *p) {
    int signal = sigsetjmp(recover, 1);
    if (signal) return -signal;
    return *p & 0xff;
}

static char *anonymous(size_t pages) {
    char *p = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED);
    return p;
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 50);
    signal(SIGSEGV, on_fault);
    signal(SIGBUS, on_fault);
    char *p = anonymous(8);
    for (int i = 0; i < 8; i++) p[i * PAGE] = (char)(i + 1);
    CHECK(munmap(p + 2 * PAGE, PAGE) == 0);
    printf("hole: %d %d %d\n", probe(p + PAGE), probe(p + 2 * PAGE), probe(p + 3 * PAGE));
    char *fixed = mmap(p + 2 * PAGE, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    CHECK(fixed == p + 2 * PAGE && *fixed == 0);
    errno = 0;
    void *taken = mmap(p, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    printf("noreplace refused: %d\n", taken == MAP_FAILED && errno == EEXIST);
    char *grown = mremap(p, 8 * PAGE, 64 * PAGE, MREMAP_MAYMOVE);
    CHECK(grown != MAP_FAILED || errno == EFAULT); /* the hole split the mapping */
    char *q = anonymous(4);
    memset(q, 7, 4 * PAGE);
    q = mremap(q, 4 * PAGE, 40 * PAGE, MREMAP_MAYMOVE);
    CHECK(q != MAP_FAILED);
    printf("grown: %d %d\n", q[4 * PAGE - 1], q[39 * PAGE]);
    q = mremap(q, 40 * PAGE, 2 * PAGE, 0);
    printf("shrunk: %d %d\n", probe(q), probe(q + 3 * PAGE));
    CHECK(mprotect(q, PAGE, PROT_NONE) == 0);
    printf("protected: %d %d\n", probe(q), probe(q + PAGE));
    CHECK(mprotect(q, PAGE, PROT_READ) == 0);
    CHECK(madvise(q + PAGE, PAGE, MADV_DONTNEED) == 0);
    printf("discarded: %d %d\n", probe(q), probe(q + PAGE));
    int fd = memfd_create("guest", 0);
    CHECK(fd >= 0 && ftruncate(fd, 2 * PAGE) == 0);
    char *shared = mmap(NULL, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    char *private = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    strcpy(shared + 100, "shared text");
    private[0] = 'p';
    char text[12] = "";
    CHECK(pread(fd, text, 11, 100) == 11);
    printf("file: \"%s\", first %d, private %c \"%s\", beyond %d\n", text, shared[0], private[0], private + 100, probe(shared + 2 * PAGE));
    pid_t child = fork();
    if (child == 0) {
        strcpy(shared + PAGE, "from the child");
        _exit(0);
    }
    while (shared[PAGE + 13] != 'd') usleep(100);
    printf("shared with a child: \"%s\"\n", shared + PAGE);
    CHECK(mmap(NULL, 0, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED && errno == EINVAL);
    CHECK(mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, -1, 0) == MAP_FAILED && errno == EBADF);
    CHECK(munmap(p + 1, PAGE) == -1 && errno == EINVAL);
    CHECK(mprotect((void *)0x10000000000, PAGE, PROT_READ) == -1 && errno == ENOMEM);
    char *low = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
    printf("32-bit mapping: %d\n", low == MAP_FAILED || (uintptr_t)low < 0x80000000);
    char *huge = mmap(NULL, 1UL << 36, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(huge != MAP_FAILED && munmap(huge, 1UL << 36) == 0);
    uint64_t sum = 1;
    for (long i = 0; i < n; i++) {
        size_t pages = (size_t)(i % 7) + 1;
        char *m = anonymous(pages);
        m[pages * PAGE - 1] = (char)i;
        sum = mix(sum, (uint64_t)m[pages * PAGE - 1] + (uint64_t)m[0]);
        CHECK(munmap(m, pages * PAGE) == 0);
    }
    printf("churn %016lx\n", sum);
    return 0;
}
