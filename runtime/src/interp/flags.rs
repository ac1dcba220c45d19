//! Arithmetic flags as the interpreter keeps them: as the operation that set them and its operands.
//! The bits are computed only when they are needed: for a condition, at a fault, at the end of a
//! run.
//!
//! Words: a *form* says how the six flags follow from up to three words. A *kind* is a form with
//! its operand width, packed in 16 bits. The *record* is four words in the thread context: a kind
//! and three words, from which the guest's flags follow at the end of each block.
//!
//! The frequent forms are computed here in a few host instructions. All others execute the real
//! instruction through [`ir::hostflags`](dynasour_ir::hostflags). A test compares the two.
//!
//! The functions are pure, except that [`shift_ignores_old`] caches what it learnt of the processor
//! in atomics. Any thread may call them without a lock.
//!
//! Example: `cmp eax, ecx` with eax = 5 and ecx = 7 records the kind of ([`Form::Sub`], i32) and
//! the words 5, 7 and 0. [`Kind::bits`] makes CF, SF and AF of them: 5 < 7, 5 - 7 is negative, and
//! bit 4 borrows.

use dynasour_ir::semantics::{AF, ARITH_FLAGS, CF, OF, PF, SF, ZF};
use dynasour_ir::{FlagOp, Ty, hostflags};
use std::sync::atomic::{AtomicU8, Ordering};

/// How flags follow from the words `a`, `b`, `c`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// `a` is the rflags image.
    Bits,
    /// An addition with result `a` and second operand `b`.
    AddResult,
    /// `a - b`.
    Sub,
    /// A subtraction with result `a` and second operand `b`.
    SubResult,
    /// And, or, xor with result `a`.
    Logic,
    /// An increment with result `a`; CF was `b`.
    Inc,
    /// A decrement with result `a`; CF was `b`.
    Dec,
    /// Executed by the host on operands `a`, `b`, `c`.
    Host(FlagOp),
}

/// A form and an operand type in 16 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kind(pub u16);

/// The number of the first form that the host executes, after those of the forms before it.
const FIRST_HOST: u16 = 7;

impl Kind {
    /// Packs `form` at width `ty` (i8 to i64; other types count as i64).
    pub fn new(form: Form, ty: Ty) -> Kind {
        let form = match form {
            Form::Bits => 0,
            Form::AddResult => 1,
            Form::Sub => 2,
            Form::SubResult => 3,
            Form::Logic => 4,
            Form::Inc => 5,
            Form::Dec => 6,
            Form::Host(op) => FIRST_HOST + op as u16,
        };
        let width = match ty {
            Ty::I8 => 0,
            Ty::I16 => 1,
            Ty::I32 => 2,
            _ => 3,
        };
        Kind(form << 2 | width)
    }

    /// The form.
    pub fn form(self) -> Form {
        match self.0 >> 2 {
            0 => Form::Bits,
            1 => Form::AddResult,
            2 => Form::Sub,
            3 => Form::SubResult,
            4 => Form::Logic,
            5 => Form::Inc,
            6 => Form::Dec,
            n => Form::Host(FlagOp::TABLE[(n - FIRST_HOST) as usize].0),
        }
    }

    /// The operand type.
    pub fn ty(self) -> Ty {
        [Ty::I8, Ty::I16, Ty::I32, Ty::I64][(self.0 & 3) as usize]
    }

    /// The six flags.
    pub fn bits(self, a: u64, b: u64, c: u64) -> u64 {
        let ty = self.ty();
        let cut = |v: u64| v & ty.mask();
        match self.form() {
            Form::Bits => a & ARITH_FLAGS,
            Form::AddResult => {
                let (r, b) = (cut(a), cut(b));
                let a = cut(r.wrapping_sub(b));
                carry(r < b) | af(a, b, r) | result(ty, r) | overflow(ty, (a ^ r) & (b ^ r))
            }
            Form::Sub => sub(ty, cut(a), cut(b)),
            Form::SubResult => sub(ty, cut(a.wrapping_add(b)), cut(b)),
            Form::Logic => result(ty, cut(a)),
            Form::Inc => {
                let r = cut(a);
                let top = 1 << (ty.bits() - 1);
                carry(b & 1 != 0)
                    | if r & 15 == 0 { AF } else { 0 }
                    | result(ty, r)
                    | if r == top { OF } else { 0 }
            }
            Form::Dec => {
                let r = cut(a);
                let max = ty.mask() >> 1;
                carry(b & 1 != 0)
                    | if r & 15 == 15 { AF } else { 0 }
                    | result(ty, r)
                    | if r == max { OF } else { 0 }
            }
            Form::Host(op) => {
                let words = [a, b, c];
                let mut args = [0; 3];
                for (i, arg) in op.args().iter().enumerate() {
                    args[i] = match *arg {
                        dynasour_ir::op::ArgTy::Same => words[i] & ty.mask(),
                        dynasour_ir::op::ArgTy::Is(t) => words[i] & t.mask(),
                    };
                }
                hostflags::flags(op, ty, &args[..op.args().len()])
            }
        }
    }
}

fn carry(set: bool) -> u64 {
    if set { CF } else { 0 }
}

fn af(a: u64, b: u64, r: u64) -> u64 {
    (a ^ b ^ r) & AF
}

fn overflow(ty: Ty, sign: u64) -> u64 {
    if sign >> (ty.bits() - 1) & 1 != 0 { OF } else { 0 }
}

