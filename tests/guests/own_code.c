/* Reads its own code, hot code among it: checksums, copies that are executed, system calls that read
 * it, data and jump tables between functions, stores to it, its mapping, threads and children. One
 * line if the processor or the kernel has no protection keys.
 *
 * Hard for a translator that writes jumps into the code: only with keys it can keep them out of
 * sight. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "guest.h"

#define PAGE 4096

/* Data among code, on one page with the hot function. */
extern const char path[];
extern const struct timespec moment;
extern const struct iovec two_parts[2];
extern const uint64_t numbers[4];
asm(".text\n"
    ".p2align 12\n"
    "path: .asciz \"/dev/null\"\n"
    ".p2align 4\n"
    "moment: .quad 0, 1000\n"
    "two_parts: .quad path, 4, path + 4, 6\n"
    "numbers: .quad 1, 20, 300, 4000\n");

/* Position-independent, so that a copy can be executed. */
__attribute__((noinline, noclone, no_reorder)) static uint64_t hot(uint64_t n) {
    uint64_t x = 7;
    for (uint64_t i = 0; i < n; i++) {
        x = x * 31 + (i ^ x >> 3);
        if (x & 1) x += n;
    }
    return x;
}
__attribute__((noinline, no_reorder)) static void hot_end(void) { asm volatile("nop"); }

/* A jump table that lies in the code, and a loop over it, on a page of their own. */
uint64_t table_loop(uint64_t n);
asm(".text\n"
    ".p2align 12\n"
    "table_loop:\n"
    "  xor %eax, %eax\n"
    "1: mov %edi, %ecx\n"
    "  and $3, %ecx\n"
    "  lea jumps(%rip), %rdx\n"
    "  movslq (%rdx, %rcx, 4), %rcx\n"
    "  add %rdx, %rcx\n"
    "  jmp *%rcx\n"
    "2: add $1, %rax\n  jmp 6f\n"
    "3: lea (%rax, %rax, 2), %rax\n  jmp 6f\n"
    "4: xor $0x55, %rax\n  jmp 6f\n"
    "5: add numbers_in_code(%rip), %rax\n"
    "6: dec %rdi\n"
    "  jnz 1b\n"
    "  ret\n"
    ".p2align 2\n"
    "jumps: .long 2b - jumps, 3b - jumps, 4b - jumps, 5b - jumps\n"
    "numbers_in_code: .quad 123456789\n"
    ".p2align 12\n");

/* System calls at a site that becomes hot. */
static long call(long nr, long a, long b, long c) {
    long result;
    if (nr == SYS_getppid) {
        asm volatile("mov %1, %%eax\n syscall" : "=a"(result) : "i"(SYS_getppid) : "rcx", "r11", "memory");
    } else {
        asm volatile("mov %1, %%eax\n syscall"
                     : "=a"(result)
                     : "i"(SYS_write), "D"(a), "S"(b), "d"(c)
                     : "rcx", "r11", "memory");
    }
    return result;
}

static uint64_t rounds = 0;
static void work(void) {
    for (int round = 0; round < 40; round++) {
        rounds += hot(200 + round) + table_loop(100);
        call(SYS_getppid, 0, 0, 0);
    }
}

static uint32_t rdpkru(void) {
    uint32_t rights, high;
    asm volatile(".byte 0x0f, 0x01, 0xee" : "=a"(rights), "=d"(high) : "c"(0) : "memory");
    return rights;
}

static size_t length;
static uint64_t sum(void) { return mix_bytes(1, (void *)hot, length); }

static sigjmp_buf back;
static void leave(int signal, siginfo_t *info, void *context) {
    (void)context;
    printf("signal %d, code %d, address %d\n", signal, info->si_code, info->si_addr == (void *)hot);
    siglongjmp(back, 1);
}

/* How many mappings of executable code does this program's file have? */
static void mappings(const char *when) {
    char line[512], permissions[8];
    unsigned long start, end, lines = 0, pages = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps);
    while (fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx %7s", &start, &end, permissions) == 3 && strstr(line, "own_code") && permissions[2] == 'x') {
            lines++;
            pages += (end - start) / PAGE;
            CHECK(strcmp(permissions, "r-xp") == 0);
        }
    fclose(maps);
    printf("%s: %lu mappings, %lu pages\n", when, lines, pages);
}

