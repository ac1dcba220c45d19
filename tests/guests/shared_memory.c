/* Memory that is changed from outside the loop that reads it. A loop that became hot on private
 * memory polls a word until it changes. The writers: a child, through shared memory of each
 * kind, mapped before or after the loop became hot, also through read-only mappings; the kernel,
 * which completes reads in the background; another thread; the same process through another
 * mapping. Each case has a process of its own, in which no memory was shared before.
 *
 * Hard for a translator: it removes repeated loads while memory is private, and must notice
 * every way in which that ends. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

enum { PAGE = 4096, HOT = 3000 };

static char *scratch;

/* Polls the word until it changes, up to the given number of times, and writes a local variable
 * in between. */
static __attribute__((noinline)) long poll_word(const long *word, long was, long most) {
    long turns = 0, slot[4] = {0};
    while (turns < most) {
        __asm__ volatile("" ::: "memory");
        if (*word != was) break;
        slot[turns & 3] += turns;
        turns++;
    }
    __asm__ volatile("" : : "r"(slot) : "memory");
    return turns;
}

static void heat(void) {
    long own = 5;
    for (int i = 0; i < 3; i++) CHECK(poll_word(&own, 5, HOT) == HOT);
}

/* A child that changes the word after a moment. */
static pid_t changer(long *word, int file) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child != 0) return child;
    usleep(20000);
    long value = 7;
    if (word) *(volatile long *)word = value;
    else CHECK(pwrite(file, &value, sizeof value, 0) == sizeof value);
    _exit(0);
}

static void wait_for(const long *word, pid_t child) {
    int status;
    poll_word(word, 0, INT64_MAX);
    CHECK(*(volatile const long *)word == 7);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void anonymous(void) {
    long *word = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(word != MAP_FAILED);
    wait_for(word, changer(word, -1));
}

static void anonymous_before(void) {
    long *word = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(word != MAP_FAILED);
    heat();
    wait_for(word, changer(word, -1));
}

/* The right to write is given later. */
static void protected_first(void) {
    long *word = mmap(NULL, PAGE, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(word != MAP_FAILED && mprotect(word, PAGE, PROT_READ | PROT_WRITE) == 0);
    wait_for(word, changer(word, -1));
}

static void segment(void) {
    int id = shmget(IPC_PRIVATE, PAGE, IPC_CREAT | 0600);
    CHECK(id >= 0);
    long *word = shmat(id, NULL, 0);
    CHECK(word != (void *)-1 && shmctl(id, IPC_RMID, NULL) == 0);
    wait_for(word, changer(word, -1));
    CHECK(shmdt(word) == 0);
}

static int file(void) {
    int fd = open(scratch, O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && ftruncate(fd, PAGE) == 0);
    return fd;
}

static void file_written_by_mapping(void) {
    long *word = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file(), 0);
    CHECK(word != MAP_FAILED);
    wait_for(word, changer(word, -1));
}

static void file_written_by_call(void) {
    int fd = file();
    const long *word = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(word != MAP_FAILED);
    wait_for(word, changer(NULL, fd));
}

/* This process cannot write it through this descriptor. */
static void memory_file_read_only(void) {
    int fd = memfd_create("shared", 0);
    CHECK(fd >= 0 && ftruncate(fd, PAGE) == 0);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int read_only = open(path, O_RDONLY);
    CHECK(read_only >= 0);
    const long *word = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, read_only, 0);
    CHECK(word != MAP_FAILED);
    wait_for(word, changer(NULL, fd));
}

static void moved(void) {
    long *word = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(word != MAP_FAILED);
    word = mremap(word, PAGE, 4 * PAGE, MREMAP_MAYMOVE);
    CHECK(word != MAP_FAILED);
    wait_for(word, changer(word, -1));
}

/* One thread writes through one mapping and reads through the other. */
static __attribute__((noinline)) long both(long *here, const long *there, long n) {
    long wrong = 0;
    for (long i = 0; i < n; i++) {
        *here = i;
        __asm__ volatile("" ::: "memory");
        wrong += *there != i;
    }
    return wrong;
}

static void two_names(void) {
    long own[2] = {0};
    CHECK(both(&own[0], &own[1], HOT) == HOT - 1);
    int fd = memfd_create("names", 0);
    CHECK(fd >= 0 && ftruncate(fd, PAGE) == 0);
    long *here = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    const long *there = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(here != MAP_FAILED && there != MAP_FAILED);
    CHECK(both(here, there, HOT) == 0);
}

static void *change(void *word) {
    usleep(20000);
    *(volatile long *)word = 7;
    return NULL;
}

static void thread(void) {
    long word = 0;
    pthread_t other;
    CHECK(pthread_create(&other, NULL, change, &word) == 0);
    poll_word(&word, 0, INT64_MAX);
    CHECK(pthread_join(other, NULL) == 0);
}

/* A read that the kernel completes while the program looks at the buffer. */
static void kernel(void) {
    aio_context_t context = 0;
    int ends[2];
    if (syscall(SYS_io_setup, 1, &context) != 0) return; /* not every system has it */
    CHECK(pipe(ends) == 0);
    struct iocb block = {.aio_lio_opcode = IOCB_CMD_POLL, .aio_fildes = (uint32_t)ends[0], .aio_buf = 1 /* POLLIN */};
    struct iocb *list[] = {&block};
    if (syscall(SYS_io_submit, context, 1, list) != 1) return;
    /* The tail of the ring that the kernel keeps in this process's memory. */
    const unsigned *ring = (const unsigned *)context;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        usleep(20000);
        _exit(write(ends[1], "x", 1) == 1 ? 0 : 1);
    }
    const long *head_and_tail = (const long *)(ring + 2);
    long before = *(volatile const long *)head_and_tail;
    if (before == 0) poll_word(head_and_tail, before, INT64_MAX);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {
        {"anonymous", anonymous}, {"mapped before", anonymous_before}, {"protected first", protected_first},
        {"segment", segment}, {"file, mapping", file_written_by_mapping}, {"file, call", file_written_by_call},
        {"memory file", memory_file_read_only}, {"moved", moved}, {"two names", two_names}, {"thread", thread}, {"kernel", kernel},
    };
    scratch = argc > 1 ? argv[1] : "shared_memory.tmp";
    alarm(100);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fflush(stdout);
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(20);
            heat();
            cases[i].run();
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        printf("%s: %d\n", cases[i].name, status);
    }
    unlink(scratch);
    return 0;
}
