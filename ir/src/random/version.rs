//! Arbitrary well-formed versions with every operation, type, terminator and kind of anchor.
//!
//! They follow no guest code. They test the text form, and that passes neither crash nor change
//! what a version does. Invariant: the verifier accepts every version made here. Everything is a
//! function of the random source; no lock.
//!
//! ```text
//! trace(&mut Rng::new(17))     region 0x3f { version t1 context rbx == 7 && private_memory { … } }
//! ```

use super::Rng;
use crate::op::{ArgTy, Cond, FlagOp, Op, ResultTy};
use crate::reach::{ends_reach, may_fault};
use crate::semantics::ARITH_FLAGS;
use crate::types::{AnchorId, BlockId, Gpr, Loc, NativeId, Operand, Ty, Value};
use crate::verify::suffix_allowed;
use crate::version::{
    Anchor, Block, Context, DeferredStore, Effects, Fact, GuestTerm, Inst, Mem, Native, Segment,
    Split, Term, Trap, Version,
};
use iced_x86::{Decoder, DecoderOptions};
use smallvec::SmallVec;

/// Every pure operation.
pub fn pure_ops() -> Vec<Op> {
    let plain = Op::PLAIN.into_iter().filter(|op| op.is_pure() && !matches!(op, Op::Zext(_)));
    let widths = [Ty::I1, Ty::I8, Ty::I16, Ty::I32];
    let extensions = widths.into_iter().flat_map(|ty| [Op::Zext(ty), Op::Sext(ty)]);
    let conditions = Cond::ALL.into_iter().map(Op::Cond);
    plain
        .chain(extensions)
        .chain(conditions)
        .chain(FlagOp::TABLE.iter().map(|(op, _, _)| Op::Flags(*op)))
        .collect()
}

struct Maker<'r> {
    rng: &'r mut Rng,
    version: Version,
    insts: Vec<Inst>,
    /// Values that are available where the next instruction goes.
    available: Vec<Value>,
    /// The locations that every anchor names.
    named: Vec<Loc>,
    in_reach: Vec<AnchorId>,
    ops: Vec<Op>,
}

/// A random trace.
pub fn trace(rng: &mut Rng) -> Version {
    let mut m = Maker::new(rng, "t1");
    m.named = (0..Loc::SSA_COUNT).map(Loc::from_ssa_index).filter(|_| m.rng.one_in(2)).collect();
    m.version.context = m.context();
    m.version.optimised = m.rng.one_in(4);
    let locs = (0..Loc::SSA_COUNT).map(Loc::from_ssa_index).filter(|_| !m.rng.one_in(3));
    m.version.entry_locs = locs.collect();
    let mut params: Vec<Value> =
        m.version.entry_locs.clone().iter().map(|l| m.version.value(l.ty())).collect();
    let blocks = 1 + m.rng.below(3);
    for b in 0..blocks {
        m.available.extend(&params);
        for _ in 0..m.rng.below(20) {
            m.inst(false);
        }
        let mut next_params = Vec::new();
        let term = if b + 1 < blocks {
            for _ in 0..m.rng.below(5) {
                let ty = m.scalar_ty();
                next_params.push(m.version.value(ty));
            }
            let args = next_params.iter().map(|v| m.version.ty(*v)).collect::<Vec<Ty>>();
            Term::Jump {
                to: BlockId(b as u32 + 1),
                args: args.into_iter().map(|ty| m.operand(ty)).collect(),
            }
        } else if b > 0 && m.rng.one_in(2) {
            // A loop; its anchors are used in its own block only, see below.
            let types: Vec<Ty> = params.iter().map(|v| m.version.ty(*v)).collect();
            Term::Jump {
                to: BlockId(b as u32),
                args: types.into_iter().map(|ty| m.operand(ty)).collect(),
            }
        } else {
            let deferred = m.rng.below(3);
            Term::Exit(m.new_anchor(deferred))
        };
        let insts = std::mem::take(&mut m.insts);
        m.version.blocks.push(Block {
            params: std::mem::replace(&mut params, next_params),
            insts,
            term,
        });
        // Blocks share no anchor: in a loop an effect may lie between a use and the next pass of
        // the position.
        m.in_reach.clear();
    }
    m.version
}