static volatile int over;
static void *worker(void *unused) {
    (void)unused;
    uint64_t x = 0;
    while (!over) {
        x = x + hot(300);
        call(SYS_getppid, 0, 0, 0);
    }
    return (void *)x;
}

static int ends[2];
static uint8_t whole[1 << 16];
static const uint8_t *first;
static size_t some;
static uint64_t before;

/* `count` bytes were sent into the pipe: are they `bytes`? */
static void sent(const char *what, long count, const void *bytes) {
    static uint8_t got[1 << 16];
    long taken = 0;
    while (taken < count) {
        long n = read(ends[0], got + taken, sizeof got - taken);
        CHECK(n > 0);
        taken += n;
    }
    printf("%s: %ld, %d\n", what, count, count > 0 && memcmp(got, bytes, count) == 0);
}

static void loads(void) {
    mappings("at first");
    for (int round = 0; round < 30; round++) {
        work();
        CHECK(sum() == before);
        work();
        mappings("working");
        CHECK(memcmp(whole, first, some) == 0);
    }
    printf("worked: %016llx, numbers %llu\n", (unsigned long long)rounds, (unsigned long long)numbers[rounds & 3]);
}

static void copied(void) {
    for (int round = 0; round < 5; round++) {
        uint8_t *copy = mmap(0, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        work();
        void *to = copy;
        const void *from = (void *)hot;
        size_t count = length;
        if (round % 2) memcpy(to, from, count);
        else asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(count) : : "memory");
        for (int n = 100; n < 120; n++) CHECK(((uint64_t(*)(uint64_t))copy)(n) == hot(n));
    }
    puts("the copies work");
}

/* Kinds of instructions that read the page. */
static void instruction(int kind) {
    const uint64_t *at = (const uint64_t *)hot;
    uint64_t value = 0, expected = *(const uint64_t *)(whole + ((uint8_t *)hot - first));
    work();
    switch (kind) {
        case 0: asm volatile("push %1\n pop %0" : "=r"(value) : "m"(*at) : "memory"); break;
        case 1: asm volatile("xor %0, %0\n add %1, %0" : "=&r"(value) : "m"(*at)); break;
        case 2: {
            char equal;
            asm volatile("cmp %2, %1\n sete %0" : "=r"(equal) : "m"(*at), "r"(expected));
            value = equal ? expected : 0;
            break;
        }
        case 3: {
            uint64_t vector[2];
            asm volatile("movdqu %1, %%xmm1\n movdqu %%xmm1, %0" : "=m"(vector) : "m"(*(const uint64_t(*)[2])at) : "xmm1");
            value = vector[0];
            break;
        }
        case 4: asm volatile("fildll %1\n fistpll %0" : "=m"(value) : "m"(*at)); break;
        case 5: {
            const void *from = at;
            asm volatile("lodsq" : "=a"(value), "+S"(from) : : "memory");
            break;
        }
        case 6: {
            /* Half of it is on the page before, which is not hidden. */
            const void *from = (void *)(first - 4);
            asm volatile("mov (%1), %0" : "=r"(value) : "r"(from) : "memory");
            value = value >> 32 == *(uint32_t *)whole ? expected : 0;
            break;
        }
        case 7: {
            const void *table = first;
            asm volatile("xlat" : "=a"(value) : "a"((uint64_t)((uint8_t *)hot - first)), "b"(table) : "memory");
            value = (uint8_t)value == (uint8_t)expected ? expected : 0;
            break;
        }
        case 8: {
            static uint8_t area[1024] __attribute__((aligned(64)));
            asm volatile("fxsave %0" : "=m"(area));
            asm volatile("ldmxcsr %0" : : "m"(*(uint32_t *)(area + 24)));
            asm volatile("fldcw %0" : : "m"(numbers[3]));
            asm volatile("fninit");
            value = expected;
            break;
        }
    }
    printf("instruction %d: %d\n", kind, value == expected);
}

static void writes(void) {
    work();
    sent("write", write(ends[1], (void *)hot, length), (void *)hot);
}

static void large_writes(void) {
    work();
    sent("write much", write(ends[1], first, some), whole);
    work();
    sent("write much", write(ends[1], first, some), whole);
}

