/* For guests without a C library: raw system calls, and printing of numbers.
 * Everything is a macro or a local routine, so that such a guest is a few hundred bytes of code. */
        .intel_syntax noprefix

        .set SYS_read, 0
        .set SYS_write, 1
        .set SYS_mmap, 9
        .set SYS_mprotect, 10
        .set SYS_munmap, 11
        .set SYS_brk, 12
        .set SYS_rt_sigaction, 13
        .set SYS_rt_sigreturn, 15
        .set SYS_getpid, 39
        .set SYS_exit, 60
        .set SYS_kill, 62
        .set SYS_exit_group, 231

/* Ends the process with the status in edi. */
.macro exit_process
        mov     eax, SYS_exit_group
        syscall
.endm

/* Writes rdx bytes at rsi to standard output; keeps all but rax, rcx, r11, rdi. */
.macro write_stdout
        mov     edi, 1
        mov     eax, SYS_write
        syscall
.endm

/* Defines print_hex: rdi as 16 hexadecimal digits and a newline. Keeps rbx, rbp, r12 to r15. */
.macro define_print_hex
        .text
print_hex:
        push    rbp
        mov     rbp, rsp
        sub     rsp, 32
        mov     byte ptr [rbp - 1], 10
        lea     rsi, [rbp - 1]
        mov     ecx, 16
1:      mov     eax, edi
        and     eax, 15
        cmp     al, 10
        jb      2f
        add     al, 'a' - '0' - 10
2:      add     al, '0'
        dec     rsi
        mov     [rsi], al
        shr     rdi, 4
        dec     ecx
        jnz     1b
        mov     edx, 17
        write_stdout
        leave
        ret
.endm

        .section .note.GNU-stack, "", @progbits
        .text
