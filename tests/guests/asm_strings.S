/* String instructions on static buffers: copies, fills, searches, comparisons, both directions,
 * rep with count 0.
 *
 * Hard for a translator: registers and flags after each form, and the direction flag, which is
 * state. */
#include "asm.h"
define_print_hex
.macro checksum
        lea     rsi, buffer[rip]
        mov     ecx, 32
        xor     eax, eax
9:      rol     rax, 7
        xor     rax, [rsi]
        add     rsi, 8
        dec     ecx
        jnz     9b
        mov     rdi, rax
        call    print_hex
.endm
        .globl  _start
_start:
        lea     rdi, buffer[rip]
        mov     ecx, 256
        mov     al, 1
fill:   stosb
        imul    eax, eax, 13
        inc     eax
        loop    fill
        checksum
        lea     rsi, buffer[rip]
        lea     rdi, buffer[rip + 100]
        mov     ecx, 50
        rep movsb
        mov     ecx, 0
        rep movsq
        checksum
        /* backwards, overlapping */
        std
        lea     rsi, buffer[rip + 80]
        lea     rdi, buffer[rip + 84]
        mov     ecx, 10
        rep movsd
        lodsw
        stosw
        cld
        movzx   ebx, ax
        checksum
        mov     rdi, rbx
        call    print_hex
        lea     rdi, text[rip]
        mov     al, 'x'
        mov     ecx, 100
        repne scasb
        mov     ebx, ecx
        lea     rdi, text[rip]
        lea     rsi, text2[rip]
        mov     ecx, 20
        repe cmpsb
        setb    bh
        pushfq
        pop     rdi
        shl     rbx, 32
        or      rdi, rbx
        or      rdi, rcx
        call    print_hex
        lea     rdi, buffer[rip + 3]
        mov     rax, 0x1122334455667788
        mov     ecx, 7
        rep stosq
        xor     ecx, ecx
        rep stosb
        repe cmpsb
        checksum
        xor     edi, edi
        exit_process
        .data
text:   .ascii  "find the x in this text, if you can"
text2:  .ascii  "find the y in this text, if you can"
        .bss
        .balign 8
buffer: .skip   512
