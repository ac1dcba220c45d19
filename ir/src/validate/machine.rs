//! The machine of a validation: what a run has written, over the memory of its case.
//!
//! A machine knows the words that differ from the case's, and a sum over them, so that two states are
//! compared by one number, their [`digest`], however much memory they have.
//!
//! Data: [`Shadow`], the machine of one run. Invariant: guest memory is not written. One validation uses
//! it; no lock.
//!
//! ```text
//! case: rdi = 0x1000, word 0x1000 = 5      store.i32 [rdi], 7: words {0x1000: 7}, digest 0x93…
//! ```

use super::case::{Case, Memory, pieces};
use super::lowered::{HostNative, Tables};
use crate::eval::check::Comparable;
use crate::eval::{Fault, InPlace, Machine, State, Uninterpreted, run_native};
use crate::types::{Gpr, Loc};
use crate::version::{Native, Segment, Split, Version};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// Stores this near to the stack pointer at entry may be those of return addresses, which are deferred
/// although other threads could see that (docs/design.md, "The IR", deferred stores; guess).
const NEAR_STACK: u64 = 1 << 10;

/// Spreads two numbers over one.
fn mix(a: u64, b: u64) -> u64 {
    let product = u128::from(a ^ 0x9e37_79b9_7f4a_7c15) * u128::from(b ^ 0xff51_afd7_ed55_8ccd);
    (product as u64) ^ (product >> 64) as u64
}

/// What a word that has changed adds to a machine's sum.
fn contribution(word: u64, value: u64) -> u64 {
    mix(mix(word, 0x1656_67b1), value)
}

/// A number that depends on registers, flags, memory and state in place, as they are after these stores.
/// Different states have different digests but for one in 2^64.
pub(super) fn digest(state: &State, machine: &Shadow<'_>, stores: &[(u64, u32, u64)]) -> u64 {
    let mut digest = mix(machine.sum_after(stores), machine.order.unwrap_or(0));
    for value in state.gpr {
        digest = mix(digest.rotate_left(5), value);
    }
    mix(mix(digest.rotate_left(5), state.flags), machine.in_place.digest())
}

/// The machine of one run.
#[derive(Clone)]
pub(super) struct Shadow<'a> {
    case: &'a Case,
    memory: &'a Memory<'a>,
    /// What was written, by address / 8.
    words: FxHashMap<u64, u64>,
    /// How often a word was loaded that a peer changes.
    loads: FxHashMap<u64, u64>,
    /// The sum of the contributions of words that differ from the case's.
    sum: u64,
    /// Depends on the order of stores, if other threads could see it.
    order: Option<u64>,
    in_place: InPlace,
    /// The machine runs a version's machine code. What that writes to the thread's context is no part of the
    /// guest's state.
    host: Option<&'a Tables>,
}

impl<'a> Shadow<'a> {
    /// The machine at entry of a version.
    pub fn new(case: &'a Case, memory: &'a Memory<'a>, version: &Version) -> Shadow<'a> {
        let mut in_place = InPlace::default();
        in_place.set(Loc::FsBase, case.segments[0]);
        in_place.set(Loc::GsBase, case.segments[1]);
        let order = (!version.context.private_memory()).then_some(0);
        let (words, loads) = Default::default();
        Shadow { case, memory, words, loads, sum: 0, order, in_place, host: None }
    }

    /// The machine at entry of a version's machine code.
    pub fn of_host(
        case: &'a Case,
        memory: &'a Memory<'a>,
        version: &Version,
        tables: &'a Tables,
    ) -> Shadow<'a> {
        Shadow { host: Some(tables), ..Shadow::new(case, memory, version) }
    }

    /// Has memory as it was before these stores, which are still to be performed.
    pub fn undo(&mut self, stores: &[(u64, u32, u64)], before: &Case) {
        for &(address, size, _) in stores {
            for (word, ..) in pieces(address, size, 0) {
                let both = self.word(word).zip(before.word(word, self.memory));
                if let Some((now, old)) = both {
                    self.sum = self.sum_with(self.sum, word, now, old);
                    self.words.insert(word, old);
                }
            }
        }
    }

    fn is_context(&self, word: u64) -> bool {
        self.host.as_ref().is_some_and(|host| host.context.contains(&(word << 3)))
    }

    /// Writes a word of the context.
    pub fn write_context(&mut self, address: u64, value: u64) {
        self.words.insert(address >> 3, value);
    }

    /// Reads a word of the context.
    pub fn read_context(&self, address: u64) -> u64 {
        self.words.get(&(address >> 3)).copied().unwrap_or(0)
    }

    fn word(&self, word: u64) -> Option<u64> {
        let written = self.words.get(&word).copied();
        written.or_else(|| match self.is_context(word) {
            true => Some(0),
            false => self.case.word(word, self.memory),
        })
    }

    /// Would a load succeed?
    pub fn can_load(&self, address: u64, size: u32) -> bool {
        let last = address.wrapping_add(u64::from(size) - 1);
        [address, last].into_iter().all(|at| self.word(at >> 3).is_some())
    }

    /// The stack pointer at entry.
    pub fn stack(&self) -> u64 {
        self.case.state.gpr[Gpr::RSP.number()]
    }

    /// Would a store succeed?
    pub fn can_store(&self, address: u64, size: u32) -> bool {
        let can = |word| self.word(word).is_some() && self.case.can_write(word, self.memory);
        pieces(address, size, 0).into_iter().all(|(word, ..)| can(word))
    }

    /// The sum if a word became `new`.
    fn sum_with(&self, sum: u64, word: u64, old: u64, new: u64) -> u64 {
        let initial = self.case.word(word, self.memory);
        let part = |value| if initial == Some(value) { 0 } else { contribution(word, value) };
        sum.wrapping_sub(part(old)).wrapping_add(part(new))
    }

