//! What all guest threads of a process share on the translator's side: configuration, fragments,
//! the list of threads, the code cache's addresses.
//!
//! Data: one [`Machine`] for the process. It is never freed, so that signal handlers can use it.
//! Each part has its own lock, in the order of `crate::sync`; [`Machine::with_locks`] takes them
//! all for a fork.
//!
//! Invariant: code is taken away in three steps. First it is made unreachable, under the lock of
//! the fragments. Then the caller waits, without a lock, until every other thread has come out of
//! it ([`super::peers`]). Then its memory is used again, under the lock. So the functions that take
//! code away ([`Machine::flush`], [`Machine::invalidate`], [`Machine::drop_all`],
//! [`Machine::make_room`]) are called by a thread that is outside and holds no lock that another
//! thread needs to come out.
//!
//! The functions for signal handlers ([`fragment_fault`], [`signal_accepted`]) take the lock of the
//! fragments only if the interrupted instruction is in the code cache: there no thread holds it.
//!
//! Example: a store changes page 1. `invalidate(0x1000..0x2000)` posts the range to all other
//! threads, makes the fragments of the page rest and removes its blocks, waits until the other
//! threads have left the cache, and gives the blocks' memory back.

use super::call_sites::CallSites;
use super::footprint::Footprint;
use super::fragments::{FragmentError, Fragments, SamplePlace, Touched};
use super::native_code::NativeCode;
use super::peers::{Peer, Peers};
use super::{Dispatcher, IdleDispatcher};
use crate::changes::CodePages;
use crate::changes::patches;
use crate::changes::trampolines;
use crate::config::{RunConfig, Sampling, Stage, Tier};
use crate::kernel::entry::call_stubs;
use crate::kernel::process::Moved;
use crate::observe::attempts::Places;
use crate::observe::census::{self, Census};
use crate::observe::linker;
use crate::observe::profile::sampling::Sample;
use crate::observe::profile::timeline::Timeline;
use crate::observe::profile::{self, Phase};
use crate::observe::stats::Stats;
use crate::observe::watch::{WatchError, Watchers};
use crate::sync::lock;
use dynasour_emitter::Diversion;
use dynasour_guest::ThreadContext;
use dynasour_guest::space::PAGE;
use dynasour_guest::symbols::Symbols;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// The machine, for signal handlers; null before [`Machine::new`].
static MACHINE: AtomicPtr<Machine> = AtomicPtr::new(std::ptr::null_mut());

/// What all guest threads of a process share; see the module.
pub struct Machine {
    /// What the user asked for.
    pub config: RunConfig,
    /// The system calls of guest code in place.
    pub call_sites: CallSites,
    /// Returns the range of the code that is never traced (the vDSO).
    pub untraced: fn() -> Range<u64>,
    /// What is known of the pages of guest code.
    pub pages: Arc<CodePages>,
    /// The guest's threads, and those of idle dispatchers.
    pub peers: Peers,
    /// The pages of guest code that a thread has read.
    pub footprint: Footprint,
    /// Dispatchers of threads that have ended.
    idle: Mutex<Vec<IdleDispatcher>>,
    /// The fragments. There are none when everything is interpreted, and under `direct` before
    /// anything is hot.
    native: NativeCode,
    /// The addresses of the code cache, [`packed`], for handlers that may not take a lock.
    cache: AtomicU64,
    /// Does guest code run in place?
    direct: AtomicBool,
    /// Has a trace ever been made?
    traced: AtomicBool,
}

