//! Splits the text form into tokens, each with its line and column.
//!
//! [`tokens`] returns borrowed slices of the text and has no state. Invariants: the last token is
//! [`Token::End`]; positions never decrease. Only the parser calls it; no lock.
//!
//! ```text
//! v1 = add.i64 v0, -1  Word v1, Punct =, Word add, Punct ., Word i64, Word v0, …, End
//! ```

use super::ParseError;
use std::fmt;

/// Where a token starts, both counted from 1 (columns in characters).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Position {
    /// The line.
    pub line: usize,
    /// The column.
    pub column: usize,
}

/// One token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Token<'t> {
    /// A name, a keyword, or a numbered name such as `v3`.
    Word(&'t str),
    /// An unsigned number, decimal or `0x` hexadecimal.
    Number(u64),
    /// A string without its quotes; there are no escapes.
    Text(&'t str),
    /// Punctuation.
    Punct(&'static str),
    /// The end of the text.
    End,
}

impl fmt::Display for Token<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Token::Word(w) => write!(f, "`{w}`"),
            Token::Number(n) => write!(f, "{n:#x}"),
            Token::Text(t) => write!(f, "{t:?}"),
            Token::Punct(p) => write!(f, "`{p}`"),
            Token::End => f.write_str("the end of the text"),
        }
    }
}

/// Longest first, so that `==` is not read as two `=`.
const PUNCTUATION: [&str; 20] = [
    "==", "&&", "..", "{", "}", "(", ")", "[", "]", ":", ",", "=", "!", "+", "-", "*", ".", "#",
    "?", "&",
];

/// Splits `text` into tokens; the last is [`Token::End`].
pub(super) fn tokens(text: &str) -> Result<Vec<(Token<'_>, Position)>, ParseError> {
    let mut out = Vec::new();
    let mut at = Position { line: 1, column: 1 };
    let mut remaining = text;
    loop {
        let Some(first) = remaining.chars().next() else {
            out.push((Token::End, at));
            return Ok(out);
        };
        let (token, len) = match first {
            '\n' => {
                at = Position { line: at.line + 1, column: 1 };
                remaining = &remaining[1..];
                continue;
            }
            ';' => (None, remaining.find('\n').unwrap_or(remaining.len())),
            c if c.is_whitespace() => (None, c.len_utf8()),
            c if c.is_ascii_alphabetic() || c == '_' => {
                let len = word_len(remaining);
                (Some(Token::Word(&remaining[..len])), len)
            }
            c if c.is_ascii_digit() => {
                let len = word_len(remaining);
                (Some(Token::Number(number(&remaining[..len], at)?)), len)
            }
            '"' => {
                let end = remaining[1..]
                    .find(['"', '\n'])
                    .filter(|i| remaining[1 + i..].starts_with('"'));
                let Some(end) = end else {
                    return Err(ParseError::at(at, "a closing `\"` on this line", "none"));
                };
                (Some(Token::Text(&remaining[1..1 + end])), end + 2)
            }
            c => {
                let Some(punct) = PUNCTUATION.iter().find(|p| remaining.starts_with(**p)) else {
                    return Err(ParseError::at(at, "a token", format!("{c:?}")));
                };
                (Some(Token::Punct(punct)), punct.len())
            }
        };
        out.extend(token.map(|t| (t, at)));
        at.column += remaining[..len].chars().count();
        remaining = &remaining[len..];
    }
}

fn word_len(text: &str) -> usize {
    text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len())
}

fn number(text: &str, at: Position) -> Result<u64, ParseError> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| {
        ParseError::at(at, "a number below 2^64, decimal or 0x hexadecimal", format!("`{text}`"))
    })
}
