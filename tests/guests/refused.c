/* Instructions that user mode may not execute or that do not exist: each with the signal, code,
 * error code and trap number that the processor and the kernel give. Which instructions exist
 * depends on the processor, so native results are the only reference.
 *
 * Hard for a translator: its decoder knows instructions that this processor refuses, and vice
 * versa. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include "guest.h"

static const char *const refused[] = {
    "f4",             /* hlt */
    "fa",             /* cli */
    "fb",             /* sti */
    "e470",           /* in al, 0x70 */
    "ee",             /* out dx, al */
    "6c",             /* insb */
    "f36f",           /* rep outsd */
    "0f01f8",         /* swapgs */
    "0f07",           /* sysret */
    "0f35",           /* sysexit */
    "0faa",           /* rsm */
    "0f30",           /* wrmsr */
    "0f32",           /* rdmsr */
    "0f33",           /* rdpmc */
    "0f08",           /* invd */
    "0f09",           /* wbinvd */
    "f30f09",         /* wbnoinvd */
    "0f20c0",         /* mov rax, cr0 */
    "0f22d8",         /* mov cr3, rax */
    "f00f20c0",       /* lock mov: cr8 */
    "0f21f8",         /* mov rax, dr7 */
    "0f23c0",         /* mov dr0, rax */
    "0f06",           /* clts */
    "0f0110",         /* lgdt [rax] */
    "0f0118",         /* lidt [rax] */
    "0f01f0",         /* lmsw ax */
    "0f0138",         /* invlpg [rax] */
    "0f00d0",         /* lldt ax */
    "0f00d8",         /* ltr ax */
    "0f01ca",         /* clac */
    "0f01cb",         /* stac */
    "0f01c8",         /* monitor */
    "0f01c9",         /* mwait */
    "0f01c2",         /* vmlaunch */
    "0f01c4",         /* vmxoff */
    "0fc730",         /* vmptrld */
    "f30fc730",       /* vmxon */
    "0f78c0",         /* vmread */
    "0f01d8",         /* vmrun */
    "0f01da",         /* vmload */
    "0f01dc",         /* stgi */
    "0f01dd",         /* clgi */
    "0f01de",         /* skinit */
    "0f01df",         /* invlpga */
    "0f01cf",         /* encls */
    "0f01d7",         /* enclu */
    "0f01c0",         /* enclv */
    "0f01c5",         /* pconfig */
    "0f01d1",         /* xsetbv */
    "480fc728",       /* xsaves64 */
    "480fc718",       /* xrstors64 */
    "f30f01e8",       /* setssbsy */
    "f30fae30",       /* clrssbsy */
    "0f38f6c8",       /* wrss, register form */
    "660f38f5c8",     /* wruss, register form */
    "660f38820f",     /* invpcid */
    "660f38800f",     /* invept */
    "0f37",           /* getsec */
    "f30f01ee",       /* clui */
    "f30f01ec",       /* uiret */
    "f30fc7f0",       /* senduipi rax */
    "f20f01e8",       /* xsusldtrk */
    "f30fa7c8",       /* xcryptecb */
    "0fa7c0",         /* xstore */
    "8fe97812c0",     /* llwpcb */
    "c4e27b49c0",     /* tilezero */
    "0f34",           /* sysenter */
    "0f0b",           /* ud2 */
    "0fb9c0",         /* ud1 */
    "0fffc0",         /* ud0 */
    "06",             /* push es */
    "27",             /* daa */
    "62",             /* bound, cut short by what follows */
    "d6",             /* salc */
    "ea0000000000",   /* far jump */
    "9a0000000000",   /* far call */
    "c4c1",           /* vex with an odd map */
    "f089c8",         /* lock mov */
    "f00fa3c8",       /* lock bt */
    "0f2400",         /* mov from tr */
    "0fa6c0",         /* xbts */
    "cd81",           /* int 0x81 */
    "cd00",           /* int 0 */
    "cd0e",           /* int 14 */
    "cc",             /* int3 */
    "cd03",           /* int 3 */
    "cd04",           /* int 4 */
    "ce",             /* into */
    "66666666666666666666666666666690", /* too long */
    "8ec8",           /* mov cs, eax */
    "f2f20f0b",
    "66f7f1",         /* div cx by zero */
    "48f7f9",         /* idiv rcx by zero */
};

static sigjmp_buf escape;
static char *code;

static void on_signal(int signal, siginfo_t *info, void *context) {
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    long address = (long)((char *)info->si_addr - code);
    printf(" signal %d code %#x", signal, (unsigned)info->si_code);
    if (address >= 0 && address < 4096)
        printf(" at %ld", address);
    else
        printf(" at %p", info->si_addr);
    printf(" rip %ld trap %lld error %#llx\n", (long)((char *)regs[REG_RIP] - code), (long long)regs[REG_TRAPNO],
           (unsigned long long)regs[REG_ERR]);
    siglongjmp(escape, 1);
}

int main(void) {
    struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO};
    static const int signals[] = {SIGSEGV, SIGILL, SIGTRAP, SIGBUS, SIGFPE};
    for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++) sigaction(signals[i], &action, NULL);
    code = mmap(NULL, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(code != MAP_FAILED);
    static uint64_t data[64];
    /* On Intel's processors sysenter is a system call of a 32-bit program, which does not come
     * back to this one. */
    int enters_kernel = !__builtin_cpu_is("amd");
    for (int round = 0; round < 2; round++)
        for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
            if (enters_kernel && strcmp(refused[i], "0f34") == 0) continue;
            size_t length = strlen(refused[i]) / 2;
            memset(code, 0x06, 64); /* undefined in 64-bit mode */
            for (size_t at = 0; at < length; at++) {
                unsigned byte;
                sscanf(refused[i] + 2 * at, "%2x", &byte);
                code[at] = (char)byte;
            }
            printf("%s:", refused[i]);
            /* rax points to memory, rcx is 0, rdx an even port; selectors read from eax are bad
             * ones. */
            if (sigsetjmp(escape, 1) == 0)
                __asm__ volatile("call *%3" ::"a"((uint64_t)data | 4), "c"(0), "d"(0x80), "r"(code) : "memory", "cc");
        }
    return 0;
}
