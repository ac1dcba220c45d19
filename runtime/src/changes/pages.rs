//! The record of the guest's mappings, and which of its pages are guarded: write-protected although
//! the guest may write to them.
//!
//! [`CodePages`] holds the record of the guest's mappings, the guards, and the ranges that some
//! thread has announced to change (see [`super`]). One lock, [`State`], protects all of it; it has
//! the last rank ([`crate::sync`]), so any thread may take it at any time, except a signal handler
//! that interrupted a thread which holds it. (No store to guest memory is made while it is held.)
//!
//! A **guard** is taken by [`CodePages::watch`] when code is made from a writable page. It is given
//! back (the page is *opened*) before anything is written to the page, by a transaction
//! ([`super::transaction`]) or by a store of the host's ([`super::host`]).
//!
//! Another thread may guard a page after this one has read it, and the page may have changed in
//! between. So a translator passes the [`Moment`] before its first read to [`CodePages::watch`],
//! and reads again if the page was guarded later than that ([`Watched::Now`]).
//!
//! Where the kernel cannot be asked what is mapped (a process in a jail has no `/proc`), ranges
//! that are known stay known. Unknown ranges count as code if they can be read, and as code that
//! may change unseen.
//!
//! The record holds the protections that the guest set, not those that guards changed.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use dynasour_guest::decode::{Moment, Watched};
use dynasour_guest::space::{self, Mapping, Mappings, PAGE, page_down, page_up};
use nix::sys::mman::ProtFlags;
use rustc_hash::{FxHashMap, FxHashSet};

use super::guards::{self, Guards};
use super::hiding;
use super::listing;
use super::schedule::{SyncPoint, sync_point};
use super::sharing::Owned;
use crate::memory::FaultInfo;
use crate::sync::lock;

/// A page that was opened this often is not guarded any more: code made from it compares its bytes
/// (guess; higher costs a fault and a quiesce for each write of a JIT compiler's hot page).
pub(super) const FLIPS: u32 = 64;

/// The code pages of one address space.
#[derive(Debug, Default)]
pub struct CodePages {
    state: Mutex<State>,
    /// The exclusive right to change code: see [`CodePages::exclusive`].
    exclusive: Mutex<()>,
    /// Is [`State::written`] not empty, or is code of its ranges being dropped?
    written: AtomicBool,
    /// Has the guest ever had several threads?
    threaded: AtomicBool,
    /// Has the guest opened its memory as a file, to write to it?
    written_as_file: AtomicBool,
    /// Has the guest given a page a protection key of its own?
    keyed: AtomicBool,
}

/// Why a range is announced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// A call changes what is mapped there, its protection, or its contents as a whole.
    Mapping,
    /// A guarded page is about to be opened for a store.
    Store,
    /// The kernel may write there until a system call returns.
    Output,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub mappings: Mappings,
    /// The kernel could not be asked when it was last tried.
    is_blind: bool,
    /// The record has every mapping with code: since the kernel was asked, nothing was mapped or made
    /// executable that is not in it.
    pub is_surveyed: bool,
    pub guards: Guards,
    /// How often each guarded page was opened.
    pub flips: FxHashMap<u64, u32>,
    /// Inodes of files whose contents may change by other ways than a private mapping of them.
    unstable: FxHashSet<u64>,
    /// Shared memory that only stores and calls of this process change.
    pub owned: Owned,
    /// Ranges that some thread is about to change. No code made from them relies on a guard or a
    /// protection.
    announced: Vec<(Range<u64>, Kind)>,
    /// Ranges that the host has written to, until what was made from them is dropped.
    pub written: Vec<Range<u64>>,
}

/// How code may change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    /// Only by system calls, which the runtime performs.
    ByCall,
    /// Also by stores of the guest to this page.
    ByStore,
    /// Also in ways that cannot be noticed.
    Unseen,
}

impl State {
    pub(super) fn refresh(&mut self) {
        match space::maps() {
            Ok(entries) => {
                (self.is_blind, self.is_surveyed) = (false, true);
                self.mappings.refresh(&entries, self.guards.pages());
            }
            Err(_) => self.is_blind = true,
        }
    }

    /// Is part of `range` not in the record?
    fn is_obscure(&self, range: &Range<u64>) -> bool {
        self.is_blind && self.mappings.extent(range.start, |_| true) < range.end
    }

    /// Reads the kernel's list of mappings if part of `range` is not in the record.
    fn learn(&mut self, range: &Range<u64>) {
        if self.mappings.extent(range.start, |_| true) < range.end {
            self.refresh();
        }
    }

