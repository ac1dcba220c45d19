//! Builds straight-line IR: one method for each operation; constants are folded on the way.
//!
//! The lifter appends the instructions of a `base` block through [`Builder`]; the trace builder and
//! tests build traces with it. A builder borrows the version in which it names values and declares
//! natives, and owns the list of instructions; the caller moves the list into a block. Invariant: a
//! value is declared before the instruction that defines it is appended. No lock: the version
//! belongs to the caller.
//!
//! ```text
//! let sum = b.binary(Op::Add, Ty::I64, rax, Operand::Const(1));    appends  v7 = add.i64 v3, 1
//! let four = b.binary(Op::Add, Ty::I64, Const(1), Const(3));       appends nothing: the constant 4
//! ```

use crate::op::{Cond, FlagOp, Op};
use crate::origin::{Origin, Origins};
use crate::semantics;
use crate::types::{AnchorId, Gpr, Loc, NativeId, Operand, Ty, Value};
use crate::version::{Inst, Mem, Native, Version};
use smallvec::SmallVec;

/// Appends instructions to a list and names their results in a version.
pub struct Builder<'v> {
    /// Where values and natives are declared.
    pub version: &'v mut Version,
    /// The instructions so far.
    pub insts: Vec<Inst>,
}

impl<'v> Builder<'v> {
    /// An empty list of instructions for `version`.
    pub fn new(version: &'v mut Version) -> Builder<'v> {
        Builder { version, insts: Vec::new() }
    }

    fn push(&mut self, op: Op, ty: Ty, result: Ty, args: &[Operand]) -> Operand {
        let v = self.version.value(result);
        self.insts.push(Inst::new(op, ty, Some(v), args));
        v.into()
    }

    /// A pure integer or i1 operation, folded when all operands are constants.
    pub fn pure(&mut self, op: Op, ty: Ty, args: &[Operand]) -> Operand {
        debug_assert!(op.is_pure());
        let consts: SmallVec<[u64; 3]> = args.iter().filter_map(|a| a.as_const()).collect();
        if consts.len() == args.len() && !matches!(op, Op::Flags(_) | Op::Cond(_) | Op::FlagBits) {
            return Operand::Const(semantics::eval(op, ty, &consts));
        }
        let result = match op.signature().1 {
            crate::op::ResultTy::Is(t) => t,
            _ => ty,
        };
        self.push(op, ty, result, args)
    }

    /// A two-operand operation.
    pub fn binary(&mut self, op: Op, ty: Ty, a: Operand, b: Operand) -> Operand {
        self.pure(op, ty, &[a, b])
    }

    /// Zero extension; the same operand if the types are equal.
    pub fn zext(&mut self, to: Ty, from: Ty, a: Operand) -> Operand {
        if to == from { a } else { self.pure(Op::Zext(from), to, &[a]) }
    }

    /// Sign extension; the same operand if the types are equal.
    pub fn sext(&mut self, to: Ty, from: Ty, a: Operand) -> Operand {
        if to == from { a } else { self.pure(Op::Sext(from), to, &[a]) }
    }

    /// The low bits; the same operand if the types are equal.
    pub fn trunc(&mut self, to: Ty, from: Ty, a: Operand) -> Operand {
        if to == from { a } else { self.pure(Op::Trunc, to, &[a]) }
    }

    /// `c ? a : b`
    pub fn select(&mut self, ty: Ty, c: Operand, a: Operand, b: Operand) -> Operand {
        self.pure(Op::Select, ty, &[c, a, b])
    }

    /// The flags an operation leaves.
    pub fn flags(&mut self, op: FlagOp, ty: Ty, args: &[Operand]) -> Operand {
        self.pure(Op::Flags(op), ty, args)
    }

    /// A condition read from flags.
    pub fn cond(&mut self, cond: Cond, flags: Operand) -> Operand {
        self.pure(Op::Cond(cond), Ty::I64, &[flags])
    }

    /// Reads a guest location.
    pub fn get(&mut self, loc: Loc) -> Operand {
        self.push(Op::Get(loc), loc.ty(), loc.ty(), &[])
    }

    /// Reads a general-purpose register.
    pub fn get_gpr(&mut self, gpr: Gpr) -> Operand {
        self.get(Loc::Gpr(gpr))
    }

    /// Writes a guest location.
    pub fn put(&mut self, loc: Loc, v: Operand) {
        self.insts.push(Inst::new(Op::Put(loc), loc.ty(), None, &[v]));
    }

    /// Marks the start of the guest instruction at `pc`.
    pub fn at(&mut self, pc: u64) {
        self.insts.push(Inst::new(Op::At, Ty::I64, None, &[Operand::Const(pc)]));
    }

    /// Reads memory at `mem` over `base` and `index`.
    pub fn load(&mut self, ty: Ty, mem: Mem, base: Operand, index: Operand) -> Operand {
        let v = self.push(Op::Load, ty, ty, &[base, index]);
        self.insts.last_mut().expect("just pushed").mem = Some(mem);
        v
    }

    /// Writes memory at `mem` over `base` and `index`.
    pub fn store(&mut self, ty: Ty, mem: Mem, base: Operand, index: Operand, v: Operand) {
        let mut inst = Inst::new(Op::Store, ty, None, &[base, index, v]);
        inst.mem = Some(mem);
        self.insts.push(inst);
    }

    /// Prints a value (i64) as an observable event.
    pub fn print(&mut self, v: Operand) {
        self.insts.push(Inst::new(Op::Print, Ty::I64, None, &[v]));
    }

    /// The next value of the input (i64).
    pub fn read(&mut self) -> Operand {
        self.push(Op::Read, Ty::I64, Ty::I64, &[])
    }

    /// If `predicate` is false, control leaves through `anchor`.
    pub fn assume(&mut self, origin: Origin, predicate: Operand, anchor: AnchorId) {
        self.insts.push(Inst::assume(predicate, Some(anchor), Origins::of(origin)));
    }

    /// An original instruction. [`Native`] documents the order of `args` and of the returned
    /// results.
    pub fn native(
        &mut self,
        native: Native,
        mem: Option<Mem>,
        args: &[Operand],
    ) -> SmallVec<[Value; 3]> {
        let mut inst = Inst::new(Op::Native, Ty::I64, None, args);
        for _ in &native.gpr_out {
            inst.defs.push(self.version.value(Ty::I64));
        }
        if native.flags_out {
            inst.defs.push(self.version.value(Ty::Flags));
        }
        inst.mem = mem;
        inst.native = Some(NativeId(self.version.natives.len() as u32));
        self.version.natives.push(native);
        let defs = inst.defs.iter().copied().collect();
        self.insts.push(inst);
        defs
    }
}
