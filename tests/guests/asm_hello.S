/* The smallest guest: what the kernel gives at entry, a line of text, an exit status.
 *
 * Hard for a translator: it must build the initial stack and registers itself, as the kernel
 * does. */
#include "asm.h"
define_print_hex
        .globl  _start
_start:
        pushfq
        pop     rbp
        /* All general registers but rsp are zero at entry. */
        or      rax, rbx
        or      rax, rcx
        or      rax, rdx
        or      rax, rsi
        or      rax, rdi
        or      rax, r8
        or      rax, r9
        or      rax, r10
        or      rax, r11
        or      rax, r12
        or      rax, r13
        or      rax, r14
        or      rax, r15
        mov     rbx, rax
        mov     r12, rsp
        and     r12, 15
        mov     r13, [rsp]
        lea     rsi, text[rip]
        mov     edx, offset text_end - text
        write_stdout
        mov     rdi, rbx
        call    print_hex
        mov     rdi, rbp
        call    print_hex
        mov     rdi, r12
        call    print_hex
        mov     rdi, r13
        call    print_hex
        mov     edi, 42
        exit_process
        .section .rodata
text:   .ascii  "hello from the bare machine\n"
text_end:
