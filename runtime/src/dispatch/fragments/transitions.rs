//! Between the runtime and native code: [`Fragments::find_code`] returns what there is to execute
//! at a pc, and [`Fragments::after_native`] makes the guest's state exact after native code has
//! left, and returns what happens next.
//!
//! What there is at a pc depends on how the program is run:
//!
//! | run with | at a pc there is |
//! | --- | --- |
//! | copied blocks | a fragment, the counter of a head, or a block, which is copied if need be |
//! | guest code in place | a fragment, or the guest's own code |
//! | no copied blocks | a fragment, or nothing |
//! | forced guards (`--chaos`) | the same, but no link leads to a fragment |
//!
//! In a steady state the runtime is not entered: links ([`super::links`]) lead from one piece of
//! native code to the next.
//!
//! Data: none of its own. Invariant: a guest that may not have made progress
//! ([`Arrival::WithoutProgress`]) does not enter a fragment. It continues in the block at its pc,
//! or in the interpreter. The caller holds the lock of the fragments; guest code is executed
//! without it.
//!
//! Example: a guard leaves to 0x1080. `after_native` rebuilds the registers and returns
//! `Continue(Ordinary)`; `find_code(0x1080)` copies the block there, unless there is one, and
//! returns its entry.

use super::chaos::Forced;
use super::head_counting::follows_call;
use super::{FragmentError, Fragments, SideRequest, perform_store};
use crate::interp::noncanonical;
use crate::observe::events::Reason;
use crate::observe::stats::DeoptReason;
use crate::observe::watch::GuestPcs;
use dynasour_emitter::blocks::{Copied, Counted, CounterId};
use dynasour_emitter::{EmitError, EntryPoint, ExitId, ExitReason, FragmentId, SiteKind, Via};
use dynasour_guest::ThreadContext;
use dynasour_guest::decode::Fetch;
use dynasour_tracer::SpeculationPolicy;

/// How the guest came to its pc.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Arrival {
    /// In a way that needs no link: from the runtime.
    #[default]
    Ordinary,
    /// By a link of a block, which leads there by itself when there is something to lead to.
    Link,
    /// By an indirect transfer that did not find its target in the tables.
    Indirect(Via),
    /// By the direct end of a trace or of a resolved stub.
    End(ExitId),
    /// Perhaps without having executed an instruction: it must not enter a fragment or a counter.
    WithoutProgress,
}

impl Arrival {
    /// Did the guest leave a trace by its end, direct or indirect?
    pub fn is_by_end(self) -> bool {
        matches!(self, Arrival::Indirect(_) | Arrival::End(_))
    }
}

/// What there is to execute at a pc.
#[derive(Debug)]
pub enum FoundCode {
    /// Native code.
    Native(NativeEntry),
    /// An instruction that cannot be copied. It is interpreted; after it there may be native code.
    Instruction,
    /// Nothing native: guest code is interpreted until native code starts at an edge.
    Nothing,
    /// Nothing native: guest code is executed where it stands.
    InPlace,
}

/// An entry into native code, for one thread and one time.
#[derive(Debug)]
pub struct NativeEntry {
    /// Where to enter the code.
    pub point: EntryPoint,
    /// The guards that were forced to fail for this entry, under `--chaos`.
    forced: Option<Forced>,
}

/// What happens after native code has left. The guest's state is exact, but for
/// [`AfterNative::Fault`] and [`AfterNative::NonCanonical`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AfterNative {
    /// The guest continues at rip, if possible natively.
    Continue(Arrival),
    /// The instruction at rip is interpreted, then the guest continues.
    Interpret,
    /// An instruction of a block faulted: [`Fragments::copy_state`] makes the state exact, and the
    /// instruction is interpreted.
    Fault,
    /// The counter of the head at rip ran out, after this many executions of the head.
    Hot(CounterId, u64),
    /// An exit is hot: a side trace from rip is wanted.
    HotExit(SideRequest),
    /// The guest comes to rip, a head of loops of an interpreted program, often and in none of the
    /// loops that have traces: other loops are to be searched for.
    Search,
    /// The code cache is full.
    Full,
    /// The transfer at this pc led to a non-canonical address, which is in rip. The processor would
    /// refuse the transfer.
    NonCanonical(u64),
}

impl Fragments {
    /// Is there native code for the guest code at `pc`? Wakes resting fragments there.
    pub fn has_code(&mut self, pc: u64) -> bool {
        self.wake(pc);
        self.emitter.block_entry(pc).is_some() || self.first_version(pc).is_some()
    }

    /// What there is to execute at `pc`, to which the guest came by `arrival`. If it came by a link
    /// or an indirect transfer, that leads there from now on.
    ///
    /// # Errors
    /// See [`Emitter::copy`](dynasour_emitter::Emitter::copy).
    pub fn find_code(
        &mut self,
        pc: u64,
        code: &dyn Fetch,
        arrival: Arrival,
    ) -> Result<FoundCode, EmitError> {
        let found = self.find(pc, code, arrival);
        self.show_code(&GuestPcs::default());
        found
    }

