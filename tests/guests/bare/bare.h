/* A miniature C library for guests that are single-stepped: no glibc, no start-up code, three
 * system calls. A floating-point number is printed as its bits, unlike glibc's printf. Memory is
 * never freed. */
#ifndef BARE_H
#define BARE_H
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#define NULL_STREAM ((void *)0)
#define stdout NULL_STREAM
#define stderr NULL_STREAM
#define EXIT_SUCCESS 0
#define EXIT_FAILURE 1

/* The compiler may make calls of these from loops, but not from their own. */
#define BARE_FUNCTION __attribute__((used, noinline, optimize("no-tree-loop-distribute-patterns"), target("general-regs-only")))

int main();

static inline long bare_call(long number, long a, long b, long c) {
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "0"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return result;
}

__attribute__((noreturn)) static inline void _Exit(int status) {
    for (;;) bare_call(231, status, 0, 0);
}
#define exit _Exit
#define abort() _Exit(134)

static void bare_flush(void);
__attribute__((used)) static void bare_start(long *stack) {
    __builtin_cpu_init();
    int status = main((int)stack[0], (char **)(stack + 1));
    bare_flush();
    _Exit(status);
}
__asm__(".text\n.globl _start\n_start:\n\txor %ebp, %ebp\n\tmov %rsp, %rdi\n\tcall bare_start\n");

/* sigaction as the kernel has it; sets of signals are one word. */
struct bare_action {
    void *handler;
    unsigned long flags;
    void (*restorer)(void);
    unsigned long mask;
};
void bare_restorer(void);
__asm__(".text\nbare_restorer:\n\tmov $15, %eax\n\tsyscall\n");
int sigaction(int signal, const struct sigaction *restrict new, struct sigaction *restrict old) {
    const unsigned long sa_restorer = 0x04000000;
    struct bare_action action = {new->sa_sigaction, (unsigned)new->sa_flags | sa_restorer, bare_restorer, new->sa_mask.__val[0]};
    register long size __asm__("r10") = 8;
    long result;
    (void)old;
    __asm__ volatile("syscall" : "=a"(result) : "0"(13L), "D"((long)signal), "S"(&action), "d"(0L), "r"(size) : "rcx", "r11", "memory");
    return (int)result;
}

BARE_FUNCTION void *memcpy(void *restrict to, const void *restrict from, size_t n) {
    for (size_t i = 0; i < n; i++) ((char *)to)[i] = ((const char *)from)[i];
    return to;
}
BARE_FUNCTION void *memmove(void *to, const void *from, size_t n) {
    if ((uintptr_t)to <= (uintptr_t)from) return memcpy(to, from, n);
    while (n--) ((char *)to)[n] = ((const char *)from)[n];
    return to;
}
BARE_FUNCTION void *memset(void *to, int byte, size_t n) {
    for (size_t i = 0; i < n; i++) ((char *)to)[i] = (char)byte;
    return to;
}
BARE_FUNCTION int memcmp(const void *a, const void *b, size_t n) {
    const unsigned char *p = a, *q = b;
    for (; n; n--, p++, q++)
        if (*p != *q) return *p - *q;
    return 0;
}
BARE_FUNCTION size_t strlen(const char *s) {
    size_t n = 0;
    while (s[n]) n++;
    return n;
}
BARE_FUNCTION int strcmp(const char *a, const char *b) {
    while (*a && *a == *b) a++, b++;
    return (unsigned char)*a - (unsigned char)*b;
}
BARE_FUNCTION char *strcpy(char *to, const char *from) { return memcpy(to, from, strlen(from) + 1); }
BARE_FUNCTION long atol(const char *s) {
    long n = 0;
    while (*s >= '0' && *s <= '9') n = 10 * n + *s++ - '0';
    return n;
}
#define atoi(s) ((int)atol(s))

BARE_FUNCTION static void qsort(void *base, size_t n, size_t size, int (*compare)(const void *, const void *)) {
    for (size_t i = 1; i < n; i++)
        for (char *p = (char *)base + i * size; p > (char *)base && compare(p - size, p) > 0; p -= size)
            for (size_t k = 0; k < size; k++) {
                char byte = p[k];
                p[k] = p[(ptrdiff_t)k - (ptrdiff_t)size];
                p[(ptrdiff_t)k - (ptrdiff_t)size] = byte;
            }
}

