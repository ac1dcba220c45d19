//! Studies of many programs: lists of command lines, and shards of a study.
//!
//! A list has a command line in each line, in words as a shell splits and unquotes them; a shell is
//! not started, so that nothing is expanded or redirected. Empty lines, and lines that begin with
//! `#`, are skipped.
//!
//! A shard `i/n` is every n-th row of a study, from the i-th on (from 1). Each row is of exactly
//! one shard, and neighbours, which often take equally long, are of different ones. `bench` and
//! `guards` use both. No data, no lock.
//!
//! ```text
//! ./a.out 1000          the list of a study
//! gzip -c 'my file'
//! --shard 2/2           the second program only
//! ```

use anyhow::{Context, Result, bail, ensure};
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::Path;
use std::str::FromStr;

/// One of n parts of a study.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// From 1 to `of`.
    part: usize,
    of: usize,
}

impl Default for Shard {
    /// The whole study.
    fn default() -> Shard {
        Shard { part: 1, of: 1 }
    }
}

impl FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Shard, String> {
        const FORM: &str = "expected I/N, such as 1/4 to 4/4";
        let (part, of) = text.split_once('/').ok_or(FORM)?;
        let shard =
            Shard { part: part.parse().map_err(|_| FORM)?, of: of.parse().map_err(|_| FORM)? };
        if (1..=shard.of).contains(&shard.part) { Ok(shard) } else { Err(FORM.to_string()) }
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.part, self.of)
    }
}

impl Shard {
    /// Whether the row with this index, from 0, is of this shard.
    pub fn has(self, index: usize) -> bool {
        index % self.of == self.part - 1
    }
}

/// Reads a list of command lines.
///
/// # Errors
/// It cannot be read, a line has an open quote, or there is no command line.
pub fn read_list(path: &Path) -> Result<Vec<Vec<OsString>>> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read list {}", path.display()))?;
    let mut commands = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        match shell_words::split(line) {
            Ok(words) if words.first().is_some_and(|word| !word.is_empty()) => {
                commands.push(words.into_iter().map(OsString::from).collect());
            }
            Ok(_) => {
                bail!("list {}, line {}: the program's name is empty", path.display(), number + 1)
            }
            Err(error) => bail!("list {}, line {}: {error}", path.display(), number + 1),
        }
    }
    ensure!(!commands.is_empty(), "list {} has no command line", path.display());
    Ok(commands)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_is_of_one_shard() {
        let shards: Vec<Shard> =
            (1..=3).map(|i| format!("{i}/3").parse().expect("valid")).collect();
        for index in 0..10 {
            assert_eq!(shards.iter().filter(|shard| shard.has(index)).count(), 1);
        }
        assert!(shards[1].has(1) && shards[1].has(4) && Shard::default().has(7));
        for bad in ["", "1", "0/3", "4/3", "1/0", "-1/3", "a/b", "1/3/2", "1.5/3"] {
            assert!(bad.parse::<Shard>().is_err(), "{bad}");
        }
    }

    #[test]
    fn lists_have_words_comments_and_mistakes_with_their_line() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("list");
        let list = |text: &str| {
            fs::write(&path, text).expect("written");
            read_list(&path).map_err(|error| error.to_string())
        };
        let words = list("# two programs\n\n ./a.out 'b c' $x\nls\n").expect("valid");
        assert_eq!(words, [vec!["./a.out", "b c", "$x"], vec!["ls"]]);
        assert!(list("ls\nls 'x\n").expect_err("open quote").contains("line 2"));
        assert!(list("'' x\n").expect_err("no name").contains("line 1"));
        assert!(list("# none\n").expect_err("empty").contains("no command line"));
        fs::write(&path, [0xff, b'\n']).expect("written");
        assert!(read_list(&path).is_err());
    }
}
