//! Pages of guest code: what may be executed, what may change it, and how a change is noticed (DESIGN 7,
//! "Self-modifying code").
//!
//! Code is translated once and executed often, so whatever changes it must be noticed first. How depends on the page:
//!
//! | page | who may change it | how it is noticed |
//! | --- | --- | --- |
//! | private, not writable | mprotect, mmap, munmap, … | by the call |
//! | private, writable | stores, system calls that write memory | *guarded*: write-protected behind the guest's back |
//! | shared, of a file open for writing, written too often | also other processes, other mappings | not at all: what is made from it compares its bytes |
//!
//! A **guard** is taken by [`CodePages::watch`] when code is made from the page and given back (*opened*) before
//! anything is written: by the dispatcher after a fault ([`CodePages::opened_by_fault`]), which runs the store that
//! faulted by itself, so that the very next instruction is fetched anew; by system calls before the kernel writes
//! ([`outputs`]); by the host's own stores into guest memory (see [`crate::memory::copy_out`]). What was opened is
//! *written*: whoever runs guest code next first drops everything made from it ([`CodePages::take_written`]), or waits until
//! another thread has. Somebody else may have taken the guard after the bytes were read, and they may have changed before: who
//! watches says since when ([`Moment`]), and reads again.
//!
//! Where the kernel cannot be asked what is mapped (a process in a jail has no `/proc`), what is known stays known, and what is not is
//! taken for code if it can be read, and for code that may change unseen.
//!
//! Protections that the guest asks about (`/proc/self/maps`, its own faults) are those that it set.
//!
//! Not noticed: what other processes write to files of which code is mapped privately, or to private pages (ptrace,
//! process_vm_writev).

mod guards;
mod handler;
mod listing;
pub mod outputs;

pub use handler::{install, opened_for_host};

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use dynasour_guest::decode::{Moment, Watched};
use dynasour_guest::space::{self, Mapping, Mappings, PAGE, page_down, page_up};
use nix::sys::mman::ProtFlags;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::memory::FaultInfo;
use crate::sync::lock;
use guards::Guards;
use outputs::Outputs;

/// A page that was opened so often is guarded no more: its code compares its bytes.
const FLIPS: u32 = 64;

/// The code pages of one address space.
#[derive(Debug, Default)]
pub struct CodePages {
    state: Mutex<State>,
    /// Is there something in [`State::written`], or about to be dropped?
    written: AtomicBool,
    /// Are there, or were there, several threads?
    threaded: AtomicBool,
    /// Has the guest opened its memory as a file, to write to it?
    written_as_file: AtomicBool,
    /// Has the guest given a page a protection key of its own?
    keyed: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    mappings: Mappings,
    /// The kernel could not be asked when it was last tried.
    is_blind: bool,
    guards: Guards,
    /// How often guarded pages were opened.
    flips: FxHashMap<u64, u32>,
    /// Inodes of files whose contents may change by other ways than a private mapping of them.
    unstable: FxHashSet<u64>,
    /// Ranges that the kernel may be writing to: not to be guarded.
    pinned: Vec<Range<u64>>,
    /// Ranges that are about to be nobody's any more.
    leaving: Vec<Range<u64>>,
    /// Opened, and what was made from it not dropped yet.
    written: Vec<Range<u64>>,
    /// About to be opened, while what was made from it is being dropped.
    opening: Option<Range<u64>>,
    opened: u64,
}

/// What became of a fault.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Opening {
    /// It is the guest's own.
    NotOurs,
    /// Its page is open already.
    Done,
    /// Whatever was made from this page is to be dropped before it is opened.
    Begun(Range<u64>),
}

/// How code may change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    /// Only by calls that the engine hears of.
    ByCall,
    /// Also by stores to that very page.
    ByStore,
    /// Also unseen.
    Unseen,
}

impl State {
    fn refresh(&mut self) {
        match space::maps() {
            Ok(entries) => {
                self.is_blind = false;
                self.mappings.refresh(&entries, self.guards.pages());
            }
            Err(_) => self.is_blind = true,
        }
    }

