//! What selection must know of a version before it begins: definitions, uses, and which registers
//! and values records need.
//!
//! Selection walks a version backwards and decides at each instruction by what later code needs. A
//! [`Survey`] holds the facts that such a walk cannot find out on its way. They do not change while
//! it selects.

use crate::codegen::exit_entry::EntryLocations;
use crate::codegen::lower::LowerError;
use crate::codegen::lower::vectors::takes_vector;
use crate::record::Location;
use dynasour_ir::reach::ends_reach;
use dynasour_ir::{BlockId, Gpr, Inst, Loc, Op, Operand, Split, Term, Ty, Value, Version};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// Where a value is defined.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Def {
    /// Parameter `n` of a block.
    Param(u32, u32),
    /// A result of an instruction: block, index.
    Inst(u32, u32),
    /// Nowhere.
    None,
}

/// A value whose recomputation in a record takes more nodes than this is computed in the hot code
/// instead (guess; too high makes deoptimisation slow, too low makes hot code slow).
const MAX_TREE: u32 = 32;

/// The facts about one version and the state in which it is entered.
pub(crate) struct Survey<'a> {
    v: &'a Version,
    entry_locations: &'a EntryLocations,
    pub defs: Vec<Def>,
    /// Uses by instructions and terminators.
    pub hot_uses: Vec<u32>,
    /// By value: it is a leaf of some record, so it must have a location.
    pub leaf: Vec<bool>,
    /// By value: the hot code must compute it although only records use it.
    pub forced: Vec<bool>,
    /// For a block parameter that is always passed the same register as an earlier one: that one.
    pub same_param: Vec<Option<Value>>,
    /// `a` -> `(d, c)` where `d = a + c`.
    pub increments: FxHashMap<Value, (Value, u64)>,
    /// For each block: how many memory instructions and natives precede each position.
    pub memory_before: Vec<Vec<u32>>,
    /// For each block: the first instruction that ends the reach of anchors.
    pub first_effect: Vec<Option<u32>>,
    /// For each block: is there such an instruction on every way from the entry to its start?
    pub effect_before: Vec<bool>,
    /// For each block: how many edges lead to it.
    ways_in: Vec<u32>,
    /// Pure values by operation, for conditions that an existing result answers.
    pub available: FxHashMap<(Op, Ty, SmallVec<[Operand; 3]>), Value>,
    /// Guest registers with a location of their own in this fragment: bit n.
    pub touched: u16,
    /// The flags are written by no varmap but destroyed by emitted code, so they are kept from
    /// entry.
    pub keep_flags: bool,
    /// Does it read or write vector, mask, x87 state or MXCSR?
    pub uses_vector: bool,
    /// By value: it lives in an XMM register.
    pub in_vector: Vec<bool>,
    /// XMM registers that no native uses: bit n is register n.
    pub free_vectors: u16,
}

