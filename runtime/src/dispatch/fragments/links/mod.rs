//! Links as the runtime decides them: which exit leads where, and when.
//!
//! A guest thread that leaves native code comes to the runtime. Links are made so that this happens
//! seldom. One function says what may be linked to what ([`policy`]). Each exit has a state, which
//! says what has been decided about it ([`exits`], with a diagram). The versions of a region, and
//! which of them is entered, are in [`regions`]; the targets of exits with computed targets are in
//! [`computed`]. The emitter writes the jumps ([`dynasour_emitter::links`]), and its verifier
//! checks the result ([`verify`]).
//!
//! **Ends.** The direct end of a trace is linked when it is first left. With copied blocks it is
//! linked to the *place* of its target, to which the links of blocks lead, too. Without them it is
//! linked to the first version of the region.
//!
//! **Guards.** With copied blocks a guard's exit comes to the runtime [`EXITS_BEFORE_STUB`] times.
//! Then it gets a resolved stub. If a fragment starts at its target, the stub leads to the place.
//! Otherwise the stub counts, and leads to the block. When the counter runs out, a side trace is
//! recorded. The exit leads to that, or to the place if there will be no side trace. Without copied
//! blocks there are no counters in stubs: the runtime counts to the policy's threshold.
//!
//! Data: that of the submodules, in [`Fragments`]. Invariants: a link is only made if
//! [`policy::allowed`] allows it. An exit's state is changed before its code is written. The caller
//! holds the lock of the fragments; no guest code runs under it.
//!
//! Example: the loop at 0x1000 has a guard that leaves to 0x1080. The exit is left 16 times through
//! the runtime. Its stub counts the next executions, up to the policy's threshold. Then a trace of
//! 0x1080 is recorded by the interpreter and attached to the exit, and from then on the loop runs
//! without the runtime.

pub mod computed;
pub mod exits;
pub mod policy;
pub mod regions;
mod stubs;
mod verify;

pub use stubs::StubWork;

use super::{AfterNative, Arrival, FragmentError, Fragments, Role, SideRequest};
use dynasour_emitter::blocks::{Count, CounterId};
use dynasour_emitter::counting::Destination as Leads;
use dynasour_emitter::{ExitId, FragmentId, StubTarget};
use dynasour_guest::decode::Fetch;
use dynasour_tracer::SpeculationPolicy;
use exits::{Event, Stub};
use policy::{Destination, ExitOrigin, Origin, Rank, Scope, allowed};

/// A guard's exit comes to the runtime this many times before it gets a resolved stub (guess: to
/// make a stub costs as much as some ten exits; larger values leave more exits without one).
const EXITS_BEFORE_STUB: u32 = 16;

/// After this many further executions a side trace is tried again for a hot exit that got none (guess:
/// too many delay a trace that pays).
fn again_after(policy: &dyn SpeculationPolicy) -> u64 {
    u64::from(policy.exit_threshold()).saturating_mul(20)
}

/// Ticks of the time stamp counter, some 0.8 ms at 2.5 GHz, that pass before the counter of an exit
/// leaves again (guess: coming to the runtime takes some microseconds, so it costs no 1 %).
const SELDOM: u64 = 1 << 21;

impl Fragments {
    /// What links may lead to in this run.
    pub(super) fn scope(&self) -> Scope {
        match self.chaos {
            Some(_) => Scope::Forced,
            None if self.has_places() => Scope::Blocks,
            None => Scope::Fragments,
        }
    }

    /// Do fragments run among copied blocks or among guest code in place, so that links lead to
    /// places?
    pub(super) fn has_places(&self) -> bool {
        self.copies
    }

    /// What [`policy::allowed`] needs to know of an exit.
    fn origin(&self, exit: ExitId) -> Option<ExitOrigin> {
        let e = self.emitter.exit(exit)?;
        let pc = self.emitter.fragment(e.fragment)?.pc;
        let is_version = self.lives.role(e.fragment) == Some(Role::Region(pc));
        let version = is_version.then(|| self.rank(e.fragment));
        Some(ExitOrigin { pc, version, target: e.target, progress: e.progress })
    }

