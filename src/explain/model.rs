//! The data of an explanation: everything that the report and its JSON show.
//!
//! [`Explainer`] chooses the regions that were asked for and collects what is known of their versions
//! from the census of the run, one version at a time. A version that is shown in full has a [`Body`].
//! `--json` writes an [`Explanation`] in one value, `--jsonl` one [`Record`] in each line.
//!
//! Invariants: shares and sums are over all traces of the run, not only over the shown ones; the dynamic
//! linker's are summed apart, too. A field of these types is a field of the JSON, so a change of one
//! changes [`SCHEMA`] and docs/data/explain-N.schema.json. No lock.
//!
//! Example: `--top 1 --jsonl` gives a run, a region, its versions and the source files.

use super::counting::{Counted, Uncounted};
use super::disassembly::Disassembler;
use super::guest::{self, Block};
use super::heat::{self, Region as Hot};
use super::native::{self, Line};
use super::passes::{self, Change};
use super::source_lines::{SourceFile, SourceLines};
use anyhow::{Context, Result};
use dynasour_guest::symbols::Symbols;
use dynasour_runtime::observe::attempts::Attempt;
use dynasour_runtime::observe::census::{
    Census, CodeBytes, CompileTimes, End, Entrance, Fragment, From, Guard, Interpreted, Kind, To,
    Went, is_in_linker,
};
use dynasour_runtime::observe::certificate::{Certificate, Proof};
use dynasour_runtime::observe::profile::timeline::Timeline;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;

/// Version of the JSON's structure, for programs that read it.
pub const SCHEMA: u32 = 4;

/// What is said of the whole run.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone)]
pub struct Header {
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
    /// Executions of a head before it was recorded, in the run that counts.
    pub threshold: u32,
    /// Whether the counts are exact (they are not where several threads ran one trace at once).
    pub exact: bool,
    /// Guest instructions executed in traces.
    pub instructions: u64,
    /// Traces made, without stubs.
    pub traces: usize,
    /// Regions with traces.
    pub regions_in_all: usize,
    /// What of that is the dynamic linker's.
    pub linker: Part,
    /// The heads at which traces were tried in a run without counters, the hottest first; none if there
    /// was no such run.
    pub attempts: Option<Vec<Attempt>>,
    /// The time in each phase over the same run without counters.
    pub timeline: Option<Timeline>,
}

/// A part of the traces of a run.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, Default)]
pub struct Part {
    /// Regions.
    pub regions: usize,
    /// Traces, without stubs.
    pub traces: usize,
    /// Guest instructions executed in them.
    pub instructions: u64,
}

/// A run, explained.
#[derive(Serialize, Deserialize, JsonSchema, Debug)]
pub struct Explanation {
    /// The run.
    #[serde(flatten)]
    pub header: Header,
    /// The regions that were asked for, the hottest first.
    pub regions: Vec<Region>,
    /// The source files of the shown guest instructions, as far as they have debug information.
    pub sources: Vec<SourceFile>,
}

/// A line of `--jsonl`. The run comes first, a region before its versions, the sources last.
#[derive(Serialize, JsonSchema, Debug)]
#[serde(tag = "record", rename_all = "kebab-case")]
#[schemars(title = "dynasour-explain-4")]
pub enum Record {
    /// The run.
    Run(Header),
    /// A region.
    Region(RegionHead),
    /// A version of the region before.
    Version(Box<Version>),
    /// Source files.
    Sources {
        /// Indexed by the lines of guest instructions.
        sources: Vec<SourceFile>,
    },
}

impl Record {
    /// The record that a line has; none if it is of no known kind. (Serde's own reader of such a type does
    /// not read maps with numbers as keys.)
    ///
    /// # Errors
    /// The line is no JSON, fields of the record are missing, or have other types.
    pub fn of(line: &[u8]) -> serde_json::Result<Option<Record>> {
        /// What tells records apart.
        #[derive(Deserialize)]
        struct Tag {
            record: Option<String>,
        }
        /// The fields of [`Record::Sources`].
        #[derive(Deserialize)]
        struct Files {
            sources: Vec<SourceFile>,
        }
        let tag: Tag = serde_json::from_slice(line)?;
        Ok(Some(match tag.record.as_deref() {
            Some("run") => Record::Run(serde_json::from_slice(line)?),
            Some("region") => Record::Region(serde_json::from_slice(line)?),
            Some("version") => Record::Version(serde_json::from_slice(line)?),
            Some("sources") => {
                let Files { sources } = serde_json::from_slice(line)?;
                Record::Sources { sources }
            }
            _ => return Ok(None),
        }))
    }
}

