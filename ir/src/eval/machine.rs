//! The part of the guest that the evaluator does not keep as SSA values: memory, segment bases,
//! in-place state, native instructions.
//!
//! [`Machine`] is the interface. [`ModelMachine`] is a complete machine in a few maps, for tests
//! and for `dynasour ir eval`.
//!
//! **Data.** A model machine owns sparse pages of memory, a value for each in-place location, the
//! input still to be read and the numbers printed. **Invariant.** It does not execute native
//! instructions ([`natives`]). **Callers.** One evaluation at a time; no lock.
//!
//! ```text
//! let mut machine = ModelMachine::new();
//! machine.map(0x1000, 16);                  one page, zero-filled
//! machine.store(0x1000, 8, 5)               Ok(())
//! machine.load(0x2000, 8)                   Err(Fault::Load(0x2000))
//! ```

use super::natives::{self, InPlace, Uninterpreted};
use crate::types::Loc;
use crate::version::{Native, Segment};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

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
    /// are the value that was loaded for it, if one was, the `gpr_in` values, then the flags if `flags_in`; `outputs` receives `gpr_out`, then
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
    in_place: InPlace,
    /// The numbers printed, oldest first.
    pub printed: Vec<u64>,
    /// The numbers still to be read, next first. A read from the empty queue gives 0.
    pub input: VecDeque<u64>,
    /// Pages that a peer writes too, see [`ModelMachine::share`].
    shared: Option<Box<Shared>>,
    /// A byte that a peer sets, see [`ModelMachine::answer`].
    answer: Option<Answer>,
    /// What natives compute, see [`ModelMachine::choose`].
    chosen: BTreeMap<(u64, usize), u64>,
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

    /// Lets the native instruction at `ip` compute `value` as this one of its results, whatever it reads.
    pub fn choose(&mut self, ip: u64, output: usize, value: u64) {
        self.chosen.insert((ip, output), value);
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
        if let Some(difference) = self.in_place.difference(&other.in_place) {
            return Some(difference);
        }
        if self.printed != other.printed {
            return Some(format!("printed: {:?} and {:?}", self.printed, other.printed));
        }
        if self.input != other.input {
            return Some(format!("input left: {:?} and {:?}", self.input, other.input));
        }
        (self.shared != other.shared)
            .then(|| "what is stored to shared memory, or in which order".to_string())
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
        self.in_place.segment_base(segment)
    }

    fn get(&mut self, loc: Loc) -> u64 {
        self.in_place.get(loc)
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
        natives::run(self, native, address, inputs, outputs)
    }
}

impl Uninterpreted for ModelMachine {
    fn byte(&self, address: u64) -> Result<u8, Fault> {
        ModelMachine::byte(self, address)
    }

    fn was_read(&mut self, address: u64) {
        self.peer(address);
    }

    fn is_writable(&self, address: u64) -> bool {
        !self.read_only.contains(&(address / PAGE))
    }

    fn in_place(&mut self) -> &mut InPlace {
        &mut self.in_place
    }

    fn chosen(&self, ip: u64, output: usize) -> Option<u64> {
        self.chosen.get(&(ip, output)).copied()
    }
}
