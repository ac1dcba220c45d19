//! Readable expressions for the values, predicates and anchors of a trace, for people who read
//! `explain`.
//!
//! SSA names say nothing to a reader who knows the guest's registers. So a value is written as an
//! expression over three things: what the guest's locations held at the version's entry
//! (`rdi@entry`) and at its loop's head (`rcx@loop`); loads; and value names, where the expression
//! would become too long:
//!
//! ```text
//! v7 = add.i64 v3, 1                rcx@loop + 1
//! v9 = cond.l v8                    rcx@loop + 1 < 100                (v8 = flags.sub.i64 v7, 100)
//! anchor a3 = base.0x40 [rcx = v7]  rcx = rcx@loop + 1
//! ```
//!
//! Unsigned comparisons have a `u`, operations on less than 64 bits their width. The expressions
//! are for reading; only the text form is exact.
//!
//! [`Expressions`] borrows the version and owns the names of its values; reports build one for each
//! version they show. No lock.

use crate::op::{Cond, FlagOp, Op};
use crate::types::{AnchorId, BlockId, Loc, Operand, Ty, Value};
use crate::version::{Inst, Mem, Segment, Version};
use std::collections::HashMap;

/// Deepest nesting of an expression; below it stands the value's name (guess: deeper ones are hard
/// to read).
const DEEPEST: u32 = 5;

/// The readable names of a version's values.
pub struct Expressions<'v> {
    version: &'v Version,
    defs: Vec<Option<&'v Inst>>,
    names: HashMap<Value, String>,
}

impl<'v> Expressions<'v> {
    /// The expressions of a trace version.
    pub fn new(version: &'v Version) -> Expressions<'v> {
        let mut defs = vec![None; version.types.len()];
        for inst in version.blocks.iter().flat_map(|b| &b.insts) {
            inst.defs.iter().for_each(|d| defs[d.index()] = Some(inst));
        }
        let mut names = HashMap::new();
        if let Some(entry) = version.blocks.first() {
            let params = entry.params.iter().zip(&version.entry_locs);
            names.extend(params.map(|(v, loc)| (*v, format!("{loc}@entry"))));
        }
        // The varmap of a loop's poll names the location of each parameter.
        for block in version.blocks.iter().skip(1) {
            let poll = block.insts.iter().find(|i| i.op == Op::Poll).and_then(|i| i.anchor);
            let Some(anchor) = poll.and_then(|a| version.anchors.get(a.index())) else { continue };
            for (loc, operand) in &anchor.varmap {
                if let Some(v) = operand.as_value().filter(|v| block.params.contains(v)) {
                    names.entry(v).or_insert_with(|| format!("{loc}@loop"));
                }
            }
        }
        Expressions { version, defs, names }
    }

    /// An operand of a type as an expression.
    pub fn operand(&self, operand: Operand, ty: Ty) -> String {
        self.expression(operand, ty, DEEPEST).0
    }

    /// The predicate of an assume as an expression.
    pub fn predicate(&self, predicate: Operand) -> String {
        self.operand(predicate, Ty::I1)
    }

    /// What taking an anchor does: each location with its value, then each deferred store.
    pub fn anchor(&self, anchor: AnchorId) -> Vec<String> {
        let Some(a) = self.version.anchors.get(anchor.index()) else { return Vec::new() };
        let location = |(loc, operand): &(Loc, Operand)| {
            format!("{loc} = {}", self.operand(*operand, loc.ty()))
        };
        let mut effects: Vec<String> = a.varmap.iter().map(location).collect();
        effects.extend(a.stores.iter().map(|s| {
            let value = self.operand(s.args[2], s.ty);
            format!(
                "then stores {} {} := {value}",
                s.ty,
                self.address(&s.mem, &s.args[..2], DEEPEST)
            )
        }));
        effects
    }

    /// The definition of a value as nested text of the IR: `lt.s.i64 (add.i64 v3, 1), 100`.
    pub fn text(&self, operand: Operand) -> String {
        self.nested(operand, DEEPEST)
    }

    fn pure_def(&self, v: Value) -> Option<&'v Inst> {
        self.defs[v.index()].filter(|i| i.op.is_pure())
    }

    fn nested(&self, operand: Operand, deep: u32) -> String {
        let inst = operand.as_value().filter(|_| deep > 0).and_then(|v| self.pure_def(v));
        let Some(inst) = inst else { return operand.to_string() };
        let args: Vec<String> = inst
            .args
            .iter()
            .map(|a| {
                let text = self.nested(*a, deep - 1);
                if text.contains(' ') { format!("({text})") } else { text }
            })
            .collect();
        let ty = if inst.op.is_typed() { format!(".{}", inst.ty) } else { String::new() };
        format!("{}{ty} {}", inst.op, args.join(", "))
    }

