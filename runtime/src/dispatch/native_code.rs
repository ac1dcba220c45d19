//! Where the fragments of the process are, and when they are made.
//!
//! Every tier but `interp` and `direct` makes its code cache before the guest's first instruction.
//! Under `direct` most programs end before anything is hot, and the cache's tables cost a third of
//! their start. So there they are made when a thread is sampled for the first time, or when direct
//! execution ends.
//!
//! Data: [`NativeCode`], in the [`Machine`](super::Machine). Until the fragments exist it keeps
//! what they will have to know ([`Before`]), and reserves the addresses at which the cache should
//! lie.
//!
//! Invariant: the fragments are made once, and never go away. They are made with the lock of
//! [`Before`] held, which a fork takes, too: a child never finds them half made. After
//! [`NativeCode::make`] the caller tells the guest's view of the address space about their memory.
//!
//! Any thread may call. [`NativeCode::get`] is async-signal-safe as far as its lock is.
//!
//! Example: `true` under `direct` exits without a sample: nothing was ever made. `gzip` is sampled
//! after 50 ms: its thread makes the fragments, interprets some edges and records a trace.

use super::fragments::{FragmentError, Fragments};
use crate::changes::{CodePages, schedule};
use crate::config::{CompileThreads, RunConfig};
use crate::kernel::process::{Moved, helper};
use crate::observe::watch::{WatchError, Watchers};
use crate::sync::lock;
use dynasour_emitter::cache;
use dynasour_guest::space::Reservation;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// The fragments of the process, made at once, at first need or never.
#[derive(Default)]
pub struct NativeCode {
    made: OnceLock<Mutex<Fragments>>,
    before: Mutex<Before>,
}

/// What is kept for fragments that do not exist yet.
#[derive(Default)]
struct Before {
    /// Something else than the guest's thread may change the memory that it reads.
    private_memory_lost: bool,
    /// Indirect transfers have to name themselves.
    names_transfers: bool,
    /// Where the code cache should lie.
    place: Option<Reservation>,
    /// The tools that will be told of new code.
    watchers: Option<Watchers>,
}

impl NativeCode {
    /// Keeps the addresses free at which the cache should lie, for fragments that are made later.
    pub fn reserve(&self, config: &RunConfig) {
        let wanted = cache::low_range(config.cache_size);
        // Where they are taken, the cache will lie elsewhere.
        lock(&self.before).place = Reservation::at(wanted.start, wanted.end - wanted.start).ok();
    }

    /// Makes the fragments. Returns the addresses that were kept for them and those that they have
    /// taken; none if they existed.
    ///
    /// # Errors
    /// There is no memory, or the processor lacks a feature. Then nothing has changed, and a later
    /// call may succeed.
    pub fn make(
        &self,
        config: &RunConfig,
        pages: &Arc<CodePages>,
    ) -> Result<Option<Moved>, FragmentError> {
        let mut before = lock(&self.before);
        if self.made.get().is_some() {
            return Ok(None);
        }
        // Unmapped. If the guest maps something there before the cache is, the cache lies elsewhere.
        let from = before.place.take().map(|place| place.start()..place.end());
        let made = Fragments::new(config, pages.clone(), before.names_transfers);
        let mut fragments = made.inspect_err(|_| {
            let again = |range: &Range<u64>| Reservation::at(range.start, range.end - range.start);
            before.place = from.as_ref().and_then(|range| again(range).ok());
        })?;
        if before.private_memory_lost {
            fragments.lose_private_memory();
        }
        fragments.watch(before.watchers.take());
        let mut moved = Moved { from: from.into_iter().collect(), to: fragments.memory() };
        if config.compile_threads() != CompileThreads::None {
            moved.to.extend(helper::reserve());
        }
        // Only this function sets it, under the lock.
        let _ = self.made.set(Mutex::new(fragments));
        Ok(Some(moved))
    }

    /// Tells these tools of the code that is made from now on. The fragments do not exist yet.
    pub fn watch(&self, watchers: Option<Watchers>) {
        lock(&self.before).watchers = watchers;
    }

    /// See [`Fragments::end_watch`].
    ///
    /// # Errors
    /// The file of `--jitdump` could not be written.
    pub fn end_watch(&self) -> Result<(), WatchError> {
        lock(&self.before).watchers.as_mut().map_or(Ok(()), Watchers::end)?;
        self.get().map_or(Ok(()), |mut fragments| fragments.end_watch())
    }

    /// In a forked child, before it makes fragments or resets them.
    pub fn after_fork_child(&self) {
        lock(&self.before).watchers.iter_mut().for_each(Watchers::stop_jitdump);
    }

    /// The fragments, locked; none if they do not exist.
    pub fn get(&self) -> Option<MutexGuard<'_, Fragments>> {
        self.made.get().map(schedule::lock)
    }

    /// Do the fragments exist?
    pub fn is_made(&self) -> bool {
        self.made.get().is_some()
    }

    /// If the addresses reserved for the cache meet `range`, gives them up and returns them.
    pub fn give_way(&self, range: &Range<u64>) -> Option<Range<u64>> {
        let mut before = lock(&self.before);
        let meets = |place: &Reservation| place.start() < range.end && range.start < place.end();
        let place = before.place.take_if(|place| meets(place))?;
        Some(place.start()..place.end())
    }

    /// From now on traces may not assume `private_memory`. Must existing fragments be dropped?
    pub fn lose_private_memory(&self) -> bool {
        lock(&self.before).private_memory_lost = true;
        self.get().is_some_and(|mut fragments| fragments.lose_private_memory())
    }

    /// From now on indirect transfers have to name themselves. Must existing code be dropped?
    pub fn name_transfers(&self) -> bool {
        lock(&self.before).names_transfers = true;
        self.get().is_some_and(|mut fragments| fragments.name_transfers())
    }

    /// Calls `f` with both locks held.
    pub fn while_locked<R>(&self, f: impl FnOnce() -> R) -> R {
        let _before = lock(&self.before);
        let _fragments = self.get();
        f()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Tier;
    use crate::dispatch::interleavings;
    use crate::testing::in_child;

    fn config() -> RunConfig {
        interleavings::config(Tier::Direct)
    }

    #[test]
    fn what_was_said_before_holds_for_fragments_made_later() {
        let (native, pages) = (NativeCode::default(), Arc::default());
        assert!(!native.name_transfers() && !native.lose_private_memory());
        assert!(native.get().is_none() && !native.is_made());
        let moved = native.make(&config(), &pages).expect("memory").expect("made now");
        assert!(moved.to.contains(&native.get().expect("made").cache()));
        assert!(!native.name_transfers(), "they do already");
        assert_eq!(native.make(&config(), &pages).expect("made before"), None);
    }

    #[test]
    fn the_place_is_kept_until_somebody_wants_it() {
        let status = in_child(|| {
            let native = NativeCode::default();
            native.reserve(&config());
            let place = cache::low_range(config().cache_size);
            assert!(Reservation::at(place.start, 4096).is_err(), "it is taken");
            assert_eq!(native.give_way(&(place.end..place.end + 4096)), None);
            assert_eq!(native.give_way(&(place.start + 4096..place.start + 8192)), Some(place));
            assert_eq!(native.give_way(&(0..u64::MAX)), None);
            native.reserve(&config());
            let moved = native.make(&config(), &Arc::default()).expect("memory").expect("made now");
            assert_eq!(moved.from, [cache::low_range(config().cache_size)]);
            let cache = native.get().expect("made").cache();
            assert_eq!(cache.start, cache::low_range(config().cache_size).start);
            0
        });
        assert_eq!(status, 0);
    }
}