    /// The end of what may be executed from `address` on, as far as `wanted`.
    fn executable_end(&self, address: u64, wanted: u64) -> u64 {
        let mut end = self.mappings.extent(address, Mapping::is_executable);
        while self.is_blind && end < wanted && self.mappings.at(end).is_none() {
            end = self.mappings.extent(page_down(end).saturating_add(PAGE), Mapping::is_executable);
        }
        end.min(wanted)
    }

    fn change(&self, mapping: &Mapping) -> Change {
        match mapping.file {
            Some(file) if self.unstable.contains(&file.inode) => Change::Unseen,
            _ if mapping.shared && !self.owned.contains(mapping) => Change::Unseen,
            _ if mapping.is_writable() => Change::ByStore,
            _ => Change::ByCall,
        }
    }

    /// The least noticeable way in which `range` can change. Unmapped memory does not change.
    fn change_of(&self, range: Range<u64>) -> Change {
        if self.is_obscure(&range) {
            return Change::Unseen;
        }
        let mut worst = Change::ByCall;
        for (_, mapping) in self.mappings.parts(range) {
            match self.change(&mapping) {
                Change::ByCall => {}
                Change::ByStore => worst = Change::ByStore,
                Change::Unseen => return Change::Unseen,
            }
        }
        worst
    }

    /// Is some of `range` announced, for a reason that `kinds` accepts?
    fn is_announced(&self, range: &Range<u64>, kinds: impl Fn(Kind) -> bool) -> bool {
        let meets = |other: &Range<u64>| other.start < range.end && range.start < other.end;
        self.announced.iter().any(|(other, kind)| kinds(*kind) && meets(other))
    }

    /// Guards the page, of which something was read after `since`, unless it is guarded or need not
    /// be. `None`: it cannot be.
    fn guard(&mut self, page: u64, since: Moment) -> Option<Watched> {
        if self.is_announced(&(page..page + PAGE), |_| true) {
            // The page is still guarded, but another thread may be about to open it.
            return self.needs_no_guard(page).then_some(Watched::Already);
        }
        if let Some(guarded) = self.guards.since(page) {
            // The page may have been written to before another thread guarded it.
            return Some(if guarded <= since { Watched::Already } else { Watched::Now });
        }
        let Some(mapping) = self.mappings.at(page) else {
            return if self.is_blind { None } else { Some(Watched::Already) };
        };
        match self.change(&mapping) {
            Change::ByCall => return Some(Watched::Already),
            Change::ByStore => {}
            Change::Unseen => return None,
        }
        if self.flips.get(&page).is_some_and(|flips| *flips >= FLIPS) {
            return None;
        }
        self.guards.take(page, mapping.prot).then_some(Watched::Now)
    }

    /// Is the page changed by system calls only?
    fn needs_no_guard(&self, page: u64) -> bool {
        self.mappings.at(page).is_some_and(|mapping| self.change(&mapping) == Change::ByCall)
    }

    /// May the guest write there? Asked after a store has faulted, with the exclusive right: the
    /// page may have been opened, or its record forgotten, since the fault.
    pub(super) fn is_writable(&mut self, page: u64) -> bool {
        let writable = |state: &State| state.mappings.at(page).map(|mapping| mapping.is_writable());
        if writable(self) == Some(false) {
            return false;
        }
        self.refresh();
        writable(self) == Some(true)
    }

    /// Counts an opening because of a write, for each guarded page of `range`.
    pub(super) fn count_flips(&mut self, range: Range<u64>) {
        for page in self.guards.within(range) {
            *self.flips.entry(page).or_default() += 1;
        }
    }

    /// Gives the guards in `range` back.
    pub(super) fn open(&mut self, range: Range<u64>) {
        let pages: Vec<u64> = self.guards.within(range).collect();
        for page in pages {
            let prot = self
                .mappings
                .at(page)
                .map_or(ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, |m| m.prot);
            self.guards.give_back(page, prot);
        }
    }
}

