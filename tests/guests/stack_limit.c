/* The limit of the stack (RLIMIT_STACK), lowered and raised while the program runs: how deep the first
 * thread may recurse then, also beside another thread and in children.
 *
 * Hard for a translator: the kernel grows a stack when it is used, but only its own. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

enum { KIB = 1 << 10, MIB = 1 << 20 };

static struct rlimit limit;

static void set(rlim_t soft) {
    limit.rlim_cur = soft;
    CHECK(setrlimit(RLIMIT_STACK, &limit) == 0);
}

/* Uses about so many bytes of stack. */
__attribute__((noinline)) static unsigned deep(long bytes) {
    volatile char here[4 * KIB];
    here[0] = (char)bytes;
    here[sizeof here - 1] = 1;
    unsigned below = bytes > (long)sizeof here ? deep(bytes - (long)sizeof here) : 0;
    return below + (unsigned)here[sizeof here - 1];
}

/* In a child with the limit `soft`: how it ends when it uses `bytes`. */
static int ending(rlim_t soft, long bytes) {
    fflush(stdout);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        set(soft);
        _exit(deep(bytes) != 0 ? 7 : 8);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

static atomic_int over;

static void *beside(void *unused) {
    while (!atomic_load(&over)) sched_yield();
    return unused;
}

int main(void) {
    CHECK(getrlimit(RLIMIT_STACK, &limit) == 0);
    printf("lowered: %d %d\n", ending(MIB, 600 * KIB), ending(MIB, 3 * MIB));
    printf("lowered and used: %u\n", (set(4 * MIB), deep(3 * MIB)));
    printf("lower than what was used: %d %d\n", ending(MIB, 5 * MIB / 2), ending(MIB, 5 * MIB));
    printf("lowered, raised: %u\n", (set(MIB), set(16 * MIB), deep(14 * MIB)));
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, beside, NULL) == 0);
    printf("beside a thread: %u\n", (set(32 * MIB), deep(30 * MIB)));
    atomic_store(&over, 1);
    CHECK(pthread_join(thread, NULL) == 0);
    printf("by prlimit: %d\n", (limit.rlim_cur = 64 * MIB, prlimit(0, RLIMIT_STACK, &limit, NULL)));
    printf("used: %u, in a child %d\n", deep(60 * MIB), ending(96 * MIB, 90 * MIB));
    if (limit.rlim_max == RLIM_INFINITY) {
        set(RLIM_INFINITY);
        CHECK(deep(90 * MIB) == 90 * MIB / (4 * KIB));
    }
    return 5;
}
