/* The interrupted state that a handler sees and changes: general and vector registers, flags,
 * x87, the mask, the alternate stack; faults in handlers of faults; loops that are hot when they
 * fault.
 *
 * Hard for a translator: the state lies in other registers when hot code faults. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include "guest.h"

enum { PAGE = 4096 };
static char *pages;
static volatile int faults, depth, deepest;

static void handle(int signo, void (*handler)(int, siginfo_t *, void *), int flags, int also) {
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | flags};
    if (also) sigaddset(&action.sa_mask, also);
    CHECK(sigaction(signo, &action, NULL) == 0);
}

/* A hot loop reads through a pointer that a handler replaces whenever it is bad. */
static void replace_pointer(int signal, siginfo_t *info, void *context) {
    CHECK(signal == SIGSEGV && (char *)info->si_addr == pages + 8);
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    CHECK((char *)regs[REG_RSI] == pages);
    CHECK(regs[REG_TRAPNO] == 14 && (regs[REG_ERR] & 7) == 4 && (char *)regs[REG_CR2] == pages + 8);
    static long good[2] = {5, 7};
    regs[REG_RSI] = (greg_t)good;
    faults++;
}

static long hot_loads(long rounds) {
    static long other[2] = {1, 2};
    long total = 0;
    for (long i = 0; i < rounds; i++) {
        void *pointer = i % 97 == 96 ? (void *)pages : other;
        long value;
        __asm__ volatile("mov 8(%1), %0" : "=r"(value), "+S"(pointer) : : "memory");
        total += value;
    }
    return total;
}

/* The values in vector registers, MXCSR and the x87 stack are there to be read and changed. */
static void change_vectors(int signal, siginfo_t *info, void *context) {
    (void)info;
    ucontext_t *uc = context;
    struct _libc_fpstate *state = uc->uc_mcontext.fpregs;
    CHECK(signal == SIGILL || signal == SIGUSR1);
    CHECK(state->_xmm[3].element[0] == 0x33333333 && state->_xmm[3].element[3] == 0x33333333);
    CHECK((state->mxcsr & 0x6000) == 0x2000 && (state->cwd & 0xc00) == 0x400);
    for (int i = 0; i < 4; i++) state->_xmm[3].element[i] = 0x44444444 + i;
    state->mxcsr = (state->mxcsr & ~0x6000u) | 0x4000;
    state->cwd = (state->cwd & ~0xc00) | 0x800;
    uc->uc_mcontext.gregs[REG_R12] ^= 0xff;
    uc->uc_mcontext.gregs[REG_EFL] ^= 0x8d5; /* CF PF AF ZF SF OF */
    if (signal == SIGILL) uc->uc_mcontext.gregs[REG_RIP] += 2;
    /* Inside the handler the state is a fresh one. */
    unsigned mxcsr;
    unsigned short control;
    __asm__ volatile("stmxcsr %0; fnstcw %1" : "=m"(mxcsr), "=m"(control));
    CHECK(mxcsr == 0x1f80 && control == 0x37f);
    faults++;
}

static void vectors(int by_fault, int show) {
    uint32_t lanes[4] = {0x33333333, 0x33333333, 0x33333333, 0x33333333}, out[4];
    unsigned mxcsr = 0x3f80, mxcsr_after, saved;
    unsigned short control = 0x77f, control_after;
    uint64_t r12 = 0x1234, flags = 0, result = 0;
    long pid = getpid();
    __asm__ volatile("stmxcsr %0" : "=m"(saved));
    if (by_fault) {
        __asm__ volatile("ldmxcsr %[mxcsr]; fldcw %[control]; movdqu %[lanes], %%xmm3; mov %[r12], %%r12\n"
                         "pushq $0x202; popfq\n ud2\n"
                         "pushfq; popq %[flags]; cld; mov %%r12, %[r12]; movdqu %%xmm3, %[out]; stmxcsr %[after]; fnstcw %[control_after]"
                         : [out] "=m"(out), [after] "=m"(mxcsr_after), [control_after] "=m"(control_after), [flags] "=r"(flags), [r12] "+m"(r12)
                         : [lanes] "m"(lanes), [mxcsr] "m"(mxcsr), [control] "m"(control)
                         : "r12", "xmm3", "cc", "memory");
    } else {
        __asm__ volatile("ldmxcsr %[mxcsr]; fldcw %[control]; movdqu %[lanes], %%xmm3; mov %[r12], %%r12\n"
                         "pushq $0x202; popfq\n syscall\n"
                         "pushfq; popq %[flags]; cld; mov %%r12, %[r12]; movdqu %%xmm3, %[out]; stmxcsr %[after]; fnstcw %[control_after]"
                         : [out] "=m"(out), [after] "=m"(mxcsr_after), [control_after] "=m"(control_after), [flags] "=&r"(flags), [r12] "+m"(r12), "=a"(result)
                         : [lanes] "m"(lanes), [mxcsr] "m"(mxcsr), [control] "m"(control), "a"(62L), "D"(pid), "S"((long)SIGUSR1)
                         : "r12", "xmm3", "rcx", "r11", "cc", "memory");
    }
    __asm__ volatile("ldmxcsr %0; fninit" : : "m"(saved));
    if (show) printf("lanes %x %x r12 %lx flags %lx mxcsr %x control %x result %ld\n", out[0], out[3], r12, flags & 0x8d5, mxcsr_after & 0x6000,
           control_after & 0xc00, (long)result);
}

