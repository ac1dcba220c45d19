//! The verifier's rules on instructions, terminators, natives and definitions: op, type, jump,
//! native, anchor, ssa.
//!
//! [`Checker::insts`] checks each instruction by itself; [`Checker::ssa`] runs afterwards, on a
//! valid control-flow graph. Both read the version and append errors; no lock.
//!
//! ```text
//! v1 = add.i64 v0        [op]: 1 operands, 2 are expected
//! jump b1(v0)            [jump]: 1 operands, b1 has 2 parameters
//! ```

use super::{Checker, Rule, Where};
use crate::op::{ArgTy, FlagOp, Op, ResultTy};
use crate::reach::{Cfg, Point, available, definitions, may_fault};
use crate::types::{BlockId, Loc, NativeId, Operand, Ty, Value};
use crate::version::{Effects, GuestTerm, Inst, Native, Split, Term};

/// May `op` carry the type suffix `ty`?
pub fn suffix_allowed(op: Op, ty: Ty) -> bool {
    match op {
        Op::Add | Op::Sub | Op::Mul | Op::MulHighU | Op::MulHighS => ty.is_machine_int(),
        Op::Shl | Op::Shr | Op::Sar | Op::Rol | Op::Ror => ty.is_machine_int(),
        Op::Neg | Op::Popcnt | Op::Clz | Op::Ctz => ty.is_machine_int(),
        Op::LtS | Op::LtU | Op::LeS | Op::LeU => ty.is_machine_int(),
        Op::And | Op::Or | Op::Xor | Op::Not | Op::Eq | Op::Ne | Op::Trunc => {
            ty.is_machine_int() || ty == Ty::I1
        }
        Op::Bswap => matches!(ty, Ty::I32 | Ty::I64),
        Op::Zext(from) | Op::Sext(from) => {
            matches!(from, Ty::I1 | Ty::I8 | Ty::I16 | Ty::I32)
                && ty.is_machine_int()
                && from.bits() < ty.bits()
        }
        Op::Select => ty.is_machine_int() || matches!(ty, Ty::I1 | Ty::Flags),
        Op::Flags(FlagOp::FromBits | FlagOp::SetCf) => ty == Ty::I64,
        Op::Flags(_) => ty.is_machine_int(),
        Op::Load | Op::Store => ty.is_machine_int(),
        Op::Get(loc) | Op::Put(loc) => ty == loc.ty() && !matches!(loc, Loc::Vec(_) | Loc::X87),
        Op::Insert8Low | Op::Insert8High | Op::Insert16 | Op::Cond(_) | Op::FlagBits => {
            ty == Ty::I64
        }
        Op::At | Op::Assume | Op::Poll | Op::Print | Op::Read | Op::Native => ty == Ty::I64,
    }
}

