/* The links /proc/PID/exe of children, of an executed program and of threads: where they lead, and what is
 * there.
 *
 * Hard for a translator: for the kernel, all of these processes execute the translator. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "guest.h"

static char self[PATH_MAX];
static char *volatile nowhere = (char *)8;

static ssize_t link_of(const char *format, int number, char *target) {
    char path[64];
    snprintf(path, sizeof path, format, number);
    ssize_t length = readlink(path, target, PATH_MAX - 1);
    if (length >= 0) target[length] = 0;
    return length;
}

/* The file that a path leads to is `expected`, whichever call asks. */
static void same_file(const char *path, const char *expected) {
    struct stat found, wanted;
    CHECK(stat(path, &found) == 0 && stat(expected, &wanted) == 0);
    CHECK(found.st_dev == wanted.st_dev && found.st_ino == wanted.st_ino && found.st_size == wanted.st_size);
    CHECK(access(path, X_OK) == 0);
    char head[64], same[64];
    int fd = open(path, O_RDONLY), other = open(expected, O_RDONLY);
    CHECK(fd >= 0 && other >= 0);
    CHECK(read(fd, head, sizeof head) == sizeof head && read(other, same, sizeof same) == sizeof same);
    CHECK(memcmp(head, same, sizeof head) == 0);
    CHECK(close(fd) == 0 && close(other) == 0);
}

static void *thread(void *ends) {
    int *pipes = ends, tid = (int)syscall(SYS_gettid);
    CHECK(write(pipes[1], &tid, sizeof tid) == sizeof tid);
    char byte;
    CHECK(read(pipes[2], &byte, 1) == 1);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc > 1) {
        printf("executed with %s\n", argv[1]);
        return 20;
    }
    char target[PATH_MAX], path[64];
    CHECK(readlink("/proc/self/exe", self, sizeof self - 1) > 0);

    /* A child that is a copy. */
    pid_t copy = fork();
    if (copy == 0) {
        for (;;) pause();
    }
    CHECK(link_of("/proc/%d/exe", copy, target) == (ssize_t)strlen(self) && strcmp(target, self) == 0);
    CHECK(link_of("/proc/%d/task/../exe", copy, target) > 0 && strcmp(target, self) == 0);
    snprintf(path, sizeof path, "/proc/%d/exe", copy);
    same_file(path, self);
    char part[4];
    CHECK(readlink(path, part, sizeof part) == sizeof part && memcmp(part, self, sizeof part) == 0);
    CHECK(readlink(path, part, 0) == -1 && errno == EINVAL);
    CHECK(readlink(path, nowhere, 4) == -1 && errno == EFAULT);
    char directory[64];
    snprintf(directory, sizeof directory, "/proc/%d", copy);
    int fd = open(directory, O_PATH | O_DIRECTORY);
    CHECK(fd >= 0);
    ssize_t length = readlinkat(fd, "exe", target, sizeof target);
    CHECK(length == (ssize_t)strlen(self) && memcmp(target, self, length) == 0);
    struct stat link;
    CHECK(fstatat(fd, "exe", &link, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(link.st_mode));
    puts("a copy: ok");

    /* Its link is executed. */
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        execl(path, "executables_of_others", "its link", (char *)NULL);
        _Exit(errno);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 20);
    CHECK(kill(copy, SIGKILL) == 0 && waitpid(copy, &status, 0) == copy);
    CHECK(link_of("/proc/%d/exe", copy, target) == -1 && errno == ENOENT);
    puts("a child that is gone: ok");

    /* A child that executes another program; a translator may take a while to start. */
    pid_t sleeper = fork();
    if (sleeper == 0) {
        execl("/bin/sleep", "sleep", "100", (char *)NULL);
        _Exit(1);
    }
    char expected[PATH_MAX];
    CHECK(realpath("/bin/sleep", expected) != NULL);
    int tries = 0;
    do nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    while (link_of("/proc/%d/exe", sleeper, target) > 0 && strcmp(target, expected) && ++tries < 10000);
    CHECK(strcmp(target, expected) == 0);
    snprintf(path, sizeof path, "/proc/%d/exe", sleeper);
    same_file(path, expected);
    CHECK(kill(sleeper, SIGKILL) == 0 && waitpid(sleeper, &status, 0) == sleeper);
    puts("another program: ok");

    /* A thread. */
    int ends[4], tid;
    CHECK(pipe(ends) == 0 && pipe(ends + 2) == 0);
    pthread_t other;
    CHECK(pthread_create(&other, NULL, thread, ends) == 0);
    CHECK(read(ends[0], &tid, sizeof tid) == sizeof tid);
    CHECK(link_of("/proc/self/task/%d/exe", tid, target) > 0 && strcmp(target, self) == 0);
    CHECK(link_of("/proc/%d/exe", tid, target) > 0 && strcmp(target, self) == 0);
    CHECK(write(ends[3], "x", 1) == 1);
    CHECK(pthread_join(other, NULL) == 0);
    puts("a thread: ok");
    return 0;
}
