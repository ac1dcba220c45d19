/* In the manner of Dhrystone: records, strings, small functions, enumerations, arrays of two
 * dimensions. */
#include "kernel.h"

typedef enum { FIRST, SECOND, THIRD, FOURTH, FIFTH } kind;
typedef struct record {
    struct record *next;
    kind discriminator, choice;
    int number;
    char text[31];
} record;

static record here, there;
static int global, flag, one[50], two[50][50];
static char c1, c2;

static kind compare_characters(char a, char b) {
    char copy = a, other = copy;
    if (other != b) return FIRST;
    c1 = copy;
    return SECOND;
}

static int compare_strings(const char *a, const char *b) {
    int i = 2;
    char c = 0;
    while (i <= 2)
        if (compare_characters(a[i], b[i + 1]) == FIRST) {
            c = 'A';
            i++;
        }
    if (c >= 'W' && c < 'Z') i = 7;
    if (c == 'R') return 1;
    if (strcmp(a, b) > 0) {
        global = i + 7;
        return 1;
    }
    return 0;
}

static kind choose(kind given) {
    kind result = given == THIRD ? given : FOURTH;
    switch (given) {
    case FIRST: result = FIRST; break;
    case SECOND: result = global > 100 ? FIRST : FOURTH; break;
    case THIRD: result = SECOND; break;
    case FOURTH: break;
    case FIFTH: result = THIRD; break;
    }
    return result;
}

static void seven(int a, int b, int *sum) { *sum = b + a + 2; }

static void arrays(int single[50], int twice[50][50], int a, int b) {
    int at = a + 5;
    single[at] = b;
    single[at + 1] = single[at];
    single[at + 30] = at;
    for (int i = at; i <= at + 1; i++) twice[at][i] = at;
    twice[at][at - 1]++;
    twice[at + 20][at] = single[at];
    global = 5;
}

static void records(record *from) {
    record *next = from->next;
    *next = here;
    from->number = 5;
    next->number = from->number;
    next->next = from->next;
    if (next->discriminator == FIRST) {
        next->number = 6;
        next->choice = choose(from->choice);
        next->next = here.next;
        seven(next->number, 10, &next->number);
    } else {
        *from = *next;
    }
}

int main(int argc, char **argv) {
    long n = rounds(argc, argv, 1500);
    uint64_t sum = 0;
    here.next = &there;
    here.discriminator = FIRST;
    here.choice = THIRD;
    here.number = 40;
    strcpy(here.text, "a string of thirty characters");
    for (long round = 0; round < n; round++) {
        for (int run = 1; run <= 4000; run++) {
            char text[31];
            int a = 2, b = 3, c = 0;
            strcpy(text,
                   run % 3 ? "a string of thirty characterz" : "a string of thirty character");
            flag = !compare_strings(here.text, text);
            while (a < b) {
                c = 5 * a - b;
                seven(a, b, &c);
                a++;
            }
            arrays(one, two, a, c);
            records(&here);
            for (char index = 'A'; index <= c2; index++)
                if (choose(compare_characters(index, 'C')) == FIRST) global += run;
            b = b * a;
            a = b / c;
            b = 7 * (b - c) - a;
            c2 = (char)('A' + (b + run) % 5);
            uint32_t all = (uint32_t)(a * 31 + b * 7 + c + global + flag);
            sum = mix(sum, (uint64_t)all + (uint64_t)here.number);
        }
    }
    sum = mix(sum, (uint64_t)one[8] + (uint64_t)two[8][7] + (uint64_t)c1);
    return report("mix", n, sum);
}
