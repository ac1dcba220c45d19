/* A hash table with chains and one with open addressing, a trie and a linked list that is
 * reversed and merged.
 *
 * Hard for a translator: loads depend on earlier loads, and stores may alias any of them. */
#include "guest.h"

struct node { struct node *next; uint64_t key, value; };
enum { BUCKETS = 64, SLOTS = 1024 };
static struct node *buckets[BUCKETS];
static struct { uint64_t key, value; } slots[SLOTS];
struct trie { struct trie *children[4]; unsigned count; };

static uint64_t hash(uint64_t k) {
    k ^= k >> 33;
    k *= 0xff51afd7ed558ccd;
    k ^= k >> 33;
    return k * 0xc4ceb9fe1a85ec53 ^ k >> 29;
}

static uint64_t *chained(uint64_t key) {
    struct node **p = &buckets[hash(key) % BUCKETS];
    while (*p && (*p)->key != key) p = &(*p)->next;
    if (!*p) {
        *p = calloc(1, sizeof **p);
        (*p)->key = key;
    }
    return &(*p)->value;
}

static uint64_t *open_addressed(uint64_t key) {
    uint64_t i = hash(key) & (SLOTS - 1);
    while (slots[i].key && slots[i].key != key) i = (i + 1) & (SLOTS - 1);
    slots[i].key = key;
    return &slots[i].value;
}

static struct node *reverse(struct node *list) {
    struct node *done = NULL;
    while (list) {
        struct node *next = list->next;
        list->next = done;
        done = list;
        list = next;
    }
    return done;
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 2000);
    uint64_t seed = 3, sum = 1;
    struct trie *root = calloc(1, sizeof *root);
    for (long i = 0; i < n; i++) {
        uint64_t key = next_random(&seed) % 700 + 1;
        *chained(key) += (uint64_t)i;
        *open_addressed(key) += (uint64_t)i;
        struct trie *t = root;
        for (uint64_t k = key; k; k >>= 2) {
            struct trie **child = &t->children[k & 3];
            if (!*child) *child = calloc(1, sizeof **child);
            t = *child;
        }
        t->count++;
    }
    uint64_t total = 0;
    for (uint64_t key = 1; key <= 700; key++) {
        CHECK(*chained(key) == *open_addressed(key));
        total += *chained(key);
        sum = mix(sum, *chained(key));
    }
    CHECK(total == (uint64_t)(n * (n - 1) / 2));
    struct node *list = reverse(buckets[5]);
    int length = 0;
    for (struct node *p = list; p; p = p->next) length++;
    list = reverse(list);
    CHECK(list == buckets[5]);
    printf("sum %016lx, bucket 5 has %d\n", sum, length);
    for (int b = 0; b < BUCKETS; b++)
        for (struct node *p = buckets[b], *next; p; p = next) {
            next = p->next;
            free(p);
        }
    return 0;
}
