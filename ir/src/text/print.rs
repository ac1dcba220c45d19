//! Printing: `Display` for versions and their parts.
//!
//! An address prints as `seg:[base + index*scale + disp]` and keeps every field. An absent base or
//! index is the constant 0 and is left out. A constant base or index prints with `#`, so that it
//! cannot be read as displacement. An index always has its scale, so that it cannot be read as
//! base.
//!
//! No state, no lock. Invariant: the parser reads what is printed here back to the same version
//! ([`super`]).
//!
//! ```text
//! Mem { scale: 8, disp: -16, seg: Some(Fs) } with base v1, index v2       fs:[v1 + v2*8 - 16]
//! ```

use crate::op::Op;
use crate::region::Region;
use crate::types::{BlockId, Loc, Operand, Ty, Value};
use crate::version::{
    Anchor, Block, Context, DeferredStore, Edge, Effects, Fact, GuestTerm, Inst, Mem, Native,
    Segment, Split, Term, Trap, Version, Via,
};
use iced_x86::{Encoder, Instruction};
use std::fmt::{self, Display, Formatter};

/// Writes `items` with `separator` between them.
fn list<T: Display>(
    f: &mut Formatter<'_>,
    items: impl IntoIterator<Item = T>,
    separator: &str,
) -> fmt::Result {
    for (i, item) in items.into_iter().enumerate() {
        if i > 0 {
            f.write_str(separator)?;
        }
        write!(f, "{item}")?;
    }
    Ok(())
}

impl Trap {
    /// Every trap.
    pub(super) const ALL: [Trap; 4] =
        [Trap::Undefined, Trap::Protection, Trap::Breakpoint, Trap::Fetch];

    /// The name in the text form.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Trap::Undefined => "undefined",
            Trap::Protection => "protection",
            Trap::Breakpoint => "breakpoint",
            Trap::Fetch => "fetch",
        }
    }
}

impl Display for Trap {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An address with its operands, as the text form shows it.
struct Address<'a> {
    mem: &'a Mem,
    base: Operand,
    index: Operand,
}

impl<'a> Address<'a> {
    /// The address of an instruction whose first two operands are base and index.
    fn of(mem: &'a Mem, args: &[Operand]) -> Address<'a> {
        let arg = |i: usize| args.get(i).copied().unwrap_or(Operand::Const(0));
        Address { mem, base: arg(0), index: arg(1) }
    }
}

impl Display for Address<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.mem.seg {
            Some(Segment::Fs) => f.write_str("fs:")?,
            Some(Segment::Gs) => f.write_str("gs:")?,
            None => {}
        }
        f.write_str("[")?;
        let mut empty = true;
        match self.base {
            Operand::Const(0) => {}
            Operand::Const(_) => {
                write!(f, "#{}", self.base)?;
                empty = false;
            }
            Operand::Value(v) => {
                write!(f, "{v}")?;
                empty = false;
            }
        }
        if self.index != Operand::Const(0) || self.mem.scale != 1 {
            let hash = if self.index.as_const().is_some() { "#" } else { "" };
            let plus = if empty { "" } else { " + " };
            write!(f, "{plus}{hash}{}*{}", self.index, self.mem.scale)?;
            empty = false;
        }
        let disp = self.mem.disp;
        let magnitude = Operand::Const(disp.unsigned_abs());
        match (empty, disp < 0) {
            (true, false) => write!(f, "{magnitude}")?,
            (true, true) => write!(f, "-{magnitude}")?,
            (false, _) if disp == 0 => {}
            (false, false) => write!(f, " + {magnitude}")?,
            (false, true) => write!(f, " - {magnitude}")?,
        }
        f.write_str("]")
    }
}

impl Display for Inst {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if !self.defs.is_empty() {
            list(f, &self.defs, ", ")?;
            f.write_str(" = ")?;
        }
        write!(f, "{}", self.op)?;
        if self.op.is_typed() {
            write!(f, ".{}", self.ty)?;
        }
        if let Some(n) = self.native {
            write!(f, " {n}")?;
        }
        let mut separator = " ";
        let mut args = &self.args[..];
        match self.op {
            Op::Get(loc) | Op::Put(loc) => {
                write!(f, " {loc}")?;
                separator = ", ";
            }
            Op::At => {
                if let Some(pc) = args.first().and_then(|a| a.as_const()) {
                    write!(f, " {pc:#x}")?;
                    args = &args[1..];
                    separator = ", ";
                }
            }
            _ => {}
        }
        if let Some(mem) = &self.mem {
            write!(f, "{separator}{}", Address::of(mem, args))?;
            args = args.get(2..).unwrap_or(&[]);
            separator = ", ";
        }
        if !args.is_empty() {
            f.write_str(separator)?;
            list(f, args, ", ")?;
        }
        match (self.op, self.anchor) {
            (_, None) => Ok(()),
            (Op::Assume | Op::Poll, Some(a)) => write!(f, " else {a}"),
            (_, Some(a)) => write!(f, " !{a}"),
        }?;
        let mut separator = " from ";
        for origin in self.origins.iter() {
            write!(f, "{separator}{origin}")?;
            separator = ", ";
        }
        Ok(())
    }
}

