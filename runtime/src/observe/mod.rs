//! What a run reports about itself, for users and tools. Nothing here changes what a guest does.
//!
//! | file | what it is for |
//! | --- | --- |
//! | [`attempts`] | the heads at which traces were tried, and what became of them |
//! | [`census`] | the document that `explain` and `guards` read: fragments, guards, counts |
//! | [`certificate`] | what `--verify-traces` and `--prove-traces` have shown |
//! | [`channel`], [`events`], [`counters`] | what a program is told that has started the guest |
//! | [`describe`] | paths and guards in the terms of a census |
//! | [`guest_code`] | for which guest instruction each line of a version is |
//! | [`ledger`] | the records of a counting run, from which a census is made |
//! | [`linker`] | where the guest's dynamic linker lies, which is counted apart |
//! | [`profile`] | the time that each thread spends in each phase, and samples of native code |
//! | [`stats`] | the counters that `--stats` prints |
//! | [`perf_map`] | names of generated code for `perf` |
//! | [`watch`] | tools that are told of generated code when it is made: `perf`'s jitdump, GDB |

pub mod attempts;
pub mod census;
pub mod certificate;
pub mod channel;
pub mod counters;
pub(crate) mod describe;
pub mod events;
pub mod guest_code;
pub(crate) mod ledger;
pub(crate) mod linker;
pub(crate) mod perf_map;
pub mod profile;
pub mod stats;
pub mod watch;
