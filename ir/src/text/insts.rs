//! Parses blocks: parameters, instructions with their operations, addresses and operands, and
//! terminators.
//!
//! These are methods of [`Parser`], which owns the tokens and the types of the values defined so
//! far. They build instructions without checking types; that is the verifier's task.
//! [`super::parse`] calls [`Parser::block`]; no lock.
//!
//! ```text
//! v8 = load.i64 [v3 + v6*8] !a0  Inst { op: Load, ty: I64, defs: [v8], args: [v3, v6], … }
//! ```

use super::ParseError;
use super::file::Spots;
use super::lex::Token;
use super::names::{numbered, trap_of, ty_of};
use super::parse::{Parse, Parser};
use crate::op::{ArgTy, Cond, FlagOp, Op, ResultTy};
use crate::origin::{Origin, OriginKind, Origins};
use crate::types::{NativeId, Operand, Ty, Value};
use crate::version::{Block, Edge, GuestTerm, Inst, Mem, Segment, Split, Term, Version};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::sync::LazyLock;

/// Operations by name, except `get` and `put`, which a location follows.
static OPS: LazyLock<FxHashMap<String, Op>> = LazyLock::new(|| {
    let widths = [Ty::I1, Ty::I8, Ty::I16, Ty::I32];
    let plain = Op::PLAIN.into_iter();
    let extensions = widths.into_iter().flat_map(|ty| [Op::Zext(ty), Op::Sext(ty)]);
    let conditions = Cond::ALL.into_iter().map(Op::Cond);
    let flags = FlagOp::TABLE.iter().map(|(op, _, _)| Op::Flags(*op));
    plain.chain(extensions).chain(conditions).chain(flags).map(|op| (op.to_string(), op)).collect()
});

