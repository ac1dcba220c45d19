//! Loads, stores, natives: everything that can fault.

use super::{LowerError, Lowerer};
use crate::interp::code::{self, Code, FlagState, Source};
use crate::interp::flags::{Form, Kind};
use crate::interp::native::{ARITHMETIC, NativeOp};
use crate::interp::select;
use dynasour_ir::{Effects, Inst, Mem, Native, Op, Operand, Segment, Ty, Value};
use smallvec::SmallVec;

impl Lowerer<'_> {
    /// Slots and shape of an address: base, index, scale, displacement.
    fn address(
        &mut self,
        mem: Mem,
        base: Operand,
        index: Operand,
    ) -> Result<(u16, u16, u16, u64), LowerError> {
        let scale = mem.scale.trailing_zeros() as u16 & 3;
        let mut disp = mem.disp as u64;
        let base = match self.source(base)? {
            Source::Slot(s) => s,
            Source::Const(c) => {
                disp = disp.wrapping_add(c);
                code::ZERO
            }
        };
        let index = match self.source(index)? {
            Source::Slot(s) => s,
            Source::Const(c) => {
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

    fn operands_of(inst: &Inst) -> Result<(Mem, Operand, Operand), LowerError> {
        match (inst.mem, &inst.args[..]) {
            (Some(mem), [base, index, ..]) => Ok((mem, *base, *index)),
            _ => Err(LowerError::Unsupported(inst.op.to_string())),
        }
    }

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
        self.place(result, d, true);
        Ok(())
    }

    /// A sign extension that is the only reader of the value loaded at `i` is done by the load.
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

    pub(super) fn store(&mut self, inst: &Inst) -> Result<(), LowerError> {
        let (mem, base, index) = Self::operands_of(inst)?;
        let (a, b, c, imm) = self.address(mem, base, index)?;
        let unsupported = || LowerError::Unsupported(format!("{}.{}", inst.op, inst.ty));
        let value = *inst.args.get(2).ok_or_else(unsupported)?;
        if let Source::Const(k) = self.source(value)? {
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
        // What a fault in the middle leaves in the flags depends on the processor: it is taken from
        // there.
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
                // After a fault the register has changed already: what the fault looks at moves out
                // of its way.
                self.protect(gpr.number() as u16, i.saturating_sub(1))?;
            }
            let d = self.destination(i, v)?;
            if restartable && d as usize != gpr.number() {
                return Err(LowerError::Imprecise(self.pc));
            }
            outputs.push(d);
        }
        let flags_out = if flags_wanted { Some(self.temp()?) } else { None };

        // Protecting the outputs may have emitted copies, but the inputs' slots are still as they
        // were.
        let op = NativeOp::new(native, self.natives, &inputs, &outputs, flags_in, flags_out)?;
        self.tables.natives.push(Box::new(op));
        let table = self.tables.natives.last().map_or(0, |n| std::ptr::from_ref(&**n) as u64);
        self.emit_faulting(Code { run: code::native, imm: table, d: 0, a: addr, b: 0, c: 0 })?;
        if faults_with_flags && let (Some(t), Some(site)) = (flags_out, self.work.sites.last_mut())
        {
            let zero = Source::Const(0);
            site.flags =
                FlagState::Known(Kind::new(Form::Bits, Ty::I64), [Source::Slot(t), zero, zero]);
        }

        for (k, d) in outputs.iter().enumerate() {
            self.place(inst.defs[k], *d, true);
        }
        if let (Some(t), Some(v)) = (flags_out, flags_def) {
            let zero = Source::Const(0);
            self.new_desc(v, Form::Bits, Ty::I64, [Source::Slot(t), zero, zero]);
        }
        Ok(())
    }
}
