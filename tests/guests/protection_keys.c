/* Protection keys: the rights a process starts with, faults of reads and writes with their key, handlers (which start with the
   initial rights) and the return from them, threads and children, system calls on protected buffers. One line where the
   processor or the kernel has no keys. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

#define PAGE 4096

/* Assembly: the compiler would want -mpku, and must not move accesses across a change of rights. */
static uint32_t rdpkru(void) {
    uint32_t rights, high;
    asm volatile(".byte 0x0f, 0x01, 0xee" : "=a"(rights), "=d"(high) : "c"(0) : "memory");
    return rights;
}

static void wrpkru(uint32_t rights) {
    asm volatile(".byte 0x0f, 0x01, 0xef" : : "a"(rights), "c"(0), "d"(0) : "memory");
}

/* `rights` with those of one key replaced. */
static uint32_t with(uint32_t rights, int key, uint32_t own) {
    return (rights & ~(3u << 2 * key)) | own << 2 * key;
}

static sigjmp_buf back;
static volatile uint8_t *page;
static int key;
static volatile uint32_t rights_in_handler;

static void leave(int signal, siginfo_t *info, void *context) {
    (void)context;
    rights_in_handler = rdpkru();
    printf("signal %d, code %d, address %d, key %d\n", signal, info->si_code, info->si_addr == page,
           info->si_code == SEGV_PKUERR && (int)info->si_pkey == key);
    siglongjmp(back, 1);
}

static void look(int signal) {
    (void)signal;
    rights_in_handler = rdpkru();
    /* Gone when the handler returns. */
    wrpkru(0);
}

static void try_read(const char *what) {
    uint32_t rights = rdpkru();
    if (!sigsetjmp(back, 1)) printf("%s: read %d\n", what, *page);
    /* siglongjmp keeps the handler's rights. */
    wrpkru(rights);
}

static void try_write(const char *what, uint8_t value) {
    uint32_t rights = rdpkru();
    if (!sigsetjmp(back, 1)) {
        *page = value;
        printf("%s: written\n", what);
    }
    wrpkru(rights);
}

/* System calls that read and that write the page. */
static void calls(const char *what, const int pipe_ends[2]) {
    ssize_t sent = write(pipe_ends[1], (void *)page, 1);
    int why = sent < 0 ? errno : 0;
    char byte = 9;
    if (sent < 0) CHECK(write(pipe_ends[1], &byte, 1) == 1);
    ssize_t received = read(pipe_ends[0], (void *)page, 1);
    int why_not = received < 0 ? errno : 0;
    printf("%s: write %zd %d, read %zd %d\n", what, sent, why == EFAULT, received, why_not == EFAULT);
    /* The kernel may have taken the byte before it noticed: empty the pipe either way. */
    while (read(pipe_ends[0], &byte, 1) == 1) continue;
}

static void *thread(void *expected) {
    printf("a thread inherits: %d\n", rdpkru() == *(uint32_t *)expected);
    try_read("thread");
    wrpkru(with(rdpkru(), key, 0));
    try_read("thread with rights of its own");
    return 0;
}

/* Many accesses in a loop, so that it is compiled, with the rights taken away in the middle. */
static void hot(void) {
    volatile int faults = 0;
    uint32_t open = with(rdpkru(), key, 0), shut = with(open, key, PKEY_DISABLE_WRITE);
    volatile uint64_t sum = 0;
    for (int round = 0; round < 3000; round++) {
        wrpkru(open);
        *page = round;
        wrpkru(shut);
        sum = sum * 31 + *page + rdpkru();
    }
    if (sigsetjmp(back, 1)) faults++;
    else *page = 1; /* The rights are still shut. */
    wrpkru(open);
    printf("hot: %016llx, faults %d\n", (unsigned long long)sum, faults);
}

int main(void) {
    uint32_t a, b, c = 0, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(c >> 4 & 1)) {
        puts("no protection keys");
        return 0;
    }
    uint32_t initial = rdpkru();
    setvbuf(stdout, 0, _IONBF, 0);
    printf("initial rights %08x\n", initial);
    struct sigaction action = {.sa_sigaction = leave, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, 0);
    action = (struct sigaction){.sa_handler = look};
    sigaction(SIGUSR1, &action, 0);
    int pipe_ends[2];
    CHECK(pipe2(pipe_ends, O_NONBLOCK) == 0);

    key = pkey_alloc(0, PKEY_DISABLE_ACCESS);
    printf("key %d, rights %08x\n", key, rdpkru());
    page = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *page = 1;
    CHECK(pkey_mprotect((void *)page, PAGE, PROT_READ | PROT_WRITE, key) == 0);
    try_read("no access");
    try_write("no access", 2);
    calls("no access", pipe_ends);
    wrpkru(with(rdpkru(), key, PKEY_DISABLE_WRITE));
    try_read("no writing");
    try_write("no writing", 3);
    calls("no writing", pipe_ends);
    wrpkru(with(rdpkru(), key, 0));
    try_read("all");
    try_write("all", 4);
    calls("all", pipe_ends);

    /* Handlers start with the initial rights; the return restores. */
    for (uint32_t own = 0; own < 4; own++) {
        uint32_t rights = with(initial, key, own);
        wrpkru(rights);
        CHECK(raise(SIGUSR1) == 0);
        printf("in the handler %08x, after it %08x\n", rights_in_handler, rdpkru());
    }
    hot();

    uint32_t none = with(initial, key, PKEY_DISABLE_ACCESS);
    wrpkru(none);
    pthread_t other;
    CHECK(pthread_create(&other, 0, thread, &none) == 0);
    CHECK(pthread_join(other, 0) == 0);
    printf("the thread's rights are its own: %d\n", rdpkru() == none);
    pid_t child = fork();
    if (child == 0) {
        printf("a child inherits: %d\n", rdpkru() == none);
        try_read("child");
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    printf("child %x\n", status);

    wrpkru(initial);
    CHECK(pkey_mprotect((void *)page, PAGE, PROT_READ | PROT_WRITE, 0) == 0);
    CHECK(pkey_free(key) == 0);
    try_read("without a key");
    int second = pkey_alloc(0, PKEY_DISABLE_WRITE);
    printf("key %d, rights %08x\n", second, rdpkru());
    printf("wrong rights: %d\n", pkey_alloc(0, 8) == -1 && errno == EINVAL);
    return 0;
}
