//! Generates the inputs of workloads: the same bytes in every run.
//!
//! Data: files in the bench's working directory. Texts, bytes and documents are kept from run to
//! run, because their names say what is in them; the others are written anew. No lock.
//!
//! Example: `inputs.text = { kind = "text", size = "{n}" }` with n = 5000 makes the file
//! `text-5000`, whose path replaces `{text}` in the command.

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Ways to generate an input.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Input {
    /// Lines of pseudo-random words.
    Text {
        /// Number of bytes.
        size: Size,
    },
    /// Pseudo-random bytes.
    Bytes {
        /// Number of bytes.
        size: Size,
    },
    /// A JSON array of records.
    Json {
        /// Least number of bytes.
        size: Size,
    },
    /// An XML document.
    Xml {
        /// Least number of bytes.
        size: Size,
    },
    /// A given text.
    File {
        /// The text; `{n}` stands for the size.
        content: String,
    },
    /// The standard output of a program.
    Output {
        /// The program, run natively in the suite's directory; `{n}` stands for the size.
        run: Vec<String>,
    },
    /// A path that a program prints to standard output.
    Path {
        /// The program, run natively in the suite's directory; `{n}` stands for the size.
        run: Vec<String>,
    },
}

/// A number of bytes, or `"{n}"`.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub enum Size {
    /// This number of bytes.
    Bytes(u64),
    /// `"{n}"`: the workload's size.
    Text(String),
}

impl Size {
    fn bytes(&self, n: u64) -> Result<usize> {
        Ok(match self {
            Size::Bytes(bytes) => *bytes as usize,
            Size::Text(text) if text == "{n}" => n as usize,
            Size::Text(text) => bail!("size \"{text}\" is neither a number nor \"{{n}}\""),
        })
    }
}

