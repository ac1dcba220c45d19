//! Parses a `#!` line exactly as the kernel's binfmt_script does.
//!
//! The kernel looks at the first [`HEAD`] bytes only, the last of which it never uses. Within them:
//! * blanks (space, tab) may surround the interpreter's name; a blank or a NUL ends it;
//! * everything after the name, inner blanks included, is *one* argument, trailing blanks cut off;
//! * a name that might be longer than what was read is refused; a longer argument is cut.

/// The number of bytes by which the kernel recognises a file's format (BINPRM_BUF_SIZE).
pub(super) const HEAD: usize = 256;

/// The largest number of nested script interpreters; the kernel answers ELOOP beyond it.
pub(super) const MAX_SCRIPTS: usize = 5;

/// The content of a `#!` line.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ScriptLine {
    /// The interpreter's path, possibly relative, possibly empty.
    pub(super) interpreter: Vec<u8>,
    /// The argument before the script's name.
    pub(super) argument: Option<Vec<u8>>,
}

fn is_blank(byte: u8) -> bool {
    byte == b' ' || byte == b'\t'
}

/// Index of the first byte in `from..=to` that is no blank.
fn next_word(bytes: &[u8], from: usize, to: usize) -> Option<usize> {
    (from..=to).find(|&i| !is_blank(bytes[i]))
}

/// Index of the first byte in `from..=to` that ends a word.
fn next_end(bytes: &[u8], from: usize, to: usize) -> Option<usize> {
    (from..=to).find(|&i| is_blank(bytes[i]) || bytes[i] == 0)
}

/// The bytes of `from..to` up to the first NUL.
fn c_string(bytes: &[u8], from: usize, to: usize) -> Vec<u8> {
    bytes[from..to.max(from)].iter().copied().take_while(|&byte| byte != 0).collect()
}

/// Reads the line of a file that starts with `#!`. `head` is the file's beginning, zero-padded to
/// [`HEAD`] bytes. `None` when it names no interpreter.
pub(super) fn parse(head: &[u8; HEAD]) -> Option<ScriptLine> {
    let last = HEAD - 1;
    // The kernel's search for the newline ends at a NUL.
    let text_end =
        head.iter().position(|&byte| byte == b'\n' || byte == 0).filter(|&i| head[i] == b'\n');
    let mut end = match text_end {
        Some(newline) => newline,
        None => {
            let name = next_word(head, 2, last)?;
            next_end(head, name, last)?;
            last
        }
    };
    while is_blank(head[end - 1]) {
        end -= 1;
    }
    let name = next_word(head, 2, end).filter(|&name| name != end)?;
    let name_end = next_end(head, name, end);
    let argument = match name_end {
        Some(separator) if head[separator] != 0 => {
            next_word(head, separator, end).map(|start| c_string(head, start, end))
        }
        _ => None,
    };
    Some(ScriptLine { interpreter: c_string(head, name, name_end.unwrap_or(end)), argument })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &[u8]) -> Option<(String, Option<String>)> {
        let mut head = [0; HEAD];
        let len = text.len().min(HEAD);
        head[..len].copy_from_slice(&text[..len]);
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("ASCII");
        parse(&head).map(|line| (text(line.interpreter), line.argument.map(text)))
    }

    fn some(interpreter: &str, argument: Option<&str>) -> Option<(String, Option<String>)> {
        Some((interpreter.into(), argument.map(Into::into)))
    }

    #[test]
    fn ordinary_lines() {
        assert_eq!(line(b"#!/bin/sh\necho"), some("/bin/sh", None));
        assert_eq!(line(b"#! \t/bin/sh \t\n"), some("/bin/sh", None));
        assert_eq!(line(b"#!/usr/bin/env -S a  b \t\n"), some("/usr/bin/env", Some("-S a  b")));
        assert_eq!(line(b"#!bin/sh\t-e\n"), some("bin/sh", Some("-e")));
        assert_eq!(line(b"#!/bin/sh\r\n"), some("/bin/sh\r", None));
    }

    #[test]
    fn files_without_newline() {
        assert_eq!(line(b"#!/bin/sh"), some("/bin/sh", None));
        assert_eq!(line(b"#!/bin/sh -e"), some("/bin/sh", Some("-e")));
        // The kernel's behaviour: the blank starts an argument, and the padding makes it an empty
        // one.
        assert_eq!(line(b"#!/bin/sh "), some("/bin/sh", Some("")));
    }

    #[test]
    fn nothing_to_run() {
        assert_eq!(line(b"#!\n"), None);
        assert_eq!(line(b"#! \t \n/bin/sh\n"), None);
        assert_eq!(line(&[b"#!".as_slice(), &[b' '; 400]].concat()), None);
        // An empty name counts as a name (to the kernel: the current directory).
        assert_eq!(line(b"#!"), some("", None));
    }

    #[test]
    fn embedded_nul() {
        assert_eq!(line(b"#!/bin/sh\0junk\n"), some("/bin/sh", None));
        assert_eq!(line(b"#!/bin/sh a\0b\n"), some("/bin/sh", Some("a")));
    }

    #[test]
    fn long_lines() {
        let long_name = [b"#!/".as_slice(), &[b'x'; 300]].concat();
        assert_eq!(line(&long_name), None);
        // Only 255 bytes count: a name that ends exactly there might be longer in the file.
        let name_to_end = [b"#!/".as_slice(), &[b'x'; 252], b" y\n"].concat();
        assert_eq!(line(&name_to_end), some(&format!("/{}", "x".repeat(252)), None));
        let one_more = [b"#!/".as_slice(), &[b'x'; 253], b" y\n"].concat();
        assert_eq!(line(&one_more), None);
        let long_argument = [b"#!/bin/sh ".as_slice(), &[b'x'; 300]].concat();
        assert_eq!(line(&long_argument), some("/bin/sh", Some(&"x".repeat(245))));
    }
}