/// A pc operand: constants in hexadecimal.
struct Pc(Operand);

impl Display for Pc {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.0 {
            Operand::Const(pc) => write!(f, "{pc:#x}"),
            Operand::Value(v) => write!(f, "{v}"),
        }
    }
}

impl Display for GuestTerm {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match *self {
            GuestTerm::Goto(target) => write!(f, "goto {}", Pc(target)),
            GuestTerm::Branch { cond, taken, fall } => {
                write!(f, "branch {cond} then {taken:#x} else {fall:#x}")
            }
            GuestTerm::Call { target, ret } => write!(f, "call {} return {ret:#x}", Pc(target)),
            GuestTerm::Ret(target) => write!(f, "ret {}", Pc(target)),
            GuestTerm::Syscall { next } => write!(f, "syscall next {next:#x}"),
            GuestTerm::Special { pc } => write!(f, "special {pc:#x}"),
            GuestTerm::Trap { pc, trap } => write!(f, "trap {trap} {pc:#x}"),
        }
    }
}

fn edge(f: &mut Formatter<'_>, to: BlockId, args: &[Operand]) -> fmt::Result {
    write!(f, "{to}(")?;
    list(f, args, ", ")?;
    f.write_str(")")
}

impl Display for Edge {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        edge(f, self.to, &self.args)
    }
}

impl Display for Via {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{} [", self.version, self.anchor)?;
        list(f, self.values.iter().map(|(v, o)| format!("{v} = {o}")), ", ")?;
        f.write_str("]")
    }
}

impl Display for Term {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Term::Jump { to, args } => {
                f.write_str("jump ")?;
                edge(f, *to, args)
            }
            Term::Branch { cond, then, otherwise } => {
                write!(f, "branch {cond} then {then} else {otherwise}")
            }
            Term::Exit(anchor) => write!(f, "exit {anchor}"),
            Term::Guest(term) => term.fmt(f),
        }
    }
}

impl Display for DeferredStore {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "store.{} {}, {}", self.ty, Address::of(&self.mem, &self.args), self.args[2])
    }
}

impl Display for Anchor {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "base.{} ", Pc(self.target))?;
        if let Some(after) = self.after {
            write!(f, "after {after:#x} ")?;
        }
        f.write_str("[")?;
        list(f, self.varmap.iter().map(|(loc, o)| format!("{loc} = {o}")), ", ")?;
        f.write_str("]")?;
        if !self.stores.is_empty() {
            f.write_str(" stores [")?;
            list(f, &self.stores, ", ")?;
            f.write_str("]")?;
        }
        if let Some(via) = &self.via {
            write!(f, " via {via}")?;
        }
        if self.passes != 0 {
            write!(f, " passes {}", self.passes)?;
        }
        Ok(())
    }
}

impl Display for Fact {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match *self {
            Fact::RegEquals(gpr, value) => write!(f, "{gpr} == {}", Operand::Const(value)),
            Fact::RegInRange { gpr, min, max } => {
                write!(f, "{gpr} in {} .. {}", Operand::Const(min), Operand::Const(max))
            }
            Fact::RegBits { gpr, mask, value } => write!(f, "{gpr} & {mask:#x} == {value:#x}"),
            Fact::PrivateMemory => f.write_str("private_memory"),
            Fact::MemEquals { ty, address, value } => {
                write!(f, "load.{ty} [{:#x}] == {}", address, Operand::Const(value))
            }
        }
    }
}

impl Display for Context {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if self.facts.is_empty() { f.write_str("true") } else { list(f, &self.facts, " && ") }
    }
}

/// The bytes of a decoded instruction at its own pc. `Instruction` does not keep them, so they are
/// encoded anew. A redundant prefix may get lost; therefore the text form has the length if it
/// differs.
fn encode(inst: &Instruction) -> Option<Vec<u8>> {
    let mut encoder = Encoder::new(64);
    encoder.encode(inst, inst.ip()).ok()?;
    Some(encoder.take_buffer())
}

