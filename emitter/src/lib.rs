//! From IR to native fragments: selection, registers, encoding, code cache (docs/design.md, "Code
//! generation").

mod asm;
pub mod blocks;
pub mod cache;
pub mod codegen;
mod compile;
pub mod counting;
pub mod cpu;
pub mod emitter;
pub mod fragment;
pub mod links;
mod listing;
pub mod record;
pub mod stubs;
pub mod transfers;

pub use codegen::mach::SiteKind;
pub use codegen::silence_allocator;
pub use codegen::{CodegenError, CompiledCode};
pub use cpu::ticks;
pub use emitter::{Config, Deopt, Diversion, EmitError, Emitter, EntryPoint, EntryState, Left};
pub use fragment::{Exit, ExitId, Fragment, FragmentId};
pub use record::PendingStore;
pub use stubs::set_gs;
pub use transfers::entry_check::EntryCheck;
pub use transfers::hit_rates::Rates;
pub use transfers::indirect::{Displaced, Via};
pub use transfers::stack_returns::Returns;