    fn find(
        &mut self,
        pc: u64,
        code: &dyn Fetch,
        arrival: Arrival,
    ) -> Result<FoundCode, EmitError> {
        let has_moved = arrival != Arrival::WithoutProgress;
        if self.in_place {
            self.leads_out(pc, code, arrival)?;
        }
        if !self.retired && has_moved {
            self.wake(pc);
            if (self.chaos.is_some() || !self.copies || self.in_place)
                && !self.races.is_on_floor(pc)
                && let Some(fragment) = self.first_version(pc)
            {
                let entry = self.entry_into(fragment)?;
                if let Arrival::End(exit) = arrival
                    && self.chaos.is_none()
                    && !self.in_place
                {
                    self.emitter.link(exit, fragment)?;
                    self.stats.links += 1;
                    self.tell_linked(exit, fragment);
                    self.links_changed();
                }
                return match entry {
                    Some(entry) => Ok(FoundCode::Native(entry)),
                    None => self.block(pc, code, Arrival::WithoutProgress),
                };
            }
        }
        self.block(pc, code, arrival)
    }

    /// An entry into a fragment; none if another thread is in a fragment with forced guards.
    fn entry_into(&mut self, fragment: FragmentId) -> Result<Option<NativeEntry>, EmitError> {
        let forced = self.force(fragment);
        if self.chaos.is_some() && forced.is_none() {
            return Ok(None);
        }
        self.stats.fragment_entries += 1;
        self.stats.native_entries += 1;
        let entry = if self.copies {
            // The fragment may lead to blocks, which expect the guest's vector state in the
            // registers.
            let code = self.emitter.fragment(fragment).ok_or(EmitError::Unknown)?.entry;
            self.emitter.copy_entry_point(code)
        } else {
            self.emitter.entry_point(fragment)?
        };
        Ok(Some(NativeEntry { point: entry, forced }))
    }

    /// What links to the place at `pc` lead to, or without progress the block itself; copies the
    /// block if need be.
    fn block(
        &mut self,
        pc: u64,
        code: &dyn Fetch,
        arrival: Arrival,
    ) -> Result<FoundCode, EmitError> {
        if !self.copies {
            return Ok(FoundCode::Nothing);
        }
        if self.in_place {
            // The head of a trace that does not lead there now has a patch, so it is executed by way
            // of its block.
            if arrival != Arrival::WithoutProgress
                && self.races.is_on_floor(pc)
                && !self.retired
                && self.emitter.block_entry(pc).is_some()
                && let Copied::Entry(entry) = self.emitter.copy(pc, code)?
            {
                self.stats.native_entries += 1;
                let point = self.emitter.copy_entry_point(entry);
                return Ok(FoundCode::Native(NativeEntry { point, forced: None }));
            }
            return Ok(FoundCode::InPlace);
        }
        if self.retired {
            return Ok(FoundCode::Instruction);
        }
        let copied = match arrival {
            Arrival::WithoutProgress => self.emitter.copy_block(pc, code)?,
            Arrival::Indirect(via) => {
                self.emitter.expect_indirect(pc, via);
                let copied = self.emitter.copy(pc, code)?;
                if !follows_call(pc) {
                    // In an interpreter with a dispatch in each handler no branch goes backward.
                    self.emitter.make_head(pc);
                }
                copied
            }
            Arrival::Ordinary | Arrival::Link | Arrival::End(_) => self.emitter.copy(pc, code)?,
        };
        let entry = match copied {
            Copied::Entry(entry) => entry,
            Copied::Instruction => return Ok(FoundCode::Instruction),
            Copied::Writable => return Ok(FoundCode::Nothing),
        };
        match arrival {
            Arrival::WithoutProgress | Arrival::Ordinary | Arrival::Link => {}
            Arrival::Indirect(via) => self.emitter.register_copy(pc, via)?,
            Arrival::End(_) if self.chaos.is_some() => {}
            Arrival::End(exit) => {
                self.emitter.link_end(exit)?;
                self.stats.links += 1;
                self.tell_linked_to_place(exit);
            }
        }
        if arrival != Arrival::WithoutProgress {
            self.links_changed();
        }
        self.stats.native_entries += 1;
        Ok(FoundCode::Native(NativeEntry {
            point: self.emitter.copy_entry_point(entry),
            forced: None,
        }))
    }

    /// The thread of `context` has left native code: restores the guards that were forced for its
    /// entry, and links again what its signal handler has unlinked.
    pub fn leave_native(&mut self, entry: Option<NativeEntry>, context: &ThreadContext) {
        if let Some(forced) = entry.and_then(|entry| entry.forced) {
            self.restore(forced);
        }
        self.relink_after_signal(context);
    }