impl<'a> Survey<'a> {
    /// Looks at a version that is entered in this state.
    pub fn of(
        v: &'a Version,
        entry_locations: &'a EntryLocations,
    ) -> Result<Survey<'a>, LowerError> {
        let n = v.types.len();
        if let Some(ty) = v.types.iter().find(|t| matches!(t, Ty::V128 | Ty::V256 | Ty::V512)) {
            return Err(LowerError::Unsupported(format!("values of type {ty}")));
        }
        let entry = v.blocks.first().ok_or_else(|| LowerError::Malformed("no blocks".into()))?;
        if entry.params.len() != v.entry_locs.len() {
            return Err(LowerError::Malformed(
                "entry parameters and entry locations differ in number".into(),
            ));
        }
        let mut survey = Survey {
            v,
            entry_locations,
            defs: vec![Def::None; n],
            hot_uses: vec![0; n],
            leaf: vec![false; n],
            forced: vec![false; n],
            same_param: vec![None; n],
            increments: FxHashMap::default(),
            memory_before: Vec::with_capacity(v.blocks.len()),
            first_effect: v
                .blocks
                .iter()
                .map(|b| Some(b.insts.iter().position(|i| ends_reach(v, i))? as u32))
                .collect(),
            effect_before: Vec::with_capacity(v.blocks.len()),
            ways_in: vec![0; v.blocks.len()],
            available: FxHashMap::default(),
            touched: entry_locations.occupied & !entry_locations.saved_registers(),
            keep_flags: false,
            uses_vector: false,
            in_vector: vec![false; n],
            free_vectors: 0,
        };
        survey.survey()?;
        survey.follow_edges()?;
        survey.choose_classes();
        survey.share_params();
        Ok(survey)
    }

    /// Finds definitions, counts uses, and decides which registers and values the records need.
    fn survey(&mut self) -> Result<(), LowerError> {
        let v = self.v;
        let saved = self.entry_locations.saved_registers();
        let mut clobbers_flags = false;
        let mut flags_written = false;
        for (b, block) in v.blocks.iter().enumerate() {
            for (i, p) in block.params.iter().enumerate() {
                self.defs[p.index()] = Def::Param(b as u32, i as u32);
            }
            let mut memory = Vec::with_capacity(block.insts.len() + 1);
            let mut count = 0;
            for (i, inst) in block.insts.iter().enumerate() {
                memory.push(count);
                count += u32::from(matches!(inst.op, Op::Load | Op::Store | Op::Native));
                for d in &inst.defs {
                    self.defs[d.index()] = Def::Inst(b as u32, i as u32);
                }
                for a in inst.args.iter().filter_map(|a| a.as_value()) {
                    self.hot_uses[a.index()] += 1;
                }
                if let (Op::Add, Ty::I64, Some(d)) = (inst.op, inst.ty, inst.def())
                    && let (Operand::Value(a), Operand::Const(c)) = (inst.args[0], inst.args[1])
                {
                    self.increments.insert(a, (d, c));
                }
                if let Some(d) = inst.def()
                    && matches!(
                        inst.op,
                        Op::Add
                            | Op::And
                            | Op::Or
                            | Op::Xor
                            | Op::Sub
                            | Op::Shl
                            | Op::Shr
                            | Op::Sar
                    )
                {
                    self.available.entry((inst.op, inst.ty, inst.args.clone())).or_insert(d);
                }
                clobbers_flags |= match inst.op {
                    Op::Load | Op::Store | Op::Poll | Op::Zext(_) => false,
                    Op::Trunc => inst.ty == Ty::I1,
                    _ => true,
                };
                if let Some(n) = inst.native {
                    let native = &v.natives[n.index()];
                    // A register that stands in for rsp may be one whose guest value waits in a
                    // slot.
                    for g in native.gpr_in.iter().chain(&native.gpr_out) {
                        self.touched |= 1 << g.number() & !saved;
                    }
                    self.uses_vector |= native
                        .effects
                        .intersects(dynasour_ir::Effects::STATE | dynasour_ir::Effects::READ_STATE)
                        || native.vec_read | native.vec_write != 0;
                }
            }
            memory.push(count);
            self.memory_before.push(memory);
            for a in Version::term_operands(&block.term).iter().filter_map(|a| a.as_value()) {
                self.hot_uses[a.index()] += 1;
            }
        }
        for (loc, _) in v.anchors.iter().flat_map(|a| &a.varmap) {
            match loc {
                Loc::Gpr(g) => self.touched |= 1 << g.number(),
                Loc::Flags => flags_written = true,
                other => {
                    return Err(LowerError::Unsupported(format!("a varmap that names {other}")));
                }
            }
        }
        self.force_large_trees();
        self.mark_leaves();
        for (n, p) in v.blocks[0].params.iter().enumerate() {
            let Some(loc) = self.entry_loc(n) else { continue };
            let used = self.hot_uses[p.index()] > 0 || self.leaf[p.index()];
            match loc {
                Loc::Gpr(g) => self.touched |= u16::from(used) << g.number(),
                Loc::Flags => {}
                other => {
                    return Err(LowerError::Unsupported(format!("an entry parameter for {other}")));
                }
            }
        }
        self.keep_flags = clobbers_flags && !flags_written;
        Ok(())
    }

    /// Decides which values live in XMM registers: what natives store, loads and moves for natives alone, and
    /// parameters that are passed such values, or used by natives alone.
    fn choose_classes(&mut self) {
        let v = self.v;
        let has_values = v.natives.iter().any(|n| n.split != Split::No);
        let Some(free) = v.free_sse_registers().filter(|_| has_values) else { return };
        self.free_vectors = free;
        let (mut general, mut wanted) = (vec![false; v.types.len()], vec![false; v.types.len()]);
        for inst in v.blocks.iter().flat_map(|b| &b.insts) {
            for (n, arg) in inst.args.iter().enumerate() {
                let Some(arg) = arg.as_value() else { continue };
                match takes_vector(inst, n, &v.natives) {
                    true => wanted[arg.index()] |= inst.op == Op::Native,
                    false => general[arg.index()] = true,
                }
            }
            let native = inst.native.map(|n| &v.natives[n.index()]);
            if native.is_some_and(|n| n.split == Split::Stored)
                && let Some(d) = inst.def()
            {
                self.in_vector[d.index()] = true;
            }
        }
        for inst in v.blocks.iter().flat_map(|b| &b.insts) {
            let native = inst.native.map(|n| &v.natives[n.index()]);
            let moves = native.is_some_and(|n| n.register_move() == Some(Split::Stored));
            let Some(d) = inst.def().filter(|_| moves || inst.op == Op::Load) else { continue };
            let has_size = matches!(inst.ty, Ty::I32 | Ty::I64);
            self.in_vector[d.index()] = has_size && wanted[d.index()] && !general[d.index()];
        }
        // Each round reaches one block further.
        for _ in 0..v.blocks.len() {
            for (to, args) in v.blocks.iter().flat_map(|b| b.term.edges()) {
                for (param, arg) in v.blocks[to.index()].params.iter().zip(args) {
                    let is_passed = arg.as_value().is_some_and(|a| self.in_vector[a.index()]);
                    let has_size = matches!(v.ty(*param), Ty::I32 | Ty::I64);
                    self.in_vector[param.index()] |=
                        has_size && !general[param.index()] && (is_passed || wanted[param.index()]);
                }
            }
        }
    }

    /// Looks at the ways between blocks.
    fn follow_edges(&mut self) -> Result<(), LowerError> {
        let v = self.v;
        // Edges to earlier blocks close loops, whose effects come after those of the way in.
        let mut without = vec![false; v.blocks.len()];
        if let Some(entry) = without.first_mut() {
            *entry = true;
        }
        for (b, block) in v.blocks.iter().enumerate() {
            let has_effect = !without[b] || self.first_effect[b].is_some();
            self.effect_before.push(!without[b]);
            for (to, _) in block.term.edges() {
                let Some(ways) = self.ways_in.get_mut(to.index()) else {
                    return Err(LowerError::Malformed(format!("an edge to {to}")));
                };
                *ways += 1;
                without[to.index()] |= to.index() > b && !has_effect;
            }
        }
        Ok(())
    }

    /// How many edges lead to a block.
    pub fn ways_in(&self, block: BlockId) -> u32 {
        self.ways_in.get(block.index()).copied().unwrap_or(0)
    }

    /// Finds the values that would take a record too many nodes. What hot code needs is likely to
    /// have a register.
    fn force_large_trees(&mut self) {
        let v = self.v;
        let mut needed = vec![false; v.types.len()];
        for block in v.blocks.iter().rev() {
            for a in Version::term_operands(&block.term).iter().filter_map(|a| a.as_value()) {
                needed[a.index()] = true;
            }
            for inst in block.insts.iter().rev() {
                if !inst.op.is_pure() || inst.def().is_some_and(|d| needed[d.index()]) {
                    inst.args
                        .iter()
                        .filter_map(|a| a.as_value())
                        .for_each(|a| needed[a.index()] = true);
                }
            }
        }
        let mut size = vec![1u32; v.types.len()];
        for inst in v.blocks.iter().flat_map(|b| &b.insts).filter(|i| i.op.is_pure()) {
            let Some(d) = inst.def().filter(|d| !needed[d.index()]) else { continue };
            let tree = 1 + inst
                .args
                .iter()
                .map(|a| a.as_value().map_or(1, |a| size[a.index()]))
                .sum::<u32>();
            self.forced[d.index()] = tree > MAX_TREE;
            size[d.index()] = if tree > MAX_TREE { 1 } else { tree };
        }
    }

    /// Finds parameters that are equal in every register bit, such as an i32 and its zero
    /// extension.
    fn share_params(&mut self) {
        let v = self.v;
        for (b, block) in v.blocks.iter().enumerate().skip(1) {
            let edges: SmallVec<[&[Operand]; 2]> = v
                .blocks
                .iter()
                .filter_map(|from| match &from.term {
                    Term::Jump { to, args } if to.index() == b => Some(&args[..]),
                    _ => None,
                })
                .collect();
            for (j, param) in block.params.iter().enumerate() {
                let same = |i: &usize| {
                    let [one, other] =
                        [block.params[*i], *param].map(|p| (self.in_vector[p.index()], v.ty(p)));
                    (one == other || !one.0 && !other.0)
                        && edges.iter().all(|args| self.resolve(args[*i]) == self.resolve(args[j]))
                };
                self.same_param[param.index()] = (0..j).find(same).map(|i| block.params[i]);
            }
        }
    }

    /// Marks what records read without being able to recompute it.
    fn mark_leaves(&mut self) {
        let v = self.v;
        let mut seen = vec![false; v.types.len()];
        let mut work: Vec<Value> =
            v.anchors.iter().flat_map(|a| a.operands()).filter_map(|o| o.as_value()).collect();
        while let Some(value) = work.pop() {
            if std::mem::replace(&mut seen[value.index()], true) {
                continue;
            }
            match self.inst_of(value) {
                Some(inst) if inst.op.is_pure() && !self.forced[value.index()] => {
                    work.extend(inst.args.iter().filter_map(|a| a.as_value()));
                }
                _ => self.leaf[value.index()] = true,
            }
        }
        // A forced value that no record reaches need not be computed for one.
        for (i, seen) in seen.iter().enumerate() {
            self.forced[i] &= *seen;
        }
    }

    /// The instruction that defines a value, if one does.
    pub fn inst_of(&self, v: Value) -> Option<&'a Inst> {
        match self.defs[v.index()] {
            Def::Inst(b, i) => Some(&self.v.blocks[b as usize].insts[i as usize]),
            _ => None,
        }
    }

    /// The guest location that an entry parameter is, unless it is a value that an exit left
    /// somewhere.
    pub fn entry_loc(&self, n: usize) -> Option<Loc> {
        match self.entry_locations.locations.get(n) {
            Some(Some(_)) => None,
            _ => self.v.entry_locs.get(n).copied(),
        }
    }

    /// The entry parameter that is the flags in the host's flags.
    pub fn flags_param(&self) -> Option<Value> {
        let n = (0..self.v.entry_locs.len()).find(|n| {
            match self.entry_locations.locations.get(*n) {
                Some(Some(location)) => *location == Location::Flags,
                _ => self.v.entry_locs[*n] == Loc::Flags,
            }
        })?;
        Some(self.v.blocks[0].params[n])
    }

    /// Is this the guest's stack pointer at entry, which stays in rsp?
    pub fn is_pinned(&self, v: Value) -> bool {
        match self.defs[v.index()] {
            Def::Param(0, n) => match self.entry_locations.locations.get(n as usize) {
                Some(Some(location)) => *location == Location::Reg(Gpr::RSP.number() as u8),
                _ => self.v.entry_locs[n as usize] == Loc::Gpr(Gpr::RSP),
            },
            _ => false,
        }
    }

    /// Are the bits above the value's type zero in its register?
    fn is_clean(&self, v: Value) -> bool {
        let Some(inst) = self.inst_of(v).filter(|_| !self.in_vector[v.index()]) else {
            return false;
        };
        match inst.op {
            Op::Load | Op::Zext(_) | Op::Popcnt | Op::Clz | Op::Ctz => true,
            Op::Add
            | Op::Sub
            | Op::And
            | Op::Or
            | Op::Xor
            | Op::Mul
            | Op::MulHighU
            | Op::MulHighS => inst.ty == Ty::I32,
            Op::Shl | Op::Shr | Op::Sar | Op::Rol | Op::Ror | Op::Not | Op::Neg | Op::Bswap => {
                inst.ty == Ty::I32
            }
            Op::Sext(_) | Op::Select => inst.ty == Ty::I32,
            Op::Trunc | Op::Insert8Low | Op::Insert8High | Op::Insert16 => false,
            Op::Eq | Op::Ne | Op::LtS | Op::LtU | Op::LeS | Op::LeU | Op::Cond(_) => false,
            Op::Flags(_) | Op::FlagBits | Op::Store | Op::Get(_) | Op::Put(_) | Op::At => false,
            Op::Assume | Op::Poll | Op::Print | Op::Read | Op::Native => false,
        }
    }

    /// Does the value's operation cost nothing because its operand's register serves?
    pub fn is_alias(&self, v: Value) -> bool {
        match self.inst_of(v) {
            Some(i) if i.op == Op::Trunc => i.ty != Ty::I1,
            Some(Inst { op: Op::Zext(_), args, .. }) => {
                args[0].as_value().is_some_and(|a| self.is_clean(a))
            }
            _ => false,
        }
    }

    /// Looks through operations that cost nothing.
    pub fn resolve(&self, mut o: Operand) -> Operand {
        while let Operand::Value(v) = o {
            if let Some(p) = self.same_param[v.index()] {
                o = p.into();
                continue;
            }
            let Some(inst) = self.inst_of(v).filter(|_| self.is_alias(v)) else { break };
            o = match inst.args[0] {
                Operand::Const(c) => Operand::Const(c & inst.ty.mask()),
                value => value,
            };
        }
        o
    }
}
