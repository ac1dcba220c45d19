//! What the ledger of a counting run and the perf map are told about changes of fragments.

use super::Fragments;
use crate::observe::census::Fragment;
use crate::observe::ledger::Made;
use crate::observe::perf_map::Piece;
use dynasour_emitter::{ExitId, FragmentId};

impl Fragments {
    /// An exit came to the runtime.
    pub(super) fn note_left(&mut self, exit: ExitId) {
        if let Some(ledger) = &mut self.ledger {
            ledger.left(&self.emitter, exit);
        }
    }

    /// An exit leads to a stub of its own.
    pub(super) fn note_stub(&mut self, stub: FragmentId, exit: ExitId) {
        if let Some(ledger) = &mut self.ledger {
            ledger.made_stub(&self.emitter, stub, exit);
        }
    }

    /// An exit leads to its fragment again.
    pub(super) fn note_attached(&mut self, exit: ExitId, fragment: FragmentId) {
        if let Some(ledger) = &mut self.ledger {
            ledger.attached(&self.emitter, exit, fragment);
        }
    }

    /// A trace was made.
    pub(super) fn note_made(&mut self, id: FragmentId, made: Made<'_>) {
        if let Some(ledger) = &mut self.ledger {
            ledger.made(&self.emitter, id, made);
        }
    }

    /// All ids are about to be given up.
    pub(super) fn close_ledger(&mut self) {
        self.note_pieces();
        if let Some(ledger) = &mut self.ledger {
            ledger.close(&self.emitter);
        }
    }

    /// All code there is, and was before the last flush, if anybody wants to know.
    pub fn pieces(&mut self) -> Option<&[Piece]> {
        self.note_pieces();
        self.pieces.as_deref()
    }

    fn note_pieces(&mut self) {
        let Some(pieces) = &mut self.pieces else { return };
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
        self.ledger.as_mut().map(|ledger| ledger.report(&self.emitter))
    }
}
