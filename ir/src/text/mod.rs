//! The text form of the IR: what `explain` shows, what tests are written in, what `dynasour ir` reads.
//!
//! The grammar with a worked example is in `ir/README.md`. Two promises:
//! * **round trip**: for a version that the verifier accepts, `version(&v.to_string()) == Ok(v)`, value numbers and
//!   dead values included. (Dead values are listed in a `dead` line; the alternate form `{:#}` leaves it out.)
//!   The bytes of a native are those of iced-x86's encoder; they decode to the same instruction.
//! * **no panics**: the parser answers any text with versions or with an error that names line and column.
//!
//! `;` starts a comment; the printer uses comments only for what can be derived (disassembly).

mod file;
mod insts;
mod lex;
mod names;
mod parse;
mod print;

pub use file::{File, Spots, file, settings};
pub use lex::Position;
pub use parse::{regions, version};
pub(crate) use print::is_identifier;

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
