//! The entry states of a validation: guest memory as it is, and a case's changes of it.
//!
//! Memory is kept in words of eight bytes, by address / 8.
//!
//! Data: [`Memory`] reads guest memory through a function and keeps what it has read, so that all runs
//! see the same. [`Case`] is an entry state, [`Change`] makes another one of it. Invariant: what the passes
//! took for constant is not changed. One validation uses them; no lock.
//!
//! ```text
//! recorded: rdi = 0x1000, [0x1000] = 5      with Change::Memory(0x1000, 4, 6): words {0x200: 6}
//! ```

use crate::eval::{STORED, State};
use crate::predict::{NativeResults, Registers};
use crate::semantics::ARITH_FLAGS;
use crate::setup::{Setting, Setup};
use crate::types::{Gpr, Loc, Ty};
use crate::version::{Fact, Version};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::collections::BTreeMap;

const PAGE_SHIFT: u32 = 12;

/// The guest's memory.
pub(super) struct Memory<'a> {
    read: &'a dyn Fn(u64, u32) -> Option<u64>,
    /// What was read, by address / 8.
    words: RefCell<FxHashMap<u64, Option<u64>>>,
    /// Pages that the passes took for constant: they cannot be written.
    constant: FxHashSet<u64>,
}

impl<'a> Memory<'a> {
    pub fn new(read: &'a dyn Fn(u64, u32) -> Option<u64>, constants: &[(u64, u32)]) -> Memory<'a> {
        let pages = |(address, size): &(u64, u32)| {
            [*address, address.wrapping_add(u64::from(*size) - 1)].map(|a| a >> PAGE_SHIFT)
        };
        let constant = constants.iter().flat_map(pages).collect();
        Memory { read, words: RefCell::default(), constant }
    }

    /// Memory holds what the version's context says, although the guest may have changed it since the
    /// version was made: nothing enters the version then.
    pub fn fit(&self, version: &Version) {
        for fact in &version.context.facts {
            let Fact::MemEquals { ty, address, value } = *fact else { continue };
            for (word, mask, bits) in pieces(address, ty.bytes(), value) {
                if let Some(old) = self.word(word) {
                    self.words.borrow_mut().insert(word, Some(old & !mask | bits));
                }
            }
        }
    }

    /// The content of a word, if it can be read.
    fn word(&self, word: u64) -> Option<u64> {
        *self.words.borrow_mut().entry(word).or_insert_with(|| (self.read)(word << 3, 8))
    }

    /// Is this memory taken for constant?
    pub fn is_constant(&self, word: u64) -> bool {
        self.constant.contains(&(word << 3 >> PAGE_SHIFT))
    }
}

/// An entry state.
#[derive(Clone, Debug, Default)]
pub(super) struct Case {
    /// Registers and flags.
    pub state: State,
    /// FS and GS base.
    pub segments: [u64; 2],
    /// Memory that differs from the guest's, by address / 8.
    words: BTreeMap<u64, u64>,
    /// The address of a page that cannot be accessed.
    pub faulting: Option<u64>,
    /// The address of a page that cannot be written.
    pub unwritable: Option<u64>,
    /// What a native computes, by its pc and the position among its results.
    pub natives: BTreeMap<(u64, usize), u64>,
    /// Does another thread change each word after it was loaded, unless the guest has written it? A
    /// version that leaves out a load, or moves it, shows then.
    pub peer: bool,
}

/// A change of a case.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Change {
    /// A register, or the flags.
    Loc(Loc, u64),
    /// Memory: address, size, value.
    Memory(u64, u32, u64),
    /// What a native computes.
    Native(u64, usize, u64),
    /// What a native stores: its pc, position of the first byte, number of bytes, their value.
    Stored(u64, u64, u32, u64),
    /// The page of this address cannot be accessed.
    Faulting(u64),
    /// It cannot be written.
    Unwritable(u64),
}

impl Case {
    /// The state in which a version was recorded, with what its context says.
    pub fn new(
        entry: &Registers,
        results: &NativeResults,
        version: &Version,
        memory: &Memory<'_>,
    ) -> Case {
        let state = State { gpr: entry.gpr, flags: entry.rflags & ARITH_FLAGS };
        let ip = |native: usize| version.natives.get(native).map(|n| n.inst.ip());
        let natives = results
            .iter()
            .filter_map(|(&(native, output), &value)| Some(((ip(native)?, output), value)))
            .collect();
        let case = Case { state, segments: entry.segments, natives, ..Case::default() };
        case.fitting(version, memory)
    }

    /// This case, with what the version's context says.
    fn fitting(mut self, version: &Version, memory: &Memory<'_>) -> Case {
        for fact in &version.context.facts {
            if let Fact::MemEquals { ty, address, value } = *fact {
                self.write(address, ty.bytes(), value, memory);
            }
        }
        self.state.fit(&version.context);
        self
    }

