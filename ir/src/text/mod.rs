//! The text form of the IR: what `explain` shows, what tests are written in, what `dynasour ir` reads.
//!
//! The grammar with a worked example is in `ir/README.md`. `;` starts a comment; the printer uses comments only
//! for what can be derived (disassembly). Dead values are listed in a `dead` line, so that printing loses
//! nothing; the alternate form `{:#}` leaves that line out.

mod print;

pub(crate) use print::is_identifier;
