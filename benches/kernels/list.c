/* Linked lists reversed, merged and sorted in place: dependent loads and pointer stores. */
#include "kernel.h"

enum { NODES = 4096 };
typedef struct node {
    struct node *next;
    uint32_t value;
} node;
static node nodes[NODES];

static node *reverse(node *list) {
    node *done = NULL;
    while (list) {
        node *next = list->next;
        list->next = done;
        done = list;
        list = next;
    }
    return done;
}

static node *merge(node *a, node *b) {
    node head, *tail = &head;
    while (a && b) {
        node **least = a->value <= b->value ? &a : &b;
        tail->next = *least;
        tail = *least;
        *least = (*least)->next;
    }
    tail->next = a ? a : b;
    return head.next;
}

static node *sort(node *list) {
    if (!list || !list->next) return list;
    node *slow = list, *fast = list->next;
    while (fast && fast->next) {
        slow = slow->next;
        fast = fast->next->next;
    }
    node *half = slow->next;
    slow->next = NULL;
    return merge(sort(list), sort(half));
}

int main(int argc, char **argv) {
    long n = rounds(argc, argv, 1500);
    uint64_t sum = 1;
    uint32_t seed = 521288629u;
    for (long r = 0; r < n; r++) {
        for (int i = 0; i < NODES; i++) {
            /* 1365 is odd and NODES a power of two, so the list has every node once, in a scattered
             * order. */
            node *at = &nodes[i * 1365 % NODES];
            at->next = i + 1 < NODES ? &nodes[(i + 1) * 1365 % NODES] : NULL;
            at->value = next_random(&seed);
        }
        node *list = nodes;
        for (int i = 0; i < 6; i++) list = reverse(list);
        list = reverse(sort(list));
        uint64_t total = 0;
        for (node *at = list; at; at = at->next) total = total * 3 + at->value;
        sum = mix(sum, total);
    }
    return report("list", n, sum);
}