    /// May an exit lead to `to`?
    fn may_lead(&self, origin: ExitOrigin, to: Destination) -> bool {
        allowed(self.scope(), Origin::Exit(origin), to)
    }

    /// The resolved stub to which `exit` belongs; none if it is an exit of a trace.
    pub(super) fn stub_of(&self, exit: ExitId) -> Option<Stub> {
        self.exits.stub(self.emitter.exit(exit)?.fragment)
    }

    /// The end `exit`, of a trace or of a stub, leads to `next` from now on. True if the cache is
    /// full.
    fn link(&mut self, exit: ExitId, next: FragmentId) -> Result<bool, FragmentError> {
        match self.emitter.link(exit, next) {
            Ok(()) => {
                self.stats.links += 1;
                self.tell_linked(exit, next);
            }
            // There is no room for the code that moves values between the two.
            Err(error) if error.is_full() => return Ok(true),
            Err(error) => return Err(error.into()),
        }
        self.links_changed();
        Ok(false)
    }

    /// Makes an exit lead to the runtime again, since its stub has nothing to lead to.
    fn unlink(&mut self, exit: ExitId) -> Result<(), FragmentError> {
        self.exits.change(exit, Event::Unlinked);
        self.emitter.unlink(exit)?;
        self.links_changed();
        Ok(())
    }

    /// An exit is hot. If its target is computed, and its fragment's path goes through an indirect
    /// jump, that jump has changing targets: this is noted for the fragment's pc.
    fn note_dispatch(&mut self, exit: ExitId, origin: ExitOrigin) {
        let fragment = self.emitter.exit(exit).map(|e| e.fragment);
        if origin.target.is_none()
            && fragment.is_some_and(|fragment| self.lives.shape(fragment).jumps_indirectly)
        {
            self.new_dispatch = Some(origin.pc).filter(|pc| self.dispatching.insert(*pc));
        }
    }

    /// How the guest arrives at `pc` after it has left through `exit`: with progress or without.
    pub(super) fn after_exit(&self, exit: ExitId, pc: u64) -> Arrival {
        let Some(e) = self.emitter.exit(exit) else { return Arrival::Ordinary };
        let Some(own) = self.emitter.fragment(e.fragment) else { return Arrival::Ordinary };
        let origin =
            ExitOrigin { pc: own.pc, version: None, target: e.target, progress: e.progress };
        if origin.has_moved(pc) { Arrival::Ordinary } else { Arrival::WithoutProgress }
    }
}

/// Where exits lead when they have come to the runtime.
impl Fragments {
    /// A resolved stub has left by its own end `exit`, since a signal has unlinked it, or since the
    /// fragment that it led to rests. With copied blocks, if the stub's exit had made progress, the
    /// stub is linked as an end of a trace is. Otherwise it is linked to another version, or its
    /// exit leads to the runtime again. A stub that leads to a block is left alone: copying the
    /// block links it again.
    pub(super) fn left_stub(
        &mut self,
        exit: ExitId,
        stub: Stub,
        pc: u64,
    ) -> Result<AfterNative, FragmentError> {
        let arrival = self.after_exit(stub.origin, pc);
        if self.copies && arrival != Arrival::WithoutProgress {
            self.stats.fragment_ends += 1;
            return Ok(AfterNative::Continue(Arrival::End(exit)));
        }
        if stub.to_body || self.retired {
            return Ok(AfterNative::Continue(arrival));
        }
        self.wake(pc);
        match self.origin(stub.origin).and_then(|at| self.successor(stub.origin, at, pc)) {
            Some(next) if self.link(exit, next)? => return Ok(AfterNative::Full),
            Some(_) => {}
            None => self.unlink(stub.origin)?,
        }
        Ok(AfterNative::Continue(arrival))
    }