/// What `run` makes of a region, by the run without counters.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum InRun {
    /// Its trace stays.
    Kept,
    /// Its trace was slower than the code that it replaces, and was dropped.
    Slower,
    /// A trace was tried, and none was made.
    Refused,
    /// No trace was tried.
    NotTried,
}

/// A region without its versions.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone)]
pub struct RegionHead {
    /// Its start address.
    pub pc: u64,
    /// The same address as symbol and offset.
    pub symbol: String,
    /// Guest instructions executed in its traces.
    pub instructions: u64,
    /// Their share of all that traces executed.
    pub share: f64,
    /// Is it the dynamic linker's?
    pub is_linker: bool,
    /// What `run` makes of it; none if there was no run without counters.
    pub in_run: Option<InRun>,
}

/// A region.
#[derive(Serialize, Deserialize, JsonSchema, Debug)]
pub struct Region {
    /// What is said of it as a whole.
    #[serde(flatten)]
    pub head: RegionHead,
    /// Its traces, in the order in which they were made.
    pub versions: Vec<Version>,
}

/// One version of a region, that is, one trace.
#[derive(Serialize, Deserialize, JsonSchema, Debug)]
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
    /// What it knows and needs of the guest's registers where it is entered.
    pub entrance: Entrance,
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
#[derive(Serialize, Deserialize, JsonSchema, Debug)]
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
#[derive(Debug, Clone, PartialEq)]
pub enum Wanted {
    /// This number of regions, the hottest first.
    Hottest {
        /// How many.
        regions: usize,
        /// Are those of the dynamic linker among them?
        with_linker: bool,
        /// Versions with at least this share of their region's instructions have a body.
        at_least: f64,
    },
    /// The regions of these fragments, which have a body.
    These(Vec<u32>),
}

/// Explains a run.
pub struct Explainer<'a> {
    header: Header,
    regions: Vec<(RegionHead, Hot)>,
    wanted: Wanted,
    census: &'a Census,
    symbols: &'a Symbols,
    sources: SourceLines<'a>,
    disassembler: Disassembler,
}

