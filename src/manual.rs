//! `dynasour man`: writes manual pages, one for each subcommand, for `man`.
//!
//! The pages are made by clap_mangen from the parser of the command line, but for the section with
//! examples: clap_mangen joins its lines to one paragraph, so [`examples`] writes it.
//!
//! *Invariants.* No page is written if one of them exists, unless `--force`. Lines of the text after
//! the options that begin with two blanks are printed as they are, the others are filled.
//!
//! No data, no lock. Example: `dynasour man man1` writes `man1/dynasour.1`, `man1/dynasour-run.1`,
//! `man1/dynasour-ir-opt.1` and others; `man -l man1/dynasour-run.1` shows one.

use anyhow::{Context, Result, bail};
use clap::{Args, Command};
use clap_mangen::Man;
use std::ffi::c_int;
use std::fs;
use std::path::PathBuf;

/// Options of `man`.
#[derive(Args, Debug)]
pub struct ManArgs {
    /// The folder for the pages; it is created if it does not exist
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Overwrite pages that exist
    #[arg(long)]
    force: bool,
}

/// Writes the pages; `command` is the parser of the command line.
pub fn run(args: &ManArgs, command: Command) -> Result<c_int> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let mut pages = Vec::new();
    collect(&command, &mut pages)?;
    let dir = &args.dir;
    if !args.force
        && let Some((name, _)) = pages.iter().find(|(name, _)| dir.join(name).exists())
    {
        bail!("{} exists already; --force overwrites it", dir.join(name).display());
    }
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    for (name, page) in pages {
        let path = dir.join(name);
        fs::write(&path, page).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(0)
}

/// Adds the page of a command and the pages of its subcommands.
fn collect(command: &Command, pages: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
    let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let source = concat!("dynasour ", env!("CARGO_PKG_VERSION"));
    let man = Man::new(command.clone().after_help(None::<&str>)).source(source);
    let mut page = Vec::new();
    man.render(&mut page)?;
    page.extend(examples(&after).into_bytes());
    pages.push((man.get_filename(), page));
    command.get_subcommands().filter(|c| !c.is_hide_set()).try_for_each(|c| collect(c, pages))
}

/// The text after the options as a section.
fn examples(text: &str) -> String {
    if text.is_empty() {
        return String::new();
    }
    let mut out = String::from(".SH NOTES\n");
    let mut as_it_is = false;
    for line in text.lines() {
        let is_example = line.starts_with("  ");
        if is_example != as_it_is {
            out.push_str(if is_example { ".nf\n" } else { ".fi\n" });
            as_it_is = is_example;
        }
        match line {
            "" => out.push_str(".PP\n"),
            line => {
                out.push_str(&escaped(line));
                out.push('\n');
            }
        }
    }
    if as_it_is {
        out.push_str(".fi\n");
    }
    out
}

/// A line of text in roff: nothing in it is a request or an escape.
fn escaped(line: &str) -> String {
    let text = line.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq");
    if text.starts_with('.') { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_no_roff() {
        assert_eq!(
            examples("Examples:\n  run 'a\\b' --x\n\n.TH is text"),
            ".SH NOTES\nExamples:\n.nf\n  run \\(aqa\\eb\\(aq \\-\\-x\n.fi\n.PP\n\\&.TH is text\n"
        );
        assert_eq!(examples(""), "");
    }
}
