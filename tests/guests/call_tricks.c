/* Calls that do not return as calls do: call/pop, ret as a jump, return addresses changed or
 * skipped, ret n, far-away thunks.
 *
 * Hard for a translator: a prediction of return targets is wrong here, and the return address in
 * memory must be the guest's. */
#include "guest.h"

uint64_t tricks(uint64_t seed, long n);
__asm__(
    ".text\n"
    "tricks:\n\t"
    "push %rbx\n\tpush %r12\n\tpush %r13\n\tmov %rdi, %rax\n\tmov %rsi, %r12\n"
    "1:\n\t"
    /* call/pop: the address of the next instruction */
    "call 2f\n"
    "2: pop %rbx\n\t"
    "lea 2b(%rip), %rcx\n\tsub %rbx, %rcx\n\tadd %rcx, %rax\n\t" /* adds 0 */
    /* ret as an indirect jump */
    "lea 3f(%rip), %rcx\n\tpush %rcx\n\tret\n\tud2\n"
    "3:\n\t"
    /* ret as a two-way branch */
    "lea 4f(%rip), %rcx\n\tlea 5f(%rip), %rdx\n\ttest $1, %al\n\tcmovz %rdx, %rcx\n\tpush %rcx\n\tret\n"
    "4: add $17, %rax\n"
    "5:\n\t"
    /* the callee moves its own return address beyond a data word */
    "call 6f\n\t.long 0x12345678\n\tjmp 7f\n"
    "6: mov (%rsp), %rcx\n\tmovl (%rcx), %edx\n\tadd %rdx, %rax\n\taddq $4, (%rsp)\n\tret\n"
    "7:\n\t"
    /* ret n drops arguments */
    "push $3\n\tpush $4\n\tcall 8f\n\tjmp 9f\n"
    "8: mov 8(%rsp), %rcx\n\timul 16(%rsp), %rcx\n\tadd %rcx, %rax\n\tret $16\n"
    "9:\n\t"
    /* a frame is left out: returns to the caller's caller */
    "call 10f\n\tjmp 12f\n"
    "10: call 11f\n\tud2\n"
    "11: add $8, %rsp\n\tror $7, %rax\n\tret\n"
    "12:\n\t"
    /* push/pop of memory and of rsp itself */
    "push %rsp\n\tpop %rcx\n\tsub %rsp, %rcx\n\tadd %rcx, %rax\n\t"
    "push %rax\n\tpushq (%rsp)\n\tpopq 8(%rsp)\n\tpop %rdx\n\tpush %rdx\n\tpop %rdx\n\tsub $0, %rsp\n\t"
    "pushw %ax\n\tpushw %dx\n\tpopw %cx\n\tpopw %cx\n\tmovzwl %cx, %ecx\n\tadd %rcx, %rax\n\t"
    "lea 13f(%rip), %r13\n\tcall *%r13\n\tjmp 14f\n"
    "13: enter $32, $0\n\tmovq %rax, -8(%rbp)\n\tnegq -8(%rbp)\n\tmov -8(%rbp), %rax\n\tleave\n\tret\n"
    "14:\n\t"
    "dec %r12\n\tjnz 1b\n\t"
    "pop %r13\n\tpop %r12\n\tpop %rbx\n\tret\n");

/* A chain of jumps through a table that is entered in its middle; jrcxz and loop as branches. */
uint64_t branches(long n);
__asm__(
    ".text\nbranches:\n\txor %eax, %eax\n"
    "1: mov %rdi, %rcx\n\tand $7, %ecx\n\tjrcxz 3f\n"
    "2: lea 1(%rax,%rax,2), %rax\n\tloop 2b\n"
    "3: mov %edi, %ecx\n\tand $3, %ecx\n\tjecxz 4f\n15: cmp $2, %ecx\n\tloopne 15b\n\tinc %rax\n"
    "4: mov %rdi, %rdx\n\tand $3, %edx\n\tlea 5f(%rip), %rsi\n\tmovslq (%rsi,%rdx,4), %rdx\n\tadd %rsi, %rdx\n\tjmp *%rdx\n"
    ".balign 4\n5: .long 6f-5b, 7f-5b, 8f-5b, 9f-5b\n"
    "6: xor $0x5a, %rax\n7: ror $3, %rax\n8: add $99, %rax\n9: dec %rdi\n\tjnz 1b\n\tret\n");

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 400);
    printf("%016lx\n", tricks(1, n));
    printf("%016lx\n", tricks(2, n));
    printf("%016lx\n", branches(n));
    return 0;
}
