/* Variadic functions: integers and doubles beyond the registers, va_copy, forwarding to
 * vsnprintf, structures by value.
 *
 * Hard for a translator: al tells the callee of vector arguments, and a prologue saves registers
 * that nobody reads. */
#include <stdarg.h>
#include "guest.h"

struct pair { long a; double b; };
struct large { long words[5]; };

__attribute__((noinline)) static double mixed(const char *types, ...) {
    va_list list, again;
    double total = 0;
    va_start(list, types);
    va_copy(again, list);
    for (const char *t = types; *t; t++) switch (*t) {
            case 'i': total += va_arg(list, int); break;
            case 'l': total += (double)va_arg(list, long); break;
            case 'd': total += va_arg(list, double); break;
            case 'L': total += (double)va_arg(list, long double); break;
            case 'p': { struct pair p = va_arg(list, struct pair); total += (double)p.a + p.b; break; }
            case 's': { struct large s = va_arg(list, struct large); total += (double)(s.words[0] + s.words[4]); break; }
        }
    if (types[0] == 'i') total += va_arg(again, int);
    va_end(again);
    va_end(list);
    return total;
}

__attribute__((noinline, format(printf, 3, 4))) static int format(char *to, size_t size, const char *text, ...) {
    va_list list;
    va_start(list, text);
    int n = vsnprintf(to, size, text, list);
    va_end(list);
    return n;
}

__attribute__((noinline)) static long sum_until_zero(long first, ...) {
    va_list list;
    va_start(list, first);
    long total = first, next;
    while ((next = va_arg(list, long)) != 0) total = total * 3 + next;
    va_end(list);
    return total;
}

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 200);
    struct pair p = {10, 0.5};
    struct large s = {{100, 0, 0, 0, 23}};
    printf("%g\n", mixed("iiiiiiii", 1, 2, 3, 4, 5, 6, 7, 8));
    printf("%g\n", mixed("dddddddddd", 1., 2., 3., 4., 5., 6., 7., 8., 9., 10.));
    printf("%g\n", mixed("idlLpsidlp", 1, 2.5, 3L, 4.25L, p, s, 5, 6.125, 7L, p));
    printf("%g\n", mixed("ppppppp", p, p, p, p, p, p, p));
    printf("%ld\n", sum_until_zero(1L, 2L, 3L, 4L, 5L, 6L, 7L, 8L, 9L, 0L));
    char text[200];
    uint64_t sum = 1;
    for (long i = 0; i < n; i++) {
        int length = format(text, sizeof text, "%ld|%-8s|%08.3f|%x|%c|%Lg|%5d%%|%zu", i, "ab", (double)i / 7, (unsigned)i * 77, 'a' + (int)(i % 26),
                            (long double)i / 3, (int)-i, sizeof text);
        sum = mix_bytes(sum, text, (size_t)length);
    }
    printf("%s\n%016lx\n", text, sum);
    return 0;
}
