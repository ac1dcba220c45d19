//! What the ledger of a counting run and the perf map are told about changes of fragments.

use super::Fragments;
use crate::config::RunConfig;
use crate::observe::census::Fragment;
use crate::observe::ledger::{Ledger, Made};
use crate::observe::perf_map::Piece;
use crate::observe::stats::Stats;
use dynasour_emitter::{ExitId, FragmentId};

/// What is kept for a report at the end of the run.
pub struct Notes {
    /// Of a counting run.
    ledger: Option<Box<Ledger>>,
    /// Code that is gone, if the perf map is to name it.
    pieces: Option<Vec<Piece>>,
}

impl Notes {
    pub fn new(config: &RunConfig) -> Notes {
        Notes {
            ledger: config.count.as_ref().map(|_| Box::default()),
            pieces: config.perf_map.then(Vec::new),
        }
    }
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
    }

    /// An exit leads to its fragment again.
    pub(super) fn note_attached(&mut self, exit: ExitId, fragment: FragmentId) {
        if let Some(ledger) = &mut self.notes.ledger {
            ledger.attached(&self.emitter, exit, fragment);
        }
    }

    /// A trace was made.
    pub(super) fn note_made(&mut self, id: FragmentId, made: Made<'_>) {
        if let Some(ledger) = &mut self.notes.ledger {
            ledger.made(&self.emitter, id, made);
        }
    }

    /// All ids are about to be given up.
    pub(super) fn close_ledger(&mut self) {
        self.note_pieces();
        if let Some(ledger) = &mut self.notes.ledger {
            ledger.close(&self.emitter);
        }
    }

    /// All code there is, and was before the last flush, if anybody wants to know.
    pub fn pieces(&mut self) -> Option<&[Piece]> {
        self.note_pieces();
        self.notes.pieces.as_deref()
    }

    fn note_pieces(&mut self) {
        let Some(pieces) = &mut self.notes.pieces else { return };
        for f in self.emitter.fragments() {
            let piece = |code: &std::ops::Range<u64>, cold| Piece {
                code: code.clone(),
                what: f.version.clone(),
                pc: f.pc,
                cold,
            };
            pieces.extend([piece(&f.hot, false), piece(&f.cold, true)]);
        }
        let copied = self.emitter.all_blocks();
        pieces.extend(copied.map(|(pc, code)| Piece {
            code,
            what: "copy".to_string(),
            pc,
            cold: false,
        }));
    }

    /// The fragments of a counting run, and whether none is missing.
    pub fn counted(&mut self) -> Option<(Vec<Fragment>, bool)> {
        self.notes.ledger.as_mut().map(|ledger| ledger.report(&self.emitter))
    }

    /// Which part of native code a host address is in, if in any.
    pub fn part_of(&self, host_rip: u64) -> Option<&'static str> {
        if !self.cache().contains(&host_rip) {
            return None;
        }
        Some(match self.emitter.fragment_at(host_rip) {
            Some(_) => "in traces",
            None if self.emitter.block_at(host_rip).is_some() => "in copied blocks",
            None => "in lookups and entries",
        })
    }

    /// What happened to fragments and blocks.
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
