//! The arithmetic flags that an instruction leaves, computed by executing it on the host processor.
//!
//! Some flags are architecturally undefined after shifts, multiplications and bit scans. Every
//! processor leaves a definite value in them, and a guest can read it. Executing the instruction
//! itself makes the evaluator and the interpreter agree with emitted code on the processor at hand.
//!
//! No data; the functions are pure, may be called from any thread and take no lock.
//!
//! ```text
//! flags(FlagOp::Sub, Ty::I32, &[5, 5])      executes `sub eax, edx` with 5 and 5: ZF is set
//! flags(FlagOp::Shl, Ty::I64, &[7, 0, CF])  executes `shl rax, cl` with a count of 0: CF is kept
//! ```

use crate::op::FlagOp;
use crate::types::Ty;
use std::arch::asm;
use std::sync::LazyLock;

/// Carry flag.
pub const CF: u64 = 1;
/// Parity flag.
pub const PF: u64 = 1 << 2;
/// Auxiliary carry flag.
pub const AF: u64 = 1 << 4;
/// Zero flag.
pub const ZF: u64 = 1 << 6;
/// Sign flag.
pub const SF: u64 = 1 << 7;
/// Overflow flag.
pub const OF: u64 = 1 << 11;
/// The six arithmetic flags.
pub const ARITH_FLAGS: u64 = CF | PF | AF | ZF | SF | OF;

/// Runs one instruction on a (rax), b (rdx) and a count (cl) with the arithmetic flags preset to
/// `old`.
macro_rules! run {
    ($old:expr, $a:expr, $b:expr, $instruction:expr) => {{
        let mut flags: u64 = $old & ARITH_FLAGS | 0x202;
        // SAFETY: balanced push and pop on our own stack; only the named registers and the flags
        // change, and the image put into rflags has only arithmetic flags and the always-on bits
        // set.
        unsafe {
            asm!("push {f}", "popfq", $instruction, "pushfq", "pop {f}", f = inout(reg) flags,
                inout("rax") $a => _, inout("rdx") $b => _, in("rcx") $b);
        }
        flags & ARITH_FLAGS
    }};
}

/// `mnemonic a, b` at the width of `$ty`.
macro_rules! two {
    ($mnemonic:literal, $ty:expr, $old:expr, $a:expr, $b:expr) => {
        match $ty {
            Ty::I8 => run!($old, $a, $b, concat!($mnemonic, " al, dl")),
            Ty::I16 => run!($old, $a, $b, concat!($mnemonic, " ax, dx")),
            Ty::I32 => run!($old, $a, $b, concat!($mnemonic, " eax, edx")),
            _ => run!($old, $a, $b, concat!($mnemonic, " rax, rdx")),
        }
    };
}

/// `mnemonic a` followed by `$tail` at the width of `$ty`.
macro_rules! one {
    ($mnemonic:literal, $tail:literal, $ty:expr, $old:expr, $a:expr, $b:expr) => {
        match $ty {
            Ty::I8 => run!($old, $a, $b, concat!($mnemonic, " al", $tail)),
            Ty::I16 => run!($old, $a, $b, concat!($mnemonic, " ax", $tail)),
            Ty::I32 => run!($old, $a, $b, concat!($mnemonic, " eax", $tail)),
            _ => run!($old, $a, $b, concat!($mnemonic, " rax", $tail)),
        }
    };
}

/// `mnemonic` on the second operand, for the widening multiplication.
macro_rules! widening {
    ($mnemonic:literal, $ty:expr, $old:expr, $a:expr, $b:expr) => {
        match $ty {
            Ty::I8 => run!($old, $a, $b, concat!($mnemonic, " dl")),
            Ty::I16 => run!($old, $a, $b, concat!($mnemonic, " dx")),
            Ty::I32 => run!($old, $a, $b, concat!($mnemonic, " edx")),
            _ => run!($old, $a, $b, concat!($mnemonic, " rdx")),
        }
    };
}

/// `mnemonic` that has no 8-bit form.
macro_rules! wide {
    ($mnemonic:literal, $ty:expr, $old:expr, $a:expr, $b:expr) => {
        match $ty {
            Ty::I8 | Ty::I16 => run!($old, $a, $b, concat!($mnemonic, " ax, dx")),
            Ty::I32 => run!($old, $a, $b, concat!($mnemonic, " eax, edx")),
            _ => run!($old, $a, $b, concat!($mnemonic, " rax, rdx")),
        }
    };
}

