//! Stubs that the compiler's assembler has made: position-independent code among the program's constants, to be copied into the
//! code cache with some fields filled in. Every process needs them; assembling them at run time took a twelfth of the start of a
//! short one, mostly for the assembler's tables.
//!
//! Behind the code stands a struct of [`Label`]s. Its last one is the end of the code.

use crate::cache::{Cache, CacheError};

/// An offset in the code.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Label(u32);

/// A copy of such code under construction.
pub(crate) struct Template {
    bytes: Vec<u8>,
}

impl Template {
    /// The code from `start` on.
    ///
    /// # Safety
    /// `end` is the label at the end of code that begins at `start`, among the constants.
    pub unsafe fn new(start: *const u8, end: Label) -> Template {
        // SAFETY: what is between the two are constants.
        Template { bytes: unsafe { std::slice::from_raw_parts(start, end.0 as usize) }.to_vec() }
    }

    fn before(&mut self, label: Label, len: usize) -> &mut [u8] {
        let end = label.0 as usize;
        &mut self.bytes[end - len..end]
    }

    /// Fills in the four bytes before `label`.
    pub fn fill(&mut self, label: Label, value: u32) {
        self.before(label, 4).copy_from_slice(&value.to_le_bytes());
    }

    /// Fills in the eight bytes before `label`.
    pub fn fill_wide(&mut self, label: Label, value: u64) {
        self.before(label, 8).copy_from_slice(&value.to_le_bytes());
    }

    /// Makes the instruction of three bytes before `label` do nothing.
    pub fn drop_three(&mut self, label: Label) {
        self.before(label, 3).copy_from_slice(&[0x0f, 0x1f, 0x00]);
    }

    /// Leaves out what stands from one label to the other, over which no jump leads; labels behind are not to be used then.
    pub fn leave_out(&mut self, from: Label, to: Label) {
        self.bytes.drain(from.0 as usize..to.0 as usize);
    }

    /// Bytes of code.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Room for it in the cache.
    pub fn place(&self, cache: &mut Cache) -> Result<Placed, CacheError> {
        Ok(Placed { base: cache.alloc_hot(self.bytes.len(), 64)? })
    }

    /// Makes the jump before `label` lead to `target`.
    pub fn lead(&mut self, placed: Placed, label: Label, target: u64) {
        self.fill(label, target.wrapping_sub(placed.at(label)) as u32);
    }

    /// Puts it where its room is.
    pub fn write(self, placed: Placed, cache: &mut Cache) {
        cache.write(placed.base, &self.bytes);
    }
}

/// Where a [`Template`] is to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed {
    /// The address of its first byte.
    pub base: u64,
}

impl Placed {
    /// The address of what stands at `label`.
    pub fn at(self, label: Label) -> u64 {
        self.base + u64::from(label.0)
    }
}
