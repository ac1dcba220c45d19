/* Pages that cannot be executed: the fault reports the address of the byte, a handler makes the
 * page executable, and after a later mprotect the code faults again.
 *
 * Hard for a translator: the processor never executes the page, so the check is the
 * translator's. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include "guest.h"

static unsigned char *pages;
static int faults;

static void on_fault(int signal, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    (void)signal;
    printf("fault at %ld, code %d, rip %ld, error %#llx\n", (long)((unsigned char *)info->si_addr - pages), info->si_code,
           (long)((unsigned char *)registers[REG_RIP] - pages), (unsigned long long)registers[REG_ERR]);
    faults++;
    uintptr_t page = (uintptr_t)info->si_addr & -4096ul;
    CHECK(mprotect((void *)page, 4096, PROT_READ | PROT_EXEC) == 0);
}

static int call(long offset) { return ((int (*)(void))(uintptr_t)(pages + offset))(); }

int main(void) {
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
    pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    /* mov $42, %eax; ret: once at the start, once across the two pages. */
    static const unsigned char code[] = {0xb8, 42, 0, 0, 0, 0xc3};
    memcpy(pages, code, sizeof code);
    memcpy(pages + 4094, code, sizeof code);
    for (int round = 0; round < 2; round++) {
        CHECK(call(0) == 42);
        CHECK(call(4094) == 42);
        CHECK(call(0) == 42);
        CHECK(faults == 2 * round + 2);
        CHECK(mprotect(pages, 8192, PROT_READ | PROT_WRITE) == 0);
    }
    CHECK(call(4094) == 42);
    printf("%d faults\n", faults);
    return 0;
}
