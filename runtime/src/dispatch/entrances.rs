//! The ways by which guest code in place enters traces: patches at their heads or at the jumps that close
//! their loops ([`crate::changes::patches`]).
//!
//! A patch replaces the first instructions of a head, at least five bytes, by a jump to the head's
//! *entrance*: native code that leads wherever links to the head lead. The displaced instructions
//! are executed there by a block of their own, whenever no trace is.
//!
//! The jump that closes the loop can be made to lead to the entrance instead, if its displacement has
//! 32 bits. Then no instruction is replaced, but the guest's first iteration is its own. That is done
//! where the first instruction at the head is too short to be replaced alone, and the guest stays in
//! the loop; and where no patch can stand at the head, or one was withdrawn.
//!
//! A patch that was taken back because its code was about to change is written again when the
//! runtime leads the thread to the trace, which has found its code unchanged.
//!
//! Data: [`Entrances`], the dispatcher's part. Invariant: patches are written with the exclusive
//! right to change code and with the lock of the fragments, while nothing is being dropped; and
//! before what they lead to is dropped, they are taken back.
//!
//! Example: a trace of the loop at 0x401010 was made, which begins with `mov rax, [rbp-0x18]; add
//! rax, 1`. The eight bytes are displaced; the first five become `jmp <entrance>`.

use super::Dispatcher;
use crate::changes::patches::{self, LEN, NewPatch, Purpose};
use crate::changes::trampolines;
use crate::kernel::process::System;
use crate::memory;
use dynasour_guest::decode::{Decoded, Fetch, Reader};
use dynasour_guest::lift::class::sets_x87_pointer;
use dynasour_tracer::{Path, TraceShape};
use rustc_hash::FxHashMap;

/// The heads of traces at which a thread wants patches.
#[derive(Debug, Default)]
pub(super) struct Entrances {
    /// The head at which a patch is to be written next.
    wanted: Option<u64>,
    /// How often the runtime has led the thread to heads without a patch, since the last patch there.
    arrivals: FxHashMap<u64, u32>,
    /// How often the guest has jumped into the patch at each head.
    traps: FxHashMap<u64, u32>,
    /// The back edges of loops, by their heads.
    back_edges: FxHashMap<u64, BackEdge>,
}

/// The jump with which a recorded path came back to its head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BackEdge {
    pc: u64,
    end: u64,
    /// Was the guest seen to go round often for each time that it came in, if it was observed?
    stays: bool,
}

impl BackEdge {
    /// The back edge of a loop, if it is a direct jump.
    pub fn of(path: &Path, code: &dyn Fetch) -> Option<BackEdge> {
        let last = path.steps.last()?;
        if path.shape != TraceShape::Loop || path.guest.is_some() || last.next != path.head {
            return None;
        }
        let mut reader = Reader::new(code);
        let (mut pc, end) = (last.block.pc, last.block.end);
        loop {
            let Decoded::Inst(inst) = reader.decode(pc) else { return None };
            let next = pc + inst.len() as u64;
            if next >= end {
                let stays = path.runs.is_none_or(|runs| runs.stays());
                let is_jump = inst.is_jmp_near() || inst.is_jcc_near();
                return (next == end && is_jump).then_some(BackEdge { pc, end, stays });
            }
            pc = next;
        }
    }
}

/// The prefix `lock`.
const LOCK: u8 = 0xf0;
/// A patch into which the guest jumps this often is withdrawn (guess: each time costs as much as some
/// thousand instructions; too few withdraw patches that are worth it).
const MOST_TRAPS: u32 = 200;

impl Entrances {
    /// The guest has jumped into the patch at `head`. Is the patch to be withdrawn?
    fn trapped(&mut self, head: u64) -> bool {
        let traps = self.traps.entry(head).or_default();
        *traps = traps.saturating_add(1);
        *traps == MOST_TRAPS
    }

    /// Was the patch at `head` withdrawn?
    fn is_withdrawn(&self, head: u64) -> bool {
        self.traps.get(&head).is_some_and(|traps| *traps >= MOST_TRAPS)
    }

    /// A trace was made of this path.
    pub fn made(&mut self, path: &Path, code: &dyn Fetch) {
        match BackEdge::of(path, code) {
            Some(edge) => self.back_edges.insert(path.head, edge),
            None => self.back_edges.remove(&path.head),
        };
        self.want(path.head);
    }

