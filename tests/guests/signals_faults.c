/* Every kind of fault that user code can raise: signal, si_code, si_addr, trapno, err, cr2, rip,
 * rsp, flags and all other registers as the handler finds them; in code that is not hot yet and
 * in hot code. A line is printed once; it is printed again only if it differs.
 *
 * Hard for a translator: a fault of its native code must be told as the fault of one guest
 * instruction. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include "guest.h"

enum { PAGE = 4096 };
#define AREA 0x10000000000UL
#define NONE (AREA + PAGE)
#define RO (AREA + 2 * PAGE)
#define RX (AREA + 3 * PAGE)
#define BUS (AREA + 4 * PAGE)
#define RW2 (AREA + 5 * PAGE)
#define SCRATCH (RW2 + 1024)
#define ODD 0x8000000000001000UL
#define KERNEL 0xffffffff80000010UL

uint64_t saved_rsp, case_target, case_rdi, case_flags;

/* Fixed registers, the case, and the way back with whatever it did undone. */
__asm__(".text\n.globl run_case\nrun_case:\n"
        "push %rbx; push %rbp; push %r12; push %r13; push %r14; push %r15\n"
        "mov %rsp, saved_rsp(%rip)\n"
        "movdqu case_vectors(%rip), %xmm1; movdqu case_vectors(%rip), %xmm2; pxor %xmm0, %xmm0\n"
        "mov $0x1122334455667788, %rax; mov $2, %edx; mov $0x10000005600, %rsi\n"
        "mov $40, %ecx; mov $0x33, %ebx; mov $0x55, %ebp; mov $8, %r8d; mov $-9, %r9; mov $10, %r10d; mov $11, %r11d\n"
        "mov $12, %r12d; mov $13, %r13d; mov $14, %r14d; mov $15, %r15d; mov case_rdi(%rip), %rdi\n"
        "pushq case_flags(%rip); popfq; jmp *case_target(%rip)\n"
        ".globl case_end\ncase_end: mov saved_rsp(%rip), %rsp\n"
        "pushq $0x202; popfq; fninit; ldmxcsr default_mxcsr(%rip)\n"
        "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbp; pop %rbx; ret\n"
        ".section .rodata\n.balign 64\ncase_vectors: .quad 0x0123456789abcdef, 0xfedcba9876543210, 0, 0, 0, 0, 0, 0\n"
        "default_mxcsr: .long 0x1f80\nopen_mxcsr: .long 0\nbad_mxcsr: .long 0x80001f80\nopen_control: .short 0x340\n"
        "one: .double 1.0\n.text\n");
extern void run_case(void);
extern char case_end[];

