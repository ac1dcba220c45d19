//! Changes of guest code: what may be executed, what may change it, and how a change is noticed
//! (`docs/design.md`, "Protocols").
//!
//! Code is translated once and executed often, so a change of it must be noticed before anything
//! made from it is executed again. How depends on the page:
//!
//! | page | changed by | how that is noticed |
//! | --- | --- | --- |
//! | private, not writable | mprotect, mmap, munmap, … | by the call |
//! | private, writable | stores, system calls that write memory | *guarded*: write-protected behind the guest's back |
//! | shared, of a file open for writing, written too often | also other processes, other mappings | not at all: code made from it compares its bytes |
//!
//! | file | |
//! | --- | --- |
//! | [`pages`] | the record: mappings, guards, announced ranges; [`CodePages::watch`], by which translators rely on it |
//! | [`transaction`] | every change: announce, quiesce, perform, publish |
//! | [`host`] | stores of the host's own |
//! | [`outputs`] | which memory a system call may write |
//! | [`listing`] | `/proc/self/maps` without guards |
//! | [`schedule`] | the steps at which tests let another thread go on |
//! | `model` | the protocol as an explicit-state model, explored in the tests |
//! | `scheduler` | drives real threads through interleavings, in the tests (`dispatch/interleavings.rs`) |
//!
//! **Invariant.** What a thread executes after an operation has completed was read after that
//! operation: an operation is a store, a system call, or the start of a thread, and it has
//! completed when its thread goes on. And: no fault that the guest would not have natively; nobody
//! waits for ever.
//!
//! Not noticed: what other processes write to files of which code is mapped privately, or to
//! private pages (ptrace, process_vm_writev).

mod guards;
pub mod host;
mod listing;
pub mod outputs;
mod pages;
pub mod schedule;
pub mod transaction;

pub use pages::CodePages;
pub use transaction::{Code, News, Store};

#[cfg(test)]
mod model;
#[cfg(test)]
pub(crate) mod scheduler;
#[cfg(test)]
mod tests;
