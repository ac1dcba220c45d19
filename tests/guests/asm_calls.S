/* Recursion, calls through registers and memory, a jump table, tail jumps, push and pop in every
 * form.
 *
 * Hard for a translator: nothing here follows a compiler's calling convention, so none may be
 * assumed. */
#include "asm.h"
define_print_hex
        .globl  _start
_start:
        mov     edi, 12
        call    fibonacci
        mov     rdi, rax
        call    print_hex
        xor     ebx, ebx
        mov     ebp, 1
through:
        lea     rax, functions[rip]
        mov     ecx, ebx
        and     ecx, 3
        test    bl, 4
        jz      1f
        mov     rax, [rax + rcx*8]
        call    rax
        jmp     2f
1:      call    [rax + rcx*8]
2:      inc     ebx
        cmp     ebx, 200
        jb      through
        mov     rdi, rbp
        call    print_hex
        /* a jump table of 32-bit offsets */
        xor     ebx, ebx
dispatch:
        mov     ecx, ebx
        and     ecx, 3
        lea     rdx, table[rip]
        movsxd  rcx, dword ptr [rdx + rcx*4]
        add     rcx, rdx
        jmp     rcx
case0:  add     rbp, 3
case1:  imul    rbp, rbp, 17
        jmp     done
case2:  ror     rbp, 7
case3:  xor     rbp, rbx
done:   inc     ebx
        cmp     ebx, 150
        jne     dispatch
        mov     rdi, rbp
        call    print_hex
        mov     rax, rsp
        push    rsp
        pop     rcx
        sub     rcx, rax
        push    -5
        push    0x12345678
        push    qword ptr [rsp + 8]
        pop     qword ptr [rsp]
        pop     rdx
        pop     rdx
        lea     rdi, [rcx + rdx]
        call    print_hex
        mov     edi, 1
        exit_process

fibonacci:
        cmp     edi, 2
        jae     1f
        mov     eax, edi
        ret
1:      push    rbx
        push    rdi
        dec     edi
        call    fibonacci
        mov     ebx, eax
        pop     rdi
        sub     edi, 2
        call    fibonacci
        add     eax, ebx
        pop     rbx
        ret

f0:     lea     rbp, [rbp + rbp*2 + 1]
        ret
f1:     rol     rbp, 9
        jmp     f0
f2:     not     rbp
        ret
f3:     sub     rbp, rbx
        call    f2
        ret
        .data
        .balign 8
functions: .quad f0, f1, f2, f3
        .section .rodata
        .balign 4
table:  .long   case0 - table, case1 - table, case2 - table, case3 - table
