/* alloca and variable-length arrays in loops and recursion. Frames change their size and keep
 * their alignment.
 *
 * Hard for a translator: the distance between the stack pointer and a variable is not constant,
 * so an access cannot be told from a neighbour by its displacement. */
#include <alloca.h>
#include "guest.h"

struct cell { struct cell *next; long value; };

__attribute__((noinline)) static long list_on_stack(int n) {
    struct cell *head = NULL;
    for (int i = 0; i < n; i++) {
        struct cell *c = alloca(sizeof *c + (size_t)(i % 5) * 16);
        CHECK((uintptr_t)c % 16 == 0);
        c->next = head;
        c->value = i;
        head = c;
    }
    long sum = 0;
    for (struct cell *c = head; c; c = c->next) sum = sum * 3 + c->value;
    return sum;
}

__attribute__((noinline)) static uint64_t triangle(int n) {
    uint64_t row[n + 1];
    for (int i = 0; i <= n; i++) row[i] = i == 0 ? 1 : 0;
    for (int r = 1; r <= n; r++) {
        uint64_t next[r + 1];
        next[0] = 1;
        for (int i = 1; i <= r; i++) next[i] = row[i - 1] + row[i];
        memcpy(row, next, sizeof next);
    }
    uint64_t sum = 1;
    for (int i = 0; i <= n; i++) sum = mix(sum, row[i]);
    return sum;
}

__attribute__((noinline)) static int recursive(int n) {
    char buffer[n * 7 + 1];
    memset(buffer, n, sizeof buffer);
    return n == 0 ? 0 : recursive(n - 1) + buffer[n * 7];
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 40);
    printf("list %ld\n", list_on_stack(100));
    for (int i = 1; i <= n; i += 13) printf("triangle %d %016lx\n", i, triangle(i));
    printf("recursive %d\n", recursive(100));
    return 0;
}
