/* Open addressing with insertions, look-ups and deletions: multiplications, masks, probes of
 * varying length. */
#include "kernel.h"

enum { BITS = 14, SLOTS = 1 << BITS, KEYS = SLOTS * 3 / 4 };
typedef struct {
    uint32_t key, count;
} slot;
static slot table[SLOTS];

static slot *find(uint32_t key) {
    uint32_t at = (key * 2654435769u) >> (32 - BITS);
    while (table[at].key && table[at].key != key) at = (at + 1) & (SLOTS - 1);
    return &table[at];
}

static void erase(uint32_t key) {
    uint32_t at = (uint32_t)(find(key) - table);
    if (!table[at].key) return;
    for (uint32_t next = at;;) {
        next = (next + 1) & (SLOTS - 1);
        if (!table[next].key) break;
        uint32_t home = (table[next].key * 2654435769u) >> (32 - BITS);
        if (((next - home) & (SLOTS - 1)) < ((next - at) & (SLOTS - 1))) continue;
        table[at] = table[next];
        at = next;
    }
    table[at].key = 0;
}

int main(int argc, char **argv) {
    long n = rounds(argc, argv, 1500);
    uint64_t sum = 1;
    uint32_t seed = 88172645u;
    for (long r = 0; r < n; r++) {
        memset(table, 0, sizeof table);
        for (int i = 0; i < 4 * KEYS; i++) {
            uint32_t key = next_random(&seed) % KEYS + 1;
            slot *s = find(key);
            if (!s->key) *s = (slot){key, 0};
            s->count++;
            if (i % 4 == 3) erase(next_random(&seed) % KEYS + 1);
        }
        for (int i = 0; i < SLOTS; i += 61)
            sum = mix(sum, ((uint64_t)table[i].key << 32) | table[i].count);
    }
    return report("hashtable", n, sum);
}
