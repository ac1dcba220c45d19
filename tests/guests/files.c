/* Files and time: create, seek, rename, directories, stat, locks, copies through pipes, clocks
 * that go forward.
 *
 * A test of plain system calls: results and errors must be the kernel's. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#include "guest.h"

int main(void) {
    char directory[] = "/tmp/guest-files-XXXXXX", path[200], other[200];
    CHECK(mkdtemp(directory));
    snprintf(path, sizeof path, "%s/file", directory);
    snprintf(other, sizeof other, "%s/renamed", directory);
    FILE *f = fopen(path, "w+");
    for (int i = 0; i < 1000; i++) fprintf(f, "%d\n", i * i);
    rewind(f);
    long sum = 0, value;
    while (fscanf(f, "%ld", &value) == 1) sum += value;
    printf("sum %ld, position %ld\n", sum, ftell(f));
    fclose(f);
    struct stat st;
    CHECK(stat(path, &st) == 0 && S_ISREG(st.st_mode));
    printf("size %ld, links %lu\n", (long)st.st_size, (unsigned long)st.st_nlink);
    CHECK(rename(path, other) == 0 && access(path, F_OK) == -1 && errno == ENOENT);
    CHECK(symlink("renamed", path) == 0);
    int fd = open(path, O_RDWR | O_APPEND);
    CHECK(fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0);
    CHECK(write(fd, "tail", 4) == 4 && lseek(fd, -8, SEEK_END) >= 0);
    char text[9] = "";
    CHECK(read(fd, text, 8) == 8);
    printf("end \"%.3s.%s\"\n", text, text + 4);
    CHECK(ftruncate(fd, 10) == 0 && fstat(fd, &st) == 0 && st.st_size == 10);
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 50);
    printf("copy %d, flags %d\n", copy, fcntl(copy, F_GETFD));
    close(copy);
    close(fd);
    DIR *d = opendir(directory);
    int entries = 0;
    for (struct dirent *e; (e = readdir(d));) entries++;
    closedir(d);
    printf("entries %d\n", entries);
    CHECK(unlink(path) == 0 && unlink(other) == 0 && rmdir(directory) == 0);
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (int i = 0; i < 100; i++) {
        clock_gettime(CLOCK_MONOTONIC, &b);
        CHECK(b.tv_sec > a.tv_sec || (b.tv_sec == a.tv_sec && b.tv_nsec >= a.tv_nsec));
        a = b;
    }
    struct timeval tv;
    CHECK(gettimeofday(&tv, NULL) == 0 && labs(tv.tv_sec - time(NULL)) <= 1);
    time_t fixed = 1700000000;
    struct tm *tm = gmtime(&fixed);
    strftime(text, sizeof text, "%H:%M:%S", tm);
    printf("clock %s, year %d\n", text, tm->tm_year + 1900);
    int fds[2];
    CHECK(pipe2(fds, O_NONBLOCK) == 0);
    CHECK(read(fds[0], text, 1) == -1 && errno == EAGAIN);
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fds[0], &set);
    tv = (struct timeval){0, 1000};
    printf("select %d\n", select(fds[0] + 1, &set, NULL, NULL, &tv));
    CHECK(write(fds[1], "x", 1) == 1);
    FD_SET(fds[0], &set);
    printf("select %d\n", select(fds[0] + 1, &set, NULL, NULL, &tv));
    return 0;
}
