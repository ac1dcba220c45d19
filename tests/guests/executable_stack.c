/* A stack that is made executable while the program runs, as the dynamic linker does for a
 * library that needs it: from the named page down to the end of the stack, and nothing above.
 *
 * Hard for a translator: PROT_GROWSDOWN changes pages that the call does not name, and code then
 * lies among return addresses and variables. */
#define _GNU_SOURCE
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include "guest.h"

enum { PAGE = 4096 };

static sigjmp_buf escape;

static void on_fault(int signal) {
    (void)signal;
    siglongjmp(escape, 1);
}

/* Calls code in this frame or, with a depth, in a frame that many kilobytes further down. Returns
 * the code's result, or -1 if the code may not be executed. */
static __attribute__((noinline)) int call_code(int depth, int result) {
    volatile unsigned char room[1024];
    room[0] = (unsigned char)depth;
    if (depth > 0) {
        result = call_code(depth - 1, result);
        room[1] = 0;
        return result;
    }
    volatile unsigned char code[16] = {0xb8, (unsigned char)result, 0, 0, 0, 0xc3};
    int (*volatile function)(void) = (int (*)(void))code;
    return sigsetjmp(escape, 1) == 0 ? function() : -1;
}

static int protect(void *page, int flags) {
    return mprotect(page, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC | flags) == 0 ? 0 : errno;
}

int main(void) {
    struct sigaction action = {.sa_handler = on_fault};
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    volatile unsigned char here[3 * PAGE] = {0};
    char *page = (char *)((uintptr_t)here & -(uintptr_t)PAGE);
    printf("before: %d %d\n", call_code(0, 1), call_code(100, 2));
    char *other = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    printf("refused: %d %d %d %d\n", protect(other, PROT_GROWSDOWN) == EINVAL, protect(page, PROT_GROWSUP) == EINVAL,
           protect(page, PROT_GROWSDOWN | PROT_GROWSUP) == EINVAL, protect(page + 1, PROT_GROWSDOWN) == EINVAL);
    printf("still: %d %d\n", call_code(0, 3), call_code(100, 4));
    CHECK(protect(page, PROT_GROWSDOWN) == 0);
    for (int i = 0; i < 3; i++) printf("then: %d %d %d\n", call_code(0, 5 + i), call_code(100, 6 + i), call_code(2000, 7 + i));
    /* The stack's top, where the environment is, was above the page. */
    extern char **environ;
    int (*volatile function)(void) = (int (*)(void))environ[0];
    environ[0][0] = (char)0xc3;
    printf("above: %s\n", sigsetjmp(escape, 1) == 0 ? (function(), "executable") : "not executable");
    CHECK(mprotect(page, PAGE, PROT_READ | PROT_WRITE | PROT_GROWSDOWN) == 0);
    printf("after: %d %d\n", call_code(0, 8), call_code(100, 9));
    return 0;
}
