//! Corrects the fault of a host instruction to the fault that the guest's instruction would have
//! caused.
//!
//! The interpreter accesses guest memory by instructions of its own. They have the same address and
//! width as the guest's, but other base registers, and a read-modify-write is a load and a store.
//! Two things that the guest's handler sees depend on the guest's instruction itself:
//! * an access to a non-canonical address is a stack fault (#SS, SIGBUS) if it uses the stack
//!   segment, else a general protection fault (Intel SDM vol. 3, 6.15);
//! * the page fault of an instruction that reads and writes its operand is that of a write.
//!
//! Owns no data. Called on the guest's own thread after the handler has returned, not in the
//! handler: it reads and decodes guest code. No lock.
//!
//! Example: `push rbx` with a non-canonical rsp. The interpreter's store causes #GP; the guest's
//! handler gets SIGBUS with exception number 12.

use dynasour_guest::ThreadContext;
use dynasour_guest::decode::{Decoded, Fetch, Reader};
use iced_x86::{Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register};

use crate::memory::{self, FaultInfo};

/// Exception numbers (Intel SDM vol. 3, 6.3.1).
const STACK: u64 = 12;
const PROTECTION: u64 = 13;
const PAGE_FAULT: u64 = 14;
/// The bit of a page fault's error code that marks a write (Intel SDM vol. 3, 4.7).
const WRITE: u64 = 1 << 1;

/// Reads instruction bytes from guest memory.
struct GuestCode;

impl Fetch for GuestCode {
    fn fetch(&self, addr: u64, buf: &mut [u8]) -> usize {
        memory::fetch_code(addr, buf)
    }
}

/// The fault that the processor would have reported for the guest's instruction at `pc`. `fault` is
/// that of the host's instruction, `context` the state before the guest's.
pub fn of_guest(context: &ThreadContext, pc: u64, mut fault: FaultInfo) -> FaultInfo {
    let may_differ = match fault.trapno {
        PROTECTION => fault.error == 0,
        PAGE_FAULT => fault.error & WRITE == 0,
        _ => false,
    };
    if !may_differ {
        return fault;
    }
    let Decoded::Inst(inst) = Reader::new(&GuestCode).decode(pc) else { return fault };
    if fault.trapno == PAGE_FAULT {
        if reads_and_writes(&inst) {
            fault.error |= WRITE;
        }
    } else if is_stack_fault(context, &inst) {
        fault = FaultInfo { signal: libc::SIGBUS, trapno: STACK, ..fault };
    }
    fault
}

fn reads_and_writes(inst: &Instruction) -> bool {
    let mut factory = InstructionInfoFactory::new();
    let uses = factory.info(inst).used_memory().iter().map(|used| used.access());
    uses.into_iter().any(|access| matches!(access, OpAccess::ReadWrite | OpAccess::ReadCondWrite))
}

fn is_canonical(address: u64) -> bool {
    const SIGN: u32 = 16;
    ((address as i64) << SIGN >> SIGN) as u64 == address
}

/// Whether `inst` faults because of a non-canonical address in the stack segment.
fn is_stack_fault(context: &ThreadContext, inst: &Instruction) -> bool {
    let register = |register: Register, _: usize, _: usize| match register {
        Register::ES | Register::CS | Register::SS | Register::DS => Some(0),
        Register::FS => Some(context.fs_base),
        Register::GS => Some(context.gs_base),
        other if other.is_gpr64() => Some(context.gpr[other.number()]),
        other if other.is_gpr32() => Some(u64::from(context.gpr[other.number()] as u32)),
        _ => None,
    };
    let explicit = (0..inst.op_count()).find(|&operand| inst.op_kind(operand) == OpKind::Memory);
    if let Some(operand) = explicit
        && inst.mnemonic() != Mnemonic::Lea
        && let Some(address) = inst.virtual_address(operand, 0, register)
    {
        let last = address.wrapping_add((inst.memory_size().size() as u64).saturating_sub(1));
        if !is_canonical(address) || !is_canonical(last) {
            return inst.memory_segment() == Register::SS;
        }
    }
    const WORD: u64 = 8;
    let base = context.gpr[if inst.mnemonic() == Mnemonic::Leave { 5 } else { 4 }];
    inst.is_stack_instruction() && !(is_canonical(base) && is_canonical(base.wrapping_sub(WORD)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(code: &[u8], registers: &[(usize, u64)], trapno: u64) -> FaultInfo {
        let mut context = ThreadContext::new();
        for &(register, value) in registers {
            context.gpr[register] = value;
        }
        let fault = FaultInfo { signal: libc::SIGSEGV, trapno, ..FaultInfo::default() };
        let mut code = code.to_vec();
        code.resize(16, 0x90);
        of_guest(&context, code.as_ptr() as u64, fault)
    }

    #[test]
    fn stack_faults_are_those_of_the_stack_segment() {
        const ODD: u64 = 1 << 63;
        let is_stack = |code: &[u8], registers: &[(usize, u64)]| {
            let fault = after(code, registers, PROTECTION);
            assert_eq!(fault.trapno == STACK, fault.signal == libc::SIGBUS);
            fault.trapno == STACK
        };
        assert!(!is_stack(&[0x8b, 0x07], &[(7, ODD)]), "mov eax, [rdi]");
        assert!(is_stack(&[0x8b, 0x45, 8], &[(5, ODD)]), "mov eax, [rbp + 8]");
        assert!(is_stack(&[0x8b, 0x04, 0x24], &[(4, ODD)]), "mov eax, [rsp]");
        assert!(is_stack(&[0x53], &[(4, ODD)]), "push rbx");
        assert!(is_stack(&[0xc3], &[(4, ODD)]), "ret");
        assert!(is_stack(&[0xc9], &[(5, ODD)]), "leave");
        assert!(!is_stack(&[0xff, 0x37], &[(7, ODD), (4, 0x1000)]), "push [rdi]");
        assert!(is_stack(&[0xff, 0x37], &[(7, 0x1000), (4, ODD)]), "push [rdi] onto a bad stack");
        assert!(
            !is_stack(&[0x0f, 0x28, 0x45, 0], &[(5, 0x1008)]),
            "movaps xmm0, [rbp], misaligned"
        );
    }

    #[test]
    fn what_reads_and_writes_faults_as_a_write() {
        let writes = |code: &[u8]| after(code, &[], PAGE_FAULT).error & WRITE != 0;
        assert!(writes(&[0x01, 0x07]), "add [rdi], eax");
        assert!(writes(&[0xff, 0x07]), "inc [rdi]");
        assert!(writes(&[0x0f, 0xb1, 0x17]), "cmpxchg [rdi], edx");
        assert!(!writes(&[0x39, 0x07]), "cmp [rdi], eax");
        assert!(!writes(&[0x03, 0x07]), "add eax, [rdi]");
        assert!(!writes(&[0xa4]), "movsb");
    }
}
