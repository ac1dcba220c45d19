//! Making room: the code cache and its tables lie at low addresses, which programs with a layout of
//! their own ask for. Then everything of the emitter's goes elsewhere (docs/design.md, "Running a
//! guest"): all native code is dropped as for a flush, and an emitter is made anew, whose code
//! takes the general forms if it is not low any more.

use super::{FragmentError, Fragments};
use crate::kernel::process::Moved;
use dynasour_emitter::{Config, EmitError, Emitter};
use dynasour_guest::space::{self, Reservation, USER_END};
use std::ops::Range;

/// A code cache is not made smaller than this for want of memory.
const SMALLEST_CACHE: usize = 1 << 20;

/// An emitter of this kind, or one with a smaller cache if the process may not have so much memory
/// (`ulimit -v`).
///
/// # Errors
/// There is not even memory for a small one, or the processor lacks something.
pub fn emitter(mut config: Config) -> Result<Emitter, EmitError> {
    loop {
        match Emitter::new(config) {
            Err(_) if config.cache_size > SMALLEST_CACHE => config.cache_size /= 2,
            made => return made,
        }
    }
}

impl Fragments {
    /// Is something of the emitter's in `range` that can be elsewhere? Not where counts would be
    /// lost.
    pub fn can_move_out_of(&self, range: &Range<u64>) -> bool {
        !self.emitter.is_counting()
            && self
                .emitter
                .memory()
                .iter()
                .any(|own| own.start < range.end && range.start < own.end)
    }

    /// Goes out of `range`, in place of [`Fragments::clear`]: every thread has been outside since
    /// [`Fragments::retire`].
    ///
    /// # Errors
    /// There is no memory; then everything is as after [`Fragments::clear`].
    pub fn move_out_of(&mut self, range: &Range<u64>) -> Result<Moved, FragmentError> {
        let cache = self.cache();
        let cache_size = (cache.end - cache.start) as usize;
        let indirect = self.emitter.indirect();
        let (rates, entry_check) = (indirect.rates().is_some(), Some(indirect.entry_check()));
        let returns = self.emitter.wanted_returns();
        let names_transfers = self.emitter.will_name_transfers();
        let fresh = {
            // The new one must not go where the guest wants to go.
            let _kept_free = free_parts(range);
            emitter(Config {
                cache_size,
                rates,
                returns,
                entry_check,
                count: false,
                names_transfers,
            })
        };
        let fresh = match fresh {
            Ok(fresh) => fresh,
            Err(error) => {
                self.clear();
                return Err(error.into());
            }
        };
        self.stats = self.statistics();
        let from = self.emitter.memory();
        *self.emitter = fresh;
        self.emitter.count_heads(self.heads);
        self.generation += 1;
        self.retired = false;
        Ok(Moved { from, to: self.emitter.memory() })
    }
}

/// Holds what nobody has mapped in `range`.
fn free_parts(range: &Range<u64>) -> Vec<Reservation> {
    let mut parts = Vec::new();
    let mut start = range.start;
    let end = range.end.min(USER_END);
    // Where /proc cannot be read nothing is held, and the place that is found may be in the way
    // again.
    let entries = space::maps().unwrap_or_default();
    for entry in
        entries.iter().filter(|entry| entry.range.end > range.start && entry.range.start < end)
    {
        if start < entry.range.start {
            parts.extend(Reservation::at(start, entry.range.start - start));
        }
        start = start.max(entry.range.end);
    }
    if start < end {
        parts.extend(Reservation::at(start, end - start));
    }
    parts
}
