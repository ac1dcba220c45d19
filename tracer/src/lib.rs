//! Decides what is hot and what to assume about it (docs/design.md, "Recording and speculation").
//!
//! * [`heads`]: counters of trace heads, penalties, heads given up.
//! * [`sampled_calls`]: a loop that is found by samples is counted for what it calls.
//! * [`head_pauses`]: when the executions of a head are counted natively, and when not.
//! * [`effort`]: how much time may go into finding and making traces.
//! * [`selector`]: starts recordings, and decides what becomes of them.
//! * [`worth`]: is a trace better than the copied blocks that it replaces?
//! * [`recorder`]: the state machine that records the path which the guest executes next.
//! * [`guests`]: traces along the loops of a program that the guest interprets.
//! * [`build`]: turns a recorded path into a trace version in which every speculation is an
//!   `assume`.
//! * `entry_guards`: the assumptions about registers at a trace's entry.
//! * [`survival`]: counts how often the guest keeps to a recorded path; `iterations`: records those
//!   iterations of a loop, or executions of a function, that do not.
//! * `calls`: how deep a path follows recursion.
//! * [`short_loops`]: loops so short and regular that they are unrolled into the traces around
//!   them.
//! * [`placement`]: which assumptions a trace makes, and where their guards stand.
//! * [`race`]: judges traces by measurement; `advances`: counts iterations where no instruction does.
//! * [`policy`]: the numbers and choices that a study may exchange.
//!
//! The crate has no global state and takes no lock. Each guest thread has a [`TraceSelector`] and
//! an [`Effort`] of its own, and only that thread calls them. The [`head_pauses::HeadCount`]s of
//! copied blocks are shared by all threads; the runtime calls them under the lock of its fragments.
//! The crate does not know how code is emitted or run.
//!
//! Invariant: what the crate decides changes how fast a guest runs, never what it computes. Each
//! assumption of a trace is an `assume` with an anchor.
//!
//! ```text
//! the loop head 0x1000 is counted 1,000 times           heads, selector
//! the path 0x1000 → 0x1040 → 0x1000 is recorded         recorder
//! it saves enough compared with its copied blocks       survival, worth
//! the version t1 with two assumes is built              build, entry_guards, placement
//! ```

mod advances;
pub mod assumptions;
pub mod build;
mod calls;
mod closing;
mod definitions;
pub mod effort;
mod entry_guards;
pub mod guests;
pub mod head_pauses;
pub mod heads;
mod iterations;
pub mod placement;
pub mod policy;
mod positions;
pub mod race;
mod recorder;
pub mod sampled_calls;
pub mod selector;
pub mod short_loops;
pub mod survival;
pub mod worth;

pub use assumptions::{Assumption, Place};
pub use build::{BuildError, Built, Path, Step, TraceShape};
pub use dynasour_ir::predict::Surroundings;
pub use effort::{Budget, Effort};
pub use guests::{DispatchHeads, GuestLoop, Key as GuestKey};
pub use heads::{HeadTable, Heat};
pub use placement::Placement;
pub use policy::{Bounded, DefaultPolicy, HEAD_THRESHOLD, RegisterUse, SpeculationPolicy};
pub use recorder::{AbortReason, EndReason, HeadKind, Recorder, Recording, TargetKind};
pub use selector::{NextBlock, Selected, TraceSelector};
pub use short_loops::{Probe, Verdict};
pub use survival::{Runs, Survival};
