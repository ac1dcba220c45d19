//! Values in XMM registers: what scalar SSE instructions store and load where the IR accesses memory for them
//! ([`dynasour_ir::split`]).
//!
//! Each value lives in one class of registers ([`Survey::in_vector`](super::survey::Survey)); where the other
//! is asked for, it is copied. In an XMM register the bytes above the value's are zero.
//!
//! No data of its own: methods of the selector ([`super`]), which belongs to one compilation.
//!
//! ```text
//! v1 = native "movsd v1, xmm0"      movq xmm7, xmm0
//! native "mulsd xmm1, v1"           mulsd xmm1, xmm7
//! v2 = add.i64 v1, 8                movq rax, xmm7; add rax, 8
//! ```

use crate::codegen::lower::survey::Def;
use crate::codegen::lower::{Lower, LowerError};
use crate::codegen::mach::{Addr, Kind, Opnd, Ops, Place, SiteKind, vector_vreg};
use crate::codegen::x86::Size;
use dynasour_ir::split::{Form, Upper};
use dynasour_ir::{Inst, Native, Op, Operand, Split, Ty, Value};
use iced_x86::Code;
use regalloc2::{Operand as RaOperand, OperandConstraint, VReg};
use smallvec::smallvec;

impl Lower<'_> {
    /// A new virtual XMM register.
    pub fn fresh_vector(&mut self) -> VReg {
        self.next_vreg += 1;
        vector_vreg(self.next_vreg - 1)
    }

    /// The XMM register of a value that lives in one.
    pub fn vector_home(&mut self, v: Value) -> VReg {
        let fresh = match self.vregs[v.index()] {
            Some(r) => r,
            None => self.fresh_vector(),
        };
        self.vregs[v.index()] = Some(fresh);
        fresh
    }

    /// An operand of 4 or 8 bytes in an XMM register.
    pub fn vector(&mut self, o: Operand, ty: Ty) -> Result<VReg, LowerError> {
        if let Some(v) = self.in_vector(o).filter(|v| self.v.ty(*v) == ty) {
            self.demanded[v.index()] = true;
            return Ok(self.vector_home(v));
        }
        let from = self.reg(o)?;
        let to = self.fresh_vector();
        let (code, size) = match ty {
            Ty::I64 => (Code::Movq_xmm_rm64, Size::B8),
            _ => (Code::Movd_xmm_rm32, Size::B4),
        };
        let operands = smallvec![Opnd::Op(0, Size::B8), Opnd::Op(1, size)];
        let ops = smallvec![RaOperand::reg_def(to), RaOperand::any_use(from)];
        self.emit(Kind::X86(code, operands), ops, None);
        Ok(to)
    }

    /// A value of an XMM register in a general one.
    pub fn general(&mut self, v: Value) -> VReg {
        let from = self.vector_home(v);
        let to = self.fresh();
        let (code, size) = match self.v.ty(v) {
            Ty::I64 => (Code::Movq_rm64_xmm, Size::B8),
            _ => (Code::Movd_rm32_xmm, Size::B4),
        };
        let operands = smallvec![Opnd::Op(0, size), Opnd::Op(1, Size::B8)];
        let ops = smallvec![RaOperand::reg_def(to), RaOperand::reg_use(from)];
        self.emit(Kind::X86(code, operands), ops, None);
        to
    }

    /// The value that an operand is, if that lives in an XMM register.
    pub fn in_vector(&self, o: Operand) -> Option<Value> {
        self.survey.resolve(o).as_value().filter(|v| self.survey.in_vector[v.index()])
    }

    /// What stands for the memory operand of a native that another instruction loads.
    pub fn loaded(
        &mut self,
        inst: &Inst,
        native: &Native,
        ops: &mut Ops,
    ) -> Result<Place, LowerError> {
        let malformed = || LowerError::Malformed("a native that cannot be split".into());
        let ty = native.split_ty().ok_or_else(malformed)?;
        let form = native.form().ok_or_else(malformed)?;
        let operand = inst.args[0];
        if let Some(load) = self.fusable(operand, ty)
            && self
                .survey
                .inst_of(load)
                .is_some_and(|load| inst.anchor.is_none_or(|anchor| load.anchor == Some(anchor)))
            && let Opnd::Mem(address) = self.fuse(load, ops)?
        {
            return Ok(Place::Memory(address));
        }
        let is_general = match form {
            Form::General => true,
            Form::Either(..) => self.in_vector(operand).is_none(),
            Form::Vector(..) => false,
            Form::Store => return Err(malformed()),
        };
        let r = if is_general { self.reg(operand)? } else { self.vector(operand, ty)? };
        ops.push(RaOperand::any_use(r));
        let at = (ops.len() - 1) as u8;
        Ok(if is_general { Place::General(at) } else { Place::Vector(at) })
    }

    /// Are the bytes zero that the native at the current position does not store of its register? Only its own block
    /// is looked at.
    pub fn is_stored_clean(&self, native: &Native) -> bool {
        let size = native.mem_size.unwrap_or(8);
        let mut register = native.inst.op1_register().number() as u32;
        for inst in self.v.blocks[self.block].insts[..self.pos].iter().rev() {
            let writer = inst.native.map(|n| &self.v.natives[n.index()]);
            let Some(writer) = writer.filter(|n| n.vec_write >> register & 1 != 0) else {
                continue;
            };
            match writer.upper() {
                Upper::Zero(above) => return above <= size,
                Upper::Kept(above) if above <= size => {}
                Upper::Copied(from) => register = from,
                Upper::Kept(_) | Upper::Other => return false,
            }
        }
        false
    }

    /// Lets the native that computes what is stored store it itself, if nothing stands between the two that could
    /// tell. False if it cannot.
    pub fn store_by_native(&mut self, inst: &Inst) -> Result<bool, LowerError> {
        let Some(v) = inst.args[2].as_value() else { return Ok(false) };
        let Def::Inst(b, i) = self.survey.defs[v.index()] else { return Ok(false) };
        let of = self.survey.inst_of(v).and_then(|inst| inst.native);
        let Some(native) = of.map(|n| &self.v.natives[n.index()]) else { return Ok(false) };
        let memory = &self.survey.memory_before[self.block];
        let is_own = native.split == Split::Stored
            && native.split_ty() == Some(inst.ty)
            && b as usize == self.block
            && self.survey.hot_uses[v.index()] == 1
            && !self.survey.leaf[v.index()]
            && self.vregs[v.index()].is_none()
            && memory[self.pos] == memory[i as usize + 1];
        if !is_own {
            return Ok(false);
        }
        let mem =
            inst.mem.ok_or_else(|| LowerError::Malformed("store without an address".into()))?;
        self.fused[v.index()] = true;
        let mut ops = Ops::new();
        let address: Addr =
            self.address_of(mem, inst.args[0], inst.args[1], &mut ops, OperandConstraint::Reg)?;
        let site = inst.anchor.map(|anchor| self.site(SiteKind::Fault, anchor));
        let kind = Kind::Native(Box::new(native.clone()), Place::Memory(address));
        self.emit(kind, ops, site);
        Ok(true)
    }
}

/// Does this instruction use its operand `n` in an XMM register, if that is where it is? Stores and jumps take what
/// there is.
pub(super) fn takes_vector(inst: &Inst, n: usize, natives: &[Native]) -> bool {
    match inst.op {
        Op::Store => n == 2 && matches!(inst.ty, Ty::I64 | Ty::I32),
        Op::Native => {
            let native = inst.native.and_then(|n| natives.get(n.index()));
            let form = native.filter(|n| n.split == Split::Loaded).and_then(|n| n.form());
            let is_move = native.is_some_and(|n| n.register_move() == Some(Split::Loaded));
            n == 0 && (is_move || matches!(form, Some(Form::Vector(..) | Form::Either(..))))
        }
        _ => false,
    }
}
