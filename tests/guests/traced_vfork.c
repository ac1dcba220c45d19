/* A vfork's child that asks its parent to be its tracer and executes a program, as debuggers start one.
 *
 * Hard for a translator: under direct execution each call of the child's stops it for its tracer, who sleeps until the
 * child executes the program. */
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 3);
    for (long i = 0; i < n; i++) {
        pid_t child = vfork();
        CHECK(child >= 0);
        if (child == 0) {
            if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0) _exit(8);
            setpgid(0, 0);
            execl("/bin/true", "true", (char *)NULL);
            _exit(9);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        printf("first %x\n", status);
        /* The first stop is for the program; of the others a translator may have its signals. */
        for (int signal = 0; WIFSTOPPED(status); signal = WSTOPSIG(status))
            CHECK(ptrace(PTRACE_CONT, child, NULL, signal) == 0 && waitpid(child, &status, 0) == child);
        printf("end %x\n", status);
    }
    return 0;
}
