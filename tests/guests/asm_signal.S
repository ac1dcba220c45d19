/* Signals without a C library: its own restorer, a fault whose handler changes the frame,
 * rt_sigreturn by hand.
 *
 * Hard for a translator: the frame must have the kernel's layout, and the handler's changes of
 * rip, registers and flags must take effect. */
#include "asm.h"
        .set    SIGSEGV, 11
        .set    SIGUSR1, 10
        .set    SA_SIGINFO, 4
        .set    SA_RESTORER, 0x04000000
        /* offsets from the frame's ucontext: uc_mcontext begins at 40 */
        .set    UC_RAX, 40 + 13*8
        .set    UC_RIP, 40 + 16*8
        .set    UC_EFL, 40 + 17*8
define_print_hex
        .globl  _start
_start:
        mov     edi, SIGSEGV
        lea     rsi, on_segv[rip]
        call    install
        mov     edi, SIGUSR1
        lea     rsi, on_usr1[rip]
        call    install
        mov     r12d, 20
        xor     ebx, ebx
again:  mov     eax, 77
        cmp     eax, r12d
faulting:
        mov     rcx, [r12 + 0x100]      /* nothing is mapped there */
resume: adc     rbx, rax                /* the handler set carry and rax */
        dec     r12d
        jnz     again
        mov     rdi, rbx
        call    print_hex
        mov     eax, SYS_getpid
        syscall
        mov     edi, eax
        mov     esi, SIGUSR1
        mov     eax, SYS_kill
        syscall
        mov     rdi, rax                /* 0 from kill, not what the handler left */
        call    print_hex
        mov     rdi, usr1_count[rip]
        call    print_hex
        mov     edi, 5
        exit_process

install:
        mov     action[rip], rsi
        xor     edx, edx
        lea     rsi, action[rip]
        mov     r10d, 8
        mov     eax, SYS_rt_sigaction
        syscall
        ret

on_segv:
        mov     rax, [rsi + 16]         /* si_addr */
        mov     [rdx + UC_RAX], rax
        lea     rcx, resume[rip]
        mov     [rdx + UC_RIP], rcx
        or      qword ptr [rdx + UC_EFL], 1
        ret

on_usr1:
        inc     qword ptr usr1_count[rip]
        mov     eax, 0x5555
        std                             /* restored by sigreturn */
        ret

restorer:
        mov     eax, SYS_rt_sigreturn
        syscall
        .data
        .balign 8
action: .quad   0
        .quad   SA_SIGINFO | SA_RESTORER
        .quad   restorer
        .quad   0
usr1_count: .quad 0