impl Parser<'_> {
    pub(super) fn block(&mut self, version: &mut Version, spots: &mut Spots) -> Parse<Block> {
        spots.blocks.push(self.position());
        spots.insts.push(Vec::new());
        let index = version.blocks.len();
        let expected = format!("block `b{index}` or `}}`");
        self.word(&expected, |w| numbered(w, 'b').filter(|n| *n as usize == index))?;
        let mut params = Vec::new();
        if self.eat("(") {
            params = self.list(")", |p| {
                let v = p.value()?;
                p.expect(":")?;
                let ty = p.ty()?;
                p.define(v, ty);
                if index == 0 && p.eat("=") {
                    version.entry_locs.push(p.loc()?);
                }
                Ok(v)
            })?;
        }
        self.expect(":")?;
        let mut insts = Vec::new();
        loop {
            spots.insts[index].push(self.position());
            if let Some(term) = self.term()? {
                return Ok(Block { params, insts, term });
            }
            insts.push(self.inst(version)?);
            if self.same_line() {
                return self.fail("the end of the line");
            }
        }
    }

    fn pc(&mut self) -> Parse<u64> {
        self.number("a guest pc")
    }

    /// A terminator, if there is one here.
    fn term(&mut self) -> Parse<Option<Term>> {
        let Token::Word(word) = self.peek() else { return Ok(None) };
        let parse: fn(&mut Self) -> Parse<Term> = match word {
            "jump" => |p| p.edge().map(|Edge { to, args }| Term::Jump { to, args }),
            "exit" => |p| Ok(Term::Exit(p.anchor_id()?)),
            "goto" => |p| Ok(Term::Guest(GuestTerm::Goto(p.operand()?))),
            "branch" => |p| {
                let cond = p.operand()?;
                p.expect_word("then")?;
                if matches!(p.peek(), Token::Word(_)) {
                    let then = p.edge()?;
                    p.expect_word("else")?;
                    return Ok(Term::Branch { cond, then, otherwise: p.edge()? });
                }
                let taken = p.number("a guest pc or a block")?;
                p.expect_word("else")?;
                Ok(Term::Guest(GuestTerm::Branch { cond, taken, fall: p.pc()? }))
            },
            "call" => |p| {
                let target = p.operand()?;
                p.expect_word("return")?;
                Ok(Term::Guest(GuestTerm::Call { target, ret: p.pc()? }))
            },
            "ret" => |p| Ok(Term::Guest(GuestTerm::Ret(p.operand()?))),
            "syscall" => |p| {
                p.expect_word("next")?;
                Ok(Term::Guest(GuestTerm::Syscall { next: p.pc()? }))
            },
            "special" => |p| Ok(Term::Guest(GuestTerm::Special { pc: p.pc()? })),
            "trap" => |p| {
                let trap = p.word("a trap: undefined, protection, breakpoint or fetch", trap_of)?;
                Ok(Term::Guest(GuestTerm::Trap { pc: p.pc()?, trap }))
            },
            _ => return Ok(None),
        };
        self.skip();
        parse(self).map(Some)
    }

    /// `seg:[base + index*scale + disp]`
    pub(super) fn address(&mut self) -> Parse<(Mem, Operand, Operand)> {
        let mut mem = Mem::disp(0);
        if let Token::Word(word @ ("fs" | "gs")) = self.peek() {
            self.skip();
            mem.seg = Some(if word == "fs" { Segment::Fs } else { Segment::Gs });
            self.expect(":")?;
        }
        self.expect("[")?;
        let (mut base, mut index, mut terms) = (None, None, 0);
        loop {
            let negative = self.eat("-");
            let at = self.position();
            let operand = match self.peek() {
                _ if negative => None,
                t if Self::is_value(t) => Some(Operand::Value(self.value()?)),
                Token::Punct("#") => {
                    self.skip();
                    Some(Operand::Const(self.constant("a number")?))
                }
                _ => None,
            };
            match operand {
                Some(operand) if self.eat("*") => {
                    mem.scale = self.small("a scale: 1, 2, 4 or 8")?;
                    if index.replace(operand).is_some() {
                        return Err(ParseError::at(at, "one index", "another"));
                    }
                }
                Some(operand) => {
                    if terms > 0 {
                        return Err(ParseError::at(
                            at,
                            "an index with its scale, or a number",
                            operand.to_string(),
                        ));
                    }
                    base = Some(operand);
                }
                None => {
                    mem.disp = self.displacement(negative)?;
                    self.expect("]")?;
                    break;
                }
            }
            terms += 1;
            if self.eat("]") {
                break;
            }
            if self.peek() != Token::Punct("-") && !self.eat("+") {
                return self.fail("`+`, `-` or `]`");
            }
        }
        let none = Operand::Const(0);
        Ok((mem, base.unwrap_or(none), index.unwrap_or(none)))
    }

    fn displacement(&mut self, negative: bool) -> Parse<i64> {
        let at = self.position();
        let n = self.number("a value, `#` and a constant, or a displacement")?;
        let limit = i64::MAX as u64 + u64::from(negative);
        if n > limit {
            return Err(ParseError::at(at, "a displacement of 64 bits", format!("{n:#x}")));
        }
        Ok(if negative { n.wrapping_neg() as i64 } else { n as i64 })
    }

    /// An operation with its type suffix.
    fn op(&mut self) -> Parse<(Op, Ty)> {
        let at = self.position();
        let mut name = self.word("an instruction or a terminator", Some)?.to_string();
        while self.same_line() && self.eat(".") {
            name.push('.');
            name.push_str(self.word("the rest of the operation's name", Some)?);
        }
        let unknown = |expected: &str| ParseError::at(at, expected, format!("`{name}`"));
        if let Some(op) = OPS.get(&name) {
            return if op.is_typed() {
                Err(unknown("a type suffix such as `.i64`"))
            } else {
                Ok((*op, Ty::I64))
            };
        }
        let (stem, suffix) = name.rsplit_once('.').ok_or_else(|| unknown("an operation"))?;
        let ty = ty_of(suffix).ok_or_else(|| unknown("an operation"))?;
        match stem {
            "get" => Ok((Op::Get(self.loc()?), ty)),
            "put" => {
                let loc = self.loc()?;
                self.expect(",")?;
                Ok((Op::Put(loc), ty))
            }
            _ => match OPS.get(stem) {
                Some(op) if op.is_typed() => Ok((*op, ty)),
                Some(_) => Err(unknown("no type suffix")),
                None => Err(unknown("an operation")),
            },
        }
    }

    fn inst(&mut self, version: &Version) -> Parse<Inst> {
        let mut defs: SmallVec<[Value; 1]> = SmallVec::new();
        if Self::is_value(self.peek()) {
            defs.push(self.value()?);
            while self.eat(",") {
                defs.push(self.value()?);
            }
            self.expect("=")?;
        }
        let (op, ty) = self.op()?;
        let mut inst = Inst::new(op, ty, None, &[]);
        if op == Op::Native {
            inst.native = Some(NativeId(self.numbered('n', "a native such as `n0`")?));
        }
        let mut more = self.same_line();
        if more && matches!(self.peek(), Token::Punct("[") | Token::Word("fs" | "gs")) {
            let (mem, base, index) = self.address()?;
            inst.mem = Some(mem);
            inst.args.extend([base, index]);
            more = self.eat(",");
        } else if more {
            let starts = Self::is_value(self.peek())
                || matches!(self.peek(), Token::Number(_) | Token::Punct("-"));
            more = starts;
        }
        while more {
            inst.args.push(self.operand()?);
            more = self.eat(",");
            if more && !self.same_line() {
                return self.fail("a value or a number on the line of the `,`");
            }
        }
        if self.same_line() {
            let fallback = matches!(op, Op::Assume | Op::Poll);
            if fallback && self.eat_word("else") || !fallback && self.eat("!") {
                inst.anchor = Some(self.anchor_id()?);
            }
            if op == Op::Assume && self.same_line() && self.eat_word("from") {
                inst.origins = self.origins()?;
            }
        }
        for (i, def) in defs.iter().enumerate() {
            self.define(*def, result_ty(version, &inst, i));
        }
        inst.defs = defs;
        Ok(inst)
    }

    /// `branch 0x401136 step 3, alias 0x40114a`
    fn origins(&mut self) -> Result<Origins, ParseError> {
        let mut origins = Origins::default();
        loop {
            let kind = OriginKind::ALL.into_iter().find(|kind| self.eat_word(kind.name()));
            let Some(kind) = kind else { return self.fail("a kind of assumption, such as branch") };
            let pc = self.number("a pc")?;
            let step = match self.eat_word("step") {
                true => Some(self.number("a number of a step")?),
                false => None,
            };
            let Ok(step) = step.map(u32::try_from).transpose() else {
                return self.fail("a smaller number");
            };
            origins.push(Origin { kind, pc, step });
            if !self.eat(",") {
                return Ok(origins);
            }
        }
    }
}

