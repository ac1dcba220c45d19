//! Instruction selection: the IR of a trace becomes machine instructions over virtual registers.
//!
//! Selection walks blocks and instructions **backwards**. At each instruction it is then known
//! which values later code *demands*, that is, reads from a register. A pure instruction whose
//! value is not demanded is left out. A consumer may *fuse* with what it uses: loads become memory
//! operands, additions become parts of addresses, comparisons become conditions of jumps. A pure
//! value that only varmaps use is never demanded: the record of its exit computes it from its
//! leaves.
//!
//! **Data.** [`Lower`] is the state of one walk; [`Selected`] is its result. What is known before
//! the walk is in [`Survey`].
//!
//! **Invariants.** (1) Host flags are live only from the instruction that sets them to their next
//! consumer, and between these two stand nothing but moves of the register allocator and
//! instructions for which [`MInst::destroys_flags`] is false. A guest flags
//! value that is kept longer is kept as data in its packed form, `lahf; seto al` (see
//! [`crate::record`]). (2) Values narrower than 64 bits have arbitrary upper bits in their
//! register; an `i1` is a byte that is 0 or 1.
//!
//! **Files.** This one has the walk, demands and the tools that all others use;
//! [`crate::codegen::lower::operations`] the pure operations, [`crate::codegen::lower::conditions`]
//! guards and conditions, [`crate::codegen::lower::flags`] flags, [`crate::codegen::lower::memory`]
//! addresses, loads, stores and original instructions, [`crate::codegen::lower::vectors`] values in XMM
//! registers, [`crate::codegen::lower::exits`] trace ends
//! and records, [`crate::codegen::lower::bases`] registers for large constants.
//!
//! ```text
//! v2 = load.i64 [v1 + 8]
//! v3 = eq.i64 v2, 7               cmp qword [rax + 8], 7
//! assume v3 else a0               jne <the cold code of a0's exit>
//! ```

mod bases;
mod conditions;
mod exits;
mod flags;
mod memory;
mod operations;
mod survey;
mod vectors;

use crate::codegen::exit_entry::EntryLocations;
use crate::codegen::lower::bases::{Bases, is_wide};
use crate::codegen::lower::survey::{Def, Survey};
use crate::codegen::mach::{
    Addr, AddrReg, Kind, MInst, Opnd, Ops, SelectedBlock, Site, SiteDraft, SiteKind, preg, vreg,
};
use crate::codegen::x86::Size;
use crate::cpu::Cpu;
use crate::record::{Location, Record};
use dynasour_guest::context::offset;
use dynasour_ir::{AnchorId, Edge, Gpr, Inst, Loc, Op, Operand, Term, Ty, Value, Version};
use iced_x86::{Code, Register};
use regalloc2::{Operand as RaOperand, OperandConstraint, OperandKind, OperandPos, PRegSet, VReg};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// Why selection refused a version.
#[derive(thiserror::Error, Debug)]
pub enum LowerError {
    /// Something this emitter or this processor cannot do.
    #[error("cannot emit {0}")]
    Unsupported(String),
    /// The version breaks a rule of the IR.
    #[error("malformed version: {0}")]
    Malformed(String),
}

/// The result of selection.
pub(crate) struct Selected {
    pub blocks: Vec<SelectedBlock>,
    pub sites: Vec<SiteDraft>,
    pub records: Vec<(AnchorId, Record)>,
    pub record_ops: Vec<Ops>,
    pub num_vregs: usize,
    /// Registers that hold guest state of this fragment's own, which the allocator uses first: bit
    /// n is register n. All others are borrowed when they are needed: saved at entry and restored
    /// at the trace's end.
    pub touched: u16,
    pub uses_vector: bool,
    /// XMM registers that no instruction names: bit n is register n.
    pub free_vectors: u16,
}

/// What the fault of a restartable native leaves in place: it says how far the instruction came.
#[derive(Default)]
pub struct LeftRaw {
    /// Fixed uses of the registers.
    pub registers: Ops,
    /// Whether the host's flags are the guest's.
    pub flags: bool,
}

