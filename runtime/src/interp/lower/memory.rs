//! Lowers loads, stores and natives: the operations that can fault.
//!
//! Invariant: an operation that can fault is emitted by `emit_faulting`, which notes the state of
//! its site and rejects a block whose guest instruction has changed the state before.
//!
//! Example: `mov eax, [rdi + 4*rcx + 8]` becomes one load with a = rdi, b = rcx, c = 2 (the scale's
//! logarithm) and imm = 8, into the slot of eax.

use super::{LowerError, Lowerer};
use crate::interp::code::{self, Code, FlagState, OperandSource};
use crate::interp::flags::{Form, Kind};
use crate::interp::native::{ARITHMETIC, NativeOp};
use crate::interp::select;
use dynasour_ir::{Effects, Inst, Mem, Native, Op, Operand, Segment, Ty, Value};
use smallvec::SmallVec;

impl Lowerer<'_> {
    /// The fields a, b, c and imm of an operation at an address: the slots of base and index, the
    /// logarithm of the scale, and the displacement. A segment's base takes the place of the index;
    /// if the address has an index, too, the address without the segment is computed in a
    /// temporary first.
    fn address(
        &mut self,
        mem: Mem,
        base: Operand,
        index: Operand,
    ) -> Result<(u16, u16, u16, u64), LowerError> {
        let scale = mem.scale.trailing_zeros() as u16 & 3;
        let mut disp = mem.disp as u64;
        let base = match self.source(base)? {
            OperandSource::Slot(s) => s,
            OperandSource::Const(c) => {
                disp = disp.wrapping_add(c);
                code::ZERO
            }
        };
        let index = match self.source(index)? {
            OperandSource::Slot(s) => s,
            OperandSource::Const(c) => {
                disp = disp.wrapping_add(c << scale);
                code::ZERO
            }
        };
        let segment = match mem.seg {
            None => return Ok((base, index, scale, disp)),
            Some(Segment::Fs) => code::FS_BASE,
            Some(Segment::Gs) => code::GS_BASE,
        };
        if index == code::ZERO {
            return Ok((base, segment, 0, disp));
        }
        let t = self.temp()?;
        self.emit(code::address, t, base, index, scale, disp);
        Ok((t, segment, 0, 0))
    }

    /// The memory operand of `inst`, with the operands for base and index.
    fn operands_of(inst: &Inst) -> Result<(Mem, Operand, Operand), LowerError> {
        match (inst.mem, &inst.args[..]) {
            (Some(mem), [base, index, ..]) => Ok((mem, *base, *index)),
            _ => Err(LowerError::Unsupported(inst.op.to_string())),
        }
    }

    /// Lowers the load at position `i`.
    pub(super) fn load(&mut self, i: usize, inst: &Inst) -> Result<(), LowerError> {
        let v = inst.def().ok_or_else(|| LowerError::Unsupported(inst.op.to_string()))?;
        let (mem, base, index) = Self::operands_of(inst)?;
        let (a, b, c, imm) = self.address(mem, base, index)?;
        let extension = self.merge_extension(i, v);
        let (result, run) = match extension {
            Some((wide, to)) => (wide, select::load_sext(inst.ty, to)),
            None => (v, select::load(inst.ty, b != code::ZERO)),
        };
        let run = run.ok_or_else(|| LowerError::Unsupported(format!("{}.{}", inst.op, inst.ty)))?;
        let d = self.destination(i, result)?;
        self.emit_faulting(Code { run, imm, d, a, b, c })?;
        self.bind(result, d, true);
        Ok(())
    }

    /// If the next instruction is a sign extension and the only reader of `v`, which is loaded at
    /// `i`, the load extends. Returns the extended value and its type.
    fn merge_extension(&mut self, i: usize, v: Value) -> Option<(Value, Ty)> {
        if self.work.uses[v.index()] != 1 {
            return None;
        }
        let next = self.insts.get(i + 1)?;
        match next.op {
            Op::Sext(_) if next.args[0] == Operand::Value(v) => {
                let wide = next.def()?;
                self.work.last_use[wide.index()]?;
                self.work.merged[i + 1] = true;
                Some((wide, next.ty))
            }
            _ => None,
        }
    }

    /// Lowers a store.
    pub(super) fn store(&mut self, inst: &Inst) -> Result<(), LowerError> {
        let (mem, base, index) = Self::operands_of(inst)?;
        let (a, b, c, imm) = self.address(mem, base, index)?;
        let unsupported = || LowerError::Unsupported(format!("{}.{}", inst.op, inst.ty));
        let value = *inst.args.get(2).ok_or_else(unsupported)?;
        if let OperandSource::Const(k) = self.source(value)? {
            let k = inst.ty.sext(k);
            if let (Ok(k), Ok(disp)) = (i32::try_from(k), i32::try_from(imm as i64)) {
                let run = select::store_constant(inst.ty).ok_or_else(unsupported)?;
                let imm = (k as u32 as u64) << 32 | u64::from(disp as u32);
                return self.emit_faulting(Code { run, imm, d: 0, a, b, c });
            }
        }
        let d = self.slot(value)?;
        let run = select::store(inst.ty, b != code::ZERO).ok_or_else(unsupported)?;
        self.emit_faulting(Code { run, imm, d, a, b, c })
    }

    /// Lowers the native at position `i`.
    pub(super) fn native(&mut self, i: usize, inst: &Inst) -> Result<(), LowerError> {
        let bad = || LowerError::Unsupported("native without its table entry".to_string());
        let version = self.version;
        let native: &Native =
            inst.native.and_then(|n| version.natives.get(n.index())).ok_or_else(bad)?;
        let mut args = inst.args.iter().copied();
        let mut next = || args.next().ok_or_else(bad);

        let addr = if native.mem_size.is_some() {
            let (base, index) = (next()?, next()?);
            match self.address(inst.mem.ok_or_else(bad)?, base, index)? {
                (a, code::ZERO, _, 0) => a,
                (a, b, c, imm) => {
                    let t = self.temp()?;
                    self.emit(code::address, t, a, b, c, imm);
                    t
                }
            }
        } else {
            code::ZERO
        };
        let mut inputs: SmallVec<[u16; 8]> = SmallVec::new();
        for _ in &native.gpr_in {
            let operand = next()?;
            inputs.push(self.slot(operand)?);
        }
        let flags_def = native.flags_out.then(|| inst.defs.last().copied()).flatten();
        let restartable = native.effects.contains(Effects::RESTARTABLE);
        // After a fault in the middle of a restartable instruction the flags depend on the
        // processor. The thunk stores the flags that the processor has left.
        let faults_with_flags = restartable && native.flags_out;
        let flags_wanted =
            faults_with_flags || flags_def.is_some_and(|v| self.work.last_use[v.index()].is_some());
        let flags_read = native.inst.rflags_read() & ARITHMETIC != 0;
        let flags_in = if native.flags_in && (flags_wanted || flags_read) {
            let operand = next()?;
            let source = self.flag_bits(operand)?;
            Some(self.slot_of(source)?)
        } else {
            None
        };
        let mut outputs: SmallVec<[u16; 8]> = SmallVec::new();
        for (k, gpr) in native.gpr_out.iter().enumerate() {
            let v = *inst.defs.get(k).ok_or_else(bad)?;
            if restartable {
                // At a fault the thunk has already written the register. Values and flags that are
                // needed from this position on are therefore copied from it first.
                self.protect(gpr.number() as u16, i.saturating_sub(1))?;
            }
            let d = self.destination(i, v)?;
            if restartable && d as usize != gpr.number() {
                return Err(LowerError::Imprecise(self.pc));
            }
            outputs.push(d);
        }
        let flags_out = if flags_wanted { Some(self.temp()?) } else { None };

        // `protect` may have emitted copies of the inputs' slots; the slots are unchanged.
        let op = NativeOp::new(native, self.natives, &inputs, &outputs, flags_in, flags_out)?;
        self.tables.natives.push(Box::new(op));
        let table = self.tables.natives.last().map_or(0, |n| std::ptr::from_ref(&**n) as u64);
        self.emit_faulting(Code { run: code::native, imm: table, d: 0, a: addr, b: 0, c: 0 })?;
        if faults_with_flags && let (Some(t), Some(site)) = (flags_out, self.work.sites.last_mut())
        {
            let zero = OperandSource::Const(0);
            site.flags = FlagState::Known(
                Kind::new(Form::Bits, Ty::I64),
                [OperandSource::Slot(t), zero, zero],
            );
        }

        for (k, d) in outputs.iter().enumerate() {
            self.bind(inst.defs[k], *d, true);
        }
        if let (Some(t), Some(v)) = (flags_out, flags_def) {
            let zero = OperandSource::Const(0);
            self.new_desc(v, Form::Bits, Ty::I64, [OperandSource::Slot(t), zero, zero]);
        }
        Ok(())
    }
}
