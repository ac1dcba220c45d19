/* Every way in which a program can change code that has just been executed, in pages that are
 * writable and executable: the bytes written last must be executed next. The ways: stores of all
 * kinds, also to the instruction itself, to the next one and to the page's own function; writes
 * by the kernel; writes through other mappings of the memory.
 *
 * Hard for a translator: each way needs its own detection, and a store may change the block that
 * contains it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>
#include "guest.h"

#define PAGE 4096

static uint8_t *code; /* four pages, readable, writable, executable */
static uint64_t sum = 5;

typedef uint64_t (*function)(uint64_t, uint64_t);

static uint64_t call(const uint8_t *at, uint64_t a, uint64_t b) { return ((function)(uintptr_t)at)(a, b); }

/* mov $value, %eax; ret */
static void constant(uint8_t *at, uint32_t value) {
    at[0] = 0xb8;
    memcpy(at + 1, &value, 4);
    at[5] = 0xc3;
}

static void put(uint8_t *at, const char *bytes, size_t size) { memcpy(at, bytes, size); }
#define PUT(at, bytes) put(at, bytes, sizeof(bytes) - 1)

/* A function that changes its own next instruction, and calls it made hot. */
static void next_instruction(void) {
    /* mov %dil, 1f+1(%rip); 1: mov $0, %eax; ret */
    PUT(code, "\x40\x88\x3d\x01\x00\x00\x00\xb8\x00\x00\x00\x00\xc3");
    for (uint64_t i = 0; i < 200; i++) CHECK(call(code, i & 0x7f, 0) == (i & 0x7f));
    /* The changed instruction comes some instructions later in the same block. */
    PUT(code, "\x40\x88\x3d\x08\x00\x00\x00\x48\x89\xf0\x48\xff\xc0\x90\x05\x00\x00\x00\x00\xc3");
    for (uint64_t i = 0; i < 200; i++) CHECK(call(code, i & 0x7f, i) == i + 1 + (i & 0x7f));
    /* rep stosb overwrites the instructions after it with nops:
     * mov $7, %ecx; mov $0x90, %al; lea 2(%rip), %rdi; rep stosb; mov $1, %eax; ret; nop; ret */
    for (uint64_t i = 0; i < 100; i++) {
        PUT(code, "\xb9\x07\x00\x00\x00\xb0\x90\x48\x8d\x3d\x02\x00\x00\x00\xf3\xaa\xb8\x01\x00\x00\x00\xc3\x90\xc3");
        CHECK((call(code, 0, 0) & 0xff) == 0x90 && code[15] == 0xaa && code[16] == 0x90 && code[22] == 0x90);
    }
}

/* Functions of one page are rewritten in turn while the others stay hot. */
static void same_page(void) {
    for (uint32_t i = 0; i < 16; i++) constant(code + 64 * i, i);
    for (uint32_t round = 0; round < 120; round++) {
        constant(code + 64 * (round % 16), round * 7);
        for (uint32_t i = 0; i < 16; i++) sum = mix(sum, call(code + 64 * i, 0, 0));
    }
}

/* Data beside code: the page is written at each call. */
static void data_beside_code(void) {
    uint64_t *counter = (uint64_t *)(code + 2048);
    /* incq 2048-7(%rip) [at +0]; mov 2048-14(%rip), %rax; ret */
    PUT(code, "\x48\xff\x05\xf9\x07\x00\x00\x48\x8b\x05\xf2\x07\x00\x00\xc3");
    *counter = 0;
    for (uint64_t i = 1; i <= 1000; i++) CHECK(call(code, 0, 0) == i);
    CHECK(*counter == 1000);
}