pub(crate) struct Lower<'a> {
    pub v: &'a Version,
    pub cpu: Cpu,
    pub entry_locations: &'a EntryLocations,
    /// What is known before selection.
    pub survey: Survey<'a>,
    /// Virtual register of each value that has been demanded.
    pub vregs: Vec<Option<VReg>>,
    /// Values that code after the current instruction reads from their register.
    pub demanded: Vec<bool>,
    /// The value's instruction has been placed where its flags are wanted.
    pub placed: Vec<bool>,
    /// Loads that their consumer executes.
    pub fused: Vec<bool>,
    pub next_vreg: usize,
    /// Instructions of the current IR instruction, forwards.
    pub cur: Vec<MInst>,
    /// Instructions of the current block, backwards.
    out: Vec<MInst>,
    pub block: usize,
    pub pos: usize,
    /// May what is being selected fuse with a load? Only if each value between the two is used
    /// once.
    pub may_fuse: bool,
    /// Is what sets the flags the last thing that is selected for this instruction?
    pub may_place: bool,
    /// The anchor of the load that the next instruction fuses with.
    pub fault: Option<AnchorId>,
    pub sites: Vec<SiteDraft>,
    pub records: Vec<(AnchorId, Record)>,
    pub record_ops: Vec<Ops>,
    /// The records of each anchor: one that its guards share, which may be linked, and one that its
    /// faults and polls share, which go to the runtime.
    pub record_of: Vec<[Option<usize>; 2]>,
    /// What is in place at the records of restartable natives, by record index.
    pub left_raw: FxHashMap<usize, LeftRaw>,
    /// The entry's value of each guest register, if demanded.
    pub entry_gpr: [Option<VReg>; 16],
    /// The entry's flags in packed form, if demanded.
    pub entry_flags: Option<VReg>,
    /// Registers that large constants share.
    pub bases: Bases,
    /// Records all of whose sites find the entry's flags still in the host's: those need not be
    /// captured for them.
    pub before_flags: Vec<bool>,
}

/// Selects machine instructions for a trace.
pub(crate) fn lower(v: &Version, cpu: Cpu, entry: &EntryLocations) -> Result<Selected, LowerError> {
    let mut l = Lower::new(v, cpu, entry)?;
    l.run()
}

