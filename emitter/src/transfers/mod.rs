//! Indirect jumps, calls and returns between pieces of generated code.
//!
//! | file | what it is |
//! | --- | --- |
//! | [`indirect`] | the code at each site: a jump through the first table |
//! | [`entry_check`] | the beginning of a destination, which compares the target |
//! | [`lookup`] | the two tables |
//! | [`miss_stubs`] | shared code for a target that the first table does not have |
//! | [`stack_returns`] | returns through the processor's return stack |
//! | [`diversion`] | how a thread gets out of here when a signal arrives |
//! | [`hit_rates`] | counters of how targets were found |
//!
//! Data: [`Indirect`](indirect::Indirect) owns the tables and the addresses of the stubs.
//! Invariant: a reader never trusts a table; every destination compares the target itself. The
//! caller holds the emitter; generated code reads the tables on any thread.
//!
//! Example: `jmp rax` at 0x1000 goes to 0x2000 for the first time. The site's jump goes through the
//! table of rax, whose word for 0x2000 leads out. The runtime copies the block at 0x2000 with a
//! checked entry and inserts it. The next execution arrives there without the runtime.

pub(crate) mod diversion;
pub(crate) mod entry_check;
pub(crate) mod hit_rates;
pub mod indirect;
pub(crate) mod lookup;
pub(crate) mod miss_stubs;
pub(crate) mod stack_returns;
