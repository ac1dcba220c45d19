//! Guest code has changed: takes away the fragments and blocks that were made from it.
//!
//! Fragments *rest* ([`super::lives`]) and blocks are removed. In both cases nothing leads to them
//! any more, and links out of them lead to the runtime, so that threads inside come out. When every
//! thread has been outside the cache since, the memory of the blocks is used again. A thread that
//! runs other native code is made to come out, too ([`super::super::peers`]), since the others
//! cannot tell which code it is in.
//!
//! Data: none of its own. The caller holds the lock of the fragments in [`Fragments::touch`] and
//! [`Fragments::finish`], and waits for the other threads between them, without the lock.
//!
//! Invariant: nothing that rests is woken while its code is about to change, although another
//! thread may want its pc then. A page about to be opened for stores is announced as changing
//! ([`crate::changes`]), which [`super::lives`] checks. System calls that change mappings drop the
//! code of their ranges once more when they are done.
//!
//! Example: the guest stores to a page with the fragment 7 and the block at 0x1080. `touch` takes 7
//! out of its region and removes the block. The caller waits for the other threads; `finish` gives
//! the block's memory back. 7 keeps its memory, since it may be woken.

use super::links::exits::Event;
use super::{FragmentId, Fragments, Role};
use crate::observe::events::Why;
use dynasour_emitter::blocks::Doomed;
use std::ops::Range;

/// Bytes of code of dropped fragments at which everything is dropped, which gets the memory back
/// (guess: too low flushes often, too high leaves less of the cache for code that is used).
const MAX_GARBAGE: u64 = 4 << 20;
/// Bytes of removed blocks that no new block has taken, at which everything is dropped (guess, as
/// for [`MAX_GARBAGE`]).
const MAX_UNUSED: usize = 8 << 20;

/// What [`Fragments::touch`] has taken away. The caller waits until every thread has been outside
/// the cache, and then calls [`Fragments::finish`].
#[derive(Debug)]
pub enum Touched {
    /// Everything.
    All,
    /// The fragments and blocks that were made from the changed code. Threads must be called out.
    Some(Doomed),
    /// Nothing: another thread is dropping everything already.
    AlreadyRetired,
}

impl Fragments {
    /// Code in `range` has changed or was unmapped: takes away what was made from it; none if
    /// nothing was.
    pub fn touch(&mut self, range: &Range<u64>) -> Option<Touched> {
        // A trace that is being compiled may be made from this code: its plan becomes stale.
        self.generation += 1;
        if self.retired {
            return Some(Touched::AlreadyRetired);
        }
        if !self.is_made_from(range) {
            return None;
        }
        if self.lives.garbage() > MAX_GARBAGE || self.emitter.copied_garbage() > MAX_UNUSED {
            return Some(if self.retire() { Touched::All } else { Touched::AlreadyRetired });
        }
        let touched = self.lives.touch(range);
        for &(id, role) in &touched {
            match role {
                Role::Region(pc) => self.leave_region(pc, id),
                Role::SideTrace(exit) => {
                    self.exits.change(exit, Event::Rest);
                }
            }
        }
        if !touched.is_empty() {
            let ids: Vec<FragmentId> = touched.into_iter().map(|(id, _)| id).collect();
            self.tell_invalidated(&ids, Why::CodeTouched);
            self.emitter.put_to_rest(&ids);
            self.stats.rested += ids.len() as u64;
        }
        let doomed = self.emitter.remove_copied(range);
        self.stats.removed_blocks += doomed.len() as u64;
        self.links_changed();
        Some(Touched::Some(doomed))
    }

    /// Frees what was taken away: every thread has been outside the cache since.
    pub fn finish(&mut self, touched: Touched) {
        match touched {
            Touched::All => self.clear(),
            Touched::Some(doomed) => self.emitter.reclaim(doomed),
            Touched::AlreadyRetired => {}
        }
        self.links_changed();
    }

    /// Was some fragment or block made from code in this range?
    pub fn is_made_from(&self, range: &Range<u64>) -> bool {
        self.emitter.is_copied_from(range) || !self.lives.made_from(range).is_empty()
    }
}
