//! The alias oracle: may two accesses of one version touch the same bytes?
//!
//! Verifier and passes ask the same oracle (DESIGN section 4). It knows one rule: addresses that are the same
//! value plus different constants do not overlap when their ranges do not. Anything else is unknown: a stack slot
//! and a pointer are *not* assumed to be different.

use crate::op::Op;
use crate::reach::{Def, definitions};
use crate::types::{Operand, Ty, Value};
use crate::version::{Mem, Segment, Version};

/// An address as a root plus a constant: `seg:[root + index*scale + offset]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Location {
    /// The segment.
    pub segment: Option<Segment>,
    /// What is left of the base when constants are taken out of it.
    pub root: Option<Value>,
    /// The index and its scale, if it is not a constant.
    pub index: Option<(Value, u8)>,
    /// Every constant part, wrapping.
    pub offset: u64,
    /// Bytes accessed.
    pub size: u32,
}

/// How two locations lie to each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Overlap {
    /// No byte in common.
    Disjoint,
    /// The same bytes.
    Same,
    /// The second covers the first and more.
    Covered,
    /// At least one byte in common, none of the above.
    Partial,
    /// Nothing is known.
    Unknown,
}

/// The oracle for one version. Build it anew when the version's definitions change.
pub struct Oracle<'v> {
    version: &'v Version,
    defs: Vec<Option<Def>>,
}

impl<'v> Oracle<'v> {
    /// An oracle for `version`.
    pub fn new(version: &'v Version) -> Oracle<'v> {
        Oracle { version, defs: definitions(version) }
    }

    /// `v` as another value plus a constant, one step; `None` if it is not that.
    fn step(&self, v: Value) -> Option<(Option<Value>, u64)> {
        let Some(Def::Inst(place)) = self.defs.get(v.index()).copied().flatten() else { return None };
        let inst = &self.version.blocks[place.block.index()].insts[place.inst];
        if inst.ty != Ty::I64 {
            return None;
        }
        match (inst.op, inst.args.as_slice()) {
            (Op::Add, [Operand::Value(a), Operand::Const(c)] | [Operand::Const(c), Operand::Value(a)]) => {
                Some((Some(*a), *c))
            }
            (Op::Add, [Operand::Const(a), Operand::Const(b)]) => Some((None, a.wrapping_add(*b))),
            (Op::Sub, [Operand::Value(a), Operand::Const(c)]) => Some((Some(*a), c.wrapping_neg())),
            _ => None,
        }
    }

    /// An operand as a value plus a constant, as far as additions of constants go.
    pub fn root(&self, operand: Operand) -> (Option<Value>, u64) {
        let mut value = match operand {
            Operand::Const(c) => return (None, c),
            Operand::Value(v) => v,
        };
        let mut offset = 0u64;
        // Definitions of a verified version form no cycle; the bound is for versions that are not verified yet.
        for _ in 0..self.version.types.len() {
            match self.step(value) {
                Some((Some(next), c)) => {
                    offset = offset.wrapping_add(c);
                    value = next;
                }
                Some((None, c)) => return (None, offset.wrapping_add(c)),
                None => break,
            }
        }
        (Some(value), offset)
    }

    /// The location of an access of `size` bytes.
    pub fn location(&self, mem: &Mem, base: Operand, index: Operand, size: u32) -> Location {
        let (root, mut offset) = self.root(base);
        let (index_root, index_offset) = self.root(index);
        offset = offset.wrapping_add(mem.disp as u64);
        offset = offset.wrapping_add(index_offset.wrapping_mul(u64::from(mem.scale)));
        let mut location = Location { segment: mem.seg, root, index: index_root.map(|v| (v, mem.scale)), offset, size };
        // [x*1] and [x] are one address, and so are [x + y*1] and [y + x*1].
        if let Some((v, 1)) = location.index {
            match location.root {
                None => (location.root, location.index) = (Some(v), None),
                Some(root) if root > v => (location.root, location.index) = (Some(v), Some((root, 1))),
                Some(_) => {}
            }
        }
        location
    }
}

/// How `a` lies to `b`.
pub fn overlap(a: &Location, b: &Location) -> Overlap {
    if (a.segment, a.root, a.index) != (b.segment, b.root, b.index) {
        return Overlap::Unknown;
    }
    // Distances modulo 2^64: b's start seen from a, and a's start seen from b.
    let forward = b.offset.wrapping_sub(a.offset);
    let backward = a.offset.wrapping_sub(b.offset);
    let (a_size, b_size) = (u64::from(a.size), u64::from(b.size));
    if forward >= a_size && backward >= b_size {
        Overlap::Disjoint
    } else if forward == 0 && a_size == b_size {
        Overlap::Same
    } else if backward < b_size && backward + a_size <= b_size {
        Overlap::Covered
    } else {
        Overlap::Partial
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(offset: i64, size: u32) -> Location {
        Location { segment: None, root: Some(Value(0)), index: None, offset: offset as u64, size }
    }

    #[test]
    fn ranges() {
        assert_eq!(overlap(&at(-8, 8), &at(0, 8)), Overlap::Disjoint);
        assert_eq!(overlap(&at(0, 8), &at(-8, 8)), Overlap::Disjoint);
        assert_eq!(overlap(&at(0, 8), &at(0, 8)), Overlap::Same);
        assert_eq!(overlap(&at(4, 4), &at(0, 8)), Overlap::Covered);
        assert_eq!(overlap(&at(0, 4), &at(0, 8)), Overlap::Covered);
        assert_eq!(overlap(&at(0, 8), &at(4, 4)), Overlap::Partial);
        assert_eq!(overlap(&at(0, 8), &at(4, 8)), Overlap::Partial);
        assert_eq!(overlap(&at(-4, 8), &at(0, 8)), Overlap::Partial);
        let other = Location { root: Some(Value(1)), ..at(0, 8) };
        assert_eq!(overlap(&at(0, 8), &other), Overlap::Unknown);
    }
}