impl CodePages {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The exclusive right to change code. While a thread has it, no other changes a mapping, opens
    /// a page for a store, or drops code. So a thread that gets the right and finds nothing left to
    /// drop knows that no thread executes code of the range. The caller is outside (see
    /// [`crate::dispatch`]) and holds no lock that another thread needs to come out of guest code.
    pub fn exclusive(&self) -> MutexGuard<'_, ()> {
        sync_point(SyncPoint::TakeExclusive);
        super::schedule::lock(&self.exclusive)
    }

    /// Records that `range` is about to change.
    pub(super) fn begin(&self, ranges: &[Range<u64>], kind: Kind) {
        sync_point(SyncPoint::Announce);
        self.state().announced.extend(ranges.iter().map(|range| (range.clone(), kind)));
    }

    /// Withdraws what [`CodePages::begin`] has recorded.
    pub(super) fn end(&self, ranges: &[Range<u64>], kind: Kind) {
        let announced = &mut self.state().announced;
        for range in ranges {
            if let Some(at) = announced
                .iter()
                .position(|(other, other_kind)| other == range && *other_kind == kind)
            {
                announced.swap_remove(at);
            }
        }
    }

    /// How many of the bytes at `address`, `len` at most, may be fetched as instructions.
    pub fn fetchable(&self, address: u64, len: usize) -> usize {
        sync_point(SyncPoint::Fetch);
        let mut state = self.state();
        let wanted = address.saturating_add(len as u64);
        if state.mappings.extent(address, Mapping::is_executable) < wanted {
            state.refresh();
        }
        (state.executable_end(address, wanted) - address) as usize
    }

    /// May stores, or something unseen, change the bytes of `range` now?
    pub fn may_change(&self, range: Range<u64>) -> bool {
        let mut state = self.state();
        state.learn(&range);
        if state.is_obscure(&range) || state.is_announced(&range, |kind| kind != Kind::Output) {
            return true;
        }
        let changing =
            state.mappings.parts(range).find(|(part, mapping)| match state.change(mapping) {
                Change::ByCall => false,
                Change::ByStore => pages(part.clone()).any(|page| !state.guards.contains(page)),
                Change::Unseen => true,
            });
        changing.is_some()
    }

    /// Can only calls change `range`, which the instruction at `pc` refers to, or make reading it
    /// fail? Asked of what loaders fill in and then protect. What the guest may write is not
    /// guarded for that.
    pub fn is_constant(&self, pc: u64, range: Range<u64>) -> bool {
        if self.keyed.load(Ordering::Relaxed) {
            return false;
        }
        let mut state = self.state();
        if !state.is_announced(&range, |kind| kind == Kind::Mapping)
            && state.mappings.at(range.start).is_none()
        {
            state.refresh();
        }
        drop(state);
        self.is_known_constant(pc, range)
    }

    /// As [`CodePages::is_constant`], but false for mappings that nobody has asked about yet. It opens no
    /// file, so that the helper thread may call it while the guest opens files.
    pub fn is_known_constant(&self, pc: u64, range: Range<u64>) -> bool {
        if self.keyed.load(Ordering::Relaxed) {
            return false;
        }
        let state = self.state();
        if state.is_announced(&range, |kind| kind == Kind::Mapping) {
            return false;
        }
        let file = state.mappings.at(pc).and_then(|mapping| mapping.file).map(|file| file.inode);
        let is_constant = |mapping: &Mapping| {
            mapping.prot.contains(ProtFlags::PROT_READ)
                && state.change(mapping) == Change::ByCall
                // Writes to files of which no code is mapped are not noticed.
                && mapping.file.is_none_or(|mapped| Some(mapped.inode) == file)
        };
        state.mappings.extent(range.start, is_constant) >= range.end
    }

    /// Is some of `range` shared memory, whether or not another process has it?
    pub fn is_shared(&self, range: Range<u64>) -> bool {
        self.state().mappings.parts(range).any(|(_, mapping)| mapping.shared)
    }

    /// From now on protection keys may keep the guest from reading what its mappings let it read.
    pub fn set_keyed(&self) {
        self.keyed.store(true, Ordering::Relaxed);
    }

    /// For [`CodePages::watch`].
    pub fn moment(&self) -> Moment {
        self.state().guards.now()
    }

    /// Makes sure that stores to `range`, which was read after `since`, are noticed.
    pub fn watch(&self, range: Range<u64>, since: Moment) -> Watched {
        sync_point(SyncPoint::Watch);
        let mut state = self.state();
        if state.is_announced(&range, |kind| kind == Kind::Mapping) {
            return Watched::Impossible;
        }
        if state.guards.has_published(since) {
            // The bytes may have been fetched before the change was published, and the record may
            // have been forgotten since.
            return Watched::Now;
        }
        match state.change_of(range.clone()) {
            Change::ByCall => return Watched::Already,
            Change::Unseen => return Watched::Impossible,
            Change::ByStore => {}
        }
        let mut watched = Watched::Already;
        for page in pages(range) {
            match state.guard(page, since) {
                None => return Watched::Impossible,
                Some(Watched::Now) => watched = Watched::Now,
                Some(_) => {}
            }
        }
        watched
    }

    /// Is the page of this fault guarded? `None`: it is not, and the guest may write to it, so the
    /// store can be repeated. The caller has the exclusive right.
    pub(super) fn guarded_by_us(&self, fault: &FaultInfo) -> Option<bool> {
        let page = page_down(fault.addr);
        let mut state = self.state();
        match state.guards.contains(page) {
            true => Some(true),
            false if state.is_writable(page) => None,
            false => Some(false),
        }
    }

    /// Has the host written to something, and what was made from it is not dropped yet? Then that
    /// has to be done before guest code runs.
    pub fn is_written(&self) -> bool {
        self.written.load(Ordering::Acquire)
    }

    /// The host has written to `range`.
    pub(super) fn set_written(&self, state: &mut State, range: Range<u64>) {
        state.written.push(range);
        self.written.store(true, Ordering::Release);
    }

    /// The ranges that the host has written to since the last call. The caller, which has the
    /// exclusive right, drops all code made from them and then calls
    /// [`CodePages::dropped_written`].
    pub fn take_written(&self) -> Vec<Range<u64>> {
        std::mem::take(&mut self.state().written)
    }

    /// What was taken last has been dropped.
    pub fn dropped_written(&self) {
        let state = self.state();
        if state.written.is_empty() {
            self.written.store(false, Ordering::Release);
        }
    }

    /// The guarded pages with bytes in these ranges.
    pub fn guarded(&self, ranges: &[Range<u64>]) -> Vec<Range<u64>> {
        if guards::none() || ranges.is_empty() {
            return Vec::new();
        }
        let state = self.state();
        let mut pages: Vec<u64> =
            ranges.iter().flat_map(|range| state.guards.within(range.clone())).collect();
        pages.sort_unstable();
        pages.dedup();
        pages.into_iter().map(|page| page..page + PAGE).collect()
    }

    /// Is all of `range` known to be mapped?
    pub fn knows(&self, range: Range<u64>) -> bool {
        self.state().mappings.extent(range.start, |_| true) >= range.end
    }

    /// Is some of `range` about to change?
    pub fn is_changing(&self, range: &Range<u64>) -> bool {
        self.state().is_announced(range, |_| true)
    }

    /// Is code of this file mapped? Code that runs in place may never have been looked up, so its
    /// mapping may not be in the record yet.
    pub fn has_code_of(&self, inode: u64) -> bool {
        let mut state = self.state();
        if !state.is_surveyed {
            state.refresh();
        }
        state.is_blind
            || state.mappings.parts(0..u64::MAX).any(|(_, mapping)| is_code_of(&mapping, inode))
    }

    /// The contents of this file may change by other ways than a private mapping. Where is it
    /// mapped?
    pub fn file_may_change(&self, inode: u64) -> Vec<Range<u64>> {
        let mut state = self.state();
        if !state.unstable.insert(inode) {
            return Vec::new();
        }
        let is_of_it = |mapping: &Mapping| mapping.file.is_some_and(|file| file.inode == inode);
        state
            .mappings
            .parts(0..u64::MAX)
            .filter(|(_, mapping)| is_of_it(mapping))
            .map(|(range, _)| range)
            .collect()
    }

    /// `/proc/self/maps` with the protections that the guest set.
    pub fn listing(&self, text: &[u8]) -> Vec<u8> {
        let guarded: Vec<u64> = self.state().guards.pages().collect();
        listing::without_guards(text, &guarded, &hiding::pages())
    }

    /// From now on the guest may write to its memory as a file.
    pub fn set_written_as_file(&self) {
        self.written_as_file.store(true, Ordering::Relaxed);
    }

    /// May the guest write to its memory as a file?
    pub fn is_written_as_file(&self) -> bool {
        self.written_as_file.load(Ordering::Relaxed)
    }

    /// From now on several threads run guest code. Nothing is [written](CodePages::is_written) and
    /// not dropped.
    pub fn set_threaded(&self) {
        self.threaded.store(true, Ordering::Relaxed);
    }

    /// Do, or did, several threads run guest code?
    pub fn is_threaded(&self) -> bool {
        self.threaded.load(Ordering::Relaxed)
    }

    /// In a forked child: the threads that announced changes are not there.
    pub fn after_fork_child(&self) {
        self.state().announced.clear();
    }

    /// Calls `f` with the record locked.
    pub fn while_locked(&self, f: impl FnOnce()) {
        let _state = self.state();
        f();
    }
}

fn is_code_of(mapping: &Mapping, inode: u64) -> bool {
    mapping.is_executable() && mapping.file.is_some_and(|file| file.inode == inode)
}

/// The addresses of the pages with bytes in `range`.
fn pages(range: Range<u64>) -> impl Iterator<Item = u64> {
    let end = if range.is_empty() {
        range.start
    } else {
        page_up(range.end).unwrap_or(page_down(u64::MAX))
    };
    (page_down(range.start)..end).step_by(PAGE as usize)
}