/* name, where rdi points, flags before, what comes first, the instruction */
#define CASES(X)                                                                                                        \
    X(load8, 0x10, 0x203, "", "movzbl (%rdi), %eax")                                                                    \
    X(load16, NONE + 6, 0xad7, "", "mov (%rdi), %ax")                                                                   \
    X(load64, 0, 0x202, "", "mov 8(%rdi), %rdx")                                                                        \
    X(load_index, NONE, 0x246, "", "mov (%rdi,%rdx,8), %r9")                                                            \
    X(store8, NONE, 0x203, "", "mov %al, (%rdi)")                                                                       \
    X(store64, 0x20, 0x203, "", "mov %r13, (%rdi)")                                                                     \
    X(store_imm, 0x20, 0x203, "", "movq $-5, 16(%rdi)")                                                                 \
    X(store_ro, RO + 24, 0x203, "", "mov %r13, (%rdi)")                                                                 \
    X(store_code, RX + 24, 0x203, "", "mov %r13d, (%rdi)")                                                              \
    X(rmw_null, 0x30, 0xad7, "", "add %rax, (%rdi)")                                                                    \
    X(rmw_none, NONE, 0xad7, "", "subl $3, (%rdi)")                                                                     \
    X(rmw_ro, RO, 0xad7, "", "incl (%rdi)")                                                                             \
    X(neg_ro, RO, 0x202, "", "negq 8(%rdi)")                                                                            \
    X(shl_ro, RO, 0x202, "", "shlq %cl, 8(%rdi)")                                                                       \
    X(cmp_none, NONE, 0x203, "", "cmp %rax, (%rdi)")                                                                    \
    X(xadd_ro, RO, 0x202, "", "lock xadd %rax, (%rdi)")                                                                 \
    X(xchg_ro, RO, 0x202, "", "xchg %rax, (%rdi)")                                                                      \
    X(cmpxchg_ro, RO, 0x202, "", "lock cmpxchg %rdx, (%rdi)")                                                           \
    X(cmpxchg_plain_ro, RO, 0x202, "", "cmpxchg %rdx, (%rdi)")                                                          \
    X(cmpxchg16b_odd, RW2 + 8, 0x202, "", "lock cmpxchg16b (%rdi)")                                                     \
    X(cmpxchg16b_none, NONE, 0x202, "", "lock cmpxchg16b (%rdi)")                                                       \
    X(lock_add_none, NONE, 0x202, "", "lock addq $1, (%rdi)")                                                           \
    X(bts_far, AREA, 0x202, "mov $32768, %eax", "bts %rax, (%rdi)")                                                     \
    X(bt_back, RW2, 0x202, "mov $-8200, %rax", "bt %rax, (%rdi)")                                                       \
    X(cross_load, NONE - 3, 0x202, "", "mov (%rdi), %rax")                                                              \
    X(cross_store, NONE - 5, 0x202, "", "mov %rax, (%rdi)")                                                             \
    X(cross_store_ro, RO - 2, 0x202, "", "mov %rax, (%rdi)")                                                            \
    X(cross_rmw, NONE - 4, 0x202, "", "add %rax, (%rdi)")                                                               \
    X(cross_vector, NONE - 8, 0x202, "", "movdqu (%rdi), %xmm0")                                                        \
    X(push_memory, NONE, 0x202, "", "pushq (%rdi)")                                                                     \
    X(pop_memory, NONE, 0x202, "push %rax", "popq (%rdi)")                                                              \
    X(pop_rsp_memory, NONE, 0x202, "mov %rdi, %rsp", "popq -16(%rsp)")                                                  \
    X(push_bad, NONE + 64, 0x202, "mov %rdi, %rsp", "push %rax")                                                        \
    X(pop_bad, NONE + 64, 0x202, "mov %rdi, %rsp", "pop %rax")                                                          \
    X(call_bad, NONE + 64, 0x202, "mov %rdi, %rsp", "call case_end")                                                    \
    X(call_memory, NONE, 0x202, "", "call *(%rdi)")                                                                     \
    X(jump_memory, 0x18, 0x202, "", "jmp *(%rdi)")                                                                      \
    X(ret_bad, NONE + 64, 0x202, "mov %rdi, %rsp", "ret")                                                               \
    X(ret_odd_stack, ODD, 0x202, "mov %rdi, %rsp", "ret")                                                               \
    X(push_odd_stack, ODD, 0x202, "mov %rdi, %rsp", "push %rbx")                                                        \
    X(rbp_odd, ODD, 0x202, "mov %rdi, %rbp", "mov 8(%rbp), %eax")                                                       \
    X(leave_bad, NONE, 0x202, "mov %rdi, %rbp", "leave")                                                                \
    X(enter_bad, NONE + 8, 0x202, "mov %rdi, %rsp", "enter $16, $0")                                                    \
    X(pushf_bad, NONE + 8, 0x2c3, "mov %rdi, %rsp", "pushfq")                                                           \
    X(popf_bad, NONE + 8, 0x2c3, "mov %rdi, %rsp", "popfq")                                                             \
    X(load_odd, ODD, 0x203, "", "mov (%rdi), %rax")                                                                     \
    X(store_odd, ODD, 0x203, "", "mov %rax, (%rdi)")                                                                    \
    X(load_kernel, KERNEL, 0x203, "", "mov (%rdi), %rax")                                                               \
    X(store_kernel, KERNEL, 0x203, "", "mov %rax, (%rdi)")                                                              \
    X(load_edge, 0x7ffffffffffcUL, 0x203, "", "mov (%rdi), %rax")                                                       \
    X(jump_null, 0, 0x203, "", "jmp *%rdi")                                                                             \
    X(call_null, 0, 0x203, "", "call *%rdi")                                                                            \
    X(jump_none, NONE + 5, 0x203, "", "jmp *%rdi")                                                                      \
    X(jump_data, AREA + 5, 0x203, "", "jmp *%rdi")                                                                      \
    X(ret_null, 0, 0x203, "push %rdi", "ret")                                                                           \
    X(jump_kernel, KERNEL, 0x203, "", "jmp *%rdi")                                                                      \
    X(code_runs_out, RX + PAGE - 3, 0x203, "", "jmp *%rdi")                                                             \
    X(bus_load, BUS + 8, 0x203, "", "mov (%rdi), %rax")                                                                 \
    X(bus_store, BUS + 8, 0x203, "", "mov %rax, (%rdi)")                                                                \
    X(movaps_odd, RW2 + 8, 0x203, "", "movaps (%rdi), %xmm3")                                                           \
    X(movaps_store_odd, RW2 + 8, 0x203, "", "movaps %xmm3, (%rdi)")                                                     \
    X(paddd_odd, RW2 + 8, 0x203, "", "paddd (%rdi), %xmm3")                                                             \
    X(movups_none, NONE, 0x203, "", "movups (%rdi), %xmm3")                                                             \
    X(movups_store_ro, RO, 0x203, "", "movups %xmm3, (%rdi)")                                                           \
    X(maskmov_none, NONE, 0x203, "pcmpeqd %xmm3, %xmm3", "maskmovdqu %xmm3, %xmm0")                                     \
    X(ldmxcsr_bad, 0, 0x203, "", "ldmxcsr bad_mxcsr(%rip)")                                                             \
    X(ldmxcsr_none, NONE, 0x203, "", "ldmxcsr (%rdi)")                                                                  \
    X(fxsave_odd, RW2 + 8, 0x203, "", "fxsave (%rdi)")                                                                  \
    X(fxsave_none, NONE, 0x203, "", "fxsave (%rdi)")                                                                    \
    X(xsave_odd, RW2 + 16, 0x203, "mov $7, %eax; xor %edx, %edx", "xsave (%rdi)")                                       \
    X(xrstor_none, NONE, 0x203, "mov $7, %eax; xor %edx, %edx", "xrstor (%rdi)")                                        \
    X(fld_none, NONE, 0x203, "", "fldt (%rdi)")                                                                         \
    X(fst_ro, RO, 0x203, "fld1", "fstpt (%rdi)")                                                                        \
    X(fnsave_ro, RO, 0x203, "", "fnsave (%rdi)")                                                                        \
    X(fldenv_none, NONE, 0x203, "", "fldenv (%rdi)")                                                                    \
    X(divide_zero, 0, 0x202, "xor %ecx, %ecx; cmp $3, %eax", "div %ecx")                                                \
    X(divide_64, 0, 0x202, "xor %ecx, %ecx", "idiv %rcx")                                                               \
    X(divide_overflow, 0, 0x202, "mov $-1, %ecx; mov $0x80000000, %eax; cltd", "idiv %ecx")                             \
    X(divide_narrow, 0, 0x202, "mov $0x4000, %eax; mov $2, %cl", "div %cl")                                             \
    X(divide_memory, NONE, 0x202, "", "divl (%rdi)")                                                                    \
    X(sse_divide, 0, 0x202, "ldmxcsr open_mxcsr(%rip); movsd one(%rip), %xmm1", "divsd %xmm0, %xmm1")                   \
    X(sse_invalid, 0, 0x202, "ldmxcsr open_mxcsr(%rip)", "divps %xmm0, %xmm0")                                          \
    X(sse_inexact, 0, 0x202, "ldmxcsr open_mxcsr(%rip); movsd one(%rip), %xmm1; mov $3, %eax; cvtsi2sd %eax, %xmm0",    \
      "divsd %xmm0, %xmm1")                                                                                             \
    X(x87_divide, 0, 0x202, "fldcw open_control(%rip); fld1; fldz; fdivrp", "fwait")                                    \
    X(x87_invalid, 0, 0x202, "fldcw open_control(%rip); fldz; fldz; fdivrp", "fld1")                                    \
    X(x87_stack, 0, 0x202, "fldcw open_control(%rip); fadd %st(1), %st", "fwait")                                       \
    X(ud2, 0, 0x8d7, "", "ud2")                                                                                         \
    X(lock_mov, RW2, 0x202, "", ".byte 0xf0, 0x89, 0x07")                                                               \
    X(lock_register, RW2, 0x202, "", ".byte 0xf0, 0x01, 0xc0")                                                          \
    X(invalid_in_64, 0, 0x202, "", ".byte 0x06")                                                                        \
    X(far_call_32, 0, 0x202, "", ".byte 0x9a, 0, 0, 0, 0, 0, 0")                                                        \
    X(hlt, 0, 0x202, "", "hlt")                                                                                         \
    X(cli, 0, 0x202, "", "cli")                                                                                         \
    X(sti, 0, 0x202, "", "sti")                                                                                         \
    X(in, 0, 0x202, "", "in %dx, %al")                                                                                  \
    X(out, 0, 0x202, "", "out %eax, $0x80")                                                                             \
    X(insb, RW2, 0x202, "", "rep insb")                                                                                 \
    X(rdmsr, 0, 0x202, "", "rdmsr")                                                                                     \
    X(cr0, 0, 0x202, "", "mov %cr0, %rax")                                                                              \
    X(dr7, 0, 0x202, "", "mov %rax, %dr7")                                                                              \
    X(invlpg, RW2, 0x202, "", "invlpg (%rdi)")                                                                          \
    X(wbinvd, 0, 0x202, "", "wbinvd")                                                                                   \
    X(lgdt, RW2, 0x202, "", "lgdt (%rdi)")                                                                              \
    X(ltr, 0, 0x202, "", "ltr %ax")                                                                                     \
    X(swapgs, 0, 0x202, "", "swapgs")                                                                                   \
    X(sysret, 0, 0x202, "", "sysretq")                                                                                  \
    X(selector, 0, 0x202, "mov $0x1233, %eax", "mov %eax, %ds")                                                         \
    X(selector_null_ss, 0, 0x202, "xor %eax, %eax", "mov %eax, %ss")                                                    \
    X(int3, 0, 0x203, "", "int3")                                                                                       \
    X(int3_long, 0, 0x203, "", ".byte 0xcd, 3")                                                                         \
    X(int3_prefixed, 0, 0x203, "", ".byte 0x66, 0xcc")                                                                  \
    X(int3_wide, 0, 0x203, "", ".byte 0x48, 0xcc")                                                                      \
    X(int3_segment, 0, 0x203, "", ".byte 0x65, 0x48, 0xcc")                                                             \
    X(int4, 0, 0x203, "", "int $4")                                                                                     \
    X(int_0x21, 0, 0x203, "", "int $0x21")                                                                              \
    X(int_0xe, 0, 0x203, "", "int $14")                                                                                 \
    X(xgetbv, 0, 0x203, "mov $77, %ecx", "xgetbv")                                                                      \
    X(rdpmc, 0, 0x203, "mov $77777, %ecx", "rdpmc")                                                                     \
    X(xlat, NONE, 0x203, "mov %rdi, %rbx", "xlatb")                                                                     \
    X(string_load, NONE - 24, 0x203, "mov %rdi, %rsi", "rep lodsq")                                                     \
    X(string_move, NONE - 17, 0x203, "", "rep movsb")                                                                   \
    X(string_move_from, SCRATCH, 0x203, "mov $0x10000000ff8, %rsi", "rep movsq")                                        \
    X(string_store, NONE - 64, 0x203, "", "rep stosl")                                                                  \
    X(string_store_ro, RO - 64, 0x203, "mov $0x10000005600, %rdi; mov $0x10000002000, %rdi", "rep stosb")               \
    X(string_store_back, RW2 + 8, 0x203, "std", "rep stosq")                                                            \
    X(string_compare, NONE - 9, 0x246, "mov %rdi, %rsi; mov $0x10000005000, %rdi", "repe cmpsb")                        \
    X(string_scan, NONE - 9, 0x203, "mov $7, %al", "repne scasb")                                                       \
    X(string_none, NONE, 0x203, "", "movsq")                                                                            \
    X(clflush, NONE, 0x203, "", "clflush (%rdi)")                                                                       \
    X(nothing, RW2, 0x203, "", "nop")

