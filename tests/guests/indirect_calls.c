/* Calls through tables of function pointers, callbacks, and pointers that change while they are
 * hot.
 *
 * Hard for a translator: a trace that assumes one target must be left, and not be kept for ever,
 * when the target changes. */
#include "guest.h"

typedef uint64_t (*operation)(uint64_t, uint64_t);
#define OP(name, expression) \
    __attribute__((noinline)) static uint64_t name(uint64_t a, uint64_t b) { return expression; }
OP(add, a + b)
OP(sub, a - b)
OP(mul, a * b)
OP(xor_, a ^ b)
OP(rotate, (a << (b & 63)) | (a >> (-b & 63)))
OP(choose, a & 1 ? b : a)
OP(mix_op, mix(a, b))
static operation const table[] = {add, sub, mul, xor_, rotate, choose, mix_op};

struct object {
    operation method;
    uint64_t state;
};

static int by_value(const void *a, const void *b) {
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

__attribute__((noinline)) static uint64_t fold(const uint64_t *v, int n, operation f, uint64_t init) {
    for (int i = 0; i < n; i++) init = f(init, v[i]);
    return init;
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 4000);
    uint64_t seed = 88172645463325252ULL, sum = 1;
    /* Polymorphic: a new target nearly each time. */
    for (long i = 0; i < n; i++) sum = table[next_random(&seed) % 7](sum, (uint64_t)i);
    printf("polymorphic %016lx\n", sum);
    /* Phases: each target is stable for a while, then changes. */
    for (int phase = 0; phase < 7; phase++) {
        operation volatile f = table[phase];
        for (long i = 0; i < n / 7; i++) sum = f(sum, (uint64_t)i + 3);
    }
    printf("phases %016lx\n", sum);
    struct object objects[16];
    for (int i = 0; i < 16; i++) objects[i] = (struct object){table[i % 7], (uint64_t)i};
    for (long i = 0; i < n; i++) {
        struct object *o = &objects[(i * 5) & 15];
        o->state = o->method(o->state, (uint64_t)i);
    }
    printf("objects %016lx\n", mix_bytes(1, (void *)&objects[3].state, 8));
    uint32_t values[300];
    for (int i = 0; i < 300; i++) values[i] = (uint32_t)next_random(&seed);
    qsort(values, 300, sizeof values[0], by_value);
    for (int i = 1; i < 300; i++) CHECK(values[i - 1] <= values[i]);
    printf("qsort %016lx\n", mix_bytes(1, values, sizeof values));
    uint64_t v[50];
    for (int i = 0; i < 50; i++) v[i] = next_random(&seed);
    for (int i = 0; i < 7; i++) printf("fold %d %016lx\n", i, fold(v, 50, table[i], 7));
    return 0;
}
