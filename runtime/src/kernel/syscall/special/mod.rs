//! Instructions that neither the interpreter nor native code executes (`GuestTerm::Special`).
//!
//! They concern segments and descriptor tables ([`segment`], [`tables`]), extended state and
//! protection keys ([`state`]), flags, frames, far transfers, interrupts and transactions
//! ([`flow`]). Each has the effect here that it has in user mode on this processor and kernel. An
//! instruction that is not implemented prints a message and raises SIGILL.
//!
//! Data: none. The instructions change the [`ThreadContext`], and the guest's selectors in
//! [`System`].
//!
//! Invariant: an instruction that faults has changed no register. (`int3`, `int 4` and `icebp` are
//! traps: `rip` is behind them.) A guest store that meets a guarded page of code is repeated, or
//! made for the guest ([`crate::changes::host`]).
//!
//! The dispatcher calls [`System::special`] on the guest's thread, outside native code, and holds
//! no lock.
//!
//! Example: `popfq` at 0x1000. Its byte is fetched and decoded, 8 bytes are loaded from the stack,
//! rsp grows by 8, the flags that user mode may change are set, and `rip` becomes 0x1001.

mod flow;
mod segment;
mod state;
mod tables;

use dynasour_guest::ThreadContext;
use dynasour_guest::decode::{Decoded, Fetch, Reader};
use dynasour_guest::space::page_down;
use iced_x86::{Instruction, Mnemonic as M, OpKind, Register};

use crate::changes::host;
use crate::kernel::process::{Outcome, System};
use crate::kernel::signal::GuestFault;
use crate::memory::{self, Fault};

/// Why an instruction was not executed.
enum Refused {
    /// An access to guest memory faulted; [`memory::last_fault`] has the details.
    Access,
    /// The processor would raise this exception.
    Fault(GuestFault),
    /// The translator does not implement the instruction.
    Unsupported,
}

impl From<Fault> for Refused {
    fn from(_: Fault) -> Refused {
        Refused::Access
    }
}

/// A general protection fault with this error code.
fn protection(error: u64) -> Refused {
    Refused::Fault(GuestFault::protection(error))
}

/// The pc after an instruction, or why it was not executed.
type NextPc = Result<u64, Refused>;

/// Reads guest memory for the decoder.
struct GuestCode;

impl Fetch for GuestCode {
    fn fetch(&self, addr: u64, buf: &mut [u8]) -> usize {
        memory::fetch_code(addr, buf)
    }
}

impl System {
    /// Executes the instruction at `pc` on `context`, and sets `rip` to the next instruction. If
    /// the instruction faults, its signal is raised.
    pub fn special(&mut self, context: &mut ThreadContext, pc: u64) -> Outcome {
        context.rip = pc;
        let inst = match Reader::new(&GuestCode).decode(pc) {
            Decoded::Inst(inst) => inst,
            Decoded::Invalid(_) => return self.raise(context, GuestFault::undefined(pc)),
            Decoded::TooLong => return self.raise(context, GuestFault::protection(0)),
            Decoded::Unfetchable(readable) => {
                let fault =
                    GuestFault::fetch(pc.wrapping_add(readable as u64), &memory::last_fault());
                return self.raise(context, fault);
            }
        };
        match self.execute(context, &inst) {
            Ok(next) => {
                context.rip = next;
                Outcome::Continue
            }
            Err(Refused::Access) => {
                let fault = GuestFault::from_host_fault(context, pc, &memory::last_fault());
                self.raise(context, fault)
            }
            Err(Refused::Fault(fault)) => self.raise(context, fault),
            Err(Refused::Unsupported) => {
                crate::kernel::process::complain(&format!(
                    "instruction not supported at {pc:#x}: {inst}"
                ));
                self.raise(context, GuestFault::undefined(pc))
            }
        }
    }

