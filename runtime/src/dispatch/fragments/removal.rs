//! Code that has changed or gone, and what was made from it.
//!
//! Fragments rest ([`super::lives`]), blocks are removed: nothing leads there any more,
//! and whoever is inside comes out. When every thread has been outside since, what the blocks took
//! is used again. A thread that runs something else natively is told to come out, too
//! ([`super::super::peers`]), since where it is nobody knows.
//!
//! What rests may be woken by one thread while another is still about to make the change that it
//! rests for: a page that is about to be opened is known not to be watched ([`crate::changes`]),
//! and calls that change mappings say so once more when they are done.

use super::links::exits::Event;
use super::{FragmentId, Fragments, Role};
use dynasour_emitter::blocks::Doomed;
use std::ops::Range;

/// Bytes of code that is never entered again, at which everything is dropped to get them back.
const MAX_GARBAGE: u64 = 4 << 20;
/// The same, of blocks that are gone and for whose memory there is no use yet.
const MAX_UNUSED: usize = 8 << 20;

/// What a change has taken away. The caller waits until every thread has been outside, and then
/// says [`Fragments::finish`].
#[derive(Debug)]
pub enum Touched {
    /// Everything.
    All,
    /// What was made from what has changed; threads must be told to come out.
    Some(Doomed),
    /// Somebody else is at dropping everything.
    AlreadyRetired,
}

impl Fragments {
    /// Code in `range` has changed or gone. None: nothing was made from it.
    pub fn touch(&mut self, range: &Range<u64>) -> Option<Touched> {
        // What is being compiled now may be made from it.
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
            self.emitter.put_to_rest(&ids);
            self.stats.rested += ids.len() as u64;
        }
        let doomed = self.emitter.remove_copied(range);
        self.stats.removed_blocks += doomed.len() as u64;
        self.links_changed();
        Some(Touched::Some(doomed))
    }

    /// Every thread has been outside since.
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