impl Machine {
    /// Sets up what `config` asks for.
    ///
    /// # Errors
    /// The code cache could not be made.
    pub fn new(
        config: &RunConfig,
        untraced: fn() -> Range<u64>,
        pages: Arc<CodePages>,
    ) -> Result<&'static Machine, FragmentError> {
        let machine = Box::leak(Box::new(Machine {
            config: config.clone(),
            call_sites: CallSites::default(),
            untraced,
            pages,
            peers: Peers::default(),
            footprint: Footprint::default(),
            idle: Mutex::new(Vec::new()),
            cache: AtomicU64::new(0),
            native: NativeCode::default(),
            direct: AtomicBool::new(config.tier == Tier::Direct),
            traced: AtomicBool::new(false),
        }));
        machine.native.watch(Watchers::start(config)?);
        match config.tier {
            Tier::Interp => {}
            Tier::Direct if config.count.is_none() => machine.native.reserve(config),
            Tier::Dynamo | Tier::Copy | Tier::Full | Tier::Direct => {
                // All memory of the host's is protected before the guest starts.
                let _ = machine.make_fragments()?;
            }
        }
        if machine.is_direct() {
            machine.peers.set_in_place();
        }
        MACHINE.store(machine, Ordering::Release);
        Ok(machine)
    }

    /// The fragments, locked; none if they do not exist.
    pub fn fragments(&self) -> Option<MutexGuard<'_, Fragments>> {
        self.native.get()
    }

    /// Makes the fragments. Returns where they have taken memory; none if they existed. The caller
    /// is outside and holds no lock.
    ///
    /// # Errors
    /// There is no memory.
    pub fn make_fragments(&self) -> Result<Option<Moved>, FragmentError> {
        let moved = self.native.make(&self.config, &self.pages)?;
        if moved.is_some()
            && let Some(fragments) = self.fragments()
        {
            self.cache.store(packed(&fragments.cache()), Ordering::Release);
        }
        Ok(moved)
    }

    /// From now on traces may not assume `private_memory`. Must existing fragments be dropped?
    pub fn lose_private_memory(&self) -> bool {
        self.native.lose_private_memory()
    }

    /// From now on indirect transfers have to name themselves. Must existing code be dropped?
    pub fn name_transfers(&self) -> bool {
        self.native.name_transfers()
    }

    /// The statistics so far, of all threads.
    pub fn stats(&self) -> Stats {
        let mut stats = self.fragments().map(|f| f.statistics()).unwrap_or_default();
        let mut ticks = [0; Phase::COUNTED.len()];
        let (mut samples, mut over_time) = (Vec::new(), Vec::new());
        self.peers.for_each(|peer| {
            for (n, (phase, _)) in Phase::COUNTED.iter().enumerate() {
                ticks[n] += peer.clock.spent(*phase);
            }
            peer.for_each_sample(|sample| samples.push(sample));
            over_time.extend(peer.clock.over_time());
            stats.syscalls += peer.syscalls.load(Ordering::Relaxed);
            stats.guest_samples += peer.sampled[0].load(Ordering::Relaxed);
            stats.event_samples += peer.sampled[1].load(Ordering::Relaxed);
            stats.blocks += peer.blocks.load(Ordering::Relaxed);
            stats.blacklisted += peer.blacklisted.load(Ordering::Relaxed);
        });
        if profile::is_enabled() {
            let time = |n: usize| profile::time(ticks[n]).as_nanos() as u64;
            stats.time_nanoseconds =
                (0..ticks.len()).map(|n| (Phase::COUNTED[n].1, time(n))).collect();
            let mut timeline = profile::has_timeline()
                .then(|| Timeline::of(over_time, |ticks| profile::time(ticks).as_nanos() as u64));
            let mut places = Places { all: samples.len() as u64, ..Places::default() };
            if let Some(fragments) = self.fragments() {
                // In place, samples outside the cache are of guest code, or of our own.
                let own = if self.is_direct() { census::own_code() } else { Vec::new() };
                let in_place = |pc: u64| self.is_direct() && !own.iter().any(|r| r.contains(&pc));
                for Sample { pc, time } in samples {
                    let part = fragments.part_of(pc);
                    if let Some(part) = part {
                        *stats.native_samples.entry(part).or_default() += 1;
                    }
                    let part = part.or_else(|| in_place(pc).then_some("in guest code"));
                    if let (Some(timeline), Some(part), Some(time)) = (&mut timeline, part, time) {
                        timeline.sampled(part, profile::since_start(time));
                    }
                    let (map, pc) = match fragments.place_of(pc) {
                        Some(SamplePlace::Trace(head)) => {
                            stats.linker_samples += u64::from(linker::has(head));
                            (&mut places.traces, head)
                        }
                        Some(SamplePlace::Block(pc)) => (&mut places.code, pc),
                        None => (&mut places.code, pc),
                    };
                    *map.entry(pc).or_default() += 1;
                }
            }
            stats.timeline = timeline;
            if !stats.attempts.is_empty() {
                let symbols = Symbols::read(census::images().into_iter().map(Into::into));
                stats.heads = stats.attempts.list(&places, &symbols);
            }
        }
        stats
    }

    /// What a counting run (`run --count`) has counted so far; none in other runs.
    pub fn census(&self) -> Option<Census> {
        self.config.count.as_ref()?;
        let (fragments, complete) = match self.fragments() {
            Some(mut fragments) => fragments.counted()?,
            None => (Vec::new(), true),
        };
        let stats = self.stats();
        let mut threads = 0;
        self.peers.for_each(|_| threads += 1);
        let text = |s: &std::ffi::OsString| s.to_string_lossy().into_owned();
        Some(Census {
            schema: census::SCHEMA,
            program: text(&self.config.program),
            args: self.config.args.iter().map(text).collect(),
            tier: self.config.tier.to_string(),
            threshold: self.config.threshold(),
            policy: self.config.placement.name().to_string(),
            passes: self.config.passes.clone(),
            skipped_passes: self.config.skip_passes.clone(),
            exact: complete && threads == 1,
            runtime_entries: stats.fragment_entries,
            deopts: stats.deopts.iter().map(|(reason, n)| (reason.to_string(), *n)).collect(),
            compile_ns: stats.compile_nanoseconds,
            images: census::images(),
            fragments,
        })
    }

    /// Does guest code run in place?
    pub fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// Do samples bring threads out of the code cache?
    pub fn brings_out(&self) -> bool {
        let by_time = !matches!(self.config.sampling, Sampling::Every(_));
        !self.is_direct() && by_time && self.config.samples()
    }

    /// A trace was made.
    pub fn set_traced(&self) {
        self.traced.store(true, Ordering::SeqCst);
    }

    /// Has a trace ever been made?
    pub fn is_traced(&self) -> bool {
        self.traced.load(Ordering::Relaxed)
    }

    /// From now on guest code does not run in place, but in the copied blocks and traces of the tier
    /// `full`; if there is no memory for those, it is interpreted. Returns where memory was
    /// taken. The caller is outside and holds no lock.
    pub fn leave_direct(&self, own: &Peer) -> Option<Moved> {
        let moved = self.make_fragments().unwrap_or_default();
        if !self.direct.swap(false, Ordering::SeqCst) {
            return moved;
        }
        self.call_sites.close();
        // As in `drop_all`.
        while self.fragments().is_some_and(|mut f| !f.retire()) {
            std::thread::yield_now();
        }
        self.await_out_of_retired(own);
        if let Some(mut fragments) = self.fragments() {
            fragments.stop_in_place();
        }
        moved
    }

    /// The process is about to be killed, and may leave a core file: the guest has its own code from
    /// now on. No thread patches it any more.
    pub fn give_code_back(&self) {
        if !self.is_direct() {
            return;
        }
        // Nobody changes code any more.
        std::mem::forget(self.pages.exclusive());
        self.call_sites.close();
        patches::take_back_traces();
    }

    /// Everything was retired: makes nothing lead there, and waits until every other thread has been
    /// outside.
    fn await_out_of_retired(&self, own: &Peer) {
        patches::take_back_traces();
        self.peers.await_out_of_cache(own);
    }

    /// Drops all native code. The caller is outside and holds no lock. If another thread is doing
    /// that already, this returns at once.
    pub fn flush(&self, own: &Peer) {
        // One flush is enough: no fragment is made between its beginning and its end, so what this
        // caller wants dropped is dropped by the other thread's flush, too.
        if self.fragments().is_some_and(|mut f| f.retire()) {
            self.await_out_of_retired(own);
            if let Some(mut fragments) = self.fragments() {
                fragments.clear();
            }
        }
    }

    /// Code in `range` has changed: the other threads drop their interpreted blocks made from it;
    /// fragments made from it rest, and copied blocks made from it are removed. The caller is
    /// outside and holds no lock. It drops its own interpreted blocks by itself.
    pub fn invalidate(&self, own: &Peer, range: &Range<u64>) {
        // A thread that is compiling a trace notices this change in one of two ways: it finds the
        // range posted after it has made its plan, or `touch` makes the plan stale.
        let posted = self.peers.post_to_others(own, range);
        let touched = self.fragments().and_then(|mut f| f.touch(range));
        posted.await_interpreters();
        let Some(touched) = touched else { return };
        match touched {
            // No thread enters native code before `finish`.
            Touched::All => self.await_out_of_retired(own),
            // Even if another thread is dropping everything, a third one may still be executing
            // code that was made from the range.
            Touched::Some(_) | Touched::AlreadyRetired if self.peers.call_out(own).is_ok() => {}
            // A thread cannot be signalled. It comes out by itself when everything is dropped.
            Touched::Some(_) | Touched::AlreadyRetired => return self.drop_all(own),
        }
        if let Some(mut fragments) = self.fragments() {
            fragments.finish(touched);
        }
    }

    /// As [`Machine::flush`], but if another thread is dropping everything, waits for that and then
    /// drops everything once more.
    pub fn drop_all(&self, own: &Peer) {
        while self.fragments().is_some_and(|mut f| !f.retire()) {
            // The other thread waits only for threads to leave the cache, which is soon.
            std::thread::yield_now();
        }
        self.await_out_of_retired(own);
        if let Some(mut fragments) = self.fragments() {
            fragments.clear();
        }
    }

    /// The guest wants to map `range`: if the emitter's memory is there, all native code is dropped
    /// and the emitter gets other memory. Returns the old and the new ranges, if it moved. The
    /// caller is outside and holds no lock.
    pub fn make_room(&self, own: &Peer, range: &Range<u64>) -> Option<Moved> {
        let _exclusive = self.pages.exclusive();
        if let Some(place) = self.native.give_way(range) {
            return Some(Moved { from: vec![place], to: Vec::new() });
        }
        if !self.fragments()?.is_in(range) {
            return None;
        }
        let none = self.leave_direct(own);
        debug_assert_eq!(none, None, "the fragments exist");
        // As in `drop_all`.
        while !self.fragments()?.retire() {
            std::thread::yield_now();
        }
        self.peers.await_out_of_cache(own);
        let mut fragments = self.fragments()?;
        let moved = fragments.move_out_of(range).ok()?;
        self.cache.store(packed(&fragments.cache()), Ordering::Release);
        Some(moved)
    }

    /// The guest wants to map `range`: if the stubs of system calls or trampolines are there, direct
    /// execution ends, and they go. Returns what has moved. The caller is outside and holds no lock.
    pub fn leave_direct_for(&self, own: &Peer, range: &Range<u64>) -> Vec<Moved> {
        let _exclusive = self.pages.exclusive();
        let stubs = call_stubs::range();
        let meets = stubs.start < range.end && range.start < stubs.end;
        if !meets && !trampolines::are_in(range) {
            return Vec::new();
        }
        let made = self.leave_direct(own);
        call_stubs::unmap();
        let mut from = trampolines::unmap();
        from.push(stubs);
        made.into_iter().chain([Moved { from, to: Vec::new() }]).collect()
    }

    /// The process ends; see [`Fragments::end_watch`].
    ///
    /// # Errors
    /// The file of `--jitdump` could not be written.
    pub fn end_watch(&self) -> Result<(), WatchError> {
        self.native.end_watch()
    }

    /// Is guest code executed by native code that was made from it?
    pub fn has_fragments(&self) -> bool {
        self.native.is_made()
    }

    /// In a forked child, where the thread of `own` is the only one: forgets the other threads, and
    /// makes a new code cache.
    ///
    /// # Errors
    /// There is no memory for the code cache.
    pub fn after_fork_child(&self, own: &std::sync::Arc<Peer>) -> Result<(), FragmentError> {
        let mut idle = lock(&self.idle);
        idle.iter_mut().for_each(IdleDispatcher::inherit);
        self.peers.keep_only(idle.iter().map(IdleDispatcher::peer).chain([own]));
        drop(idle);
        self.pages.after_fork_child();
        // They lead to code of which the child has no copy.
        patches::take_back_traces();
        self.native.after_fork_child();
        self.fragments().map_or(Ok(()), |mut f| f.reset_after_fork())
    }

    /// A dispatcher for a new thread: an idle one, or a new one.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn dispatcher_for_thread(&'static self) -> Result<IdleDispatcher, FragmentError> {
        let idle = lock(&self.idle).pop();
        match idle {
            Some(idle) => Ok(idle),
            None => Dispatcher::new(self).map(IdleDispatcher::new),
        }
    }

    /// Keeps the dispatcher of a thread that has ended.
    pub fn keep_idle(&self, idle: IdleDispatcher) {
        lock(&self.idle).push(idle);
    }

    /// Calls `f` with every lock of the translator held, for a fork.
    pub fn with_locks(&self, f: &mut dyn FnMut()) {
        let _exclusive = self.pages.exclusive();
        let _resting = lock(&self.idle);
        self.native.while_locked(|| {
            self.call_sites.while_locked(|| {
                self.footprint.while_locked(|| {
                    self.peers.while_locked(&mut || self.pages.while_locked(&mut *f))
                });
            });
        });
    }

    /// Writes a line about a stage that the user wants to see.
    pub fn log(&self, stage: Stage, text: impl FnOnce() -> String) {
        if self.config.log.contains(&stage) {
            eprintln!("dynasour: {}", text());
        }
    }
}

