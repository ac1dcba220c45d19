//! Compact deopt records: how to rebuild the guest's state at an exit from the registers that a
//! fragment left.
//!
//! A record is a list of nodes in evaluation order. Leaves are host registers, spill slots and
//! constants; inner nodes are pure IR operations over earlier nodes. So a varmap value that the hot
//! code never computed is computed here. [`dynasour_ir::semantics`] alone defines the operations.
//!
//! Data: [`Record`], which its fragment owns. Invariants: a node refers to earlier nodes only;
//! after [`Record::finish`] no leaf is a [`Location::Operand`] or a [`Location::Vector`]. A thread that holds the emitter
//! applies a record to its own context.
//!
//! Example: the anchor says `rax = v3 + 8`, and v3 is in the host's rbx. The nodes are
//! `Leaf(Reg(3))`, `Const(8)` and `Op(add, [0, 1])`, and the location rax is node 2.

use crate::context_words;
use dynasour_guest::context::ThreadContext;
use dynasour_ir::semantics::{self, ARITH_FLAGS, OF};
use dynasour_ir::{Gpr, Loc, Mem, Op, Segment, Ty};
use smallvec::SmallVec;

/// Where a leaf's value is when the fragment is left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Location {
    /// Before allocation: an operand of the record's block.
    Operand(u16),
    /// A host register.
    Reg(u8),
    /// An XMM register. Records name none: what is in one at an exit is stored in a slot on the way out.
    Vector(u8),
    /// A spill slot: a word of `ThreadContext::scratch`.
    Slot(u16),
    /// The host's flags, which nothing has destroyed yet.
    Flags,
}

/// A node of a record.
#[derive(Clone, PartialEq, Debug)]
pub enum Node {
    /// A constant.
    Const(u64),
    /// A value of the given type; flags are in their packed form (see [`unpack_flags`]).
    Leaf(Location, Ty),
    /// An operation on earlier nodes.
    Op(Op, Ty, SmallVec<[u16; 3]>),
}

/// A deferred store in terms of nodes.
#[derive(Clone, PartialEq, Debug)]
pub struct RecordStore {
    /// Type of the stored value.
    pub ty: Ty,
    /// The address shape.
    pub mem: Mem,
    /// Nodes of base, index and value.
    pub args: [u16; 3],
}

/// How to rebuild the guest's state at one exit.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Record {
    /// In evaluation order.
    pub nodes: Vec<Node>,
    /// Node of the pc to continue at.
    pub target: u16,
    /// [`Anchor::after`](dynasour_ir::Anchor::after).
    pub after: Option<u64>,
    /// Guest location -> node. A location that is not named has its value in place.
    pub locations: Vec<(Loc, u16)>,
    /// Stores to perform, oldest first.
    pub stores: Vec<RecordStore>,
}

/// A store that the runtime is to perform, with its own fault handling.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PendingStore {
    /// Linear address.
    pub address: u64,
    /// 1, 2, 4 or 8 bytes.
    pub size: u32,
    /// The value, in the low bytes.
    pub value: u64,
}

/// The rflags image of packed flags. `lahf; seto al` leaves the packed form in ax.
pub const fn unpack_flags(packed: u64) -> u64 {
    ((packed >> 8) & (ARITH_FLAGS & 0xff)) | ((packed & 1) * OF)
}

/// The packed form of an rflags image.
pub const fn pack_flags(image: u64) -> u64 {
    ((image & ARITH_FLAGS & 0xff) << 8) | (image & OF != 0) as u64
}

impl Record {
    /// Evaluates the record on the registers in `ctx.raw` and the spill slots, and writes the
    /// guest's general registers, rflags and pc to `ctx`. Returns the deferred stores.
    pub fn apply(&self, ctx: &mut ThreadContext) -> SmallVec<[PendingStore; 4]> {
        let values = self.evaluate(ctx);
        let value = |n: u16| values[usize::from(n)];
        ctx.gpr = ctx.raw;
        ctx.rflags = ctx.raw_flags;
        for &(loc, node) in &self.locations {
            match loc {
                Loc::Gpr(g) => ctx.gpr[g.number()] = value(node),
                Loc::Flags => ctx.rflags = ctx.rflags & !ARITH_FLAGS | value(node) & ARITH_FLAGS,
                _ => {}
            }
        }
        ctx.rip = value(self.target);
        self.stores
            .iter()
            .map(|s| {
                if let Some(field) = context_words::field(s.mem.disp as u64) {
                    let address = ctx.this + field as u64;
                    return PendingStore { address, size: s.ty.bytes(), value: value(s.args[2]) };
                }
                let segment = match s.mem.seg {
                    None => 0,
                    Some(Segment::Fs) => ctx.fs_base,
                    Some(Segment::Gs) => ctx.gs_base,
                };
                let index = value(s.args[1]).wrapping_mul(u64::from(s.mem.scale));
                let offset = value(s.args[0]).wrapping_add(index).wrapping_add(s.mem.disp as u64);
                PendingStore {
                    address: segment.wrapping_add(offset),
                    size: s.ty.bytes(),
                    value: value(s.args[2]),
                }
            })
            .collect()
    }

    fn evaluate(&self, ctx: &ThreadContext) -> SmallVec<[u64; 48]> {
        let mut values: SmallVec<[u64; 48]> = SmallVec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let v = match node {
                Node::Const(c) => *c,
                Node::Leaf(Location::Flags, _) => ctx.raw_flags & ARITH_FLAGS,
                Node::Leaf(location, ty) => {
                    let raw = match *location {
                        Location::Reg(r) => ctx.raw[usize::from(r)],
                        Location::Slot(s) => ctx.scratch[usize::from(s)],
                        // `finish` has replaced the operands; no record names a vector register.
                        Location::Operand(_) | Location::Vector(_) | Location::Flags => 0,
                    };
                    if *ty == Ty::Flags { unpack_flags(raw) } else { raw & ty.mask() }
                }
                Node::Op(op, ty, args) => {
                    let args: SmallVec<[u64; 3]> =
                        args.iter().map(|a| values[usize::from(*a)]).collect();
                    semantics::eval(*op, *ty, &args)
                }
            };
            values.push(v);
        }
        values
    }

    /// A guest register's value is in a spill slot.
    pub fn add_saved(&mut self, g: Gpr, slot: u16) {
        self.nodes.push(Node::Leaf(Location::Slot(slot), Ty::I64));
        self.locations.push((Loc::Gpr(g), (self.nodes.len() - 1) as u16));
    }

    /// Replaces operands by the locations the allocator chose.
    pub fn finish(&mut self, location_of: impl Fn(u16) -> Location) {
        for node in &mut self.nodes {
            if let Node::Leaf(location, _) = node
                && let Location::Operand(n) = *location
            {
                *location = location_of(n);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_round_trips() {
        for bits in 0..64u64 {
            let image = (bits & 1)
                | (bits & 2) << 1
                | (bits & 4) << 2
                | (bits & 0x18) << 3
                | (bits & 0x20) << 6;
            assert_eq!(image & !ARITH_FLAGS, 0);
            assert_eq!(unpack_flags(pack_flags(image)), image);
        }
    }
}
