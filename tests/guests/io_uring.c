/* A ring shared with the kernel: writes, reads, a timeout, a wait that a signal ends, and a wait
 * whose mask lets the signal in. On a kernel without rings the program prints that.
 *
 * Hard for a translator: the kernel writes into memory without a system call of the program. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "guest.h"

enum { ENTRIES = 8, BLOCK = 4096, BLOCKS = 64 };

static struct {
    int fd;
    unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
} ring;

static void *map(struct io_uring_params *params, size_t size, off_t offset) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring.fd, offset);
    CHECK(memory != MAP_FAILED && params->sq_entries == ENTRIES);
    return memory;
}

static void open_ring(void) {
    struct io_uring_params p = {0};
    ring.fd = (int)syscall(SYS_io_uring_setup, ENTRIES, &p);
    if (ring.fd < 0) {
        puts("no rings here");
        exit(0);
    }
    char *sq = map(&p, p.sq_off.array + p.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
    char *cq = map(&p, p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe), IORING_OFF_CQ_RING);
    ring.sqes = map(&p, p.sq_entries * sizeof(struct io_uring_sqe), IORING_OFF_SQES);
    ring.sq_tail = (unsigned *)(sq + p.sq_off.tail);
    ring.sq_mask = (unsigned *)(sq + p.sq_off.ring_mask);
    ring.sq_array = (unsigned *)(sq + p.sq_off.array);
    ring.cq_head = (unsigned *)(cq + p.cq_off.head);
    ring.cq_tail = (unsigned *)(cq + p.cq_off.tail);
    ring.cq_mask = (unsigned *)(cq + p.cq_off.ring_mask);
    ring.cqes = (struct io_uring_cqe *)(cq + p.cq_off.cqes);
}

static void submit(int op, int fd, const void *address, unsigned size, uint64_t offset, uint64_t name) {
    unsigned tail = *ring.sq_tail, index = tail & *ring.sq_mask;
    ring.sqes[index] = (struct io_uring_sqe){
        .opcode = (unsigned char)op, .fd = fd, .addr = (uintptr_t)address, .len = size, .off = offset, .user_data = name};
    ring.sq_array[index] = index;
    __atomic_store_n(ring.sq_tail, tail + 1, __ATOMIC_RELEASE);
}

static int enter(unsigned submitted, unsigned wait, unsigned flags, const void *argument, size_t size) {
    return (int)syscall(SYS_io_uring_enter, ring.fd, submitted, wait, flags, argument, size);
}

/* Looks at the shared memory until the kernel has put something there. */
static int next(uint64_t *name) {
    unsigned head = *ring.cq_head;
    while (__atomic_load_n(ring.cq_tail, __ATOMIC_ACQUIRE) == head) continue;
    const struct io_uring_cqe *done = &ring.cqes[head & *ring.cq_mask];
    int result = done->res;
    *name = done->user_data;
    __atomic_store_n(ring.cq_head, head + 1, __ATOMIC_RELEASE);
    return result;
}

static volatile sig_atomic_t rings;
static void on_signal(int signal) {
    rings += signal == SIGALRM;
}

int main(void) {
    open_ring();
    static unsigned char out[BLOCKS][BLOCK], in[BLOCK];
    uint64_t seed = 7, sum = 0, name = 0;
    for (int i = 0; i < BLOCKS; i++)
        for (int j = 0; j < BLOCK; j++) out[i][j] = (unsigned char)next_random(&seed);
    int file = memfd_create("blocks", 0);
    for (int i = 0; i < BLOCKS; i += 4) {
        for (int j = i; j < i + 4; j++) submit(IORING_OP_WRITE, file, out[j], BLOCK, (uint64_t)j * BLOCK, (uint64_t)j);
        CHECK(enter(4, 4, IORING_ENTER_GETEVENTS, NULL, 0) == 4);
        for (int j = 0; j < 4; j++) CHECK(next(&name) == BLOCK && name / 4 == (uint64_t)i / 4);
    }
    for (int i = 0; i < BLOCKS; i++) {
        int which = i * 37 % BLOCKS;
        memset(in, 0, sizeof in);
        submit(IORING_OP_READ, file, in, BLOCK, (uint64_t)which * BLOCK, (uint64_t)which);
        CHECK(enter(1, 0, 0, NULL, 0) == 1);
        CHECK(next(&name) == BLOCK && name == (uint64_t)which && memcmp(in, out[which], BLOCK) == 0);
        sum = mix_bytes(sum, in, BLOCK);
    }
    printf("blocks %016llx\n", (unsigned long long)sum);

    struct __kernel_timespec moment = {.tv_nsec = 1000000};
    submit(IORING_OP_TIMEOUT, -1, &moment, 1, 0, 99);
    CHECK(enter(1, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 1);
    int result = next(&name);
    printf("timeout: %d %d\n", result == -ETIME, (int)name);

    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGALRM, &action, NULL);
    ualarm(20000, 0);
    int waited = enter(0, 1, IORING_ENTER_GETEVENTS, NULL, 0);
    printf("signal: %d %d %d\n", waited == -1, errno == EINTR, rings);

    sigset_t alarm_set, none;
    sigemptyset(&none);
    sigemptyset(&alarm_set);
    sigaddset(&alarm_set, SIGALRM);
    sigprocmask(SIG_BLOCK, &alarm_set, NULL);
    ualarm(20000, 0);
    waited = enter(0, 1, IORING_ENTER_GETEVENTS, &none, 8);
    printf("mask: %d %d %d\n", waited == -1, errno == EINTR, rings);
    raise(SIGALRM);
    struct io_uring_getevents_arg extended = {.sigmask = (uintptr_t)&none, .sigmask_sz = 8};
    waited = enter(0, 1, IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG, &extended, sizeof extended);
    printf("extended: %d %d %d\n", waited == -1, errno == EINTR, rings);
    sigprocmask(0, NULL, &none);
    printf("still blocked: %d\n", sigismember(&none, SIGALRM));
}
