//! Describes the path and the guards of a trace for the census ([`crate::observe::census`]).
//!
//! An `assume` does not record which assumption it came from. [`guard`] infers the kind from its
//! predicate and its anchor, by the first of these rules that applies:
//!
//! 1. The anchor's target is computed: the guard checks the target of an indirect transfer.
//! 2. The anchor's target is the head, and the predicate compares a register's value at the entry
//!    with the value that it had at each sample: the guard checks that value.
//! 3. The predicate compares a load from the bytes of a recorded writable block: the guard checks
//!    the code.
//! 4. The predicate is an unsigned lower bound, and the anchor does not belong to a branch of the
//!    path or is shared with an instruction before or with the next memory access: the guard checks
//!    aliasing. A recorded branch has an anchor of its own.
//! 5. Otherwise the guard checks the direction of a branch.
//!
//! Data: none. A wrong inference shows the user a wrong kind and has no other effect. No lock: the
//! functions are pure, but for the bytes of guest code that [`steps`] reads.
//!
//! Example: `assume v35 else a4` with `v35 = le.u.i32 v31, 0x11e1a2ff` and an anchor at a constant
//! pc falls to rule 5, because the bound is not of type i64.

use crate::memory;
use crate::observe::census::{Anchor, Guard, GuardKind, PathStep, Transfer};
use dynasour_ir::expressions::Expressions;
use dynasour_ir::{BlockId, GuestTerm, Inst, Loc, Op, Operand, Term, Ty, Version};
use dynasour_tracer::{Path, Step};
use std::fmt::Write;

/// The recorded blocks of `path`; with their bytes if `with_code`.
pub fn steps(path: &Path, with_code: bool) -> Vec<PathStep> {
    let step = |step: &Step| PathStep {
        pc: step.block.pc,
        last: last(step),
        end: step.block.end,
        instructions: step.block.count,
        transfer: transfer(step),
        next: step.next,
        code: with_code.then(|| code(step)),
    };
    path.steps.iter().map(step).collect()
}

/// The bytes of a block in hexadecimal.
fn code(step: &Step) -> String {
    let mut bytes = vec![0; step.block.end.saturating_sub(step.block.pc) as usize];
    let len = memory::fetch_code(step.block.pc, &mut bytes);
    hex(&bytes[..len])
}

/// Bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    let mut hex = String::with_capacity(2 * bytes.len());
    for b in bytes {
        let _ = write!(hex, "{b:02x}");
    }
    hex
}

/// The pc of the last instruction of a block.
fn last(step: &Step) -> u64 {
    let insts = &step.block.version.blocks[0].insts;
    let at = insts.iter().rev().find(|i| i.op == Op::At).and_then(|i| i.args[0].as_const());
    at.unwrap_or(step.block.pc)
}

fn transfer(step: &Step) -> Transfer {
    match &step.block.version.blocks[0].term {
        Term::Guest(term) => match term {
            GuestTerm::Goto(Operand::Const(_)) => Transfer::Direct,
            GuestTerm::Goto(_) => Transfer::Indirect,
            GuestTerm::Branch { .. } => Transfer::Branch,
            GuestTerm::Call { target: Operand::Const(_), .. } => Transfer::Call,
            GuestTerm::Call { .. } => Transfer::IndirectCall,
            GuestTerm::Ret(_) => Transfer::Return,
            GuestTerm::Syscall { .. } | GuestTerm::Special { .. } | GuestTerm::Trap { .. } => {
                Transfer::Runtime
            }
        },
        Term::Jump { .. } | Term::Branch { .. } | Term::Exit(_) => Transfer::Direct,
    }
}

/// The census record of the guard that was made of the `assume` at `position` (block and index),
/// with all counts zero. None if there is no `assume` at `position`.
pub fn guard(
    version: &Version,
    expressions: &Expressions<'_>,
    path: &Path,
    position: (u32, u32),
) -> Option<Guard> {
    let block = version.blocks.get(position.0 as usize)?;
    let assume = block.insts.get(position.1 as usize).filter(|i| i.op == Op::Assume)?;
    let (anchor, predicate) = (assume.anchor?, assume.args[0]);
    let described =
        Described { version, path, insts: &block.insts, at: position.1 as usize, assume };
    let kinds = described.conjuncts(predicate).into_iter().map(|p| described.kind(p));
    let kind =
        kinds.reduce(|a, b| if a == b { a } else { GuardKind::Mixed }).unwrap_or(GuardKind::Branch);
    let a = &version.anchors[anchor.index()];
    let text = expressions.anchor(anchor);
    Some(Guard {
        index: 0,
        kind,
        pc: described.pc(kind, predicate),
        in_loop: expressions.is_loop(BlockId(position.0)),
        position,
        predicate: expressions.text(predicate),
        english: expressions.predicate(predicate),
        anchor: Anchor {
            name: anchor.to_string(),
            target: a.target.as_const(),
            text: format!("anchor {anchor} = {a}"),
            english: text,
            stores: a.stores.len() as u32,
        },
        executed: 0,
        failed: 0,
        went: Vec::new(),
        host: (0, 0),
    })
}

