/* A tokeniser (switch over characters) and a recursive-descent evaluator of arithmetic over a
 * generated text. */
#include "kernel.h"

enum { SIZE = 1 << 16 };
static char text[SIZE];
static const char *at;
static char kind;
static uint64_t value;

static void next(void) {
    for (;;) {
        switch (*at) {
        case ' ': case '\n': at++; continue;
        case '0': case '1': case '2': case '3': case '4':
        case '5': case '6': case '7': case '8': case '9':
            for (value = 0; *at >= '0' && *at <= '9'; at++)
                value = value * 10 + (uint64_t)(*at - '0');
            kind = 'n';
            return;
        case 'a': case 'b': case 'c': case 'd':
            value = (uint64_t)(*at++ - 'a') * 1000003;
            kind = 'n';
            return;
        case '#':
            while (*at && *at != '\n') at++;
            continue;
        case '+': case '-': case '*': case '/': case '(': case ')': case ';': kind = *at++; return;
        case 0: kind = 0; return;
        default: at++; kind = '?'; return;
        }
    }
}

static uint64_t sum_of(void);

static uint64_t primary(void) {
    uint64_t result = 0;
    if (kind == 'n') {
        result = value;
        next();
    } else if (kind == '(') {
        next();
        result = sum_of();
        if (kind == ')') next();
    } else if (kind == '-') {
        next();
        result = -primary();
    } else if (kind) {
        next();
    }
    return result;
}

static uint64_t product(void) {
    uint64_t left = primary();
    while (kind == '*' || kind == '/') {
        char operation = kind;
        next();
        uint64_t right = primary();
        left = operation == '*' ? left * right : left / (right | 1);
    }
    return left;
}

static uint64_t sum_of(void) {
    uint64_t left = product();
    while (kind == '+' || kind == '-') {
        char operation = kind;
        next();
        uint64_t right = product();
        left = operation == '+' ? left + right : left - right;
    }
    return left;
}

static char *generate(char *to, uint32_t *seed, int depth) {
    uint32_t draw = next_random(seed) >> 8;
    if (depth == 0 || draw % 8 < 2) {
        if (draw % 3) return to + sprintf(to, "%u ", draw % 5000);
        *to = "abcd"[draw % 4];
        return to + 1;
    }
    if (draw % 8 == 7) *to++ = '(';
    to = generate(to, seed, depth - 1);
    *to++ = "+-*/"[draw / 8 % 4];
    to = generate(to, seed, depth - 1);
    if (draw % 8 == 7) *to++ = ')';
    return to;
}

int main(int argc, char **argv) {
    long n = rounds(argc, argv, 2500);
    uint32_t seed = 987654321u;
    char *to = text;
    while (to < text + SIZE - 4096) {
        to = generate(to, &seed, 6);
        to += sprintf(to, ";%s\n", next_random(&seed) % 16 ? "" : " # a comment");
    }
    uint64_t sum = 1;
    for (long r = 0; r < n; r++) {
        at = text;
        for (next(); kind;) {
            sum = mix(sum, sum_of());
            if (kind == ';') next();
        }
    }
    return report("parser", n, sum);
}
