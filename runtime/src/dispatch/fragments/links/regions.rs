//! The versions of a region: which fragments there are at a pc, which of them is entered, and which
//! come back from resting.
//!
//! A region may have several versions, in the order of [`Rank`]. The interpreter, links to the
//! place and the tables of indirect jumps enter the first one. A fragment whose code was touched
//! leaves its region and *rests*: nothing leads to it. When its pc is wanted again and its guest
//! bytes have not changed, it is *woken*: it is a version again.
//!
//! Data: [`Region`], one for each pc with a fragment that does not rest. Invariants, checked by the
//! link verifier: the place and the tables lead to the first version, and nothing leads to a
//! resting fragment. The caller holds the lock of the fragments.
//!
//! Example: the versions of 0x1000 are A and B, and links to the place lead to A. A store touches
//! A's page: A leaves the region, and links lead to B. The next indirect jump to 0x1000 that comes
//! to the runtime finds A's bytes unchanged: links lead to A again.

use super::exits::{Event, ExitState};
use super::policy::{self, Destination, ExitOrigin, Origin, Rank};
use crate::dispatch::fragments::lives::Lives;
use crate::dispatch::fragments::{Fragments, Role};
use crate::observe::events::Why;
use dynasour_emitter::{ExitId, FragmentId, SiteKind};
use dynasour_tracer::{SpeculationPolicy, TargetKind};

/// The most exits that may have a side trace of their own from one pc (guess: the next recording
/// makes a version of the region instead; too high compiles the same path many times, too low makes
/// exits move values to canonical state).
const MAX_SIDE_TRACES_PER_PC: u32 = 3;

/// The fragments of a region that do not rest, in the order in which they are tried.
#[derive(Default)]
pub struct Region {
    pub fragments: Vec<FragmentId>,
}

impl Fragments {
    /// The first version at `pc` that `exit`, which is at `origin`, may lead to, and whose needs what
    /// is known at the exit does not exclude; none if there is none.
    pub(super) fn successor(
        &self,
        exit: ExitId,
        origin: ExitOrigin,
        pc: u64,
    ) -> Option<FragmentId> {
        let (scope, origin) = (self.scope(), Origin::Exit(origin));
        let versions = &self.regions.get(&pc)?.fragments;
        let known = self.emitter.known_at(exit);
        let fits = |id: &&FragmentId| {
            let is_excluded = known.zip(self.emitter.fragment(**id));
            policy::allowed(scope, origin, Destination::Fragment(pc, self.rank(**id)))
                && !is_excluded.is_some_and(|(known, to)| known.excludes(&to.contexts.entry))
        };
        versions.iter().find(fits).copied()
    }

    /// The number of a version in the order in which those of its region are tried, counted from 1.
    pub(in crate::dispatch::fragments) fn order(&self, id: FragmentId) -> Option<u32> {
        let versions = &self.regions.get(&self.emitter.fragment(id)?.pc)?.fragments;
        versions.iter().position(|other| *other == id).map(|n| n as u32 + 1)
    }

    /// The position of a version in its region.
    pub(super) fn rank(&self, id: FragmentId) -> Rank {
        Rank::new(self.lives.shape(id).is_guest_loop, self.lives.group(id), id.0)
    }

    /// May another exit to `pc` have a side trace of its own?
    pub(in crate::dispatch::fragments) fn wants_own_trace(&self, pc: u64) -> bool {
        let has_region = self.regions.contains_key(&pc) || self.lives.rests(Role::Region(pc));
        !has_region && self.side_traces.get(&pc).is_none_or(|n| *n < MAX_SIDE_TRACES_PER_PC)
    }

    /// Does the region have as many versions as the policy allows?
    pub(in crate::dispatch::fragments) fn is_full(
        &self,
        pc: u64,
        policy: &dyn SpeculationPolicy,
    ) -> bool {
        self.regions.get(&pc).is_some_and(|region| region.fragments.len() >= policy.max_versions())
    }

    /// The fragment that is entered at `pc`, after resting ones were woken.
    pub fn find_version(&mut self, pc: u64) -> Option<FragmentId> {
        self.wake(pc);
        self.first_version(pc)
    }

    /// The fragment that is entered at `pc`.
    pub fn first_version(&self, pc: u64) -> Option<FragmentId> {
        self.regions.get(&pc)?.fragments.first().copied()
    }