    /// A patch is to be written again that leads to the trace at `head`.
    pub fn want(&mut self, head: u64) {
        self.arrivals.remove(&head);
        self.wanted = Some(head);
    }

    /// The runtime leads the thread to the trace at `head`, where there is no patch. A patch is
    /// tried ever more seldom: perhaps none can stand there.
    pub fn arrived(&mut self, head: u64) {
        let arrivals = self.arrivals.entry(head).or_default();
        *arrivals = arrivals.saturating_add(1);
        if arrivals.is_power_of_two() {
            self.wanted = Some(head);
        }
    }
}

/// The instructions that a patch at a pc replaces.
struct Displaced {
    own: [u8; LEN],
    /// See [`patches::write`].
    inner: u8,
    /// The end of the last of them.
    end: u64,
}

fn first_byte(pc: u64) -> Option<u8> {
    let mut byte = [0];
    (memory::fetch_code(pc, &mut byte) == 1).then_some(byte[0])
}

/// The instructions at `pc` that a patch would replace; none if they cannot be fetched.
fn displaced(pc: u64, code: &dyn Fetch) -> Option<Displaced> {
    let mut own = [0; LEN];
    if memory::fetch_code(pc, &mut own) != LEN {
        return None;
    }
    if first_byte(pc.wrapping_sub(1)) == Some(LOCK)
        && let Decoded::Inst(_) = Reader::new(code).decode(pc.wrapping_sub(1))
    {
        // The prefix of this instruction, over which other code has jumped.
        return None;
    }
    let mut reader = Reader::new(code);
    let (mut here, mut lengths) = (pc, Vec::new());
    while here < pc + LEN as u64 {
        let Decoded::Inst(inst) = reader.decode(here) else { return None };
        if sets_x87_pointer(inst.code()) {
            // It would note the address of its copy, which code in place can see.
            return None;
        }
        if first_byte(here) == Some(LOCK) {
            // Programs with one thread jump over the prefix (glibc).
            lengths.extend([1, inst.len() - 1]);
        } else {
            lengths.push(inst.len());
        }
        here += inst.len() as u64;
    }
    let inner = patches::inner_boundaries(lengths)?;
    Some(Displaced { own, inner, end: here })
}

/// A patch of the back edge in `pc..end`, which still leads to `head`; none if it cannot have one.
fn back_edge_patch(pc: u64, end: u64, head: u64) -> Option<NewPatch> {
    let mut own = [0; LEN + 1];
    let own = own.get_mut(..(end - pc) as usize)?;
    if memory::fetch_code(pc, own) != own.len() {
        return None;
    }
    NewPatch::of_back_edge(pc, own, head)
}

impl Dispatcher {
    /// Lets guest code in place enter the trace at the wanted head, if a patch can stand there. The
    /// thread is outside.
    pub(super) fn patch_head(&mut self, system: &System) {
        let Some(head) = self.entrances.wanted.take() else { return };
        if !self.machine.is_direct() || patches::enters_trace(head) {
            return;
        }
        if self.race_needs_no_patch(head) {
            return self.entrances.want(head);
        }
        let edge = self.entrances.back_edges.get(&head).copied();
        let is_short =
            displaced(head, &*self.interp.code()).is_none_or(|displaced| displaced.inner != 0);
        let patched = edge
            .is_some_and(|edge| edge.stays && is_short && self.patch_edge(head, edge))
            || !self.entrances.is_withdrawn(head) && self.patch(system, head, true)
            || edge.is_some_and(|edge| self.patch_edge(head, edge));
        if patched {
            self.entrances.arrivals.remove(&head);
        }
    }

    /// Lets the back edge of the loop at `head` lead to the trace there. False if it cannot. The thread
    /// is outside.
    fn patch_edge(&self, head: u64, edge: BackEdge) -> bool {
        let BackEdge { pc, end, .. } = edge;
        let code = self.interp.code();
        // No other thread is about to change this code, or to drop what was made from it.
        let _exclusive = self.machine.pages.exclusive();
        let pages = &self.machine.pages;
        if !patches::may_stand(pages, &(pc..end)) || patches::are_in(&(pc..end)) {
            return false;
        }
        let Some(patch) = back_edge_patch(pc, end, head) else { return false };
        let Some(mut fragments) = self.machine.fragments() else { return false };
        if fragments.first_version(head).is_none() {
            return false;
        }
        let Some(to) = fragments.entrance_beside(head, &*code) else { return false };
        let written = patches::write(pc, NewPatch { to, ..patch });
        if written {
            fragments.stats.patches += 1;
            fragments.stats.back_edges += 1;
        }
        written
    }