    /// A guard's exit has come to the runtime.
    pub(super) fn guard_left(
        &mut self,
        exit: ExitId,
        pc: u64,
        policy: &dyn SpeculationPolicy,
    ) -> AfterNative {
        let after = AfterNative::Continue(self.after_exit(exit, pc));
        if self.retired || self.chaos.is_some() || self.wake_side(exit) {
            return after;
        }
        let threshold = policy.exit_threshold();
        let is_computed = self.emitter.exit(exit).is_some_and(|e| e.target.is_none());
        if is_computed {
            if !self.has_places() {
                self.exits.votes.vote(exit, pc);
            }
            // The target of an exit is a trace head. It is noted here, since once the exit is
            // linked its targets are not seen any more.
            self.emitter.make_head(pc);
        }
        let taken = self.exits.count_left(exit);
        if taken == 1 {
            self.note_left_once(exit);
        }
        let may_count = self.has_places() && taken == EXITS_BEFORE_STUB;
        if taken >= threshold || may_count && (is_computed || self.first_version(pc).is_some()) {
            return self.hot_exit(exit, taken, None, policy);
        }
        if !may_count {
            return after;
        }
        if self.emitter.block_entry(pc).is_none() {
            // The target is not copied yet. It will be when the exit is left next, so this time
            // does not count.
            self.exits.uncount(exit);
            return match after {
                // In place, it is copied only if a link is to lead there.
                AfterNative::Continue(Arrival::Ordinary) if self.in_place => {
                    AfterNative::Continue(Arrival::Link)
                }
                after => after,
            };
        }
        let counted = u64::from(threshold - EXITS_BEFORE_STUB);
        let to = Destination::Body(pc);
        self.want_stub(exit, Event::CounterMade, to, StubTarget::CountedBlock(counted));
        after
    }

    /// The counter of an exit has run out: sets it again.
    pub(super) fn counter_left(
        &mut self,
        exit: ExitId,
        counter: CounterId,
        count: Count,
        policy: &dyn SpeculationPolicy,
    ) -> AfterNative {
        // No trace may be wanted there, or none now, for as long as the guest runs.
        let seldom = match count.ticks {
            ticks if self.counts_with_pauses() => {
                count.executions.saturating_mul(SELDOM) / ticks.max(1)
            }
            _ => 0,
        };
        self.emitter.set_counter(counter, again_after(policy).max(seldom));
        let taken = self.exits.count_left(exit);
        match self.origin(exit).and_then(|origin| self.end_of_loops(exit, origin)) {
            Some(_) if !self.retired => AfterNative::Search,
            _ => self.hot_exit(exit, taken, Some(&count), policy),
        }
    }

    /// The head of loops of an interpreted program at which this exit is the last: the guest leaves
    /// by it if it comes to none of the loops that have traces. None for other exits.
    fn end_of_loops(&self, exit: ExitId, origin: ExitOrigin) -> Option<u64> {
        let pc = origin.target.filter(|target| !origin.has_moved(*target))?;
        let is_loop = |rank: Rank| rank.is_guest_loop();
        let next = self.successor(exit, origin, pc).map(|next| self.rank(next));
        let is_end = origin.version.is_some_and(is_loop) && !next.is_some_and(is_loop);
        (is_end && self.has_places()).then_some(pc)
    }

    /// An exit is hot, having come to the runtime `taken` times, the last time by its counter if it has one:
    /// links it to a fragment at its target, or asks for a side trace, or leads it to the block there.
    fn hot_exit(
        &mut self,
        exit: ExitId,
        taken: u32,
        count: Option<&Count>,
        policy: &dyn SpeculationPolicy,
    ) -> AfterNative {
        let Some(origin) = self.origin(exit) else {
            return AfterNative::Continue(Arrival::Ordinary);
        };
        self.note_dispatch(exit, origin);
        let is_late = self.is_late(exit, count);
        let after = self.lead_hot_exit(exit, origin, taken, policy);
        match after {
            AfterNative::HotExit(_) if is_late => self.note_late(exit),
            _ if is_late => self.race_again(exit),
            _ => {}
        }
        after
    }