    /// Does a fragment start at `pc`, and if so, what kind?
    pub fn kind_at(&self, pc: u64) -> Option<TargetKind> {
        if self.races.is_on_floor(pc) {
            return None;
        }
        let is_loop = self.lives.shape(self.first_version(pc)?).is_loop;
        Some(match (is_loop, self.dispatching.contains(&pc)) {
            (true, true) => TargetKind::Dispatch,
            (true, false) => TargetKind::Loop,
            (false, true) => TargetKind::LinearDispatch,
            (false, false) => TargetKind::Ordinary,
        })
    }

    /// Makes a new fragment a version of the region at `pc`. If it is the first in the order, links
    /// and tables lead to it. If it comes after a loop of an interpreted program, what this loop refuses is to
    /// come to it.
    pub(in crate::dispatch::fragments) fn add_version(&mut self, pc: u64, id: FragmentId) {
        let mut versions = self.regions.remove(&pc).unwrap_or_default().fragments;
        let before = versions.first().copied();
        self.lives.set_group(id, self.last_group(&versions));
        versions.push(id);
        versions.sort_unstable_by_key(|id| self.rank(*id));
        self.regions.insert(pc, Region { fragments: versions });
        self.lead_to_new_first(pc, before);
        self.try_after_loop(pc, id);
    }

    /// The last group of these versions.
    fn last_group(&self, versions: &[FragmentId]) -> u32 {
        versions.iter().map(|id| self.lives.group(*id)).max().unwrap_or(0)
    }

    /// The version `before` was the first of the region at `pc`, if there was one. If another is now, links and
    /// tables lead to that.
    fn lead_to_new_first(&mut self, pc: u64, before: Option<FragmentId>) {
        let Some(first) = self.first_version(pc).filter(|first| Some(*first) != before) else {
            return;
        };
        if let Some(before) = before {
            let staying = self.stubs_that_stay(before, pc, first);
            self.emitter
                .redirect(before, first, &staying)
                .expect("both are fragments of this region");
        }
        self.register(pc, first);
        self.lead_links(pc, Some(first));
    }

    /// Sets loops of an interpreted program back, which are versions at `pc`: the others are tried before them.
    /// What each loop of the region refuses comes to the runtime, since what comes next may be another now.
    pub(in crate::dispatch::fragments) fn set_back(&mut self, pc: u64, ids: &[FragmentId]) {
        let Some(region) = self.regions.get(&pc) else { return };
        let mut versions = region.fragments.clone();
        let before = versions.first().copied();
        let group = self.last_group(&versions) + 1;
        ids.iter().for_each(|id| self.lives.set_group(*id, group));
        versions.sort_unstable_by_key(|id| self.rank(*id));
        versions.iter().for_each(|id| self.unlink_refusals(pc, *id));
        self.regions.insert(pc, Region { fragments: versions });
        self.lead_to_new_first(pc, before);
        self.links_changed();
    }

    /// What the version before `id` at `pc` refuses comes to `id` from now on.
    fn try_after_loop(&mut self, pc: u64, id: FragmentId) {
        let versions = self.regions.get(&pc).map_or(&[][..], |region| &region.fragments);
        let at = versions.iter().position(|other| *other == id);
        let before = at.and_then(|at| versions[..at].last().copied());
        before.into_iter().for_each(|before| self.unlink_refusals(pc, before));
    }

    /// If this version at `pc` is a loop of an interpreted program: the exits by which it refuses the guest come
    /// to the runtime again. They may lead past a version that there was not when they were linked, and be
    /// counted for long.
    fn unlink_refusals(&mut self, pc: u64, id: FragmentId) {
        if !self.rank(id).is_guest_loop() {
            return;
        }
        let exits = self.emitter.fragment(id).map_or(0..0, |fragment| fragment.exits.clone());
        for exit in exits.map(ExitId) {
            let refuses = self.emitter.exit(exit).is_some_and(|exit| {
                exit.kind == SiteKind::Guard && exit.target == Some(pc) && !exit.progress
            });
            if refuses && self.exits.state(exit) != ExitState::Attached {
                self.unlink(exit).expect("it is an exit of a fragment");
            }
        }
    }

