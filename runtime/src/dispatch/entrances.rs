//! The ways by which guest code in place enters traces: patches at their heads
//! ([`crate::changes::patches`]).
//!
//! A patch replaces the first instructions of a head, at least five bytes, by a jump to the head's
//! *entrance*: native code that leads wherever links to the head lead. The displaced instructions
//! are executed there by a block of their own, whenever no trace is.
//!
//! Data: none of its own. Invariant: patches are written with the exclusive right to change code and
//! with the lock of the fragments, while nothing is being dropped; and before what they lead to is
//! dropped, they are taken back.
//!
//! Example: a trace of the loop at 0x401010 was made, which begins with `mov rax, [rbp-0x18]; add
//! rax, 1`. The eight bytes are displaced; the first five become `jmp <entrance>`.

use super::Dispatcher;
use crate::changes::patches::{self, LEN, Purpose};
use crate::changes::trampolines;
use crate::kernel::process::System;
use crate::memory;
use dynasour_guest::decode::{Decoded, Fetch, Reader};

/// The instructions that a patch at a pc replaces.
struct Displaced {
    own: [u8; LEN],
    /// See [`patches::write`].
    inner: u8,
    /// The end of the last of them.
    end: u64,
}

/// The instructions at `pc` that a patch would replace; none if they cannot be fetched.
fn displaced(pc: u64, code: &dyn Fetch) -> Option<Displaced> {
    let mut own = [0; LEN];
    if memory::fetch_code(pc, &mut own) != LEN {
        return None;
    }
    let mut reader = Reader::new(code);
    let (mut here, mut lengths) = (pc, Vec::new());
    while here < pc + LEN as u64 {
        let Decoded::Inst(inst) = reader.decode(here) else { return None };
        lengths.push(inst.len());
        here += inst.len() as u64;
    }
    let inner = patches::inner_boundaries(lengths)?;
    Some(Displaced { own, inner, end: here })
}

impl Dispatcher {
    /// A trace starts at `head`, the last one that was made: lets guest code in place enter it, if
    /// a patch can stand there. The thread is outside.
    pub(super) fn patch_head(&mut self, system: &System) {
        let Some(head) = self.unpatched.take() else { return };
        if !self.machine.is_direct() || patches::leads_to_trace(head) {
            return;
        }
        let code = self.interp.code();
        let Some(Displaced { inner, .. }) = displaced(head, &*code) else { return };
        let trampoline = match inner {
            0 => None,
            _ => {
                let Some(at) = reserve_trampoline(system, head, inner) else { return };
                Some(at)
            }
        };
        // No other thread is about to change this code, or to drop what was made from it.
        let _exclusive = self.machine.pages.exclusive();
        let now = displaced(head, &*code).filter(|now| now.inner == inner);
        let Some(Displaced { own, end, .. }) = now else { return };
        if !patches::may_stand(&self.machine.pages, &(head..end)) || patches::are_in(&(head..end)) {
            return;
        }
        let Some(mut fragments) = self.machine.fragments() else { return };
        let Some(entrance) = fragments.entrance(head, end, &*code) else { return };
        let to = match trampoline {
            None => entrance,
            Some(at) if trampolines::write(at, head, entrance) => at,
            Some(_) => return,
        };
        if patches::write(head, own, inner, to, Purpose::Trace) {
            fragments.stats.patches += 1;
        }
    }
}

/// Reserves a trampoline; the guest's address space does not have its page any more.
fn reserve_trampoline(system: &System, head: u64, inner: u8) -> Option<u64> {
    let mut memory = system.process.memory();
    trampolines::reserve(head, inner, |page| memory.protect(page))
}
