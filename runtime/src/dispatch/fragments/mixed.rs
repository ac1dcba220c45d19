//! Fragments among copied blocks: what the full tier does where native code has left.
//!
//! [`Fragments::came`] makes the guest's state exact after native code has left and says what
//! happens next; [`Fragments::arrive`] gives the code to enter. Links lead to *places*
//! ([`dynasour_emitter::links`]): to a fragment where there is one, else to a head's counter or to
//! the block. So the runtime is not entered in steady state. Which exits are linked when is decided
//! in [`super::links`].
//!
//! Data: none of its own. Invariant: a guest that may not have made progress
//! ([`Arrival::WithoutProgress`]) goes on in the block at its pc, whatever else starts there. The
//! caller holds the lock of the fragments; guest code runs without it.
//!
//! Example: a guard leaves to 0x1080. `came` rebuilds the registers and returns `On(Anyhow)`;
//! `arrive(0x1080)` copies the block there, unless it has one, and gives its entry.

use super::{FragmentError, Fragments, Side, pace, perform};
use crate::interp::astray;
use crate::observe::stats::{DeoptReason, Stats};
use dynasour_emitter::blocks::{Copied, Counted, CounterId, HeadCounts};
use dynasour_emitter::{EmitError, EntryPoint, ExitId, FragmentId, Left, SiteKind, Via};
use dynasour_guest::ThreadContext;
use dynasour_guest::decode::Fetch;
use dynasour_tracer::SpeculationPolicy;

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
    /// Perhaps without having executed an instruction: it goes on in the block, past counters and
    /// fragments.
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

    /// The code for the guest code at `pc`, copied now if need be, and linked to how the guest came
    /// there.
    ///
    /// # Errors
    /// See [`Emitter::copy`](dynasour_emitter::Emitter::copy).
    pub fn arrive(
        &mut self,
        pc: u64,
        code: &dyn Fetch,
        arrival: Arrival,
    ) -> Result<Copied, EmitError> {
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
                let (pc, past_fragments) =
                    self.emitter.copy_exit(link).ok_or(EmitError::Unknown)?;
                context.rip = pc;
                return Ok(Came::On(if past_fragments {
                    Arrival::WithoutProgress
                } else {
                    Arrival::Anyhow
                }));
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
                        return Ok(self.counter_left(exit, policy));
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
                    Some(stub)
                        if self.after_exit(stub.origin, context.rip)
                            == Arrival::WithoutProgress =>
                    {
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

    /// Is the head at `pc` one because it is called?
    pub fn is_function(&self, pc: u64) -> bool {
        self.emitter.is_called(pc)
    }
}
