/* Protection keys: the rights that a process starts with, faults of reads and writes with their
 * key, handlers (which start with the initial rights), their frames and the return from them,
 * threads, children and programs, system calls on protected buffers, the XSAVE family, code with
 * a key, and loops that are hot when their rights go. One line if the processor or the kernel
 * has no keys.
 *
 * Hard for a translator: the rights are a register that its own code is subject to as well. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
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
    /* The change is lost when the handler returns. */
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
    else *page = 1; /* The access is still denied. */
    wrpkru(open);
    printf("hot: %016llx, faults %d\n", (unsigned long long)sum, faults);
}

/* How the next handler changes the rights in its frame. */
enum edit { NOTHING, VALUE, INITIAL, NO_COMPONENT, NO_MAGIC, NO_STATE };
static volatile enum edit edit;
static int place_of_rights, size_of_state;

static void edit_frame(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)info;
    ucontext_t *uc = context;
    uint8_t *state = (uint8_t *)uc->uc_mcontext.fpregs;
    uint64_t *in_use = (uint64_t *)(state + 512), *features = (uint64_t *)(state + 472);
    uint32_t *rights = (uint32_t *)(state + place_of_rights);
    printf(" frame: component %d, in use %d, rights %08x\n", (int)(*features >> 9 & 1), (int)(*in_use >> 9 & 1), *rights);
    switch (edit) {
        case NOTHING: break;
        case VALUE: *rights = 0x55555550; break;
        case INITIAL: *in_use &= ~(1ul << 9); break;
        case NO_COMPONENT: *features &= ~(1ul << 9); break;
        case NO_MAGIC: *(uint32_t *)(state + 464) = 0; break;
        case NO_STATE: uc->uc_mcontext.fpregs = 0; break;
    }
}

static void frames(uint32_t initial) {
    struct sigaction action = {.sa_sigaction = edit_frame, .sa_flags = SA_SIGINFO}, old;
    sigaction(SIGUSR1, &action, &old);
    for (int i = NOTHING; i <= NO_STATE; i++) {
        edit = i;
        wrpkru(initial & ~0xc00u);
        CHECK(raise(SIGUSR1) == 0);
        printf("frame edited (%d): %08x\n", i, rdpkru());
    }
    edit = NOTHING;
    wrpkru(0);
    CHECK(raise(SIGUSR1) == 0);
    printf("all rights: %08x\n", rdpkru());
    wrpkru(initial);
    sigaction(SIGUSR1, &old, 0);
}

/* The rights as a component of the extended state. */
static void states(uint32_t initial) {
    static uint8_t area[16384] __attribute__((aligned(64)));
    CHECK(size_of_state <= (int)sizeof area);
    uint64_t *in_use = (uint64_t *)(area + 512);
    uint32_t *rights = (uint32_t *)(area + place_of_rights);
    for (int round = 0; round < 200; round++) {
        wrpkru(with(initial, 5, round % 4));
        asm volatile("xsave64 %0" : "+m"(area) : "a"(1 << 9), "d"(0) : "memory");
        CHECK(*rights == rdpkru() && *in_use >> 9 & 1);
        *rights = with(initial, 6, round % 4);
        asm volatile("xrstor64 %0" : : "m"(area), "a"(1 << 9), "d"(0) : "memory");
        CHECK(rdpkru() == with(initial, 6, round % 4));
        /* A component that is not requested is not changed. */
        *rights = 0;
        asm volatile("xrstor64 %0" : : "m"(area), "a"(3), "d"(0) : "memory");
        CHECK(rdpkru() == with(initial, 6, round % 4));
        *in_use = 0;
        asm volatile("xrstor64 %0" : : "m"(area), "a"(1 << 9), "d"(0) : "memory");
        CHECK(rdpkru() == 0);
    }
    wrpkru(initial);
    puts("states: as expected");
}

/* Nothing may touch memory while key 0 is denied. */
static void without_key_0(uint32_t initial) {
    for (uint32_t own = 1; own < 4; own++) {
        uint32_t seen;
        asm volatile(".byte 0x0f, 0x01, 0xef\n .byte 0x0f, 0x01, 0xee\n mov %%eax, %0\n mov %3, %%eax\n .byte 0x0f, 0x01, 0xef"
                     : "=&r"(seen), "+&a"((uint32_t){with(initial, 0, own)})
                     : "c"(0), "r"(initial), "d"(0)
                     : "memory");
        printf("without key 0: %08x, then %08x\n", seen, rdpkru());
    }
}

