//! What the statistics, the ledger of a counting run, the perf map and tools that watch the code cache
//! are told about fragments.
//!
//! Data: [`Notes`], part of [`Fragments`]; the ledger's own is [`crate::observe::ledger`].
//! Invariant: the ledger and the perf map are told before the emitter gives the ids of fragments up
//! ([`Fragments::close_ledger`]). The caller holds the lock of the fragments.
//!
//! Example: a trace is made in a counting run: `note_made` tells the ledger the fragment's version
//! and path. At a flush `close_ledger` reads its counters, before the emitter drops them.

use super::Fragments;
use crate::config::RunConfig;
use crate::observe::census::Fragment;
use crate::observe::ledger::{Ledger, Made};
use crate::observe::perf_map::NamedCode;
use crate::observe::stats::{IN_TRACES, Stats};
use crate::observe::watch::{GuestPcs, Made as MadeCode, WatchError, Watchers};
use dynasour_emitter::{ExitId, FragmentId};
use std::ops::Range;

/// What is kept for a report at the end of the run.
pub struct Notes {
    /// The ledger of a counting run.
    ledger: Option<Box<Ledger>>,
    /// The native code noted so far, if a perf map is wanted.
    pieces: Option<Vec<NamedCode>>,
    /// The tools that are told of code when it is made.
    watchers: Option<Watchers>,
}

impl Notes {
    pub fn new(config: &RunConfig) -> Notes {
        Notes {
            ledger: config.count.as_ref().map(|_| Box::default()),
            pieces: config.perf_map.then(Vec::new),
            watchers: None,
        }
    }
}

/// What was executed when a thread was sampled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SamplePlace {
    /// A trace of this head, or a side trace of one.
    Trace(u64),
    /// The copied block of this pc.
    Block(u64),
}

impl Fragments {
    /// An exit came to the runtime.
    pub(super) fn note_left(&mut self, exit: ExitId) {
        if let Some(ledger) = &mut self.notes.ledger {
            ledger.left(&self.emitter, exit);
        }
    }

    /// An exit leads to a stub of its own.
    pub(super) fn note_stub(&mut self, stub: FragmentId, exit: ExitId) {
        if let Some(ledger) = &mut self.notes.ledger {
            ledger.made_stub(&self.emitter, stub, exit);
        }
        self.show_code(&GuestPcs::default());
    }

    /// An exit leads to its own side trace again, which was resting.
    pub(super) fn note_attached(&mut self, exit: ExitId, fragment: FragmentId) {
        if let Some(ledger) = &mut self.notes.ledger {
            ledger.attached(&self.emitter, exit, fragment);
        }
    }

    /// A trace was compiled to a fragment, whose code is for the guest instructions at `pcs`.
    pub(super) fn note_made(&mut self, id: FragmentId, made: Made<'_>, pcs: &GuestPcs) {
        if let Some(ledger) = &mut self.notes.ledger {
            ledger.made(&self.emitter, id, made);
        }
        self.show_code(pcs);
    }

    /// The emitter is about to give up all ids of fragments and exits.
    pub(super) fn close_ledger(&mut self) {
        self.note_pieces();
        self.show_code(&GuestPcs::default());
        if let Some(watchers) = &mut self.notes.watchers {
            watchers.dropped();
        }
        if let Some(ledger) = &mut self.notes.ledger {
            ledger.close(&self.emitter);
        }
    }

    /// From now on these tools are told of new code.
    pub fn watch(&mut self, watchers: Option<Watchers>) {
        self.notes.watchers = watchers;
    }

