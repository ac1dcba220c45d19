/* A program with an address space layout of its own. It maps all unused pages of the low two
 * gigabytes at fixed addresses, piece by piece, and executes code there, while loops are hot
 * and, with an argument, other threads run.
 *
 * Hard for a translator: none of its own memory may be in the way, and MAP_FIXED replaces code. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

#define PAGE 4096UL
#define FIRST 0x20000000UL
#define LAST 0x7e000000UL
#define STEP 0x02000000UL

static volatile int stop;

static __attribute__((noinline)) uint64_t work(uint64_t rounds) {
    uint64_t sum = rounds;
    for (uint64_t i = 0; i < rounds; i++) sum = (i & 7) == 3 ? mix(sum, i) : sum * 31 + i;
    return sum;
}

static void *spin(void *unused) {
    (void)unused;
    uint64_t expected = work(500);
    while (!stop) CHECK(work(500) == expected);
    return NULL;
}

/* mov $value, %eax; ret */
static void constant(uint8_t *at, uint32_t value) {
    at[0] = 0xb8;
    memcpy(at + 1, &value, 4);
    at[5] = 0xc3;
}

int main(int argc, char **argv) {
    int threads = argc > 1 ? atoi(argv[1]) : 0;
    pthread_t thread[8];
    for (int i = 0; i < threads; i++) CHECK(pthread_create(&thread[i], NULL, spin, NULL) == 0);
    uint64_t expected = work(300), sum = 1;
    int pieces = 0;
    for (uintptr_t address = FIRST; address < LAST; address += STEP, pieces++) {
        for (int i = 0; i < 20; i++) CHECK(work(300) == expected);
        void *wanted = (void *)address;
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        uint8_t *got;
        switch (pieces % 3) {
            case 0: got = mmap(wanted, STEP, PROT_READ | PROT_WRITE | PROT_EXEC, flags | MAP_FIXED, -1, 0); break;
            case 1: got = mmap(wanted, STEP, PROT_READ | PROT_WRITE | PROT_EXEC, flags | MAP_FIXED_NOREPLACE, -1, 0); break;
            default:
                got = mmap(NULL, STEP, PROT_READ | PROT_WRITE | PROT_EXEC, flags, -1, 0);
                CHECK(got != MAP_FAILED);
                got = mremap(got, STEP, STEP, MREMAP_MAYMOVE | MREMAP_FIXED, wanted);
        }
        if (got != wanted) printf("%lx: %s\n", (unsigned long)address, strerror(errno));
        CHECK(got == wanted);
        for (size_t at = 0; at < STEP; at += 256 * PAGE) {
            CHECK(got[at] == 0);
            constant(got + at, (uint32_t)(address + at));
            for (int i = 0; i < 5; i++) sum = mix(sum, ((uint32_t(*)(void))(uintptr_t)(got + at))());
        }
        CHECK(mmap(wanted, PAGE, PROT_READ, flags | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED && errno == EEXIST);
        CHECK(mmap((void *)(address + 1), PAGE, PROT_READ, flags | MAP_FIXED, -1, 0) == MAP_FAILED && errno == EINVAL);
    }
    for (uintptr_t address = FIRST; address < LAST; address += STEP)
        sum = mix(sum, ((uint32_t(*)(void))(address + STEP - 256 * PAGE))());
    printf("%d pieces, %016lx\n", pieces, (unsigned long)sum);
    fflush(stdout);
    if (threads == 0) {
        int status;
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) _exit(work(300) == expected && ((uint32_t(*)(void))FIRST)() == FIRST ? 17 : 1);
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
        printf("child: %d\n", WEXITSTATUS(status));
        CHECK(munmap((void *)FIRST, LAST - FIRST) == 0 && work(300) == expected);
        puts("unmapped");
    }
    stop = 1;
    for (int i = 0; i < threads; i++) CHECK(pthread_join(thread[i], NULL) == 0);
    CHECK(work(300) == expected);
    return 0;
}
