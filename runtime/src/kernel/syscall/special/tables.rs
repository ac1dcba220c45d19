//! `sgdt`, `sidt`, `sldt`, `str`, `smsw`: they store the addresses of descriptor tables and the
//! contents of some of the kernel's registers.
//!
//! On a processor with UMIP the instructions are privileged. The kernel then emulates them with
//! values of its own or refuses them, depending on its version (Linux,
//! `arch/x86/kernel/umip.c`). On other processors they execute. How many bytes of a register they
//! write differs, too. So the translator executes the same instruction on a host register that
//! has the guest's value.
//!
//! No data, no lock: see [`super`].
//!
//! Example: `sldt ax` with 0x1122 in eax executes `sldt` on a host register that holds 0x1122, and
//! the guest's rax becomes the result. If the instruction faults, the guest gets the fault.

use std::arch::asm;

use dynasour_guest::ThreadContext;
use iced_x86::{Instruction, Mnemonic as M, OpKind};

use super::{Refused, address, read_register, store, write_register};
use crate::memory::{Fault, fixup_entry};

/// The bytes that `sgdt` and `sidt` store: a limit of 2 bytes and an address of 8.
const POINTER: usize = 10;

/// Runs an instruction on a register that holds `$value`.
macro_rules! on_register {
    ($instruction:literal, $value:expr) => {{
        let mut value: u64 = $value;
        let failed: u32;
        // SAFETY: the instruction changes the register only. If it faults, execution continues at
        // label 3, where `failed` is still 1.
        unsafe {
            asm!(
                "mov {failed:e}, 1",
                concat!("2: ", $instruction),
                "mov {failed:e}, 0",
                "3:",
                fixup_entry!(),
                value = inout(reg) value,
                failed = out(reg) failed,
                options(nostack)
            );
        }
        if failed == 0 { Ok(value) } else { Err(Fault) }
    }};
}

/// Runs an instruction that stores a pointer to a table.
macro_rules! pointer {
    ($instruction:literal) => {{
        let mut pointer = [0u8; POINTER];
        let failed: u32;
        // SAFETY: the instruction writes the array only. If it faults, execution continues at label
        // 3, where `failed` is still 1.
        unsafe {
            asm!(
                "mov {failed:e}, 1",
                concat!("2: ", $instruction),
                "mov {failed:e}, 0",
                "3:",
                fixup_entry!(),
                to = in(reg) pointer.as_mut_ptr(),
                failed = out(reg) failed,
                options(nostack)
            );
        }
        if failed == 0 { Ok(pointer) } else { Err(Fault) }
    }};
}

/// The value of a register after `sldt`, `str` or `smsw` with a register operand of `size` bytes;
/// `before` is its value before the instruction.
fn register_after(mnemonic: M, size: usize, before: u64) -> Result<u64, Fault> {
    match (mnemonic, size) {
        (M::Sldt, 2) => on_register!("sldt {value:x}", before),
        (M::Sldt, 4) => on_register!("sldt {value:e}", before),
        // The assembler leaves out the REX.W prefix of `sldt` and `str`.
        (M::Sldt, _) => on_register!("rex64 sldt {value:e}", before),
        (M::Str, 2) => on_register!("str {value:x}", before),
        (M::Str, 4) => on_register!("str {value:e}", before),
        (M::Str, _) => on_register!("rex64 str {value:e}", before),
        (_, 2) => on_register!("smsw {value:x}", before),
        (_, 4) => on_register!("smsw {value:e}", before),
        (_, _) => on_register!("smsw {value:r}", before),
    }
}

/// Executes one of the six instructions of this module.
pub(super) fn execute(context: &mut ThreadContext, inst: &Instruction) -> Result<(), Refused> {
    let mnemonic = inst.mnemonic();
    if matches!(mnemonic, M::Sgdt | M::Sidt) {
        let to = address(context, inst, 0)?;
        let pointer =
            if mnemonic == M::Sgdt { pointer!("sgdt [{to}]") } else { pointer!("sidt [{to}]") }?;
        let (limit, base) = pointer.split_at(2);
        store(to, 2, u64::from(u16::from_le_bytes([limit[0], limit[1]])))?;
        let base = base.iter().rev().fold(0, |base, byte| base << 8 | u64::from(*byte));
        return store(to.wrapping_add(2), 8, base);
    }
    match inst.op_kind(0) {
        OpKind::Register => {
            let register = inst.op0_register();
            let whole = register.full_register();
            let after = register_after(mnemonic, register.size(), read_register(context, whole))?;
            write_register(context, whole, after);
            Ok(())
        }
        _ => store(address(context, inst, 0)?, 2, register_after(mnemonic, 2, 0)?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test executes the instructions natively; a kernel that refuses them is right, too.
    #[test]
    fn a_word_is_written_as_one() {
        for mnemonic in [M::Sldt, M::Str, M::Smsw] {
            let before = 0x1122_3344_5566_7788;
            let word = register_after(mnemonic, 2, before).map(|after| after & !0xffff);
            assert!(matches!(word, Ok(0x1122_3344_5566_0000) | Err(Fault)), "{mnemonic:?}");
        }
    }
}
