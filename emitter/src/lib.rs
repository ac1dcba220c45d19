//! From IR to native fragments: selection, registers, encoding, code cache (DESIGN section 6).

pub mod cache;
pub mod copy;
pub mod counting;
pub mod cpu;
pub mod emitter;
mod encode;
mod encoded;
mod exits;
pub mod fragment;
pub mod indirect;
mod instruction;
mod links;
mod listing;
mod lookup;
mod lower;
mod lower_exit;
mod lower_flags;
mod lower_mem;
mod lower_ops;
mod mach;
mod pieces;
mod placement;
pub mod record;
mod rest;
mod section;
mod splice;
pub mod stubs;
mod words;
mod x86;

pub use emitter::{Config, Deopt, Diversion, EmitError, Emitter, EntryPoint, EntryState, Left};
pub use fragment::{Exit, ExitId, Fragment, FragmentId};
pub use indirect::{Displaced, Via};
pub use mach::SiteKind;
pub use record::PendingStore;
pub use stubs::set_gs;
