/* A process with one thread that executes new loops all the time, and meanwhile asks the kernel for what
 * only a process with one thread gets, counts its threads, forks, and executes a program.
 *
 * Hard for a translator: it may have threads of its own, which must not be seen, and which the child of a
 * fork does not have. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <sched.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

enum { LOOPS = 12 };

static uint64_t table[1024];

/* A loop of its own for each N. */
#define LOOP(N)                                                                  \
    static uint64_t loop_##N(uint64_t rounds) {                                  \
        uint64_t sum = N;                                                        \
        for (uint64_t i = 0; i < rounds; i++) {                                  \
            sum = sum * 31 + table[(sum + i) % (1000 - N)];                      \
            if (sum & (1 << (N & 7))) sum ^= i * (N + 3);                        \
        }                                                                        \
        return sum;                                                              \
    }
LOOP(0) LOOP(1) LOOP(2) LOOP(3) LOOP(4) LOOP(5) LOOP(6) LOOP(7) LOOP(8) LOOP(9) LOOP(10) LOOP(11)
static uint64_t (*const loops[LOOPS])(uint64_t) = {loop_0, loop_1, loop_2, loop_3, loop_4,  loop_5,
                                                   loop_6, loop_7, loop_8, loop_9, loop_10, loop_11};

static int threads(void) {
    DIR *directory = opendir("/proc/self/task");
    CHECK(directory != NULL);
    int found = 0;
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;) found += entry->d_name[0] != '.';
    closedir(directory);
    return found;
}

static int child(uint64_t (*work)(uint64_t), uint64_t rounds) {
    int status;
    pid_t pid = fork();
    if (pid == 0) {
        /* Its threads are asked for by a call that needs to have none. */
        int alone = unshare(CLONE_THREAD) == 0;
        _exit(alone ? (int)(work(rounds) % 100) : 101);
    }
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    return WEXITSTATUS(status);
}

int main(int argc, char **argv) {
    long rounds = iterations(argc, argv, 20000), counts = argc > 2;
    for (int i = 0; i < 1024; i++) table[i] = i * 0x9e3779b97f4a7c15;
    uint64_t sum = 0;
    for (int pass = 0; pass < 6; pass++)
        for (int n = 0; n < LOOPS; n++) {
            sum = mix(sum, loops[n](rounds));
            CHECK(unshare(CLONE_THREAD) == 0 && unshare(CLONE_VM) == 0);
            CHECK(prctl(PR_SET_NAME, "alone") == 0);
            sum = mix(sum, child(loops[(n + pass) % LOOPS], rounds / 8));
            if (counts && pass > 2) sum = mix(sum, threads());
        }
    printf("%lx\n", (unsigned long)sum);
    fflush(stdout);
    execl("/bin/echo", "echo", "and gone", (char *)NULL);
    return 1;
}
