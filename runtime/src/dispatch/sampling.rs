//! Samples of guest code that runs natively: they find what is hot
//! ([`crate::kernel::signal::samples`] makes them).
//!
//! ```text
//!  code in place ── signal ──► Left::Sample ──────────────┐
//!  copied blocks ── signal ──► out of the cache ──► Due ──┴──► sampled ──► interpret some edges,
//!                                                                          count heads
//! ```
//!
//! A sample in a trace also tells which of the loops at its head the guest is in
//! ([`super::fragments::Fragments::note_sample`]).
//!
//! For tests, each Nth visit of the runtime is a sample.
//!
//! Data: [`Sampled`], part of the thread's [`Dispatcher`]; no lock. Invariant: a sample only decides what
//! is looked at, never what the guest computes. While a race is measured, samples end its windows, and
//! what is looked at is looked at between two of them ([`super::race`]).
//!
//! Example: a thread computes in copied blocks. 4 ms of its time after the last sample it is brought out,
//! and the interpreter executes the next 160 edges; the head at 0x1000 is passed for the 200th time in
//! such a stretch, and is recorded.

use super::{Dispatcher, count};
use crate::changes::patches;
use crate::config::{Sampling, Stage};
use crate::kernel::process::System;
use crate::kernel::signal::samples::Clock;
use dynasour_guest::ThreadContext;
use std::sync::atomic::Ordering;

/// How a thread is sampled.
#[derive(Debug, Default)]
pub(super) struct Sampled {
    /// How often it has come to the runtime since the last sample, if it is sampled by that.
    visits: u32,
    /// Have samples of copied blocks been started?
    copies: bool,
}

impl Dispatcher {
    /// Starts to sample the thread, if that is done by time.
    pub(super) fn start_samples(&self, context: &ThreadContext, system: &System) {
        match self.machine.config.sampling {
            _ if !self.machine.config.samples() => {}
            Sampling::Hz(hz) => system.samples.start(context, Clock::Thread, hz),
            Sampling::Timer(hz) => system.samples.start(context, Clock::ThreadTimer, hz),
            Sampling::Real(hz) => system.samples.start(context, Clock::Real, hz),
            Sampling::Every(_) => {}
        }
    }

    /// The thread has come to the runtime: this may be a sample.
    pub(super) fn sample_visits(&mut self, system: &System) {
        if let Sampling::Every(n) = self.machine.config.sampling
            && self.machine.config.samples()
        {
            let visits = &mut self.in_place.sampling.visits;
            *visits += 1;
            if *visits >= n && !self.race_is_measured() {
                self.in_place.sampling.visits = 0;
                self.begin_sample(system);
            }
        }
    }

    /// Has a sample of copied blocks not been handled yet?
    pub(super) fn is_sampled(&self, context: &ThreadContext) -> bool {
        context.sampled.load(Ordering::Relaxed) != 0 && self.machine.brings_out()
    }

    /// Copied blocks are sampled, if what is hot is to be found by that: a sample brings the thread out
    /// of the code cache. The thread is outside.
    pub(super) fn sample_copies(&mut self, context: &ThreadContext, system: &System) {
        if !self.machine.config.samples() {
            return;
        }
        if !std::mem::replace(&mut self.in_place.sampling.copies, true) {
            self.start_samples(context, system);
            context.comes_out.store(self.machine.brings_out(), Ordering::Relaxed);
        }
        if self.note_sample(context) {
            self.sampled(system);
        }
        self.sample_visits(system);
    }

    /// Notes where native code was sampled since this was called last. Returns whether it was. The thread is
    /// outside.
    pub(super) fn note_sample(&self, context: &ThreadContext) -> bool {
        let sampled = context.sampled.swap(0, Ordering::Relaxed);
        if sampled != 0
            && let Some(mut fragments) = self.machine.fragments()
            && let Some(head) = fragments.note_sample(sampled)
        {
            self.machine.log(Stage::Record, || format!("other loops are tried first: {head:#x}"));
        }
        sampled != 0
    }

    /// A sample has brought the thread out of native code. The thread is outside.
    pub(super) fn sampled(&mut self, system: &System) {
        count(&self.peer.sampled[0], 1);
        let by_event = system.samples.sampled(!patches::is_shared());
        count(&self.peer.sampled[1], u64::from(by_event));
        if !self.race_is_measured()
            && !self.selector.traces.is_recording()
            && self.effort.is_affordable()
        {
            self.begin_attempt();
            self.begin_sample(system);
        }
    }

    /// The heads that the thread passes next are counted. The first sample makes the code cache, if
    /// there is none; without memory for it, there are no traces.
    pub(super) fn begin_sample(&mut self, system: &System) {
        if let Ok(made) = self.machine.make_fragments() {
            self.fragments_made(made, system);
            self.selector.begin_sample();
        }
    }
}