/// A random `base` block.
pub fn base(rng: &mut Rng) -> Version {
    let mut m = Maker::new(rng, "base");
    for _ in 0..1 + m.rng.below(6) {
        let pc = m.rng.bits() >> m.rng.below(64);
        m.insts.push(Inst::new(Op::At, Ty::I64, None, &[Operand::Const(pc)]));
        for _ in 0..m.rng.below(5) {
            m.base_inst();
        }
    }
    let (pc, other) = (m.rng.bits(), m.rng.interesting());
    let trap = m.rng.pick(&[Trap::Undefined, Trap::Protection, Trap::Breakpoint, Trap::Fetch]);
    let term = match m.rng.below(7) {
        0 => GuestTerm::Goto(m.operand(Ty::I64)),
        1 => GuestTerm::Branch { cond: m.operand(Ty::I1), taken: pc, fall: other },
        2 => GuestTerm::Call { target: m.operand(Ty::I64), ret: other },
        3 => GuestTerm::Ret(m.operand(Ty::I64)),
        4 => GuestTerm::Syscall { next: pc },
        5 => GuestTerm::Special { pc },
        _ => GuestTerm::Trap { pc, trap },
    };
    let insts = std::mem::take(&mut m.insts);
    m.version.blocks.push(Block { params: Vec::new(), insts, term: Term::Guest(term) });
    m.version
}

