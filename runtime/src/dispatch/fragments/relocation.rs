//! Moves the emitter's memory out of a range that the guest wants to map.
//!
//! The code cache and its tables lie at low addresses, which some programs ask for at fixed
//! addresses (docs/design.md, "Running a guest"). Then all native code is dropped as for a flush,
//! and a new emitter is made, with memory elsewhere. If that is not at low addresses, its code uses
//! the instruction forms that work at any address.
//!
//! Data: none of its own; it replaces the emitter of [`Fragments`]. The caller holds the lock of
//! the fragments. Invariant: every thread is outside the cache when the emitter is replaced.
//!
//! Example: the guest maps 16 MiB at 0x2000_0000, where the code cache lies. `is_in` says
//! yes; the caller retires everything and waits; `move_out_of` returns the old and the new ranges,
//! and the guest's mapping takes the old one.

use super::{FragmentError, Fragments};
use crate::kernel::process::Moved;
use dynasour_emitter::{Config, EmitError, Emitter};
use dynasour_guest::space::{self, Reservation, USER_END};
use std::ops::Range;

/// Bytes below which a code cache is not made smaller when there is little memory (guess: a smaller
/// one is full too often).
const SMALLEST_CACHE: usize = 1 << 20;

/// An emitter as `config` says. If there is not enough memory (`ulimit -v`), its cache is smaller.
///
/// # Errors
/// There is no memory for a cache of [`SMALLEST_CACHE`], or the processor lacks a feature.
pub fn emitter(mut config: Config) -> Result<Emitter, EmitError> {
    loop {
        match Emitter::new(config) {
            Err(_) if config.cache_size > SMALLEST_CACHE => config.cache_size /= 2,
            made => return made,
        }
    }
}

impl Fragments {
    /// Is memory of the emitter's in `range`?
    pub fn is_in(&self, range: &Range<u64>) -> bool {
        let memory = self.emitter.memory();
        memory.iter().any(|own| own.start < range.end && range.start < own.end)
    }

    /// Replaces the emitter by a new one with no memory in `range`. The caller calls this instead
    /// of [`Fragments::clear`], after [`Fragments::retire`], when every thread has been outside the
    /// cache.
    ///
    /// # Errors
    /// There is no memory, for code or for what a counting run counts. Then everything is as after
    /// [`Fragments::clear`].
    pub fn move_out_of(&mut self, range: &Range<u64>) -> Result<Moved, FragmentError> {
        let cache = self.cache();
        let cache_size = (cache.end - cache.start) as usize;
        let indirect = self.emitter.indirect();
        let (rates, entry_check) = (indirect.rates().is_some(), Some(indirect.entry_check()));
        let returns = self.emitter.wanted_returns();
        let count = self.emitter.is_counting();
        let names_transfers = self.emitter.will_name_transfers();
        let is_watched = self.emitter.is_watched();
        let fresh = {
            // The new emitter must not take memory in `range`.
            let _kept_free = free_parts(range);
            emitter(Config {
                cache_size,
                rates,
                returns,
                entry_check,
                count,
                names_transfers,
                is_watched,
                // Direct execution ends before its addresses are given up.
                way_out: None,
            })
        };
        let fresh = fresh.map_err(FragmentError::from).and_then(|fresh| {
            if fresh.is_counting() == count { Ok(fresh) } else { Err(FragmentError::Counters) }
        });
        let mut fresh = match fresh {
            Ok(fresh) => fresh,
            Err(error) => {
                self.clear();
                return Err(error);
            }
        };
        self.close_ledger();
        fresh.continue_counts(&self.emitter);
        self.stats = self.statistics();
        let from = self.emitter.memory();
        *self.emitter = fresh;
        self.emitter.count_heads(self.heads);
        self.generation += 1;
        self.retired = false;
        Ok(Moved { from, to: self.emitter.memory() })
    }
}

/// Reserves all memory in `range` that is not mapped, until the result is dropped.
fn free_parts(range: &Range<u64>) -> Vec<Reservation> {
    let mut parts = Vec::new();
    let mut start = range.start;
    let end = range.end.min(USER_END);
    // If /proc cannot be read, everything looks unmapped. Then the new emitter may get memory in
    // `range` again.
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
