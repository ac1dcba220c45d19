//! The data of an explanation: everything that the report and its JSON show.
//!
//! [`explain`] chooses the regions that were asked for and collects what is known of their versions
//! from the census of the run. A version that is shown in full has a [`Body`].
//!
//! Invariant: shares and sums are over all traces of the run, not only over the shown ones. A field
//! of [`Explanation`] is a field of the JSON, so a change of one changes [`SCHEMA`]. [`super::run`]
//! is the only caller; no lock.
//!
//! Example: `--top 1` gives one region. Its versions with at least 5 % of its instructions have a
//! body, the others only their counts.

use super::counting::{Counted, Uncounted};
use super::disassembly::Disassembler;
use super::guest::{self, Block};
use super::heat::{self, Region as Hot};
use super::native::{self, Line};
use super::passes::{self, Change};
use super::source_lines::{SourceFile, SourceLines};
use dynasour_guest::symbols::Symbols;
use dynasour_runtime::observe::attempts::Attempt;
use dynasour_runtime::observe::census::{
    Census, CodeBytes, CompileTimes, End, Fragment, From, Guard, Interpreted, Kind, To, Went,
};
use dynasour_runtime::observe::certificate::{Certificate, Proof};
use dynasour_runtime::observe::profile::timeline::Timeline;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;

/// Version of the JSON's structure, for programs that read it.
pub const SCHEMA: u32 = 3;

/// A version is shown in full by default if it executed at least this share of its region's
/// instructions (guess; lower makes reports longer).
const WORTH_SHOWING: f64 = 0.05;

/// A run, explained.
#[derive(Serialize, Deserialize, Debug)]
pub struct Explanation {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The program as given.
    pub program: String,
    /// Its arguments.
    pub args: Vec<String>,
    /// Its exit status, unless a signal ended it.
    pub status: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// The tier it ran under.
    pub tier: String,
    /// Executions of a head before it was recorded.
    pub threshold: u32,
    /// Whether the counts are exact (they are not where several threads ran one trace at once).
    pub exact: bool,
    /// Guest instructions executed in traces.
    pub instructions: u64,
    /// Traces made, without stubs.
    pub traces: usize,
    /// Regions with traces.
    pub regions_in_all: usize,
    /// The regions that were asked for, the hottest first.
    pub regions: Vec<Region>,
    /// The heads at which traces were tried in a run without counters, the hottest first; none if that
    /// was not asked for.
    pub attempts: Option<Vec<Attempt>>,
    /// The time in each phase over the same run without counters.
    pub timeline: Option<Timeline>,
    /// The source files of the shown guest instructions, as far as they have debug information.
    pub sources: Vec<SourceFile>,
}

/// A region.
#[derive(Serialize, Deserialize, Debug)]
pub struct Region {
    /// Its start address.
    pub pc: u64,
    /// The same address as symbol and offset.
    pub symbol: String,
    /// Guest instructions executed in its traces.
    pub instructions: u64,
    /// Their share of all that traces executed.
    pub share: f64,
    /// Its traces, in the order in which they were made.
    pub versions: Vec<Version>,
}

/// One version of a region, that is, one trace.
#[derive(Serialize, Deserialize, Debug)]
pub struct Version {
    /// The number of its fragment in the run.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// What it was made for.
    pub kind: Kind,
    /// Start address.
    pub pc: u64,
    /// The same address as symbol and offset.
    pub symbol: String,
    /// The fragment and guards whose exit it was made for.
    pub from: Option<From>,
    /// Guest instructions executed in it.
    pub instructions: u64,
    /// Their share of the region's.
    pub share: f64,
    /// Guest instructions on its path.
    pub guest_instructions: u64,
    /// If it is a loop of the program that the guest interprets: which one.
    pub interpreted: Option<Interpreted>,
    /// Times that it was entered.
    pub entered: u64,
    /// Arrivals at the head of its loop, if it has one.
    pub iterations: Option<u64>,
    /// Executions of its guards, summed up.
    pub executed: u64,
    /// Failures of its guards, summed up.
    pub failed: u64,
    /// Bytes of native code.
    pub code_bytes: CodeBytes,
    /// Spill slots it uses.
    pub spill_slots: u32,
    /// Moves that the register allocator inserted on the hot path.
    pub moves: u32,
    /// Nanoseconds of building, optimising and emitting.
    pub compile_ns: CompileTimes,
    /// What was compared with the recorded code, with --verify-traces: of the version, and of its machine
    /// code.
    pub certificates: [Option<Certificate>; 2],
    /// Is it proven, with `--prove-traces`, and its machine code?
    pub proofs: [Option<Proof>; 2],
    /// Exits taken at its safe point (a signal was pending).
    pub polls: u64,
    /// Exits taken because of a fault.
    pub faults: u64,
    /// Whether it was dropped before the end of the run.
    pub dropped: bool,
    /// Where its path ends.
    pub ends: Vec<End>,
    /// The details, if it is shown in full.
    pub body: Option<Body>,
}

/// The details of a version.
#[derive(Serialize, Deserialize, Debug)]
pub struct Body {
    /// The recorded path.
    pub path: Vec<Block>,
    /// Its guards.
    pub guards: Vec<Guard>,
    /// The IR as built.
    pub built: String,
    /// The IR after each pass that changed it.
    pub passes: Vec<Change>,
    /// The IR that was emitted.
    pub optimised: String,
    /// Addresses of the guest instructions that lines of the IR are for, by the value that the line
    /// defines, or by the whole line if it defines none.
    pub origins: BTreeMap<String, u64>,
    /// The native code, counters left out.
    pub native: Vec<Line>,
}

