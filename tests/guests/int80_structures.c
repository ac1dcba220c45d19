/* 32-bit system calls (int 0x80) whose structures have a layout of their own: each field,
 * pointers that are bad or end at a page's end, values that do not fit.
 *
 * Hard for a translator: if it converts a structure itself, it must find the kernel's errors
 * itself. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "guest.h"

static long call6(long number, long b, long c, long d, long si, long di, long bp) {
    static long frame;
    long result = number;
    frame = bp;
    __asm__ volatile("push %%rbp; mov %[bp], %%rbp; int $0x80; pop %%rbp"
                     : "+a"(result)
                     : "b"(b), "c"(c), "d"(d), "S"(si), "D"(di), [bp] "m"(frame)
                     : "memory", "r8", "r9", "r10", "r11");
    return result;
}
#define A(x) ((long)(uintptr_t)(x))
#define CALL(n, b, c, d, s, i) call6(n, A(b), A(c), A(d), A(s), A(i), 0)

static unsigned words[64], more[64];
static char text[256], byte[4];
static char *edge; /* the end of a page behind which nothing is */

static void *at_edge(int bytes) { return edge - bytes; }

static void files(void) {
    static struct stat real;
    int fd = open("/proc/self/exe", O_RDONLY);
    fstat(fd, &real);
    /* struct stat64 of i386 has 96 bytes: the size at 44, the inode at 88. */
    const char *path = strcpy(text, "/proc/self/exe");
    CHECK(CALL(195, path, words, 0, 0, 0) == 0 && words[11] == real.st_size && words[22] == (unsigned)real.st_ino);
    CHECK(CALL(197, fd, more, 0, 0, 0) == 0 && memcmp(words + 1, more + 1, 60) == 0);
    CHECK(CALL(196, path, more, 0, 0, 0) == 0 && S_ISLNK(more[4]));
    CHECK(CALL(300, AT_FDCWD, path, more, 0, 0) == 0 && more[11] == real.st_size);
    CHECK(CALL(300, AT_FDCWD, path, more, AT_SYMLINK_NOFOLLOW, 0) == 0 && S_ISLNK(more[4]));
    long old = CALL(106, path, more, 0, 0, 0);
    CHECK(old == 0 && more[5] == real.st_size);
    CHECK(CALL(108, fd, more, 0, 0, 0) == 0 && more[5] == real.st_size && CALL(107, path, more, 0, 0, 0) == 0);
    CHECK(CALL(195, path, 8, 0, 0, 0) == -EFAULT && CALL(195, 8, words, 0, 0, 0) == -EFAULT);
    CHECK(CALL(197, fd, at_edge(96), 0, 0, 0) == 0 && CALL(197, fd, at_edge(95), 0, 0, 0) == -EFAULT);
    printf("old stat: %ld\n", CALL(18, path, more, 0, 0, 0));
    CHECK(CALL(5, path, O_RDONLY, 0, 0, 0) == fd + 1 && close(fd + 1) == 0);

    strcpy(text, "/");
    CHECK(CALL(99, text, words, 0, 0, 0) == 0 && words[1] >= 512 && words[9] > 0);
    CHECK(CALL(268, text, 84, words, 0, 0) == 0 && CALL(268, text, 88, words, 0, 0) == -EINVAL);
    CHECK(CALL(269, fd, 84, at_edge(84), 0, 0) == 0 && CALL(269, fd, 84, at_edge(80), 0, 0) == -EFAULT);

    /* A file that is too large for 32-bit offsets. */
    int large = memfd_create("large", 0);
    ftruncate(large, 5L << 30);
    CHECK(CALL(108, large, words, 0, 0, 0) == -EOVERFLOW && CALL(197, large, words, 0, 0, 0) == 0 && words[12] == 1);
    CHECK(CALL(19, large, 0, SEEK_END, 0, 0) == 5L << 30);
    CHECK(CALL(140, large, 1, 5, words, SEEK_SET) == 0 && words[0] == 5 && words[1] == 1);
    strcpy(text, "abcdef");
    CHECK(CALL(181, large, text, 6, 0, 1) == 6 && CALL(180, large, text + 64, 6, 1, 1) == 6 && memcmp(text + 64, "bcdef", 6) == 0);
    words[0] = A(text), words[1] = 2, words[2] = A(text + 4), words[3] = 2;
    CHECK(CALL(334, large, words, 2, 100, 1) == 4);
    words[0] = A(text + 100), words[2] = A(text + 102);
    CHECK(CALL(333, large, words, 2, 100, 1) == 4 && memcmp(text + 100, "abef", 4) == 0);
    CHECK(CALL(145, large, 8, 2, 0, 0) == -EFAULT && CALL(145, large, words, -1, 0, 0) == -EINVAL && CALL(145, -1, words, 1, 0, 0) == -EBADF);
    /* struct flock: type, whence, start, length, process; flock64 has long ones. */
    memset(words, 0, sizeof words);
    ((short *)words)[0] = F_WRLCK;
    words[1] = 3, words[2] = 4;
    CHECK(CALL(55, large, F_SETLK, words, 0, 0) == 0 && CALL(55, large, F_GETLK, words, 0, 0) == 0 && ((short *)words)[0] == F_UNLCK);
    CHECK(CALL(55, large, F_GETLK, 8, 0, 0) == -EFAULT);
    close(large);
    close(fd);
}