impl Checker<'_> {
    pub(super) fn natives(&mut self) {
        for (i, native) in self.version.natives.iter().enumerate() {
            if let Some(what) = native_fault(native) {
                self.error(Rule::Native, Where::Native(NativeId(i as u32)), what);
            }
        }
    }

    pub(super) fn insts(&mut self) {
        let version = self.version;
        for (b, block) in version.blocks.iter().enumerate() {
            let id = BlockId(b as u32);
            for param in &block.params {
                match self.value_ty(*param) {
                    None => {
                        self.error(Rule::Ssa, Where::Block(id), format!("{param} does not exist"))
                    }
                    Some(Ty::V128 | Ty::V256 | Ty::V512) => {
                        self.error(
                            Rule::Type,
                            Where::Block(id),
                            format!("{param}: vectors are not values"),
                        );
                    }
                    Some(_) => {}
                }
            }
            for (i, inst) in block.insts.iter().enumerate() {
                self.inst(inst, Point { block: id, inst: i });
            }
            let at = Where::Point(Point { block: id, inst: block.insts.len() });
            self.term(&block.term, at);
        }
    }

    fn inst(&mut self, inst: &Inst, point: Point) {
        let at = Where::Point(point);
        if !suffix_allowed(inst.op, inst.ty) {
            self.error(Rule::Op, at, format!("{} cannot have type {}", inst.op, inst.ty));
            return;
        }
        self.mode(inst, point);
        self.anchor_presence(inst, at);
        if inst.native.is_some() != (inst.op == Op::Native) {
            self.error(Rule::Op, at, "a native, and nothing else, names an original instruction");
            return;
        }
        if inst.op == Op::Native {
            return self.native(inst, at);
        }
        if inst.mem.is_some() != matches!(inst.op, Op::Load | Op::Store) {
            self.error(Rule::Op, at, "a load or store, and nothing else, has an address");
            return;
        }
        self.scale(inst, at);
        let (args, result) = inst.op.signature();
        if inst.args.len() != args.len() {
            self.error(
                Rule::Op,
                at,
                format!("{} operands, {} are expected", inst.args.len(), args.len()),
            );
            return;
        }
        for (i, (operand, arg)) in inst.args.iter().zip(args).enumerate() {
            let want = match arg {
                _ if inst.op == Op::Trunc => {
                    self.trunc_operand(*operand, inst.ty, at);
                    continue;
                }
                ArgTy::Same => inst.ty,
                ArgTy::Is(ty) => *ty,
            };
            self.check_ty(Rule::Type, at, *operand, want, format_args!("operand {}", i + 1));
        }
        let result = match result {
            ResultTy::None => None,
            ResultTy::Same => Some(inst.ty),
            ResultTy::Is(ty) => Some(ty),
        };
        match (inst.defs.as_slice(), result) {
            ([], None) => {}
            ([def], Some(ty)) => self.result(*def, ty, at),
            (defs, _) => {
                let expected = usize::from(result.is_some());
                self.error(Rule::Op, at, format!("{} results, {expected} expected", defs.len()));
            }
        }
    }

    fn result(&mut self, def: Value, want: Ty, at: Where) {
        match self.value_ty(def) {
            None => self.error(Rule::Ssa, at, format!("{def} does not exist")),
            Some(ty) if ty != want => {
                self.error(Rule::Type, at, format!("{def} is {ty}, the result is {want}"))
            }
            Some(_) => {}
        }
    }

    fn trunc_operand(&mut self, operand: Operand, to: Ty, at: Where) {
        let Operand::Value(v) = operand else { return };
        match self.value_ty(v) {
            Some(from) if from.is_machine_int() && from.bits() > to.bits() => {}
            Some(from) => self.error(
                Rule::Type,
                at,
                format!("{v} is {from}, which cannot be truncated to {to}"),
            ),
            None => self.error(Rule::Ssa, at, format!("{v} does not exist")),
        }
    }

    fn scale(&mut self, inst: &Inst, at: Where) {
        if inst.mem.is_some_and(|m| !matches!(m.scale, 1 | 2 | 4 | 8)) {
            self.error(Rule::Op, at, "the scale of an address is 1, 2, 4 or 8");
        }
    }

    /// Operations that only `base`, and operations that only traces may contain.
    fn mode(&mut self, inst: &Inst, point: Point) {
        let at = Where::Point(point);
        let is_base = self.version.is_base();
        match inst.op {
            Op::Get(_) | Op::Put(_) | Op::At if !is_base => {
                self.error(Rule::Shape, at, format!("{} in a trace", inst.op));
            }
            Op::Assume | Op::Poll if is_base => {
                self.error(Rule::Shape, at, format!("{} in base", inst.op))
            }
            Op::At if inst.args.first().is_some_and(|a| a.as_const().is_none()) => {
                self.error(Rule::Op, at, "the pc of `at` is a constant");
            }
            op if is_base && point.inst == 0 && op != Op::At => {
                self.error(Rule::Shape, at, "an instruction of base belongs to an `at`");
            }
            _ => {}
        }
    }

    fn anchor_presence(&mut self, inst: &Inst, at: Where) {
        let always = matches!(inst.op, Op::Assume | Op::Poll);
        let faults = may_fault(self.version, inst);
        match inst.anchor {
            Some(a) if a.index() >= self.version.anchors.len() => {
                self.error(Rule::Anchor, at, format!("{a} does not exist"));
            }
            Some(_) if self.version.is_base() => self.error(Rule::Anchor, at, "an anchor in base"),
            Some(_) if !always && !faults => {
                self.error(Rule::Anchor, at, "this never falls back to an anchor")
            }
            None if always || (faults && !self.version.is_base()) => {
                self.error(Rule::Anchor, at, "an anchor to fall back to is missing");
            }
            Some(_) | None => {}
        }
    }

    fn native(&mut self, inst: &Inst, at: Where) {
        let Some(native) = inst.native.and_then(|n| self.version.natives.get(n.index())) else {
            return self.error(Rule::Native, at, "this native does not exist");
        };
        let native = native.clone();
        if inst.mem.is_some() != native.has_address() {
            return self.error(
                Rule::Native,
                at,
                "an address is there if and only if the native declares one",
            );
        }
        self.scale(inst, at);
        let gprs = native.leading_args() + native.gpr_in.len();
        let expected = gprs + usize::from(native.flags_in);
        if inst.args.len() != expected {
            return self.error(
                Rule::Native,
                at,
                format!("{} operands, {expected} expected", inst.args.len()),
            );
        }
        for (i, operand) in inst.args.iter().enumerate() {
            let ty = match native.split_ty().filter(|_| native.split == Split::Loaded) {
                Some(ty) if i == 0 => ty,
                _ if i < gprs => Ty::I64,
                _ => Ty::Flags,
            };
            self.check_ty(Rule::Type, at, *operand, ty, format_args!("operand {}", i + 1));
        }
        let stored = native.split_ty().filter(|_| native.split == Split::Stored);
        let expected = native.gpr_out.len()
            + usize::from(native.flags_out)
            + usize::from(native.split == Split::Stored);
        if inst.defs.len() != expected {
            return self.error(
                Rule::Native,
                at,
                format!("{} results, {expected} expected", inst.defs.len()),
            );
        }
        for (i, def) in inst.defs.iter().enumerate() {
            let ty = if i < native.gpr_out.len() { Ty::I64 } else { Ty::Flags };
            self.result(*def, stored.unwrap_or(ty), at);
        }
    }

    fn edge(&mut self, to: BlockId, args: &[Operand], at: Where) {
        if to == BlockId(0) {
            return self.error(Rule::Shape, at, "a jump to the entry block");
        }
        let Some(target) = self.version.blocks.get(to.index()) else {
            return self.error(Rule::Jump, at, format!("{to} does not exist"));
        };
        if args.len() != target.params.len() {
            let what =
                format!("{} operands, {to} has {} parameters", args.len(), target.params.len());
            return self.error(Rule::Jump, at, what);
        }
        for (i, (arg, param)) in args.iter().zip(&target.params).enumerate() {
            if let Some(ty) = self.value_ty(*param) {
                self.check_ty(Rule::Jump, at, *arg, ty, format_args!("operand {}", i + 1));
            }
        }
    }

    fn term(&mut self, term: &Term, at: Where) {
        let version = self.version;
        match term {
            Term::Jump { to, args } => self.edge(*to, args, at),
            Term::Branch { cond, then, otherwise } => {
                self.check_ty(Rule::Type, at, *cond, Ty::I1, format_args!("condition"));
                self.edge(then.to, &then.args, at);
                self.edge(otherwise.to, &otherwise.args, at);
            }
            Term::Exit(a) if a.index() >= version.anchors.len() => {
                self.error(Rule::Anchor, at, format!("{a} does not exist"));
            }
            Term::Exit(_) => {}
            Term::Guest(GuestTerm::Branch { cond, .. }) => {
                self.check_ty(Rule::Type, at, *cond, Ty::I1, format_args!("condition"))
            }
            Term::Guest(
                GuestTerm::Goto(pc) | GuestTerm::Call { target: pc, .. } | GuestTerm::Ret(pc),
            ) => {
                self.check_ty(Rule::Type, at, *pc, Ty::I64, format_args!("target"));
            }
            Term::Guest(
                GuestTerm::Syscall { .. } | GuestTerm::Special { .. } | GuestTerm::Trap { .. },
            ) => {}
        }
    }

    /// Each value is defined once, and its definition dominates its uses.
    pub(super) fn ssa(&mut self, cfg: &Cfg) {
        let version = self.version;
        let defs = definitions(version);
        let mut seen = vec![false; version.types.len()];
        let mut define = |checker: &mut Self, v: Value, at: Where| {
            if std::mem::replace(&mut seen[v.index()], true) {
                checker.error(Rule::Ssa, at, format!("{v} is defined twice"));
            }
        };
        for (b, block) in version.blocks.iter().enumerate() {
            let id = BlockId(b as u32);
            block.params.iter().for_each(|v| define(self, *v, Where::Block(id)));
            for (i, inst) in block.insts.iter().enumerate() {
                inst.defs
                    .iter()
                    .for_each(|v| define(self, *v, Where::Point(Point { block: id, inst: i })));
            }
        }
        for block in &cfg.order {
            let body = &version.blocks[block.index()];
            let check = |checker: &mut Self, operand: Operand, inst: usize| {
                let Operand::Value(v) = operand else { return };
                let point = Point { block: *block, inst };
                match defs[v.index()] {
                    None => {
                        checker.error(Rule::Ssa, Where::Point(point), format!("{v} is not defined"))
                    }
                    Some(def) if !available(cfg, def, point) => {
                        let what = format!("{v} is used where its definition does not reach");
                        checker.error(Rule::Ssa, Where::Point(point), what);
                    }
                    Some(_) => {}
                }
            };
            for (i, inst) in body.insts.iter().enumerate() {
                inst.args.iter().for_each(|a| check(self, *a, i));
            }
            let end = body.insts.len();
            crate::Version::term_operands(&body.term).iter().for_each(|a| check(self, *a, end));
        }
    }
}