    /// This case with a change.
    pub fn with(&self, change: Change, version: &Version, memory: &Memory<'_>) -> Case {
        let mut case = self.clone();
        match change {
            Change::Loc(loc, value) => case.state.set(loc, value),
            Change::Memory(address, size, value) => case.write(address, size, value, memory),
            Change::Native(ip, output, value) => drop(case.natives.insert((ip, output), value)),
            Change::Stored(ip, first, size, value) => {
                let bytes =
                    (0..size as usize).map(|i| (STORED + first as usize + i, value >> (8 * i)));
                case.natives.extend(bytes.map(|(output, byte)| ((ip, output), byte & 0xff)));
            }
            Change::Faulting(address) => case.faulting = Some(address),
            Change::Unwritable(address) => case.unwritable = Some(address),
        }
        case.fitting(version, memory)
    }

    /// This case with other registers, after these stores. `None` if they fault, or if the version is not
    /// entered then.
    pub fn at(
        &self,
        state: &State,
        stores: &[(u64, u32, u64)],
        version: &Version,
        memory: &Memory<'_>,
    ) -> Option<Case> {
        let mut case = self.clone();
        for &(address, size, value) in stores {
            for (word, mask, bits) in pieces(address, size, value) {
                let old = case.word(word, memory).filter(|_| case.can_write(word, memory))?;
                case.words.insert(word, old & !mask | bits);
            }
        }
        case.state = state.clone();
        let fits = case.clone().fitting(version, memory);
        (fits.state == case.state && fits.words == case.words).then_some(case)
    }

    /// Changes memory that can be read and is not constant.
    fn write(&mut self, address: u64, size: u32, value: u64, memory: &Memory<'_>) {
        for (word, mask, bits) in pieces(address, size, value) {
            if let Some(old) = self.word(word, memory).filter(|_| !memory.is_constant(word)) {
                self.words.insert(word, old & !mask | bits);
            }
        }
    }

    /// The word before anything is written.
    pub fn word(&self, word: u64, memory: &Memory<'_>) -> Option<u64> {
        let page = word << 3 >> PAGE_SHIFT;
        if self.faulting.is_some_and(|at| at >> PAGE_SHIFT == page) && !memory.is_constant(word) {
            return None;
        }
        self.words.get(&word).copied().or_else(|| memory.word(word))
    }

    pub fn can_write(&self, word: u64, memory: &Memory<'_>) -> bool {
        let page = word << 3 >> PAGE_SHIFT;
        self.unwritable.is_none_or(|at| at >> PAGE_SHIFT != page) && !memory.is_constant(word)
    }

    /// The case as text, with all memory that was read.
    pub fn setup(&self, memory: &Memory<'_>) -> Setup {
        let registers = Gpr::all().map(|g| (Loc::Gpr(g), self.state.gpr[g.number()]));
        let [fs, gs] = self.segments;
        let others = [(Loc::Flags, self.state.flags), (Loc::FsBase, fs), (Loc::GsBase, gs)];
        let locs = registers.chain(others).filter(|(_, value)| *value != 0);
        let mut settings: Vec<Setting> =
            locs.map(|(loc, value)| Setting::Loc(loc, value)).collect();
        let read: Vec<u64> = memory.words.borrow().keys().copied().collect();
        let words = read.into_iter().chain(self.words.keys().copied());
        let known: BTreeMap<u64, u64> =
            words.filter_map(|word| Some((word, self.word(word, memory)?))).collect();
        let data = known.iter().map(|(word, value)| Setting::Data {
            address: word << 3,
            ty: Ty::I64,
            values: vec![*value],
        });
        settings.extend(data);
        let pages: FxHashSet<u64> = known
            .keys()
            .filter(|w| !self.can_write(**w, memory))
            .map(|w| w << 3 >> PAGE_SHIFT)
            .collect();
        settings.extend(pages.into_iter().map(|page| Setting::ReadOnly(page << PAGE_SHIFT)));
        let natives = self.natives.iter();
        settings.extend(natives.map(|(&(ip, output), &value)| Setting::Native {
            ip,
            output,
            value,
        }));
        Setup { name: Some("disagreement".to_string()), settings }
    }
}

/// The words that an access touches: each with the mask and the bits of its part.
pub(super) fn pieces(address: u64, size: u32, value: u64) -> SmallVec<[(u64, u64, u64); 2]> {
    let (word, shift) = (address >> 3, 8 * (address & 7));
    let mask = ((1u128 << (8 * size)) - 1) << shift;
    let bits = u128::from(value) << shift & mask;
    let next = word.wrapping_add(1) & (u64::MAX >> 3);
    let both = [(word, mask as u64, bits as u64), (next, (mask >> 64) as u64, (bits >> 64) as u64)];
    both.into_iter().filter(|(_, mask, _)| *mask != 0).collect()
}