/// Bits of [`packed`] that hold the number of pages: for caches below 4 GiB, which leaves 44 bits
/// for the number of the first page (an address has 48).
const CACHE_PAGES: u32 = 20;

/// The addresses of a code cache in one word: its first page above the number of its pages.
fn packed(cache: &Range<u64>) -> u64 {
    ((cache.start / PAGE) << CACHE_PAGES) | ((cache.end - cache.start) / PAGE)
}

/// The range that [`packed`] has packed.
fn unpacked(cache: u64) -> Range<u64> {
    let start = (cache >> CACHE_PAGES) * PAGE;
    start..start + (cache & ((1 << CACHE_PAGES) - 1)) * PAGE
}

/// The end of the code cache, if `host_rip` is in it. Code in the cache never holds a lock.
/// Async-signal-safe.
pub fn cache_end(host_rip: u64) -> Option<u64> {
    // SAFETY: null or the machine, which lives as long as the process.
    let machine = unsafe { MACHINE.load(Ordering::Acquire).as_ref() }?;
    let cache = unpacked(machine.cache.load(Ordering::Acquire));
    cache.contains(&host_rip).then_some(cache.end)
}

/// The fragments, locked, for a signal handler that interrupted `host_rip`; none if that is not in
/// the code cache. In the cache the interrupted thread holds no lock, so it cannot wait for itself.
fn in_handler(host_rip: u64) -> Option<MutexGuard<'static, Fragments>> {
    cache_end(host_rip)?;
    // SAFETY: null or the machine, which lives as long as the process.
    unsafe { MACHINE.load(Ordering::Acquire).as_ref() }?.fragments()
}

/// The host address at which a thread continues whose native code faulted at `host_rip`; none if
/// that is no instruction of native code that may fault. Async-signal-safe.
pub fn fragment_fault(host_rip: u64) -> Option<u64> {
    in_handler(host_rip)?.fault_exit(host_rip)
}

/// This thread accepted an asynchronous signal at `host_rip`. If that is in the code cache, makes
/// the thread leave native code at its next safe point: by unlinking its fragment or block, or by
/// the returned diversion, at which the handler lets it continue. Async-signal-safe.
pub fn signal_accepted(host_rip: u64, context: &ThreadContext) -> Option<Diversion> {
    in_handler(host_rip)?.divert(host_rip, context)
}