/// The type of the i-th result of an instruction; i64 where there should be none.
fn result_ty(version: &Version, inst: &Inst, i: usize) -> Ty {
    match inst.op.signature().1 {
        ResultTy::Same => inst.ty,
        ResultTy::Is(ty) => ty,
        ResultTy::None => match inst.native.and_then(|n| version.natives.get(n.index())) {
            Some(native) if native.flags_out && i == native.gpr_out.len() => Ty::Flags,
            Some(native) if native.split == Split::Stored => native.split_ty().unwrap_or(Ty::I64),
            _ => Ty::I64,
        },
    }
}

/// A constant that is the sign extension of a value of type `ty` becomes that value.
pub(super) fn narrow(operand: &mut Operand, ty: Ty) {
    if let Operand::Const(c) = operand
        && ty.sext(*c & ty.mask()) as u64 == *c
    {
        *c &= ty.mask();
    }
}

pub(super) fn narrow_constants(version: &mut Version) {
    let types = &version.types;
    let param_types: Vec<Vec<Ty>> = version
        .blocks
        .iter()
        .map(|b| b.params.iter().map(|v| types[v.index()]).collect())
        .collect();
    for block in &mut version.blocks {
        for inst in &mut block.insts {
            let ty = inst.ty;
            for (operand, arg) in inst.args.iter_mut().zip(inst.op.signature().0) {
                narrow(operand, if let ArgTy::Is(ty) = arg { *ty } else { ty });
            }
        }
        for (to, args) in block.term.edges_mut() {
            let types = param_types.get(to.index()).into_iter().flatten();
            args.iter_mut().zip(types).for_each(|(operand, ty)| narrow(operand, *ty));
        }
    }
    for store in version.anchors.iter_mut().flat_map(|a| &mut a.stores) {
        narrow(&mut store.args[2], store.ty);
    }
}