    /// Is there something in `range` of which nothing is known?
    fn is_obscure(&self, range: &Range<u64>) -> bool {
        self.is_blind && self.mappings.extent(range.start, |_| true) < range.end
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
            _ if mapping.shared => Change::Unseen,
            Some(file) if self.unstable.contains(&file.inode) => Change::Unseen,
            _ if mapping.is_writable() => Change::ByStore,
            _ => Change::ByCall,
        }
    }

    /// The worst that can happen to `range`.
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

    /// Guards the page, of which something was read after `since`, unless it is guarded or need not be. `None`: it cannot be.
    fn guard(&mut self, page: u64, since: Moment) -> Option<Watched> {
        // What is still guarded may be about to be opened.
        let is_pinned = self.pinned.iter().any(|pinned| pinned.start < page + PAGE && page < pinned.end);
        if is_pinned || self.opening.as_ref().is_some_and(|opening| opening.contains(&page)) {
            return self.needs_no_guard(page).then_some(Watched::Already);
        }
        if let Some(guarded) = self.guards.since(page) {
            // Before another thread guarded it, it may have been written to.
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

    /// Do only calls change this page?
    fn needs_no_guard(&self, page: u64) -> bool {
        self.mappings.at(page).is_some_and(|mapping| self.change(&mapping) == Change::ByCall)
    }

    /// May the guest write there? Asked where it could not: another thread may have opened it meanwhile.
    fn is_writable(&mut self, page: u64) -> bool {
        let writable = |state: &State| state.mappings.at(page).is_some_and(|mapping| mapping.is_writable());
        writable(self) && {
            self.refresh();
            writable(self)
        }
    }

    /// As [`State::open`], because of a write.
    fn open_for_write(&mut self, range: Range<u64>) -> bool {
        for page in self.guards.within(range.clone()) {
            *self.flips.entry(page).or_default() += 1;
        }
        self.open(range)
    }

    /// As [`State::open_for_write`], where nothing is left to be dropped.
    fn open_dropped(&mut self, page: Range<u64>) {
        let written = self.written.len();
        self.open_for_write(page);
        self.written.truncate(written);
    }

    /// Gives the guards in `range` back; what they covered is written from now on.
    fn open(&mut self, range: Range<u64>) -> bool {
        let pages: Vec<u64> = self.guards.within(range).collect();
        for &page in &pages {
            let prot = self.mappings.at(page).map_or(ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, |m| m.prot);
            self.guards.give_back(page, prot);
            self.opened += 1;
            match self.written.last_mut() {
                Some(last) if last.end == page => last.end = page + PAGE,
                _ => self.written.push(page..page + PAGE),
            }
        }
        !pages.is_empty()
    }
}

impl CodePages {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// How many of the bytes at `address`, `len` at most, may be fetched as instructions.
    pub fn fetchable(&self, address: u64, len: usize) -> usize {
        let mut state = self.state();
        let wanted = address.saturating_add(len as u64);
        if state.mappings.extent(address, Mapping::is_executable) < wanted {
            state.refresh();
        }
        (state.executable_end(address, wanted) - address) as usize
    }

    /// May stores, or something unseen, change the bytes of `range` now?
    pub fn may_change(&self, range: Range<u64>) -> bool {
        let state = self.state();
        if state.is_obscure(&range) {
            return true;
        }
        let changing = state.mappings.parts(range).find(|(part, mapping)| match state.change(mapping) {
            Change::ByCall => false,
            Change::ByStore => pages(part.clone()).any(|page| !state.guards.contains(page)),
            Change::Unseen => true,
        });
        changing.is_some()
    }

    /// Can only calls change `range`, which the instruction at `pc` refers to, or make reading it fail? Asked of what loaders fill
    /// in and then protect. What the guest may write is not guarded for that.
    pub fn is_constant(&self, pc: u64, range: Range<u64>) -> bool {
        if self.keyed.load(Ordering::Relaxed) {
            return false;
        }
        let mut state = self.state();
        if state.mappings.at(range.start).is_none() {
            state.refresh();
        }
        let file = state.mappings.at(pc).and_then(|mapping| mapping.file).map(|file| file.inode);
        let is_constant = |mapping: &Mapping| {
            mapping.prot.contains(ProtFlags::PROT_READ)
                && state.change(mapping) == Change::ByCall
                // Of the files of which no code is mapped nobody knows who writes to them.
                && mapping.file.is_none_or(|mapped| Some(mapped.inode) == file)
        };
        state.mappings.extent(range.start, is_constant) >= range.end
    }

    /// From now on protection keys may keep the guest from reading what its mappings let it read.
    pub fn set_keyed(&self) {
        self.keyed.store(true, Ordering::Relaxed);
    }

    /// For [`CodePages::watch`].
    pub fn moment(&self) -> Moment {
        self.state().guards.now()
    }

    /// Sees to it that no store changes `range` unnoticed, which was read after `since`.
    pub fn watch(&self, range: Range<u64>, since: Moment) -> Watched {
        let mut state = self.state();
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

    /// Was this fault only ours? Then the page is open now, and the store can be repeated.
    pub fn opened_by_fault(&self, fault: &FaultInfo) -> bool {
        if !fault.is_denied_write() {
            return false;
        }
        let page = page_down(fault.addr);
        let mut state = self.state();
        if state.open_for_write(page..page + PAGE) {
            self.written.store(true, Ordering::Release);
            return true;
        }
        state.is_writable(page)
    }

    /// Was this fault only ours? If its page is still guarded, it stays so until [`CodePages::finish_opening`]; nothing
    /// new that is made from it relies on that. The caller has the right to invalidate code.
    pub fn begin_opening(&self, fault: &FaultInfo) -> Opening {
        let page = page_down(fault.addr);
        let mut state = self.state();
        if state.guards.contains(page) {
            state.opening = Some(page..page + PAGE);
            return Opening::Begun(page..page + PAGE);
        }
        if state.is_writable(page) { Opening::Done } else { Opening::NotOurs }
    }

    /// Nothing is left that was made from what was being opened, and nobody runs it any more.
    pub fn finish_opening(&self, page: Range<u64>) {
        let mut state = self.state();
        state.opening = None;
        state.open_dropped(page);
    }

    /// Opens what is guarded in `range`: it is about to be written, or its guards are about to be lost. Was anything?
    pub fn open(&self, range: Range<u64>) -> bool {
        if guards::none() {
            return false;
        }
        let opened = self.state().open(range);
        if opened {
            self.written.store(true, Ordering::Release);
        }
        opened
    }

    /// Was something opened and what was made from it not dropped yet? Then that has to be done before guest code runs.
    pub fn is_written(&self) -> bool {
        self.written.load(Ordering::Acquire)
    }

    /// What was opened since the last call: the caller drops whatever was made from it, and then says
    /// [`CodePages::dropped_written`].
    pub fn take_written(&self) -> Vec<Range<u64>> {
        std::mem::take(&mut self.state().written)
    }

    /// What was taken last has been dealt with.
    pub fn dropped_written(&self) {
        let state = self.state();
        if state.written.is_empty() {
            self.written.store(false, Ordering::Release);
        }
    }

    /// The kernel may be about to write to what the arguments of the call `nr` say: that is opened, and stays so until
    /// [`CodePages::unpin`]. With several threads the caller opens it, since one of them may execute what was made from it, and
    /// write to it: what [`CodePages::guarded`] says, when that has been dropped.
    pub fn pin(&self, nr: i64, args: &[u64; 6]) -> Outputs {
        // Only another thread can guard something while the call is made.
        if guards::none() && !self.is_threaded() {
            return Outputs::new();
        }
        let ranges = outputs::outputs(nr, args);
        let mut state = self.state();
        for range in &ranges {
            if !self.is_threaded() && state.open_for_write(range.clone()) {
                self.written.store(true, Ordering::Release);
            }
            state.pinned.push(range.clone());
        }
        ranges
    }

    /// The guarded pages with bytes in these ranges.
    pub fn guarded(&self, ranges: &[Range<u64>]) -> Vec<Range<u64>> {
        if guards::none() || ranges.is_empty() {
            return Vec::new();
        }
        let state = self.state();
        ranges.iter().flat_map(|range| state.guards.within(range.clone())).map(|page| page..page + PAGE).collect()
    }

    /// Opens a page from which nothing is made any more, nor will be while it is pinned.
    pub fn open_dropped(&self, page: Range<u64>) {
        self.state().open_dropped(page);
    }

    /// The kernel has written to these ranges.
    pub fn unpin(&self, ranges: &[Range<u64>]) {
        if ranges.is_empty() {
            return;
        }
        let mut state = self.state();
        for range in ranges {
            if let Some(at) = state.pinned.iter().position(|pinned| pinned == range) {
                state.pinned.swap_remove(at);
            }
        }
    }

    /// The guest has mapped something new to `range`: what it is, if that is known.
    pub fn mapped(&self, range: Range<u64>, mapping: Option<Mapping>) {
        let mut state = self.state();
        state.guards.lose(range.clone());
        state.flips.retain(|page, _| !range.contains(page));
        match mapping {
            Some(mapping) => state.mappings.set(range, mapping),
            None => state.mappings.forget(range),
        }
    }

    /// Is all of `range` known to be mapped?
    pub fn knows(&self, range: Range<u64>) -> bool {
        self.state().mappings.extent(range.start, |_| true) >= range.end
    }

    /// The guest has set the protection of `range`, guards included.
    pub fn protected(&self, range: Range<u64>, prot: ProtFlags) {
        let mut state = self.state();
        state.guards.lose(range.clone());
        state.mappings.set_protection(range, prot);
    }

    /// From now on nothing is known of `range` but what is guarded.
    pub fn forget(&self, range: Range<u64>) {
        self.state().mappings.forget(range);
    }

    /// `range` is about to be nobody's any more: what was made from its code is dropped before that happens, for at once another
    /// thread may get the same addresses. So nothing may come back, though the code is still there, until it [has left](CodePages::left).
    pub fn leaving(&self, range: Range<u64>) {
        self.state().leaving.push(range);
    }

    /// It is nobody's.
    pub fn left(&self, range: &Range<u64>) {
        let leaving = &mut self.state().leaving;
        if let Some(at) = leaving.iter().position(|other| other == range) {
            leaving.swap_remove(at);
        }
    }

    /// Is part of `range` about to be nobody's?
    pub fn is_leaving(&self, range: &Range<u64>) -> bool {
        self.state().leaving.iter().any(|other| other.start < range.end && range.start < other.end)
    }

    /// Is code of this file mapped?
    pub fn has_code_of(&self, inode: u64) -> bool {
        self.state().mappings.parts(0..u64::MAX).any(|(_, mapping)| is_code_of(&mapping, inode))
    }

    /// The contents of this file may change by other ways than a private mapping. Where is it mapped?
    pub fn file_may_change(&self, inode: u64) -> Vec<Range<u64>> {
        let mut state = self.state();
        if !state.unstable.insert(inode) {
            return Vec::new();
        }
        let is_of_it = |mapping: &Mapping| mapping.file.is_some_and(|file| file.inode == inode);
        state.mappings.parts(0..u64::MAX).filter(|(_, mapping)| is_of_it(mapping)).map(|(range, _)| range).collect()
    }

    /// `/proc/self/maps` with the protections that the guest set.
    pub fn listing(&self, text: &[u8]) -> Vec<u8> {
        let guarded: Vec<u64> = self.state().guards.pages().collect();
        listing::without_guards(text, &guarded)
    }

    /// From now on the guest may write to its memory as a file.
    pub fn set_written_as_file(&self) {
        self.written_as_file.store(true, Ordering::Relaxed);
    }

    /// May the guest write to its memory as a file?
    pub fn is_written_as_file(&self) -> bool {
        self.written_as_file.load(Ordering::Relaxed)
    }

    /// From now on several threads run guest code.
    pub fn set_threaded(&self) {
        self.threaded.store(true, Ordering::Relaxed);
    }

    /// Do, or did, several threads run guest code?
    pub fn is_threaded(&self) -> bool {
        self.threaded.load(Ordering::Relaxed)
    }

    /// Calls `f` while nobody changes anything here.
    pub fn held(&self, f: impl FnOnce()) {
        let _state = self.state();
        f();
    }

    /// How often guarded pages were opened.
    pub fn opened(&self) -> u64 {
        self.state().opened
    }
}

fn is_code_of(mapping: &Mapping, inode: u64) -> bool {
    mapping.is_executable() && mapping.file.is_some_and(|file| file.inode == inode)
}

/// The addresses of the pages with bytes in `range`.
fn pages(range: Range<u64>) -> impl Iterator<Item = u64> {
    let end = if range.is_empty() { range.start } else { page_up(range.end).unwrap_or(page_down(u64::MAX)) };
    (page_down(range.start)..end).step_by(PAGE as usize)
}

#[cfg(test)]
mod tests;