    /// The sum after these stores.
    fn sum_after(&self, stores: &[(u64, u32, u64)]) -> u64 {
        let mut written = SmallVec::<[(u64, u64); 8]>::new();
        let mut sum = self.sum;
        for &(address, size, value) in stores {
            for (word, mask, bits) in pieces(address, size, value) {
                let before = written.iter().rev().find(|(w, _)| *w == word).map(|(_, v)| *v);
                let Some(old) = before.or_else(|| self.word(word)) else { continue };
                let new = old & !mask | bits;
                sum = self.sum_with(sum, word, old, new);
                written.push((word, new));
            }
        }
        sum
    }
}

impl Machine for Shadow<'_> {
    fn load(&mut self, address: u64, size: u32) -> Result<u64, Fault> {
        let mut value = 0u128;
        for (word, mask, _) in pieces(address, size, 0) {
            let mut content = self.word(word).ok_or(Fault::Load(address))?;
            let changes =
                self.case.peer && !self.memory.is_constant(word) && !self.is_context(word);
            if changes && !self.words.contains_key(&word) {
                let before = self.loads.entry(word).or_default();
                content ^= before.wrapping_mul(mix(word, 1));
                *before += 1;
            }
            let shift = if word == address >> 3 { 0 } else { 64 };
            value |= u128::from(content & mask) << shift;
        }
        Ok((value >> (8 * (address & 7))) as u64)
    }

    fn store(&mut self, address: u64, size: u32, value: u64) -> Result<(), Fault> {
        if !self.can_store(address, size) {
            return Err(Fault::Store(address));
        }
        if self.is_context(address >> 3) {
            for (word, mask, bits) in pieces(address, size, value) {
                let old = self.word(word).unwrap_or(0);
                self.words.insert(word, old & !mask | bits);
            }
            return Ok(());
        }
        for (word, mask, bits) in pieces(address, size, value) {
            let old = self.word(word).ok_or(Fault::Store(address))?;
            let new = old & !mask | bits;
            self.sum = self.sum_with(self.sum, word, old, new);
            self.words.insert(word, new);
        }
        let stack = self.stack();
        if let Some(order) = &mut self.order
            && address.wrapping_sub(stack).wrapping_add(NEAR_STACK) > 2 * NEAR_STACK
        {
            *order = mix(order.rotate_left(7) ^ address, value ^ u64::from(size));
        }
        Ok(())
    }

    fn segment_base(&self, segment: Segment) -> u64 {
        match (&self.host, segment) {
            (Some(host), Segment::Gs) => host.context.start,
            _ => self.in_place.segment_base(segment),
        }
    }

    fn get(&mut self, loc: Loc) -> u64 {
        match (&self.host, loc) {
            (Some(host), Loc::GsBase) => host.context.start,
            _ => self.in_place.get(loc),
        }
    }

    fn put(&mut self, loc: Loc, value: u64) {
        self.in_place.set(loc, value);
    }

    fn native(
        &mut self,
        native: &Native,
        address: Option<u64>,
        inputs: &[u64],
        outputs: &mut [u64],
    ) -> Result<(), Fault> {
        let host = self.host.as_ref().and_then(|host| host.natives.get(&native.inst.ip()));
        let Some(HostNative { guest, inputs: from, outputs: to }) = host else {
            return run_native(self, native, address, inputs, outputs);
        };
        // The guest's instruction, on its registers in its own order; flags come last.
        let flags = guest.flags_in.then(|| inputs.last().copied()).flatten();
        let (loaded, inputs) = inputs.split_at(usize::from(guest.split == Split::Loaded));
        let registers = from.iter().filter_map(|i| inputs.get(*i)).chain(&flags);
        let own: SmallVec<[u64; 6]> = loaded.iter().chain(registers).copied().collect();
        let mut results: SmallVec<[u64; 4]> = SmallVec::from_elem(0, outputs.len());
        run_native(self, guest, address, &own, &mut results)?;
        let (flags, order) = (outputs.len(), to.iter().copied());
        for (result, at) in results.into_iter().zip(order.chain([flags.saturating_sub(1)])) {
            if let Some(output) = outputs.get_mut(at) {
                *output = result;
            }
        }
        Ok(())
    }
}

impl Uninterpreted for Shadow<'_> {
    fn byte(&self, address: u64) -> Result<u8, Fault> {
        let word = self.word(address >> 3).ok_or(Fault::Load(address))?;
        Ok((word >> (8 * (address & 7))) as u8)
    }

    fn is_writable(&self, address: u64) -> bool {
        self.case.can_write(address >> 3, self.memory)
    }

    fn in_place(&mut self) -> &mut InPlace {
        &mut self.in_place
    }

    fn chosen(&self, ip: u64, output: usize) -> Option<u64> {
        self.case.natives.get(&(ip, output)).copied()
    }
}

impl Comparable for Shadow<'_> {
    fn difference(&self, other: &Shadow<'_>) -> Option<String> {
        let words = self.words.keys().chain(other.words.keys()).copied();
        let mut words: Vec<u64> =
            words.filter(|word| !self.is_context(*word) && !other.is_context(*word)).collect();
        words.sort_unstable();
        if let Some(word) = words.into_iter().find(|word| self.word(*word) != other.word(*word)) {
            let content = |machine: &Shadow<'_>| machine.word(word).unwrap_or(0);
            let (ours, theirs) = (content(self), content(other));
            return Some(format!("memory at {:#x}: {ours:#x} and {theirs:#x}", word << 3));
        }
        if self.order != other.order {
            return Some("the order of stores, which other threads can see".to_string());
        }
        self.in_place.difference(&other.in_place)
    }
}