static void times(void) {
    static struct { int a, b, c, d; } timer = {0, 0, 100, 5}, before;
    CHECK(CALL(104, ITIMER_REAL, &timer, 0, 0, 0) == 0 && CALL(105, ITIMER_REAL, &before, 0, 0, 0) == 0);
    CHECK(before.c >= 90 && before.c <= 100 && before.a == 0);
    memset(&timer, 0, sizeof timer);
    CHECK(CALL(104, ITIMER_REAL, &timer, &before, 0, 0) == 0 && before.c >= 90 && CALL(104, ITIMER_REAL, at_edge(15), 0, 0, 0) == -EFAULT);
    CHECK(CALL(105, 77, &before, 0, 0, 0) == -EINVAL);
    CHECK(CALL(43, words, 0, 0, 0, 0) != 0 && CALL(116, words, 0, 0, 0, 0) == 0 && words[0] > 0 && CALL(116, at_edge(63), 0, 0, 0, 0) == -EFAULT);
    CHECK(CALL(77, RUSAGE_SELF, words, 0, 0, 0) == 0 && words[4] > 0 && CALL(77, 99, words, 0, 0, 0) == -EINVAL);
    words[0] = 0, words[1] = 1000;
    CHECK(CALL(267, CLOCK_MONOTONIC, 0, words, more, 0) == 0);
    words[1] = 2000000000;
    CHECK(CALL(162, words, 0, 0, 0, 0) == -EINVAL && CALL(161, 0, words, 0, 0, 0) == 0);
    words[0] = 4;
    CHECK(CALL(240, words, 0 /* wait */, 5, 0, 0) == -EAGAIN && CALL(240, words, 1 /* wake */, 1, 0, 0) == 0);
    more[0] = 0, more[1] = 1000000;
    CHECK(CALL(240, words, 0, 4, more, 0) == -ETIMEDOUT && CALL(240, words, 0, 4, at_edge(7), 0) == -EFAULT);
    /* A timer of the process: struct compat_sigevent has the value, the signal, how. */
    memset(words, 0, sizeof words);
    words[0] = 7, words[1] = SIGUSR2, words[2] = SIGEV_NONE;
    CHECK(CALL(259, CLOCK_MONOTONIC, words, more, 0, 0) == 0);
    words[0] = words[1] = words[3] = 0, words[2] = 50;
    CHECK(CALL(260, more[0], 0, words, 0, 0) == 0 && CALL(261, more[0], words, 0, 0, 0) == 0 && words[2] >= 40 && CALL(263, more[0], 0, 0, 0, 0) == 0);
}

