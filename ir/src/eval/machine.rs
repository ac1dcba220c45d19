//! The part of the guest that the evaluator does not keep as SSA values: memory, segment bases,
//! in-place state, native instructions.
//!
//! [`Machine`] is the interface. [`ModelMachine`] is a complete machine in a few maps, for tests
//! and for `dynasour ir eval`.
//!
//! **Data.** A model machine owns sparse pages of memory, a value for each in-place location, the
//! input still to be read and the numbers printed. **Invariant.** It does not execute native
//! instructions. Each native is an *uninterpreted function* of exactly what it declares to read. So
//! two versions agree only if they run the same natives on the same inputs in an order that their
//! declared effects allow. **Callers.** One evaluation at a time; no lock.
//!
//! ```text
//! let mut machine = ModelMachine::new();
//! machine.map(0x1000, 16);                  one page, zero-filled
//! machine.store(0x1000, 8, 5)               Ok(())
//! machine.load(0x2000, 8)                   Err(Fault::Load(0x2000))
//! ```

use crate::semantics::ARITH_FLAGS;
use crate::types::{Loc, Ty};
use crate::version::{Effects, Native, Segment};
use rustc_hash::FxHasher;
use smallvec::SmallVec;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::hash::{Hash, Hasher};

/// Why an access or a native did not complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// This address cannot be read.
    Load(u64),
    /// This address cannot be written.
    Store(u64),
    /// A write here would break a monitored assumption of the version that runs.
    Watched(u64),
    /// The native raised another exception (divide error, floating point, alignment).
    Native,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Load(address) => write!(f, "cannot read {address:#x}"),
            Fault::Store(address) => write!(f, "cannot write {address:#x}"),
            Fault::Watched(address) => write!(f, "{address:#x} is assumed not to be written"),
            Fault::Native => f.write_str("exception in a native instruction"),
        }
    }
}

/// The part of the guest that is not SSA. Addresses are linear and wrap; sizes are 1, 2, 4 or 8.
pub trait Machine {
    /// Reads `size` bytes, little endian, zero-extended.
    fn load(&mut self, address: u64, size: u32) -> Result<u64, Fault>;

    /// Writes the low `size` bytes of `value`. On a fault nothing is written.
    fn store(&mut self, address: u64, size: u32, value: u64) -> Result<(), Fault>;

    /// The base of a segment.
    fn segment_base(&self, segment: Segment) -> u64;

    /// Reads a location that is not SSA and fits 64 bits.
    fn get(&mut self, loc: Loc) -> u64;

    /// Writes a location that is not SSA and fits 64 bits.
    fn put(&mut self, loc: Loc, value: u64);

    /// Shows a number to the outside.
    fn print(&mut self, _value: u64) {}

    /// Takes a number from the outside; 0 where there is none.
    fn read(&mut self) -> u64 {
        0
    }

    /// Executes an original instruction. `address` is that of its explicit memory operand; `inputs`
    /// are the `gpr_in` values, then the flags if `flags_in`; `outputs` receives `gpr_out`, then
    /// the flags.
    fn native(
        &mut self,
        native: &Native,
        address: Option<u64>,
        inputs: &[u64],
        outputs: &mut [u64],
    ) -> Result<(), Fault>;
}

const PAGE: u64 = 4096;

/// Sparse memory and in-place state in maps; natives are uninterpreted functions.
#[derive(Clone, Debug, Default)]
pub struct ModelMachine {
    pages: BTreeMap<u64, Box<[u8]>>,
    read_only: BTreeSet<u64>,
    in_place: BTreeMap<Loc, u64>,
    /// The number of natives with NO_REPEAT executed so far; each such native reads it as an input.
    clock: u64,
    /// The numbers printed, oldest first.
    pub printed: Vec<u64>,
    /// The numbers still to be read, next first. A read from the empty queue gives 0.
    pub input: VecDeque<u64>,
    /// Pages that a peer writes too, see [`ModelMachine::share`].
    shared: Option<Box<Shared>>,
    /// A byte that a peer sets, see [`ModelMachine::answer`].
    answer: Option<Answer>,
    /// If set, every address is accessible, and this seed determines the bytes that nothing has
    /// written.
    boundless: Option<u64>,
}

