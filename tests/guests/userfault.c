/* Pages that another thread fills when they are touched (userfaultfd): by loads, by stores, by a
 * system call; and pages that no thread fills (SIGBUS). If userfaultfd is not allowed the
 * program prints that.
 *
 * Hard for a translator: a plain access waits for another guest thread, so it must hold no lock
 * then. A signal of the translator's would interrupt that access, and the other thread would read
 * of the same fault twice. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "guest.h"

enum { PAGE = 4096, PAGES = 300 };

static int fd;
static int filled;

static int open_faults(uint64_t features) {
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    struct uffdio_api api = {.api = UFFD_API, .features = features};
    if (fd < 0 || ioctl(fd, UFFDIO_API, &api) != 0) {
        puts("no user faults here");
        exit(0);
    }
    return fd;
}

static unsigned char *watched(int fd, size_t size) {
    unsigned char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct uffdio_register whole = {.range = {(uintptr_t)memory, size}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    CHECK(memory != MAP_FAILED && ioctl(fd, UFFDIO_REGISTER, &whole) == 0);
    return memory;
}

static void *fill(void *start) {
    static unsigned char page[PAGE] __attribute__((aligned(PAGE)));
    for (filled = 0; filled < PAGES; filled++) {
        struct uffd_msg message;
        struct pollfd faults = {.fd = fd, .events = POLLIN};
        CHECK(poll(&faults, 1, -1) == 1);
        CHECK(read(fd, &message, sizeof message) == sizeof message && message.event == UFFD_EVENT_PAGEFAULT);
        /* Nothing interrupts the wait, so nobody hears of the fault again. */
        CHECK(poll(&faults, 1, filled % 2) == 0);
        uint64_t place = message.arg.pagefault.address & -(uint64_t)PAGE;
        memset(page, (int)((place - (uintptr_t)start) / PAGE * 7), PAGE);
        struct uffdio_copy copy = {.dst = place, .src = (uintptr_t)page, .len = PAGE};
        CHECK(ioctl(fd, UFFDIO_COPY, &copy) == 0);
    }
    return NULL;
}

static sigjmp_buf back;
static void on_fault(int signal) {
    siglongjmp(back, signal);
}

int main(void) {
    fd = open_faults(0);
    unsigned char *memory = watched(fd, PAGES * PAGE);
    pthread_t filler;
    CHECK(pthread_create(&filler, NULL, fill, memory) == 0);
    uint64_t sum = 0;
    int ends[2];
    CHECK(pipe(ends) == 0);
    for (int i = 0; i < PAGES; i++) {
        unsigned char *page = memory + (size_t)(i * 77 % PAGES) * PAGE;
        if (i % 3 == 0) {
            sum = mix(sum, page[i]);
        } else if (i % 3 == 1) {
            page[i] ^= 3;
            sum = mix(sum, page[i]);
        } else {
            unsigned char byte;
            CHECK(write(ends[1], page + i, 1) == 1 && read(ends[0], &byte, 1) == 1);
            sum = mix(sum, byte);
        }
        sum = mix(sum, page[PAGE - 1]);
    }
    pthread_join(filler, NULL);
    printf("%d pages, %016llx\n", filled, (unsigned long long)sum);

    int signals = open_faults(UFFD_FEATURE_SIGBUS);
    memory = watched(signals, PAGE);
    struct sigaction action = {.sa_handler = on_fault};
    sigaction(SIGBUS, &action, NULL);
    int signal = sigsetjmp(back, 1);
    if (signal == 0) printf("read %d\n", *(volatile unsigned char *)memory);
    printf("SIGBUS: %d\n", signal == SIGBUS);
}
