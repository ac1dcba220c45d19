/* Job control under a terminal: a session on a pty, whose keys send signals to the foreground;
 * background jobs that read and write; stopping, continuing, the window's size, hanging up.
 *
 * Hard for a translator: the kernel's checks ask how the process handles SIGTTIN and SIGTTOU. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>
#include "guest.h"

static volatile sig_atomic_t seen[65];
static void note(int signo) { seen[signo]++; }
static void handle(int signo, int flags) {
    struct sigaction action = {.sa_handler = note, .sa_flags = flags};
    CHECK(sigaction(signo, &action, NULL) == 0);
}
static int to_leader[2], from_leader[2], master;
static char terminal[64];

/* Reads one byte from the other end. */
static char hear(int fd) {
    char byte;
    for (;;) {
        ssize_t n = read(fd, &byte, 1);
        if (n == 1) return byte;
        CHECK(n == -1 && errno == EINTR);
    }
}
static void say(int fd, char byte) { CHECK(write(fd, &byte, 1) == 1); }
static void await(int signo) {
    sigset_t set, old;
    sigfillset(&set);
    sigprocmask(SIG_SETMASK, &set, &old);
    sigemptyset(&set);
    while (!seen[signo]) sigsuspend(&set);
    sigprocmask(SIG_SETMASK, &old, NULL);
}
static int stopped_by(pid_t pid) {
    int status;
    for (;;) {
        pid_t got = waitpid(pid, &status, WUNTRACED);
        if (got == pid) return WIFSTOPPED(status) ? WSTOPSIG(status) : WIFSIGNALED(status) ? 1000 + WTERMSIG(status) : 2000 + WEXITSTATUS(status);
        CHECK(errno == EINTR);
    }
}

