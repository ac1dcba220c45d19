//! Parsing the text form: recursive descent over tokens, one function a nonterminal of `ir/README.md`.
//!
//! Newlines matter in one place: an instruction ends with its line (`poll` and a native may have no operands, so
//! nothing else says where they end). Values may be numbered freely below [`MAX_VALUES`]; numbers that nothing
//! defines and no `dead` line lists are dead i64 values. A constant written as the sign extension of its type's
//! value (`add.i32 v0, -1`) is taken modulo the type; the printer never writes one for a narrow type.

use super::ParseError;
use super::file::Spots;
use super::lex::{Position, Token, tokens};
use super::print::effect_of;
use crate::op::{ArgTy, Cond, FlagOp, Op, ResultTy};
use crate::region::Region;
use crate::types::{AnchorId, BlockId, Gpr, Loc, NativeId, Operand, Ty, Value};
use crate::version::{
    Anchor, Block, Context, DeferredStore, Edge, Effects, Fact, GuestTerm, Inst, Mem, Native, Segment, Term, Trap,
    Version, Via,
};
use iced_x86::{Decoder, DecoderOptions};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::sync::LazyLock;

/// Value numbers in a text are below this, so that a short text cannot ask for much memory.
pub const MAX_VALUES: u32 = 1 << 20;

pub(super) type Parse<T> = Result<T, ParseError>;

/// Parses any number of regions.
pub fn regions(text: &str) -> Result<Vec<Region>, ParseError> {
    let mut parser = Parser::new(text)?;
    let mut out = Vec::new();
    while parser.peek() != Token::End {
        out.push(parser.region()?);
    }
    Ok(out)
}

/// Parses a text that holds exactly one version of one region.
pub fn version(text: &str) -> Result<Version, ParseError> {
    let mut parser = Parser::new(text)?;
    let start = parser.position();
    let region = parser.region()?;
    if parser.peek() != Token::End {
        return parser.fail("the end of the text");
    }
    let count = region.versions.len();
    let mut versions = region.versions.into_iter();
    match (versions.next(), versions.next()) {
        (Some(version), None) => Ok(version),
        _ => Err(ParseError::at(start, "a region with one version", format!("{count} versions"))),
    }
}

/// Operations by name, `get` and `put` excepted (they are followed by a location).
static OPS: LazyLock<FxHashMap<String, Op>> = LazyLock::new(|| {
    let widths = [Ty::I1, Ty::I8, Ty::I16, Ty::I32];
    let plain = Op::PLAIN.into_iter();
    let extensions = widths.into_iter().flat_map(|ty| [Op::Zext(ty), Op::Sext(ty)]);
    let conditions = Cond::ALL.into_iter().map(Op::Cond);
    let flags = FlagOp::TABLE.iter().map(|(op, _, _)| Op::Flags(*op));
    plain.chain(extensions).chain(conditions).chain(flags).map(|op| (op.to_string(), op)).collect()
});

pub(super) struct Parser<'t> {
    tokens: Vec<(Token<'t>, Position)>,
    next: usize,
    /// The types of the values of the version being parsed; `None` for those not yet defined.
    types: Vec<Option<Ty>>,
    /// Where the versions of the region being parsed stand, part by part.
    pub(super) spots: Vec<Spots>,
}

impl<'t> Parser<'t> {
    pub(super) fn new(text: &'t str) -> Parse<Parser<'t>> {
        Ok(Parser { tokens: tokens(text)?, next: 0, types: Vec::new(), spots: Vec::new() })
    }

    pub(super) fn peek(&self) -> Token<'t> {
        self.tokens[self.next].0
    }

    pub(super) fn position(&self) -> Position {
        self.tokens[self.next].1
    }

    /// Takes a token, whatever it is.
    pub(super) fn skip(&mut self) {
        self.next += 1;
    }

    /// Is the next token on the line of the last one taken?
    fn same_line(&self) -> bool {
        let last = self.next.checked_sub(1).map(|i| self.tokens[i].1.line);
        self.peek() != Token::End && last == Some(self.position().line)
    }

    pub(super) fn fail<T>(&self, expected: impl Into<String>) -> Parse<T> {
        Err(ParseError::at(self.position(), expected, self.peek().to_string()))
    }

