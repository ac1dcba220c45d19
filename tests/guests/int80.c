/* System calls by their 32-bit numbers (int 0x80): files, memory, processes, an interrupted
 * sleep; the registers that they change; what a seccomp filter sees of them.
 *
 * Hard for a translator: the numbers mean other calls, and arguments are cut to 32 bits. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "guest.h"

static long call(long number, long b, long c, long d, long si, long di) {
    register long r8 __asm__("r8") = 88, r9 __asm__("r9") = 99, r10 __asm__("r10") = 1010, r11 __asm__("r11") = 1111;
    long result = number, rcx = c;
    __asm__ volatile("int $0x80"
                     : "+a"(result), "+c"(rcx), "+r"(r8), "+r"(r9), "+r"(r10), "+r"(r11)
                     : "b"(b), "d"(d), "S"(si), "D"(di)
                     : "memory");
    CHECK(rcx == c && r8 == 88 && r9 == 99 && r10 == 1010 && r11 == 1111);
    return result;
}

static char path[] = "/proc/self/exe", text[] = "written\n", buffer[64];
static int ends[2];
static struct { int seconds, nanoseconds; } moment = {0, 1000000}, late = {5, 0}, left;
static unsigned argv32[3], envp32[1], now32;
static volatile sig_atomic_t alarms;

static void on_alarm(int signal) {
    alarms += signal == SIGALRM;
}

int main(int argc, char **argv) {
    if (argc > 1) {
        write(1, "executed\n", 9);
        return 0;
    }
    CHECK((uintptr_t)path >> 32 == 0);
    CHECK(call(4, 1, (long)text, sizeof text - 1, 0, 0) == sizeof text - 1);
    CHECK(call(4, 1 | 7L << 32, (long)text | 5L << 40, sizeof text - 1, 0, 0) == sizeof text - 1);
    int fd = (int)call(5, (long)path, 0, 0, 0, 0);
    CHECK(fd > 2 && call(19, fd, 1, 0, 0, 0) == 1 && call(3, fd, (long)buffer, 3, 0, 0) == 3 && memcmp(buffer, "ELF", 3) == 0);
    CHECK(call(19, fd, -2, SEEK_CUR, 0, 0) == 2 && call(6, fd, 0, 0, 0, 0) == 0);
    CHECK(call(6, fd, 0, 0, 0, 0) == -EBADF && call(5, 0, 0, 0, 0, 0) == -EFAULT);
    CHECK(call(20, 0, 0, 0, 0, 0) == getpid() && call(64, 0, 0, 0, 0, 0) == getppid() && call(199, 0, 0, 0, 0, 0) == getuid());
    CHECK(call(42, (long)ends, 0, 0, 0, 0) == 0 && write(ends[1], "x", 1) == 1 && call(3, ends[0], (long)buffer, 9, 0, 0) == 1);
    long memory = call(192, 0, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    CHECK(memory > 0 && memory >> 32 == 0);
    memset((void *)memory, 7, 8192);
    CHECK(call(125, memory, 4096, PROT_READ, 0, 0) == 0 && call(91, memory, 8192, 0, 0, 0) == 0);
    long seconds = call(13, (long)&now32, 0, 0, 0, 0);
    CHECK(seconds == (long)now32 && seconds > 1700000000);

    static struct { int seconds, fraction; } time32, zone32;
    static struct { long seconds, fraction; } time64;
    CHECK(call(265, CLOCK_REALTIME, (long)&time32, 0, 0, 0) == 0 && time32.seconds >= seconds && time32.fraction < 1000000000);
    CHECK(call(266, CLOCK_MONOTONIC, (long)&time32, 0, 0, 0) == 0 && time32.seconds == 0 && time32.fraction > 0);
    CHECK(call(266, CLOCK_MONOTONIC, 0, 0, 0, 0) == 0 && call(265, 99, (long)&time32, 0, 0, 0) == -EINVAL);
    CHECK(call(265, CLOCK_REALTIME, 0, 0, 0, 0) == -EFAULT && call(265, CLOCK_REALTIME, 8, 0, 0, 0) == -EFAULT);
    CHECK(call(78, (long)&time32, (long)&zone32, 0, 0, 0) == 0 && time32.seconds >= seconds && time32.fraction < 1000000);
    CHECK(call(78, 0, (long)&zone32, 0, 0, 0) == 0 && call(78, 8, 0, 0, 0, 0) == -EFAULT);
    CHECK(call(403, CLOCK_REALTIME, (long)&time64, 0, 0, 0) == 0 && time64.seconds >= seconds);
    static unsigned ids[3];
    CHECK(call(209, (long)&ids[0], (long)&ids[1], (long)&ids[2], 0, 0) == 0 && ids[1] == geteuid());

    long pid = call(2, 0, 0, 0, 0, 0);
    if (pid == 0) call(1, 9, 0, 0, 0, 0);
    int status;
    static int status32;
    CHECK(call(7, pid, (long)&status32, 0, 0, 0) == pid);
    printf("child: %d\n", WEXITSTATUS(status32));

    CHECK(call(162, (long)&moment, 0, 0, 0, 0) == 0);
    struct sigaction action = {.sa_handler = on_alarm};
    sigaction(SIGALRM, &action, NULL);
    ualarm(20000, 0);
    long slept = call(162, (long)&late, (long)&left, 0, 0, 0);
    printf("sleep: %d, alarms %d, left %d\n", slept == -EINTR, alarms, left.seconds == 4 && left.nanoseconds > 0);
    fflush(stdout);

    static char name[200];
    snprintf(name, sizeof name, "%s", argv[0]);
    argv32[0] = argv32[1] = (unsigned)(uintptr_t)name;
    pid = fork();
    if (pid == 0) {
        call(11, (long)name, (long)argv32, (long)envp32, 0, 0);
        _exit(1);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    pid = fork();
    if (pid == 0) {
        CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
        struct sock_filter filter[] = {
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_I386, 0, 3),
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 20, 0, 1),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOTTY),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
        CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
        _exit(call(20, 0, 0, 0, 0, 0) == -ENOTTY && getpid() > 0 ? 8 : 1);
    }
    CHECK(waitpid(pid, &status, 0) == pid);
    printf("filtered: %d\n", WEXITSTATUS(status));
    fflush(stdout);
    call(252, 7, 0, 0, 0, 0);
}