/* The session's leader, which acts as a shell does. */
static int leader(void) {
    CHECK(setsid() >= 0);
    int tty = open(terminal, O_RDWR);
    CHECK(tty >= 0 && ioctl(tty, TIOCSCTTY, 0) == 0);
    handle(SIGINT, 0), handle(SIGQUIT, 0), handle(SIGWINCH, 0), handle(SIGTSTP, 0), handle(SIGHUP, 0), handle(SIGCONT, 0);
    signal(SIGTTOU, SIG_IGN);
    struct { char key; int signo; } keys[] = {{'i', SIGINT}, {'q', SIGQUIT}, {'z', SIGTSTP}, {'w', SIGWINCH}};
    for (int i = 0; i < 4; i++) {
        say(from_leader[1], keys[i].key);
        await(keys[i].signo);
        dprintf(1, "%c: signal %d, seen %d\n", keys[i].key, keys[i].signo, (int)seen[keys[i].signo]);
    }
    /* A read is interrupted by the key. */
    seen[SIGINT] = 0;
    say(from_leader[1], 'r');
    char buffer[64];
    ssize_t n = read(tty, buffer, sizeof buffer);
    dprintf(1, "read interrupted: %zd %d seen %d\n", n, errno == EINTR, (int)seen[SIGINT]);
    /* A job in the foreground is stopped by the key, continued, and killed by the other. */
    int ready[2];
    CHECK(pipe(ready) == 0);
    pid_t job = fork();
    if (job == 0) {
        setpgid(0, 0);
        tcsetpgrp(tty, getpid());
        signal(SIGINT, SIG_DFL), signal(SIGTSTP, SIG_DFL), signal(SIGTTOU, SIG_DFL);
        say(ready[1], '1');
        for (volatile long i = 0;; i++) {}
    }
    CHECK(hear(ready[0]) == '1' && hear(to_leader[0]) == 'n');
    say(from_leader[1], 'Z');
    dprintf(1, "job in a loop: %d", stopped_by(job));
    kill(-job, SIGCONT);
    say(from_leader[1], 'I');
    dprintf(1, " %d\n", stopped_by(job));
    tcsetpgrp(tty, getpid());
    /* A job that handles SIGTSTP by stopping itself, and SIGCONT. */
    job = fork();
    if (job == 0) {
        setpgid(0, 0);
        tcsetpgrp(tty, getpid());
        seen[SIGCONT] = seen[SIGTSTP] = 0;
        say(ready[1], '2');
        await(SIGTSTP);
        signal(SIGTSTP, SIG_DFL);
        raise(SIGTSTP);
        handle(SIGTSTP, 0);
        await(SIGCONT);
        _exit(seen[SIGCONT] == 1 ? 7 : 8);
    }
    CHECK(hear(ready[0]) == '2');
    say(from_leader[1], 'Z');
    dprintf(1, "job that handles it: %d", stopped_by(job));
    kill(-job, SIGCONT);
    dprintf(1, " %d\n", stopped_by(job));
    tcsetpgrp(tty, getpid());
    /* Jobs in the background may not read, nor write when the terminal says so, nor change it;
     * blocked or ignored they may. */
    struct termios settings;
    CHECK(tcgetattr(tty, &settings) == 0);
    settings.c_lflag |= TOSTOP;
    CHECK(tcsetattr(tty, TCSANOW, &settings) == 0);
    for (int kind = 0; kind < 7; kind++) {
        job = fork();
        if (job == 0) {
            setpgid(0, 0);
            signal(SIGTTOU, kind == 4 ? SIG_IGN : SIG_DFL);
            signal(SIGTTIN, kind == 5 ? SIG_IGN : SIG_DFL);
            if (kind == 6) handle(SIGTTIN, 0);
            say(ready[1], '3');
            int r = 0;
            switch (kind) {
                case 0: r = (int)read(tty, buffer, 1); break;
                case 1: r = (int)write(tty, "x", 1); break;
                case 2: r = tcsetattr(tty, TCSANOW, &settings); break;
                case 3: r = tcsetpgrp(tty, getpid()); break;
                case 4: r = (int)write(tty, "x", 1); break;
                default: r = (int)read(tty, buffer, 1); break;
            }
            _exit(r == -1 ? errno == EINTR ? 20 : errno == EIO ? 30 : 40 : 10 + r);
        }
        CHECK(hear(ready[0]) == '3');
        int first = stopped_by(job);
        dprintf(1, "background %d: %d", kind, first);
        if (first < 1000) {
            kill(-job, SIGKILL);
            dprintf(1, " %d", stopped_by(job));
        }
        dprintf(1, "\n");
    }
    /* Hanging up. */
    seen[SIGHUP] = 0;
    say(from_leader[1], 'h');
    await(SIGHUP);
    n = read(tty, buffer, sizeof buffer);
    dprintf(1, "hung up: %zd, seen %d\n", n, (int)seen[SIGHUP]);
    return 5;
}

static void moment(void) {
    struct timespec t = {0, 20000000};
    nanosleep(&t, NULL);
}

/* Until the child waits for something. */
static void until_asleep(pid_t pid) {
    char path[40], text[200], state = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    do {
        moment();
        int fd = open(path, O_RDONLY);
        ssize_t n = read(fd, text, sizeof text - 1);
        CHECK(n > 0);
        close(fd);
        text[n] = 0;
        state = strrchr(text, ')')[2];
    } while (state != 'S');
}

int main(void) {
    master = posix_openpt(O_RDWR | O_NOCTTY);
    CHECK(master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0 && pipe(to_leader) == 0 && pipe(from_leader) == 0);
    strcpy(terminal, ptsname(master));
    pid_t child = fork();
    if (child == 0) {
        close(master);
        close(from_leader[0]);
        _exit(leader());
    }
    close(from_leader[1]);
    for (;;) {
        char byte;
        if (read(from_leader[0], &byte, 1) != 1) break;
        struct winsize size = {30, 100, 0, 0};
        switch (byte) {
            case 'i': say(master, 3); break;
            case 'q': say(master, 28); break;
            case 'z': say(master, 26); break;
            case 'w': CHECK(ioctl(master, TIOCSWINSZ, &size) == 0); break;
            case 'r': until_asleep(child), say(master, 3), say(to_leader[1], 'n'); break;
            case 'Z': moment(), say(master, 26); break;
            case 'I': moment(), say(master, 3); break;
            case 'h': close(master); break;
        }
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    printf("leader %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
    return 0;
}