    pub(super) fn eat(&mut self, punct: &'static str) -> bool {
        let found = self.peek() == Token::Punct(punct);
        self.next += usize::from(found);
        found
    }

    pub(super) fn expect(&mut self, punct: &'static str) -> Parse<()> {
        if self.eat(punct) { Ok(()) } else { self.fail(format!("`{punct}`")) }
    }

    pub(super) fn eat_word(&mut self, word: &str) -> bool {
        let found = self.peek() == Token::Word(word);
        self.next += usize::from(found);
        found
    }

    pub(super) fn expect_word(&mut self, word: &str) -> Parse<()> {
        if self.eat_word(word) { Ok(()) } else { self.fail(format!("`{word}`")) }
    }

    /// Takes a word for which `f` has an answer.
    pub(super) fn word<T>(&mut self, expected: &str, f: impl FnOnce(&'t str) -> Option<T>) -> Parse<T> {
        if let Token::Word(word) = self.peek()
            && let Some(t) = f(word)
        {
            self.next += 1;
            return Ok(t);
        }
        self.fail(expected)
    }

    pub(super) fn number(&mut self, expected: &str) -> Parse<u64> {
        if let Token::Number(n) = self.peek() {
            self.next += 1;
            return Ok(n);
        }
        self.fail(expected)
    }

    /// A number that fits `T`.
    fn small<T: TryFrom<u64>>(&mut self, expected: &str) -> Parse<T> {
        let at = self.position();
        let n = self.number(expected)?;
        T::try_from(n).map_err(|_| ParseError::at(at, expected, format!("{n}")))
    }

    /// A constant: a number, or `-` and a number up to 2^63.
    pub(super) fn constant(&mut self, expected: &str) -> Parse<u64> {
        let negative = self.eat("-");
        let at = self.position();
        let n = self.number(expected)?;
        if negative && n > 1 << 63 {
            return Err(ParseError::at(at, "a magnitude of at most 2^63", format!("{n}")));
        }
        Ok(if negative { n.wrapping_neg() } else { n })
    }

    fn list<T>(&mut self, close: &'static str, mut item: impl FnMut(&mut Self) -> Parse<T>) -> Parse<Vec<T>> {
        let mut out = Vec::new();
        if self.eat(close) {
            return Ok(out);
        }
        loop {
            out.push(item(self)?);
            if self.eat(close) {
                return Ok(out);
            }
            if !self.eat(",") {
                return self.fail(format!("`,` or `{close}`"));
            }
        }
    }

    /// `prefix` and a decimal number without leading zeros, as one word.
    fn numbered(&mut self, prefix: char, expected: &str) -> Parse<u32> {
        self.word(expected, |w| numbered(w, prefix))
    }

    fn value(&mut self) -> Parse<Value> {
        let at = self.position();
        let number = self.numbered('v', "a value such as `v0`")?;
        if number >= MAX_VALUES {
            return Err(ParseError::at(at, format!("a value number below {MAX_VALUES}"), format!("`v{number}`")));
        }
        let count = self.types.len().max(number as usize + 1);
        self.types.resize(count, None);
        Ok(Value(number))
    }

    fn define(&mut self, v: Value, ty: Ty) {
        self.types[v.index()].get_or_insert(ty);
    }

    fn is_value(token: Token<'_>) -> bool {
        matches!(token, Token::Word(w) if numbered(w, 'v').is_some())
    }

    fn operand(&mut self) -> Parse<Operand> {
        match self.peek() {
            t if Self::is_value(t) => Ok(Operand::Value(self.value()?)),
            Token::Number(_) | Token::Punct("-") => Ok(Operand::Const(self.constant("a number")?)),
            _ => self.fail("a value or a number"),
        }
    }

    pub(super) fn ty(&mut self) -> Parse<Ty> {
        self.word("a type", ty_of)
    }

    fn loc(&mut self) -> Parse<Loc> {
        self.word("a guest location such as `rax` or `rflags`", loc_of)
    }

    fn anchor_id(&mut self) -> Parse<AnchorId> {
        self.numbered('a', "an anchor such as `a0`").map(AnchorId)
    }

    // Regions and versions.

    pub(super) fn region(&mut self) -> Parse<Region> {
        self.expect_word("region")?;
        let pc = self.number("the region's guest pc")?;
        let symbol = match self.peek() {
            Token::Text(t) => {
                self.next += 1;
                Some(t.to_string())
            }
            _ => None,
        };
        self.expect("{")?;
        self.spots.clear();
        let mut versions = Vec::new();
        while !self.eat("}") {
            versions.push(self.version(pc)?);
        }
        Ok(Region { pc, symbol, versions })
    }

    fn version(&mut self, region: u64) -> Parse<Version> {
        let mut spots = Spots::new(self.position());
        if !self.eat_word("version") {
            return self.fail("`version` or `}`");
        }
        let name = self.word("the version's name", Some)?;
        let mut version = Version::new(name, region);
        self.types.clear();
        if self.eat_word("context") {
            version.context = self.context()?;
        }
        self.expect("{")?;
        loop {
            match self.peek() {
                Token::Word("dead") => self.dead()?,
                Token::Word("native") => {
                    spots.natives.push(self.position());
                    self.next += 1;
                    self.table_entry('n', version.natives.len())?;
                    version.natives.push(self.native()?);
                }
                Token::Word("anchor") => {
                    spots.anchors.push(self.position());
                    self.next += 1;
                    self.table_entry('a', version.anchors.len())?;
                    version.anchors.push(self.anchor()?);
                }
                Token::Word(_) | Token::Punct("}") => break,
                _ => return self.fail("`dead`, `native`, `anchor`, a block or `}`"),
            }
        }
        while !self.eat("}") {
            let block = self.block(&mut version, &mut spots)?;
            version.blocks.push(block);
        }
        version.types = self.types.iter().map(|t| t.unwrap_or(Ty::I64)).collect();
        narrow_constants(&mut version);
        self.spots.push(spots);
        Ok(version)
    }

    /// `n0 =`: tables are written in order.
    fn table_entry(&mut self, prefix: char, index: usize) -> Parse<()> {
        let expected = format!("`{prefix}{index}`");
        self.word(&expected, |w| numbered(w, prefix).filter(|n| *n as usize == index))?;
        self.expect("=")
    }

    fn context(&mut self) -> Parse<Context> {
        let mut facts = Vec::new();
        if self.eat_word("true") {
            return Ok(Context { facts });
        }
        loop {
            facts.push(if self.eat_word("private_memory") {
                Fact::PrivateMemory
            } else if self.eat_word("load") {
                self.expect(".")?;
                let ty = self.ty()?;
                self.expect("[")?;
                let address = self.number("an address")?;
                self.expect("]")?;
                self.expect("==")?;
                let mut value = Operand::Const(self.constant("a number")?);
                narrow(&mut value, ty);
                Fact::MemEquals { ty, address, value: value.as_const().unwrap_or(0) }
            } else {
                let gpr = self.word("`private_memory`, `load` or a register", gpr_of)?;
                if self.eat_word("in") {
                    let min = self.constant("a number")?;
                    self.expect("..")?;
                    facts.push(Fact::RegInRange { gpr, min, max: self.constant("a number")? });
                    if self.eat("&&") {
                        continue;
                    }
                    return Ok(Context { facts });
                }
                self.expect("==")?;
                Fact::RegEquals(gpr, self.constant("a number")?)
            });
            if !self.eat("&&") {
                return Ok(Context { facts });
            }
        }
    }

    /// `dead i64 v3 v5..v7, flags v9`
    fn dead(&mut self) -> Parse<()> {
        self.expect_word("dead")?;
        loop {
            let ty = self.ty()?;
            while Self::is_value(self.peek()) {
                let first = self.value()?;
                let last = if self.eat("..") { self.value()? } else { first };
                (first.0..=last.0).for_each(|v| self.define(Value(v), ty));
            }
            if !self.eat(",") {
                return Ok(());
            }
        }
    }

    // Natives and anchors.

    fn native(&mut self) -> Parse<Native> {
        let pc = self.number("the instruction's guest pc")?;
        let at = self.position();
        let Token::Text(text) = self.peek() else { return self.fail("the instruction's bytes in quotes") };
        self.next += 1;
        let wrong = |expected: &str| ParseError::at(at, expected, format!("{text:?}"));
        let bytes: Option<Vec<u8>> = text.split_whitespace().map(byte_of).collect();
        let bytes = bytes.filter(|b| (1..=15).contains(&b.len())).ok_or_else(|| wrong("1 to 15 bytes"))?;
        let mut inst = Decoder::with_ip(64, &bytes, pc, DecoderOptions::NONE).decode();
        if inst.is_invalid() || inst.len() != bytes.len() {
            return Err(wrong("the bytes of one x86-64 instruction"));
        }
        if self.eat_word("len") {
            let at = self.position();
            let len = self.number("a length")?;
            if !(1..=15).contains(&len) {
                return Err(ParseError::at(at, "a length from 1 to 15", format!("{len}")));
            }
            inst.set_len(len as usize);
            inst.set_next_ip(pc.wrapping_add(len));
        }
        let mut native = Native {
            inst,
            mem_size: None,
            gpr_in: SmallVec::new(),
            gpr_out: SmallVec::new(),
            flags_in: false,
            flags_out: false,
            vec_read: 0,
            vec_write: 0,
            writes: SmallVec::new(),
            effects: Effects::empty(),
        };
        if self.eat_word("mem") {
            native.mem_size = Some(self.small("a size in bytes")?);
        }
        if self.eat_word("in") {
            let (gprs, flags) = self.gprs_and_flags()?;
            (native.gpr_in, native.flags_in) = (gprs.into_iter().collect(), flags);
        }
        if self.eat_word("out") {
            let (gprs, flags) = self.gprs_and_flags()?;
            (native.gpr_out, native.flags_out) = (gprs.into_iter().collect(), flags);
        }
        if self.eat_word("vec_read") {
            native.vec_read = self.small("a mask of 32 bits")?;
        }
        if self.eat_word("vec_write") {
            native.vec_write = self.small("a mask of 32 bits")?;
        }
        if self.eat_word("writes") {
            self.expect("[")?;
            native.writes = self.list("]", Self::loc)?.into_iter().collect();
        }
        if self.eat_word("effects") {
            self.expect("[")?;
            let effects = self.list("]", |p| p.word("an effect", effect_of))?;
            native.effects = effects.into_iter().collect();
        }
        Ok(native)
    }

    /// `[rax, rcx, rflags]`: registers, then the flags.
    fn gprs_and_flags(&mut self) -> Parse<(Vec<Gpr>, bool)> {
        self.expect("[")?;
        let mut flags = false;
        let gprs = self.list("]", |p| {
            if !flags && p.eat_word("rflags") {
                flags = true;
                return Ok(None);
            }
            if flags {
                return p.fail("`]`");
            }
            p.word("a register or `rflags`", gpr_of).map(Some)
        })?;
        Ok((gprs.into_iter().flatten().collect(), flags))
    }

    fn anchor(&mut self) -> Parse<Anchor> {
        self.expect_word("base")?;
        self.expect(".")?;
        let target = self.operand()?;
        self.expect("[")?;
        let varmap = self.list("]", |p| {
            let loc = p.loc()?;
            p.expect("=")?;
            Ok((loc, p.operand()?))
        })?;
        let mut stores = Vec::new();
        if self.eat_word("stores") {
            self.expect("[")?;
            stores = self.list("]", Self::deferred_store)?;
        }
        let via = if self.eat_word("via") { Some(Box::new(self.via()?)) } else { None };
        Ok(Anchor { target, varmap, stores, via })
    }

    /// `t1.a3 [v2 = v5, v7 = 4]`
    fn via(&mut self) -> Parse<Via> {
        let version = self.word("the name of a version", Some)?.to_string();
        self.expect(".")?;
        let anchor = self.anchor_id()?;
        self.expect("[")?;
        let values = self.list("]", |p| {
            // The other version's value: its number says nothing about ours.
            let value = Value(p.numbered('v', "a value of the other version")?);
            p.expect("=")?;
            Ok((value, p.operand()?))
        })?;
        Ok(Via { version, anchor, values })
    }

    fn edge(&mut self) -> Parse<Edge> {
        let to = BlockId(self.numbered('b', "a block such as `b1`")?);
        self.expect("(")?;
        Ok(Edge { to, args: self.list(")", Self::operand)? })
    }

    fn deferred_store(&mut self) -> Parse<DeferredStore> {
        self.expect_word("store")?;
        self.expect(".")?;
        let ty = self.ty()?;
        let (mem, base, index) = self.address()?;
        self.expect(",")?;
        Ok(DeferredStore { ty, mem, args: [base, index, self.operand()?] })
    }

    // Blocks.

    fn block(&mut self, version: &mut Version, spots: &mut Spots) -> Parse<Block> {
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
        self.next += 1;
        parse(self).map(Some)
    }

    /// `seg:[base + index*scale + disp]`
    fn address(&mut self) -> Parse<(Mem, Operand, Operand)> {
        let mut mem = Mem::disp(0);
        if let Token::Word(word @ ("fs" | "gs")) = self.peek() {
            self.next += 1;
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
                    self.next += 1;
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
                        return Err(ParseError::at(at, "an index with its scale, or a number", operand.to_string()));
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
            return if op.is_typed() { Err(unknown("a type suffix such as `.i64`")) } else { Ok((*op, Ty::I64)) };
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
            let starts = Self::is_value(self.peek()) || matches!(self.peek(), Token::Number(_) | Token::Punct("-"));
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
        }
        for (i, def) in defs.iter().enumerate() {
            self.define(*def, result_ty(version, &inst, i));
        }
        inst.defs = defs;
        Ok(inst)
    }
}

/// The type of the i-th result of an instruction; i64 where there should be none.
fn result_ty(version: &Version, inst: &Inst, i: usize) -> Ty {
    match inst.op.signature().1 {
        ResultTy::Same => inst.ty,
        ResultTy::Is(ty) => ty,
        ResultTy::None => match inst.native.and_then(|n| version.natives.get(n.index())) {
            Some(native) if native.flags_out && i == native.gpr_out.len() => Ty::Flags,
            _ => Ty::I64,
        },
    }
}

/// `c`, unless it is the sign extension of a value of type `ty`: then that value.
fn narrow(operand: &mut Operand, ty: Ty) {
    if let Operand::Const(c) = operand
        && ty.sext(*c & ty.mask()) as u64 == *c
    {
        *c &= ty.mask();
    }
}

fn narrow_constants(version: &mut Version) {
    let types = &version.types;
    let param_types: Vec<Vec<Ty>> =
        version.blocks.iter().map(|b| b.params.iter().map(|v| types[v.index()]).collect()).collect();
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

fn numbered(word: &str, prefix: char) -> Option<u32> {
    let digits = word.strip_prefix(prefix)?;
    let canonical = digits == "0" || !digits.starts_with('0');
    let digits = Some(digits).filter(|d| canonical && !d.is_empty() && d.bytes().all(|b| b.is_ascii_digit()))?;
    digits.parse().ok()
}

fn ty_of(word: &str) -> Option<Ty> {
    Ty::ALL.into_iter().find(|t| t.name() == word)
}

fn gpr_of(word: &str) -> Option<Gpr> {
    Gpr::all().find(|g| g.name() == word)
}

pub(super) fn loc_of(word: &str) -> Option<Loc> {
    let index = |prefix: &str, limit: u8| {
        let digits = word.strip_prefix(prefix)?;
        let n: u8 = digits.parse().ok()?;
        (n < limit && n.to_string() == digits).then_some(n)
    };
    let named = match word {
        "rflags" => Some(Loc::Flags),
        "x87" => Some(Loc::X87),
        "mxcsr" => Some(Loc::Mxcsr),
        "df" => Some(Loc::Df),
        "fsbase" => Some(Loc::FsBase),
        "gsbase" => Some(Loc::GsBase),
        _ => None,
    };
    named
        .or_else(|| gpr_of(word).map(Loc::Gpr))
        .or_else(|| index("zmm", 32).map(Loc::Vec))
        .or_else(|| index("k", 8).map(Loc::Mask))
}

fn trap_of(word: &str) -> Option<Trap> {
    Trap::ALL.into_iter().find(|t| t.name() == word)
}

fn byte_of(text: &str) -> Option<u8> {
    let hex = text.len() == 2 && text.bytes().all(|b| b.is_ascii_hexdigit());
    if hex { u8::from_str_radix(text, 16).ok() } else { None }
}