static void waiting(void) {
    int ends[2];
    pipe(ends);
    struct pollfd *list = (void *)words;
    list[0] = (struct pollfd){.fd = ends[0], .events = POLLIN};
    static unsigned long none;
    static int limit[2];
    limit[0] = 0, limit[1] = 2000000;
    CHECK(CALL(309, list, 1, limit, &none, 8) == 0 && limit[0] == 0 && limit[1] == 0);
    limit[1] = 2000000;
    CHECK(CALL(309, list, 1, limit, 0, 0) == 0 && limit[1] == 0 && CALL(309, list, 1, at_edge(7), &none, 8) == -EFAULT);
    CHECK(CALL(309, list, 1, limit, &none, 7) == -EINVAL && CALL(168, list, 1, 0, 0, 0) == 0);
    write(ends[1], "x", 1);
    CHECK(CALL(309, list, 1, limit, &none, 8) == 1 && list[0].revents == POLLIN);
    unsigned *set = at_edge(4), *pair = more;
    pair[0] = A(&none), pair[1] = 8;
    *set = 1u << ends[0];
    limit[0] = 5;
    CHECK(call6(308, ends[0] + 1, A(set), 0, 0, A(limit), A(pair)) == 1 && *set == 1u << ends[0] && limit[0] >= 4);
    *set = 1u << ends[0];
    CHECK(call6(308, ends[0] + 1, A(set), 0, 0, A(limit), 0) == 1);
    CHECK(call6(308, 40, A(set), 0, 0, A(limit), A(pair)) == -EFAULT && call6(308, -1, 0, 0, 0, A(limit), A(pair)) == -EINVAL);
    CHECK(CALL(142, ends[0] + 1, set, 0, 0, limit) == 1);
    close(ends[0]);
    close(ends[1]);
}

static void signals(void) {
    /* struct compat_sigaction: handler, flags, restorer, mask. */
    memset(words, 0, sizeof words);
    words[0] = 1, words[3] = 1u << (SIGUSR1 - 1), words[4] = 3;
    CHECK(CALL(174, SIGUSR2, words, more, 8, 0) == 0 && more[0] == 0);
    CHECK(CALL(174, SIGUSR2, 0, more, 8, 0) == 0 && more[0] == 1 && more[3] == words[3] && more[4] == 3);
    CHECK(CALL(174, SIGUSR2, 0, more, 4, 0) == -EINVAL && CALL(174, 99, words, 0, 8, 0) == -EINVAL && CALL(174, SIGUSR2, at_edge(19), 0, 8, 0) == -EFAULT);
    CHECK(CALL(174, SIGKILL, words, 0, 8, 0) == -EINVAL && CALL(48, SIGUSR2, 0, 0, 0, 0) == 1);
    words[0] = 1, words[1] = 0x400, words[2] = 0, words[3] = 0;
    CHECK(CALL(67, SIGUSR2, words, 0, 0, 0) == 0 && CALL(67, SIGUSR2, 0, more, 0, 0) == 0 && more[0] == 1 && more[1] == 0x400);
    CHECK(CALL(48, SIGUSR2, 0, 0, 0, 0) == 1);

    words[0] = 1u << (SIGUSR1 - 1), words[1] = 1;
    CHECK(CALL(175, SIG_BLOCK, words, 0, 8, 0) == 0 && CALL(175, 0, 0, more, 8, 0) == 0 && more[0] == words[0] && more[1] == 1);
    CHECK(CALL(126, SIG_BLOCK, 0, more, 0, 0) == 0 && more[0] == words[0] && CALL(126, 9, words, 0, 0, 0) == -EINVAL && CALL(126, SIG_BLOCK, at_edge(3), 0, 0, 0) == -EFAULT);
    words[0] |= 1u << (SIGUSR2 - 1);
    CHECK(CALL(126, SIG_SETMASK, words, more, 0, 0) == 0 && CALL(175, 0, 0, more, 8, 0) == 0 && more[0] == words[0] && more[1] == 1);
    CHECK(CALL(68, 0, 0, 0, 0, 0) == (long)(words[0] | 1L << 32));
    CHECK(CALL(37, getpid(), SIGUSR1, 0, 0, 0) == 0 && CALL(73, more, 0, 0, 0, 0) == 0 && more[0] == 1u << (SIGUSR1 - 1));
    CHECK(CALL(176, more, 8, 0, 0, 0) == 0 && CALL(73, at_edge(3), 0, 0, 0, 0) == -EFAULT);
    static int limit[2];
    memset(more, 0xff, sizeof more);
    CHECK(CALL(177, words, more, limit, 8, 0) == SIGUSR1);
    CHECK(more[0] == SIGUSR1 && more[1] == 0 && more[2] == SI_USER && more[3] == (unsigned)getpid() && more[4] == getuid() && more[5] == 0);
    CHECK(CALL(177, words, more, limit, 8, 0) == -EAGAIN && CALL(177, words, 0, at_edge(7), 8, 0) == -EFAULT && CALL(177, words, 0, limit, 4, 0) == -EINVAL);
    /* Queued with a value. */
    memset(more, 0, sizeof more);
    more[2] = SI_QUEUE, more[3] = getpid(), more[5] = 0x12345678;
    CHECK(CALL(178, getpid(), SIGUSR2, more, 0, 0) == 0);
    memset(more, 0, sizeof more);
    CHECK(CALL(177, words, more, limit, 8, 0) == SIGUSR2 && (int)more[2] == SI_QUEUE && more[5] == 0x12345678);
    CHECK(CALL(69, 0, 0, 0, 0, 0) == words[0] && CALL(68, 0, 0, 0, 0, 0) == 0);

    static char stack[1 << 16];
    words[0] = A(stack), words[1] = 0, words[2] = sizeof stack;
    CHECK(CALL(186, words, 0, 0, 0, 0) == 0 && CALL(186, 0, more, 0, 0, 0) == 0 && memcmp(words, more, 12) == 0);
    words[1] = SS_DISABLE;
    CHECK(CALL(186, words, more, 0, 0, 0) == 0 && more[2] == sizeof stack && CALL(186, at_edge(11), 0, 0, 0, 0) == -EFAULT);
    words[1] = 0, words[2] = 100;
    CHECK(CALL(186, words, 0, 0, 0, 0) == -ENOMEM);
}