static void lists(void) {
    work();
    struct iovec parts[2] = {{whole, 100}, {(void *)hot, length}};
    CHECK(writev(ends[1], parts, 2) == (long)length + 100);
    CHECK(read(ends[0], whole, 100) == 100);
    sent("writev", length, (void *)hot);
}

static void constant_lists(void) {
    work();
    CHECK(writev(ends[1], two_parts, 2) == 10);
    sent("writev of parts in code", 10, path);
}

/* The site of the call is hot before the code is. */
static void hot_writes(void) {
    static uint8_t got[PAGE];
    for (int round = 0; round < 60; round++) {
        const void *bytes = round == 50 ? (void *)hot : (void *)whole;
        if (round == 40) work();
        long n = call(SYS_write, ends[1], (long)bytes, length);
        CHECK(n == (long)length);
        CHECK(read(ends[0], got, length) == n && memcmp(got, bytes, length) == 0);
    }
    puts("hot writes work");
    CHECK(call(SYS_write, ends[1], 8, 16) == -EFAULT);
}

static void messages(void) {
    int pair[2];
    char got[16];
    CHECK(socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) == 0);
    struct msghdr message = {.msg_iov = (struct iovec *)two_parts, .msg_iovlen = 2};
    work();
    CHECK(sendmsg(pair[0], &message, 0) == 10 && read(pair[1], got, 16) == 10);
    printf("sendmsg: %s\n", got);
}

static void opens(void) {
    work();
    printf("open: %d\n", open(path, O_RDWR) >= 0);
}

static void sleeps(void) {
    work();
    printf("nanosleep: %d\n", nanosleep(&moment, 0));
}

/* The kernel cannot write to code. */
static void reads(void) {
    char got[4];
    work();
    CHECK(write(ends[1], "xy", 2) == 2);
    int failed = read(ends[0], (void *)hot, 1) < 0;
    printf("read into code: %d %d\n", failed, errno);
    printf("left %zd\n", read(ends[0], got, 4));
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0, pair) == 0);
    CHECK(write(pair[0], "a", 1) == 1 && write(pair[0], "bc", 2) == 2);
    work();
    failed = read(pair[1], (void *)hot, 1) < 0;
    printf("read into code: %d %d\n", failed, errno);
    printf("left %zd\n", read(pair[1], got, 4));
    printf("left %zd\n", read(pair[1], got, 4));
    CHECK(sum() == before);
}

static void stores(void) {
    struct sigaction action = {.sa_sigaction = leave, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, 0);
    for (int round = 0; round < 20; round++) {
        work();
        if (!sigsetjmp(back, 1)) *(volatile uint8_t *)hot = 0x90;
        if (!sigsetjmp(back, 1)) __atomic_fetch_add((uint8_t *)hot, 1, __ATOMIC_SEQ_CST);
    }
}

static void threads(void) {
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], 0, worker, 0) == 0);
    for (int round = 0; round < 100; round++) {
        CHECK(sum() == before && memcmp(whole, first, some) == 0);
        if (round == 10) usleep(20000);
        if (round > 50 && round % 10 == 0) sent("write beside threads", write(ends[1], first, some), whole);
        sched_yield();
    }
    over = 1;
    for (int i = 0; i < 2; i++) CHECK(pthread_join(threads[i], 0) == 0);
}

