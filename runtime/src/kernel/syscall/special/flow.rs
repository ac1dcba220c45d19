//! Flags on the stack, frames, and transfers of control that compilers do not generate: far jumps,
//! 16-bit jumps, `iret`, transactions.
//!
//! Invariant: a far transfer stays in 64-bit code, because the translator runs no other code. A
//! transfer to another selector raises a general protection fault.
//!
//! No data, no lock: see [`super`].
//!
//! Example: `retfq` with 0x33 (the selector of 64-bit code) above the return address pops 16 bytes
//! and continues at the return address; with 0x23 (32-bit code) it faults.

use dynasour_guest::ThreadContext;
use iced_x86::{Code, Instruction, Mnemonic as M, OpKind};

use super::{
    NextPc, Refused, address, load, peek, probe_write, protection, push, read_operand, truncate,
};
use crate::kernel::signal::GuestFault;
use crate::kernel::signal::frame::{USER_CS, USER_DS};

/// The flags CF, PF, AF, ZF, SF and OF.
const ARITHMETIC: u64 = 0x8d5;
/// The flags that `popf` may change in user mode: the arithmetic flags, TF, DF, NT, AC, ID.
const POPPABLE: u64 = ARITHMETIC | 0x100 | 0x400 | 0x4000 | 0x40000 | 0x20_0000;
/// The flags RF and VM, which `pushf` stores as zero.
const NOT_PUSHED: u64 = 0x10000 | 0x20000;

fn flags_size(inst: &Instruction) -> usize {
    match inst.mnemonic() {
        M::Pushf | M::Popf => 2,
        _ => 8,
    }
}

pub(super) fn pushf(context: &mut ThreadContext, inst: &Instruction) -> Result<(), Refused> {
    push(context, flags_size(inst), context.rflags & !NOT_PUSHED)
}

pub(super) fn popf(context: &mut ThreadContext, inst: &Instruction) -> Result<(), Refused> {
    let size = flags_size(inst);
    let flags = peek(context, size, 0)?;
    context.gpr[4] = context.gpr[4].wrapping_add(size as u64);
    set_flags(context, flags, size);
    Ok(())
}

fn set_flags(context: &mut ThreadContext, flags: u64, size: usize) {
    let mask = truncate(POPPABLE, size);
    context.rflags = context.rflags & !mask | flags & mask;
}

/// `enter`. With an operand-size prefix it pushes words of 2 bytes, and changes only the low 2
/// bytes of rbp. Addresses have 64 bits in both forms.
pub(super) fn enter(context: &mut ThreadContext, inst: &Instruction) -> Result<(), Refused> {
    let size = match inst.code() {
        Code::Enterq_imm16_imm8 => 8,
        Code::Enterw_imm16_imm8 => 2,
        _ => return Err(Refused::Unsupported),
    };
    let (sp, bp) = (context.gpr[4], context.gpr[5]);
    let outcome = enter_frame(context, size, inst.immediate16().into(), inst.immediate8_2nd() & 31);
    if outcome.is_err() {
        (context.gpr[4], context.gpr[5]) = (sp, bp);
    }
    outcome
}

fn enter_frame(
    context: &mut ThreadContext,
    size: usize,
    bytes: u64,
    level: u8,
) -> Result<(), Refused> {
    let bp = context.gpr[5];
    push(context, size, bp)?;
    let frame = context.gpr[4];
    let mut outer = bp;
    for _ in 1..level {
        outer = outer.wrapping_sub(size as u64);
        let link = load(outer, size)?;
        push(context, size, link)?;
    }
    if level > 0 {
        push(context, size, frame)?;
    }
    let low = if size == 2 { 0xffff } else { u64::MAX };
    context.gpr[5] = bp & !low | frame & low;
    context.gpr[4] = context.gpr[4].wrapping_sub(bytes);
    // The processor refuses a frame to which it could not write (SDM vol. 2, "ENTER").
    probe_write(context.gpr[4])
}

/// `leave` with an operand-size prefix: changes only the low 2 bytes of rbp.
pub(super) fn leave_word(context: &mut ThreadContext) -> Result<(), Refused> {
    let frame = context.gpr[5];
    let low = load(frame, 2)?;
    context.gpr[4] = frame.wrapping_add(2);
    context.gpr[5] = frame & !0xffff | low;
    Ok(())
}

/// Fails if `selector` is not that of 64-bit user code: the translator runs no other code.
fn check_code(selector: u64) -> Result<(), Refused> {
    if selector as u16 == USER_CS { Ok(()) } else { Err(protection(selector & 0xfffc)) }
}

