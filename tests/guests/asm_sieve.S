/* A sieve of Eratosthenes in static storage: nested loops, byte stores, memory operands.
 *
 * A small program for the first traces: both loops get hot, and the inner one changes its
 * stride. */
#include "asm.h"
        .set    LIMIT, 2000
define_print_hex
        .globl  _start
_start:
        mov     ebx, 2                  /* candidate */
        xor     r12d, r12d              /* count */
        xor     r13d, r13d              /* checksum */
next:   cmp     byte ptr sieve[rbx], 0
        jne     composite
        inc     r12d
        rol     r13, 5
        xor     r13, rbx
        lea     rcx, [rbx + rbx]
mark:   cmp     rcx, LIMIT
        jae     composite
        mov     byte ptr sieve[rcx], 1
        add     rcx, rbx
        jmp     mark
composite:
        inc     rbx
        cmp     rbx, LIMIT
        jb      next
        mov     rdi, r12
        call    print_hex
        mov     rdi, r13
        call    print_hex
        xor     edi, edi
        exit_process
        .bss
sieve:  .skip   LIMIT
