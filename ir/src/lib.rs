//! The assume IR: versions, anchors, verifier, evaluator and optimisation passes (docs/design.md,
//! "The IR").
//!
//! A *version* is one executable form of a guest region: `base`, which is lifted guest code, or a
//! trace, in which every speculation is an `assume` that names an anchor. The crate owns no global
//! state. All data is plain values; a caller that shares a version between threads brings its own
//! lock.
//!
//! * [`types`], [`op`], [`version`], [`region`]: the data model. Everything prints as the text
//!   form.
//! * [`semantics`]: what each pure operation computes; [`hostflags`] executes instructions to learn
//!   their flags.
//! * [`builder`]: appending instructions.
//! * [`text`]: printing and parsing; [`verify`]: the rules; [`reach`]: the analyses behind them.
//! * [`eval`]: running versions, and comparing them with `base`; [`predict`]: guessing what one
//!   will compute.
//! * [`validate`]: does an optimised trace do what was recorded? [`opt`]: the passes. [`random`]: programs, traces and versions to try them on.
//!
//! `ir/README.md` has the text form with a worked example.

mod alias;
pub mod builder;
mod defs;
pub mod eval;
pub mod expressions;
pub mod hostflags;
pub mod live;
pub mod op;
pub mod opt;
pub mod origin;
pub mod predict;
pub mod prove;
pub mod random;
pub mod reach;
pub mod region;
pub mod semantics;
pub mod setup;
mod side_conditions;
pub mod split;
pub mod text;
pub mod types;
pub mod validate;
pub mod verify;
pub mod version;

pub use builder::Builder;
pub use op::{Cond, FlagOp, Op};
pub use origin::{Origin, OriginKind, Origins};
pub use region::Region;
pub use types::{AnchorId, BlockId, Gpr, Loc, NativeId, Operand, Ty, Value};
pub use version::{
    Anchor, Block, Context, DeferredStore, Edge, Effects, Fact, GuestTerm, Inst, Mem, Native,
    Segment, Split, Term, Trap, Version, Via,
};