/// An `assume` with its surroundings.
struct Described<'a> {
    version: &'a Version,
    path: &'a Path,
    /// The instructions of its block.
    insts: &'a [Inst],
    /// Its index among them.
    at: usize,
    assume: &'a Inst,
}

impl Described<'_> {
    fn def(&self, o: Operand) -> Option<&Inst> {
        let v = o.as_value()?;
        self.version.blocks.iter().flat_map(|b| &b.insts).find(|i| i.defs.contains(&v))
    }

    /// The predicates whose conjunction `predicate` is; itself if it is no conjunction.
    fn conjuncts(&self, predicate: Operand) -> Vec<Operand> {
        match self.def(predicate) {
            Some(Inst { op: Op::And, ty: Ty::I1, args, .. }) => {
                args.iter().flat_map(|a| self.conjuncts(*a)).collect()
            }
            _ => vec![predicate],
        }
    }

    fn target(&self) -> Option<Operand> {
        Some(self.version.anchors.get(self.assume.anchor?.index())?.target)
    }

    fn kind(&self, predicate: Operand) -> GuardKind {
        let target = self.target().unwrap_or(Operand::Const(0));
        let at = target.as_const();
        let branches = || self.path.all_steps().filter(|s| transfer(s) == Transfer::Branch);
        match self.def(predicate) {
            _ if at.is_none() => GuardKind::Target,
            Some(Inst { op: Op::Eq, ty: Ty::I64, args, .. })
                if self.is_stable(args[0], args[1]) =>
            {
                GuardKind::Value
            }
            Some(Inst { op: Op::Eq, args, .. }) if self.reads_code(args[0]) => GuardKind::Code,
            Some(inst)
                if is_lower_bound(inst)
                    && (!branches().any(|s| Some(last(s)) == at) || self.shares_anchor()) =>
            {
                GuardKind::Alias
            }
            _ => GuardKind::Branch,
        }
    }

    /// Is `value` a register at the entry, and `constant` the value that this register had at each
    /// sample of the recording?
    fn is_stable(&self, value: Operand, constant: Operand) -> bool {
        let (Some(v), Some(c)) = (value.as_value(), constant.as_const()) else { return false };
        let params = self.version.blocks[0].params.iter().zip(&self.version.entry_locs);
        let loc = params.into_iter().find(|(p, _)| **p == v).map(|(_, loc)| *loc);
        let stable =
            self.path.stable.iter().any(|(g, value)| loc == Some(Loc::Gpr(*g)) && *value == c);
        stable && self.target().and_then(|t| t.as_const()) == Some(self.path.head)
    }

    fn reads_code(&self, o: Operand) -> bool {
        let Some(Inst { op: Op::Load, args, .. }) = self.def(o) else { return false };
        let checked = |pc| {
            self.path
                .all_steps()
                .any(|s| s.block.checked.is_some() && (s.block.pc..s.block.end).contains(&pc))
        };
        args[0].as_const().is_some_and(checked)
    }

    /// Is the anchor also named by an instruction before the `assume` in its block, or by the next
    /// load or store behind it?
    fn shares_anchor(&self) -> bool {
        let shares = |i: &&Inst| i.anchor == self.assume.anchor;
        let behind =
            self.insts[self.at + 1..].iter().find(|i| matches!(i.op, Op::Load | Op::Store));
        self.insts[..self.at].iter().any(|i| shares(&i)) || behind.is_some_and(|i| shares(&i))
    }

    /// The pc of the guest instruction that the guard is about ([`Guard::pc`]).
    fn pc(&self, kind: GuardKind, predicate: Operand) -> u64 {
        let target = self.target().and_then(|t| t.as_const());
        let recorded_target = match self.def(predicate) {
            Some(Inst { op: Op::Eq, args, .. }) if kind == GuardKind::Target => args[1].as_const(),
            _ => None,
        };
        let jump = self.path.all_steps().find(|s| {
            matches!(transfer(s), Transfer::Indirect | Transfer::IndirectCall | Transfer::Return)
                && Some(s.next) == recorded_target
        });
        jump.map(last).or(target).unwrap_or(self.path.head)
    }
}

/// Is `inst` an unsigned comparison `c <= x` or `c < x` of 64 bits with a small constant? An alias
/// guard has this form; its constant is a number of bytes. The limit of 4096 is a guess: an alias
/// guard with a larger constant is shown as a branch.
fn is_lower_bound(inst: &Inst) -> bool {
    matches!(inst.op, Op::LeU | Op::LtU)
        && inst.ty == Ty::I64
        && inst.args[0].as_const().is_some_and(|c| c < 4096)
}
