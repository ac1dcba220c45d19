//! Selection of addresses, loads, stores and original instructions.
//!
//! No data of its own: methods of the selector ([`super`]), which belongs to one compilation.
//! Example: `load.i64 [v1 + v2*8 + 16]` becomes `mov r, [r1 + r2*8 + 16]`, whose fault has the
//! load's anchor.

use crate::codegen::lower::survey::Def;
use crate::codegen::lower::{LeftRaw, Lower, LowerError};
use crate::codegen::mach::{Addr, AddrReg, Kind, MInst, Opnd, Ops, Place, SiteKind, preg};
use crate::codegen::x86::{LOAD, STORE, STORE_IMM, Size};
use crate::context_words;
use dynasour_guest::context::offset;
use dynasour_ir::{Effects, Gpr, Inst, Mem, Op, Operand, Segment, Split, Ty, Value};
use iced_x86::{Code, Instruction, OpKind, Register};
use regalloc2::{Operand as RaOperand, OperandConstraint, OperandKind, OperandPos, PRegSet, VReg};
use smallvec::smallvec;

/// All six flags.
pub(crate) const ALL_FLAGS: u64 = dynasour_ir::semantics::ARITH_FLAGS;

/// The parts of an address.
struct Sum {
    base: Operand,
    index: Operand,
    scale: u8,
    disp: i64,
}

