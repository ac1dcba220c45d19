/* Flags as data: the flags of each operation are read by pushfq, over operands from a table, and
 * folded into one number per operation.
 *
 * Hard for a translator: flags that are computed late must have all their bits, undefined ones
 * too. */
#include "asm.h"
        .set    COUNT, 10
define_print_hex

.macro fold_flags
        pushfq
        pop     rdx
        and     edx, 0x8d5
        rol     rbp, 7
        xor     rbp, rdx
        add     rbp, rax
.endm

/* op rax, rcx for all pairs; prints what it folds to */
.macro binary op:vararg
        xor     ebp, ebp
        xor     r12d, r12d
9:      xor     r13d, r13d
8:      mov     rax, operands[r12*8]
        mov     rcx, operands[r13*8]
        \op
        fold_flags
        inc     r13d
        cmp     r13d, COUNT
        jb      8b
        inc     r12d
        cmp     r12d, COUNT
        jb      9b
        mov     rdi, rbp
        call    print_hex
.endm

        .globl  _start
_start:
        binary  add rax, rcx
        binary  sub al, cl
        binary  cmp ax, cx
        binary  adc eax, ecx
        binary  sbb rax, rcx
        binary  and ah, ch
        binary  xor eax, ecx
        binary  test rax, rcx
        binary  neg rcx
        binary  inc al
        binary  dec ax
        binary  imul rax, rcx
        binary  shl rax, cl
        binary  sar eax, cl
        binary  ror ax, cl
        binary  rcl rax, 1
        binary  shld rax, rcx, 5
        binary  bt rax, rcx
        binary  bsf rax, rcx
        binary  cmpxchg rcx, rax
        binary  xadd al, ch
        xor     edi, edi
        exit_process

        .section .rodata
        .balign 8
operands:
        .quad   0, 1, -1, 0x7f, 0x80, 0x7fffffff, 0x80000000, 0x7fffffffffffffff, 0x8000000000000000, 0x123456789abcdef0
