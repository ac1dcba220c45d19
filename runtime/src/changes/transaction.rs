//! Changes of code, as transactions whose states are types (`docs/design.md`, "Protocols").
//!
//! ```text
//!  CodePages::announce ──► Announced ──quiesce──► Quiet ──perform──► Performed ──publish──► (over)
//!                              ▲                                         │
//!                              └──────────────── again ◄─────────────────┘ call failed, code kept
//! ```
//!
//! * **Announced**: the thread has the exclusive right to change code, and the ranges are
//!   announced. Code that is made from them from now on compares its own bytes whenever it runs,
//!   and no fragment made from them comes back.
//! * **Quiet**: everything made from the ranges before is dropped, and no thread executes any of
//!   it.
//! * **Performed**: guards in the ranges are given back, and the kernel has made the change.
//! * **publish**: the record of mappings says what is there now, the announcement is withdrawn, and
//!   what was made meanwhile is dropped, too: its bytes are compared, but not its right to be
//!   executed.
//!
//! Code that leaves out a step does not compile. A transaction that is abandoned (the system call
//! was not made) withdraws its announcement when it is dropped.
//!
//! **Example.** `mprotect(page, RWX)` while another thread executes code of that page, which was
//! R-X: the page is announced; the other thread is made to come out of the code, which is dropped;
//! when it comes to the page again, it makes code that compares its bytes; the kernel makes the
//! page writable; the other thread stores to it and calls it, and the comparison finds the
//! difference; the record says RWX, and the code that compares is dropped; whatever is made next is
//! guarded.
//!
//! **One thread.** No other thread has to be waited for: quiescing drops the thread's own code, and
//! is cheap if no code was made from the range ([`Code::drop_code`]).
//!
//! Stores of the guest's that fault on a guard ([`CodePages::announce_store`]) and system calls
//! that write to memory ([`CodePages::announce_outputs`]) are transactions, too. The latter give
//! the exclusive right back before the call is made, since a `read` may take for ever: their
//! announcement alone keeps code from relying on anything until [`Outputs`] is dropped.

use std::ops::Range;
use std::sync::MutexGuard;

use dynasour_guest::space::{Mapping, PAGE, page_down};
use nix::sys::mman::ProtFlags;
use smallvec::SmallVec;

use super::outputs;
use super::pages::{CodePages, Kind};
use super::schedule::{SyncPoint, sync_point};
use crate::memory::FaultInfo;

/// Ranges of one transaction: at most the old and the new place of `mremap`, as a rule.
pub type Ranges = SmallVec<[Range<u64>; 2]>;

/// The owner of all code that was made from guest memory: the dispatcher, or a test.
pub trait Code {
    /// Drops everything made from code in `range`, in all threads, and returns when no thread
    /// executes any of it. The caller has the exclusive right ([`CodePages::exclusive`]).
    fn drop_code(&mut self, range: Range<u64>);
}

/// An announcement with the exclusive right.
struct Exclusive<'p> {
    pages: &'p CodePages,
    ranges: Ranges,
    kind: Kind,
    /// Given back after the announcement was withdrawn, by [`Drop`].
    _right: MutexGuard<'p, ()>,
}

impl Exclusive<'_> {
    fn drop_code(&self, code: &mut dyn Code) {
        for range in self.ranges.iter().filter(|range| !range.is_empty()) {
            sync_point(SyncPoint::DropCode);
            code.drop_code(range.clone());
        }
    }
}

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        self.pages.end(&self.ranges, self.kind);
    }
}

/// See the module.
#[must_use]
pub struct Announced<'p>(Exclusive<'p>);

/// See the module.
#[must_use]
pub struct Quiet<'p> {
    change: Exclusive<'p>,
    /// Code and guards stay: the change takes only rights away that code does not need.
    keeps: bool,
}

/// See the module.
#[must_use]
pub struct Performed<'p> {
    change: Exclusive<'p>,
    keeps: bool,
}