/// The inconsistency in a native's declaration, if there is one.
fn native_fault(native: &Native) -> Option<&'static str> {
    let is_kept = |g| native.gpr_in.contains(g);
    let keeps = native.gpr_out.iter().all(is_kept) && (native.flags_in || !native.flags_out);
    if native.effects.contains(Effects::RESTARTABLE) && !keeps {
        return Some("it is restartable and does not read what it writes, which a fault shows");
    }
    let writes_in_place = native.vec_write != 0 || !native.writes.is_empty();
    if writes_in_place && !native.effects.contains(Effects::STATE) {
        return Some("it writes in-place state without the effect `state`");
    }
    if native.vec_read != 0 && !native.effects.contains(Effects::READ_STATE) {
        return Some("it reads vector registers without the effect `read_state`");
    }
    if native.writes.iter().any(|loc| loc.ssa_index().is_some()) {
        return Some("an SSA location is among its in-place writes");
    }
    match native.split {
        Split::No => {}
        _ if native.split_ty().is_none() => {
            return Some("a value cannot stand for its memory operand");
        }
        _ if native.effects.intersects(Split::EXCLUDES) => {
            return Some("another instruction accesses memory for it, but it does, too");
        }
        Split::Stored if !native.gpr_out.is_empty() || native.flags_out => {
            return Some("it has other results than what is to be stored");
        }
        Split::Loaded | Split::Stored => {}
    }
    let distinct =
        |gprs: &[crate::Gpr]| gprs.iter().enumerate().all(|(i, g)| !gprs[..i].contains(g));
    if !distinct(&native.gpr_in) || !distinct(&native.gpr_out) {
        return Some("a register is declared twice");
    }
    None
}