/* Stores of every width and kind to the immediate of a function. */
static void all_kinds(void) {
    uint8_t *at = code + PAGE;
    constant(at, 0);
    uint32_t *value = (uint32_t *)(at + 1);
    for (uint32_t i = 1; i <= 60; i++) {
        *(volatile uint8_t *)value = (uint8_t)i;
        CHECK(call(at, 0, 0) == i);
        *(volatile uint16_t *)value = (uint16_t)(i * 300);
        CHECK(call(at, 0, 0) == (i * 300 & 0xffff));
        *(volatile uint32_t *)value = i * 70000;
        CHECK(call(at, 0, 0) == i * 70000);
        __asm__ volatile("lock addl %1, %0" : "+m"(*value) : "r"(i));
        CHECK(call(at, 0, 0) == i * 70000 + i);
        uint32_t swapped = i;
        __asm__ volatile("xchgl %1, %0" : "+m"(*value), "+r"(swapped));
        CHECK(call(at, 0, 0) == i);
        uint32_t expected = i, wanted = i + 5;
        __asm__ volatile("lock cmpxchgl %2, %0" : "+m"(*value), "+a"(expected) : "r"(wanted));
        CHECK(call(at, 0, 0) == i + 5);
        __asm__ volatile("movd %1, %%xmm0; movss %%xmm0, %0" : "=m"(*value) : "r"(i + 6) : "xmm0");
        CHECK(call(at, 0, 0) == i + 6);
        uint8_t copy[6];
        constant(copy, i + 7);
        uint8_t *to = at, *from = copy;
        uint64_t count = 6;
        __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(count) : : "memory");
        CHECK(call(at, 0, 0) == i + 7);
        uint64_t saved;
        __asm__ volatile("mov %%rsp, %0; lea 8(%1), %%rsp; push %2; mov %0, %%rsp"
                         : "=&r"(saved)
                         : "r"(at), "r"(0xc300000000b8ULL | (uint64_t)(i + 8) << 8)
                         : "memory");
        CHECK(call(at, 0, 0) == i + 8);
    }
}

/* Stores that begin on a page without code and end on one with. */
static void across_pages(void) {
    uint8_t *second = code + 3 * PAGE;
    for (uint32_t i = 1; i < 80; i++) {
        constant(second, i);
        CHECK(call(second, 0, 0) == i);
        uint64_t straddling = 0x11111111ULL | (uint64_t)0xb8 << 32 | (uint64_t)(i & 0x7f) << 40;
        memcpy(second - 4, &straddling, 8);
        __asm__ volatile("" ::: "memory");
        CHECK(call(second, 0, 0) == (i & 0x7f));
        uint8_t *to = second - 100;
        uint64_t count = 150;
        __asm__ volatile("rep stosb" : "+D"(to), "+c"(count) : "a"(0x90) : "memory");
        PUT(second + 45, "\xb8\x09\x00\x00\x00\xc3");
        CHECK(call(second - 50, 0, 0) == 9 && count == 0 && to == second + 50);
    }
}

/* The stack lies in the page of code. */
static void stack_beside_code(void) {
    uint8_t *page = code + 2 * PAGE;
    /* call 1f; add %rdi, %rax; ret; 1: push %rsi; pop %rax; ret */
    PUT(page, "\xe8\x04\x00\x00\x00\x48\x01\xf8\xc3\x56\x58\xc3");
    for (uint64_t i = 0; i < 300; i++) {
        uint64_t result, saved;
        __asm__ volatile("mov %%rsp, %1; mov %2, %%rsp; call *%3; mov %1, %%rsp"
                         : "=&a"(result), "=&r"(saved)
                         : "r"(page + 3000), "r"(page), "D"(i), "S"(i * 3)
                         : "memory", "rcx", "rdx", "r8", "r9", "r10", "r11");
        CHECK(result == i * 4);
    }
}