impl Display for Native {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let bytes = encode(&self.inst).unwrap_or_default();
        write!(f, "{:#x} \"", self.inst.ip())?;
        list(f, bytes.iter().map(|b| format!("{b:02x}")), " ")?;
        f.write_str("\"")?;
        if bytes.len() != self.inst.len() {
            write!(f, " len {}", self.inst.len())?;
        }
        if let Some(size) = self.mem_size {
            write!(f, " mem {size}")?;
        }
        f.write_str(match self.split {
            Split::No => "",
            Split::Loaded => " loaded",
            Split::Stored => " stored",
        })?;
        let locs = |gprs: &[crate::types::Gpr], flags: bool| -> Vec<Loc> {
            gprs.iter().map(|g| Loc::Gpr(*g)).chain(flags.then_some(Loc::Flags)).collect()
        };
        let clause = |f: &mut Formatter<'_>, name: &str, locs: &[Loc]| {
            if locs.is_empty() {
                return Ok(());
            }
            write!(f, " {name} [")?;
            list(f, locs, ", ")?;
            f.write_str("]")
        };
        clause(f, "in", &locs(&self.gpr_in, self.flags_in))?;
        clause(f, "out", &locs(&self.gpr_out, self.flags_out))?;
        for (name, mask) in [("vec_read", self.vec_read), ("vec_write", self.vec_write)] {
            if mask != 0 {
                write!(f, " {name} {mask:#x}")?;
            }
        }
        clause(f, "writes", &self.writes)?;
        if !self.effects.is_empty() {
            f.write_str(" effects [")?;
            list(f, self.effects.iter_names().map(|(name, _)| effect_name(name)), ", ")?;
            f.write_str("]")?;
        }
        Ok(())
    }
}

/// The name of an effect in the text form.
fn effect_name(constant: &str) -> String {
    constant.to_ascii_lowercase()
}

/// The effect with this name in the text form.
pub(super) fn effect_of(name: &str) -> Option<Effects> {
    Effects::all()
        .iter_names()
        .find(|(constant, _)| effect_name(constant) == name)
        .map(|(_, effect)| effect)
}

impl Version {
    /// Values that nothing defines, in order.
    fn dead_values(&self) -> Vec<Value> {
        let mut defined = vec![false; self.types.len()];
        let params = self.blocks.iter().flat_map(|b| &b.params);
        let defs = self.blocks.iter().flat_map(|b| &b.insts).flat_map(|i| &i.defs);
        for v in params.chain(defs) {
            if let Some(slot) = defined.get_mut(v.index()) {
                *slot = true;
            }
        }
        (0..self.types.len() as u32).map(Value).filter(|v| !defined[v.index()]).collect()
    }

    fn fmt_dead(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let dead = self.dead_values();
        let mut clauses = Vec::new();
        for ty in Ty::ALL {
            let of_type: Vec<u32> =
                dead.iter().filter(|v| self.ty(**v) == ty).map(|v| v.0).collect();
            let runs = of_type.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
                [one] => format!("v{one}"),
                _ => format!("v{}..v{}", run[0], run[run.len() - 1]),
            });
            let runs: Vec<String> = runs.collect();
            if !runs.is_empty() {
                clauses.push(format!("{ty} {}", runs.join(" ")));
            }
        }
        if clauses.is_empty() { Ok(()) } else { writeln!(f, "    dead {}", clauses.join(", ")) }
    }

    fn fmt_block(&self, f: &mut Formatter<'_>, index: usize, block: &Block) -> fmt::Result {
        write!(f, "    b{index}")?;
        if !block.params.is_empty() {
            let params = block.params.iter().enumerate().map(|(i, v)| {
                let ty = self.types.get(v.index()).copied().unwrap_or(Ty::I64);
                match self.entry_locs.get(i) {
                    Some(loc) if index == 0 => format!("{v}: {ty} = {loc}"),
                    _ => format!("{v}: {ty}"),
                }
            });
            f.write_str("(")?;
            list(f, params, ", ")?;
            f.write_str(")")?;
        }
        f.write_str(":\n")?;
        for inst in &block.insts {
            let native = inst.native.and_then(|n| self.natives.get(n.index()));
            match native {
                Some(native) => writeln!(f, "      {inst} ; {}", native.inst)?,
                None => writeln!(f, "      {inst}")?,
            }
        }
        writeln!(f, "      {}", block.term)
    }
}

impl Version {
    /// The version without the region around it.
    fn fmt_version(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "  version {}", self.name)?;
        if self.optimised {
            f.write_str(" optimised")?;
        }
        if !self.context.facts.is_empty() {
            write!(f, " context {}", self.context)?;
        }
        f.write_str(" {\n")?;
        if !f.alternate() {
            self.fmt_dead(f)?;
        }
        for (i, native) in self.natives.iter().enumerate() {
            writeln!(f, "    native n{i} = {native} ; {}", native.inst)?;
        }
        for (i, anchor) in self.anchors.iter().enumerate() {
            writeln!(f, "    anchor a{i} = {anchor}")?;
        }
        for (i, block) in self.blocks.iter().enumerate() {
            self.fmt_block(f, i, block)?;
        }
        f.write_str("  }\n")
    }
}

/// A region with this one version.
impl Display for Version {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "region {:#x} {{", self.region)?;
        self.fmt_version(f)?;
        f.write_str("}\n")
    }
}

impl Display for Region {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "region {:#x} ", self.pc)?;
        if let Some(symbol) = &self.symbol {
            let plain: String = symbol.chars().filter(|c| !c.is_control() && *c != '"').collect();
            write!(f, "\"{plain}\" ")?;
        }
        f.write_str("{\n")?;
        self.versions.iter().try_for_each(|v| v.fmt_version(f))?;
        f.write_str("}\n")
    }
}