impl<'a> Explainer<'a> {
    /// Of a run with counters, and of one without, if there was one.
    pub fn new(
        counted: &'a Counted,
        symbols: &'a Symbols,
        wanted: Wanted,
        uncounted: Option<Uncounted>,
    ) -> Explainer<'a> {
        let census = &counted.census;
        let is_linker = |pc| is_in_linker(&census.images, pc);
        let hot = heat::regions(&census.fragments);
        let instructions: u64 = hot.iter().map(|r| r.instructions).sum();
        let mut of_linker = Part::default();
        for region in hot.iter().filter(|region| is_linker(region.pc)) {
            of_linker.regions += 1;
            of_linker.traces += region.versions.len();
            of_linker.instructions += region.instructions;
        }
        let (traces, regions_in_all) = (hot.iter().map(|r| r.versions.len()).sum(), hot.len());
        let (attempts, timeline) = uncounted.map_or((None, None), |u| (Some(u.heads), u.timeline));
        let head = |region: &Hot| {
            let mut head = RegionHead {
                pc: region.pc,
                symbol: symbols.name(region.pc),
                instructions: region.instructions,
                share: region.instructions as f64 / instructions.max(1) as f64,
                is_linker: is_linker(region.pc),
                in_run: None,
            };
            if let Some(attempts) = &attempts {
                let attempt = attempt_of(&head, attempts);
                head.in_run = Some(attempt.map_or(InRun::NotTried, outcome));
            }
            head
        };
        let mut regions: Vec<(RegionHead, Hot)> =
            hot.into_iter().map(|region| (head(&region), region)).collect();
        match &wanted {
            Wanted::Hottest { regions: most, with_linker, .. } => {
                regions.retain(|(head, _)| *with_linker || !head.is_linker);
                regions.truncate(*most);
            }
            Wanted::These(ids) => {
                regions.retain(|(_, hot)| hot.versions.iter().any(|(id, _)| ids.contains(id)));
            }
        }
        let header = Header {
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
            linker: of_linker,
            attempts,
            timeline,
        };
        let (sources, disassembler) = (SourceLines::new(symbols), Disassembler::new());
        Explainer { header, regions, wanted, census, symbols, sources, disassembler }
    }

    /// Gives one record after the other to `sink`.
    ///
    /// # Errors
    /// That of `sink`.
    pub fn records(mut self, mut sink: impl FnMut(Record) -> Result<()>) -> Result<()> {
        sink(Record::Run(self.header.clone()))?;
        for (head, hot) in std::mem::take(&mut self.regions) {
            sink(Record::Region(head))?;
            for &(id, n) in &hot.versions {
                sink(Record::Version(Box::new(self.version(id, n, hot.instructions))))?;
            }
        }
        sink(Record::Sources { sources: self.sources.files() })
    }

    /// Everything in one value.
    ///
    /// # Errors
    /// As [`Assembly::whole`].
    pub fn whole(self) -> Result<Explanation> {
        let mut assembly = Assembly::default();
        self.records(|record| assembly.add(record))?;
        assembly.whole()
    }

    /// A version that has executed `n` of its region's instructions.
    fn version(&mut self, id: u32, n: u64, of_region: u64) -> Version {
        let share = n as f64 / of_region.max(1) as f64;
        let in_full = match &self.wanted {
            Wanted::Hottest { at_least, .. } => share >= *at_least,
            Wanted::These(ids) => ids.contains(&id),
        };
        let fragment = &self.census.fragments[id as usize];
        let f = fragment.clone();
        Version {
            id: f.id,
            name: f.name,
            kind: f.kind,
            pc: f.pc,
            symbol: self.symbols.name(f.pc),
            from: f.from,
            instructions: n,
            share,
            guest_instructions: f.guest_instructions,
            interpreted: f.interpreted,
            entrance: f.entrance,
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

/// The head of a region in the run without counters. That run may have had libraries at other addresses.
pub fn attempt_of<'a>(region: &RegionHead, attempts: &'a [Attempt]) -> Option<&'a Attempt> {
    let by_pc = attempts.iter().find(|attempt| attempt.pc == region.pc);
    by_pc.or_else(|| attempts.iter().find(|attempt| attempt.symbol == region.symbol))
}

/// What became of a head.
pub fn outcome(attempt: &Attempt) -> InRun {
    match attempt.outcome.as_str() {
        "floor" => InRun::Slower,
        refused if refused.starts_with("refused") => InRun::Refused,
        // `made` has not raced; `cold` has not been judged. Both stay.
        _ => InRun::Kept,
    }
}

/// Puts records together to an [`Explanation`].
#[derive(Default)]
pub struct Assembly {
    header: Option<Header>,
    regions: Vec<Region>,
    sources: Vec<SourceFile>,
}

impl Assembly {
    /// The next record.
    ///
    /// # Errors
    /// A version comes before any region.
    pub fn add(&mut self, record: Record) -> Result<()> {
        match record {
            Record::Run(header) => self.header = Some(header),
            Record::Region(head) => self.regions.push(Region { head, versions: Vec::new() }),
            Record::Version(version) => {
                let region = self.regions.last_mut().context("a version before any region")?;
                region.versions.push(*version);
            }
            Record::Sources { sources } => self.sources = sources,
        }
        Ok(())
    }

    /// The explanation.
    ///
    /// # Errors
    /// There was no record of a run.
    pub fn whole(self) -> Result<Explanation> {
        let header = self.header.context("the record of the run is missing")?;
        Ok(Explanation { header, regions: self.regions, sources: self.sources })
    }
}
