//! Fragments among copied blocks: what the full tier does where native code has left.
//!
//! Links lead to *places* ([`dynasour_emitter::copy`]): to a fragment where there is one, else to a head's counter or to the
//! block. So exits are linked early: the end of a trace at once, a guard's exit after a few times to a counter of its own
//! and on to the block, until it is hot and gets a trace. The runtime is not entered in steady state.
//!
//! **Progress.** An exit that leads to its own fragment's pc, perhaps without an instruction having been executed, goes on
//! in a later version or in the block there, never where links lead that lead to the pc.

use super::{FragmentError, Fragments, Side, Stub, pace, perform};
use crate::interp::astray;
use crate::stats::{DeoptReason, Stats};
use dynasour_emitter::copy::{Copied, Counted, CounterId, HeadCounts};
use dynasour_emitter::{EmitError, EntryPoint, ExitId, FragmentId, Left, SiteKind, Via};
use dynasour_guest::ThreadContext;
use dynasour_guest::decode::Fetch;
use dynasour_tracer::SpeculationPolicy;

/// So often a guard's exit comes to the runtime before it is linked to a counter.
const RESOLVE: u32 = 16;

/// How the guest came to where it stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Arrival {
    /// By the runtime, or by something that is linked by itself.
    #[default]
    Anyhow,
    /// By an indirect transfer that did not find it.
    Indirect(Via),
    /// By the end of a trace.
    End(ExitId),
    /// Perhaps without having executed an instruction: it goes on in the block, past counters and fragments.
    WithoutProgress,
}

/// What happens where native code has left, with the guest's state exact.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Came {
    /// It goes on natively.
    On(Arrival),
    /// One instruction is interpreted, then it goes on.
    Interpret,
    /// An instruction of a block faulted: see [`Fragments::copy_state`].
    Fault,
    /// The head at rip was executed this many times.
    Hot(CounterId, u64),
    /// The exit is hot: record a side trace from rip.
    Side(Side),
    /// The cache is full.
    Full,
    /// `rip` is no address. The transfer at this pc led there, and is refused.
    Astray(u64),
}

