//! Guest memory as the processor's instruction fetch sees it, for the lifter. The processor fetches
//! nothing from a page without the right to be executed, so the lifter must not either.
//!
//! An [`ExecutableCode`] owns no data: which pages are executable, and which may change, is the
//! guest's [`CodePages`], which has its own lock (rank 10 in [`crate::sync`]). Any guest thread may
//! call it that does not hold that lock.
//!
//! Example: 0x1000..0x2000 is executable and the page after it is not. `fetch(0x1ffc, buf)` with
//! 15 bytes returns 4, so an instruction that needs more becomes a fetch trap.

use std::ops::Range;
use std::sync::Arc;

use dynasour_guest::decode::{Fetch, Moment, Watched};

use crate::changes::CodePages;
use crate::memory;

/// Executable guest memory; see [`CodePages`].
#[derive(Debug, Default)]
pub struct ExecutableCode {
    pages: Arc<CodePages>,
}

impl ExecutableCode {
    /// A reader of the pages that are executable according to `pages`.
    pub fn new(pages: Arc<CodePages>) -> ExecutableCode {
        ExecutableCode { pages }
    }

    /// See [`CodePages::is_known_constant`].
    pub fn is_known_constant(&self, pc: u64, range: Range<u64>) -> bool {
        self.pages.is_known_constant(pc, range)
    }
}

impl Fetch for ExecutableCode {
    fn fetch(&self, addr: u64, buf: &mut [u8]) -> usize {
        let len = self.pages.fetchable(addr, buf.len());
        memory::fetch_code(addr, &mut buf[..len])
    }

    fn is_writable(&self, range: Range<u64>) -> bool {
        self.pages.may_change(range)
    }

    fn constant(&self, pc: u64, address: u64) -> Option<u64> {
        let mut word = [0; 8];
        let is_read = self.pages.is_constant(pc, address..address.checked_add(8)?)
            && memory::fetch_code(address, &mut word) == 8;
        is_read.then_some(u64::from_le_bytes(word))
    }

    fn word(&self, address: u64) -> Option<u64> {
        let mut word = [0; 8];
        (memory::copy_in(address, &mut word) == 8).then(|| u64::from_le_bytes(word))
    }

    fn moment(&self) -> Moment {
        self.pages.moment()
    }

    fn watch(&self, range: Range<u64>, since: Moment) -> Watched {
        self.pages.watch(range, since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_fetched_and_data_is_not() {
        let code = ExecutableCode::default();
        let function = code_is_fetched_and_data_is_not as fn() as usize as u64;
        let data = [0x90u8; 16];
        let mut bytes = [0; 16];
        assert_eq!(code.fetch(function, &mut bytes), 16);
        assert_eq!(code.fetch(data.as_ptr() as u64, &mut bytes), 0);
        assert_eq!(code.fetch(0, &mut bytes), 0);
    }
}
