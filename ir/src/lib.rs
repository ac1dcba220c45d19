//! The assume IR: versions, anchors, verifier, evaluator and optimisation passes (DESIGN section 4).
//!
//! * [`types`], [`op`], [`version`], [`region`]: the data model. Everything prints as the text form.
//! * [`semantics`]: what each pure operation computes; [`hostflags`] asks the processor for flags.
//! * [`builder`]: appending instructions.
//! * [`text`]: printing and parsing; [`verify`]: the rules; [`reach`]: the analyses behind them.
//! * [`eval`]: running versions, and comparing them with `base`.
//! * [`opt`]: the passes. [`random`]: programs, traces and versions to try them on.

mod alias;
pub mod builder;
mod defs;
pub mod eval;
pub mod hostflags;
pub mod live;
pub mod op;
pub mod opt;
pub mod random;
pub mod reach;
pub mod region;
pub mod semantics;
pub mod setup;
pub mod text;
pub mod types;
pub mod verify;
pub mod version;
pub mod words;

pub use builder::Builder;
pub use op::{Cond, FlagOp, Op};
pub use region::Region;
pub use types::{AnchorId, BlockId, Gpr, Loc, NativeId, Operand, Ty, Value};
pub use version::{
    Anchor, Block, Context, DeferredStore, Edge, Effects, Fact, GuestTerm, Inst, Mem, Native, Segment, Term, Trap,
    Version, Via,
};