    /// The stubs that lead to `before` and may not lead to `id`, a version at `pc` that precedes it:
    /// those of exits without progress. No live version has such an exit, since none may lead to a
    /// first version without progress, but a resting one may, which is in the order between the
    /// two. When it is woken, `id` may lead to it.
    fn stubs_that_stay(&self, before: FragmentId, pc: u64, id: FragmentId) -> Vec<FragmentId> {
        let to = Destination::Fragment(pc, self.rank(id));
        let mut stubs = self.emitter.leading_to(before);
        stubs.retain(|stub| {
            let origin = self.exits.stub(*stub).and_then(|stub| self.origin(stub.origin));
            let may = |origin| policy::allowed(self.scope(), Origin::Exit(origin), to);
            origin.is_some_and(|origin| !may(origin))
        });
        stubs
    }

    /// Takes `id` out of its region. If it was the first version, links and tables lead to the next
    /// one.
    pub(in crate::dispatch::fragments) fn leave_region(&mut self, pc: u64, id: FragmentId) {
        let Some(region) = self.regions.get_mut(&pc) else { return };
        let was_first = region.fragments.first() == Some(&id);
        region.fragments.retain(|other| *other != id);
        let next = region.fragments.first().copied();
        if next.is_none() {
            self.regions.remove(&pc);
        }
        if was_first {
            self.emitter.forget_entry(pc);
            if let Some(next) = next {
                self.register(pc, next);
            }
            self.lead_links(pc, next);
        }
    }

    /// Enters a fragment into the tables of indirect jumps, if that is allowed.
    pub(in crate::dispatch::fragments) fn register(&mut self, pc: u64, id: FragmentId) {
        let allowed = policy::allowed(
            self.scope(),
            Origin::Tables(pc),
            Destination::Fragment(pc, self.rank(id)),
        );
        if allowed && !self.races.is_on_floor(pc) {
            self.emitter.register_entry(pc, id).expect("the fragment was compiled for this pc");
        }
    }

    /// With copied blocks: makes links to `pc` lead to the fragment, or if there is none to the
    /// block.
    pub(in crate::dispatch::fragments) fn lead_links(
        &mut self,
        pc: u64,
        fragment: Option<FragmentId>,
    ) {
        if !self.has_places() {
            return;
        }
        let may = |id| {
            policy::allowed(
                self.scope(),
                Origin::Place(pc),
                Destination::Fragment(pc, self.rank(id)),
            )
        };
        match fragment {
            Some(_) if self.races.is_on_floor(pc) => {}
            Some(id) if may(id) => self.emitter.lead_to(id),
            None if self.chaos.is_none() => self.emitter.stop_counting(pc),
            Some(_) | None => {}
        }
    }

    /// An exit found no version of the full region at `pc` that it may lead to. Drops the versions
    /// that compare their guest bytes themselves: their code may have changed, so that each entry
    /// fails.
    pub(super) fn drop_changed(&mut self, pc: u64) {
        self.drop_versions(pc, Why::Superseded, |lives, id| lives.is_checked(id));
    }

    /// Drops those live versions of the region at `pc` for which `which` is true.
    pub(in crate::dispatch::fragments) fn drop_versions(
        &mut self,
        pc: u64,
        why: Why,
        which: impl Fn(&Lives, FragmentId) -> bool,
    ) {
        let all = self.regions.get(&pc).map_or(Vec::new(), |region| region.fragments.clone());
        let dropped: Vec<FragmentId> =
            all.into_iter().filter(|id| which(&self.lives, *id)).collect();
        for &id in &dropped {
            self.leave_region(pc, id);
        }
        self.tell_invalidated(&dropped, why);
        self.emitter.put_to_rest(&dropped);
        dropped.into_iter().for_each(|id| self.lives.drop(id));
        self.links_changed();
    }

    /// Makes the resting fragments of a region live again whose guest bytes have not changed.
    pub(in crate::dispatch::fragments) fn wake(&mut self, pc: u64) {
        if !self.lives.rests(Role::Region(pc)) {
            return;
        }
        let awake = self.lives.wake(Role::Region(pc), &self.pages);
        if awake.is_empty() {
            return;
        }
        awake.iter().for_each(|id| self.emitter.wake(*id));
        self.stats.woken += awake.len() as u64;
        self.tell_revived(&awake);
        let mut all = self.regions.remove(&pc).unwrap_or_default();
        all.fragments.extend(&awake);
        all.fragments.sort_unstable_by_key(|id| self.rank(*id));
        let first = all.fragments[0];
        self.regions.insert(pc, all);
        for id in awake {
            self.try_after_loop(pc, id);
            self.unlink_refusals(pc, id);
        }
        self.register(pc, first);
        self.lead_links(pc, Some(first));
        self.links_changed();
    }

