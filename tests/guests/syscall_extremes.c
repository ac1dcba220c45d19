/* System calls with arguments at and beyond every limit, some thousands of them, each group in a
 * child. Prints the results and how the child ended.
 *
 * Hard for a translator: it reads arguments of many calls itself, and must fail as the kernel
 * does. */
#define _GNU_SOURCE
#include "guest.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static unsigned char *page; /* one page that can be read and written, then one that cannot be touched, then one that can be read */

/* The kinds of arguments: P a pointer, L a length, F a descriptor, N a small number, S a signal,
 * O flags, o flags that make no file, 0 nothing, A an address that need not be mapped, T a
 * timeout (never NULL). */
static const struct call {
    const char *name;
    int number;
    const char *arguments;
    int rounds;
} calls[] = {
    {"read", SYS_read, "FPL", 60},
    {"write", SYS_write, "dPL", 60},
    {"readv", SYS_readv, "FPN", 60},
    {"writev", SYS_writev, "dPN", 60},
    {"pread64", SYS_pread64, "FPLA", 60},
    {"preadv", SYS_preadv, "FPNA", 60},
    {"preadv2", SYS_preadv2, "FPNANO", 60},
    {"pwritev2", SYS_pwritev2, "dPNANO", 60},
    {"open", SYS_open, "Po", 40},
    {"openat", SYS_openat, "FPo", 40},
    {"openat2", SYS_openat2, "FPPN", 60},
    {"stat", SYS_stat, "PP", 40},
    {"fstat", SYS_fstat, "FP", 40},
    {"newfstatat", SYS_newfstatat, "FPPO", 60},
    {"statx", SYS_statx, "FPOOP", 60},
    {"access", SYS_access, "PN", 40},
    {"faccessat2", SYS_faccessat2, "FPNO", 40},
    {"readlink", SYS_readlink, "PPL", 60},
    {"readlinkat", SYS_readlinkat, "FPPL", 60},
    {"lseek", SYS_lseek, "FAN", 60},
    {"getcwd", SYS_getcwd, "PL", 40},
    {"getdents64", SYS_getdents64, "FPL", 40},
    {"dup2", SYS_dup2, "FF", 60},
    {"dup3", SYS_dup3, "FFO", 60},
    {"close", SYS_close, "F", 30},
    {"close_range", SYS_close_range, "AAO", 30},
    {"fcntl", SYS_fcntl, "FNP", 80},
    {"mmap", SYS_mmap, "ALNOFA", 300},
    {"munmap", SYS_munmap, "Al", 100},
    {"mprotect", SYS_mprotect, "AlN", 200},
    {"mremap", SYS_mremap, "ALLNA", 200},
    {"madvise", SYS_madvise, "AlN", 100},
    {"mincore", SYS_mincore, "AlP", 60},
    {"msync", SYS_msync, "AlN", 60},
    {"mlock", SYS_mlock, "Al", 60},
    {"pkey_mprotect", SYS_pkey_mprotect, "AlNN", 60},
    {"rt_sigaction", SYS_rt_sigaction, "SQQn", 200},
    {"rt_sigprocmask", SYS_rt_sigprocmask, "NPPn", 200},
    {"rt_sigpending", SYS_rt_sigpending, "Pn", 60},
    {"rt_sigtimedwait", SYS_rt_sigtimedwait, "PPTn", 60},
    {"rt_sigqueueinfo", SYS_rt_sigqueueinfo, "1SP", 40},
    {"sigaltstack", SYS_sigaltstack, "PP", 100},
    {"poll", SYS_poll, "PN0", 60},
    {"ppoll", SYS_ppoll, "PNTPn", 100},
    {"select", SYS_select, "NPPPT", 60},
    {"pselect6", SYS_pselect6, "NPPPTP", 100},
    {"epoll_pwait", SYS_epoll_pwait, "FPN0Pn", 60},
    {"nanosleep", SYS_nanosleep, "TP", 40},
    {"futex", SYS_futex, "PwNT", 80},
    {"set_robust_list", SYS_set_robust_list, "PL", 40},
    {"get_robust_list", SYS_get_robust_list, "0PP", 40},
    {"arch_prctl", SYS_arch_prctl, "CA", 60},
    {"execve", SYS_execve, "PPP", 40},
    {"execveat", SYS_execveat, "FPPPO", 40},
    {"tgkill", SYS_tgkill, "AAS", 60},
    {"process_vm_readv", SYS_process_vm_readv, "1PNPNO", 80},
    {"process_vm_writev", SYS_process_vm_writev, "1PNPNO", 80},
    {"getrandom", SYS_getrandom, "PLO", 40},
    {"memfd_create", SYS_memfd_create, "PN", 40},
    {"shmat", SYS_shmat, "NAN", 60},
    {"shmdt", SYS_shmdt, "A", 40},
    {"remap_file_pages", SYS_remap_file_pages, "AlNNO", 40},
    {"clone3", SYS_clone3, "pL", 60},
    {"set_tid_address", SYS_set_tid_address, "A", 20},
    {"get_mempolicy", SYS_get_mempolicy, "PPNAO", 40},
    {"getgroups", SYS_getgroups, "NP", 40},
    {"getsockopt", SYS_getsockopt, "FNNPP", 40},
    {"recvfrom", SYS_recvfrom, "FPLOPP", 40},
    {"recvmsg", SYS_recvmsg, "FPO", 40},
    {"ioctl", SYS_ioctl, "FNP", 40},
    {"nothing", 500, "AAAAAA", 20},
    {"negative", -1, "AAAAAA", 20},
    {"enormous", 0x7fffffff, "AAAAAA", 20},
};

