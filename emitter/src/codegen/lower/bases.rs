//! Registers shared between constants that are near each other.
//!
//! A constant of more than 32 bits takes an instruction of ten bytes wherever it is used, also as an
//! address. The loop of an interpreted program has hundreds: the addresses of the program's
//! instructions and of the interpreter's variables. Most lie within 2 GiB of each other. So one of
//! them is put into a register at entry, a *base*; addresses become a displacement from it, and other
//! uses a `lea`.
//!
//! ```text
//! mov rax, 0x566000040980         lea rax, [r12 + 0x406e0]        r12 = 0x5660000002a0
//! mov rcx, 0x5660000002a8
//! cmp [rcx], rax                  cmp [r12 + 8], rax
//! ```
//!
//! Data: [`Bases`], part of the selector; one per compilation. Invariant: a base's register is
//! defined before everything else that the version computes.

use dynasour_ir::{Op, Ty, Version};
use regalloc2::VReg;
use rustc_hash::FxHashMap;

/// Uses of constants that a base must serve (guess: fewer save less than a register is worth).
const LEAST_USES: usize = 6;
/// Most bases of a version (guess: each takes a register).
const MOST: usize = 2;
/// Constants of one base span less than this, so that the distance of any two has 32 bits.
const SPAN: u64 = 1 << 31;

/// A constant in a register.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Base {
    pub constant: u64,
    /// None until it is used.
    pub register: Option<VReg>,
}

/// The bases of a version.
#[derive(Debug, Default)]
pub(crate) struct Bases(Vec<Base>);

impl Bases {
    /// Chooses them.
    pub fn of(v: &Version) -> Bases {
        let mut uses = uses(v);
        let mut bases = Vec::new();
        while bases.len() < MOST {
            let Some((window, constant)) = best_window(&uses) else { break };
            bases.push(Base { constant, register: None });
            uses.drain(window);
        }
        Bases(bases)
    }

    /// The base from which a constant has a distance of 32 bits, and that distance.
    pub fn near(&mut self, constant: u64) -> Option<(&mut Base, i32)> {
        self.0.iter_mut().find_map(|base| {
            let distance = i32::try_from(constant.wrapping_sub(base.constant) as i64).ok()?;
            Some((base, distance))
        })
    }

    /// Those that are used.
    pub fn used(&self) -> impl Iterator<Item = (u64, VReg)> + '_ {
        self.0.iter().filter_map(|base| Some((base.constant, base.register?)))
    }
}

/// Does it take a register to use this constant?
pub(crate) fn is_wide(constant: u64) -> bool {
    i32::try_from(constant as i64).is_err() && u32::try_from(constant).is_err()
}

/// The wide constants that hot code uses, sorted, each as often as it is used.
fn uses(v: &Version) -> Vec<u64> {
    let mut uses = Vec::new();
    for inst in v.blocks.iter().flat_map(|b| &b.insts) {
        let constants = inst.args.iter().map(|a| a.as_const());
        match inst.mem {
            // Base and index come first.
            Some(mem) => {
                let base = constants.clone().next().flatten().unwrap_or(0);
                uses.push(base.wrapping_add(mem.disp as u64));
                uses.extend(constants.skip(2).flatten());
            }
            // What is added may be subtracted instead.
            None if inst.op == Op::Add && inst.ty == Ty::I64 => {
                let subtracted = |c: u64| if (c as i64) < 0 { c.wrapping_neg() } else { c };
                uses.extend(constants.flatten().map(subtracted));
            }
            None if inst.ty == Ty::I64 => uses.extend(constants.flatten()),
            None => {}
        }
    }
    uses.retain(|c| is_wide(*c));
    uses.sort_unstable();
    uses
}

/// The longest part of a sorted list that spans less than [`SPAN`], and the constant that it has
/// most often. None if there are too few.
fn best_window(uses: &[u64]) -> Option<(std::ops::Range<usize>, u64)> {
    let mut best = 0..0;
    let mut from = 0;
    for (i, c) in uses.iter().enumerate() {
        while c - uses[from] >= SPAN {
            from += 1;
        }
        if i + 1 - from > best.len() {
            best = from..i + 1;
        }
    }
    if best.len() < LEAST_USES {
        return None;
    }
    let mut counts: FxHashMap<u64, usize> = FxHashMap::default();
    uses[best.clone()].iter().for_each(|c| *counts.entry(*c).or_default() += 1);
    // Of equally frequent ones the lowest, so that the choice does not depend on the table's order.
    let most = counts.into_iter().max_by_key(|(c, n)| (*n, std::cmp::Reverse(*c)))?.0;
    Some((best, most))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_group_has_its_most_frequent_constant_as_base() {
        let heap = 0x5660_0000_0000;
        let mut uses: Vec<u64> = (0..6).map(|i| heap + 64 * i).collect();
        uses.extend([heap + 128; 3]);
        uses.extend([0x7f00_0000_0000; 5]);
        uses.sort_unstable();
        assert_eq!(best_window(&uses), Some((0..9, heap + 128)));
        assert_eq!(best_window(&uses[9..]), None, "too few");
        let far = [0, SPAN, 2 * SPAN, 3 * SPAN, 4 * SPAN, 5 * SPAN].map(|c| heap + c);
        assert_eq!(best_window(&far), None, "too far from each other");
    }

    #[test]
    fn distances_have_32_bits() {
        let base = Base { constant: 0x5660_0000_0000, register: None };
        let mut bases = Bases(vec![base]);
        let mut distance = |c| bases.near(c).map(|(_, d)| d);
        assert_eq!(distance(0x5660_0000_0010), Some(16));
        assert_eq!(distance(0x565f_ffff_fff0), Some(-16));
        assert_eq!(distance(0x5660_8000_0000), None);
    }
}