/* The kernel writes the code. */
static void kernel(void) {
    int ends[2], sockets[2];
    CHECK(pipe(ends) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    uint8_t *at = code + PAGE + 512, bytes[6];
    for (uint32_t i = 0; i < 40; i++) {
        constant(bytes, i);
        CHECK(write(ends[1], bytes, 6) == 6 && read(ends[0], at, 6) == 6);
        CHECK(call(at, 0, 0) == i);
        constant(bytes, i + 1);
        struct iovec parts[2] = {{at, 2}, {at + 2, 4}};
        CHECK(write(ends[1], bytes, 6) == 6 && readv(ends[0], parts, 2) == 6);
        CHECK(call(at, 0, 0) == i + 1);
        constant(bytes, i + 2);
        struct iovec whole = {at, 6};
        struct msghdr message = {.msg_iov = &whole, .msg_iovlen = 1};
        CHECK(send(sockets[0], bytes, 6, 0) == 6 && recvmsg(sockets[1], &message, 0) == 6);
        CHECK(call(at, 0, 0) == i + 2);
        constant(bytes, i + 3);
        struct iovec local = {bytes, 6};
        CHECK(process_vm_writev(getpid(), &local, 1, &whole, 1, 0) == 6);
        CHECK(call(at, 0, 0) == i + 3);
    }
    /* A structure of fixed size. */
    constant(at, 77);
    CHECK(call(at, 0, 0) == 77);
    struct timespec *now = (struct timespec *)(at + 16);
    CHECK(syscall(228, 1, now) == 0 && now->tv_nsec < 1000000000);
    CHECK(call(at, 0, 0) == 77);
}

/* /proc/self/mem knows no protections. */
static void through_mem(void) {
    uint8_t *at = code + PAGE + 1024, bytes[6];
    int memory = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    CHECK(memory >= 0);
    constant(at, 1);
    for (uint32_t i = 0; i < 80; i++) {
        if (i == 40) CHECK(mprotect(code + PAGE, PAGE, PROT_READ | PROT_EXEC) == 0);
        for (int j = 0; j < 60; j++) CHECK(call(at, 0, 0) == (i ? i * 5 : 1));
        constant(bytes, (i + 1) * 5);
        if (i % 2) {
            CHECK(pwrite(memory, bytes, 6, (off_t)(uintptr_t)at) == 6);
        } else {
            CHECK(lseek(memory, (off_t)(uintptr_t)at, SEEK_SET) == (off_t)(uintptr_t)at);
            CHECK(write(memory, bytes, 6) == 6);
        }
    }
    CHECK(mprotect(code + PAGE, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC) == 0);
    close(memory);
}

static volatile int faults;
static void *fault_address;
static int fault_code;

static void on_fault(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)context;
    faults++;
    fault_address = info->si_addr;
    fault_code = info->si_code;
    CHECK(mprotect(code, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC) == 0);
}

/* Protections are those that the program set: in its faults and in the list of its mappings. */
static void protections(void) {
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    for (int i = 0; i < 20; i++) {
        constant(code, (uint32_t)i);
        CHECK(call(code, 0, 0) == (uint64_t)i && faults == i);
        CHECK(mprotect(code, PAGE, PROT_READ | PROT_EXEC) == 0);
        CHECK(call(code, 0, 0) == (uint64_t)i);
        *(volatile uint8_t *)(code + 1) = (uint8_t)(i + 1);
        CHECK(faults == i + 1 && fault_address == code + 1 && fault_code == 2 /* SEGV_ACCERR */);
        CHECK(call(code, 0, 0) == (uint64_t)i + 1);
    }
    char line[512], wanted[32];
    snprintf(wanted, sizeof wanted, "%08lx-%08lx rwxp", (unsigned long)(uintptr_t)code,
             (unsigned long)(uintptr_t)(code + 4 * PAGE));
    FILE *maps = fopen("/proc/self/maps", "r");
    int found = 0;
    CHECK(maps);
    while (fgets(line, sizeof line, maps)) found += !strncmp(line, wanted, strlen(wanted));
    fclose(maps);
    CHECK(found == 1);
}

static uint8_t *signal_stack;

static void on_signal(int signal) { sum = mix(sum, call(signal_stack, (uint64_t)signal, 0)); }

/* Signal frames are pushed onto a page with code. */
static void frames_beside_code(void) {
    signal_stack = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(signal_stack != MAP_FAILED);
    PUT(signal_stack, "\x48\x8d\x47\x01\xc3"); /* lea 1(%rdi), %rax; ret */
    memcpy(signal_stack + 4 * PAGE - 64, signal_stack, 5);
    stack_t stack = {.ss_sp = signal_stack, .ss_size = 4 * PAGE};
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_ONSTACK};
    CHECK(sigaltstack(&stack, NULL) == 0 && sigaction(SIGUSR1, &action, NULL) == 0);
    for (int i = 0; i < 40; i++) {
        sum = mix(sum, call(signal_stack, (uint64_t)i, 0));
        CHECK(raise(SIGUSR1) == 0);
    }
    stack.ss_flags = SS_DISABLE;
    CHECK(sigaltstack(&stack, NULL) == 0);
}

/* A file whose code is mapped privately is written to: by a descriptor that comes later, and by
 * one that was there before. */