impl<'r> Maker<'r> {
    fn new(rng: &'r mut Rng, name: &str) -> Maker<'r> {
        let version = Version::new(name, rng.bits() >> rng.below(64));
        let (named, in_reach) = (Vec::new(), Vec::new());
        Maker {
            rng,
            version,
            insts: Vec::new(),
            available: Vec::new(),
            named,
            in_reach,
            ops: pure_ops(),
        }
    }

    fn context(&mut self) -> Context {
        let mut facts = Vec::new();
        for gpr in Gpr::all() {
            if self.rng.one_in(10) {
                facts.push(Fact::RegEquals(gpr, self.rng.interesting()));
            } else if self.rng.one_in(20) {
                let (a, b) = (self.rng.interesting(), self.rng.interesting());
                facts.push(Fact::RegInRange { gpr, min: a.min(b), max: a.max(b) });
            } else if self.rng.one_in(20) {
                let mask = self.rng.interesting();
                facts.push(Fact::RegBits { gpr, mask, value: self.rng.interesting() & mask });
            }
        }
        // Always, because the deferred stores are not return addresses.
        facts.push(Fact::PrivateMemory);
        facts.sort_unstable();
        Context { facts }
    }

    fn scalar_ty(&mut self) -> Ty {
        self.rng.pick(&[Ty::I1, Ty::I8, Ty::I16, Ty::I32, Ty::I64, Ty::I64, Ty::Flags])
    }

    fn operand(&mut self, ty: Ty) -> Operand {
        let version = &self.version;
        let fitting: Vec<Value> =
            self.available.iter().copied().filter(|v| version.ty(*v) == ty).collect();
        if fitting.is_empty() || self.rng.one_in(5) {
            let mask = if ty == Ty::Flags { ARITH_FLAGS } else { ty.mask() };
            return Operand::Const(self.rng.interesting() & mask);
        }
        // Mostly recent values, so that chains form.
        let recent = fitting.len().saturating_sub(1 + self.rng.below(4));
        if self.rng.one_in(3) { self.rng.pick(&fitting).into() } else { fitting[recent].into() }
    }

    fn define(&mut self, ty: Ty) -> Value {
        if self.rng.one_in(12) {
            // A dead value: nothing defines it.
            let ty = self.scalar_ty();
            self.version.value(ty);
        }
        self.version.value(ty)
    }

    fn mem(&mut self) -> Mem {
        let seg = match self.rng.below(8) {
            0 => Some(Segment::Fs),
            1 => Some(Segment::Gs),
            _ => None,
        };
        Mem { scale: self.rng.pick(&[1, 2, 4, 8]), disp: self.rng.interesting() as i64, seg }
    }

    /// Base and index, either of which may be absent.
    fn address_operands(&mut self) -> [Operand; 2] {
        [(); 2].map(|()| if self.rng.one_in(3) { Operand::Const(0) } else { self.operand(Ty::I64) })
    }

    fn new_anchor(&mut self, stores: usize) -> AnchorId {
        let varmap =
            self.named.clone().into_iter().map(|loc| (loc, self.operand(loc.ty()))).collect();
        let stores = (0..stores)
            .map(|_| {
                let ty = self.rng.pick(&[Ty::I8, Ty::I16, Ty::I32, Ty::I64]);
                let [base, index] = self.address_operands();
                DeferredStore { ty, mem: self.mem(), args: [base, index, self.operand(ty)] }
            })
            .collect();
        let target = if self.rng.one_in(4) {
            self.operand(Ty::I64)
        } else {
            Operand::Const(self.rng.bits())
        };
        let after = if self.rng.one_in(4) { Some(self.rng.bits()) } else { None };
        let passes = if self.rng.one_in(8) { self.rng.bits() as u32 } else { 0 };
        self.version.anchor(Anchor { target, after, varmap, stores, via: None, passes })
    }

    fn anchor(&mut self) -> AnchorId {
        if !self.in_reach.is_empty() && self.rng.one_in(2) {
            return self.rng.pick(&self.in_reach);
        }
        let anchor = self.new_anchor(0);
        self.in_reach.push(anchor);
        anchor
    }

    fn inst(&mut self, base: bool) {
        let int = self.rng.pick(&[Ty::I8, Ty::I16, Ty::I32, Ty::I64]);
        let mut inst = match self.rng.below(16) {
            0 => {
                let [a, b] = self.address_operands();
                let mut inst = Inst::new(Op::Load, int, None, &[a, b]);
                inst.mem = Some(self.mem());
                inst
            }
            1 => {
                let ([a, b], v) = (self.address_operands(), self.operand(int));
                let mut inst = Inst::new(Op::Store, int, None, &[a, b, v]);
                inst.mem = Some(self.mem());
                inst
            }
            2 => self.native(),
            5 => Inst::new(Op::Print, Ty::I64, None, &[self.operand(Ty::I64)]),
            6 => Inst::new(Op::Read, Ty::I64, None, &[]),
            3 if !base => {
                let predicate = self.operand(Ty::I1);
                let mut inst = Inst::new(Op::Assume, Ty::I64, None, &[predicate]);
                // An anchor that defers stores is used once, so that no access passes what it
                // defers.
                let deferring = self.rng.one_in(3);
                inst.anchor = Some(if deferring { self.new_anchor(2) } else { self.anchor() });
                inst
            }
            4 if !base => {
                let mut inst = Inst::new(Op::Poll, Ty::I64, None, &[]);
                inst.anchor = Some(self.anchor());
                inst
            }
            _ => self.pure(),
        };
        if !base && may_fault(&self.version, &inst) {
            inst.anchor = Some(self.anchor());
        }
        if ends_reach(&self.version, &inst) {
            self.in_reach.clear();
        }
        let result = match (inst.op.signature().1, inst.op) {
            (ResultTy::Same, _) => Some(inst.ty),
            (ResultTy::Is(ty), _) => Some(ty),
            (ResultTy::None, _) => None,
        };
        if let Some(ty) = result {
            inst.defs.push(self.define(ty));
        }
        self.available.extend(&inst.defs);
        self.insts.push(inst);
    }

    fn pure(&mut self) -> Inst {
        let op = self.rng.pick(&self.ops);
        let types: Vec<Ty> = Ty::ALL.into_iter().filter(|ty| suffix_allowed(op, *ty)).collect();
        let ty = self.rng.pick(&types);
        let mut inst = Inst::new(op, ty, None, &[]);
        for arg in op.signature().0 {
            let want = match arg {
                ArgTy::Is(ty) => *ty,
                ArgTy::Same => ty,
            };
            inst.args.push(self.operand(want));
        }
        if op == Op::Trunc {
            let version = &self.version;
            let wider =
                |v: &Value| version.ty(*v).is_machine_int() && version.ty(*v).bits() > ty.bits();
            let wider: Vec<Value> = self.available.iter().copied().filter(wider).collect();
            inst.args[0] = if wider.is_empty() {
                Operand::Const(self.rng.bits())
            } else {
                self.rng.pick(&wider).into()
            };
        }
        inst
    }

    fn native(&mut self) -> Inst {
        let bytes: &[u8] = self.rng.pick(&[
            &[0xf2, 0x0f, 0x58, 0x07][..],
            &[0x0f, 0xa2],
            &[0x62, 0xf1, 0x7c, 0x48, 0x58, 0xc1],
            &[0xf3, 0x48, 0xa5],
            &[0x48, 0x8d, 0x05, 0x10, 0x00, 0x00, 0x00],
            &[0xd1, 0xd0],
        ]);
        let pc = self.rng.bits() >> self.rng.below(64);
        let mut effects =
            Effects::from_bits_truncate(self.rng.bits() as u16 & self.rng.bits() as u16);
        let gprs =
            |rng: &mut Rng| -> Vec<Gpr> { Gpr::all().filter(|_| rng.one_in(6)).take(4).collect() };
        let (vec_read, vec_write) =
            (self.rng.bits() as u32 & self.rng.bits() as u32, self.rng.bits() as u32);
        let (vec_read, vec_write) = if self.rng.one_in(2) { (vec_read, vec_write) } else { (0, 0) };
        let in_place =
            [Loc::Vec(31), Loc::Mask(7), Loc::X87, Loc::Mxcsr, Loc::Df, Loc::FsBase, Loc::GsBase];
        let writes: SmallVec<[Loc; 2]> =
            in_place.into_iter().filter(|_| self.rng.one_in(6)).collect();
        effects.set(
            Effects::STATE,
            effects.contains(Effects::STATE) || vec_write != 0 || !writes.is_empty(),
        );
        effects.set(Effects::READ_STATE, effects.contains(Effects::READ_STATE) || vec_read != 0);
        let mem_size = self.rng.one_in(2).then(|| self.rng.pick(&[0, 1, 8, 64, 512]));
        let split = match mem_size {
            Some(1 | 8) => self.rng.pick(&[Split::No, Split::Loaded, Split::Stored]),
            _ => Split::No,
        };
        if split != Split::No {
            effects -= Split::EXCLUDES;
        }
        let has_results = split != Split::Stored;
        let (mut gpr_in, mut gpr_out) = (gprs(self.rng), gprs(self.rng));
        let (mut flags_in, flags_out) = (self.rng.one_in(3), has_results && self.rng.one_in(3));
        if !has_results {
            gpr_out.clear();
        }
        if effects.contains(Effects::RESTARTABLE) {
            gpr_in = Gpr::all().filter(|g| gpr_in.contains(g) || gpr_out.contains(g)).collect();
            flags_in |= flags_out;
        }
        let native = Native {
            inst: Decoder::with_ip(64, bytes, pc, DecoderOptions::NONE).decode(),
            mem_size,
            split,
            gpr_in: gpr_in.into_iter().collect(),
            gpr_out: gpr_out.into_iter().collect(),
            flags_in,
            flags_out,
            vec_read,
            vec_write,
            writes,
            effects,
        };
        let mut inst = Inst::new(Op::Native, Ty::I64, None, &[]);
        if let Some(ty) = native.split_ty() {
            match split {
                Split::Stored => inst.defs.push(self.define(ty)),
                _ => inst.args.push(self.operand(ty)),
            }
        }
        if native.has_address() {
            inst.mem = Some(self.mem());
            let address = self.address_operands();
            inst.args.extend(address);
        }
        for _ in &native.gpr_in {
            inst.args.push(self.operand(Ty::I64));
        }
        if native.flags_in {
            inst.args.push(self.operand(Ty::Flags));
        }
        for _ in &native.gpr_out {
            inst.defs.push(self.define(Ty::I64));
        }
        if native.flags_out {
            inst.defs.push(self.define(Ty::Flags));
        }
        inst.native = Some(NativeId(self.version.natives.len() as u32));
        self.version.natives.push(native);
        inst
    }

    fn base_inst(&mut self) {
        let locs = [
            Loc::Flags,
            Loc::Df,
            Loc::FsBase,
            Loc::GsBase,
            Loc::Mxcsr,
            Loc::Mask(3),
            Loc::Gpr(Gpr::R11),
        ];
        let loc = if self.rng.one_in(2) {
            Loc::Gpr(Gpr::new(self.rng.below(16) as u8))
        } else {
            self.rng.pick(&locs)
        };
        match self.rng.below(4) {
            0 => {
                let v = self.define(loc.ty());
                self.insts.push(Inst::new(Op::Get(loc), loc.ty(), Some(v), &[]));
                self.available.push(v);
            }
            1 => {
                let v = self.operand(loc.ty());
                self.insts.push(Inst::new(Op::Put(loc), loc.ty(), None, &[v]));
            }
            _ => self.inst(true),
        }
    }
}