static sigjmp_buf out;
static volatile long fault_offset;
static uint8_t *two_pages;
static void note(int signal, siginfo_t *info, void *context) {
    (void)signal;
    fault_offset = (uint8_t *)info->si_addr - two_pages;
    printf(" code %d, key %d, error %lld, trap %lld\n", info->si_code, (int)info->si_pkey == key,
           (long long)((ucontext_t *)context)->uc_mcontext.gregs[REG_ERR],
           (long long)((ucontext_t *)context)->uc_mcontext.gregs[REG_TRAPNO]);
    siglongjmp(out, 1);
}

__attribute__((noinline)) static uint64_t sum_of(const uint8_t *bytes, long count, volatile long *done) {
    uint64_t sum = 0;
    for (long i = 0; i < count; i++) {
        sum = sum * 31 + bytes[i];
        *done = i;
    }
    return sum;
}

__attribute__((noinline)) static void fill(uint8_t *bytes, long count, int value) {
    for (volatile long i = 0; i < count; i++) bytes[i] = value + i;
}

static void attempt(const char *what, int which, uint32_t rights) {
    static volatile long done;
    uint64_t vector[2] = {1, 2};
    done = -1;
    fault_offset = -1;
    printf("%s\n", what);
    if (!sigsetjmp(out, 1)) {
        uint8_t *last = two_pages + PAGE;
        wrpkru(rights);
        switch (which) {
            case 0: done += sum_of(two_pages, 2 * PAGE, &done) != 0; break;
            case 1: fill(two_pages, 2 * PAGE, 3); break;
            case 2: asm volatile("movdqu %1, %%xmm0\n movdqu %%xmm0, %0" : "=m"(vector) : "m"(*(uint64_t(*)[2])(last - 8)) : "xmm0"); break;
            case 3: asm volatile("movdqu %1, %%xmm0\n movdqu %%xmm0, %0" : "=m"(*(uint64_t(*)[2])(last - 8)) : "m"(vector) : "xmm0"); break;
            case 4: __atomic_fetch_add(last + 4, 1, __ATOMIC_SEQ_CST); break;
            case 5: *(volatile uint8_t *)(last + 5) += 1; break;
            case 6: {
                void *to = last - 100, *from = two_pages;
                long count = 200;
                asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(count) : : "memory");
                break;
            }
        }
        puts(" no fault");
    }
    /* siglongjmp keeps the handler's rights, which are the initial ones. */
    wrpkru(with(rdpkru(), key, 0));
    printf(" offset %ld, done %ld, sum %016llx\n", fault_offset, done, (unsigned long long)mix_bytes(1, two_pages, 2 * PAGE));
}

/* Accesses of all sorts to a page whose neighbour has no key, in loops that are hot by then. */
static void accesses(uint32_t initial) {
    struct sigaction action = {.sa_sigaction = note, .sa_flags = SA_SIGINFO}, old;
    sigaction(SIGSEGV, &action, &old);
    two_pages = mmap(0, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pkey_mprotect(two_pages + PAGE, PAGE, PROT_READ | PROT_WRITE, key) == 0);
    static const char *names[] = {"sum", "fill", "vector load", "vector store", "locked add", "add", "copy"};
    for (uint32_t own = 0; own < 3; own++)
        for (int which = 0; which < 7; which++) attempt(names[which], which, with(initial, key, own));
    /* The same code, while the rights are given and taken away. */
    for (int round = 0; round < 20; round++) attempt("again", round % 2, with(initial, key, round % 3));
    wrpkru(initial);
    CHECK(munmap(two_pages, 2 * PAGE) == 0);
    sigaction(SIGSEGV, &old, 0);
}

static volatile int ticks;
static void tick(int signal) {
    (void)signal;
    rights_in_handler |= rdpkru();
    ticks++;
}