    /// Lets guest code in place come to whatever links to `pc` lead to; with `to_trace`, only if that
    /// is a trace. False if no patch can stand there. The thread is outside.
    pub(super) fn patch(&self, system: &System, pc: u64, to_trace: bool) -> bool {
        let code = self.interp.code();
        let Some(Displaced { inner, .. }) = displaced(pc, &*code) else { return false };
        let trampoline = match inner {
            0 => None,
            _ => {
                let Some(at) = reserve_trampoline(system, pc, inner) else { return false };
                Some(at)
            }
        };
        // No other thread is about to change this code, or to drop what was made from it.
        let _exclusive = self.machine.pages.exclusive();
        let now = displaced(pc, &*code).filter(|now| now.inner == inner);
        let Some(Displaced { own, end, .. }) = now else { return false };
        if !patches::may_stand(&self.machine.pages, &(pc..end)) || patches::are_in(&(pc..end)) {
            return false;
        }
        let Some(mut fragments) = self.machine.fragments() else { return false };
        if to_trace && fragments.first_version(pc).is_none() {
            return false;
        }
        let Some(entrance) = fragments.entrance(pc, end, &*code) else { return false };
        let to = match trampoline {
            None => entrance,
            Some(at) if trampolines::write(at, pc, entrance) => at,
            Some(_) => return false,
        };
        let patch = NewPatch { purpose: Purpose::Trace, end, own, inner, to };
        let written = patches::write(pc, patch);
        if written {
            fragments.stats.patches += 1;
        }
        written
    }

    /// Writes a patch again that was [taken out](patches::take_out), unless the guest's code has
    /// changed. What it leads to has not been dropped. The thread is outside, and the caller has the
    /// exclusive right to change code.
    pub(super) fn patch_again(&self, pc: u64, patch: NewPatch) -> bool {
        let is_same = match patch.purpose {
            Purpose::BackEdge(head) => back_edge_patch(pc, patch.end, head)
                .is_some_and(|now| NewPatch { to: patch.to, ..now } == patch),
            Purpose::Trace | Purpose::Call => {
                displaced(pc, &*self.interp.code()).is_some_and(|now| {
                    (now.own, now.inner, now.end) == (patch.own, patch.inner, patch.end)
                })
            }
        };
        is_same
            && patches::may_stand(&self.machine.pages, &(pc..patch.end))
            && patches::write(pc, patch)
    }
}

impl Dispatcher {
    /// The guest has jumped into the patch at `head`, which is withdrawn if that happens often. The
    /// thread is outside.
    pub(super) fn jumped_into_patch(&mut self, head: u64) {
        if patches::leads_to_trace(head) && self.entrances.trapped(head) {
            let _exclusive = self.machine.pages.exclusive();
            patches::take_back(&(head..head + 1));
            // Perhaps its back edge can have one.
            self.entrances.want(head);
        }
    }
}

/// Reserves a trampoline; the guest's address space does not have its page any more.
pub(super) fn reserve_trampoline(system: &System, head: u64, inner: u8) -> Option<u64> {
    let mut memory = system.process.memory();
    trampolines::reserve(head, inner, |page| memory.protect(page))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_that_traps_often_is_withdrawn_once() {
        let mut entrances = Entrances::default();
        let withdrawn = (0..2 * MOST_TRAPS).filter(|_| entrances.trapped(0x1000)).count();
        assert_eq!(withdrawn, 1);
        assert!(entrances.is_withdrawn(0x1000) && !entrances.is_withdrawn(0x2000));
    }

    #[test]
    fn patches_are_tried_ever_more_seldom() {
        let mut entrances = Entrances::default();
        let mut tried = |n: u32| {
            (1..=n)
                .filter(|_| {
                    entrances.arrived(0x1000);
                    entrances.wanted.take().is_some()
                })
                .count()
        };
        assert_eq!(tried(4), 3, "at 1, 2 and 4");
        assert_eq!(tried(60), 4, "at 8, 16, 32 and 64");
        entrances.want(0x1000);
        assert_eq!(entrances.wanted, Some(0x1000));
        entrances.wanted = None;
        entrances.arrived(0x1000);
        assert_eq!(entrances.wanted, Some(0x1000), "a new trace, a new try");
    }
}
