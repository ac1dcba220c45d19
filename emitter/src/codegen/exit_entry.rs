//! Versions that begin in the state in which an exit leaves: the exit's record becomes the first
//! instructions of a version.
//!
//! The leaves of the record become entry parameters, each with a [`Location`]: a host register, a
//! spill slot or the flags. Its nodes become instructions. Every guest location that the record
//! names gets an SSA value.
//!
//! There are two uses. [`side_trace`] puts that before a version that was recorded from the exit's
//! target. [`stub`] puts it before a trace end, which makes a *resolved stub*: the moves from the
//! exit's state to canonical state.
//!
//! ```text
//! record: rax = slot 3, rbx = rcx + 1       b0(v0: i64 in slot 3, v1: i64 in rcx):
//!                                             v2 = add.i64 v1, 1
//!                                             (the side trace, with v0 for rax and v2 for rbx)
//! ```

use crate::record::{Location, Node, Record};
use dynasour_ir::{
    Anchor, AnchorId, Block, DeferredStore, Gpr, Inst, Loc, Op, Operand, Term, Ty, Value, Version,
};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// The state in which a fragment is entered: nothing set for canonical state.
#[derive(Clone, Debug, Default)]
pub(crate) struct EntryLocations {
    /// For each parameter of the entry block: its location, or none if it is at home.
    pub locations: Vec<Option<Location>>,
    /// Registers that hold the exit's values, not the guest's: bit n is register n.
    pub occupied: u16,
    /// Spill slots below this one hold the exit's values.
    pub first_slot: u32,
    /// Guest registers that the version never names, and the slots that their values stay in.
    pub saved: Vec<(u8, u16)>,
    /// Instructions that stand in the entry block before those of the version that was to be
    /// compiled.
    pub added: u32,
}

impl EntryLocations {
    /// Is the fragment entered in canonical state?
    pub fn is_canonical(&self) -> bool {
        self.locations.is_empty()
            && self.occupied == 0
            && self.first_slot == 0
            && self.saved.is_empty()
    }

    /// The registers of `saved`: bit n is register n.
    pub fn saved_registers(&self) -> u16 {
        self.saved.iter().fold(0, |set, (r, _)| set | 1 << r)
    }
}

/// The guest registers whose values an exit leaves in spill slots.
fn in_slots(record: &Record) -> impl Iterator<Item = (Loc, u16)> {
    record.locations.iter().filter_map(|(loc, n)| match (loc, &record.nodes[usize::from(*n)]) {
        (Loc::Gpr(g), Node::Leaf(Location::Slot(s), Ty::I64)) if *g != Gpr::RSP => Some((*loc, *s)),
        _ => None,
    })
}

/// A version under construction, and the operands that the record's nodes have become in it.
struct Prefix {
    version: Version,
    params: Vec<Value>,
    locations: Vec<Option<Location>>,
    insts: Vec<Inst>,
    by_place: FxHashMap<(u32, bool), Value>,
    nodes: Vec<Operand>,
    saved: Vec<(Loc, u16)>,
}

impl Prefix {
    fn new(version: Version, record: &Record, saved: Vec<(Loc, u16)>) -> Prefix {
        let mut p = Prefix {
            version,
            params: Vec::new(),
            locations: Vec::new(),
            insts: Vec::new(),
            by_place: FxHashMap::default(),
            nodes: Vec::with_capacity(record.nodes.len()),
            saved,
        };
        for node in &record.nodes {
            let operand = match node {
                Node::Const(c) => Operand::Const(*c),
                Node::Leaf(location, ty) => p.leaf(*location, *ty),
                Node::Op(op, ty, args) => {
                    let args: SmallVec<[Operand; 3]> =
                        args.iter().map(|a| p.nodes[usize::from(*a)]).collect();
                    let result = match op.signature().1 {
                        dynasour_ir::op::ResultTy::Is(t) => t,
                        _ => *ty,
                    };
                    p.push(*op, *ty, result, &args)
                }
            };
            p.nodes.push(operand);
        }
        p
    }

    fn push(&mut self, op: Op, ty: Ty, result: Ty, args: &[Operand]) -> Operand {
        let v = self.version.value(result);
        self.insts.push(Inst::new(op, ty, Some(v), args));
        v.into()
    }

    /// The value in a location: one parameter a location, narrower types by truncation.
    fn leaf(&mut self, location: Location, ty: Ty) -> Operand {
        let number = match location {
            Location::Reg(r) => u32::from(r),
            Location::Slot(s) => 1 << 16 | u32::from(s),
            Location::Operand(n) => 2 << 16 | u32::from(n),
            Location::Flags => 3 << 16,
            Location::Vector(r) => 4 << 16 | u32::from(r),
        };
        let flags = ty == Ty::Flags;
        let param = match self.by_place.get(&(number, flags)) {
            Some(v) => *v,
            None => {
                let v = self.version.value(if flags { Ty::Flags } else { Ty::I64 });
                self.by_place.insert((number, flags), v);
                self.params.push(v);
                self.locations.push(Some(location));
                v
            }
        };
        if flags || ty == Ty::I64 {
            param.into()
        } else {
            self.push(Op::Trunc, ty, ty, &[param.into()])
        }
    }

    fn node(&self, n: u16) -> Operand {
        self.nodes[usize::from(n)]
    }