    fn execute(&mut self, context: &mut ThreadContext, inst: &Instruction) -> NextPc {
        let next = inst.next_ip();
        match inst.mnemonic() {
            M::Xsave
            | M::Xsave64
            | M::Xsaveopt
            | M::Xsaveopt64
            | M::Xsavec
            | M::Xsavec64
            | M::Xrstor
            | M::Xrstor64
            | M::Fxsave
            | M::Fxsave64
            | M::Fxrstor
            | M::Fxrstor64 => state::xsave_family(context, inst)?,
            M::Fnstenv | M::Fnsave | M::Fldenv | M::Frstor | M::Fninit => {
                state::x87_environment(context, inst)?;
            }
            M::Wrpkru => state::wrpkru(context)?,
            M::Rdpkru => state::rdpkru(context)?,

            M::Rdfsbase => segment::write_base(context, inst, context.fs_base),
            M::Rdgsbase => segment::write_base(context, inst, context.gs_base),
            M::Wrfsbase => context.fs_base = segment::new_base(context, inst)?,
            M::Wrgsbase => context.gs_base = segment::new_base(context, inst)?,
            M::Mov | M::Push | M::Pop | M::Lfs | M::Lgs | M::Lss => {
                self.segments.execute(context, inst)?
            }
            M::Sgdt | M::Sidt | M::Sldt | M::Str | M::Smsw => tables::execute(context, inst)?,

            M::Pushf | M::Pushfq => flow::pushf(context, inst)?,
            M::Popf | M::Popfq => flow::popf(context, inst)?,
            M::Enter => flow::enter(context, inst)?,
            M::Leave => flow::leave_word(context)?,

            M::Iret | M::Iretd | M::Iretq => return flow::iret(context, inst),
            M::Retf => return flow::far_return(context, inst),
            M::Ret => return flow::near_return_word(context, inst),
            M::Jmp | M::Call => return flow::odd_jump(context, inst),
            M::Int | M::Int1 => return Err(self.interrupt(context, inst)),
            M::Xbegin | M::Xend | M::Xabort | M::Xtest => return flow::transaction(context, inst),

            // These are undefined in user mode, in 64-bit mode, or as long as the kernel has not
            // enabled their feature.
            M::Vmcall | M::Vmmcall | M::Vmgexit | M::Vmfunc | M::Tdcall | M::Sysenter => {
                return undefined(inst);
            }
            M::Incsspd | M::Incsspq | M::Saveprevssp | M::Rstorssp | M::Wrssd | M::Wrssq => {
                return undefined(inst);
            }
            M::Hreset | M::Pcommit => return undefined(inst),
            // The guest never gets the permission to use tile data (`arch_prctl`).
            M::Tilezero | M::Tileloadd | M::Tileloaddt1 | M::Tilestored => return undefined(inst),
            M::Tdpbssd | M::Tdpbsud | M::Tdpbusd | M::Tdpbuud => return undefined(inst),
            M::Tdpbf16ps | M::Tdpfp16ps | M::Tcmmimfp16ps | M::Tcmmrlfp16ps => {
                return undefined(inst);
            }
            _ => return Err(Refused::Unsupported),
        }
        Ok(next)
    }

    /// `int n` and `icebp`.
    fn interrupt(&mut self, context: &mut ThreadContext, inst: &Instruction) -> Refused {
        let next = inst.next_ip();
        let (vector, fault) = match inst.mnemonic() {
            M::Int1 => (1, flow::debug_trap(next)),
            _ => match inst.immediate8() {
                3 => (3, GuestFault::breakpoint()),
                4 => (4, flow::overflow_trap()),
                vector => (u64::from(vector), GuestFault::protection(u64::from(vector) << 3 | 2)),
            },
        };
        // These are traps: the guest continues behind the instruction.
        if matches!(vector, 1 | 3 | 4) {
            context.rip = next;
        }
        Refused::Fault(fault)
    }
}

fn undefined(inst: &Instruction) -> NextPc {
    Err(Refused::Fault(GuestFault::undefined(inst.ip())))
}

