//! `--at`: finds the fragments that the user's text means: a symbol, a symbol and an offset, a
//! guest pc, or the name of a version. If nothing matches, the error names what is close.
//!
//! No data, no lock. Example: `--at main+0x10` finds each fragment whose path has a block with that
//! address, and `--at t12` the version of that name.

use anyhow::{Result, bail};
use dynasour_guest::symbols::Symbols;
use dynasour_runtime::observe::census::{Census, Fragment};
use std::ops::Range;

/// Number of near matches that an error lists (guess; more would fill the screen).
const MOST_SUGGESTIONS: usize = 6;

/// The fragments that `asked` means: those whose path contains the pc or a part of the function, or
/// the version of this name.
///
/// # Errors
/// No fragment matches; the message lists names that are close.
pub fn fragments(asked: &str, census: &Census, symbols: &Symbols) -> Result<Vec<u32>> {
    let (name, offset) =
        match asked.rsplit_once("+0x").map(|(name, hex)| (name, u64::from_str_radix(hex, 16))) {
            Some((name, Ok(offset))) => (name, Some(offset)),
            _ => (asked, None),
        };
    let ranges: Vec<Range<u64>> = if let Some(pc) = pc(asked) {
        std::iter::once(pc..pc + 1).collect()
    } else {
        let of = |s: &dynasour_guest::symbols::Symbol| match offset {
            Some(offset) => s.start + offset..s.start + offset + 1,
            None => s.start..s.end,
        };
        symbols.named(name).into_iter().map(of).collect()
    };
    if ranges.is_empty() {
        let version = census.fragments.iter().find(|f| f.name == asked && !f.path.is_empty());
        return match version {
            Some(f) => Ok(vec![f.id]),
            None => bail!(
                "no function or version is called {asked}{}",
                near_names(asked, census, symbols)
            ),
        };
    }
    let hits = |f: &&Fragment| {
        f.path.iter().any(|s| ranges.iter().any(|r| s.pc < r.end && r.start < s.end))
    };
    let found: Vec<u32> = census.fragments.iter().filter(hits).map(|f| f.id).collect();
    if found.is_empty() {
        let at = ranges[0].start;
        bail!("no trace passes {asked} ({}){}", symbols.name(at), near_traces(at, census, symbols));
    }
    Ok(found)
}

/// Parses a number as a pc.
fn pc(text: &str) -> Option<u64> {
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// The part of an error message that names similar symbols, or else functions with traces.
fn near_names(name: &str, census: &Census, symbols: &Symbols) -> String {
    let near = near(name, symbols);
    if !near.is_empty() {
        return format!("; near: {}", near.join(", "));
    }
    let mut hot: Vec<&str> = Vec::new();
    for fragment in census.fragments.iter().filter(|f| !f.path.is_empty()) {
        if let Some(symbol) = symbols.at(fragment.pc)
            && !hot.contains(&symbol.name.as_str())
        {
            hot.push(&symbol.name);
        }
    }
    hot.truncate(MOST_SUGGESTIONS);
    if hot.is_empty() { String::new() } else { format!("; traces were made in {}", hot.join(", ")) }
}

/// The part of an error message that names the traces which start closest to a pc.
fn near_traces(at: u64, census: &Census, symbols: &Symbols) -> String {
    let mut starts: Vec<u64> =
        census.fragments.iter().filter(|f| !f.path.is_empty()).map(|f| f.pc).collect();
    starts.sort_by_key(|pc| pc.abs_diff(at));
    starts.dedup();
    starts.truncate(MOST_SUGGESTIONS);
    let names: Vec<String> =
        starts.iter().map(|pc| format!("{pc:#x} ({})", symbols.name(*pc))).collect();
    if names.is_empty() {
        String::new()
    } else {
        format!("; the nearest start at {}", names.join(", "))
    }
}

/// The names that differ least from `name`, best first: at most one edit and another for each four
/// letters (guess), or names that contain it.
fn near<'s>(name: &str, symbols: &'s Symbols) -> Vec<&'s str> {
    let lower = name.to_lowercase();
    let distance = |known: &'s str| {
        let low = known.to_lowercase();
        let distance = strsim::damerau_levenshtein(&lower, &low);
        let close = distance <= 1 + name.len() / 4 || name.len() >= 3 && low.contains(&lower);
        close.then_some((distance, known))
    };
    let mut near: Vec<(usize, &str)> = symbols.names().filter_map(distance).collect();
    near.sort_unstable();
    near.into_iter().take(MOST_SUGGESTIONS).map(|(_, name)| name).collect()
}