impl Fragments {
    /// Which heads are counted from now on, and whether step by step.
    pub fn count_heads(&mut self, mut heads: HeadCounts, by_steps: bool) {
        if by_steps {
            self.pace_heads(heads.threshold);
            heads.threshold = heads.threshold.min(pace::STEP);
        }
        self.heads = heads;
        self.emitter.count_heads(heads);
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

    /// Is there code for the guest code at `pc`?
    pub fn has_code(&mut self, pc: u64) -> bool {
        self.wake(pc);
        self.emitter.block_entry(pc).is_some() || self.first(pc).is_some()
    }

    /// The code for the guest code at `pc`, copied now if need be, and linked to how the guest came there.
    ///
    /// # Errors
    /// See [`Emitter::copy`](dynasour_emitter::Emitter::copy).
    pub fn arrive(&mut self, pc: u64, code: &dyn Fetch, arrival: Arrival) -> Result<Copied, EmitError> {
        if self.retired {
            return Ok(Copied::Instruction);
        }
        if arrival == Arrival::WithoutProgress {
            return self.emitter.copy_block(pc, code);
        }
        self.wake(pc);
        if let Arrival::Indirect(via) = arrival {
            self.emitter.expect_indirect(pc, via);
        }
        let copied = self.emitter.copy(pc, code)?;
        if !matches!(copied, Copied::Entry(_)) {
            return Ok(copied);
        }
        match arrival {
            Arrival::Anyhow | Arrival::WithoutProgress => {}
            Arrival::Indirect(via) => self.emitter.register_copy(pc, via)?,
            Arrival::End(_) if self.chaos.is_some() => {}
            Arrival::End(exit) => {
                self.emitter.link_end(exit)?;
                self.stats.links += 1;
            }
        }
        self.links_changed();
        Ok(copied)
    }

    /// The way into a fragment some of whose guards are forced, and which these are.
    pub fn prepare_forced(&mut self, fragment: FragmentId) -> (EntryPoint, Vec<ExitId>) {
        self.stats.fragment_entries += 1;
        self.stats.native_entries += 1;
        let forced = self.force(fragment);
        let entry = self.emitter.fragment(fragment).map_or(0, |f| f.entry);
        (self.emitter.copy_entry_point(entry), forced)
    }

    /// A thread has come out of native code: makes its state exact, links, says what next.
    ///
    /// # Errors
    /// A broken invariant of ours.
    pub fn came(
        &mut self,
        left: Left,
        context: &mut ThreadContext,
        policy: &dyn SpeculationPolicy,
    ) -> Result<Came, FragmentError> {
        self.link_again(context);
        let exit = match left {
            Left::Aborted => return Ok(Came::On(Arrival::Anyhow)),
            Left::Fault => return Ok(Came::Fault),
            Left::Stale => {
                context.rip = context.next_pc;
                self.emitter.copied_stale(context.rip);
                return Ok(Came::On(Arrival::WithoutProgress));
            }
            Left::Block(link) => {
                let (pc, past_fragments) = self.emitter.copy_exit(link).ok_or(EmitError::Unknown)?;
                context.rip = pc;
                return Ok(Came::On(if past_fragments { Arrival::WithoutProgress } else { Arrival::Anyhow }));
            }
            Left::Indirect(via) => {
                context.rip = context.next_pc;
                self.stats.indirect.missed += 1;
                if let Some(from) = astray::origin(context, self.emitter.transfer(context)) {
                    return Ok(Came::Astray(from));
                }
                return Ok(Came::On(Arrival::Indirect(via)));
            }
            Left::Hot(counter) => {
                let count = self.emitter.counted(counter).ok_or(EmitError::Unknown)?;
                // Until somebody sets it, it leaves each time.
                match count.counts {
                    Counted::Head(pc) => {
                        context.rip = pc;
                        return Ok(match self.is_hot(pc, counter, count.executions, count.ticks) {
                            Some(executions) => Came::Hot(counter, executions),
                            None => Came::On(Arrival::WithoutProgress),
                        });
                    }
                    Counted::Exit(exit, pc) => {
                        context.rip = pc;
                        self.emitter.set_counter(counter, u64::from(policy.exit_threshold()));
                        return Ok(self.hot_exit(exit, policy));
                    }
                }
            }
            Left::Exit(exit) => exit,
        };
        self.note_left(exit);
        let deopt = self.emitter.deopt(exit, context)?;
        deopt.stores.iter().try_for_each(perform)?;
        if let Some(from) = astray::origin(context, deopt.after) {
            return Ok(Came::Astray(from));
        }
        if self.log_exits {
            eprintln!("dynasour: left through {exit:?} ({:?}) to {:#x}", deopt.kind, context.rip);
        }
        Ok(match deopt.kind {
            SiteKind::End => {
                self.stats.fragment_ends += 1;
                match self.stub_of(exit) {
                    Some(stub) if self.after_exit(stub.origin, context.rip) == Arrival::WithoutProgress => {
                        self.left_stub_in_place(exit, stub, context.rip)?
                    }
                    _ => Came::On(Arrival::End(exit)),
                }
            }
            SiteKind::EndIndirect => {
                self.stats.fragment_ends += 1;
                if self.chaos.is_none() {
                    self.emitter.make_head(context.rip);
                }
                Came::On(Arrival::Indirect(Via::Memory))
            }
            SiteKind::Guard => {
                let chaos = self.chaos.is_some();
                self.stats.deopt(if chaos { DeoptReason::Chaos } else { DeoptReason::Guard });
                self.guard_left(exit, context.rip, policy)
            }
            SiteKind::Fault => {
                self.stats.deopt(DeoptReason::Fault);
                Came::Interpret
            }
            SiteKind::Poll => {
                self.stats.deopt(DeoptReason::Poll);
                Came::On(self.after_exit(exit, context.rip))
            }
        })
    }

    /// How the guest goes on that left through `exit` to `pc`.
    fn after_exit(&self, exit: ExitId, pc: u64) -> Arrival {
        let moved = self
            .emitter
            .exit(exit)
            .is_none_or(|e| e.progress || self.emitter.fragment(e.fragment).is_none_or(|fragment| fragment.pc != pc));
        if moved { Arrival::Anyhow } else { Arrival::WithoutProgress }
    }

    /// The stub of an exit without progress has left by `exit`, because somebody is wanted in the runtime, or what it led to
    /// is gone. If that was a later version, it leads to another one, or the exit does not lead anywhere for now; a block
    /// it finds again by itself.
    fn left_stub_in_place(&mut self, exit: ExitId, stub: Stub, pc: u64) -> Result<Came, FragmentError> {
        let came = Came::On(Arrival::WithoutProgress);
        if stub.in_block || self.retired {
            return Ok(came);
        }
        self.wake(pc);
        let own = self.emitter.exit(stub.origin).map(|e| e.fragment);
        match self.successor(own, pc).map(|next| self.emitter.link(exit, next)) {
            Some(Ok(())) => self.stats.links += 1,
            // No room for a passage.
            Some(Err(error)) if error.is_full() => return Ok(Came::Full),
            Some(Err(error)) => return Err(error.into()),
            None => self.emitter.unlink(stub.origin)?,
        }
        Ok(came)
    }

    fn guard_left(&mut self, exit: ExitId, pc: u64, policy: &dyn SpeculationPolicy) -> Came {
        let came = Came::On(self.after_exit(exit, pc));
        if self.retired || self.chaos.is_some() {
            return came;
        }
        if self.wake_side(exit) {
            return came;
        }
        let threshold = policy.exit_threshold();
        let indirect = self.emitter.exit(exit).is_some_and(|e| e.target.is_none());
        if indirect {
            // Where traces leave to traces begin. Those that are linked do not tell.
            self.emitter.make_head(pc);
        }
        let linkable = indirect || self.first(pc).is_some();
        let copied = self.emitter.block_entry(pc).is_some();
        let taken = self.taken.entry(exit).or_default();
        *taken += 1;
        if *taken >= threshold || *taken == RESOLVE && linkable {
            *taken = 0;
            return self.hot_exit(exit, policy);
        }
        if *taken != RESOLVE {
            return came;
        }
        if !copied {
            // It will have been when the exit is taken next.
            *taken -= 1;
            return came;
        }
        let linked = self.emitter.link_exit_to_copy(exit, true, Some(u64::from(threshold - RESOLVE)));
        self.linked(exit, linked, true).unwrap_or(came)
    }

    /// An exit is worth a trace, or a link to one.
    fn hot_exit(&mut self, exit: ExitId, policy: &dyn SpeculationPolicy) -> Came {
        let Some(e) = self.emitter.exit(exit) else { return Came::On(Arrival::Anyhow) };
        let (target, fragment, progress) = (e.target, e.fragment, e.progress);
        let head = self.emitter.fragment(fragment).map(|f| f.pc);
        if target.is_none() && self.indirect.contains(&fragment) {
            self.new_dispatch = head.filter(|pc| self.dispatching.insert(*pc));
        }
        let came = Came::On(if progress || target != head { Arrival::Anyhow } else { Arrival::WithoutProgress });
        if self.retired {
            return came;
        }
        let own = (!progress).then_some(fragment);
        let linked = match target {
            None => self.emitter.link_indirect_exit(exit),
            Some(pc) => match self.successor(own, pc) {
                Some(_) if progress || target != head => self.emitter.link_exit_to_copy(exit, false, None),
                Some(next) => self.emitter.link_exit(exit, next),
                None if self.is_full(pc, policy) => return self.settle_exit(exit).unwrap_or(came),
                None => return Came::Side(Side { exit, pc, generation: self.generation }),
            },
        };
        self.linked(exit, linked, false).unwrap_or(came)
    }

    /// No trace will be made for an exit: from now on it leads to where links to its target lead.
    fn settle_exit(&mut self, exit: ExitId) -> Option<Came> {
        let e = self.emitter.exit(exit)?;
        let head = self.emitter.fragment(e.fragment).map(|f| f.pc);
        let block = !e.progress && e.target == head;
        let linked = self.emitter.link_exit_to_copy(exit, block, None);
        self.linked(exit, linked, block)
    }

    /// As [`Fragments::settle_exit`], for an exit of which the dispatcher knows that.
    pub fn give_up(&mut self, side: Side) -> bool {
        let current = !self.retired && side.generation == self.generation;
        current && self.settle_exit(side.exit) == Some(Came::Full)
    }

    fn linked(&mut self, exit: ExitId, linked: Result<FragmentId, EmitError>, in_block: bool) -> Option<Came> {
        match linked {
            Ok(stub) => {
                self.stats.stubs += 1;
                self.stubs.insert(stub, Stub { origin: exit, in_block });
                self.links_changed();
                self.note_stub(stub, exit);
                if self.log_code {
                    eprintln!("dynasour: stub of {exit:?}\n{}", self.emitter.listing(stub).unwrap_or_default());
                }
                None
            }
            // Without a stub (its stores need a register too many) the exit goes on to come here.
            Err(error) => error.is_full().then_some(Came::Full),
        }
    }

    /// Lets links lead to the fragment at `pc`.
    pub fn lead_to_first(&mut self, pc: u64) {
        if let Some(first) = self.first(pc)
            && !self.retired
            && self.chaos.is_none()
        {
            self.emitter.lead_to(first);
            self.links_changed();
        }
    }

    /// A head is not worth counting any more.
    pub fn stop_counting(&mut self, pc: u64) {
        if !self.retired {
            self.emitter.stop_counting(pc);
            self.links_changed();
        }
    }

    /// Is the head at `pc` one because it is called?
    pub fn is_function(&self, pc: u64) -> bool {
        self.emitter.is_called(pc)
    }
}