    /// After [`Fragments::leave_native`]: makes the guest's state exact, changes links if the exit
    /// is hot, and returns what happens next.
    ///
    /// # Errors
    /// An invariant is broken.
    pub fn after_native(
        &mut self,
        left: ExitReason,
        context: &mut ThreadContext,
        policy: &dyn SpeculationPolicy,
    ) -> Result<AfterNative, FragmentError> {
        match left {
            ExitReason::Aborted | ExitReason::InPlace => {
                Ok(AfterNative::Continue(Arrival::Ordinary))
            }
            ExitReason::Fault => Ok(AfterNative::Fault),
            ExitReason::Stale => {
                context.rip = context.next_pc;
                self.emitter.copied_stale(context.rip);
                Ok(AfterNative::Continue(Arrival::WithoutProgress))
            }
            ExitReason::Block(link) => {
                let (pc, past_fragments) =
                    self.emitter.copy_exit(link).ok_or(EmitError::Unknown)?;
                context.rip = pc;
                let arrival = if past_fragments { Arrival::WithoutProgress } else { Arrival::Link };
                Ok(AfterNative::Continue(arrival))
            }
            ExitReason::Indirect(via) => {
                context.rip = context.next_pc;
                self.stats.indirect.missed += 1;
                match noncanonical::refused_transfer(context, self.emitter.transfer(context)) {
                    Some(from) => Ok(AfterNative::NonCanonical(from)),
                    None => Ok(AfterNative::Continue(Arrival::Indirect(via))),
                }
            }
            ExitReason::Hot(counter) => self.counter_ran_out(counter, context, policy),
            ExitReason::Exit(exit) => self.left_by_exit(exit, context, policy),
        }
    }

    /// The counter of a head or an exit has left, and leaves at each execution until it is set
    /// again.
    fn counter_ran_out(
        &mut self,
        counter: CounterId,
        context: &mut ThreadContext,
        policy: &dyn SpeculationPolicy,
    ) -> Result<AfterNative, FragmentError> {
        let count = self.emitter.counted(counter).ok_or(EmitError::Unknown)?;
        match count.counts {
            Counted::Head(pc) => {
                context.rip = pc;
                Ok(match self.is_hot(pc, counter, count.executions, count.ticks) {
                    Some(executions) => AfterNative::Hot(counter, executions),
                    None => AfterNative::Continue(Arrival::WithoutProgress),
                })
            }
            Counted::Exit(exit, pc) => {
                context.rip = pc;
                Ok(self.counter_left(exit, counter, count, policy))
            }
        }
    }

    /// A trace has left through an exit: rebuilds the guest's state, and counts or links the exit.
    fn left_by_exit(
        &mut self,
        exit: ExitId,
        context: &mut ThreadContext,
        policy: &dyn SpeculationPolicy,
    ) -> Result<AfterNative, FragmentError> {
        self.note_left(exit);
        let deopt = self.emitter.deopt(exit, context)?;
        deopt.stores.iter().try_for_each(perform_store)?;
        if let Some(from) = noncanonical::refused_transfer(context, deopt.after) {
            return Ok(AfterNative::NonCanonical(from));
        }
        if self.logs.exits {
            eprintln!("dynasour: left through {exit:?} ({:?}) to {:#x}", deopt.kind, context.rip);
        }
        Ok(match deopt.kind {
            SiteKind::End => match self.stub_of(exit) {
                Some(stub) => self.left_stub(exit, stub, context.rip)?,
                None => {
                    self.stats.fragment_ends += 1;
                    AfterNative::Continue(Arrival::End(exit))
                }
            },
            SiteKind::EndIndirect => {
                self.stats.fragment_ends += 1;
                if self.chaos.is_none() {
                    self.emitter.make_head(context.rip);
                }
                AfterNative::Continue(Arrival::Indirect(Via::Memory))
            }
            SiteKind::Guard => {
                let chaos = self.chaos.is_some();
                self.stats.deopt(if chaos { DeoptReason::Chaos } else { DeoptReason::Guard });
                let reason = if chaos { Reason::Chaos } else { Reason::Guard };
                self.tell_deopt(exit, context.rip, reason);
                self.guard_left(exit, context.rip, policy)
            }
            SiteKind::Fault => {
                self.stats.deopt(DeoptReason::Fault);
                self.tell_deopt(exit, context.rip, Reason::Fault);
                AfterNative::Interpret
            }
            SiteKind::Poll => {
                self.stats.deopt(DeoptReason::Poll);
                self.tell_deopt(exit, context.rip, Reason::Poll);
                AfterNative::Continue(self.after_exit(exit, context.rip))
            }
        })
    }

    /// Makes `context` the guest's state before the instruction of a block that has faulted; see
    /// [`Emitter::copy_state`].
    ///
    /// [`Emitter::copy_state`]: dynasour_emitter::Emitter::copy_state
    pub fn copy_state(&mut self, context: &mut ThreadContext, code: &dyn Fetch) -> bool {
        self.emitter.copy_state(context, code)
    }
}