/* Signals in the middle of a loop with rights that handlers do not have. */
static void interrupted(uint32_t initial) {
    struct sigaction action = {.sa_handler = tick};
    sigaction(SIGALRM, &action, 0);
    struct itimerval every = {{0, 2000}, {0, 2000}}, never = {{0, 0}, {0, 0}};
    wrpkru(with(initial, key, 0));
    rights_in_handler = 0;
    setitimer(ITIMER_REAL, &every, 0);
    uint64_t sum = 0;
    while (ticks < 20)
        for (int i = 0; i < 1000; i++) sum += *page;
    setitimer(ITIMER_REAL, &never, 0);
    printf("interrupted: handlers %08x, loop %08x, %d\n", rights_in_handler, rdpkru(), sum > 0);
    wrpkru(initial);
}

/* Protected code can be executed, not read; and changed with the right to write. */
static void code(uint32_t initial) {
    /* lea eax, [rdi + 1]; ret */
    static const uint8_t bytes[] = {0x8d, 0x47, 1, 0xc3};
    uint8_t *place = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(place, bytes, sizeof bytes);
    CHECK(pkey_mprotect(place, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, key) == 0);
    int sum = 0;
    for (int round = 0; round < 100; round++) {
        wrpkru(with(initial, key, 0));
        place[2] = round;
        wrpkru(with(initial, key, PKEY_DISABLE_ACCESS));
        for (int call = 0; call < 100; call++) sum += ((int (*)(int))place)(call);
    }
    page = place;
    printf("code: %d\n", sum);
    try_read("code");
    try_write("code", 0);
    wrpkru(initial);
    CHECK(munmap(place, PAGE) == 0);
}

/* A set of signals that may not be read, and one that may not be written. */
static void masks(uint32_t initial) {
    sigset_t own;
    sigemptyset(&own);
    memset((void *)page, 0, sizeof own);
    for (uint32_t rights = 0; rights < 4; rights++) {
        wrpkru(with(initial, key, rights));
        /* The C library's function would read the set itself. */
        int reading = syscall(SYS_rt_sigprocmask, SIG_BLOCK, page, 0, 8) == 0 ? 0 : errno;
        int writing = syscall(SYS_rt_sigprocmask, SIG_BLOCK, &own, page, 8) == 0 ? 0 : errno;
        printf("mask: %d %d\n", reading == EFAULT, writing == EFAULT);
        wrpkru(with(initial, key, 0));
    }
    wrpkru(initial);
}

int main(int argc, char **argv) {
    uint32_t a, b, c = 0, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(c >> 4 & 1)) {
        puts("no protection keys");
        return 0;
    }
    uint32_t initial = rdpkru();
    setvbuf(stdout, 0, _IONBF, 0);
    if (argc > 1) {
        printf("a program starts with %08x\n", initial);
        return 0;
    }
    __cpuid_count(13, 9, a, b, c, d);
    place_of_rights = b;
    size_of_state = a + b;
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

    /* Handlers start with the initial rights; their return restores the old ones. */
    for (uint32_t own = 0; own < 4; own++) {
        uint32_t rights = with(initial, key, own);
        wrpkru(rights);
        CHECK(raise(SIGUSR1) == 0);
        printf("in the handler %08x, after it %08x\n", rights_in_handler, rdpkru());
    }
    hot();
    masks(initial);
    interrupted(initial);
    frames(initial);
    states(initial);
    without_key_0(initial);
    accesses(initial);
    volatile uint8_t *data = page;
    code(initial);
    page = data;

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
    wrpkru(with(initial, key, 0));
    child = fork();
    if (child == 0) {
        execl("/proc/self/exe", argv[0], "program", (char *)0);
        _exit(1);
    }
    CHECK(waitpid(child, &status, 0) == child);
    printf("program %x\n", status);

    wrpkru(initial);
    CHECK(pkey_mprotect((void *)page, PAGE, PROT_READ | PROT_WRITE, 0) == 0);
    CHECK(pkey_free(key) == 0);
    try_read("without a key");
    int second = pkey_alloc(0, PKEY_DISABLE_WRITE);
    printf("key %d, rights %08x\n", second, rdpkru());
    printf("wrong rights: %d\n", pkey_alloc(0, 8) == -1 && errno == EINVAL);
    return 0;
}
