/* Programs that a translator could not run as the kernel does: one that may be executed but not
 * read, and set-user-ID and set-group-ID ones. Each prints its ids. A user other than root
 * cannot give files away, and tries fewer cases. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

enum { NOBODY = 65534 };

static char directory[] = "/tmp/guest-XXXXXX";

/* A copy of this program. */
static void copy(const char *path, int owner, int mode) {
    static char buffer[1 << 16];
    int in = open("/proc/self/exe", O_RDONLY), out = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0700);
    CHECK(in >= 0 && out >= 0);
    for (ssize_t n; (n = read(in, buffer, sizeof buffer)) > 0;) CHECK(write(out, buffer, (size_t)n) == n);
    CHECK(owner < 0 || fchown(out, (uid_t)owner, (gid_t)owner) == 0);
    CHECK(fchmod(out, (mode_t)mode) == 0 && close(in) == 0 && close(out) == 0);
}

/* Executes it in a child, as that user if one is given. */
static void run(const char *what, const char *path, int user, int no_new_privileges) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        if (no_new_privileges) CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
        if (user >= 0) CHECK(setgid((gid_t)user) == 0 && setuid((uid_t)user) == 0);
        execl(path, "program", what, NULL);
        printf("%s: %s\n", what, strerror(errno));
        fflush(stdout);
        _Exit(1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    printf("  %d\n", status);
    CHECK(unlink(path) == 0);
}

int main(int argc, char **argv) {
    if (argc > 1) {
        printf("%s: %d %d, effectively %d %d, secure %lu\n", argv[1], getuid() == 0, getgid() == 0, geteuid() == NOBODY,
               getegid() == NOBODY, getauxval(AT_SECURE));
        return 0;
    }
    int is_root = geteuid() == 0, user = is_root ? NOBODY : -1;
    CHECK(mkdtemp(directory) != NULL && chmod(directory, 0755) == 0 && chdir(directory) == 0);
    copy("unreadable", -1, 0111);
    run("unreadable", "./unreadable", user, 0);
    copy("forbidden", -1, 0);
    run("forbidden", "./forbidden", user, 0);
    copy("own", -1, 06755);
    run("one's own", "./own", -1, 0);
    if (is_root) {
        copy("other", NOBODY, 04755);
        run("another user's", "./other", -1, 0);
        copy("group", NOBODY, 02755);
        run("another group's", "./group", -1, 0);
        copy("lock", NOBODY, 02745);
        run("a group's that may not execute", "./lock", -1, 0);
        copy("other", NOBODY, 06755);
        run("another user's, without new privileges", "./other", -1, 1);
        copy("root", 0, 06755);
        run("root's", "./root", NOBODY, 0);
    }
    CHECK(chdir("/") == 0 && rmdir(directory) == 0);
    return 0;
}