    /// Attaches an exit's own side trace again, if that rests and its guest bytes have not changed.
    /// Returns whether it does.
    pub(super) fn wake_side(&mut self, exit: ExitId) -> bool {
        if !self.lives.rests(Role::SideTrace(exit)) {
            return false;
        }
        let awake = self.lives.wake(Role::SideTrace(exit), &self.pages);
        self.stats.woken += awake.len() as u64;
        // The exit is attached to one of them, the one that has begun to rest last.
        let Some(&id) = awake.last() else { return false };
        self.exits.change(exit, Event::Woke);
        if self.emitter.wake_attached(exit, id).is_err() {
            self.exits.change(exit, Event::Unlinked);
            return false;
        }
        self.note_attached(exit, id);
        self.tell_revived(&[id]);
        self.links_changed();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::policy::{Scope, allowed};
    use super::*;
    use std::collections::HashSet;

    const PC: u64 = 0x1000;
    /// Versions that are made at most: four are needed for the links of a resting version.
    const VERSIONS: usize = 4;

    /// The exit of a version leads to the block: no later version was live when it was linked.
    const BLOCK: usize = usize::MAX;

    /// A version in a model of one region. Each has one exit, to the region's own pc, without
    /// progress.
    #[derive(Clone, Copy, PartialEq, Eq, Hash)]
    struct Model {
        is_guest_loop: bool,
        is_live: bool,
        group: u32,
        /// Another version, or [`BLOCK`]; none if the exit leads to the runtime.
        link: Option<usize>,
    }

    /// Which steps of the protocol a model takes.
    #[derive(Clone, Copy)]
    struct Steps {
        /// A link that is redirected to a new first version must be allowed.
        checks: bool,
        /// The exit of the loop before a new or woken version is unlinked.
        unlinks_before: bool,
        /// The exit of a woken loop is unlinked.
        unlinks_woken: bool,
        /// When loops are set back, the exits of all live loops are unlinked; those of the loops that are set back.
        unlinks_others: bool,
        unlinks_set_back: bool,
    }

    const ALL: Steps = Steps {
        checks: true,
        unlinks_before: true,
        unlinks_woken: true,
        unlinks_others: true,
        unlinks_set_back: true,
    };

    type State = Vec<Model>;

    fn rank(state: &State, version: usize) -> Rank {
        let Model { is_guest_loop, group, .. } = state[version];
        Rank::new(is_guest_loop, group, version as u32)
    }

    fn may(state: &State, from: usize, to: usize) -> bool {
        let version = Some(rank(state, from));
        let origin = ExitOrigin { pc: PC, version, target: Some(PC), progress: false };
        let to = Destination::Fragment(PC, rank(state, to));
        allowed(Scope::Fragments, Origin::Exit(origin), to)
    }

    /// The live versions, in their order.
    fn live(state: &State) -> Vec<usize> {
        let mut live: Vec<usize> = (0..state.len()).filter(|v| state[*v].is_live).collect();
        live.sort_by_key(|v| rank(state, *v));
        live
    }

    fn unlink_refusals(state: &mut State, version: usize) {
        if state[version].is_guest_loop {
            state[version].link = None;
        }
    }

    fn try_after_loop(state: &mut State, version: usize, steps: Steps) {
        let order = live(state);
        let before = order.iter().take_while(|v| **v != version).last();
        if let Some(before) = before.filter(|_| steps.unlinks_before) {
            unlink_refusals(state, *before);
        }
    }

    /// Links that led to the version that was the first lead to the one that is now.
    fn lead_to_new_first(state: &mut State, before: Option<usize>, steps: Steps) {
        let first = live(state)[0];
        for v in 0..state.len() {
            let leads_before = before.is_some() && before != Some(first) && state[v].link == before;
            if v != first && leads_before && (!steps.checks || may(state, v, first)) {
                state[v].link = Some(first);
            }
        }
    }

    fn last_group(state: &State) -> u32 {
        live(state).into_iter().map(|v| state[v].group).max().unwrap_or(0)
    }

    /// The state after this live loop was set back. Groups without versions are left out, so that there are
    /// finitely many states.
    fn after_set_back(state: &State, version: usize, steps: Steps) -> State {
        let (mut new, order) = (state.clone(), live(state));
        new[version].group = last_group(state) + 1;
        for v in &order {
            let is_set_back = *v == version;
            if is_set_back && steps.unlinks_set_back || !is_set_back && steps.unlinks_others {
                unlink_refusals(&mut new, *v);
            }
        }
        lead_to_new_first(&mut new, Some(order[0]), steps);
        let mut groups: Vec<u32> = new.iter().map(|m| m.group).collect();
        groups.sort_unstable();
        groups.dedup();
        for m in &mut new {
            m.group = groups.iter().take_while(|group| **group < m.group).count() as u32;
        }
        new
    }

    /// The states after each operation: a new version, a version that begins to rest, a loop that is set back, all
    /// resting ones woken, an exit linked.
    fn next(state: &State, steps: Steps) -> Vec<State> {
        let mut states = Vec::new();
        for is_guest_loop in [false, true] {
            if state.len() == VERSIONS {
                break;
            }
            let before = live(state).first().copied();
            let mut new = state.clone();
            new.push(Model { is_guest_loop, is_live: true, group: last_group(state), link: None });
            lead_to_new_first(&mut new, before, steps);
            try_after_loop(&mut new, state.len(), steps);
            states.push(new);
        }
        for v in live(state) {
            let mut rests = state.clone();
            rests[v].is_live = false;
            rests.iter_mut().filter(|m| m.link == Some(v)).for_each(|m| m.link = None);
            states.push(rests);
            let mut linked = state.clone();
            linked[v].link = live(state).into_iter().find(|to| may(state, v, *to)).or(Some(BLOCK));
            states.push(linked);
            if state[v].is_guest_loop {
                states.push(after_set_back(state, v, steps));
            }
        }
        let resting = (0..state.len()).filter(|v| !state[*v].is_live);
        let mut woken = state.clone();
        woken.iter_mut().for_each(|m| m.is_live = true);
        for v in resting {
            try_after_loop(&mut woken, v, steps);
            if steps.unlinks_woken {
                unlink_refusals(&mut woken, v);
            }
        }
        states.push(woken);
        states
    }

    /// Does what a live loop refuses go past a live version that comes after it?
    fn goes_past(state: &State) -> bool {
        let rank = |v| rank(state, v);
        let is_passed = |v: usize, to: usize, between: usize| {
            rank(v) < rank(between) && (to == BLOCK || rank(between) < rank(to))
        };
        let loops = live(state).into_iter().filter(|v| state[*v].is_guest_loop);
        let mut links = loops.filter_map(|v| Some((v, state[v].link?)));
        links.any(|(v, to)| live(state).into_iter().any(|between| is_passed(v, to, between)))
    }

    fn has_cycle(state: &State) -> bool {
        (0..state.len()).any(|start| {
            let mut at = start;
            (0..state.len()).any(|_| match state[at].link {
                Some(next) if next != BLOCK => {
                    at = next;
                    at == start
                }
                _ => {
                    at = start;
                    false
                }
            })
        })
    }

    /// Explores all states; how many there are, and whether one is `bad`.
    fn explore(steps: Steps, bad: fn(&State) -> bool) -> (usize, bool) {
        let (mut seen, mut work) = (HashSet::new(), vec![State::new()]);
        while let Some(state) = work.pop() {
            if bad(&state) {
                return (seen.len(), true);
            }
            if seen.insert(state.clone()) {
                work.extend(next(&state, steps));
            }
        }
        (seen.len(), false)
    }

    #[test]
    fn links_without_progress_never_go_in_a_circle() {
        let (states, found) = explore(ALL, has_cycle);
        assert!(!found && states > 1000, "{states} states");
        // A resting version keeps its links. They must not be redirected to a new version before it.
        let unchecked = Steps { checks: false, ..ALL };
        assert!(
            explore(unchecked, has_cycle).1,
            "the model does not find the circle that was once possible"
        );
        assert!(explore(Steps { unlinks_set_back: false, ..ALL }, has_cycle).1);
    }

    #[test]
    fn what_a_loop_refuses_does_not_go_past_a_later_version() {
        assert!(!explore(ALL, goes_past).1);
        assert!(explore(Steps { unlinks_before: false, ..ALL }, goes_past).1);
        assert!(explore(Steps { unlinks_woken: false, ..ALL }, goes_past).1);
        assert!(explore(Steps { unlinks_others: false, ..ALL }, goes_past).1);
    }
}
