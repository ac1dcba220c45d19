//! `--csv`: one row for each guard of each version.
//!
//! No data, no lock. Example: `0x111c8,work+0x28,t11,loop,2,branch@111d9.0,branch,…,998897,1000,50,950,0`.

use super::model::{Explainer, Record, RegionHead, Version};
use super::text::{guard_kind, kind};
use anyhow::{Context, Result};
use dynasour_runtime::observe::census::{Guard, To};
use serde::Serialize;
use std::io::Write;

/// A guard.
#[derive(Serialize)]
struct Row<'a> {
    region: String,
    region_symbol: &'a str,
    version: &'a str,
    version_kind: &'static str,
    guard: u32,
    site: &'a str,
    kind: &'static str,
    pc: String,
    in_loop: bool,
    executed: u64,
    failed: u64,
    /// Failures that came to the runtime.
    to_runtime: u64,
    /// Failures that went on in a trace or resolved stub.
    to_fragments: u64,
    /// Failures that went on in copied blocks, or in guest code where it stands.
    to_blocks: u64,
    predicate: &'a str,
}

/// Writes the table. It is complete for versions that have a body.
///
/// # Errors
/// It cannot be written.
pub fn write(explainer: Explainer<'_>, out: &mut dyn Write) -> Result<()> {
    let mut table = csv::Writer::from_writer(out);
    let mut region: Option<RegionHead> = None;
    explainer.records(|record| {
        match record {
            Record::Region(head) => region = Some(head),
            Record::Version(version) => {
                let region = region.as_ref().context("a version before any region")?;
                for guard in version.body.iter().flat_map(|body| &body.guards) {
                    table.serialize(row(region, &version, guard)).map_err(io)?;
                }
            }
            Record::Run(_) | Record::Sources { .. } => {}
        }
        Ok(())
    })?;
    table.flush().context("cannot write the table")
}

/// The error of the output, by which a closed pipe is recognised.
fn io(error: csv::Error) -> anyhow::Error {
    match error.into_kind() {
        csv::ErrorKind::Io(error) => error.into(),
        other => anyhow::anyhow!("cannot write the table: {other:?}"),
    }
}

fn row<'a>(region: &'a RegionHead, version: &'a Version, guard: &'a Guard) -> Row<'a> {
    let to = |of: fn(&To) -> bool| -> u64 {
        guard.went.iter().filter(|went| of(&went.to)).map(|went| went.times).sum()
    };
    Row {
        region: format!("{:#x}", region.pc),
        region_symbol: &region.symbol,
        version: &version.name,
        version_kind: kind(version.kind),
        guard: guard.index,
        site: &guard.site,
        kind: guard_kind(guard.kind),
        pc: format!("{:#x}", guard.pc),
        in_loop: guard.in_loop,
        executed: guard.executed,
        failed: guard.failed,
        to_runtime: to(|to| matches!(to, To::Runtime)),
        to_fragments: to(|to| matches!(to, To::Fragment { .. })),
        to_blocks: to(|to| matches!(to, To::Block { .. })),
        predicate: &guard.predicate,
    }
}
