/* mmap, brk and munmap by raw system calls; rcx and r11 after a system call; a page boundary;
 * absolute addresses.
 *
 * Hard for a translator: `syscall` leaves the guest's rip and flags in rcx and r11, not the
 * host's. */
#include "asm.h"
define_print_hex
        .globl  _start
_start:
        xor     edi, edi
        mov     esi, 0x3000
        mov     edx, 3
        mov     r10d, 0x22
        mov     r8, -1
        xor     r9d, r9d
        mov     eax, SYS_mmap
        stc
        syscall
after:  mov     rbx, rax
        lea     rdx, after[rip]
        sub     rdx, rcx                /* rcx is the address after the syscall */
        mov     rdi, rdx
        mov     r12, r11                /* r11 is the flags */
        call    print_hex
        mov     rdi, r12
        call    print_hex
        mov     rax, 0x0123456789abcdef
        lea     rdi, [rbx + 0xffd]
        mov     ecx, 100
1:      mov     [rdi], rax
        ror     rax, 3
        add     rax, [rdi - 3]
        add     rdi, 41
        dec     ecx
        jnz     1b
        mov     rdi, rax
        call    print_hex
        xor     edi, edi
        mov     eax, SYS_brk
        syscall
        mov     r13, rax
        lea     rdi, [rax + 0x5000]
        mov     eax, SYS_brk
        syscall
        sub     rax, r13
        mov     dword ptr [r13 + 0x4000], 99
        mov     rdi, rax
        call    print_hex
        mov     rdi, rbx
        mov     esi, 0x3000
        mov     eax, SYS_munmap
        syscall
        mov     rdi, rax
        call    print_hex
        mov     eax, 9999               /* no such system call: -ENOSYS */
        syscall
        mov     rdi, rax
        call    print_hex
        mov     eax, dword ptr [absolute]
        add     eax, dword ptr [absolute + 4]
        mov     edi, eax
        exit_process
        .data
        .balign 8
absolute: .long 20, 3
