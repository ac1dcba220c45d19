//! How the guest's state lies in the host's, as versions: what records and entries say, in the IR, so that a
//! proof executes it on symbols like all else ([`dynasour_ir::prove`]).
//!
//! A passage has one block. Its entry locations are the host's registers and flags; it loads spill slots from
//! the context, computes what the record's nodes compute, and ends with an anchor that names all of the guest's
//! registers. `tests` compare it with [`Record::apply`].
//!
//! **Data.** None but the version that is being made. **Callers.** [`super::LiftedCode`]; no lock.
//!
//! ```text
//! record    rax = op (add, slot 3, 8)      v17 = load.i64 [context + slot 3]; v18 = add.i64 v17, 8; exit [rax = v18, …]
//! ```

use super::CONTEXT;
use crate::record::{Location, Node, Record};
use dynasour_guest::context::offset;
use dynasour_ir::op::ResultTy;
use dynasour_ir::semantics::{ARITH_FLAGS, OF};
use dynasour_ir::version::DeferredStore;
use dynasour_ir::{Anchor, Block, FlagOp, Inst, Loc, Mem, Op, Operand, Term, Ty, Value, Version};

/// The address of a spill slot.
pub(super) fn slot(slot: u16) -> u64 {
    CONTEXT.start + (offset::SCRATCH + 8 * usize::from(slot)) as u64
}

/// A passage that is being made.
struct Passage {
    version: Version,
    insts: Vec<Inst>,
    /// The host's registers and flags.
    host: Vec<Value>,
}

impl Passage {
    fn new(region: u64) -> Passage {
        let mut version = Version::new("passage", region);
        let locs = (0..Loc::SSA_COUNT).map(Loc::from_ssa_index);
        let host = locs.clone().map(|loc| version.value(loc.ty())).collect();
        version.entry_locs = locs.collect();
        Passage { version, insts: Vec::new(), host }
    }

    fn inst(&mut self, op: Op, ty: Ty, args: &[Operand]) -> Operand {
        let result = match op.signature().1 {
            ResultTy::Is(ty) => ty,
            ResultTy::Same | ResultTy::None => ty,
        };
        let value = self.version.value(result);
        self.insts.push(Inst::new(op, ty, Some(value), args));
        Operand::Value(value)
    }

    /// A value in 64 bits, as records have it.
    fn widened(&mut self, operand: Operand) -> Operand {
        match operand {
            Operand::Value(value) => match self.version.ty(value) {
                ty @ (Ty::I1 | Ty::I8 | Ty::I16 | Ty::I32) => {
                    self.inst(Op::Zext(ty), Ty::I64, &[operand])
                }
                _ => operand,
            },
            Operand::Const(_) => operand,
        }
    }

    fn load(&mut self, address: u64) -> Operand {
        let args = [Operand::Const(address), Operand::Const(0)];
        let value = self.inst(Op::Load, Ty::I64, &args);
        if let Some(load) = self.insts.last_mut() {
            load.mem = Some(Mem::disp(0));
        }
        value
    }

    /// The word that a location holds.
    fn word(&mut self, location: Location) -> Operand {
        match location {
            Location::Reg(r) => Operand::Value(self.host[usize::from(r)]),
            Location::Slot(s) => self.load(slot(s)),
            Location::Flags => Operand::Value(self.host[Loc::SSA_COUNT - 1]),
            // `Record::finish` has replaced the operands.
            Location::Operand(_) | Location::Vector(_) => Operand::Const(0),
        }
    }

    /// The flags in their packed form as an image of rflags.
    fn unpacked(&mut self, packed: Operand) -> Operand {
        let high = self.inst(Op::Shr, Ty::I64, &[packed, Operand::Const(8)]);
        let low = self.inst(Op::And, Ty::I64, &[high, Operand::Const(ARITH_FLAGS & 0xff)]);
        let bit = self.inst(Op::And, Ty::I64, &[packed, Operand::Const(1)]);
        let overflow = Operand::Const(u64::from(OF.trailing_zeros()));
        let overflow = self.inst(Op::Shl, Ty::I64, &[bit, overflow]);
        self.inst(Op::Or, Ty::I64, &[low, overflow])
    }