/// What is mapped in the ranges after a change.
#[derive(Clone, Debug)]
pub enum News {
    /// Unknown: the kernel has to be asked.
    Unknown(Range<u64>),
    /// A new mapping; its properties, if they are known.
    Mapped(Range<u64>, Option<Mapping>),
    /// The guest has unmapped the range.
    Unmapped(Range<u64>),
    /// The guest has set this protection.
    Protected(Range<u64>, ProtFlags),
}

/// How a store that faulted is to be continued.
pub enum Store<'p> {
    /// The guest has no right to write: the fault is delivered to it.
    Refused,
    /// The page is open already: the store is repeated.
    Open,
    /// The page is guarded: this transaction opens it.
    Guarded(Announced<'p>),
}

impl<'p> Announced<'p> {
    /// Drops the code made from the ranges, and waits until no thread executes any of it.
    pub fn quiesce(self, code: &mut dyn Code) -> Quiet<'p> {
        self.0.drop_code(code);
        Quiet { change: self.0, keeps: false }
    }

    /// For a change that leaves the bytes, and the right to execute them, as they are, and takes
    /// the right to write: what was made stays true.
    pub fn keep_code(self) -> Quiet<'p> {
        Quiet { change: self.0, keeps: true }
    }
}

impl<'p> Quiet<'p> {
    /// Gives the guards in the ranges back, and makes the change.
    pub fn perform<R>(self, change: impl FnOnce() -> R) -> (Performed<'p>, R) {
        let Quiet { change: exclusive, keeps } = self;
        if !keeps {
            sync_point(SyncPoint::Open);
            let mut state = exclusive.pages.state();
            for range in &exclusive.ranges {
                if exclusive.kind == Kind::Store {
                    state.count_flips(range.clone());
                }
                state.open(range.clone());
            }
        }
        sync_point(SyncPoint::Perform);
        let result = change();
        (Performed { change: exclusive, keeps }, result)
    }

    /// Ends a transaction about bytes that have changed already, behind the guards.
    pub fn finish(self) {}
}

impl<'p> Performed<'p> {
    /// The change was not made as asked, though code was kept for it.
    pub fn again(self) -> Announced<'p> {
        Announced(self.change)
    }

    /// Records what there is now, and drops what was made meanwhile.
    pub fn publish(self, code: &mut dyn Code, news: impl IntoIterator<Item = News>) {
        sync_point(SyncPoint::Publish);
        let Performed { mut change, keeps } = self;
        {
            let mut state = change.pages.state();
            state.guards.publish();
            for news in news {
                match news {
                    News::Unknown(range) => {
                        state.mappings.forget(range);
                        state.is_surveyed = false;
                    }
                    News::Unmapped(range) => {
                        state.flips.retain(|page, _| !range.contains(page));
                        state.mappings.forget(range);
                    }
                    // Where nothing was, another thread may have guarded a page since the call, and
                    // is right.
                    News::Mapped(range, mapping) => {
                        state.flips.retain(|page, _| !range.contains(page));
                        match mapping {
                            Some(mapping) => state.mappings.set(range.clone(), mapping),
                            None => {
                                state.mappings.forget(range.clone());
                                state.is_surveyed = false;
                            }
                        }
                    }
                    News::Protected(range, prot) => {
                        state.guards.lose(range.clone());
                        state.mappings.set_protection(range, prot);
                        // The record may have no mapping there.
                        state.is_surveyed &= !prot.contains(ProtFlags::PROT_EXEC);
                    }
                }
            }
        }
        change.pages.end(&change.ranges, change.kind);
        if !keeps && change.kind == Kind::Mapping {
            change.drop_code(code);
        }
        // The announcement is withdrawn already.
        change.ranges.clear();
    }

    /// As [`Performed::publish`], with something new that is mapped to `fresh`, where nothing was
    /// when the change was announced: what was made from there since then (that nothing can be
    /// fetched) is dropped.
    pub fn publish_fresh(
        mut self,
        code: &mut dyn Code,
        news: impl IntoIterator<Item = News>,
        fresh: Range<u64>,
        mapping: Option<Mapping>,
    ) {
        self.change.pages.begin(std::slice::from_ref(&fresh), self.change.kind);
        self.change.ranges.push(fresh.clone());
        self.publish(code, news.into_iter().chain([News::Mapped(fresh, mapping)]));
    }
}

