/* Calls through tables of functions: a loop over objects of changing classes, and a sort with a
 * comparison callback. */
#include "kernel.h"

typedef struct object object;
typedef struct {
    uint64_t (*area)(const object *);
    void (*grow)(object *, uint32_t);
} methods;
struct object {
    const methods *class;
    uint32_t width, height;
};

static uint64_t area_square(const object *o) { return (uint64_t)o->width * o->width; }
static uint64_t area_box(const object *o) { return (uint64_t)o->width * o->height; }
static uint64_t area_triangle(const object *o) { return (uint64_t)o->width * o->height / 2; }
static uint64_t area_disc(const object *o) { return (uint64_t)o->width * o->width * 355 / 113; }
static void grow_width(object *o, uint32_t by) { o->width = (o->width + by) & 1023; }
static void grow_both(object *o, uint32_t by) {
    o->width = (o->width ^ by) & 1023;
    o->height = (o->height + by) & 1023;
}

static const methods classes[] = {
    {area_square, grow_width},
    {area_box, grow_both},
    {area_triangle, grow_both},
    {area_disc, grow_width}};

enum { OBJECTS = 1000 };
static object objects[OBJECTS];

static int by_area(const object *a, const object *b) {
    uint64_t x = a->class->area(a), y = b->class->area(b);
    return x < y ? -1 : x > y;
}

static void insertion(object *v, int count, int (*compare)(const object *, const object *)) {
    for (int i = 1; i < count; i++) {
        object o = v[i];
        int j = i;
        for (; j > 0 && compare(&v[j - 1], &o) > 0; j--) v[j] = v[j - 1];
        v[j] = o;
    }
}

int main(int argc, char **argv) {
    long n = rounds(argc, argv, 300);
    uint32_t seed = 123456789u;
    for (int i = 0; i < OBJECTS; i++)
        objects[i] = (object){&classes[next_random(&seed) % 4], i, 2 * i};
    uint64_t sum = 1;
    for (long r = 0; r < n; r++) {
        uint64_t total = 0;
        for (int k = 0; k < 300; k++)
            for (int i = 0; i < OBJECTS; i++) {
                object *o = &objects[i];
                o->class->grow(o, (uint32_t)k);
                total += o->class->area(o);
            }
        insertion(objects + r % (OBJECTS - 100), 100, by_area);
        sum = mix(sum, total);
    }
    return report("virtual", n, sum);
}
