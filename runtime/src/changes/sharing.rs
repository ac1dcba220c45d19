//! Shared anonymous memory that nothing else shows.
//!
//! A JIT compiler may keep its code in memory of `MAP_SHARED | MAP_ANONYMOUS`, as PHP does. Such
//! memory changes in the same ways as private memory while it is *owned*: one mapping of this process
//! shows it, in one piece or several, and no other process has it.
//!
//! ```text
//!   mmap ──► owned ──► shared for good: the process forks, the memory is remapped, or its file
//!                      (`/proc/self/map_files`) is opened for writing or mapped
//! ```
//!
//! After its first fork a process owns nothing any more: another thread may map memory while the child
//! is made.
//!
//! Data: [`Owned`], part of the record of mappings and behind its lock. Who ends ownership drops what was
//! made from the memory ([`CodePages::changed`]).
//!
//! Example: `php` maps 64 MiB for opcache's JIT compiler, makes them writable, writes a function, and
//! makes them executable. The function is translated as if the memory were private.

use std::ops::Range;

use dynasour_guest::space::{FileRange, Mapping};
use rustc_hash::FxHashSet;

use super::CodePages;

/// The most pieces of memory that are owned at a time (guess: for each one the kernel is asked for its
/// list of mappings).
const MOST: usize = 64;

/// The shared memory that is owned.
#[derive(Debug, Default)]
pub(super) struct Owned {
    /// The device and the inode of each piece.
    files: FxHashSet<((u32, u32), u64)>,
    /// Nothing is owned any more.
    is_over: bool,
}

fn id(file: &FileRange) -> ((u32, u32), u64) {
    (file.device, file.inode)
}

impl Owned {
    /// Is what this mapping shows owned?
    pub fn contains(&self, mapping: &Mapping) -> bool {
        mapping.file.is_some_and(|file| self.files.contains(&id(&file)))
    }
}

impl CodePages {
    /// The guest has just mapped shared anonymous memory at `address`.
    pub fn own_shared(&self, address: u64) {
        let mut state = self.state();
        if state.owned.is_over || state.owned.files.len() >= MOST {
            return;
        }
        state.refresh();
        let mapping = state.mappings.at(address).filter(|mapping| mapping.shared);
        if let Some(file) = mapping.and_then(|mapping| mapping.file) {
            state.owned.files.insert(id(&file));
        }
    }

    /// Is some shared memory owned?
    pub fn owns_shared(&self) -> bool {
        !self.state().owned.files.is_empty()
    }

    /// Is memory owned that has this inode?
    pub fn owns_file(&self, inode: u64) -> bool {
        self.state().owned.files.iter().any(|(_, owned)| *owned == inode)
    }

    /// What is mapped in `range` is not owned any more. Where is it mapped?
    pub fn disown(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let mut state = self.state();
        if state.owned.files.is_empty() {
            return Vec::new();
        }
        state.refresh();
        let shown: FxHashSet<_> = state
            .mappings
            .parts(range.clone())
            .filter_map(|(_, mapping)| mapping.file.map(|file| id(&file)))
            .filter(|id| state.owned.files.contains(id))
            .collect();
        let is_shown =
            |mapping: &Mapping| mapping.file.is_some_and(|file| shown.contains(&id(&file)));
        let ranges = state
            .mappings
            .parts(0..u64::MAX)
            .filter(|(_, mapping)| is_shown(mapping))
            .map(|(range, _)| range)
            .collect();
        state.owned.files.retain(|id| !shown.contains(id));
        ranges
    }

    /// Nothing is owned from now on. Where is it mapped?
    pub fn disown_all(&self) -> Vec<Range<u64>> {
        self.state().owned.is_over = true;
        self.disown(&(0..u64::MAX))
    }
}
