//! The text form of the IR, which `explain` shows, tests are written in and `dynasour ir` reads.
//!
//! `ir/README.md` has the grammar with a worked example. Two promises:
//! * **Round trip.** For a version that the verifier accepts, `version(&v.to_string()) == Ok(v)`,
//!   value numbers and dead values included. A `dead` line lists the dead values; the alternate
//!   form `{:#}` leaves it out. The bytes of a native are those of iced-x86's encoder; they decode
//!   to the same instruction.
//! * **No panics.** The parser answers any text with versions, or with an error that names line and
//!   column.
//!
//! `;` starts a comment; the printer puts only derived information (disassembly) into comments. The
//! modules have no state besides the parser of one text; no lock.

mod file;
mod insts;
mod lex;
mod names;
mod parse;
mod print;

pub use file::{File, Spots, file, settings};
pub use lex::Position;
pub use parse::{regions, version};

pub use crate::region::Region;

/// Why a text is not a region.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("line {line}, column {column}: expected {expected}, found {found}")]
pub struct ParseError {
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
    /// What would have been right.
    pub expected: String,
    /// What is there.
    pub found: String,
}

impl ParseError {
    fn at(position: Position, expected: impl Into<String>, found: impl Into<String>) -> ParseError {
        let Position { line, column } = position;
        ParseError { line, column, expected: expected.into(), found: found.into() }
    }
}
