/* System calls at sites that are hot before and after code in writable memory is, some of which write to the page
 * of that code and to the page beside it. Each reads or writes all that it was asked for, and the code that was
 * read is what is executed then.
 *
 * Hard for a translator: it may have made the page read-only behind the program's back, so the kernel
 * cannot write there; a `read` across both pages would then be short, without an error. The pages are new ones
 * every few rounds, since it may give that up for a page that is often written. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "guest.h"

enum { PAGE = 4096, CODE = PAGE + 64, LENGTH = PAGE };

static unsigned char *pages;
static int file;

/* read(2) by sites of other forms than that of the C library. */
static long read_nop(int fd, void *to, size_t n) {
    long result;
    __asm__ volatile("xor %%eax, %%eax; syscall; nop"
                     : "=a"(result) : "D"(fd), "S"(to), "d"(n) : "rcx", "r11", "memory");
    return result;
}

static long read_mov(int fd, void *to, size_t n) {
    long result;
    __asm__ volatile("mov $0, %%eax; syscall"
                     : "=a"(result) : "D"(fd), "S"(to), "d"(n) : "rcx", "r11", "memory");
    return result;
}

static long read_any(int fd, void *to, size_t n) { return syscall(SYS_read, fd, to, n); }

static long read_libc(int fd, void *to, size_t n) { return read(fd, to, n); }

/* Sums n, n - 1, ... times `factor`, which is in the code. */
static void make(unsigned char *at, unsigned char factor) {
    unsigned char code[] = {
        0x31, 0xc0,             /* xor  eax, eax */
        0x6b, 0xcf, factor,     /* again: imul ecx, edi, factor */
        0x01, 0xc8,             /* add  eax, ecx */
        0xff, 0xcf,             /* dec  edi */
        0x75, 0xf7,             /* jnz  again */
        0xc3,
    };
    memcpy(at, code, sizeof code);
}

static unsigned sum(unsigned n) {
    return ((unsigned (*)(unsigned))(uintptr_t)(pages + CODE))(n);
}

int main(int argc, char **argv) {
    long rounds = iterations(argc, argv, 400);
    long (*const reads[])(int, void *, size_t) = {read_libc, read_nop, read_mov, read_any};
    static unsigned char image[LENGTH];
    file = memfd_create("image", 0);
    CHECK(file >= 0);
    for (long i = 0; i < 4 * rounds; i++) {
        if (i % 8 == 0) {
            if (pages != NULL) CHECK(munmap(pages, 2 * PAGE) == 0);
            pages = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            CHECK(pages != MAP_FAILED);
        }
        unsigned char factor = (unsigned char)(i % 100 + 1);
        /* From the middle of the first page to the middle of the second. */
        memset(image, (int)i, sizeof image);
        make(image + CODE - PAGE / 2, factor);
        CHECK(pwrite(file, image, sizeof image, 0) == sizeof image);
        CHECK(lseek(file, 0, SEEK_SET) == 0);
        CHECK(reads[i / 2 % 4](file, pages + PAGE / 2, LENGTH) == LENGTH);
        for (int n = 0; n < 3; n++) {
            unsigned count = (unsigned)(i % 7) + 3;
            CHECK(sum(count) == count * (count + 1) / 2 * factor);
        }
        CHECK(getppid() > 0 && pages[PAGE + PAGE / 2 - 1] == (unsigned char)i);
        CHECK(pwrite(file, pages + CODE, 16, LENGTH) == 16);
    }
    puts("done");
    return 0;
}