static char bare_heap[1 << 20] __attribute__((aligned(64)));
static size_t bare_heap_used;
static inline void *malloc(size_t n) {
    size_t at = bare_heap_used;
    if (n > sizeof bare_heap - at) return NULL;
    bare_heap_used = at + ((n + 63) & ~(size_t)63);
    return bare_heap + at;
}
static inline void *calloc(size_t n, size_t size) { return malloc(n * size); }
static inline void free(void *p) { (void)p; }

static char bare_buffer[512];
static size_t bare_buffered;
BARE_FUNCTION static void bare_flush(void) {
    bare_call(1, 1, (long)bare_buffer, (long)bare_buffered);
    bare_buffered = 0;
}
static void bare_put(char c) {
    bare_buffer[bare_buffered++] = c;
    if (c == '\n' || bare_buffered == sizeof bare_buffer) bare_flush();
}
#define fflush(stream) bare_flush()

BARE_FUNCTION static void bare_number(uint64_t n, unsigned base, int width, char pad, int negative) {
    char digits[24];
    int count = 0;
    do {
        digits[count++] = "0123456789abcdef"[n % base];
        n /= base;
    } while (n);
    if (negative) digits[count++] = '-';
    for (int i = count; i < width; i++) bare_put(pad);
    while (count) bare_put(digits[--count]);
}

/* Understands %d %i %u %x %o %c %s %p %%, widths, l and z. A double comes as its bits. */
static int bare_vprintf(const char *format, va_list list) {
    for (const char *p = format; *p; p++) {
        if (*p != '%') {
            bare_put(*p);
            continue;
        }
        int width = 0, is_long = 0, is_extended = 0;
        char pad = ' ';
        for (p++; *p == '-' || *p == '0' || *p == '#' || *p == '+' || *p == ' '; p++) pad = *p == '0' ? '0' : pad;
        for (; *p >= '0' && *p <= '9'; p++) width = 10 * width + *p - '0';
        if (*p == '.')
            for (p++; *p >= '0' && *p <= '9';) p++;
        for (; *p == 'l' || *p == 'z' || *p == 'h' || *p == 'L'; p++) is_long |= *p == 'l' || *p == 'z', is_extended |= *p == 'L';
        switch (*p) {
            case 'd': case 'i': {
                int64_t v = is_long ? va_arg(list, long) : va_arg(list, int);
                bare_number(v < 0 ? -(uint64_t)v : (uint64_t)v, 10, width, pad, v < 0);
                break;
            }
            case 'u': bare_number(is_long ? va_arg(list, unsigned long) : va_arg(list, unsigned), 10, width, pad, 0); break;
            case 'x': case 'X': bare_number(is_long ? va_arg(list, unsigned long) : va_arg(list, unsigned), 16, width, pad, 0); break;
            case 'o': bare_number(is_long ? va_arg(list, unsigned long) : va_arg(list, unsigned), 8, width, pad, 0); break;
            case 'p': bare_number((uint64_t)va_arg(list, void *), 16, width, pad, 0); break;
            case 'c': bare_put((char)va_arg(list, int)); break;
            case 's': for (const char *s = va_arg(list, const char *); *s; s++) bare_put(*s); break;
            case '%': bare_put('%'); break;
            default: {
                uint64_t bits[2] = {0};
                if (is_extended) {
                    long double v = va_arg(list, long double);
                    memcpy(bits, &v, 10);
                } else {
                    double v = va_arg(list, double);
                    memcpy(bits, &v, 8);
                }
                bare_number(bits[1], 16, 0, '0', 0);
                bare_put('_');
                bare_number(bits[0], 16, 16, '0', 0);
            }
        }
    }
    return 0;
}
static int printf(const char *format, ...) {
    va_list list;
    va_start(list, format);
    int result = bare_vprintf(format, list);
    va_end(list);
    return result;
}
static int fprintf(void *stream, const char *format, ...) {
    (void)stream;
    va_list list;
    va_start(list, format);
    int result = bare_vprintf(format, list);
    va_end(list);
    return result;
}
static inline int puts(const char *s) { return printf("%s\n", s); }
static inline int putchar(int c) {
    bare_put((char)c);
    return c;
}
#endif
