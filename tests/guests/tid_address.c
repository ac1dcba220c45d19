/* The word that the kernel clears when a thread ends: its address as prctl reports it, in the
 * first thread, other threads and children; set to the same address again, and changed.
 *
 * Hard for a translator: the kernel clears the word when the host's thread ends, and the host
 * still needs its stack then. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "guest.h"

static int other;

static int *get(void) {
    int *word = NULL;
    CHECK(prctl(PR_GET_TID_ADDRESS, &word, 0, 0, 0) == 0);
    return word;
}

static void show(const char *who) {
    int *word = get();
    printf("%s: own thread number %d\n", who, word != NULL && *word == gettid());
    fflush(stdout);
}

static void *thread(void *unused) {
    show("thread");
    int *word = get();
    CHECK(syscall(SYS_set_tid_address, word) == gettid() && get() == word);
    return unused;
}

/* A thread that moves its word to `other`; `other` is cleared at its end. */
static void *changing(void *word) {
    CHECK(syscall(SYS_set_tid_address, &other) == gettid() && get() == &other);
    other = gettid();
    *(int **)word = NULL;
    return NULL;
}

int main(void) {
    CHECK(syscall(SYS_set_tid_address, get()) == getpid());
    printf("nowhere: %d\n", prctl(PR_GET_TID_ADDRESS, 16, 0, 0, 0) == -1 ? errno : 0);
    for (int i = 0; i < 20; i++) {
        pthread_t made;
        CHECK(pthread_create(&made, NULL, thread, NULL) == 0 && pthread_join(made, NULL) == 0);
    }
    pid_t child = fork();
    if (child == 0) {
        show("child");
        _exit(get() == NULL);
    }
    int status, *word = &status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    pthread_t made;
    CHECK(pthread_create(&made, NULL, changing, &word) == 0 && pthread_detach(made) == 0);
    while (__atomic_load_n(&word, __ATOMIC_SEQ_CST) != NULL) usleep(100);
    while (__atomic_load_n(&other, __ATOMIC_SEQ_CST) != 0) usleep(100);
    printf("cleared\n");
    return 0;
}