static void children(void) {
    long pid = CALL(120, SIGCHLD, 0, 0, 0, 0);
    if (pid == 0) CALL(1, 5, 0, 0, 0, 0);
    memset(more, 0, sizeof more);
    CHECK(call6(284, P_PID, pid, A(more), WEXITED | WNOWAIT, A(words), 0) == 0);
    CHECK(more[0] == SIGCHLD && more[2] == CLD_EXITED && more[3] == pid && more[5] == 5);
    CHECK(CALL(114, pid, words, 0, at_edge(72), 0) == pid && WEXITSTATUS(words[0]) == 5);
    CHECK(CALL(114, pid, words, 0, 0, 0) == -ECHILD);
    static unsigned tid;
    pid = CALL(120, SIGCHLD | 0x01000000 /* CHILD_SETTID */, 0, 0, 0, &tid);
    if (pid == 0) CALL(252, tid != (unsigned)CALL(224, 0, 0, 0, 0, 0), 0, 0, 0, 0);
    CHECK(CALL(7, pid, words, 0, 0, 0) == pid && words[0] == 0);
}

static void limits(void) {
    CHECK(CALL(191, RLIMIT_CORE, words, 0, 0, 0) == 0 && CALL(76, RLIMIT_CORE, more, 0, 0, 0) == 0 && more[1] <= 0x7fffffff);
    CHECK(CALL(191, RLIMIT_AS, words, 0, 0, 0) == 0 && words[0] == 0xffffffff && CALL(76, RLIMIT_AS, words, 0, 0, 0) == 0 && words[0] == 0x7fffffff);
    CHECK(CALL(191, 99, words, 0, 0, 0) == -EINVAL && CALL(191, RLIMIT_AS, at_edge(7), 0, 0, 0) == -EFAULT);
    words[0] = 0xfff00000, words[1] = 0xffffffff;
    CHECK(CALL(75, RLIMIT_AS, words, 0, 0, 0) == 0);
    struct rlimit limit;
    getrlimit(RLIMIT_AS, &limit);
    printf("limit: %lx %lx\n", limit.rlim_cur, limit.rlim_max);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_AS, &limit);
}