/// Which part of a run to show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// This number of regions, the hottest first.
    Hottest(usize),
    /// These fragments, in full.
    These(Vec<u32>),
}

/// Explains a run.
pub fn explain(
    counted: &Counted,
    symbols: &Symbols,
    wanted: &Wanted,
    uncounted: Option<Uncounted>,
) -> Explanation {
    let census = &counted.census;
    let hot = heat::regions(&census.fragments);
    let instructions: u64 = hot.iter().map(|r| r.instructions).sum();
    let (traces, regions_in_all) = (hot.iter().map(|r| r.versions.len()).sum(), hot.len());
    let chosen: Vec<&Hot> = match wanted {
        Wanted::Hottest(n) => hot.iter().take(*n).collect(),
        Wanted::These(ids) => {
            hot.iter().filter(|r| r.versions.iter().any(|(id, _)| ids.contains(id))).collect()
        }
    };
    let sources = SourceLines::new(symbols);
    let mut maker = Maker { census, symbols, sources, disassembler: Disassembler::new() };
    let mut regions = Vec::new();
    for region in chosen {
        let mut versions = Vec::new();
        for &(id, n) in &region.versions {
            let share = n as f64 / region.instructions.max(1) as f64;
            let in_full = match wanted {
                Wanted::Hottest(_) => share >= WORTH_SHOWING,
                Wanted::These(ids) => ids.contains(&id),
            };
            versions.push(maker.version(&census.fragments[id as usize], n, share, in_full));
        }
        regions.push(Region {
            pc: region.pc,
            symbol: symbols.name(region.pc),
            instructions: region.instructions,
            share: region.instructions as f64 / instructions.max(1) as f64,
            versions,
        });
    }
    let (attempts, timeline) = uncounted.map_or((None, None), |u| (Some(u.heads), u.timeline));
    Explanation {
        schema: SCHEMA,
        program: census.program.clone(),
        args: census.args.clone(),
        status: counted.status.code(),
        signal: counted.status.signal(),
        tier: census.tier.clone(),
        threshold: census.threshold,
        exact: census.exact,
        instructions,
        traces,
        regions_in_all,
        regions,
        attempts,
        timeline,
        sources: maker.sources.files(),
    }
}

/// Collects what is known of versions.
struct Maker<'a> {
    census: &'a Census,
    symbols: &'a Symbols,
    sources: SourceLines<'a>,
    disassembler: Disassembler,
}

impl Maker<'_> {
    fn version(
        &mut self,
        fragment: &Fragment,
        instructions: u64,
        share: f64,
        in_full: bool,
    ) -> Version {
        let f = fragment.clone();
        Version {
            id: f.id,
            name: f.name,
            kind: f.kind,
            pc: f.pc,
            symbol: self.symbols.name(f.pc),
            from: f.from,
            instructions,
            share,
            guest_instructions: f.guest_instructions,
            interpreted: f.interpreted,
            entered: f.entered,
            iterations: f.iterations,
            executed: f.guards.iter().map(|g| g.executed).sum(),
            failed: f.guards.iter().map(|g| g.failed).sum(),
            code_bytes: f.code_bytes,
            spill_slots: f.spill_slots,
            moves: f.moves,
            compile_ns: f.compile_ns,
            certificates: f.certificates,
            proofs: f.proofs.clone(),
            polls: f.polls,
            faults: f.faults,
            dropped: f.dropped,
            ends: f.ends.into_iter().map(|end| self.end(end)).collect(),
            body: in_full.then(|| self.body(fragment)),
        }
    }

    /// The end of a path: an exit that leads to a stub is shown with the stub's destination.
    fn end(&self, mut end: End) -> End {
        end.went = self.through_stubs(&end.went);
        end
    }

    /// Destinations of exits, with stubs replaced by the destinations behind them.
    fn through_stubs(&self, went: &[Went]) -> Vec<Went> {
        let mut out: Vec<Went> = Vec::new();
        for w in went {
            let stub = match w.to {
                To::Fragment { fragment } => self.census.fragments.get(fragment as usize),
                To::Runtime | To::Block { .. } => None,
            };
            // Behind a stub the counts of the exits that share it cannot be told apart. So a stub
            // is followed only if it has one end, which every entry reached; its most frequent
            // destination is shown.
            let behind = stub.filter(|f| f.kind == Kind::Stub).and_then(|f| match &f.ends[..] {
                [End { went, executed, .. }] if *executed == f.entered => {
                    went.iter().max_by_key(|w| w.times).map(|w| w.to)
                }
                _ => None,
            });
            let to = behind.unwrap_or(w.to);
            match out.iter_mut().find(|o| o.to == to) {
                Some(o) => o.times += w.times,
                None => out.push(Went { to, times: w.times }),
            }
        }
        out
    }

    fn body(&mut self, fragment: &Fragment) -> Body {
        let detail = fragment.detail.as_ref();
        let (passes, origins) =
            detail.map_or_else(Default::default, |d| passes::changes(d, self.census));
        let native = native::lines(self.census, fragment, &origins.of_last());
        let mut guards = fragment.guards.clone();
        guards.iter_mut().for_each(|g| g.went = self.through_stubs(&g.went));
        Body {
            path: guest::path(fragment, self.symbols, &mut self.sources, &mut self.disassembler),
            guards,
            built: detail.map_or(String::new(), |d| d.built.clone()),
            passes,
            origins: origins.by_line(),
            optimised: detail.map_or(String::new(), |d| d.optimised.clone()),
            native,
        }
    }
}
