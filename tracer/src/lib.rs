//! What is hot, and what to assume about it (DESIGN section 5).
//!
//! * [`heads`]: trace-head counters, penalties, the blacklist.
//! * [`recorder`]: the state machine that follows the next executing tail.
//! * [`guests`]: interpreters as guests: traces along the loops of the program that the guest interprets.
//! * [`observe`]: what a block is about to compute.
//! * [`build`]: from a recorded path to a trace version whose every speculation is an `assume`.
//! * [`survival`]: how well recorded paths are kept to.
//! * [`trips`]: loops so short and regular that they are unrolled into the traces around them.
//! * [`placement`]: which assumptions a trace makes and where their guards stand.
//! * [`policy`]: the numbers and choices a study may swap.

pub mod build;
pub mod guests;
pub mod heads;
pub mod observe;
pub mod placement;
pub mod policy;
pub mod recorder;
pub mod survival;
pub mod trips;

pub use build::{BuildError, Path, Step, TraceShape};
pub use guests::{DispatchHeads, GuestLoop};
pub use heads::{HeadTable, Heat};
pub use observe::Surroundings;
pub use placement::Placement;
pub use policy::{DefaultPolicy, HEAD_THRESHOLD, SpeculationPolicy};
pub use recorder::{AbortReason, EndReason, HeadKind, Landing, Recorder, Recording};
pub use survival::{Runs, Survival};
pub use trips::{Probe, Verdict};