#define AVX_CASES(X)                                                                                                    \
    X(vmovaps_odd, RW2 + 16, 0x203, "", "vmovaps (%rdi), %ymm3")                                                        \
    X(vmovups_cross, NONE - 16, 0x203, "", "vmovups (%rdi), %ymm3")                                                     \
    X(maskmov_off, NONE - 16, 0x203, "vpcmpeqd %xmm3, %xmm3, %xmm3", "vmaskmovps (%rdi), %ymm3, %ymm4")                 \
    X(maskmov_on, NONE - 12, 0x203, "vpcmpeqd %xmm3, %xmm3, %xmm3", "vmaskmovps %ymm4, %ymm3, (%rdi)")                  \
    X(gather, NONE - 8, 0x203, "vpcmpeqd %xmm3, %xmm3, %xmm3; vpxor %xmm5, %xmm5, %xmm5; mov $4, %eax; vpinsrd $2, %eax, %xmm5, %xmm5", \
      "vpgatherdd %xmm3, (%rdi,%xmm5,2), %xmm4")                                                                        \
    X(vzero_load, NONE, 0x203, "vpxor %xmm5, %xmm5, %xmm5", "vpaddd (%rdi), %ymm5, %ymm5")

#define AVX512_CASES(X)                                                                                                 \
    X(zmm_load, NONE - 60, 0x203, "", "vmovdqu64 (%rdi), %zmm3")                                                        \
    X(masked_off, NONE - 16, 0x203, "mov $0xf, %eax; kmovw %eax, %k1", "vmovdqu32 (%rdi), %zmm3{%k1}{z}")               \
    X(masked_on, NONE - 16, 0x203, "mov $0x1f, %eax; kmovw %eax, %k1", "vmovdqu32 %zmm3, (%rdi){%k1}")                  \
    X(scatter, NONE - 8, 0x203,                                                                                         \
      "mov $0xf, %eax; kmovw %eax, %k1; vpxor %xmm5, %xmm5, %xmm5; mov $4, %eax; vpinsrd $2, %eax, %xmm5, %xmm5",       \
      "vpscatterdd %xmm5, (%rdi,%xmm5,2){%k1}")                                                                         \
    X(compress, NONE - 4, 0x203, "mov $0x5, %eax; kmovw %eax, %k1", "vpcompressd %zmm3, (%rdi){%k1}")