/* A mapped file that is shorter than its mapping: the handler makes it longer, or jumps out. */
static int file;
static sigjmp_buf out;
static void extend(int signal, siginfo_t *info, void *context) {
    (void)context;
    CHECK(signal == SIGBUS && info->si_code == BUS_ADRERR);
    faults++;
    if (faults % 2) siglongjmp(out, 1);
    CHECK(ftruncate(file, PAGE) == 0);
}

/* Faults within handlers of faults: each handler touches the next page, which has the next
 * handler's attention. */
static void nested(int signal, siginfo_t *info, void *context) {
    (void)context;
    char local;
    stack_t stack;
    depth++;
    if (depth > deepest) deepest = depth;
    CHECK(sigaltstack(NULL, &stack) == 0 && stack.ss_flags == SS_ONSTACK);
    CHECK(&local > (char *)stack.ss_sp && &local < (char *)stack.ss_sp + stack.ss_size);
    char *page = (char *)((uintptr_t)info->si_addr & ~(uintptr_t)(PAGE - 1));
    CHECK(signal == SIGSEGV);
    if (page < pages + 5 * PAGE) page[PAGE + 1] = 1;
    CHECK(mprotect(page, PAGE, PROT_READ | PROT_WRITE) == 0);
    depth--;
}

/* The mask in the frame becomes the thread's mask on return. */
static volatile int usr2;
static void edit_mask(int signal, siginfo_t *info, void *context) {
    (void)info;
    if (signal == SIGUSR2) {
        usr2++;
        return;
    }
    sigset_t now;
    sigprocmask(SIG_SETMASK, NULL, &now);
    CHECK(sigismember(&now, SIGUSR1) && sigismember(&now, SIGHUP));
    sigaddset(&((ucontext_t *)context)->uc_sigmask, SIGUSR2);
}

int main(void) {
    pages = mmap(NULL, 8 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED);

    handle(SIGSEGV, replace_pointer, 0, 0);
    long total = hot_loads(20000);
    printf("loads %ld, faults %d\n", total, faults);

    faults = 0;
    handle(SIGILL, change_vectors, 0, 0);
    handle(SIGUSR1, change_vectors, 0, 0);
    for (int i = 0; i < 60; i++) {
        vectors(i & 1, i % 19 == 0);
    }
    printf("changed %d\n", faults);

    faults = 0;
    file = memfd_create("short", 0);
    char *mapped = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(file >= 0 && mapped != MAP_FAILED);
    handle(SIGBUS, extend, 0, 0);
    int jumped = 0, stored = 0;
    for (int i = 0; i < 200; i++) {
        if (sigsetjmp(out, 1)) {
            jumped++;
            continue;
        }
        mapped[i] = (char)i;
        stored += mapped[i] == (char)i;
        CHECK(ftruncate(file, 0) == 0);
    }
    printf("bus faults %d, jumped %d, stored %d\n", faults, jumped, stored);

    static char alternate[1 << 17] __attribute__((aligned(64)));
    stack_t stack = {alternate, 0, sizeof alternate};
    CHECK(sigaltstack(&stack, NULL) == 0);
    handle(SIGSEGV, nested, SA_ONSTACK | SA_NODEFER, 0);
    for (int i = 0; i < 50; i++) {
        CHECK(mprotect(pages, 8 * PAGE, PROT_NONE) == 0);
        *(volatile char *)pages = 1;
    }
    printf("deepest %d, now %d, %d\n", deepest, depth, pages[PAGE + 1] + pages[5 * PAGE + 1]);

    handle(SIGUSR1, edit_mask, 0, SIGHUP);
    handle(SIGUSR2, edit_mask, 0, 0);
    sigset_t now, none;
    sigemptyset(&none);
    for (int i = 0; i < 100; i++) {
        raise(SIGUSR1);
        sigprocmask(SIG_SETMASK, NULL, &now);
        CHECK(sigismember(&now, SIGUSR2) && !sigismember(&now, SIGUSR1) && !sigismember(&now, SIGHUP));
        raise(SIGUSR2);
        CHECK(usr2 == i);
        sigprocmask(SIG_SETMASK, &none, NULL);
        CHECK(usr2 == i + 1);
    }
    printf("masks %d\n", usr2);
    return 0;
}