    /// Tells the tools that watch of the code that was made since the last call. `pcs` are those of the
    /// newest fragment.
    pub(super) fn show_code(&mut self, pcs: &GuestPcs) {
        let Some(watchers) = &mut self.notes.watchers else { return };
        let blocks = self.emitter.take_new_blocks();
        let cache = self.emitter.cache();
        let read = |code: &Range<u64>| cache.read(code.start, (code.end - code.start) as usize);
        for (pc, code) in blocks {
            watchers.block(MadeCode { bytes: read(&code), code, what: "copy", pc, cold: false });
        }
        let fragments = self.emitter.fragments();
        for (n, f) in fragments.iter().enumerate().skip(watchers.fragments()) {
            let part = |code: &Range<u64>, cold| MadeCode {
                bytes: read(code),
                code: code.clone(),
                what: &f.version,
                pc: f.pc,
                cold,
            };
            let none = GuestPcs::default();
            let pcs = if n + 1 == fragments.len() { pcs } else { &none };
            watchers.fragment([part(&f.hot, false), part(&f.cold, true)], pcs);
        }
    }

    /// The process ends: the tools that watch get what they were not told of yet.
    ///
    /// # Errors
    /// The file of `--jitdump` could not be written, then or before.
    pub fn end_watch(&mut self) -> Result<(), WatchError> {
        self.show_code(&GuestPcs::default());
        self.notes.watchers.as_mut().map_or(Ok(()), Watchers::end)
    }

    /// In a forked child, of which nothing is reported to `perf`.
    pub(super) fn stop_jitdump(&mut self) {
        self.notes.watchers.iter_mut().for_each(Watchers::stop_jitdump);
    }

    /// All native code, also that dropped by flushes; none if no perf map is wanted.
    pub fn pieces(&mut self) -> Option<&[NamedCode]> {
        self.note_pieces();
        self.notes.pieces.as_deref()
    }

    /// Notes all native code there is for the perf map.
    fn note_pieces(&mut self) {
        let Some(pieces) = &mut self.notes.pieces else { return };
        for f in self.emitter.fragments() {
            let piece = |code: &Range<u64>, cold| NamedCode {
                code: code.clone(),
                what: f.version.clone(),
                pc: f.pc,
                cold,
            };
            pieces.extend([piece(&f.hot, false), piece(&f.cold, true)]);
        }
        let copied = self.emitter.all_blocks();
        pieces.extend(copied.map(|(pc, code)| NamedCode {
            code,
            what: "copy".to_string(),
            pc,
            cold: false,
        }));
    }

    /// The fragments of a counting run, and whether the list is complete; none in other runs.
    pub fn counted(&mut self) -> Option<(Vec<Fragment>, bool)> {
        let mut ledger = self.notes.ledger.take()?;
        let report = ledger.report(&self.emitter, |id| self.order(id));
        self.notes.ledger = Some(ledger);
        Some(report)
    }

    /// The name for the statistics of the native code that a host address is in; none outside it.
    pub fn part_of(&self, host_rip: u64) -> Option<&'static str> {
        if !self.cache().contains(&host_rip) {
            return None;
        }
        Some(match self.emitter.fragment_at(host_rip) {
            Some(_) => IN_TRACES,
            None if self.emitter.block_at(host_rip).is_some() => "in copied blocks",
            None => "in lookups and entries",
        })
    }

    /// What a sample of the program counter shows: the head of the trace that it is in, or the pc of the
    /// block; none outside the code cache.
    pub fn place_of(&self, host_rip: u64) -> Option<SamplePlace> {
        if !self.cache().contains(&host_rip) {
            return None;
        }
        if let Some(fragment) = self.emitter.fragment_at(host_rip) {
            let root = self.region_of(fragment)?;
            return Some(SamplePlace::Trace(self.emitter.fragment(root)?.pc));
        }
        self.emitter.pc_of_block_at(host_rip).map(SamplePlace::Block)
    }

    /// The counts of what happened to fragments and blocks, with those of the emitter.
    pub fn statistics(&self) -> Stats {
        let copied = self.emitter.copy_figures();
        Stats {
            copied_blocks: self.stats.copied_blocks + copied.blocks,
            copied_instructions: self.stats.copied_instructions + copied.instructions,
            copied_bytes: self.stats.copied_bytes + copied.bytes,
            copied_links: self.stats.copied_links + copied.links,
            indirect: self.stats.indirect.and(self.emitter.indirect().rates()),
            ..self.stats.clone()
        }
    }
}
