/* A write barrier by page protection: the SIGSEGV handler makes the page writable and the store
 * is repeated.
 *
 * Hard for a translator: the fault comes in hot code and must show the state before the store. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/mman.h>
#include "guest.h"

static char *area;
static volatile int faults, last_page, last_write;
enum { PAGE = 4096, PAGES = 16 };

static void on_fault(int signal, siginfo_t *info, void *context) {
    (void)signal;
    uintptr_t address = (uintptr_t)info->si_addr;
    if (address < (uintptr_t)area || address >= (uintptr_t)area + PAGES * PAGE) _Exit(97);
    if (info->si_code != SEGV_ACCERR) _Exit(96);
    last_page = (int)((address - (uintptr_t)area) / PAGE);
    last_write = ((ucontext_t *)context)->uc_mcontext.gregs[REG_ERR] & 2 ? 1 : 0;
    faults++;
    if (mprotect(area + last_page * PAGE, PAGE, PROT_READ | PROT_WRITE)) _Exit(95);
}

int main(int argc, char **argv) {
    long rounds = iterations(argc, argv, 20);
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    area = mmap(NULL, PAGES * PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(area != MAP_FAILED);
    uint64_t sum = 1;
    for (long round = 0; round < rounds; round++) {
        int before = faults;
        /* A hot loop whose store faults once per page, after many iterations. */
        for (int i = 0; i < PAGES * PAGE; i += 256) {
            *(uint32_t *)(area + i) += (uint32_t)(i + round);
            sum = mix(sum, *(uint32_t *)(area + i));
        }
        CHECK(faults - before == PAGES);
        CHECK(last_page == PAGES - 1 && last_write == 1);
        CHECK(mprotect(area, PAGES * PAGE, PROT_READ) == 0);
    }
    printf("faults %d, sum %016lx\n", faults, sum);
    CHECK(mprotect(area, PAGES * PAGE, PROT_NONE) == 0);
    int value = *(volatile int *)(area + 5 * PAGE + 256);
    printf("read fault on page %d, write %d, value %d\n", last_page, last_write, value);
    /* A wide, unaligned store over a page boundary faults on the second page. */
    CHECK(mprotect(area, PAGES * PAGE, PROT_READ) == 0);
    CHECK(mprotect(area, PAGE, PROT_READ | PROT_WRITE) == 0);
    *(volatile uint64_t *)(area + PAGE - 3) = 0x1122334455667788;
    printf("crossing store: page %d, value %lx\n", last_page, *(volatile uint64_t *)(area + PAGE - 3));
    return 0;
}
