//! Why code could not be made: the errors of all units in one type.
//!
//! The caller tells two cases apart. [`EmitError::is_full`] asks for a flush and another attempt.
//! Any other error refuses this version or block; the caller goes on without it.

use crate::cache::CacheError;
use crate::codegen::CodegenError;
use crate::stubs::StubError;

/// Why a version could not be emitted. [`EmitError::is_full`] asks for a flush; anything else
/// refuses this version.
#[derive(thiserror::Error, Debug)]
pub enum EmitError {
    /// The cache is full or cannot be mapped.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The stubs cannot be generated on this machine.
    #[error(transparent)]
    Stub(#[from] StubError),
    /// The version cannot be compiled.
    #[error(transparent)]
    Codegen(#[from] CodegenError),
    /// The code was compiled for a state that has been dropped meanwhile.
    #[error("compiled for an emitter that has dropped everything since")]
    Stale,
    /// A block's instruction cannot be encoded anew.
    #[error("cannot encode: {0}")]
    Encode(#[from] iced_x86::IcedError),
    /// No such exit or fragment, or not of the kind the call is for.
    #[error("no such exit or fragment")]
    Unknown,
}

impl EmitError {
    /// Is the cache full? The same code may fit after a flush.
    pub fn is_full(&self) -> bool {
        matches!(self, EmitError::Cache(CacheError::Full))
    }
}