/// Pages that a simulated peer thread writes too.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Shared {
    pages: BTreeSet<u64>,
    /// Bytes that the program has written; the peer does not change those.
    ours: BTreeSet<u64>,
    /// The program's stores in order, because the peer can see each: address, size, value.
    stores: Vec<(u64, u32, u64)>,
}

/// A simulated peer thread that sets a byte for which the program polls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Answer {
    address: u64,
    /// The peer writes after this many further loads of the byte.
    after: u32,
}

impl PartialEq for ModelMachine {
    fn eq(&self, other: &ModelMachine) -> bool {
        self.first_difference(other).is_none()
    }
}

impl ModelMachine {
    /// No memory, all in-place state zero.
    pub fn new() -> ModelMachine {
        ModelMachine::default()
    }

    /// Memory everywhere, filled with bytes that depend on the address and on `seed`.
    pub fn boundless(seed: u64) -> ModelMachine {
        ModelMachine { boundless: Some(seed), ..ModelMachine::default() }
    }

    /// The initial content of an address in a boundless machine; `None` in any other machine.
    fn untouched(&self, address: u64) -> Option<u8> {
        let word =
            (self.boundless? ^ address >> 3).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(32);
        Some((word.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (8 * (address & 7))) as u8)
    }

    fn untouched_page(&self, page: u64) -> Option<Box<[u8]>> {
        (0..PAGE).map(|i| self.untouched(page * PAGE + i)).collect()
    }

    /// The page for writing; a boundless machine creates it on first use.
    fn page_mut(&mut self, page: u64) -> Option<&mut [u8]> {
        if !self.pages.contains_key(&page) {
            let fresh = self.untouched_page(page)?;
            self.pages.insert(page, fresh);
        }
        self.pages.get_mut(&page).map(|p| &mut p[..])
    }

    /// Makes the pages that contain `len` bytes at `start` accessible, zero-filled where they were
    /// not.
    pub fn map(&mut self, start: u64, len: u64) {
        for page in start / PAGE..=(start.saturating_add(len.max(1) - 1)) / PAGE {
            self.pages.entry(page).or_insert_with(|| vec![0; PAGE as usize].into_boxed_slice());
        }
    }

    /// Makes the page at `address` read-only.
    pub fn protect(&mut self, address: u64) {
        self.read_only.insert(address / PAGE);
    }

    /// Lets a simulated peer write the page at `address` too. Each byte that the program has not
    /// written changes after every read of it, and the program's stores to the page are recorded in
    /// order. This is one schedule that a real peer may have; it shows how often and in which order
    /// a program accesses memory.
    pub fn share(&mut self, address: u64) {
        self.shared.get_or_insert_default().pages.insert(address / PAGE);
    }

    /// Lets a simulated peer set the byte at `address` to 1 after the program has loaded it `after`
    /// times. A program that polls the byte must repeat its load.
    pub fn answer(&mut self, address: u64, after: u32) {
        self.answer = Some(Answer { address, after });
    }

    /// Does a simulated peer write memory too?
    pub fn has_peer(&self) -> bool {
        self.shared.is_some() || self.answer.is_some()
    }

    /// Counts a load of the byte that the peer answers at.
    fn waited(&mut self, address: u64, size: u32) {
        let Some(answer) = &mut self.answer else { return };
        if answer.address.wrapping_sub(address) >= u64::from(size) || answer.after == 0 {
            return;
        }
        answer.after -= 1;
        if answer.after == 0 {
            let address = answer.address;
            self.write(address, &[1]);
        }
    }

    /// The peer changes a shared byte after the program has read it.
    fn peer(&mut self, address: u64) {
        let Some(shared) = &self.shared else { return };
        if shared.pages.contains(&(address / PAGE))
            && !shared.ours.contains(&address)
            && let Some(page) = self.pages.get_mut(&(address / PAGE))
        {
            let byte = &mut page[(address % PAGE) as usize];
            *byte = byte.wrapping_mul(5).wrapping_add(1);
        }
    }

    /// Writes bytes, mapping what is not mapped, whatever the protection.
    pub fn write(&mut self, start: u64, bytes: &[u8]) {
        let (mut start, mut remaining) = (start, bytes);
        while !remaining.is_empty() {
            let offset = (start % PAGE) as usize;
            let (now, later) = remaining.split_at(remaining.len().min(PAGE as usize - offset));
            self.map(start, 1);
            if let Some(page) = self.pages.get_mut(&(start / PAGE)) {
                page[offset..offset + now.len()].copy_from_slice(now);
            }
            start = start.wrapping_add(now.len() as u64);
            remaining = later;
        }
    }

