//! Parses whole files: regions and states, with the position of each part.
//!
//! [`File`] owns the parsed regions and states; [`Spots`] holds the positions by which tools show
//! an error of the verifier in the text. Invariant: `spots[r][v]` belongs to version `v` of region
//! `r`. `dynasour ir` and tests call [`file()`]; no lock.
//!
//! ```text
//! state { rdi = 3 }            file.setups[0]
//! region 0x100 { version …     file.regions[0], and file.spots[0][0].version = line 2, column 16
//! ```

use super::lex::{Position, Token};
use super::names::loc_of;
use super::parse::{Parse, Parser};
use super::{ParseError, Region};
use crate::setup::{MAX_ZERO, Setting, Setup};
use crate::verify::Where;

/// What a file holds.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct File {
    /// In the order of the text.
    pub regions: Vec<Region>,
    /// In the order of the text.
    pub setups: Vec<Setup>,
    /// For each version of each region, the positions of its parts.
    pub spots: Vec<Vec<Spots>>,
}

/// The positions of the parts of a version.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Spots {
    /// `version`
    pub version: Position,
    /// `native n0`, …
    pub natives: Vec<Position>,
    /// `anchor a0`, …
    pub anchors: Vec<Position>,
    /// `b0`, …
    pub blocks: Vec<Position>,
    /// The instructions of each block, then its terminator.
    pub insts: Vec<Vec<Position>>,
}

impl Spots {
    pub(super) fn new(version: Position) -> Spots {
        Spots {
            version,
            natives: Vec::new(),
            anchors: Vec::new(),
            blocks: Vec::new(),
            insts: Vec::new(),
        }
    }

    /// The position of what the verifier names; that of the version if the part is not in the text.
    pub fn of(&self, at: Where) -> Position {
        let found = match at {
            Where::Version => None,
            Where::Block(b) => self.blocks.get(b.index()),
            Where::Point(point) => {
                self.insts.get(point.block.index()).and_then(|block| block.get(point.inst))
            }
            Where::Anchor(a) => self.anchors.get(a.index()),
            Where::Native(n) => self.natives.get(n.index()),
        };
        found.copied().unwrap_or(self.version)
    }
}

/// Parses a whole file.
pub fn file(text: &str) -> Parse<File> {
    let mut parser = Parser::new(text)?;
    let mut file = File::default();
    loop {
        match parser.peek() {
            Token::End => return Ok(file),
            Token::Word("state") => file.setups.push(parser.setup()?),
            Token::Word("region") => {
                file.regions.push(parser.region()?);
                file.spots.push(std::mem::take(&mut parser.spots));
            }
            _ => return parser.fail("`region`, `state` or the end of the text"),
        }
    }
}

/// Parses settings as they stand in a `state`.
pub fn settings(text: &str) -> Parse<Vec<Setting>> {
    let mut parser = Parser::new(text)?;
    let mut out = Vec::new();
    while parser.peek() != Token::End {
        out.push(parser.setting("a setting or the end of the text")?);
    }
    Ok(out)
}

impl Parser<'_> {
    fn setup(&mut self) -> Parse<Setup> {
        self.expect_word("state")?;
        let mut setup = Setup::default();
        if let Token::Text(name) = self.peek() {
            self.skip();
            setup.name = Some(name.to_string());
        }
        self.expect("{")?;
        while !self.eat("}") {
            setup.settings.push(self.setting(
                "a register, `memory`, `read_only`, `shared`, `answer`, `native`, `input` or `}`",
            )?);
        }
        Ok(setup)
    }

    fn setting(&mut self, expected: &str) -> Parse<Setting> {
        if self.eat_word("memory") {
            let address = self.number("an address")?;
            self.expect(":")?;
            if self.eat_word("zero") {
                let at = self.position();
                let size = self.number("a size in bytes")?;
                if size > MAX_ZERO {
                    return Err(ParseError::at(
                        at,
                        format!("at most {MAX_ZERO} bytes"),
                        format!("{size}"),
                    ));
                }
                return Ok(Setting::Zero { address, size });
            }
            let at = self.position();
            let ty = self.ty()?;
            if !ty.is_machine_int() {
                return Err(ParseError::at(at, "i8, i16, i32, i64 or `zero`", format!("`{ty}`")));
            }
            let values = self.values(ty.mask())?;
            return Ok(Setting::Data { address, ty, values });
        }
        if self.eat_word("read_only") {
            return Ok(Setting::ReadOnly(self.number("an address")?));
        }
        if self.eat_word("shared") {
            return Ok(Setting::Shared(self.number("an address")?));
        }
        if self.eat_word("answer") {
            let address = self.number("an address")?;
            self.expect_word("after")?;
            return Ok(Setting::Answer { address, after: self.small("a number of loads")? });
        }
        if self.eat_word("native") {
            let ip = self.number("the pc of an instruction")?;
            self.expect_word("result")?;
            let output: u32 = self.small("the number of a result")?;
            self.expect("=")?;
            return Ok(Setting::Native {
                ip,
                output: output as usize,
                value: self.constant("a number")?,
            });
        }
        if self.eat_word("input") {
            return Ok(Setting::Input(self.values(u64::MAX)?));
        }
        let loc = self.word(expected, loc_of)?;
        self.expect("=")?;
        Ok(Setting::Loc(loc, self.constant("a number")?))
    }

    fn values(&mut self, mask: u64) -> Parse<Vec<u64>> {
        let mut out = Vec::new();
        loop {
            out.push(self.constant("a number")? & mask);
            if !self.eat(",") {
                return Ok(out);
            }
        }
    }
}
