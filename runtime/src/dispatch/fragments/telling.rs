//! What a subscriber is told about fragments ([`crate::observe::events`]).
//!
//! Data: [`Sites`], part of [`Fragments`], which is empty if nobody has subscribed. Invariant: an event is sent while
//! the fragment that it names is still known to the emitter. The caller holds the lock of the fragments.
//!
//! Example: the trace t3 leaves by its exit 2, whose guard came from the branch at 0x401136. `tell_deopt` finds
//! `branch@401136.3` in the sites of t3, which `tell_made` has noted, and sends the event.

use super::Fragments;
use crate::observe::census::CompileTimes;
use crate::observe::describe;
use crate::observe::events::{self, Event, Guard, Made, Reason, Target, Why};
use dynasour_emitter::codegen::CompiledCode;
use dynasour_emitter::{ExitId, FragmentId};
use dynasour_ir::{Op, Version};
use dynasour_tracer::{Path, TraceShape};
use rustc_hash::FxHashMap;

/// The guards of each fragment, by the number of their exits.
pub type Sites = FxHashMap<FragmentId, FxHashMap<u32, String>>;

/// The guards of a version, by the numbers of the exits that its code has for them. None if nobody wants to know.
pub fn guards(version: &Version, code: &CompiledCode) -> FxHashMap<u32, String> {
    if !events::are_wanted() {
        return FxHashMap::default();
    }
    let guard = |(exit, position): (u32, Option<(u32, u32)>)| {
        let (block, index) = position?;
        let inst = version.blocks.get(block as usize)?.insts.get(index as usize)?;
        (inst.op == Op::Assume).then(|| (exit, describe::site(&inst.origins)))
    };
    (0..).zip(code.exit_positions()).filter_map(guard).collect()
}

impl Fragments {
    /// A trace was made; `side` is the exit for which it was made.
    pub(super) fn tell_made(
        &mut self,
        id: FragmentId,
        version: &Version,
        path: &Path,
        side: Option<ExitId>,
        times: CompileTimes,
        guards: FxHashMap<u32, String>,
    ) {
        if !events::are_wanted() {
            return;
        }
        let mut all: Vec<Guard> =
            (guards.iter()).map(|(exit, site)| Guard { exit: *exit, site: site.clone() }).collect();
        all.sort_by_key(|guard| guard.exit);
        self.sites.insert(id, guards);
        let Some(fragment) = self.emitter.fragment(id) else { return };
        let made = Made {
            version: version.name.clone(),
            pc: fragment.pc,
            is_loop: path.shape == TraceShape::Loop,
            side_of: side.and_then(|exit| self.exit_of(exit)),
            guest_instructions: path.instructions(),
            ir_instructions: version.blocks.iter().map(|b| b.insts.len() as u64).sum(),
            guards: all,
            code_bytes: (fragment.hot.end - fragment.hot.start)
                + (fragment.cold.end - fragment.cold.start),
            compile_nanoseconds: times.compiling(),
        };
        events::emit(|| Event::Made(made));
    }

    /// The trace that an exit leaves, and its number there. The exit of a stub is that for which the stub was made.
    fn exit_of(&self, exit: ExitId) -> Option<(String, u32)> {
        let exit = self.stub_of(exit).map_or(exit, |stub| stub.origin);
        let fragment = self.emitter.fragment(self.emitter.exit(exit)?.fragment)?;
        Some((fragment.version.clone(), exit.0 - fragment.exits.start))
    }

    /// The name of a fragment's version.
    fn version_of(&self, id: FragmentId) -> Option<(String, u64)> {
        self.emitter.fragment(id).map(|fragment| (fragment.version.clone(), fragment.pc))
    }

    /// An exit or an end leads to a fragment from now on.
    pub(super) fn tell_linked(&self, exit: ExitId, next: FragmentId) {
        if events::are_wanted()
            && let Some((to, _)) = self.version_of(next)
        {
            self.tell_link(exit, Target::Trace(to));
        }
    }

    /// An exit or an end leads to what starts at its target from now on.
    pub(super) fn tell_linked_to_place(&self, exit: ExitId) {
        if !events::are_wanted() {
            return;
        }
        let Some(pc) = self.emitter.exit(exit).and_then(|exit| exit.target) else {
            return self.tell_link(exit, Target::Computed);
        };
        match self.first_version(pc) {
            Some(next) => self.tell_linked(exit, next),
            None => self.tell_link(exit, Target::Code(pc)),
        }
    }

    fn tell_link(&self, exit: ExitId, to: Target) {
        if let Some((from, exit)) = self.exit_of(exit) {
            events::emit(|| Event::Linked { from, exit, to });
        }
    }

    /// Fragments are not entered any more.
    pub(super) fn tell_invalidated(&self, ids: &[FragmentId], why: Why) {
        if events::are_wanted() {
            for (version, pc) in ids.iter().filter_map(|id| self.version_of(*id)) {
                events::emit(|| Event::Invalidated { version, pc, why });
            }
        }
    }

    /// Fragments that rested are entered again.
    pub(super) fn tell_revived(&self, ids: &[FragmentId]) {
        if events::are_wanted() {
            for (version, pc) in ids.iter().filter_map(|id| self.version_of(*id)) {
                events::emit(|| Event::Revived { version, pc });
            }
        }
    }

    /// A trace has left by an exit that is not its end; the guest goes on at `pc`.
    pub(super) fn tell_deopt(&self, exit: ExitId, pc: u64, reason: Reason) {
        if !events::are_wanted() {
            return;
        }
        let Some((version, number)) = self.exit_of(exit) else { return };
        let sites = self.emitter.exit(exit).and_then(|exit| self.sites.get(&exit.fragment));
        let guard = sites.and_then(|sites| sites.get(&number)).cloned();
        events::emit(|| Event::Deopt { version, exit: number, guard, pc, reason });
    }
}