static void children(void) {
    for (int round = 0; round < 3; round++) {
        work();
        pid_t child = fork();
        if (child == 0) {
            CHECK(sum() == before);
            work();
            CHECK(sum() == before && memcmp(whole, first, some) == 0);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        printf("child %x\n", status);
    }
}

static void changes(void) {
    work();
    CHECK(mprotect((void *)first, PAGE, PROT_READ | PROT_EXEC) == 0 && sum() == before);
    work();
    CHECK(mprotect((void *)first, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC) == 0 && sum() == before);
    work();
    CHECK(sum() == before);
    CHECK(mprotect((void *)first, PAGE, PROT_READ | PROT_EXEC) == 0 && sum() == before);
    work();
    CHECK(sum() == before);
    puts("changed");
}

/* All of the code moves away by one call, and back. */
static void moved(void) {
    static const char name[] = "/proc/self/exe";
    int file = open(name, O_RDONLY);
    CHECK(file >= 0);
    uint8_t *code = mmap(0, 8 * PAGE, PROT_READ | PROT_EXEC, MAP_PRIVATE, file, ((uintptr_t)hot - 0x400000) & -PAGE);
    CHECK(code != MAP_FAILED);
    uint64_t (*mapped)(uint64_t) = (void *)(code + ((uintptr_t)hot & (PAGE - 1)));
    for (int round = 0; round < 6; round++) {
        for (int n = 0; n < 50; n++) {
            CHECK(mapped(100 + n) == hot(100 + n));
            call(SYS_getppid, 0, 0, 0);
        }
        uint8_t *to = mremap(code, 8 * PAGE, 8 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, code + (round % 2 ? -16 : 16) * PAGE);
        CHECK(to != MAP_FAILED);
        code = to;
        mapped = (void *)(code + ((uintptr_t)hot & (PAGE - 1)));
    }
    puts("moved");
}

/* Keys of its own. */
static void own_keys(void) {
    work();
    int key = pkey_alloc(0, PKEY_DISABLE_WRITE);
    printf("key %d, rights %08x\n", key, rdpkru());
    int keys = 1, next;
    while ((next = pkey_alloc(0, PKEY_DISABLE_WRITE)) > 0) keys++, key = next;
    printf("keys: %d, the last one %d\n", keys, key);
    work();
    struct sigaction action = {.sa_sigaction = leave, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, 0);
    volatile uint8_t *page = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pkey_mprotect((void *)page, PAGE, PROT_READ | PROT_WRITE, key) == 0);
    printf("can be read: %d\n", *page);
    if (!sigsetjmp(back, 1)) *page = 1;
    if (!sigsetjmp(back, 1)) printf("cannot be read: %d\n", *page);
    work();
    printf("end: %016llx\n", (unsigned long long)rounds);
}

/* In a directory without /proc. */
static void jailed(void) {
    work();
    if (chroot("/tmp") != 0) puts("no root");
    CHECK(sum() == before && memcmp(whole, first, some) == 0);
    work();
    CHECK(mprotect((void *)first, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC) == 0 && sum() == before);
    work();
    CHECK(sum() == before);
    printf("jailed: %016llx\n", (unsigned long long)rounds);
}

static void programs(void) {
    work();
    execl("/proc/self/exe", path, path, (char *)0);
    puts("cannot be executed");
}

static void (*const parts[])(void) = {
    loads, copied, writes, large_writes, lists, constant_lists, hot_writes, messages, opens, sleeps,
    reads, stores, threads, children, changes, moved, own_keys, jailed, programs,
};

#define INSTRUCTIONS 9

/* Each part is a program of its own, which nothing has read before. */
int main(int argc, char **argv) {
    uint32_t a, b, c = 0, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(c >> 4 & 1)) {
        puts("no protection keys");
        return 0;
    }
    setvbuf(stdout, 0, _IONBF, 0);
    if (argc == 1) {
        const unsigned count = sizeof parts / sizeof *parts;
        for (unsigned part = 0; part < count + INSTRUCTIONS; part++) {
            char number[16];
            snprintf(number, sizeof number, part < count ? "%u" : "i%u", part < count ? part : part - count);
            pid_t child = fork();
            if (child == 0) {
                execl("/proc/self/exe", argv[0], number, (char *)0);
                _exit(1);
            }
            int status;
            CHECK(waitpid(child, &status, 0) == child);
            if (status) printf("part %u: %x\n", part, status);
        }
        return 0;
    }
    if (*argv[1] == '/') {
        printf("executed: %s\n", argv[1]);
        return 0;
    }
    length = (uint8_t *)hot_end - (uint8_t *)hot;
    extern char etext[];
    first = (uint8_t *)((uintptr_t)hot & -PAGE);
    some = (uintptr_t)etext - (uintptr_t)first;
    if (some > sizeof whole) some = sizeof whole;
    memcpy(whole, first, some);
    before = sum();
    printf("rights %08x, sum %016llx\n", rdpkru(), (unsigned long long)before);
    CHECK(pipe(ends) == 0);
    fcntl(ends[1], F_SETPIPE_SZ, 1 << 17);
    if (*argv[1] == 'i') instruction(atoi(argv[1] + 1));
    else parts[atoi(argv[1])]();
    return 0;
}
