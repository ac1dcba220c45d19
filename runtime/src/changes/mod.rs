//! Changes of guest code: what may be executed, what may change it, and how a change is noticed
//! (`docs/design.md`, "Protocols").
//!
//! Guest code is translated once and executed often. So a change of guest code must be noticed
//! before any translation of it is executed again. How it is noticed depends on the page:
//!
//! | page | changed by | how the change is noticed |
//! | --- | --- | --- |
//! | private or owned, not writable | mprotect, mmap, munmap, … | by the call |
//! | private or owned, writable | stores, system calls that write memory | *guarded*: write-protected behind the guest's back |
//! | shared, of a file open for writing, or written too often | also other processes, other mappings | not at all: code made from it compares its bytes |
//!
//! | file | contents |
//! | --- | --- |
//! | [`pages`] | [`CodePages`]: mappings, guards, announced ranges |
//! | [`transaction`] | every change as a transaction: announce, quiesce, perform, publish |
//! | [`host`] | the host's own stores to guest memory |
//! | `sharing` | shared memory that is *owned*: nothing else shows it |
//! | [`patches`] | jumps that are written into guest code where it stands |
//! | [`trampolines`] | jumps between these and what they lead to |
//! | [`hiding`] | keeps patches out of the guest's sight |
//! | [`outputs`], [`inputs`] | which memory a system call may write, and which it reads |
//! | [`listing`] | `/proc/self/maps` without guards and hiding |
//! | [`schedule`] | the steps at which tests switch threads |
//! | `model` | the protocol as an explicit-state model, explored in the tests |
//! | `scheduler` | drives real threads through interleavings, in the tests (`dispatch/interleavings.rs`) |
//!
//! **Invariant.** What a thread executes after an operation has completed was read after that
//! operation: an operation is a store, a system call, or the start of a thread, and it has
//! completed when its thread executes the next instruction. Besides: the guest gets no fault that
//! it would not get natively, and no thread waits for ever.
//!
//! Not noticed: writes of other processes to files whose code is mapped privately, or to private
//! pages (ptrace, process_vm_writev).
//!
//! Callers are guest threads outside native code, and the signal handler ([`host`]); each file says
//! which locks it takes.
//!
//! Example: a JIT compiler's page is RWX. Its first translation guards it; the guest's next store
//! to it faults; the store's transaction drops the translations, opens the page and repeats the
//! store.

mod guards;
pub mod hiding;
pub mod host;
pub mod inputs;
mod listing;
pub mod outputs;
mod pages;
pub mod patches;
pub mod schedule;
mod sharing;
pub mod trampolines;
pub mod transaction;

pub use pages::CodePages;
pub use transaction::{Code, News, Store};

#[cfg(test)]
mod model;
#[cfg(test)]
pub(crate) mod scheduler;
#[cfg(test)]
mod tests;