impl Lower<'_> {
    /// The load that an operand is, if the instruction being selected may execute it: its only use,
    /// in this block, with no other memory access between.
    pub fn fusable(&self, o: Operand, ty: Ty) -> Option<Value> {
        let v = o.as_value()?;
        let Def::Inst(b, i) = self.survey.defs[v.index()] else { return None };
        let inst = self.survey.inst_of(v)?;
        let memory = &self.survey.memory_before[self.block];
        let ok = self.may_fuse
            && b as usize == self.block
            && inst.op == Op::Load
            && inst.ty == ty
            && self.survey.hot_uses[v.index()] == 1
            && !self.survey.leaf[v.index()]
            && self.vregs[v.index()].is_none()
            && self.fault.is_none()
            && memory[self.pos] == memory[i as usize + 1];
        ok.then_some(v)
    }

    /// Makes the load `v` the memory operand of what is being selected.
    pub fn fuse(&mut self, v: Value, ops: &mut Ops) -> Result<Opnd, LowerError> {
        let Some(inst) = self.survey.inst_of(v) else {
            return Err(LowerError::Malformed(format!("{v} is not a load")));
        };
        self.fused[v.index()] = true;
        let address = self.address(inst, ops)?;
        self.fault = inst.anchor;
        Ok(Opnd::Mem(address))
    }

    /// May an address contain the operation of this pure value instead of using its register?
    fn foldable(&self, v: Value) -> bool {
        self.vregs[v.index()].is_none() && self.survey.hot_uses[v.index()] == 1
    }

    /// The operands of a value's defining i64 instruction with this operation.
    fn parts(&self, o: Operand, op: Op) -> Option<(Value, Operand, Operand)> {
        let v = o.as_value()?;
        let inst = self.survey.inst_of(v)?;
        (inst.op == op && inst.ty == Ty::I64).then(|| (v, inst.args[0], inst.args[1]))
    }

    /// The memory operand of a load, store or native.
    pub fn address(&mut self, inst: &Inst, ops: &mut Ops) -> Result<Addr, LowerError> {
        let mem = inst
            .mem
            .ok_or_else(|| LowerError::Malformed(format!("{} without an address", inst.op)))?;
        self.address_of(mem, inst.args[0], inst.args[1], ops, OperandConstraint::Reg)
    }

    /// The sum that an address is, with all that the memory operand can add instead of other
    /// instructions.
    fn folded(&self, mem: Mem, base: Operand, index: Operand) -> Sum {
        let mut base = self.survey.resolve(base);
        let mut index = self.survey.resolve(index);
        let mut scale = mem.scale;
        let mut disp = mem.disp;
        let fits = |d: i64| i32::try_from(d).is_ok();
        loop {
            if let Operand::Const(c) = base
                && c != 0
            {
                disp = disp.wrapping_add(c as i64);
                base = Operand::Const(0);
            }
            if let Operand::Const(c) = index
                && c != 0
            {
                disp = disp.wrapping_add((c as i64).wrapping_mul(i64::from(scale)));
                index = Operand::Const(0);
            }
            if let Some((v, p, q)) = self.parts(base, Op::Add) {
                let pinned =
                    self.survey.resolve(p).as_value().is_some_and(|p| self.survey.is_pinned(p));
                match self.survey.resolve(q) {
                    Operand::Const(c)
                        if fits(disp.wrapping_add(c as i64)) && (pinned || self.foldable(v)) =>
                    {
                        disp = disp.wrapping_add(c as i64);
                        base = self.survey.resolve(p);
                        continue;
                    }
                    Operand::Value(_) if index == Operand::Const(0) && self.foldable(v) => {
                        (base, index, scale) = (self.survey.resolve(p), self.survey.resolve(q), 1);
                        continue;
                    }
                    _ => {}
                }
            }
            if let Some((v, p, Operand::Const(c))) = self.parts(index, Op::Add)
                && self.foldable(v)
                && fits(disp.wrapping_add((c as i64).wrapping_mul(i64::from(scale))))
            {
                disp = disp.wrapping_add((c as i64).wrapping_mul(i64::from(scale)));
                index = self.survey.resolve(p);
                continue;
            }
            if let Some((v, p, Operand::Const(c))) = self.parts(index, Op::Shl)
                && scale == 1
                && c <= 3
                && self.foldable(v)
            {
                scale = 1 << c;
                index = self.survey.resolve(p);
                continue;
            }
            break;
        }
        // If later code demands `a + c` and not `a`, the address is made of the sum: the loop's
        // pointer is then incremented in place, and `a` needs no register.
        if let Operand::Value(a) = base
            && !self.survey.is_pinned(a)
            && !self.demanded[a.index()]
            && let Some(&(d, c)) = self.survey.increments.get(&a)
            && self.demanded[d.index()]
            && !self.placed[d.index()]
            && self.is_before(d)
            && fits(disp.wrapping_sub(c as i64))
        {
            base = d.into();
            disp = disp.wrapping_sub(c as i64);
        }
        Sum { base, index, scale, disp }
    }

    /// A memory operand from its parts; registers become operands with `constraint`.
    pub fn address_of(
        &mut self,
        mem: Mem,
        base: Operand,
        index: Operand,
        ops: &mut Ops,
        constraint: OperandConstraint,
    ) -> Result<Addr, LowerError> {
        if let Some(field) = context_words::field(mem.disp as u64) {
            return Ok(Addr::context(field));
        }
        let Sum { mut base, mut index, mut scale, mut disp } = self.folded(mem, base, index);
        let fits = |d: i64| i32::try_from(d).is_ok();
        let is_pinned = |l: &Self, o: Operand| o.as_value().is_some_and(|v| l.survey.is_pinned(v));
        if scale == 1 && (base == Operand::Const(0) || is_pinned(self, index)) {
            std::mem::swap(&mut base, &mut index);
        }
        let base_pinned = is_pinned(self, base);
        let mut base_reg = match base {
            Operand::Value(v) if !base_pinned => Some(self.demand(v)?),
            _ => None,
        };
        let mut index_reg = match index {
            Operand::Value(v) => Some(self.demand(v)?),
            Operand::Const(_) => None,
        };
        let mut base_pinned = base_pinned;
        let mut add_register = |l: &mut Self, t: VReg| -> Result<(), LowerError> {
            if base_reg.is_none() && !base_pinned {
                base_reg = Some(t);
            } else if index_reg.is_none() {
                (index_reg, scale) = (Some(t), 1);
            } else {
                let sum = l.fresh();
                let mut lea: Ops = smallvec![RaOperand::reg_def(sum)];
                let addr = Addr {
                    base: push_register(&mut lea, base_reg, base_pinned, OperandConstraint::Reg),
                    index: push_register(&mut lea, index_reg, false, OperandConstraint::Reg),
                    scale,
                    disp: 0,
                    seg: Register::None,
                };
                let kind =
                    Kind::X86(Code::Lea_r64_m, smallvec![Opnd::Op(0, Size::B8), Opnd::Mem(addr)]);
                l.emit(kind, lea, None);
                (base_reg, base_pinned, index_reg, scale) = (Some(sum), false, Some(t), 1);
            }
            Ok(())
        };
        let mut seg = Register::None;
        match mem.seg {
            None => {}
            Some(Segment::Fs) => seg = Register::FS,
            Some(Segment::Gs) => {
                // The host's GS base is the context's: add the guest's base as a number.
                let t = self.fresh();
                let field = Opnd::Mem(Addr::context(offset::GS_BASE));
                let kind = Kind::X86(Code::Mov_r64_rm64, smallvec![Opnd::Op(0, Size::B8), field]);
                self.emit(kind, smallvec![RaOperand::reg_def(t)], None);
                add_register(self, t)?;
            }
        }
        if !fits(disp) {
            let (t, rest) = match self.near_base(disp as u64) {
                Some(near) => near,
                None => (self.constant(disp as u64), 0),
            };
            add_register(self, t)?;
            disp = i64::from(rest);
        }
        Ok(Addr {
            base: push_register(ops, base_reg, base_pinned, constraint),
            index: push_register(ops, index_reg, false, constraint),
            scale,
            disp: disp as i32,
            seg,
        })
    }

    /// The register of a value that is defined here whether or not hot code wants it; records may.
    fn defined(&mut self, d: Value) -> VReg {
        let r = self.vregs[d.index()].unwrap_or_else(|| self.fresh());
        self.vregs[d.index()] = Some(r);
        r
    }

    /// A load into a register of its own.
    pub fn load(&mut self, inst: &Inst, d: Value) -> Result<(), LowerError> {
        let size = Size::of(inst.ty);
        let (r, code, to) = match (self.survey.in_vector[d.index()], size) {
            (true, Size::B8) => (self.vector_home(d), Code::Movq_xmm_xmmm64, Size::B8),
            (true, _) => (self.vector_home(d), Code::Movss_xmm_xmmm32, Size::B8),
            (false, Size::B8) => (self.defined(d), LOAD[size as usize], Size::B8),
            (false, _) => (self.defined(d), LOAD[size as usize], Size::B4),
        };
        let mut ops: Ops = smallvec![RaOperand::reg_def(r)];
        let address = self.address(inst, &mut ops)?;
        self.fault = inst.anchor;
        self.x86(code, &[Opnd::Op(0, to), Opnd::Mem(address)], ops);
        Ok(())
    }

    /// A store.
    pub fn store(&mut self, inst: &Inst) -> Result<(), LowerError> {
        if self.store_by_native(inst)? {
            return Ok(());
        }
        let mem =
            inst.mem.ok_or_else(|| LowerError::Malformed("store without an address".into()))?;
        self.store_parts(inst.ty, mem, [inst.args[0], inst.args[1], inst.args[2]], inst.anchor)
    }

    /// A store from its parts.
    pub fn store_parts(
        &mut self,
        ty: Ty,
        mem: Mem,
        [base, index, value]: [Operand; 3],
        anchor: Option<dynasour_ir::AnchorId>,
    ) -> Result<(), LowerError> {
        let size = Size::of(ty);
        let mut ops = Ops::new();
        let in_vector = self.in_vector(value);
        let (code, source) = match (self.imm(value, ty), in_vector, size) {
            (Some(i), ..) => (STORE_IMM[size as usize], Opnd::Imm(i)),
            (None, Some(v), Size::B4 | Size::B8) => {
                self.demanded[v.index()] = true;
                ops.push(RaOperand::reg_use(self.vector_home(v)));
                let is_whole = size == Size::B8;
                let code = if is_whole { Code::Movq_xmmm64_xmm } else { Code::Movss_xmmm32_xmm };
                (code, Opnd::Op(0, size))
            }
            (None, ..) => {
                let r = self.reg(value)?;
                ops.push(RaOperand::reg_use(r));
                (STORE[size as usize], Opnd::Op(0, size))
            }
        };
        let address = self.address_of(mem, base, index, &mut ops, OperandConstraint::Reg)?;
        self.fault = anchor;
        self.x86(code, &[Opnd::Mem(address), source], ops);
        Ok(())
    }

    /// An original instruction in its home registers, its memory operand in any.
    pub fn native(&mut self, inst: &Inst) -> Result<(), LowerError> {
        let native = inst.native.and_then(|n| self.v.natives.get(n.index()));
        let native =
            native.ok_or_else(|| LowerError::Malformed("native without its instruction".into()))?;
        let original = &native.inst;
        let has_memory = native.has_address();
        let first = native.leading_args();
        let expected = first + native.gpr_in.len() + usize::from(native.flags_in);
        if inst.args.len() != expected {
            return Err(LowerError::Malformed(format!(
                "native with {} operands for {expected}",
                inst.args.len()
            )));
        }
        if !has_memory && uses_gs(original) {
            return Err(LowerError::Unsupported(
                "a GS-relative instruction with implicit operands".into(),
            ));
        }
        let mut ops = Ops::new();
        let is_move = native.register_move();
        let stored = inst.def().filter(|d| self.survey.in_vector[d.index()]);
        if native.split == Split::Stored || is_move == Some(Split::Stored) && stored.is_some() {
            let d = inst.def().filter(|d| !self.fused[d.index()]);
            let Some(d) = d else { return Ok(()) };
            let r = self.vector_home(d);
            let place = Place::Result(0, self.is_stored_clean(native));
            let kind = Kind::Native(Box::new(native.clone()), place);
            self.emit(kind, smallvec![RaOperand::reg_def(r)], None);
            return Ok(());
        }
        for (k, d) in inst.defs.iter().take(native.gpr_out.len()).enumerate() {
            let home = native.gpr_out[k];
            if home == Gpr::RSP {
                return Err(LowerError::Unsupported(
                    "an original instruction that writes rsp".into(),
                ));
            }
            let r = self.defined(*d);
            ops.push(RaOperand::reg_fixed_def(r, preg(home.number())));
        }
        let moved = inst.args.first().filter(|_| is_move == Some(Split::Loaded));
        let moved = moved.and_then(|arg| self.in_vector(*arg));
        let general = if moved.is_some() { &[][..] } else { &native.gpr_in };
        for (k, home) in general.iter().enumerate() {
            let arg = self.survey.resolve(inst.args[first + k]);
            if *home == Gpr::RSP {
                if arg.as_value().is_some_and(|v| self.survey.is_pinned(v)) {
                    continue;
                }
                return Err(LowerError::Unsupported(
                    "an original instruction that reads a changed rsp".into(),
                ));
            }
            let r = self.reg(arg)?;
            ops.push(RaOperand::reg_fixed_use(r, preg(home.number())));
        }
        let place = if native.split == Split::Loaded {
            self.loaded(inst, native, &mut ops)?
        } else if let Some(v) = moved {
            ops.push(RaOperand::any_use(self.vector(v.into(), Ty::I64)?));
            Place::Vector((ops.len() - 1) as u8)
        } else if has_memory {
            let mem = inst
                .mem
                .ok_or_else(|| LowerError::Malformed("native without its address".into()))?;
            // AH to DH cannot be encoded together with r8 to r15.
            let constraint = if uses_high_byte(original) {
                OperandConstraint::Limit(8)
            } else {
                OperandConstraint::Reg
            };
            let address = self.address_of(mem, inst.args[0], inst.args[1], &mut ops, constraint)?;
            Place::Memory(address)
        } else {
            Place::Nothing
        };
        if native.flags_in {
            self.host_flags(inst.args[expected - 1], ALL_FLAGS)?;
        }
        // The anchor of the load that it executes.
        let fused = self.fault.take();
        let site = match inst.anchor.or(fused) {
            None => None,
            Some(anchor) if native.effects.contains(Effects::RESTARTABLE) => {
                if self.v.anchors[anchor.index()].target != Operand::Const(original.ip()) {
                    return Err(LowerError::Malformed(
                        "a restartable instruction needs an anchor at its own pc".into(),
                    ));
                }
                let record = self.new_record(anchor);
                // What the fault leaves in registers and flags must stay there until the record is
                // read.
                let outputs = inst.defs.iter().zip(&native.gpr_out);
                let raw = outputs
                    .map(|(d, g)| RaOperand::reg_fixed_use(self.defined(*d), preg(g.number())))
                    .collect();
                self.left_raw.insert(record, LeftRaw { registers: raw, flags: native.flags_out });
                Some(self.site_with_record(SiteKind::Fault, anchor, record))
            }
            Some(anchor) => Some(self.site(SiteKind::Fault, anchor)),
        };
        self.cur.push(MInst {
            kind: Kind::Native(Box::new(native.clone()), place),
            ops,
            clobbers: PRegSet::empty(),
            site,
            position: Some(self.position()),
        });
        if native.flags_out
            && let Some(f) = inst.defs.get(native.gpr_out.len()).copied()
        {
            if self.survey.leaf[f.index()] {
                self.demand(f)?;
            }
            if let Some(r) = self.vregs[f.index()] {
                self.capture_flags(r);
            }
        }
        Ok(())
    }
}

fn push_register(
    ops: &mut Ops,
    r: Option<VReg>,
    pinned: bool,
    constraint: OperandConstraint,
) -> AddrReg {
    match r {
        _ if pinned => AddrReg::Rsp,
        None => AddrReg::None,
        Some(r) => {
            ops.push(RaOperand::new(r, constraint, OperandKind::Use, OperandPos::Early));
            AddrReg::Op((ops.len() - 1) as u8)
        }
    }
}

fn uses_gs(inst: &Instruction) -> bool {
    inst.segment_prefix() == Register::GS
}

fn uses_high_byte(inst: &Instruction) -> bool {
    (0..inst.op_count()).any(|i| {
        inst.op_kind(i) == OpKind::Register
            && matches!(
                inst.op_register(i),
                Register::AH | Register::BH | Register::CH | Register::DH
            )
    })
}