static uint64_t state;

#define PICK(array) array[next_random(&state) % (sizeof(array) / sizeof(array[0]))]

/* Where the page is. */
#define PAGE 0x7e0000000000

/* What the arguments are chosen from. */
static const long pointers[] = {0, 1, -1, -4096, 0x7ffffffff000, 0x7ffffffffff8, 0x800000000000, 1L << 63, 0xffff800000000000,
    PAGE, PAGE, PAGE + 64, PAGE + 4095, PAGE + 4090, PAGE + 4096,
    PAGE + 8192, 4095};
static const long addresses[] = {0, 1, -1, -4096, -4095, 0x7ffffffff000, 0x800000000000, 1L << 63, 1L << 47, 1L << 62,
    PAGE, PAGE + 1, PAGE + 4096, PAGE + 8192, 0x7fffffff, 0xffffffff, 0x100000000};
static const long lengths[] = {0, 1, -1, 7, 8, 16, 24, 4095, 4096, 4097, 8192, 0x7fffffff, 0x80000000, 0xffffffff, 0x100000000,
    1L << 47, 0x7ffffffff000, 1L << 62, 1L << 63, -4096, -4095};
static const long small_lengths[] = {0, 1, -1, 4095, 4096, -4095};
static const long numbers[] = {0, 1, 2, 3, 4, 5, 8, 16, 64, 1023, 1024, 1025, 65536, -1, -100, 0x7fffffff, 0x80000000, 0x100000001};
static const long descriptors[] = {0, 10, 10, 11, 12, 500, -1, -2, -100, 0x7fffffff, 0x80000000, 0xffffffff, 0x10000000a};
static const long flags[] = {0, 1, 2, 0x10, 0x20, 0x22, 0x100, 0x1000, 0x2000, 0x80000, 0x100022, -1, 0x80000000, 0x7fffffff};
static const long signals[] = {0, 1, 9, 10, 17, 19, 31, 32, 33, 34, 64, 65, -1, 0x7fffffff, 0x80000000, 0x10000000a};
static const long sizes[] = {8, 8, 8, 0, 7, 16, -1, 0x100000008};
static const long codes[] = {0x1002, 0x1003, 0x1004, 0x1011, 0x1012, 0, -1, 0x2001};