    /// The exit's own state as an anchor.
    fn anchor(&self, record: &Record) -> Anchor {
        let named = record
            .locations
            .iter()
            .filter(|(l, _)| !self.saved.iter().any(|(saved, _)| saved == l));
        let mut varmap: Vec<(Loc, Operand)> = named.map(|(l, n)| (*l, self.node(*n))).collect();
        varmap.sort_by_key(|(l, _)| *l);
        let stores = record
            .stores
            .iter()
            .map(|s| DeferredStore { ty: s.ty, mem: s.mem, args: s.args.map(|n| self.node(n)) })
            .collect();
        Anchor {
            target: self.node(record.target),
            after: record.after,
            varmap,
            stores,
            via: None,
            passes: 0,
        }
    }

    /// Makes `params` and `locations` the entry of the version.
    fn finish(
        mut self,
        occupied: u16,
        first_slot: u32,
        body: Vec<Inst>,
    ) -> (Version, EntryLocations) {
        let added = self.insts.len() as u32;
        self.insts.extend(body);
        self.version.entry_locs.resize(self.params.len(), Loc::Df);
        let entry = &mut self.version.blocks[0];
        entry.params = self.params;
        entry.insts = self.insts;
        let saved = self.saved.iter().filter_map(|(l, s)| match l {
            Loc::Gpr(g) => Some((g.number() as u8, *s)),
            _ => None,
        });
        let saved = saved.collect();
        (
            self.version,
            EntryLocations { locations: self.locations, occupied, first_slot, saved, added },
        )
    }
}

/// The version that brings an exit's state into canonical state and ends at the exit's target. If
/// the target is computed and `only` is given, the stub goes on only if the target is `only`; else
/// it leaves in the exit's own state.
pub(crate) fn stub(
    region: u64,
    record: &Record,
    only: Option<u64>,
    occupied: u16,
    first_slot: u32,
) -> (Version, EntryLocations) {
    let mut p = Prefix::new(Version::new("stub", region), record, in_slots(record).collect());
    let mut anchor = p.anchor(record);
    if let Some(pc) = only {
        let target = std::mem::replace(&mut anchor.target, Operand::Const(pc));
        let other = p.version.anchor(Anchor { target, ..anchor.clone() });
        let is_meant = p.push(Op::Eq, Ty::I64, Ty::I1, &[target, Operand::Const(pc)]);
        let mut guard = Inst::new(Op::Assume, Ty::I1, None, &[is_meant]);
        guard.anchor = Some(other);
        p.insts.push(guard);
    }
    let end = p.version.anchor(anchor);
    p.version.blocks.push(Block { params: Vec::new(), insts: Vec::new(), term: Term::Exit(end) });
    p.finish(occupied, first_slot, Vec::new())
}

/// Makes `body`, whose entry is the guest state at an exit's target, start in the exit's own state.
pub(crate) fn side_trace(
    body: &Version,
    record: &Record,
    occupied: u16,
    first_slot: u32,
) -> (Version, EntryLocations) {
    // A guest register that the body neither reads nor writes stays in its slot.
    let mut used = vec![false; body.types.len()];
    let mut names = body.clone();
    names.for_each_operand(|o| {
        if let Operand::Value(v) = *o {
            used[v.index()] = true;
        }
    });
    let untouched = |loc: &Loc| {
        let read = body.blocks[0]
            .params
            .iter()
            .zip(&body.entry_locs)
            .any(|(p, l)| l == loc && used[p.index()]);
        !read && !body.anchors.iter().any(|a| a.varmap.iter().any(|(l, _)| l == loc))
    };
    let saved: Vec<(Loc, u16)> = in_slots(record).filter(|(loc, _)| untouched(loc)).collect();
    let mut p = Prefix::new(names, record, saved);
    let state: FxHashMap<Loc, Operand> =
        record.locations.iter().map(|(l, n)| (*l, p.node(*n))).collect();
    let mut replaced: FxHashMap<Value, Operand> = FxHashMap::default();
    let mut at_home = Vec::new();
    for (param, loc) in body.blocks[0].params.iter().zip(&body.entry_locs) {
        match state.get(loc) {
            Some(operand) => {
                replaced.insert(*param, *operand);
            }
            None => at_home.push((*param, *loc)),
        }
    }
    let own = p.anchor(record);
    p.version.for_each_operand(|o| {
        if let Operand::Value(v) = *o
            && let Some(r) = replaced.get(&v)
        {
            *o = *r;
        }
    });
    for anchor in &mut p.version.anchors {
        for (loc, operand) in &own.varmap {
            if !anchor.varmap.iter().any(|(l, _)| l == loc) {
                anchor.varmap.push((*loc, *operand));
            }
        }
        anchor.varmap.sort_by_key(|(l, _)| *l);
    }
    // Stores that the exit deferred are performed first; a fault there leaves with the exit's own
    // state.
    let stores = own.stores.clone();
    if !stores.is_empty() {
        let anchor: AnchorId = p.version.anchor(own);
        for s in stores {
            let mut store = Inst::new(Op::Store, s.ty, None, &s.args);
            store.mem = Some(s.mem);
            store.anchor = Some(anchor);
            p.insts.push(store);
        }
    }
    p.version.entry_locs = vec![Loc::Df; p.params.len()];
    for (param, loc) in at_home {
        p.params.push(param);
        p.locations.push(None);
        p.version.entry_locs.push(loc);
    }
    let rest = std::mem::take(&mut p.version.blocks[0].insts);
    p.finish(occupied, first_slot, rest)
}