impl Input {
    /// Generates the input below `directory` unless it exists; returns the path that stands for its
    /// name.
    ///
    /// # Errors
    /// The error of the file or program that failed.
    pub fn make(&self, name: &str, n: u64, directory: &Path, suite: &Path) -> Result<PathBuf> {
        let generated =
            |kind: &str, size: &Size, generate: fn(usize) -> Vec<u8>| -> Result<PathBuf> {
                let size = size.bytes(n)?;
                let path = directory.join(format!("{kind}-{size}"));
                if !path.exists() {
                    write(&path, &generate(size))?;
                }
                Ok(path)
            };
        match self {
            Input::Text { size } => generated("text", size, text),
            Input::Bytes { size } => generated("bytes", size, bytes),
            Input::Json { size } => generated("json", size, json),
            Input::Xml { size } => generated("xml", size, xml),
            Input::File { content } => {
                let path = directory.join(name);
                write(&path, content.replace("{n}", &n.to_string()).as_bytes())?;
                Ok(path)
            }
            Input::Output { run } => {
                let path = directory.join(name);
                write(&path, &output(run, n, suite)?)?;
                Ok(path)
            }
            Input::Path { run } => {
                let text = String::from_utf8(output(run, n, suite)?)
                    .context("a path that is not UTF-8")?;
                Ok(PathBuf::from(text.trim_end()))
            }
        }
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

fn output(run: &[String], n: u64, directory: &Path) -> Result<Vec<u8>> {
    let [program, args @ ..] = run else { bail!("'run' is empty") };
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    let output = Command::new(program)
        .args(args.iter().map(|arg| arg.replace("{n}", &n.to_string())))
        .current_dir(directory)
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    ensure!(
        output.status.success(),
        "{program} failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(output.stdout)
}

/// A small generator of random numbers (Marsaglia's xorshift64) with a fixed seed.
struct Random(u64);

impl Random {
    fn new() -> Random {
        // Any number except 0 would do; this is 2^64 divided by the golden ratio.
        Random(0x9e37_79b9_7f4a_7c15)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Appends a word of one to five letters.
    fn word(&mut self, out: &mut Vec<u8>) {
        let mut word = self.below(4000) * self.below(30) + 1;
        while word > 0 {
            out.push(b"etaoinshrdlucmfw"[(word % 16) as usize]);
            word /= 16;
        }
    }
}

fn text(size: usize) -> Vec<u8> {
    let mut random = Random::new();
    let mut out = Vec::with_capacity(size + 16);
    while out.len() < size {
        for _ in 0..=random.below(7) {
            random.word(&mut out);
            out.push(b' ');
        }
        out.push(b'\n');
    }
    out.truncate(size);
    out
}

fn bytes(size: usize) -> Vec<u8> {
    let mut random = Random::new();
    let mut out: Vec<u8> = std::iter::repeat_with(|| random.next().to_le_bytes())
        .take(size.div_ceil(8))
        .flatten()
        .collect();
    out.truncate(size);
    out
}

/// At least one record between `open` and `close`, until there are `size` bytes.
fn records(
    size: usize,
    open: &str,
    close: &str,
    record: fn(&mut Random, &mut Vec<u8>, u64),
) -> Vec<u8> {
    let mut random = Random::new();
    let mut out = open.as_bytes().to_vec();
    let mut index = 0;
    while index == 0 || out.len() < size {
        record(&mut random, &mut out, index);
        index += 1;
    }
    out.extend_from_slice(close.as_bytes());
    out
}

fn json(size: usize) -> Vec<u8> {
    records(size, "[", "]\n", |random, out, index| {
        if index > 0 {
            out.extend_from_slice(b",\n");
        }
        out.extend_from_slice(
            format!("{{\"id\":{index},\"score\":{},\"name\":\"", random.below(1000)).as_bytes(),
        );
        random.word(out);
        out.extend_from_slice(b"\",\"tags\":[\"");
        random.word(out);
        out.extend_from_slice(b"\",\"");
        random.word(out);
        out.extend_from_slice(b"\"]}");
    })
}

fn xml(size: usize) -> Vec<u8> {
    records(size, "<?xml version=\"1.0\"?>\n<list>\n", "</list>\n", |random, out, index| {
        out.extend_from_slice(
            format!("<item id=\"i{index}\" score=\"{}\"><name>", random.below(1000)).as_bytes(),
        );
        random.word(out);
        out.extend_from_slice(b"</name><text>");
        for _ in 0..random.below(9) {
            random.word(out);
            out.push(b' ');
        }
        out.extend_from_slice(b"</text></item>\n");
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_the_same_every_time_and_as_long_as_asked() {
        for generate in [text, bytes, json, xml] {
            let first = generate(10_000);
            assert_eq!(first, generate(10_000));
            assert!(first.len() >= 10_000 && first.len() < 10_200, "{}", first.len());
        }
        let parsed: serde_json::Value = serde_json::from_slice(&json(5_000)).expect("JSON");
        assert_eq!(parsed[1]["id"], 1);
    }

    #[test]
    fn outputs_come_from_programs() {
        let directory = tempfile::tempdir().expect("a directory");
        let run = vec!["echo".to_string(), "/some/where".to_string()];
        let path = Input::Path { run: run.clone() }.make("p", 0, directory.path(), Path::new(""));
        assert_eq!(path.expect("echo"), Path::new("/some/where"));
        let path =
            Input::Output { run }.make("o", 0, directory.path(), Path::new("")).expect("echo");
        assert_eq!(fs::read(path).expect("written"), b"/some/where\n");
        let missing = Input::Output { run: vec!["/nonexistent/x".to_string()] };
        assert!(missing.make("o", 0, directory.path(), Path::new("")).is_err());
        let content = Input::File { content: "a {n} b".to_string() }.make(
            "f",
            7,
            directory.path(),
            Path::new(""),
        );
        assert_eq!(fs::read(content.expect("written")).expect("written"), b"a 7 b");
        assert!(Size::Text("7K".to_string()).bytes(3).is_err());
    }
}