static void through_file(const char *path) {
    uint8_t bytes[6];
    for (int before = 0; before < 2; before++) {
        unlink(path);
        int writes = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0700), reads = open(path, O_RDONLY | O_CLOEXEC);
        CHECK(writes >= 0 && reads >= 0 && ftruncate(writes, PAGE) == 0);
        constant(bytes, 1);
        CHECK(pwrite(writes, bytes, 6, 64) == 6);
        if (!before) close(writes);
        uint8_t *mapped = mmap(NULL, PAGE, PROT_READ | PROT_EXEC, MAP_PRIVATE, reads, 0);
        CHECK(mapped != MAP_FAILED);
        for (int i = 0; i < 200; i++) CHECK(call(mapped + 64, 0, 0) == 1);
        if (!before) writes = open(path, O_WRONLY | O_CLOEXEC);
        for (uint32_t i = 2; i < 20; i++) {
            constant(bytes, i);
            CHECK(pwrite(writes, bytes, 6, 64) == 6);
            for (int j = 0; j < 60; j++) CHECK(call(mapped + 64, 0, 0) == i);
        }
        CHECK(munmap(mapped, PAGE) == 0 && unlink(path) == 0);
        close(writes), close(reads);
    }
}

/* What a child writes is the child's. */
static void forked(void) {
    uint8_t *at = code + PAGE;
    constant(at, 11);
    for (int i = 0; i < 100; i++) CHECK(call(at, 0, 0) == 11);
    fflush(stdout);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        for (uint32_t i = 0; i < 50; i++) {
            CHECK(call(at, 0, 0) == (i ? i : 11));
            constant(at, i + 1);
        }
        _exit(call(at, 0, 0) == 50 ? 0 : 1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(call(at, 0, 0) == 11);
    constant(at, 12);
    CHECK(call(at, 0, 0) == 12);
}

/* Contents vanish and come back without a store. */
static void replaced(void) {
    for (uint32_t i = 0; i < 60; i++) {
        uint8_t *page = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(page != MAP_FAILED);
        constant(page, i);
        for (int j = 0; j < 5; j++) CHECK(call(page, 0, 0) == i);
        CHECK(madvise(page, PAGE, MADV_DONTNEED) == 0);
        CHECK(page[0] == 0);
        PUT(page, "\x31\xc0\xc3"); /* xor %eax, %eax; ret */
        CHECK(call(page, 0, 0) == 0);
        uint8_t *moved = mremap(page, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, page + PAGE);
        CHECK(moved == page + PAGE && call(moved, 0, 0) == 0);
        constant(moved, i + 1);
        CHECK(call(moved, 0, 0) == i + 1);
        uint8_t *fresh = mmap(moved, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        CHECK(fresh == moved);
        constant(fresh, i + 2);
        CHECK(call(fresh, 0, 0) == i + 2);
        CHECK(munmap(fresh, PAGE) == 0);
    }
}

/* Code on the stack, as compilers put it there for nested functions. */
static __attribute__((noinline)) void on_the_stack(void) {
    _Alignas(64) uint8_t here[64];
    uint8_t *page = (uint8_t *)((uintptr_t)here & ~(uintptr_t)(PAGE - 1));
    CHECK(mprotect(page, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC) == 0);
    for (uint32_t i = 0; i < 300; i++) {
        constant(here, i);
        CHECK(call(here, 0, 0) == i);
        if (i % 3 == 0) sum = mix(sum, call(here, 0, 0));
    }
    CHECK(mprotect(page, PAGE, PROT_READ | PROT_WRITE) == 0);
}

int main(int argc, char **argv) {
    code = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(code != MAP_FAILED);
    next_instruction(), puts("next instruction");
    same_page(), puts("same page");
    data_beside_code(), puts("data beside code");
    all_kinds(), puts("all kinds of stores");
    across_pages(), puts("across pages");
    stack_beside_code(), puts("stack beside code");
    kernel(), puts("by the kernel");
    through_mem(), puts("through /proc/self/mem");
    through_file(argc > 1 ? argv[1] : "code_writes.tmp"), puts("through a file");
    protections(), puts("protections");
    frames_beside_code(), puts("signal frames");
    forked(), puts("forked");
    replaced(), puts("replaced");
    on_the_stack(), puts("on the stack");
    printf("%016lx\n", (unsigned long)sum);
    fflush(stdout);
    if (argc < 3) {
        execv("/proc/self/exe", (char *[]){argv[0], argc > 1 ? argv[1] : "code_writes.tmp", "again", NULL});
        CHECK(!"executed");
    }
    return 0;
}
