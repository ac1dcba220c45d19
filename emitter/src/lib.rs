//! From IR to native fragments: selection, registers, encoding, code cache (docs/design.md, "Code
//! generation").

mod asm;
pub mod blocks;
pub mod cache;
pub mod codegen;
pub mod cpu;
pub mod emitter;
mod error;
pub mod fragment;
pub mod record;
pub mod stubs;
pub mod transfers;

pub use codegen::mach::SiteKind;
pub use codegen::silence_allocator;
pub use codegen::{CodegenError, CompiledCode, cost};
pub use cpu::ticks;
pub use emitter::links;
pub use emitter::{Config, Deopt, Emitter, EntryPoint, EntryState, Left};
pub use error::EmitError;
pub use fragment::counting;
pub use fragment::{Exit, ExitId, Fragment, FragmentId};
pub use record::PendingStore;
pub use stubs::set_gs;
pub use transfers::entry_check::EntryCheck;
pub use transfers::hit_rates::Rates;
pub use transfers::indirect::{Displaced, Diversion, Via};
pub use transfers::stack_returns::Returns;