    fn byte(&self, address: u64) -> Result<u8, Fault> {
        let offset = (address % PAGE) as usize;
        match self.pages.get(&(address / PAGE)) {
            Some(page) => Ok(page[offset]),
            None => self.untouched(address).ok_or(Fault::Load(address)),
        }
    }

    /// The first difference to another machine, in words.
    pub fn first_difference(&self, other: &ModelMachine) -> Option<String> {
        let pages: BTreeSet<u64> = self.pages.keys().chain(other.pages.keys()).copied().collect();
        for page in pages {
            fn bytes(machine: &ModelMachine, page: u64) -> Option<Cow<'_, [u8]>> {
                let written = machine.pages.get(&page).map(|p| Cow::Borrowed(&p[..]));
                written.or_else(|| machine.untouched_page(page).map(|p| Cow::Owned(p.into_vec())))
            }
            let (Some(ours), Some(theirs)) = (bytes(self, page), bytes(other, page)) else {
                return Some(format!("page {:#x} is mapped on one side only", page * PAGE));
            };
            if ours != theirs
                && let Some(i) = (0..ours.len()).find(|i| ours[*i] != theirs[*i])
            {
                let address = page * PAGE + i as u64;
                return Some(format!(
                    "byte at {address:#x}: {:#04x} and {:#04x}",
                    ours[i], theirs[i]
                ));
            }
        }
        let locs = self.in_place.keys().chain(other.in_place.keys());
        let value =
            |machine: &ModelMachine, loc: &Loc| machine.in_place.get(loc).copied().unwrap_or(0);
        for loc in locs {
            let (ours, theirs) = (value(self, loc), value(other, loc));
            if ours != theirs {
                return Some(format!("{loc}: {ours:#x} and {theirs:#x}"));
            }
        }
        if self.printed != other.printed {
            return Some(format!("printed: {:?} and {:?}", self.printed, other.printed));
        }
        if self.input != other.input {
            return Some(format!("input left: {:?} and {:?}", self.input, other.input));
        }
        if self.shared != other.shared {
            return Some("what is stored to shared memory, or in which order".to_string());
        }
        (self.clock != other.clock).then(|| format!("clock: {} and {}", self.clock, other.clock))
    }

    /// The bytes that differ from those of an earlier state of this machine, adjacent ones
    /// together.
    pub fn changes(&self, before: &ModelMachine) -> Vec<(u64, Vec<u8>)> {
        let mut out: Vec<(u64, Vec<u8>)> = Vec::new();
        for (page, bytes) in &self.pages {
            for (i, byte) in bytes.iter().enumerate() {
                let address = page * PAGE + i as u64;
                if before.byte(address) == Ok(*byte) {
                    continue;
                }
                match out.last_mut() {
                    Some((start, run)) if *start + run.len() as u64 == address => run.push(*byte),
                    _ => out.push((address, vec![*byte])),
                }
            }
        }
        out
    }

    /// What this native reads besides memory and its inputs.
    fn hash_in_place(&self, native: &Native, hasher: &mut FxHasher) {
        for n in (0..32).filter(|n| native.vec_read >> n & 1 != 0) {
            (n, self.in_place.get(&Loc::Vec(n))).hash(hasher);
        }
        if native.effects.contains(Effects::READ_STATE) {
            let others = self.in_place.iter().filter(|(loc, _)| !matches!(loc, Loc::Vec(_)));
            others.for_each(|pair| pair.hash(hasher));
        }
        if native.effects.contains(Effects::NO_REPEAT) {
            self.clock.hash(hasher);
        }
    }
}

impl Machine for ModelMachine {
    fn print(&mut self, value: u64) {
        self.printed.push(value);
    }

    fn read(&mut self) -> u64 {
        self.input.pop_front().unwrap_or(0)
    }

    fn load(&mut self, address: u64, size: u32) -> Result<u64, Fault> {
        let mut value = 0;
        for i in 0..u64::from(size) {
            value |= u64::from(self.byte(address.wrapping_add(i))?) << (8 * i);
        }
        if self.shared.is_some() {
            (0..u64::from(size)).for_each(|i| self.peer(address.wrapping_add(i)));
        }
        self.waited(address, size);
        Ok(value)
    }