/// ZF, SF and PF of a result that is already cut to its type.
fn result(ty: Ty, r: u64) -> u64 {
    let zf = if r == 0 { ZF } else { 0 };
    let sf = if r >> (ty.bits() - 1) & 1 != 0 { SF } else { 0 };
    let pf = if (r as u8).count_ones() & 1 == 0 { PF } else { 0 };
    zf | sf | pf
}

fn sub(ty: Ty, a: u64, b: u64) -> u64 {
    let r = a.wrapping_sub(b) & ty.mask();
    carry(a < b) | af(a, b, r) | result(ty, r) | overflow(ty, (a ^ b) & (a ^ r))
}

/// Are the flags after a shift by the constant `count` independent of the old flags on this
/// processor?
///
/// The architecture leaves AF undefined (and OF for counts above 1): a processor may keep the old
/// bits. The shift is therefore tried once for each operation, width and count, with 64 operands,
/// with all old flags clear and with all set.
pub fn shift_ignores_old(op: FlagOp, ty: Ty, count: u64) -> bool {
    /// By operation and width, then by count: 0 not tried, 1 independent, 2 not.
    static KNOWN: [[AtomicU8; 64]; 12] = [const { [const { AtomicU8::new(0) }; 64] }; 12];
    let row = match op {
        FlagOp::Shl => 0,
        FlagOp::Shr => 4,
        FlagOp::Sar => 8,
        _ => return false,
    };
    let width = (Kind::new(Form::Bits, ty).0 & 3) as usize;
    let count = count & if ty == Ty::I64 { 63 } else { 31 };
    let known = &KNOWN[row + width][count as usize];
    match known.load(Ordering::Relaxed) {
        0 => {
            let same = (0..64u64).all(|i| {
                let a = i.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(i as u32) & ty.mask();
                hostflags::flags(op, ty, &[a, count, 0])
                    == hostflags::flags(op, ty, &[a, count, ARITH_FLAGS])
            });
            known.store(if same { 1 } else { 2 }, Ordering::Relaxed);
            same
        }
        n => n == 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EDGES: [u64; 14] = [
        0,
        1,
        2,
        0xf,
        0x10,
        0x7f,
        0x80,
        0xff,
        0x7fff,
        0x8000,
        0x7fff_ffff,
        0x8000_0000,
        0x7fff_ffff_ffff_ffff,
        0x8000_0000_0000_0000,
    ];

    #[test]
    fn kinds_round_trip() {
        let forms = [
            Form::Bits,
            Form::AddResult,
            Form::Sub,
            Form::SubResult,
            Form::Logic,
            Form::Inc,
            Form::Dec,
        ];
        for form in forms.into_iter().chain(FlagOp::TABLE.iter().map(|t| Form::Host(t.0))) {
            for ty in [Ty::I8, Ty::I16, Ty::I32, Ty::I64] {
                let kind = Kind::new(form, ty);
                assert_eq!((kind.form(), kind.ty()), (form, ty));
            }
        }
    }

    #[test]
    fn cheap_forms_agree_with_the_processor() {
        let mut seed = 1u64;
        let mut random = || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            EDGES[(seed >> 60) as usize % EDGES.len()]
                ^ if seed >> 40 & 1 == 0 { 0 } else { seed.rotate_left(20) }
        };
        for _ in 0..20_000 {
            let (x, y) = (random(), random());
            for ty in [Ty::I8, Ty::I16, Ty::I32, Ty::I64] {
                let (a, b, m) = (x & ty.mask(), y & ty.mask(), ty.mask());
                let host = |op: FlagOp, args: &[u64]| hostflags::flags(op, ty, args);
                let ours = |form: Form, a: u64, b: u64| Kind::new(form, ty).bits(a, b, 0);
                assert_eq!(
                    ours(Form::AddResult, a.wrapping_add(b), b),
                    host(FlagOp::Add, &[a, b]),
                    "{ty} {a:x} {b:x}"
                );
                assert_eq!(ours(Form::Sub, x, y), host(FlagOp::Sub, &[a, b]), "{ty} {a:x} {b:x}");
                assert_eq!(
                    ours(Form::SubResult, a.wrapping_sub(b) & m, y),
                    host(FlagOp::Sub, &[a, b])
                );
                assert_eq!(ours(Form::Logic, x & y, 0), host(FlagOp::And, &[a, b]));
                assert_eq!(ours(Form::Logic, x | y, 0), host(FlagOp::Or, &[a, b]));
                assert_eq!(ours(Form::Logic, x ^ y, 0), host(FlagOp::Xor, &[a, b]));
                assert_eq!(
                    ours(Form::Inc, a.wrapping_add(1), y & 1),
                    host(FlagOp::Inc, &[a, y & 1])
                );
                assert_eq!(
                    ours(Form::Dec, a.wrapping_sub(1), y & 1),
                    host(FlagOp::Dec, &[a, y & 1])
                );
            }
        }
    }

    #[test]
    fn a_shift_by_zero_keeps_old_flags() {
        assert!(!shift_ignores_old(FlagOp::Shl, Ty::I32, 0));
        assert!(!shift_ignores_old(FlagOp::Sar, Ty::I64, 64));
        assert!(!shift_ignores_old(FlagOp::Rol, Ty::I32, 3));
    }
}
