/* setjmp/longjmp: from depth, repeatedly, as an exception mechanism, with callee-saved registers
 * in use.
 *
 * Hard for a translator: longjmp skips returns, so calls and returns no longer match. */
#include <setjmp.h>
#include "guest.h"

static jmp_buf top;
static struct handler { jmp_buf buf; struct handler *outer; int value; } *current;

__attribute__((noinline)) static int dive(int depth, int value) {
    volatile char padding[64];
    padding[depth & 63] = (char)depth;
    if (depth == 0) longjmp(top, value);
    return dive(depth - 1, value) + padding[depth & 63];
}

__attribute__((noinline)) static void raise_value(int value) {
    struct handler *h = current;
    if (!h) _Exit(98);
    current = h->outer;
    h->value = value;
    longjmp(h->buf, 1);
}

__attribute__((noinline)) static int guarded(int depth, int limit) {
    struct handler h = {.outer = current};
    if (setjmp(h.buf) == 0) {
        current = &h;
        if (depth == limit) raise_value(limit * 3);
        int result = guarded(depth + 1, limit);
        current = h.outer;
        return result + 1;
    }
    if (h.value % 2 == 0) return h.value;
    raise_value(h.value - 1 + (h.value == 1));
    return -1;
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 300);
    volatile long caught = 0;
    volatile unsigned long sum = 1;
    for (volatile long i = 0; i < n; i++) {
        long a = i * 3, b = i * 5, c = i * 7, d = i * 11, e = i * 13;
        int value = setjmp(top);
        if (value == 0) dive((int)(i % 20), (int)i + 1);
        caught += value;
        sum = mix(sum, (unsigned long)(a ^ b ^ c ^ d ^ e));
        CHECK(value == i + 1);
    }
    printf("caught %ld, sum %016lx\n", caught, sum);
    for (int limit = 0; limit < 12; limit++) printf("%d ", guarded(0, limit));
    printf("\n");
    CHECK(current == NULL);
    int zero = setjmp(top);
    if (zero == 0) longjmp(top, 0); /* arrives as 1 */
    printf("longjmp(0) returns %d\n", zero);
    sigjmp_buf sig;
    switch (sigsetjmp(sig, 1)) {
        case 0: siglongjmp(sig, 5);
        case 5: printf("sigsetjmp ok\n"); break;
        default: return 1;
    }
    return 7;
}