    /// The value of a leaf.
    fn leaf(&mut self, location: Location, ty: Ty) -> Operand {
        let word = self.word(location);
        match (location, ty) {
            (Location::Flags, _) | (_, Ty::I64) => word,
            (_, Ty::Flags) => {
                let image = self.unpacked(word);
                self.inst(Op::Flags(FlagOp::FromBits), Ty::I64, &[image])
            }
            (_, ty) => self.inst(Op::Trunc, ty, &[word]),
        }
    }

    /// The values of a record's nodes.
    fn nodes(&mut self, record: &Record) -> Vec<Operand> {
        let mut values = Vec::with_capacity(record.nodes.len());
        for node in &record.nodes {
            let value = match node {
                Node::Const(c) => Operand::Const(*c),
                Node::Leaf(location, ty) => self.leaf(*location, *ty),
                Node::Op(op, ty, args) => {
                    let args: Vec<Operand> = args.iter().map(|a| values[usize::from(*a)]).collect();
                    self.inst(*op, *ty, &args)
                }
            };
            values.push(value);
        }
        values
    }

    /// What holds of the host's state where a record is: in a register a bit is a whole byte, and packed flags
    /// have no bits besides them.
    fn assume_leaves(&mut self, record: &Record) {
        for node in &record.nodes {
            let Node::Leaf(location @ (Location::Reg(_) | Location::Slot(_)), ty) = *node else {
                continue;
            };
            let word = self.word(location);
            let holds = match ty {
                Ty::I1 => {
                    let byte = self.inst(Op::Trunc, Ty::I8, &[word]);
                    let bit = self.inst(Op::Trunc, Ty::I1, &[word]);
                    let wide = self.inst(Op::Zext(Ty::I1), Ty::I8, &[bit]);
                    self.inst(Op::Eq, Ty::I8, &[byte, wide])
                }
                Ty::Flags => {
                    let low = ARITH_FLAGS & 0xff;
                    let packed = Operand::Const(low << 8 | 1);
                    let packed = self.inst(Op::And, Ty::I64, &[word, packed]);
                    self.inst(Op::Eq, Ty::I64, &[word, packed])
                }
                _ => continue,
            };
            self.insts.push(Inst::new(Op::Assume, Ty::I64, None, &[holds]));
        }
    }

    /// Ends with this target and these locations; the others are in place.
    fn end(
        mut self,
        target: Operand,
        named: &[(Loc, Operand)],
        stores: Vec<DeferredStore>,
    ) -> Version {
        let of = |i: usize| {
            let loc = Loc::from_ssa_index(i);
            let operand = named.iter().rev().find(|(l, _)| *l == loc).map(|(_, operand)| *operand);
            (loc, operand.unwrap_or(Operand::Value(self.host[i])))
        };
        let varmap = (0..Loc::SSA_COUNT).map(of).collect();
        let anchor = Anchor { stores, ..Anchor::new(target, varmap) };
        let anchor = self.version.anchor(anchor);
        let (params, insts) = (self.host, self.insts);
        self.version.blocks.push(Block { params, insts, term: Term::Exit(anchor) });
        self.version
    }
}

/// The guest's state that a record gives. Where it is the state at an entry, it is assumed that an exit has left
/// it.
pub(super) fn of_record(record: &Record, region: u64, at_entry: bool) -> Version {
    let mut passage = Passage::new(region);
    if at_entry {
        passage.assume_leaves(record);
    }
    let values = passage.nodes(record);
    let value = |node: u16| values[usize::from(node)];
    let named = record.locations.iter();
    let named: Vec<(Loc, Operand)> =
        named.map(|(loc, node)| (*loc, passage.widened(value(*node)))).collect();
    let stores = record.stores.iter();
    let stores =
        stores.map(|s| DeferredStore { ty: s.ty, mem: s.mem, args: s.args.map(value) }).collect();
    passage.end(value(record.target), &named, stores)
}

/// The guest's registers are the host's, and its pc is a number, or in the context.
pub(super) fn canonical(region: u64, pc: Option<u64>) -> Version {
    let mut passage = Passage::new(region);
    let pc = match pc {
        Some(pc) => Operand::Const(pc),
        None => passage.load(CONTEXT.start + offset::NEXT_PC as u64),
    };
    passage.end(pc, &[], Vec::new())
}
