/* Addresses that are not mapped: munmap does nothing there, mprotect fails, and mmap may use
 * them.
 *
 * Hard for a translator: mappings that it keeps in the same address space must not be visible to
 * the program. */
#include <sys/mman.h>
#include <unistd.h>
#include "guest.h"

enum { MOST = 512 };
struct range { unsigned long start, end; };
static struct range maps[MOST];

static int read_maps(void) {
    FILE *file = fopen("/proc/self/maps", "r");
    CHECK(file);
    char line[8192];
    int count = 0;
    while (fgets(line, sizeof line, file)) {
        CHECK(count < MOST);
        CHECK(sscanf(line, "%lx-%lx", &maps[count].start, &maps[count].end) == 2);
        count += maps[count].start >> 47 == 0;
    }
    fclose(file);
    return count;
}

static int is_listed(void *address) {
    int count = read_maps();
    for (int i = 0; i < count; i++) {
        if (maps[i].start <= (unsigned long)address && (unsigned long)address < maps[i].end) return 1;
    }
    return 0;
}

int main(void) {
    static int in_data = 1;
    int *in_heap = malloc(sizeof *in_heap);
    int on_stack = 2;
    *in_heap = 3;
    CHECK(is_listed(&in_data) && is_listed(in_heap) && is_listed(&on_stack) && is_listed((void *)read_maps));
    void *page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED && is_listed(page));
    CHECK(munmap(page, 4096) == 0 && !is_listed(page));

    int count = read_maps();
    long hints = 0, unmapped = 0, refused = 0;
    for (int i = 1; i < count; i++) {
        unsigned long start = maps[i - 1].end, end = maps[i].start;
        /* Memory that grows downwards may need the room below it. */
        if (end - start > (64UL << 20)) end -= 32UL << 20;
        if (end <= start) continue;
        /* Anonymous memory that grows upwards, too. */
        if (end - start > (64UL << 20)) start += 32UL << 20;
        unsigned long step = (end - start) / 8 & ~4095UL;
        for (int k = 0; k < 8 && step; k++) {
            void *hint = (void *)(start + k * step);
            char *got = mmap(hint, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            CHECK(got != MAP_FAILED && *got == 0);
            *got = 1;
            CHECK(munmap(got, 4096) == 0);
            hints++;
        }
        refused += mprotect((void *)start, end - start, PROT_NONE) == -1;
        CHECK(madvise((void *)start, end - start, MADV_DONTNEED) == -1);
        CHECK(munmap((void *)start, end - start) == 0);
        unmapped++;
    }
    CHECK(hints > 0 && refused == unmapped);
    printf("%d %d %d\n", in_data, on_stack, *in_heap);
    return 0;
}