/// Ranges that the kernel may write to until this is dropped.
#[must_use]
pub struct Outputs<'p> {
    pages: &'p CodePages,
    ranges: outputs::Outputs,
}

impl Drop for Outputs<'_> {
    fn drop(&mut self) {
        if !self.ranges.is_empty() {
            self.pages.end(&self.ranges, Kind::Output);
        }
    }
}

impl CodePages {
    /// Begins a change of mappings, protections or whole contents of `ranges`.
    pub fn announce(&self, ranges: impl IntoIterator<Item = Range<u64>>) -> Announced<'_> {
        let ranges: Ranges = ranges.into_iter().filter(|range| !range.is_empty()).collect();
        let right = self.exclusive();
        self.begin(&ranges, Kind::Mapping);
        Announced(Exclusive { pages: self, ranges, kind: Kind::Mapping, _right: right })
    }

    /// A store of the guest has faulted. Was the cause a guard?
    pub fn announce_store(&self, fault: &FaultInfo) -> Store<'_> {
        if !fault.is_denied_write() {
            return Store::Refused;
        }
        let page = page_down(fault.addr);
        let right = self.exclusive();
        match self.guarded_by_us(fault) {
            None => Store::Open,
            Some(false) => Store::Refused,
            Some(true) => {
                let ranges: Ranges = std::iter::once(page..page + PAGE).collect();
                self.begin(&ranges, Kind::Store);
                Store::Guarded(Announced(Exclusive {
                    pages: self,
                    ranges,
                    kind: Kind::Store,
                    _right: right,
                }))
            }
        }
    }

    /// Must calls that may write to memory be announced? With one thread only if a page is guarded:
    /// no other thread can guard a page during the call.
    pub fn announces_outputs(&self) -> bool {
        self.is_threaded() || self.has_guards()
    }

    /// Is a page guarded?
    pub fn has_guards(&self) -> bool {
        !super::guards::none()
    }

    /// The kernel may be about to write to what the arguments of the call `nr` say. That is open
    /// from now on, until the result is dropped: the kernel would answer EFAULT where a page is
    /// write-protected.
    pub fn announce_outputs(&self, code: &mut dyn Code, nr: i64, args: &[u64; 6]) -> Outputs<'_> {
        self.announce_written(code, outputs::outputs(nr, args))
    }

    /// As [`announce_outputs`](CodePages::announce_outputs) for a call that may write to `ranges`.
    pub fn announce_written(&self, code: &mut dyn Code, ranges: outputs::Outputs) -> Outputs<'_> {
        let outputs = Outputs { pages: self, ranges };
        self.begin(&outputs.ranges, Kind::Output);
        if self.guarded(&outputs.ranges).is_empty() {
            return outputs;
        }
        let right = self.exclusive();
        let guarded: Ranges = self.guarded(&outputs.ranges).into();
        self.begin(&guarded, Kind::Store);
        let change = Exclusive { pages: self, ranges: guarded, kind: Kind::Store, _right: right };
        Announced(change).quiesce(code).perform(|| ()).0.publish(code, []);
        outputs
    }

    /// The bytes of `ranges` have changed, or may change unseen from now on, behind the guards:
    /// drops what was made from them.
    pub fn changed(&self, code: &mut dyn Code, ranges: impl IntoIterator<Item = Range<u64>>) {
        self.announce(ranges).quiesce(code).finish();
    }
}
