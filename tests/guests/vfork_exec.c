/* vfork shares memory with a parent that waits; exec of itself, of a script, of what is missing;
 * descriptors over exec.
 *
 * Hard for a translator: the child changes the translator's data, which the parent uses
 * afterwards. */
#include <errno.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

static volatile int shared;
extern char **environ;

static int finish(pid_t child) {
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "child") == 0) {
        printf("child: argc %d, last \"%s\", VARIABLE=%s, fd 9 %s\n", argc, argv[argc - 1], getenv("VARIABLE"),
               fcntl(9, F_GETFD) < 0 ? "closed" : "open");
        return atoi(argv[2]);
    }
    long n = iterations(argc, argv, 5);
    for (long i = 0; i < n; i++) {
        fflush(stdout);
        pid_t child = vfork();
        CHECK(child >= 0);
        if (child == 0) {
            shared = shared * 10 + (int)i + 1; /* seen by the parent */
            _exit((int)i);
        }
        CHECK(finish(child) == i);
    }
    printf("shared %d\n", shared);
    dup2(1, 9);
    fcntl(9, F_SETFD, FD_CLOEXEC);
    char *environment[] = {"VARIABLE=of the child", "PATH=/usr/bin:/bin", NULL};
    char *self[] = {argv[0], "child", "42", "an argument with spaces", NULL};
    fflush(stdout);
    pid_t child = vfork();
    if (child == 0) {
        execve("/proc/self/exe", self, environment);
        _exit(97);
    }
    printf("self: %d\n", finish(child));
    char *missing[] = {"/nonexistent/program", NULL};
    volatile int error = 0;
    child = vfork();
    if (child == 0) {
        execve(missing[0], missing, environment);
        error = errno;
        _exit(127);
    }
    printf("missing: %d, ENOENT %d\n", finish(child), error == ENOENT);
    child = vfork();
    if (child == 0) {
        char *directory[] = {"/", NULL};
        execve("/", directory, environment);
        error = errno;
        _exit(126);
    }
    printf("directory: %d, EACCES %d\n", finish(child), error == EACCES);
    char *shell[] = {"sh", "-c", "echo shell $VARIABLE; kill -TERM $$", NULL};
    fflush(stdout);
    child = vfork();
    if (child == 0) {
        execve("/bin/sh", shell, environment);
        _exit(97);
    }
    printf("shell: %d\n", finish(child));
    fflush(stdout);
    /* At last this process itself becomes another program. */
    char *last[] = {argv[0], "child", "11", "in place", NULL};
    setenv("VARIABLE", "of the parent", 1);
    execve(argv[0], last, environ);
    return 96;
}
