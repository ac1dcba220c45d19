/* A limit on the address space (RLIMIT_AS): which mappings still fit, which fail, and the
 * limit's own value; also in children, in threads' stacks and in executed programs.
 *
 * Hard for a translator: its code cache and tables lie in the same address space and must not
 * count. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

enum { MIB = 1 << 20 };

static int fits(size_t size) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return -errno;
    munmap(memory, size);
    return 1;
}

static void show(const char *who) {
    struct rlimit limit, other;
    CHECK(getrlimit(RLIMIT_AS, &limit) == 0 && prlimit(getpid(), RLIMIT_AS, NULL, &other) == 0);
    CHECK(memcmp(&limit, &other, sizeof limit) == 0);
    printf("%s: %ld %ld; 10 MiB %d, 60 MiB %d, 200 MiB %d\n", who, (long)limit.rlim_cur, (long)limit.rlim_max, fits(10 * MIB), fits(60 * MIB), fits(200 * MIB));
    fflush(stdout);
}

static void *thread(void *unused) {
    return unused;
}

static void wait_for(pid_t pid) {
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    printf("status %d\n", status);
    fflush(stdout);
}

int main(int argc, char **argv) {
    if (argc > 1) {
        show("executed");
        return 4;
    }
    show("at first");
    struct rlimit limit = {100L * MIB, 150L * MIB};
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
    show("limited");
    /* Mapping over existing memory does not count it twice; growth counts. */
    char *memory = mmap(NULL, 64 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    show("with 64 MiB");
    CHECK(mmap(memory, 64 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == memory);
    CHECK(mremap(memory, 64 * MIB, 164 * MIB, MREMAP_MAYMOVE) == MAP_FAILED && errno == ENOMEM);
    CHECK(mremap(memory, 64 * MIB, 64 * MIB, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL) == MAP_FAILED && errno == ENOMEM);
    int segment = shmget(IPC_PRIVATE, 64 * MIB, 0600 | IPC_CREAT | SHM_NORESERVE);
    if (segment >= 0) { /* There may be no System V memory. */
        CHECK(shmat(segment, NULL, 0) == (void *)-1 && errno == ENOMEM);
        CHECK(shmctl(segment, IPC_RMID, NULL) == 0);
    }
    char *now = sbrk(0);
    CHECK(sbrk(MIB) == now && sbrk(60 * MIB) == (void *)-1 && errno == ENOMEM);
    CHECK(malloc(90 * MIB) == NULL && errno == ENOMEM);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 80 * MIB);
    pthread_t other;
    CHECK(pthread_create(&other, &attributes, thread, NULL) == EAGAIN);
    CHECK(pthread_create(&other, NULL, thread, NULL) == 0 && pthread_join(other, NULL) == 0);
    CHECK(munmap(memory, 64 * MIB) == 0);

    pid_t pid = fork();
    if (pid == 0) {
        show("child");
        limit.rlim_cur = 30L * MIB;
        CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
        execl(argv[0], argv[0], "executed", NULL);
        _exit(1);
    }
    wait_for(pid);
    pid = vfork();
    if (pid == 0) {
        execl(argv[0], argv[0], "executed", NULL);
        _exit(1);
    }
    wait_for(pid);
    limit = (struct rlimit){160L * MIB, 150L * MIB};
    CHECK(setrlimit(RLIMIT_AS, &limit) == -1 && errno == EINVAL);
    CHECK(prlimit(0, RLIMIT_AS, (void *)8, NULL) == -1 && errno == EFAULT);
    limit.rlim_cur = 150L * MIB;
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
    show("raised");
}
