// Many threads: the first argument is the number of threads at once, the second the number of
// threads one after the other.
//
// Hard for a translator: the memory that it needs per thread must not grow with the number of
// threads that have ended.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static long total;
static pthread_barrier_t barrier;
static __thread long mine;

static void *together(void *argument) {
    pthread_barrier_wait(&barrier);
    for (long i = 0; i < 1000; i++) mine += (long)argument ^ i;
    __atomic_fetch_add(&total, mine, __ATOMIC_SEQ_CST);
    pthread_barrier_wait(&barrier);
    return argument;
}

static void *short_lived(void *argument) {
    mine += (long)argument;
    return (void *)mine;
}

static long resident_pages(void) {
    FILE *file = fopen("/proc/self/statm", "r");
    long size, resident;
    if (file == NULL || fscanf(file, "%ld %ld", &size, &resident) != 2) abort();
    fclose(file);
    return resident;
}

int main(int count, char **arguments) {
    alarm(240);
    int at_once = count > 1 ? atoi(arguments[1]) : 64, creations = count > 2 ? atoi(arguments[2]) : 1000;
    pthread_t *threads = calloc(at_once, sizeof *threads);
    pthread_barrier_init(&barrier, NULL, at_once);
    for (long i = 0; i < at_once; i++)
        if (pthread_create(&threads[i], NULL, together, (void *)i) != 0) return 1;
    long joined = 0;
    for (int i = 0; i < at_once; i++) {
        void *result;
        pthread_join(threads[i], &result);
        joined += (long)result;
    }
    printf("%d at once: %ld %ld\n", at_once, joined, total);

    long sum = 0, early = 0;
    for (long i = 0; i < creations; i++) {
        pthread_t thread;
        void *result;
        if (pthread_create(&thread, NULL, short_lived, (void *)i) != 0) return 1;
        pthread_join(thread, &result);
        sum += (long)result;
        if (i == creations / 4) early = resident_pages();
    }
    long late = resident_pages();
    printf("%d one by one: %ld, %s\n", creations, sum, late - early < 2000 ? "no growth" : "growth");
    return 0;
}
