/* A process in a jail without /proc: code from files and from memory that is mapped, written and
 * protected there; children that do the same; programs that are executed. A user who may not
 * make a jail does the same outside.
 *
 * Hard for a translator: it cannot read /proc/self/maps, nor open its own executable by path. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

enum { PAGE = 4096 };

static char directory[] = "/tmp/guest-XXXXXX";

static void copy(const char *path) {
    static char buffer[1 << 16];
    int in = open("/proc/self/exe", O_RDONLY), out = open(path, O_WRONLY | O_CREAT, 0755);
    CHECK(in >= 0 && out >= 0);
    for (ssize_t n; (n = read(in, buffer, sizeof buffer)) > 0;) CHECK(write(out, buffer, (size_t)n) == n);
    CHECK(close(in) == 0 && close(out) == 0);
}

/* mov eax, result; ret */
static void assemble(unsigned char *at, int result) {
    const unsigned char code[] = {0xb8, (unsigned char)result, 0, 0, 0, 0xc3};
    memcpy(at, code, sizeof code);
}

static int call(const void *at) { return ((int (*)(void))at)(); }

static void code_from_file(const char *path, int first) {
    unsigned char page[PAGE];
    memset(page, 0xcc, sizeof page);
    assemble(page + 64, first);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && write(fd, page, PAGE) == PAGE);
    unsigned char *code = mmap(NULL, PAGE, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0);
    CHECK(code != MAP_FAILED && call(code + 64) == first);
    unsigned char *shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_SHARED, fd, 0);
    CHECK(shared != MAP_FAILED);
    for (int i = 0; i < 200; i++) {
        assemble(shared + 64, first + i % 7);
        CHECK(call(shared + 64) == first + i % 7);
    }
    CHECK(munmap(code, PAGE) == 0 && munmap(shared, PAGE) == 0 && close(fd) == 0 && unlink(path) == 0);
}

static void code_from_memory(int first) {
    unsigned char *code = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(code != MAP_FAILED);
    for (int i = 0; i < 200; i++) {
        assemble(code + PAGE - 3, first + i % 5);
        CHECK(call(code + PAGE - 3) == first + i % 5);
    }
    CHECK(mprotect(code, 2 * PAGE, PROT_READ | PROT_EXEC) == 0 && call(code + PAGE - 3) == first + 199 % 5);
    unsigned char *moved = mremap(code, 2 * PAGE, 4 * PAGE, MREMAP_MAYMOVE);
    CHECK(moved != MAP_FAILED && call(moved + PAGE - 3) == first + 199 % 5);
    CHECK(mprotect(moved, PAGE, PROT_READ | PROT_WRITE) == 0);
    CHECK(munmap(moved, 4 * PAGE) == 0);
}

static void everything(const char *who, int first) {
    code_from_file("code", first);
    code_from_memory(first + 10);
    printf("%s: done\n", who);
    fflush(stdout);
}

static void wait_for(pid_t child) {
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    printf("ended with %x\n", status);
    fflush(stdout);
}

int main(int argc, char **argv) {
    if (argc > 1) {
        printf("executed: %s, %s\n", argv[0], argv[1]);
        return 5;
    }
    CHECK(mkdtemp(directory) != NULL && chdir(directory) == 0);
    copy("program");
    pid_t jailed = fork();
    if (jailed == 0) {
        /* If the system allows user namespaces, one gives every user the right to chroot. */
        int is_jail = (geteuid() == 0 || unshare(CLONE_NEWUSER) == 0) && chroot(directory) == 0 && chdir("/") == 0;
        printf("%s\n", is_jail ? "in a jail" : "no jail");
        everything("first", 1);
        for (int i = 0; i < 3; i++) {
            pid_t child = fork();
            if (child == 0) {
                everything("child", 20 + i);
                _exit(i);
            }
            wait_for(child);
        }
        everything("first again", 40);
        pid_t child = vfork();
        if (child == 0) {
            execl("./program", "name", "after vfork", NULL);
            _exit(1);
        }
        wait_for(child);
        execl("./program", "name", "at the end", NULL);
        _exit(1);
    }
    wait_for(jailed);
    CHECK(unlink("program") == 0 && chdir("/") == 0 && rmdir(directory) == 0);
    return 0;
}
