//! From IR to native fragments: selection, registers, encoding, code cache (docs/design.md, "Code
//! generation").

mod asm;
pub mod cache;
pub mod codegen;
mod compile;
pub mod copy;
pub mod counting;
pub mod cpu;
pub mod emitter;
mod exits;
pub mod fragment;
pub mod indirect;
pub mod links;
mod listing;
mod lookup;
mod miss_stubs;
mod rates;
pub mod record;
mod returns;
pub mod stubs;
mod transfers;

pub use codegen::mach::SiteKind;
pub use codegen::silence_allocator;
pub use codegen::{CodegenError, CompiledCode, cost};
pub use cpu::ticks;
pub use emitter::{Config, Deopt, Diversion, EmitError, Emitter, EntryPoint, EntryState, Left};
pub use fragment::{Exit, ExitId, Fragment, FragmentId};
pub use indirect::{Displaced, Via};
pub use rates::Rates;
pub use record::PendingStore;
pub use returns::Returns;
pub use stubs::set_gs;
pub use transfers::entry_check::EntryCheck;
