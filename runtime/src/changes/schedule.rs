//! The steps of the protocol, where a test may stop a thread to let another one go on.
//!
//! In release builds [`sync_point`] is nothing and [`lock`] is an ordinary lock. In the tests of
//! this crate both ask the scheduler (`super::scheduler`), if the thread is one of its threads.

/// A point at which a thread is about to do something that other threads can see.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SyncPoint {
    /// Takes the exclusive right to change code.
    TakeExclusive,
    /// Announces a range.
    Announce,
    /// Drops what was made from a range.
    DropCode,
    /// Gives guards back.
    Open,
    /// Makes the change.
    Perform,
    /// Records what there is, and withdraws the announcement.
    Publish,
    /// Reads code.
    Fetch,
    /// Guards what was read.
    Watch,
    /// Begins to interpret.
    Enter,
    /// Has stopped interpreting.
    Leave,
    /// Waits for another thread.
    Wait,
}

#[cfg(not(test))]
mod real {
    use std::sync::{Mutex, MutexGuard};

    use super::SyncPoint;

    /// See the module.
    #[inline(always)]
    pub fn sync_point(_: SyncPoint) {}

    /// See the module.
    #[inline(always)]
    pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        crate::sync::lock(mutex)
    }
}

#[cfg(not(test))]
pub use real::{lock, sync_point};

#[cfg(test)]
pub use super::scheduler::{lock, sync_point};
