/* execve, execveat, fexecve and posix_spawn of all that cannot be executed, and of scripts that
 * can: the errors, and which arguments arrive.
 *
 * Hard for a translator: it executes itself in the program's stead, so it must find the kernel's
 * error before that. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

extern char **environ;
static char self[PATH_MAX];

static void file(const char *name, const char *content, size_t size, int mode) {
    int fd = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && write(fd, content, size) == (ssize_t)size && fchmod(fd, mode) == 0 && close(fd) == 0);
}

static void text(const char *name, const char *content) { file(name, content, strlen(content), 0755); }

static int finish(const char *what, pid_t child) {
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    if (WIFSIGNALED(status)) printf("%s: killed by %d\n", what, WTERMSIG(status));
    else printf("%s: %d\n", what, WEXITSTATUS(status));
    fflush(stdout);
    return status;
}

/* A child that executes and, if that fails, exits with 100 + errno. */
static int attempt(const char *what, const char *path, char **argv, char **envp) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        execve(path, argv, envp);
        _Exit(100 + errno);
    }
    return finish(what, child);
}

static void simple(const char *path) {
    static int started;
    char *argv[] = {"name", "one", "", "two words", NULL};
    int status = attempt(path, path, argv, environ);
    /* Each start takes a translator long, so only some files are executed in all ways. */
    if (WIFEXITED(status) && WEXITSTATUS(status) < 100 && started++ % 4) return;
    fflush(stdout);
    static volatile int error;
    error = 0;
    pid_t child = vfork();
    if (child == 0) {
        execve(path, argv, environ);
        error = errno;
        _Exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    int spawned = posix_spawn(&child, path, NULL, NULL, argv, environ);
    if (spawned == 0) CHECK(waitpid(child, &status, 0) == child);
    printf("  vfork %d, posix_spawn %d\n", error, spawned);
}

int main(int argc, char **argv) {
    if (argc > 1) {
        printf("shown:");
        for (int i = 0; i < argc; i++) {
            if (strlen(argv[i]) > 60) printf(" [%zu bytes]", strlen(argv[i]));
            else printf(" [%s]", strstr(argv[i], "exec_errors") ? "self" : argv[i]);
        }
        char *variable = getenv("MARK");
        printf(" %s %d\n", variable ? variable : "none", environ[0] == NULL);
        return 20;
    }
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    CHECK(length > 0);
    char directory[] = "/tmp/exec_errors.XXXXXX";
    CHECK(mkdtemp(directory) && chdir(directory) == 0);
    setenv("MARK", "marked", 1);
    char line[PATH_MAX + 64];

    /* Files of all kinds. */
    file("plain", "#!/bin/true\n", 12, 0644);
    file("empty", "", 0, 0755);
    text("text", "echo without a first line\n");
    text("binary", "\x7f""ELF");
    text("not_elf", "\x7f""FLE and more and more and more and more and more and more and more");
    CHECK(mkdir("directory", 0755) == 0 && symlink("loop", "loop") == 0 && symlink("nowhere", "dangling") == 0);
    CHECK(mkfifo("fifo", 0755) == 0);
    int fd = open(self, O_RDONLY);
    static char image[1 << 20];
    ssize_t size = read(fd, image, sizeof image);
    CHECK(size > 1000);
    file("copy", image, size, 0755);
    file("truncated", image, 100, 0755);
    char other[4096];
    memcpy(other, image, sizeof other);
    other[18] = (char)183; /* another machine */
    file("foreign", other, sizeof other, 0755);
    memcpy(other, image, sizeof other);
    other[16] = 1; /* an object file */
    file("object", other, sizeof other, 0755);
    const char *names[] = {"./plain", "./empty", "./text", "./binary", "./not_elf", "./directory", "./loop", "./dangling", "./fifo",
                           "./truncated", "./foreign", "./object", "./missing", "./plain/below", "", "/", "missing/", "./copy/"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) simple(names[i]);
    char longer[300], longest[PATH_MAX + 10];
    memset(longer, 'x', sizeof longer), longer[sizeof longer - 1] = 0;
    memset(longest, '/', sizeof longest), longest[sizeof longest - 1] = 0;
    simple(longer);
    attempt("longest", longest, argv, environ);
    int writer = open("copy", O_WRONLY);
    simple("./copy");
    close(writer);

    /* Scripts. */
    snprintf(line, sizeof line, "#!%s show\n", self);
    text("s1", line);
    text("s2", "#!./s1\n");
    text("s3", "#! ./s2   with an argument  \n");
    text("s4", "#!./s3\n");
    text("s5", "#!./s4 deep\n");
    text("s6", "#!./s5\n");
    text("s7", "#!./s6\n");
    text("round", "#!./round\n");
    text("nothing", "#!\n");
    text("blanks", "#!   \t \n");
    text("no_interpreter", "#!/nonexistent/interpreter\n");
    text("to_directory", "#!/tmp\n");
    text("to_text", "#!./text\n");
    text("to_plain", "#!./plain\n");
    snprintf(line, sizeof line, "#!%s", self);
    text("no_newline", line);
    memset(line, 'y', 300), memcpy(line, "#!/", 3), strcpy(line + 300, "\n");
    text("long_line", line);
    snprintf(line, sizeof line, "#!%s show ", self);
    memset(line + strlen(line), 'z', 400), line[500] = '\n', line[501] = 0;
    text("long_argument", line);
    const char *scripts[] = {"./s1", "./s2", "./s3", "./s4", "./s5", "./s6", "./s7", "./round", "./nothing", "./blanks", "./no_interpreter",
                             "./to_directory", "./to_text", "./to_plain", "./long_line", "./long_argument"};
    for (size_t i = 0; i < sizeof scripts / sizeof *scripts; i++) simple(scripts[i]);

    /* Arguments. */
    char *none[] = {NULL}, *show[] = {"exec_errors", "show", NULL}, *nothing[] = {NULL};
    attempt("no environment", self, show, NULL);
    attempt("empty environment", self, show, nothing);
    attempt("bad argv", self, (char **)8, environ);
    char *bad[] = {"x", (char *)16, NULL};
    attempt("bad argument", self, bad, environ);
    attempt("bad environment", self, show, bad);
    attempt("bad path", (char *)24, show, environ);
    attempt("script without arguments", "./s1", none, environ);
    size_t big = 32 * 4096;
    char *string = malloc(big + 2);
    memset(string, 'a', big + 1);
    char *with_string[] = {"exec_errors", "show", string, NULL};
    string[big] = 0;
    attempt("too long a string", "/bin/true", with_string, environ);
    string[big - 1] = 0;
    attempt("a string that just fits", "/bin/true", with_string, environ);
    struct rlimit stack = {1 << 20, RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_STACK, &stack) == 0);
    for (int count = 2; count < 4; count++) {
        char *strings[] = {"true", string, string, count > 2 ? string : NULL, NULL};
        string[100 * 1024] = 0;
        attempt("many bytes", "/bin/true", strings, nothing);
    }
    static char *words[40000];
    for (int i = 0; i < 39999; i++) words[i] = "";
    attempt("many words", "/bin/true", words, nothing);

    /* By descriptor. */
    fflush(stdout);
    if (fork() == 0) {
        fexecve(fd, show, environ);
        _Exit(100 + errno);
    }
    alarm(60);
    int status;
    CHECK(wait(&status) > 0);
    printf("fexecve %d\n", WEXITSTATUS(status));
    struct { int dirfd; const char *path; int flags; } at[] = {
        {fd, "", AT_EMPTY_PATH}, {fd, "", 0}, {-5, "x", 0}, {fd, "x", 0}, {AT_FDCWD, "loop", AT_SYMLINK_NOFOLLOW}, {AT_FDCWD, self, 0x40},
        {open(".", O_RDONLY | O_DIRECTORY), "s1", 0}, {open("s1", O_RDONLY), "", AT_EMPTY_PATH}, {AT_FDCWD, "", AT_EMPTY_PATH},
    };
    for (size_t i = 0; i < sizeof at / sizeof *at; i++) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            syscall(SYS_execveat, at[i].dirfd, at[i].path, show, environ, at[i].flags);
            _Exit(100 + errno);
        }
        finish("execveat", child);
    }
    int memory = memfd_create("program", MFD_CLOEXEC);
    CHECK(write(memory, image, size) == size);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        fexecve(memory, show, environ);
        _Exit(100 + errno);
    }
    finish("memfd", child);

    /* execvp hands what has no first line to a shell. */
    setenv("PATH", "/nonexistent:./directory:.", 1);
    fflush(stdout);
    if ((child = fork()) == 0) {
        execlp("text", "text", NULL);
        _Exit(100 + errno);
    }
    finish("execvp", child);
    if ((child = fork()) == 0) {
        execlp("plain", "plain", NULL);
        _Exit(100 + errno);
    }
    finish("execvp", child);
    CHECK(chdir("/") == 0);
    setenv("PATH", "/bin:/usr/bin", 1);
    snprintf(line, sizeof line, "rm -r %s", directory);
    return system(line) != 0;
}