    fn store(&mut self, address: u64, size: u32, value: u64) -> Result<(), Fault> {
        let bytes = (0..u64::from(size)).map(|i| address.wrapping_add(i));
        for at in bytes.clone() {
            let page = at / PAGE;
            let accessible = self.boundless.is_some() || self.pages.contains_key(&page);
            if !accessible || self.read_only.contains(&page) {
                return Err(Fault::Store(at));
            }
        }
        if let Some(shared) = &mut self.shared
            && shared.pages.contains(&(address / PAGE))
        {
            shared.stores.push((address, size, value));
            shared.ours.extend(bytes.clone());
        }
        for (i, at) in bytes.enumerate() {
            if let Some(page) = self.page_mut(at / PAGE) {
                page[(at % PAGE) as usize] = (value >> (8 * i)) as u8;
            }
        }
        Ok(())
    }

    fn segment_base(&self, segment: Segment) -> u64 {
        let loc = match segment {
            Segment::Fs => Loc::FsBase,
            Segment::Gs => Loc::GsBase,
        };
        self.in_place.get(&loc).copied().unwrap_or(0)
    }

    fn get(&mut self, loc: Loc) -> u64 {
        self.in_place.get(&loc).copied().unwrap_or(0)
    }

    fn put(&mut self, loc: Loc, value: u64) {
        self.in_place.insert(loc, value);
    }

    fn native(
        &mut self,
        native: &Native,
        address: Option<u64>,
        inputs: &[u64],
        outputs: &mut [u64],
    ) -> Result<(), Fault> {
        let mut hasher = FxHasher::default();
        (native.inst.ip(), inputs).hash(&mut hasher);
        self.hash_in_place(native, &mut hasher);
        let size = native.mem_size.unwrap_or(0);
        let accesses = native.effects.intersects(Effects::READ | Effects::WRITE);
        let memory = address.filter(|_| accesses && size > 0).map(|a| (a, u64::from(size)));
        if let Some((start, size)) = memory {
            for i in 0..size {
                let byte = self.byte(start.wrapping_add(i))?;
                if native.effects.contains(Effects::READ) {
                    self.peer(start.wrapping_add(i));
                    byte.hash(&mut hasher);
                }
            }
        }
        // The extent of the access is unknown. The model accesses 8 bytes at each address that an
        // input register holds.
        let unknown = native.effects.contains(Effects::UNKNOWN_EXTENT);
        let pointers: SmallVec<[u64; 4]> =
            inputs.iter().take(native.gpr_in.len()).filter(|_| unknown).copied().collect();
        if native.effects.contains(Effects::READ) {
            pointers.iter().for_each(|at| self.load(*at, 8).ok().hash(&mut hasher));
        }
        // The address counts as an input only of a native that computes with it (lea, bt on
        // memory), not of one that accesses memory.
        if memory.is_none() {
            address.hash(&mut hasher);
        }
        let seed = hasher.finish();
        let nth = |n: u64| {
            (seed ^ n.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xff51_afd7_ed55_8ccd)
        };
        if let Some((start, size)) = memory.filter(|_| native.effects.contains(Effects::WRITE)) {
            for i in 0..size {
                let at = start.wrapping_add(i);
                if self.read_only.contains(&(at / PAGE)) {
                    return Err(Fault::Store(at));
                }
            }
            for i in 0..size {
                self.store(start.wrapping_add(i), 1, nth(i) >> 32)?;
            }
        }
        if native.effects.contains(Effects::WRITE) {
            for (i, at) in pointers.iter().enumerate() {
                // An address that cannot be written is skipped: the model says nothing about faults
                // of unknown extent.
                let _ = self.store(*at, 8, nth(3000 + i as u64));
            }
        }
        for (i, output) in outputs.iter_mut().enumerate() {
            *output = nth(1000 + i as u64) & Ty::I64.mask();
            if native.flags_out && i == native.gpr_out.len() {
                *output &= ARITH_FLAGS;
            }
        }
        let vectors = (0..32).filter(|n| native.vec_write >> n & 1 != 0).map(Loc::Vec);
        for (i, loc) in vectors.chain(native.writes.iter().copied()).enumerate() {
            self.in_place.insert(loc, nth(2000 + i as u64));
        }
        if native.effects.contains(Effects::NO_REPEAT) {
            self.clock += 1;
        }
        Ok(())
    }
}