impl<'a> Lower<'a> {
    fn new(
        v: &'a Version,
        cpu: Cpu,
        entry_locations: &'a EntryLocations,
    ) -> Result<Lower<'a>, LowerError> {
        let n = v.types.len();
        Ok(Lower {
            v,
            cpu,
            entry_locations,
            survey: Survey::of(v, entry_locations)?,
            vregs: vec![None; n],
            demanded: vec![false; n],
            placed: vec![false; n],
            fused: vec![false; n],
            next_vreg: 0,
            cur: Vec::new(),
            out: Vec::new(),
            block: 0,
            pos: 0,
            may_fuse: true,
            may_place: false,
            fault: None,
            sites: Vec::new(),
            records: Vec::new(),
            record_ops: Vec::new(),
            record_of: vec![[None; 2]; v.anchors.len()],
            left_raw: FxHashMap::default(),
            entry_gpr: [None; 16],
            entry_flags: None,
            bases: Bases::of(v),
            before_flags: Vec::new(),
        })
    }

    fn run(&mut self) -> Result<Selected, LowerError> {
        let v = self.v;
        for block in v.blocks.iter().skip(1) {
            for p in &block.params {
                if self.survey.same_param[p.index()].is_some() {
                    continue;
                }
                let r = match self.survey.in_vector[p.index()] {
                    true => self.fresh_vector(),
                    false => self.fresh(),
                };
                self.vregs[p.index()] = Some(r);
            }
        }
        let mut blocks: Vec<SelectedBlock> = Vec::with_capacity(v.blocks.len());
        let mut entry = Vec::new();
        for b in (0..v.blocks.len()).rev() {
            self.block = b;
            self.out = Vec::with_capacity(2 * v.blocks[b].insts.len() + 4);
            self.pos = v.blocks[b].insts.len();
            let args = self.terminator(&v.blocks[b].term)?;
            self.flush();
            for i in (0..v.blocks[b].insts.len()).rev() {
                self.pos = i;
                self.instruction(&v.blocks[b].insts[i])?;
                self.flush();
            }
            let params = match b {
                0 => SmallVec::new(),
                _ => v.blocks[b].params.iter().filter_map(|p| self.vregs[p.index()]).collect(),
            };
            let insts = std::mem::take(&mut self.out);
            // Code that leaves a loop on request repeats the instructions before the poll, so none
            // of these may leave.
            let poll = insts.iter().rev().position(|m| matches!(m.kind, Kind::Poll)).unwrap_or(0);
            if insts.iter().rev().take(poll).any(|m| m.site.is_some()) {
                return Err(LowerError::Unsupported("what may leave before a poll".into()));
            }
            if b == 0 {
                entry = insts;
                blocks.push(SelectedBlock { params, insts: Vec::new(), args });
            } else {
                blocks.push(SelectedBlock {
                    params,
                    insts: insts.into_iter().rev().collect(),
                    args,
                });
            }
        }
        blocks.reverse();
        self.keep_untouched_flags(&mut entry);
        self.find_early_records(&entry);
        self.build_records()?;
        self.out = entry;
        self.entry();
        blocks[0].insts = std::mem::take(&mut self.out).into_iter().rev().collect();
        Ok(Selected {
            blocks,
            sites: std::mem::take(&mut self.sites),
            records: std::mem::take(&mut self.records),
            record_ops: std::mem::take(&mut self.record_ops),
            num_vregs: self.next_vreg,
            touched: self.survey.touched & !(1 << Gpr::RSP.number()),
            uses_vector: self.survey.uses_vector,
            free_vectors: self.survey.free_vectors,
        })
    }

    /// If nothing in a linear trace destroys the flags that it enters with but what restores them
    /// at its end, they stay where they are. `entry` is backwards.
    fn keep_untouched_flags(&mut self, entry: &mut Vec<MInst>) {
        let mut destroyers = (0..entry.len()).filter(|i| entry[*i].destroys_flags());
        let (Some(at), None, [_]) = (destroyers.next(), destroyers.next(), &self.v.blocks[..])
        else {
            return;
        };
        let Some(packed) =
            self.survey.flags_param().map_or(self.entry_flags, |p| self.vregs[p.index()])
        else {
            return;
        };
        let restores =
            matches!(entry[at].kind, Kind::RestoreFlags) && entry[at].ops[0].vreg() == packed;
        let uses = entry.iter().flat_map(|m| &m.ops).filter(|o| o.vreg() == packed).count();
        if !restores || uses != 1 {
            return;
        }
        entry.remove(at);
        match self.survey.flags_param() {
            Some(p) => self.vregs[p.index()] = None,
            None => self.entry_flags = None,
        }
    }

    /// Finds the records whose sites all come before anything in the entry block destroys the
    /// flags. `entry` is backwards.
    fn find_early_records(&mut self, entry: &[MInst]) {
        let mut late = vec![true; self.sites.len()];
        for m in entry.iter().rev() {
            let destroys = m.destroys_flags();
            if let Some(site) = m.site {
                // An original instruction may fault after it has changed flags.
                late[site.0 as usize] = destroys && matches!(m.kind, Kind::Native(..));
            }
            if destroys {
                break;
            }
        }
        self.before_flags = vec![true; self.records.len()];
        for (site, late) in self.sites.iter().zip(late) {
            if let Some(record) = site.record.filter(|_| late) {
                self.before_flags[record] = false;
            }
        }
    }

    fn flush(&mut self) {
        self.out.extend(self.cur.drain(..).rev());
    }

    /// The instructions that give entry values their registers, once all demands are known.
    fn entry(&mut self) {
        let v = self.v;
        let mut ops = Ops::new();
        let mut slots: SmallVec<[(VReg, u16); 8]> = SmallVec::new();
        let mut locations = self.entry_locations.locations.iter();
        for (p, loc) in v.blocks[0].params.iter().zip(&v.entry_locs) {
            let location = locations.next().copied().flatten();
            let Some(r) = self.vregs[p.index()] else { continue };
            match (location, loc) {
                (Some(Location::Reg(n)), _) => {
                    ops.push(RaOperand::reg_fixed_def(r, preg(usize::from(n))))
                }
                (Some(Location::Slot(n)), _) => slots.push((r, n)),
                (Some(Location::Flags), _) => self.entry_flags = Some(r),
                (Some(Location::Operand(_) | Location::Vector(_)), _) => {}
                (None, Loc::Gpr(g)) => self.entry_gpr[g.number()] = Some(r),
                (None, _) => self.entry_flags = Some(r),
            }
        }
        for (n, r) in self.entry_gpr.iter().enumerate() {
            if let Some(r) = r.filter(|_| n != Gpr::RSP.number()) {
                ops.push(RaOperand::reg_fixed_def(r, preg(n)));
            }
        }
        self.emit(Kind::FragmentEntry, ops, None);
        if let Some(flags) = self.entry_flags {
            self.capture_flags(flags);
        }
        for (constant, r) in self.bases.used() {
            self.cur.push(MInst {
                kind: Kind::Const(constant),
                ops: smallvec::smallvec![RaOperand::reg_def(r)],
                clobbers: PRegSet::empty(),
                site: None,
                position: None,
            });
        }
        for (r, slot) in slots {
            let field = Opnd::Mem(Addr::context(offset::SCRATCH + 8 * usize::from(slot)));
            self.x86(
                Code::Mov_r64_rm64,
                &[Opnd::Op(0, Size::B8), field],
                smallvec::smallvec![RaOperand::reg_def(r)],
            );
        }
        self.flush();
    }

    fn terminator(&mut self, term: &Term) -> Result<SmallVec<[VReg; 8]>, LowerError> {
        match term {
            Term::Jump { to, args } => {
                let mut registers = SmallVec::new();
                for (a, p) in args.iter().zip(&self.v.blocks[to.index()].params) {
                    if self.survey.same_param[p.index()].is_some() {
                        continue;
                    }
                    let r = match self.survey.in_vector[p.index()] {
                        true => self.vector(*a, self.v.ty(*p))?,
                        false => self.reg(*a)?,
                    };
                    // Each argument of a jump to a register parameter is a register of its own.
                    registers.push(r);
                }
                self.emit(Kind::Jump(to.index()), Ops::new(), None);
                Ok(registers)
            }
            Term::Exit(anchor) => {
                self.trace_end(*anchor)?;
                Ok(SmallVec::new())
            }
            Term::Branch { cond, then, otherwise } => {
                // The allocator may put moves at the start of either block.
                let is_own =
                    |edge: &Edge| edge.args.is_empty() && self.survey.ways_in(edge.to) == 1;
                if then.to.index() != self.block + 1 || !is_own(then) || !is_own(otherwise) {
                    return Err(LowerError::Unsupported("this branch inside a trace".into()));
                }
                let cond = self.predicate(*cond)?;
                self.emit(
                    Kind::Branch(cond.negate() as u8, otherwise.to.index()),
                    Ops::new(),
                    None,
                );
                Ok(SmallVec::new())
            }
            Term::Guest(_) => Err(LowerError::Malformed("guest control flow in a trace".into())),
        }
    }

    fn instruction(&mut self, inst: &Inst) -> Result<(), LowerError> {
        match inst.op {
            Op::Load => {
                let d = inst
                    .def()
                    .ok_or_else(|| LowerError::Malformed("a load without result".into()))?;
                if self.fused[d.index()] { Ok(()) } else { self.load(inst, d) }
            }
            Op::Store => self.store(inst),
            Op::Native => self.native(inst),
            Op::Assume => self.guard(inst),
            Op::Poll => {
                let site = self.site(SiteKind::Poll, anchor_of(inst)?);
                self.emit(Kind::Poll, Ops::new(), Some(site));
                Ok(())
            }
            Op::Print | Op::Read => Err(LowerError::Unsupported(inst.op.to_string())),
            Op::Get(_) | Op::Put(_) | Op::At => {
                Err(LowerError::Malformed(format!("{} in a trace", inst.op)))
            }
            _ => {
                let d = inst
                    .def()
                    .ok_or_else(|| LowerError::Malformed(format!("{} without result", inst.op)))?;
                if self.survey.forced[d.index()] && !self.survey.is_alias(d) {
                    self.demand(d)?;
                }
                match self.vregs[d.index()] {
                    Some(r) if !self.placed[d.index()] => self.operation(inst, r),
                    _ => Ok(()),
                }
            }
        }
    }

    // Tools.

    /// A new virtual register.
    pub fn fresh(&mut self) -> VReg {
        self.next_vreg += 1;
        vreg(self.next_vreg - 1)
    }

    /// Adds a machine instruction.
    pub fn emit(&mut self, kind: Kind, ops: Ops, site: Option<Site>) {
        let (clobbers, position) = (PRegSet::empty(), Some(self.position()));
        self.cur.push(MInst { kind, ops, clobbers, site, position });
    }

    /// Adds an instruction; if it is fused with a load, it is the load's fault site.
    pub fn x86(&mut self, code: Code, operands: &[Opnd], ops: Ops) {
        let site = self.fault.take().map(|anchor| self.site(SiteKind::Fault, anchor));
        self.emit(Kind::X86(code, SmallVec::from_slice(operands)), ops, site);
    }

    /// A site that leaves through `anchor`, with the anchor's shared record.
    pub fn site(&mut self, kind: SiteKind, anchor: AnchorId) -> Site {
        let class = usize::from(kind != SiteKind::Guard);
        let record = match self.record_of[anchor.index()][class] {
            Some(r) => r,
            None => {
                let r = self.new_record(anchor);
                self.record_of[anchor.index()][class] = Some(r);
                r
            }
        };
        self.site_with_record(kind, anchor, record)
    }

    /// A record yet to be filled.
    pub fn new_record(&mut self, anchor: AnchorId) -> usize {
        self.records.push((anchor, Record::default()));
        self.records.len() - 1
    }

    pub fn site_with_record(&mut self, kind: SiteKind, anchor: AnchorId, record: usize) -> Site {
        let progress = !self.v.anchors[anchor.index()].stores.is_empty()
            || self.survey.effect_before[self.block]
            || self.survey.first_effect[self.block].is_some_and(|e| (e as usize) < self.pos);
        self.sites.push(SiteDraft {
            kind,
            anchor,
            record: Some(record),
            progress,
            position: self.position(),
        });
        Site((self.sites.len() - 1) as u32)
    }

    /// The instruction being selected.
    pub fn position(&self) -> (u32, u32) {
        (self.block as u32, self.pos as u32)
    }

    /// The register of a value, which some instruction before here will define.
    pub fn demand(&mut self, v: Value) -> Result<VReg, LowerError> {
        let v = match self.survey.resolve(v.into()) {
            Operand::Value(v) => v,
            Operand::Const(c) => return Ok(self.constant(c)),
        };
        if self.survey.is_pinned(v) {
            let t = self.fresh();
            self.emit(
                Kind::X86(
                    Code::Mov_r64_rm64,
                    smallvec::smallvec![Opnd::Op(0, Size::B8), Opnd::Phys(Register::RSP)],
                ),
                smallvec::smallvec![RaOperand::reg_def(t)],
                None,
            );
            return Ok(t);
        }
        if self.fused[v.index()] || matches!(self.survey.defs[v.index()], Def::None) {
            return Err(LowerError::Malformed(format!("{v} is used where it is not defined")));
        }
        self.demanded[v.index()] = true;
        if self.survey.in_vector[v.index()] {
            return Ok(self.general(v));
        }
        if let Some(r) = self.vregs[v.index()] {
            return Ok(r);
        }
        let r = self.fresh();
        self.vregs[v.index()] = Some(r);
        Ok(r)
    }

    /// The register of a base near a constant that has more than 32 bits, and the distance from it.
    pub fn near_base(&mut self, c: u64) -> Option<(VReg, i32)> {
        let (base, distance) = self.bases.near(c)?;
        let next = vreg(self.next_vreg);
        let register = *base.register.get_or_insert(next);
        self.next_vreg += usize::from(register == next);
        Some((register, distance))
    }

    /// `d := a + distance`, flags untouched.
    pub fn add_distance(&mut self, d: VReg, a: VReg, distance: i32) {
        let addr = Addr {
            base: AddrReg::Op(1),
            index: AddrReg::None,
            scale: 1,
            disp: distance,
            seg: Register::None,
        };
        let operands = smallvec::smallvec![Opnd::Op(0, Size::B8), Opnd::Mem(addr)];
        let ops = smallvec::smallvec![RaOperand::reg_def(d), RaOperand::reg_use(a)];
        self.emit(Kind::X86(Code::Lea_r64_m, operands), ops, None);
    }

    /// A constant in a register.
    pub fn constant(&mut self, c: u64) -> VReg {
        if is_wide(c)
            && let Some((base, distance)) = self.near_base(c)
        {
            if distance == 0 {
                return base;
            }
            let t = self.fresh();
            self.add_distance(t, base, distance);
            return t;
        }
        let t = self.fresh();
        self.emit(Kind::Const(c), smallvec::smallvec![RaOperand::reg_def(t)], None);
        t
    }

    /// An operand in a register.
    pub fn reg(&mut self, o: Operand) -> Result<VReg, LowerError> {
        match self.survey.resolve(o) {
            Operand::Value(v) => self.demand(v),
            Operand::Const(c) => Ok(self.constant(c)),
        }
    }

    /// The constant as a sign-extended 32-bit immediate of its type, if it fits.
    pub fn imm(&self, o: Operand, ty: Ty) -> Option<i64> {
        let c = self.survey.resolve(o).as_const()?;
        let s = if ty == Ty::I1 { c as i64 & 1 } else { ty.sext(c) };
        i32::try_from(s).ok().map(i64::from)
    }

    /// A source operand: an immediate, a load to fuse with, or any location.
    pub fn src(
        &mut self,
        o: Operand,
        ty: Ty,
        size: Size,
        ops: &mut Ops,
    ) -> Result<Opnd, LowerError> {
        if let Some(i) = self.imm(o, ty) {
            return Ok(Opnd::Imm(i));
        }
        self.rm(o, ty, size, ops)
    }

    /// A register-or-memory operand.
    pub fn rm(
        &mut self,
        o: Operand,
        ty: Ty,
        size: Size,
        ops: &mut Ops,
    ) -> Result<Opnd, LowerError> {
        if size == Size::of(ty)
            && let Some(load) = self.fusable(o, ty)
        {
            return self.fuse(load, ops);
        }
        let r = self.reg(o)?;
        ops.push(RaOperand::any_use(r));
        Ok(Opnd::Op((ops.len() - 1) as u8, size))
    }

    /// A late definition in the register of operand `of`.
    pub fn reuse(d: VReg, of: usize) -> RaOperand {
        RaOperand::new(d, OperandConstraint::Reuse(of), OperandKind::Def, OperandPos::Late)
    }

    /// Is the value needed by code after this point (so that its register should not be
    /// overwritten)?
    pub fn lives_on(&self, o: Operand) -> bool {
        match self.survey.resolve(o) {
            Operand::Value(v) => self.demanded[v.index()] || self.survey.is_pinned(v),
            Operand::Const(_) => false,
        }
    }
}

/// The anchor that an instruction must have.
pub(crate) fn anchor_of(inst: &Inst) -> Result<AnchorId, LowerError> {
    inst.anchor.ok_or_else(|| LowerError::Malformed(format!("{} without an anchor", inst.op)))
}