/// The address of memory operand `operand`.
fn address(context: &ThreadContext, inst: &Instruction, operand: u32) -> Result<u64, Refused> {
    let value = |register: Register, _: usize, _: usize| {
        Some(match register {
            Register::FS => context.fs_base,
            Register::GS => context.gs_base,
            r if r.is_segment_register() => 0,
            r if r.is_gpr() => read_register(context, r),
            _ => return None,
        })
    };
    inst.virtual_address(operand, 0, value).ok_or(Refused::Unsupported)
}

/// The value of a general register of 2, 4 or 8 bytes.
fn read_register(context: &ThreadContext, register: Register) -> u64 {
    truncate(context.gpr[register.full_register().number() & 15], register.size())
}

/// Writes a general register of 2, 4 or 8 bytes as the processor does: 4 bytes clear the upper
/// half.
fn write_register(context: &mut ThreadContext, register: Register, value: u64) {
    let slot = &mut context.gpr[register.full_register().number() & 15];
    *slot = match register.size() {
        2 => *slot & !0xffff | value & 0xffff,
        size => truncate(value, size),
    };
}

/// The low 2, 4 or 8 bytes of `value`.
fn truncate(value: u64, size: usize) -> u64 {
    match size {
        2 => value & 0xffff,
        4 => value & 0xffff_ffff,
        _ => value,
    }
}

/// Reads 2, 4 or 8 bytes of guest memory.
fn load(address: u64, size: usize) -> Result<u64, Refused> {
    // SAFETY: the guest computed the address.
    Ok(unsafe {
        match size {
            2 => memory::load::<u16>(address)?.into(),
            4 => memory::load::<u32>(address)?.into(),
            _ => memory::load::<u64>(address)?,
        }
    })
}

/// Writes 2, 4 or 8 bytes of guest memory. If a page was guarded because code was translated from
/// it, the store is made all the same.
fn store(address: u64, size: usize, value: u64) -> Result<(), Refused> {
    let crosses = page_down(address) != page_down(address.wrapping_add(size as u64 - 1));
    loop {
        // SAFETY: the guest computed the address.
        let done = unsafe {
            match size {
                2 => memory::store(address, value as u16),
                4 => memory::store(address, value as u32),
                _ => memory::store(address, value),
            }
        };
        let Err(fault) = done else { return Ok(()) };
        let fault_info = memory::last_fault();
        // A store within one page is made for the guest as a whole. A store that crosses pages is
        // repeated after its pages were opened.
        if !crosses
            && host::write_for_host(&fault_info, address, &value.to_le_bytes()[..size]) == size
        {
            return Ok(());
        }
        if !crosses || !host::opened_for_host(&fault_info) {
            return Err(Refused::from(fault));
        }
    }
}

/// Fails if the byte at `address` cannot be written; changes nothing.
fn probe_write(address: u64) -> Result<(), Refused> {
    // SAFETY: the guest computed the address.
    match unsafe { memory::probe_write(address) } {
        Err(fault) if !host::opened_for_host(&memory::last_fault()) => Err(Refused::from(fault)),
        _ => Ok(()),
    }
}

/// Pushes `size` bytes. The stack pointer does not change if the store faults.
fn push(context: &mut ThreadContext, size: usize, value: u64) -> Result<(), Refused> {
    let sp = context.gpr[4].wrapping_sub(size as u64);
    store(sp, size, value)?;
    context.gpr[4] = sp;
    Ok(())
}

/// The item number `index` above the stack pointer, where each item has `size` bytes.
fn peek(context: &ThreadContext, size: usize, index: usize) -> Result<u64, Refused> {
    load(context.gpr[4].wrapping_add((index * size) as u64), size)
}

/// The value of a register or memory operand of `size` bytes.
fn read_operand(
    context: &ThreadContext,
    inst: &Instruction,
    operand: u32,
    size: usize,
) -> Result<u64, Refused> {
    match inst.op_kind(operand) {
        OpKind::Register => Ok(truncate(read_register(context, inst.op_register(operand)), size)),
        _ => load(address(context, inst, operand)?, size),
    }
}

#[cfg(test)]
mod tests;
