//! From IR to native fragments: selection, registers, encoding, code cache (docs/design.md, "Code
//! generation").
//!
//! A *unit* is a folder or a file of this directory. A unit imports only units that stand above it
//! in this table; `tests/layers.rs` fails on a circle.
//!
//! | unit | what it is for | imports |
//! | --- | --- | --- |
//! | [`asm`] | bytes of single instructions | |
//! | [`cpu`] | features of the processor | |
//! | [`record`] | how an exit's state is rebuilt | |
//! | [`cache`] | memory for code; the only writer of placed code | `asm` |
//! | [`codegen`] | a version in, bytes and relocations out; no cache, no lock | `asm`, `cpu`, `record` |
//! | [`stubs`] | transitions between Rust and generated code | `asm`, `cache`, `cpu` |
//! | [`error`] | the errors of all units in one type | `cache`, `codegen`, `stubs` |
//! | [`fragment`] | data about a placed trace: exits, links, counters | `cache`, `codegen`, `record` |
//! | [`transfers`] | indirect jumps and returns | `asm`, `cache`, `codegen`, `cpu`, `stubs` |
//! | [`blocks`] | copied blocks, and the places that links lead to | all above but `record` |
//! | [`mod@emitter`] | owner of all of it; operations that need several units | all above but `asm` |
//!
//! Links are one protocol between fragments, blocks and tables, so the operations on them are
//! methods of [`Emitter`], in [`links`]. The data that they change belongs to the lower units: a
//! fragment's links to [`fragment`], a block's links and the places to [`blocks`]. A block learns
//! of a fragment only as a jump's destination; a fragment knows no block.
//!
//! Example: `emitter.copy(0x1000, code)` finds that 0x1000 has no block. `blocks` translates the
//! guest's instructions with `asm`, takes memory from `cache`, and puts jumps to `transfers`'
//! tables at its indirect exits. Later `codegen` compiles a trace of the block, [`Emitter::place`]
//! makes it a `fragment`, and [`Emitter::lead_to`] makes all links to 0x1000 lead to the fragment.

mod asm;
pub mod blocks;
pub mod cache;
pub mod codegen;
mod context_words;
pub mod cpu;
pub mod emitter;
mod error;
pub mod fragment;
pub mod record;
pub mod stubs;
pub mod transfers;

pub use codegen::mach::SiteKind;
pub use codegen::silence_allocator;
pub use codegen::{CodegenError, CompiledCode};
pub use cpu::{LightState, ticks};
pub use emitter::links;
pub use emitter::race::{StartKey, can_tell_start};
pub use emitter::{
    CompiledStub, Config, Deopt, Emitter, EntryPoint, EntryState, ExitReason, StubRequest,
    StubTarget,
};
pub use error::EmitError;
pub use fragment::counting;
pub use fragment::{Exit, ExitId, Fragment, FragmentId};
pub use record::PendingStore;
pub use stubs::set_gs;
pub use transfers::entry_check::EntryCheck;
pub use transfers::hit_rates::Rates;
pub use transfers::indirect::{Displaced, Diversion, Via};
pub use transfers::stack_returns::Returns;
