//! Races between a trace and its floor: what links to the trace's head lead to meanwhile
//! ([`dynasour_tracer::race`] judges, [`super::super::race`] decides when).
//!
//! ```text
//!              plan: the trace counts starts     the race is over
//!   no race ─────────────────────────────► racer ────────────────► kept: as any other trace
//!                                           │  ▲                    lost: links lead to the floor
//!                             links lead to │  │ links lead to
//!                                 the floor ▼  │ the trace
//!                                          on the floor
//! ```
//!
//! Data: [`Races`], part of [`Fragments`]. Invariants: there is one racer at a time, since there is
//! one set of words to count in. Nothing enters a trace whose head is *on the floor* but exits of
//! its own, which continue what has begun. The caller holds the lock of the fragments.
//!
//! Example: the first trace of the loop at 0x1000 is planned. It is to count its starts, and is the
//! racer when it is installed. Twenty times links to 0x1000 lead to it, then to the gate of the
//! block there, and so on. It loses: from now on they lead to the block.

use super::Fragments;
use crate::changes::patches;
use crate::config::RaceMode;
use crate::observe::stats::RaceResult;
use dynasour_emitter::codegen::Request;
use dynasour_emitter::{EmitError, FragmentId, StartKey, can_tell_start};
use dynasour_guest::decode::Fetch;
use dynasour_tracer::Path;
use dynasour_tracer::race::{Judgement, Side};
use rustc_hash::FxHashSet;
use std::ops::Range;

/// A trace that races with its floor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Racer {
    /// The head.
    pub pc: u64,
    fragment: FragmentId,
    key: Option<StartKey>,
}

/// What is known of races.
#[derive(Debug, Default)]
pub struct Races {
    /// How traces race; `None` if they do not.
    mode: Option<RaceMode>,
    racer: Option<Racer>,
    /// Is the racer's head on the floor?
    on_floor: bool,
    /// Heads whose traces have lost.
    lost: FxHashSet<u64>,
}

impl Races {
    /// No trace has raced yet; none does without a mode.
    pub fn new(mode: Option<RaceMode>) -> Races {
        Races { mode, ..Races::default() }
    }

    /// All fragments are dropped.
    pub fn clear(&mut self) {
        (self.racer, self.on_floor) = (None, false);
        self.lost.clear();
    }

    /// The guest's code in `range` changes.
    pub fn touch(&mut self, range: &Range<u64>) {
        self.lost.retain(|pc| !range.contains(pc));
    }

    /// Is nothing to enter the trace at `pc`?
    pub fn is_on_floor(&self, pc: u64) -> bool {
        self.on_floor && self.racer.is_some_and(|racer| racer.pc == pc) || self.lost.contains(&pc)
    }
}

/// What tells that the guest starts an iteration of the path: that it comes to the path's head and,
/// for a loop of an interpreted program, that a register has its value there. None if no register
/// tells it.
fn start_key(path: &Path) -> Option<Option<StartKey>> {
    let Some(guest) = &path.guest else { return Some(None) };
    let tells = |(g, _): &&StartKey| guest.stable & 1 << g.number() == 0 && can_tell_start(*g);
    guest.registers.iter().find(tells).map(|key| Some(*key))
}

impl Fragments {
    /// Makes the first trace of a region, which is about to be compiled for `request`, count its
    /// starts, if it is to race. Returns what tells a start.
    pub(super) fn enter_race(
        &self,
        path: &Path,
        request: &mut Request,
    ) -> Option<Option<StartKey>> {
        // A race that never ends gives way to the next one.
        let is_free = self.races.racer.is_none() || self.races.mode == Some(RaceMode::Swap);
        let may_race = self.races.mode.is_some() && is_free && !patches::is_shared();
        let key = start_key(path).filter(|_| may_race)?;
        self.emitter.count_starts(request, key).then_some(key)
    }

    /// The trace that was to count its starts is installed.
    pub(super) fn note_racer(&mut self, pc: u64, fragment: FragmentId, key: Option<StartKey>) {
        if let Some(before) = self.racer() {
            self.end_race(&before, true, false);
        }
        self.races.racer = Some(Racer { pc, fragment, key });
    }

    /// The racer, if it is still live.
    pub fn racer(&mut self) -> Option<Racer> {
        let racer = self.races.racer?;
        if self.retired || self.first_version(racer.pc) != Some(racer.fragment) {
            (self.races.racer, self.races.on_floor) = (None, false);
            self.lead_to_first(racer.pc);
        }
        self.races.racer
    }

    /// Makes the gate of the racer's floor. False if the race cannot be run.
    ///
    /// # Errors
    /// [`EmitError::is_full`]: the code cache is full.
    pub fn prepare_race(&mut self, racer: &Racer, code: &dyn Fetch) -> Result<bool, EmitError> {
        if !self.in_place {
            self.emitter.copy_block(racer.pc, code)?;
        }
        let made = self.emitter.make_gate(racer.pc, racer.key)?;
        self.links_changed();
        Ok(made)
    }

    /// Starts that both sides have counted.
    pub fn starts(&self) -> u64 {
        self.emitter.starts()
    }

    /// Links to the racer's head lead to this side.
    pub fn lead_race(&mut self, racer: &Racer, side: Side) {
        self.races.on_floor = side != Side::Trace;
        if self.races.on_floor {
            self.emitter.forget_entry(racer.pc);
            self.emitter.lead_to_floor(racer.pc, side == Side::FloorTwice);
        } else {
            self.lead_back(racer);
        }
        self.links_changed();
    }

    fn lead_back(&mut self, racer: &Racer) {
        self.register(racer.pc, racer.fragment);
        self.lead_to_first(racer.pc);
    }

    /// The race is over. The trace is kept, or its head is on the floor for good. With `alone`, no
    /// other thread may execute the trace, so that it can stop counting.
    pub fn end_race(&mut self, racer: &Racer, kept: bool, alone: bool) {
        if self.races.racer.as_ref() != Some(racer) {
            return;
        }
        (self.races.racer, self.races.on_floor) = (None, false);
        if alone {
            self.emitter.stop_counting_starts(racer.fragment);
        }
        if kept {
            self.lead_back(racer);
        } else {
            self.races.lost.insert(racer.pc);
            self.emitter.forget_entry(racer.pc);
            self.emitter.stop_counting(racer.pc);
        }
        self.links_changed();
    }

    /// Has the trace at `pc` lost its race?
    pub fn has_lost(&self, pc: u64) -> bool {
        self.races.lost.contains(&pc)
    }

    /// Notes a verdict for the statistics.
    pub fn note_judgement(&mut self, pc: u64, judgement: Judgement) {
        self.stats.races.push(RaceResult::new(pc, judgement));
    }
}