/// The six arithmetic flags (as an rflags image) that `op` leaves on operands `args`, laid out as
/// [`FlagOp::args`] says.
pub fn flags(op: FlagOp, ty: Ty, args: &[u64]) -> u64 {
    let a = args[0];
    let b = args.get(1).copied().unwrap_or(0);
    let old = op.old_operand().map_or(0, |i| args[i]);
    match op {
        FlagOp::Add => two!("add", ty, 0, a, b),
        FlagOp::Sub => two!("sub", ty, 0, a, b),
        FlagOp::Adc => two!("adc", ty, args[2] * CF, a, b),
        FlagOp::Sbb => two!("sbb", ty, args[2] * CF, a, b),
        FlagOp::And => two!("and", ty, 0, a, b),
        FlagOp::Or => two!("or", ty, 0, a, b),
        FlagOp::Xor => two!("xor", ty, 0, a, b),
        FlagOp::Inc => one!("inc", "", ty, old, a, 0u64),
        FlagOp::Dec => one!("dec", "", ty, old, a, 0u64),
        FlagOp::Shl => one!("shl", ", cl", ty, old, a, b),
        FlagOp::Shr => one!("shr", ", cl", ty, old, a, b),
        FlagOp::Sar => one!("sar", ", cl", ty, old, a, b),
        FlagOp::Rol => one!("rol", ", cl", ty, old, a, b),
        FlagOp::Ror => one!("ror", ", cl", ty, old, a, b),
        FlagOp::MulS if ty == Ty::I8 => widening!("imul", ty, old, a, b),
        FlagOp::MulS => wide!("imul", ty, old, a, b),
        FlagOp::MulU => widening!("mul", ty, old, a, b),
        FlagOp::Bt => wide!("bt", ty, old, a, b),
        FlagOp::Bsf => wide!("bsf", ty, old, 0u64, a),
        FlagOp::Bsr => wide!("bsr", ty, old, 0u64, a),
        FlagOp::Tzcnt => wide!("tzcnt", ty, old, 0u64, a),
        FlagOp::Lzcnt => wide!("lzcnt", ty, old, 0u64, a),
        FlagOp::Popcnt => wide!("popcnt", ty, 0, 0u64, a),
        FlagOp::FromBits => a & ARITH_FLAGS,
        FlagOp::SetCf => a & ARITH_FLAGS & !CF | b,
    }
}

/// Does a rotation of a register by an immediate above 1 leave all flags but CF unchanged on this
/// processor?
///
/// OF is undefined after such a rotation. [`FlagOp::Rol`] and [`FlagOp::Ror`] are rotations by cl.
/// On Intel's processors (measured on Sapphire Rapids) rotations by cl and rotations of memory
/// compute OF for every count, and rotations of a register by an immediate leave it.
pub fn immediate_rotations_keep_overflow() -> bool {
    static KEEP: LazyLock<bool> = LazyLock::new(|| {
        [0, OF].into_iter().all(|old| {
            let keeps = |a: u64| {
                [run!(old, a, 0u64, "rol al, 3"), run!(old, a, 0u64, "ror eax, 3")]
                    .map(|f| f & OF == old)
            };
            [0x01, 0x41, 0x91].into_iter().all(|a| keeps(a) == [true; 2])
        })
    });
    *KEEP
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn well_known_flags() {
        assert_eq!(flags(FlagOp::Sub, Ty::I32, &[5, 5]) & (ZF | CF | SF | OF), ZF);
        assert_eq!(flags(FlagOp::Sub, Ty::I8, &[0, 1]) & (ZF | CF | SF | OF), CF | SF);
        assert_eq!(flags(FlagOp::Add, Ty::I64, &[i64::MAX as u64, 1]) & (OF | SF | CF), OF | SF);
        assert_eq!(flags(FlagOp::Inc, Ty::I16, &[0xffff, CF]) & (CF | ZF | PF), CF | ZF | PF);
        assert_eq!(flags(FlagOp::Shl, Ty::I64, &[7, 0, CF | ZF]), CF | ZF);
        assert_eq!(flags(FlagOp::MulU, Ty::I32, &[0x8000_0000, 2, 0]) & (CF | OF), CF | OF);
    }

    #[test]
    fn rotations_by_immediates_are_of_one_kind() {
        for (a, old) in (0..=255u64).flat_map(|a| [0, OF, ARITH_FLAGS].map(|old| (a, old))) {
            let by_cl = flags(FlagOp::Rol, Ty::I8, &[a, 5, old]);
            let expected =
                if immediate_rotations_keep_overflow() { by_cl & !OF | old & OF } else { by_cl };
            assert_eq!(run!(old, a, 0u64, "rol al, 5"), expected, "{a:x} {old:x}");
            assert_eq!(run!(old, a, 0u64, "rol al, 1"), flags(FlagOp::Rol, Ty::I8, &[a, 1, old]));
        }
    }
}