#define DEFINE(name, rdi, flags, setup, instruction)                                            \
    __asm__(".text\ncase_" #name ": " setup "\nat_" #name ": " instruction "\nafter_" #name ": jmp case_end\n"); \
    extern char case_##name[], at_##name[], after_##name[];
CASES(DEFINE)
AVX_CASES(DEFINE)
AVX512_CASES(DEFINE)

struct kase {
    const char *name;
    char *code, *at, *after;
    uint64_t rdi, flags;
};
#define ENTRY(name, rdi, flags, setup, instruction) {#name, case_##name, at_##name, after_##name, rdi, flags},
static const struct kase plain[] = {CASES(ENTRY)}, avx[] = {AVX_CASES(ENTRY)}, avx512[] = {AVX512_CASES(ENTRY)};

static const struct kase *now;
static char line[1024], first[1024];

/* The kernel leaves AC as it was, and C code is not aligned everywhere. */
extern void handler(int, siginfo_t *, void *);
__asm__(".text\nhandler: pushfq; andl $~0x40000, (%rsp); popfq; jmp handle_fault\n");

__attribute__((used)) void handle_fault(int signal, siginfo_t *info, void *context) {
    ucontext_t *uc = context;
    greg_t *g = uc->uc_mcontext.gregs;
    uint64_t rip = (uint64_t)g[REG_RIP], at = (uint64_t)now->at;
    static const int others[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RBP, REG_RSI, REG_RDI, REG_R8,
                                 REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    int n = 0;
    uint64_t address = (uint64_t)info->si_addr;
    n += sprintf(line + n, "signal %d code %d errno %d", signal, info->si_code, info->si_errno);
    n += address - at < 64 ? sprintf(line + n, " addr at+%lu", address - at) : sprintf(line + n, " addr %lx", address);
    n += rip - at < 64 ? sprintf(line + n, " rip at+%lu", rip - at) : sprintf(line + n, " rip %lx", rip);
    n += sprintf(line + n, " trap %lld err %llx cr2 %llx flags %llx", g[REG_TRAPNO], g[REG_ERR], g[REG_CR2], g[REG_EFL]);
    int64_t depth = (int64_t)(saved_rsp - (uint64_t)g[REG_RSP]);
    n += depth > -64 && depth < 64 ? sprintf(line + n, " depth %ld", (long)depth) : sprintf(line + n, " rsp %llx", g[REG_RSP]);
    n += sprintf(line + n, " selectors %llx\n   ", g[REG_CSGSFS]);
    for (unsigned i = 0; i < sizeof others / sizeof *others; i++) n += sprintf(line + n, " %llx", g[others[i]]);
    struct _libc_fpstate *state = uc->uc_mcontext.fpregs;
    n += sprintf(line + n, "\n    mxcsr %x cwd %x swd %x ftw %x\n", state->mxcsr, state->cwd, state->swd, state->ftw);
    g[REG_RIP] = (greg_t)case_end;
    g[REG_EFL] &= ~0x40500L;
}

static int failures;
static void run(const struct kase *cases, int count, int rounds) {
    for (int i = 0; i < count; i++) {
        now = &cases[i];
        for (int round = 0; round < rounds; round++) {
            strcpy(line, "no fault\n");
            memset((void *)(NONE - 64), 7, 64);
            memset((void *)RW2, 7, 64);
            case_target = (uint64_t)now->code;
            case_rdi = now->rdi;
            case_flags = now->flags;
            run_case();
            uint64_t memory = mix_bytes(mix_bytes(1, (void *)(NONE - 128), 128), (void *)RW2, 512);
            sprintf(line + strlen(line), "    memory %016lx\n", memory);
            if (round == 0) {
                strcpy(first, line);
                printf("%s: %s", now->name, line);
            } else if (strcmp(first, line)) {
                failures++;
                printf("%s, round %d: %s", now->name, round, line);
            }
        }
    }
}

int main(int argc, char **argv) {
    long rounds = iterations(argc, argv, 16);
    CHECK(mmap((void *)AREA, 7 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == (void *)AREA);
    int file = memfd_create("empty", 0);
    CHECK(mmap((void *)BUS, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == (void *)BUS);
    memset((void *)RX, 0x90, PAGE);
    CHECK(mprotect((void *)NONE, PAGE, PROT_NONE) == 0 && mprotect((void *)RO, PAGE, PROT_READ) == 0);
    CHECK(mprotect((void *)RX, PAGE, PROT_READ | PROT_EXEC) == 0);
    CHECK(*(volatile char *)RO == 0); /* from here on the page is there */
    static char alternate[1 << 17] __attribute__((aligned(64)));
    stack_t stack = {alternate, 0, sizeof alternate};
    CHECK(sigaltstack(&stack, NULL) == 0);
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
    for (int i = 0; i < 5; i++) CHECK(sigaction(signals[i], &action, NULL) == 0);
    run(plain, sizeof plain / sizeof *plain, (int)rounds);
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) run(avx, sizeof avx / sizeof *avx, (int)rounds);
    if (__builtin_cpu_supports("avx512f")) run(avx512, sizeof avx512 / sizeof *avx512, (int)rounds);
    printf("changed later: %d\n", failures);
    return 0;
}
