/* SSE and x87 without a library: their state at entry, arithmetic in a loop, MXCSR.
 *
 * Hard for a translator: its own code must not leave anything in the guest's vector and x87
 * state. */
#include "asm.h"
define_print_hex
        .globl  _start
_start:
        sub     rsp, 64
        stmxcsr [rsp]
        fnstcw  [rsp + 4]
        mov     edi, [rsp]
        movzx   eax, word ptr [rsp + 4]
        shl     rax, 32
        or      rdi, rax
        call    print_hex
        movq    rdi, xmm15              /* zero at entry */
        call    print_hex
        mov     ecx, 300
        movupd  xmm0, start[rip]
        movupd  xmm1, factor[rip]
        pxor    xmm2, xmm2
        fldpi
1:      mulpd   xmm0, xmm1
        cvtsi2sd xmm3, ecx
        addsd   xmm0, xmm3
        paddq   xmm2, xmm0
        pshufd  xmm2, xmm2, 0x93
        ucomisd xmm0, xmm3
        ja      2f
        shufpd  xmm0, xmm0, 1
2:      fadd    st, st(0)
        fld1
        fsubp   st(1), st
        fsqrt
        loop    1b
        fstp    qword ptr [rsp]
        mov     rdi, [rsp]
        call    print_hex
        movq    rdi, xmm2
        call    print_hex
        movhlps xmm0, xmm0
        movq    rdi, xmm0
        call    print_hex
        mov     dword ptr [rsp], 0x7f80 /* round to zero */
        ldmxcsr [rsp]
        movsd   xmm4, start[rip]
        divsd   xmm4, factor[rip]
        stmxcsr [rsp]
        mov     edi, [rsp]
        call    print_hex
        movq    rdi, xmm4
        call    print_hex
        xor     edi, edi
        exit_process
        .section .rodata
        .balign 16
start:  .double 1.5, -2.25
factor: .double 0.7, 1.01
