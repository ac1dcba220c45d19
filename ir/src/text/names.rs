//! The names of the text form: types, registers, locations, traps and numbered names.
//!
//! Each function takes one word and returns what it names, or `None`. No state, no lock; the parser
//! calls them.
//!
//! ```text
//! loc_of("zmm3")  Some(Loc::Vec(3))        numbered("v03", 'v')  None: a leading zero
//! ```

use crate::types::{Gpr, Loc, Ty};
use crate::version::Trap;

pub(super) use super::print::effect_of;

pub(super) fn numbered(word: &str, prefix: char) -> Option<u32> {
    let digits = word.strip_prefix(prefix)?;
    let canonical = digits == "0" || !digits.starts_with('0');
    let digits = Some(digits)
        .filter(|d| canonical && !d.is_empty() && d.bytes().all(|b| b.is_ascii_digit()))?;
    digits.parse().ok()
}

pub(super) fn ty_of(word: &str) -> Option<Ty> {
    Ty::ALL.into_iter().find(|t| t.name() == word)
}

pub(super) fn gpr_of(word: &str) -> Option<Gpr> {
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

pub(super) fn trap_of(word: &str) -> Option<Trap> {
    Trap::ALL.into_iter().find(|t| t.name() == word)
}

pub(super) fn byte_of(text: &str) -> Option<u8> {
    let hex = text.len() == 2 && text.bytes().all(|b| b.is_ascii_hexdigit());
    if hex { u8::from_str_radix(text, 16).ok() } else { None }
}
