//! What everybody else in the process needs of the code pages: the host's stores into guest memory, and the signal
//! handler.

use std::sync::{Arc, OnceLock};

use super::CodePages;
use crate::memory::FaultInfo;

/// The code pages of this process.
static CURRENT: OnceLock<Arc<CodePages>> = OnceLock::new();

/// Makes these the code pages of the process, for good.
pub fn install(pages: &Arc<CodePages>) {
    let _ = CURRENT.set(pages.clone());
}

/// A store of the host's own into guest memory faulted: can it be repeated? Also called in the signal handler, for faults
/// of stores to guest memory only: such an instruction stands neither in the allocator nor in [`CodePages`].
pub fn opened_for_host(fault: &FaultInfo) -> bool {
    CURRENT.get().is_some_and(|pages| pages.opened_by_fault(fault))
}
