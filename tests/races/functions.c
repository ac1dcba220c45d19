/* Recursive functions: Fibonacci's numbers, the towers of Hanoi, and a binary tree that is built and summed.
 * Several executions of each, with the calls within them, fit into one trace; others go deeper. */
#include <stdio.h>
#include <stdlib.h>

static unsigned long fib(unsigned n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }

static unsigned long moves;
static void hanoi(int n, int from, int to, int via) {
    if (n == 0) return;
    hanoi(n - 1, from, via, to);
    moves = moves * 31 + (unsigned long)(from * 3 + to);
    hanoi(n - 1, via, to, from);
}

struct node {
    struct node *left, *right;
    long value;
};

static struct node *build(int depth, long *next) {
    if (depth <= 0) return NULL;
    struct node *node = malloc(sizeof *node);
    if (!node) abort();
    node->left = build(depth - 1 - (*next % 7 == 3), next);
    node->value = (*next)++ * 2654435761 % 1000;
    node->right = build(depth - 1, next);
    return node;
}

static long sum(const struct node *node) {
    if (!node) return 0;
    return sum(node->left) + node->value - sum(node->right) / 3;
}

int main(void) {
    long next = 1, total = 0;
    struct node *tree = build(13, &next);
    for (int n = 0; n < 22; n++) {
        hanoi(n % 12, 0, 1, 2);
        total += sum(tree);
        printf("%d: %lu, %lu, %ld\n", n, fib(n), moves, total);
    }
    return 0;
}