pub(super) fn iret(context: &mut ThreadContext, inst: &Instruction) -> NextPc {
    let size = match inst.mnemonic() {
        M::Iret => 2,
        M::Iretd => 4,
        _ => 8,
    };
    let item = |index| peek(context, size, index);
    let [rip, cs, flags, sp, ss] = [item(0)?, item(1)?, item(2)?, item(3)?, item(4)?];
    check_code(cs)?;
    if ss as u16 != USER_DS {
        return Err(protection(ss & 0xfffc));
    }
    context.gpr[4] = sp;
    set_flags(context, flags, size);
    Ok(rip)
}

pub(super) fn far_return(context: &mut ThreadContext, inst: &Instruction) -> NextPc {
    let (size, extra) = match inst.code() {
        Code::Retfw => (2, 0),
        Code::Retfw_imm16 => (2, inst.immediate16()),
        Code::Retfd => (4, 0),
        Code::Retfd_imm16 => (4, inst.immediate16()),
        Code::Retfq => (8, 0),
        _ => (8, inst.immediate16()),
    };
    let (rip, cs) = (peek(context, size, 0)?, peek(context, size, 1)?);
    check_code(cs)?;
    context.gpr[4] = context.gpr[4].wrapping_add(2 * size as u64 + u64::from(extra));
    Ok(rip)
}

/// `ret` with an operand-size prefix: the return address has 2 bytes.
pub(super) fn near_return_word(context: &mut ThreadContext, inst: &Instruction) -> NextPc {
    let rip = peek(context, 2, 0)?;
    let extra = if inst.op_count() > 0 { inst.immediate16() } else { 0 };
    context.gpr[4] = context.gpr[4].wrapping_add(2 + u64::from(extra));
    Ok(rip)
}

/// Far jumps and calls through memory, and near jumps and calls with a 16-bit target.
pub(super) fn odd_jump(context: &mut ThreadContext, inst: &Instruction) -> NextPc {
    let next = inst.next_ip();
    let is_call = inst.mnemonic() == M::Call;
    let far = match inst.code() {
        Code::Jmp_m1616 | Code::Call_m1616 => 2,
        Code::Jmp_m1632 | Code::Call_m1632 => 4,
        Code::Jmp_m1664 | Code::Call_m1664 => 8,
        _ => 0,
    };
    if far != 0 {
        let pointer = address(context, inst, 0)?;
        let target = load(pointer, far)?;
        check_code(load(pointer.wrapping_add(far as u64), 2)?)?;
        if is_call {
            let sp = context.gpr[4];
            push(context, far, USER_CS.into())?;
            if let Err(refused) = push(context, far, next) {
                context.gpr[4] = sp;
                return Err(refused);
            }
        }
        return Ok(target);
    }
    let target = match inst.op0_kind() {
        OpKind::NearBranch16 => u64::from(inst.near_branch16()),
        OpKind::Register | OpKind::Memory => read_operand(context, inst, 0, 2)?,
        _ => return Err(Refused::Unsupported),
    };
    if is_call {
        push(context, 2, next)?;
    }
    Ok(target)
}

/// The RTM instructions, if the processor has them: every transaction is aborted at its start.
pub(super) fn transaction(context: &mut ThreadContext, inst: &Instruction) -> NextPc {
    const ZF: u64 = 0x40;
    if !std::arch::is_x86_feature_detected!("rtm") {
        return super::undefined(inst);
    }
    match inst.mnemonic() {
        M::Xbegin => {
            // An abort status of 0: no cause is given, and a retry may not succeed.
            context.gpr[0] = 0;
            return Ok(inst.near_branch_target());
        }
        M::Xend => return Err(protection(0)),
        M::Xtest => context.rflags = context.rflags & !ARITHMETIC | ZF,
        _ => {}
    }
    Ok(inst.next_ip())
}

/// The trap of `icebp`: a debug exception that no breakpoint or single step has caused.
pub(super) fn debug_trap(next: u64) -> GuestFault {
    const TRAP_BRKPT: i32 = 1;
    GuestFault {
        signo: libc::SIGTRAP,
        code: TRAP_BRKPT,
        addr: next,
        trapno: 1,
        err: 0,
        cr2: None,
        key: 0,
    }
}

/// The trap of `int 4`.
pub(super) fn overflow_trap() -> GuestFault {
    GuestFault { trapno: 4, ..GuestFault::protection(0) }
}
