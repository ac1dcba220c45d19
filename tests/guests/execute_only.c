/* Code of pages that may be executed and not read (`mprotect` with PROT_EXEC alone; on
 * processors with protection keys such pages cannot be read), and code that is written and
 * executed by a mapping that may not be read.
 *
 * Hard for a translator: it must read the code to translate it. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include "guest.h"

typedef int (*function)(int);

static sigjmp_buf back;
static void handler(int signal, siginfo_t *info, void *context) {
    (void)context;
    siglongjmp(back, signal * 256 + info->si_code);
}

/* lea eax, [rdi + 1]; ret */
static const uint8_t code[] = {0x8d, 0x47, 1, 0xc3};

static void read_it(volatile uint8_t *bytes) {
    int fault = sigsetjmp(back, 1);
    if (!fault) printf("read %x\n", bytes[0]);
    else printf("signal %d, code %d\n", fault / 256, fault % 256);
}

int main(void) {
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, 0);
    sigaction(SIGBUS, &action, 0);

    uint8_t *only = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(only, code, sizeof code);
    CHECK(mprotect(only, 4096, PROT_EXEC) == 0);
    int sum = 0;
    for (int round = 0; round < 3000; round++) sum += ((function)only)(round);
    printf("execute only: %d\n", sum);
    read_it(only);
    /* And readable again, changed, and not. */
    for (int round = 0; round < 20; round++) {
        CHECK(mprotect(only, 4096, PROT_READ | PROT_WRITE) == 0);
        only[2] = round;
        CHECK(mprotect(only, 4096, PROT_EXEC) == 0);
        sum += ((function)only)(100);
    }
    printf("changed: %d\n", sum);
    /* Of shared memory, which others can change. */
    uint8_t *shared = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    memcpy(shared, code, sizeof code);
    CHECK(mprotect(shared, 4096, PROT_EXEC) == 0);
    for (int round = 0; round < 3000; round++) sum += ((function)shared)(round);
    printf("shared: %d\n", sum);
    read_it(shared);

    uint8_t *written = mmap(0, 4096, PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(written, code, sizeof code);
    for (int round = 0; round < 300; round++) {
        written[2] = round % 100;
        for (int call = 0; call < 20; call++) sum += ((function)written)(call);
    }
    printf("write and execute: %d\n", sum);
    read_it(written);
    return 0;
}