    /// The expression, and whether it needs parentheses as an operand.
    fn expression(&self, operand: Operand, ty: Ty, deep: u32) -> (String, bool) {
        let v = match operand {
            Operand::Const(c) => return (constant(c, ty), false),
            Operand::Value(v) => v,
        };
        if let Some(name) = self.names.get(&v) {
            return (name.clone(), false);
        }
        let Some(inst) = self.defs.get(v.index()).copied().flatten().filter(|_| deep > 0) else {
            return (v.to_string(), false);
        };
        match inst.op {
            Op::Load => {
                let mem = inst.mem.as_ref().expect("a load has an address");
                (format!("{}{}", inst.ty, self.address(mem, &inst.args, deep - 1)), false)
            }
            Op::Native => {
                let n = inst.defs.iter().position(|d| *d == v).unwrap_or(0);
                let of = inst.native.and_then(|n| self.version.natives.get(n.index()));
                let of = of.map_or(String::new(), |native| {
                    format!("{:?}", native.inst.mnemonic()).to_lowercase()
                });
                (format!("{of}#{n}"), false)
            }
            _ if inst.op.is_pure() => self.operation(inst, deep - 1),
            _ => (v.to_string(), false),
        }
    }

    fn operation(&self, inst: &Inst, deep: u32) -> (String, bool) {
        let arg = |n: usize| {
            let (text, loose) = self.expression(inst.args[n], inst.ty, deep);
            if loose { format!("({text})") } else { text }
        };
        let width = if inst.ty == Ty::I64 || inst.ty == Ty::I1 {
            String::new()
        } else {
            format!(".{}", inst.ty)
        };
        if let Some(sign) = infix(inst.op) {
            if let (Op::Add, Some(c)) = (inst.op, inst.args[1].as_const()) {
                let c = inst.ty.sext(c);
                let sign = if c < 0 { "-" } else { "+" };
                return (
                    format!("{} {sign}{width} {}", arg(0), constant(c.unsigned_abs(), Ty::I64)),
                    true,
                );
            }
            return (format!("{} {sign}{width} {}", arg(0), arg(1)), true);
        }
        match inst.op {
            Op::Cond(cond) => (self.condition(cond, inst.args[0], deep), true),
            Op::Not => (format!("~{}", arg(0)), false),
            Op::Neg => (format!("-{}", arg(0)), false),
            Op::Select => {
                let condition = self.expression(inst.args[0], Ty::I1, deep).0;
                (format!("{condition} ? {} : {}", arg(1), arg(2)), true)
            }
            op => {
                let args: Vec<String> =
                    inst.args.iter().map(|a| self.expression(*a, inst.ty, deep).0).collect();
                (format!("{op}{width}({})", args.join(", ")), false)
            }
        }
    }

    /// A condition of flags; a comparison, if a comparison computed the flags.
    fn condition(&self, cond: Cond, flags: Operand, deep: u32) -> String {
        let inst = flags.as_value().and_then(|v| self.pure_def(v));
        if let Some(Inst { op: Op::Flags(op), ty, args, .. }) = inst {
            let arg = |n: usize| {
                let (text, loose) = self.expression(args[n], *ty, deep);
                if loose { format!("({text})") } else { text }
            };
            let width = if *ty == Ty::I64 { String::new() } else { format!(".{ty}") };
            let same = args.len() > 1 && args[0] == args[1];
            match (op, comparison(cond)) {
                (FlagOp::Sub, Some(sign)) => return format!("{} {sign}{width} {}", arg(0), arg(1)),
                (FlagOp::And, Some(sign)) if same => return format!("{} {sign}{width} 0", arg(0)),
                (FlagOp::And, Some(sign @ ("==" | "!="))) => {
                    return format!("({} &{width} {}) {sign} 0", arg(0), arg(1));
                }
                _ => {}
            }
        }
        format!("{} of {}", cond.name(), self.expression(flags, Ty::Flags, deep).0)
    }

