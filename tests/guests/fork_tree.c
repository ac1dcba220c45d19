/* Trees of processes that talk through pipes; pipelines; exit statuses; memory that fork
 * separates.
 *
 * Hard for a translator: the child must go on with a code cache and tables of its own. */
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

static int private_value = 1;

/* Each node forks its children, adds up what they report, and reports to its parent. */
static uint64_t tree(int depth, uint64_t id) {
    if (depth == 0) return id * id;
    uint64_t total = id;
    for (uint64_t i = 1; i <= 2; i++) {
        int fds[2];
        CHECK(pipe(fds) == 0);
        fflush(stdout);
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            close(fds[0]);
            private_value += depth;
            uint64_t result = tree(depth - 1, id * 2 + i);
            if (write(fds[1], &result, sizeof result) != sizeof result) _exit(98);
            _exit(private_value & 0x7f);
        }
        close(fds[1]);
        uint64_t result = 0;
        CHECK(read(fds[0], &result, sizeof result) == sizeof result);
        close(fds[0]);
        int status;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
        total = total * 31 + result + (uint64_t)WEXITSTATUS(status);
    }
    return total;
}

int main(int argc, char **argv) {
    int depth = (int)iterations(argc, argv, 3);
    printf("tree %lu\n", tree(depth, 1));
    CHECK(private_value == 1);
    /* A ring: numbers pass through three processes, each of which changes them in a hot loop. */
    int stage[4][2];
    for (int i = 0; i < 4; i++) CHECK(pipe(stage[i]) == 0);
    fflush(stdout);
    for (int i = 0; i < 3; i++) {
        if (fork() == 0) {
            for (int k = 0; k < 4; k++) {
                if (k != i) close(stage[k][0]);
                if (k != i + 1) close(stage[k][1]);
            }
            uint64_t v;
            while (read(stage[i][0], &v, sizeof v) == sizeof v) {
                for (int k = 0; k < 50; k++) v = v * 3 + (uint64_t)i;
                if (write(stage[i + 1][1], &v, sizeof v) != sizeof v) _exit(1);
            }
            _exit(0);
        }
    }
    close(stage[0][0]);
    for (int i = 1; i < 4; i++) close(stage[i][1]);
    uint64_t sum = 1, v;
    for (uint64_t i = 0; i < 20; i++) {
        CHECK(write(stage[0][1], &i, sizeof i) == sizeof i);
        CHECK(read(stage[3][0], &v, sizeof v) == sizeof v);
        sum = mix(sum, v);
    }
    close(stage[0][1]);
    int ended = 0, status;
    while (wait(&status) > 0) ended += WIFEXITED(status) && WEXITSTATUS(status) == 0;
    printf("ring %016lx, %d ended\n", sum, ended);
    return 0;
}