static void memory(void) {
    words[0] = 0, words[1] = 8192, words[2] = PROT_READ | PROT_WRITE, words[3] = MAP_PRIVATE | MAP_ANONYMOUS, words[4] = -1, words[5] = 0;
    long at = CALL(90, words, 0, 0, 0, 0);
    CHECK(at > 0 && at >> 32 == 0);
    words[5] = 5;
    CHECK(CALL(90, words, 0, 0, 0, 0) == -EINVAL && CALL(90, at_edge(23), 0, 0, 0, 0) == -EFAULT);
    *(int *)at = 77;
    /* The page behind keeps the first from growing where it is. */
    long moved = CALL(163, at, 4096, 8 << 20, MREMAP_MAYMOVE, 0);
    CHECK(moved > 0 && moved >> 32 == 0 && *(int *)moved == 77);
    CHECK(CALL(163, moved, 8 << 20, 4096, 0, 0) == moved && CALL(163, 8 << 12, 4096, 8192, MREMAP_MAYMOVE, 0) == -EFAULT);
    int id = shmget(IPC_PRIVATE, 4096, 0600);
    long shared = CALL(397, id, 0, 0, 0, 0);
    CHECK(shared > 0 && shared >> 32 == 0);
    *(int *)shared = 5;
    CHECK(CALL(117, 21, id, 0, words, 0) == 0 && *(int *)(uintptr_t)words[0] == 5);
    CHECK(CALL(117, 22, 0, 0, 0, (uintptr_t)words[0]) == 0 && CALL(398, shared, 0, 0, 0, 0) == 0 && CALL(397, -1, 0, 0, 0, 0) == -EINVAL);
    shmctl(id, IPC_RMID, NULL);
}

static void sockets(void) {
    words[0] = AF_UNIX, words[1] = SOCK_STREAM, words[2] = 0, words[3] = A(more);
    CHECK(CALL(102, 8, words, 0, 0, 0) == 0);
    int a = more[0], b = more[1];
    /* A message with a descriptor: struct cmsghdr has 12 bytes. */
    unsigned control[4] = {16, SOL_SOCKET, SCM_RIGHTS, 1};
    static unsigned copy[16], vector[2], message[7];
    memcpy(copy, control, sizeof control);
    vector[0] = A(strcpy(text, "hello")), vector[1] = 5;
    message[2] = A(vector), message[3] = 1, message[4] = A(copy), message[5] = 16;
    CHECK(CALL(370, a, message, 0, 0, 0) == 5);
    memset(copy, 0, sizeof copy);
    vector[0] = A(text + 64);
    CHECK(CALL(372, b, message, 0, 0, 0) == 5 && memcmp(text + 64, "hello", 5) == 0);
    CHECK(message[5] == 16 && copy[0] == 16 && copy[2] == SCM_RIGHTS && write((int)copy[3], byte, 0) == 0);
    CHECK(CALL(372, b, 8, 0, 0, 0) == -EFAULT && CALL(102, 99, words, 0, 0, 0) == -EINVAL);
    words[0] = 4;
    CHECK(CALL(365, a, SOL_SOCKET, SO_TYPE, more, words) == 0 && more[0] == SOCK_STREAM);
    close(a), close(b), close((int)copy[3]);
}

int main(void) {
    char *pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
    munmap(pages + 4096, 4096);
    mmap(pages + 4096, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    edge = pages + 4096;
    files();
    times();
    waiting();
    signals();
    children();
    limits();
    memory();
    sockets();
    CHECK(CALL(122, text, 0, 0, 0, 0) == 0 && CALL(17, 0, 0, 0, 0, 0) == -ENOSYS && CALL(9999, 0, 0, 0, 0, 0) == -ENOSYS);
    CHECK(CALL(384, 0x1002, 0, 0, 0, 0) == -EINVAL);
    puts("done");
    return 0;
}