static long argument(char kind) {
    switch (kind) {
    case 'P': return PICK(pointers);
    case 'Q': return next_random(&state) % 3 ? 0 : PICK(pointers);
    case 'p': return next_random(&state) % 2 ? 0 : (long)page + 4096 - 8 * (next_random(&state) % 12);
    case 'A': return PICK(addresses);
    case 'L': return PICK(lengths);
    case 'l': return PICK(small_lengths);
    case 'N': return PICK(numbers);
    case 'F': return PICK(descriptors);
    case 'd': return 11 + next_random(&state) % 3 * 400;
    case 'O': return PICK(flags);
    case 'o': return PICK(flags) & ~(O_CREAT | O_TMPFILE);
    case 'S': return PICK(signals);
    case 'n': return PICK(sizes);
    case 'C': return PICK(codes);
    case 'T': return (long)page + 2048 + 16 * (next_random(&state) % 4);
    case 'w': return (long[]){1, 3, 4, 5, 9, 10, 129, 255, -1}[next_random(&state) % 9];
    case '1': return 0x3fffffff;
    default: return 0;
    }
}

/* The page's contents: pointers, lengths and small numbers, and timeouts that are short,
 * negative and too large. */
static void fill(void) {
    long words[512];
    for (int i = 0; i < 512; i++) words[i] = argument("PLN"[i % 3]);
    const long timeouts[] = {0, 1000, 0, -1, -1, 0, 0, 1000000000};
    memcpy((char *)words + 2048, timeouts, sizeof timeouts);
    memcpy(page, words, sizeof words);
}

/* Some of it is new in each round; the kernel may have written there, and the guest may have
 * taken away the right to. */
static void refill(void) {
    const int words[] = {0, 1, 2, 8, 9, 10, 504, 505, 506, 507, 508, 509, 510, 511};
    for (unsigned i = 0; i < sizeof words / sizeof words[0]; i++) ((long *)page)[words[i]] = argument("PLN"[i % 3]);
}

/* Writes an error's number, or "ok", and returns where the next word begins. Not by printf, which has
 * far more code than the calls of a group. */
static char *answer(char *at, int error) {
    if (error >= 100) *at++ = '0' + error / 100;
    if (error >= 10) *at++ = '0' + error / 10 % 10;
    if (error) *at++ = '0' + error % 10;
    else *at++ = 'o', *at++ = 'k';
    *at++ = ' ';
    return at;
}

static void group(const struct call *call, char *line) {
    fill();
    for (int round = 0; round < call->rounds; round++) {
        refill();
        long a[6] = {0};
        for (int i = 0; call->arguments[i]; i++) a[i] = argument(call->arguments[i]);
        if (call->number == SYS_mmap) a[3] &= ~0x10L; /* no MAP_FIXED: never over existing mappings */
        errno = 0;
        long result = syscall(call->number, a[0], a[1], a[2], a[3], a[4], a[5]);
        line = answer(line, result == -1 ? errno : 0);
        if (result > 0 && call->number == SYS_clone3) exit(3);
    }
}

int main(int argc, char **argv) {
    page = mmap((void *)PAGE, 3 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    CHECK(page != MAP_FAILED);
    CHECK(mprotect(page + 4096, 4096, PROT_NONE) == 0 && mprotect(page + 8192, 4096, PROT_READ) == 0);
    char *lines = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(dup2(open("/dev/zero", O_RDONLY), 10) == 10 && dup2(open("/dev/null", O_WRONLY), 11) == 11 && dup2(open(".", O_RDONLY), 12) == 12);
    for (unsigned i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        if (argc > 2 && strcmp(argv[2], calls[i].name)) continue;
        memset(lines, 0, 65536);
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            state = 88172645463325252 + 977 * i + 7919 * iterations(argc, argv, 1);
            alarm(20);
            group(&calls[i], lines);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        printf("%s: %s(%x)\n", calls[i].name, lines, status);
    }
    return 0;
}