    /// As [`Fragments::hot_exit`], which has noted what it says of the guest.
    fn lead_hot_exit(
        &mut self,
        exit: ExitId,
        origin: ExitOrigin,
        taken: u32,
        policy: &dyn SpeculationPolicy,
    ) -> AfterNative {
        let moved = origin.target.is_none_or(|target| origin.has_moved(target));
        let after =
            AfterNative::Continue(if moved { Arrival::Ordinary } else { Arrival::WithoutProgress });
        if self.retired {
            return after;
        }
        let Some(pc) = origin.target else {
            // With copied blocks the stub jumps through the tables by a jump of its own, which the
            // processor predicts well, so comparing the target first would gain nothing.
            if self.has_places() {
                self.link_to_tables(exit);
            } else {
                self.link_computed(exit, origin, taken);
            }
            return after;
        };
        self.wake(pc);
        if self.end_of_loops(exit, origin).is_some() && self.emitter.block_entry(pc).is_some() {
            // It is counted, so that other loops are searched for if the guest comes here often.
            let target = StubTarget::CountedBlock(again_after(policy));
            self.want_stub(exit, Event::CounterMade, Destination::Body(pc), target);
            return after;
        }
        match self.successor(exit, origin, pc) {
            Some(_) if self.may_lead(origin, Destination::Place(pc)) => {
                self.want_stub(exit, Event::Link, Destination::Place(pc), StubTarget::Place);
            }
            Some(next) => self.link_to_version(exit, pc, next),
            None if self.is_full(pc, policy) && self.has_places() => self.settle_exit(exit),
            None if self.is_full(pc, policy) => {
                self.exits.change(exit, Event::Unlinked);
                self.drop_changed(pc);
            }
            None => {
                self.exits.change(exit, Event::Record);
                return AfterNative::HotExit(SideRequest { exit, pc, generation: self.generation });
            }
        }
        after
    }

    /// No side trace will be made for an exit. From now on it leads to the place of its target if
    /// that is allowed, otherwise to the block there.
    fn settle_exit(&mut self, exit: ExitId) {
        let Some(origin) = self.origin(exit) else { return };
        let Some(pc) = origin.target else { return };
        let (to, target) = if self.may_lead(origin, Destination::Place(pc)) {
            (Destination::Place(pc), StubTarget::Place)
        } else {
            (Destination::Body(pc), StubTarget::Block)
        };
        self.want_stub(exit, Event::Settle, to, target);
    }

    /// The dispatcher has given up the side trace of an exit.
    pub fn give_up(&mut self, side: SideRequest) {
        if !self.retired && side.generation == self.generation {
            self.settle_exit(side.exit);
        }
    }

    /// No time may be spent on the side trace of an exit now. The exit is counted natively, so that it
    /// comes to the runtime seldom meanwhile.
    pub fn postpone_side_trace(
        &mut self,
        side: SideRequest,
        code: &dyn Fetch,
        policy: &dyn SpeculationPolicy,
    ) {
        let SideRequest { exit, pc, generation } = side;
        let leads_here = self.emitter.destination(exit) == Leads::Runtime;
        if self.retired || generation != self.generation || !leads_here {
            return;
        }
        self.exits.change(exit, Event::Left);
        if self.emitter.copy_block(pc, code).is_ok() && self.emitter.block_entry(pc).is_some() {
            let target = StubTarget::CountedBlock(again_after(policy));
            self.want_stub(exit, Event::CounterMade, Destination::Body(pc), target);
        }
        self.links_changed();
    }

    /// Makes links to `pc` lead to the first version there, if there is one.
    pub fn lead_to_first(&mut self, pc: u64) {
        if let Some(first) = self.first_version(pc)
            && !self.retired
        {
            self.lead_links(pc, Some(first));
            self.links_changed();
        }
    }

    /// The head at `pc` is not counted any more: links to it lead to its block.
    pub fn stop_counting(&mut self, pc: u64) {
        if !self.retired {
            self.emitter.stop_counting(pc);
            self.links_changed();
        }
    }
}
