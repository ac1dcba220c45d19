/* posix_spawn and popen: file actions, signal defaults, ENOENT for a missing file, system().
 *
 * Hard for a translator: the child shares the parent's memory, and with it the translator's,
 * until it executes. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

extern char **environ;

static int finish(pid_t child) {
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static void handler(int number) {
    (void)number;
}

int main(void) {
    pid_t child = -7;
    char *none[] = {"/nonexistent/program", NULL};
    int error = posix_spawn(&child, none[0], NULL, NULL, none, environ);
    printf("missing: ENOENT %d\n", error == ENOENT);
    char *path_none[] = {"no-such-program-anywhere", NULL};
    error = posix_spawnp(&child, path_none[0], NULL, NULL, path_none, environ);
    printf("missing in PATH: ENOENT %d\n", error == ENOENT);
    char *directory[] = {"/usr", NULL};
    error = posix_spawn(&child, directory[0], NULL, NULL, directory, environ);
    printf("directory: EACCES %d\n", error == EACCES);
    fflush(stdout);
    char *echo[] = {"echo", "from", "echo", NULL};
    CHECK(posix_spawnp(&child, "echo", NULL, NULL, echo, environ) == 0);
    printf("echo: %d\n", finish(child));
    fflush(stdout);

    int fds[2];
    CHECK(pipe(fds) == 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fds[1], 1);
    posix_spawn_file_actions_addclose(&actions, fds[0]);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    char *shell[] = {"sh", "-c", "cat; echo captured; exit 5", NULL};
    CHECK(posix_spawn(&child, "/bin/sh", &actions, NULL, shell, environ) == 0);
    close(fds[1]);
    char text[100];
    size_t length = 0;
    ssize_t n;
    while ((n = read(fds[0], text + length, sizeof text - 1 - length)) > 0) length += (size_t)n;
    text[length] = 0;
    printf("captured \"%.*s\" status %d\n", (int)length - 1, text, finish(child));

    /* An ignored signal is set to its default in the child, a blocked one unblocked. */
    signal(SIGTERM, SIG_IGN);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    posix_spawnattr_setsigdefault(&attributes, &set);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
    char *killer[] = {"sh", "-c", "kill -TERM $$; exit 3", NULL};
    CHECK(posix_spawn(&child, "/bin/sh", NULL, &attributes, killer, environ) == 0);
    printf("default restored: %d\n", finish(child));
    CHECK(posix_spawn(&child, "/bin/sh", NULL, NULL, killer, environ) == 0);
    printf("inherited ignore: %d\n", finish(child));
    signal(SIGTERM, SIG_DFL);

    /* Each child makes the same hundred calls, whose site the translator may rewrite. */
    signal(SIGUSR1, SIG_IGN);
    char *signals[] = {"sh", "-c", "kill -USR1 $$; kill -USR2 $$; exit 3", NULL};
    for (int i = 0; i < 6; i++) {
        signal(SIGUSR2, i % 2 ? SIG_IGN : handler);
        CHECK(posix_spawn(&child, "/bin/sh", NULL, NULL, signals, environ) == 0);
        printf("USR1 ignored, USR2 %s: %d\n", i % 2 ? "ignored" : "handled", finish(child));
        struct sigaction now;
        CHECK(sigaction(SIGUSR2, NULL, &now) == 0 && now.sa_handler == (i % 2 ? SIG_IGN : handler));
    }

    printf("system: %d\n", WEXITSTATUS(system("exit 6")));
    FILE *pipe_from = popen("printf 'a b c' | tr a-c x-z", "r");
    CHECK(pipe_from && fgets(text, sizeof text, pipe_from));
    printf("popen \"%s\" %d\n", text, WEXITSTATUS(pclose(pipe_from)));
    return 0;
}
