//! Parses the text form by recursive descent over tokens, one function for each nonterminal of
//! `ir/README.md`. This file has tokens, regions, versions, natives and anchors; [`super::insts`]
//! has blocks and their content.
//!
//! Newlines matter in one place: an instruction ends with its line, because `poll` and a native may
//! have no operands. Values may be numbered freely below [`MAX_VALUES`]; a number that nothing
//! defines and no `dead` line lists is a dead i64 value. A constant written as the sign extension
//! of its type's value (`add.i32 v0, -1`) is taken modulo the type; the printer never writes one
//! for a narrow type.
//!
//! [`Parser`] owns the tokens of one text and the types of the values of the version being parsed.
//! Invariant: no text makes it panic. No lock.
//!
//! ```text
//! region 0x100 { version t1 { … b0(v0: i64 = rax): exit a0 } }  Ok(Version { … })
//! ```

use super::ParseError;
use super::file::Spots;
use super::insts::{narrow, narrow_constants};
use super::lex::{Position, Token, tokens};
use super::names::{byte_of, effect_of, gpr_of, loc_of, numbered, ty_of};
use crate::region::Region;
use crate::types::{AnchorId, BlockId, Gpr, Loc, Operand, Ty, Value};
use crate::version::{
    Anchor, Context, DeferredStore, Edge, Effects, Fact, Native, Split, Version, Via,
};
use iced_x86::{Decoder, DecoderOptions};
use smallvec::SmallVec;

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

pub(super) struct Parser<'t> {
    tokens: Vec<(Token<'t>, Position)>,
    next: usize,
    /// The types of the values of the version being parsed; `None` for those not yet defined.
    types: Vec<Option<Ty>>,
    /// For each version of the region being parsed, the positions of its parts.
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

    /// Takes the next token.
    pub(super) fn skip(&mut self) {
        self.next += 1;
    }

    /// Is the next token on the line of the last one taken?
    pub(super) fn same_line(&self) -> bool {
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

    /// Takes a word for which `f` returns a value.
    pub(super) fn word<T>(
        &mut self,
        expected: &str,
        f: impl FnOnce(&'t str) -> Option<T>,
    ) -> Parse<T> {
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
    pub(super) fn small<T: TryFrom<u64>>(&mut self, expected: &str) -> Parse<T> {
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

    pub(super) fn list<T>(
        &mut self,
        close: &'static str,
        mut item: impl FnMut(&mut Self) -> Parse<T>,
    ) -> Parse<Vec<T>> {
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
    pub(super) fn numbered(&mut self, prefix: char, expected: &str) -> Parse<u32> {
        self.word(expected, |w| numbered(w, prefix))
    }

    pub(super) fn value(&mut self) -> Parse<Value> {
        let at = self.position();
        let number = self.numbered('v', "a value such as `v0`")?;
        if number >= MAX_VALUES {
            return Err(ParseError::at(
                at,
                format!("a value number below {MAX_VALUES}"),
                format!("`v{number}`"),
            ));
        }
        let count = self.types.len().max(number as usize + 1);
        self.types.resize(count, None);
        Ok(Value(number))
    }

    pub(super) fn define(&mut self, v: Value, ty: Ty) {
        self.types[v.index()].get_or_insert(ty);
    }

    pub(super) fn is_value(token: Token<'_>) -> bool {
        matches!(token, Token::Word(w) if numbered(w, 'v').is_some())
    }

    pub(super) fn operand(&mut self) -> Parse<Operand> {
        match self.peek() {
            t if Self::is_value(t) => Ok(Operand::Value(self.value()?)),
            Token::Number(_) | Token::Punct("-") => Ok(Operand::Const(self.constant("a number")?)),
            _ => self.fail("a value or a number"),
        }
    }

    pub(super) fn ty(&mut self) -> Parse<Ty> {
        self.word("a type", ty_of)
    }

    pub(super) fn loc(&mut self) -> Parse<Loc> {
        self.word("a guest location such as `rax` or `rflags`", loc_of)
    }

    pub(super) fn anchor_id(&mut self) -> Parse<AnchorId> {
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
        version.optimised = self.eat_word("optimised");
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
                    Fact::RegInRange { gpr, min, max: self.constant("a number")? }
                } else if self.eat("&") {
                    let mask = self.constant("a number")?;
                    self.expect("==")?;
                    Fact::RegBits { gpr, mask, value: self.constant("a number")? }
                } else {
                    self.expect("==")?;
                    Fact::RegEquals(gpr, self.constant("a number")?)
                }
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
        let Token::Text(text) = self.peek() else {
            return self.fail("the instruction's bytes in quotes");
        };
        self.next += 1;
        let wrong = |expected: &str| ParseError::at(at, expected, format!("{text:?}"));
        let bytes: Option<Vec<u8>> = text.split_whitespace().map(byte_of).collect();
        let bytes =
            bytes.filter(|b| (1..=15).contains(&b.len())).ok_or_else(|| wrong("1 to 15 bytes"))?;
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
            split: Split::No,
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
            if self.eat_word("loaded") {
                native.split = Split::Loaded;
            } else if self.eat_word("stored") {
                native.split = Split::Stored;
            }
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
        let after = if self.eat_word("after") { Some(self.number("a pc")?) } else { None };
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
        let passes = if self.eat_word("passes") { self.number("a number of passes")? } else { 0 };
        let Ok(passes) = u32::try_from(passes) else { return self.fail("a number of passes") };
        Ok(Anchor { target, after, varmap, stores, via, passes })
    }

    /// `t1.a3 [v2 = v5, v7 = 4]`
    fn via(&mut self) -> Parse<Via> {
        let version = self.word("the name of a version", Some)?.to_string();
        self.expect(".")?;
        let anchor = self.anchor_id()?;
        self.expect("[")?;
        let values = self.list("]", |p| {
            // A value of the other version: its number is unrelated to the values of this version.
            let value = Value(p.numbered('v', "a value of the other version")?);
            p.expect("=")?;
            Ok((value, p.operand()?))
        })?;
        Ok(Via { version, anchor, values })
    }

    pub(super) fn edge(&mut self) -> Parse<Edge> {
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
}