    fn address(&self, mem: &Mem, args: &[Operand], deep: u32) -> String {
        let mut parts = Vec::new();
        let mut part = |n: usize, scale: u8| match args.get(n) {
            None | Some(Operand::Const(0)) => {}
            Some(o) => {
                let (text, loose) = self.expression(*o, Ty::I64, deep.saturating_sub(1));
                parts.push(match scale {
                    1 => text,
                    _ if loose => format!("({text})*{scale}"),
                    _ => format!("{text}*{scale}"),
                });
            }
        };
        part(0, 1);
        part(1, mem.scale);
        let sum = parts.join(" + ");
        let displacement = match (mem.disp, sum.is_empty()) {
            (d, true) => constant(d as u64, Ty::I64),
            (0, false) => String::new(),
            (d, false) if d < 0 => format!(" - {}", constant(d.unsigned_abs(), Ty::I64)),
            (d, false) => format!(" + {}", constant(d as u64, Ty::I64)),
        };
        let segment = match mem.seg {
            None => "",
            Some(Segment::Fs) => "fs:",
            Some(Segment::Gs) => "gs:",
        };
        format!("{segment}[{sum}{displacement}]")
    }

    /// Is the block a loop, which jumps to itself?
    pub fn is_loop(&self, block: BlockId) -> bool {
        let block_jumps = |b: &crate::Block| b.term.edges().any(|(to, _)| to == block);
        self.version.blocks.get(block.index()).is_some_and(block_jumps)
    }
}

fn constant(c: u64, ty: Ty) -> String {
    let signed = ty.sext(c);
    match signed {
        -4096..=4095 if ty != Ty::I1 => signed.to_string(),
        _ => Operand::Const(c & ty.mask()).to_string(),
    }
}

/// The infix sign of an operation.
fn infix(op: Op) -> Option<&'static str> {
    Some(match op {
        Op::Add => "+",
        Op::Sub => "-",
        Op::Mul => "*",
        Op::And => "&",
        Op::Or => "|",
        Op::Xor => "^",
        Op::Shl => "<<",
        Op::Shr => ">>u",
        Op::Sar => ">>",
        Op::Eq => "==",
        Op::Ne => "!=",
        Op::LtS => "<",
        Op::LtU => "<u",
        Op::LeS => "<=",
        Op::LeU => "<=u",
        _ => return None,
    })
}

/// The comparison sign of a condition after a subtraction.
const fn comparison(cond: Cond) -> Option<&'static str> {
    Some(match cond {
        Cond::E => "==",
        Cond::Ne => "!=",
        Cond::B => "<u",
        Cond::Ae => ">=u",
        Cond::Be => "<=u",
        Cond::A => ">u",
        Cond::L => "<",
        Cond::Ge => ">=",
        Cond::Le => "<=",
        Cond::G => ">",
        Cond::O | Cond::No | Cond::S | Cond::Ns | Cond::P | Cond::Np => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text;

    const LOOP: &str = "region 0x1000 {
  version t1 {
    anchor a0 = base.0x1000 [rax = v2, rcx = v3]
    anchor a1 = base.0x1008 [rax = v5, rcx = v6, rflags = v7] stores [store.i64 [v0 - 8], v5]
    b0(v0: i64 = rsp, v1: i64 = rdi):
      jump b1(0, 0)
    b1(v2: i64, v3: i64):
      poll else a0
      v4 = load.i32 [v1 + v3*4] !a0
      v9 = zext32.i64 v4
      v5 = add.i64 v2, v9
      v6 = add.i64 v3, 1
      v7 = flags.sub.i64 v6, 100
      v8 = cond.l v7
      assume v8 else a1
      jump b1(v5, v6)
  }
}
";

    fn version() -> Version {
        text::version(LOOP).unwrap_or_else(|e| panic!("{e}"))
    }

    #[test]
    fn predicates_and_anchors_speak_of_registers() {
        let version = version();
        let expressions = Expressions::new(&version);
        let assume =
            version.blocks[1].insts.iter().find(|i| i.op == Op::Assume).expect("there is one");
        assert_eq!(expressions.predicate(assume.args[0]), "(rcx@loop + 1) < 100");
        assert_eq!(expressions.text(assume.args[0]), "cond.l (flags.sub.i64 (add.i64 v3, 1), 100)");
        assert_eq!(
            expressions.anchor(AnchorId(1)),
            [
                "rax = rax@loop + zext32(i32[rdi@entry + rcx@loop*4])",
                "rcx = rcx@loop + 1",
                "rflags = flags.sub(rcx@loop + 1, 100)",
                "then stores i64 [rsp@entry - 8] := rax@loop + zext32(i32[rdi@entry + rcx@loop*4])",
            ]
        );
        assert!(expressions.is_loop(BlockId(1)) && !expressions.is_loop(BlockId(0)));
    }

    #[test]
    fn constants_have_their_types_sign() {
        assert_eq!(constant(0xffff_ffff, Ty::I32), "-1");
        assert_eq!(constant(0xffff_ffff, Ty::I64), "0xffffffff");
        assert_eq!(constant(1, Ty::I1), "1");
    }
}
