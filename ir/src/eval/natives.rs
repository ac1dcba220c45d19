//! Native instructions in the evaluator: uninterpreted functions.
//!
//! The evaluator does not execute natives. The result of each is a fixed arbitrary function of exactly
//! what the native declares to read: its inputs, its memory operand, and the state that is not SSA. So two
//! versions agree only if they run the same natives on the same inputs, in an order that their declared
//! effects allow.
//!
//! **Data.** [`InPlace`], the state that is not SSA, which a machine owns. **Invariant.** [`run`] writes
//! nothing but what the native declares to write. **Callers.** Machines that implement
//! [`Uninterpreted`], for [`Machine::native`]; no lock.
//!
//! ```text
//! n0 = paddd xmm0, [rdi]       xmm0 = f(ip, address of no input, xmm0, 16 bytes at rdi)
//! n1 = addsd xmm0, [rdi]       the same with 8 bytes, whether it loads them itself or gets their value
//! ```

use super::machine::{Fault, Machine};
use crate::semantics::ARITH_FLAGS;
use crate::types::Loc;
use crate::version::{Effects, Native, Segment, Split};
use rustc_hash::FxHasher;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

/// The state that is not SSA: vectors, segment bases, MXCSR and the like.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct InPlace {
    values: BTreeMap<Loc, u64>,
    /// The number of natives with NO_REPEAT executed so far; each such native reads it as an input.
    clock: u64,
}

impl InPlace {
    /// 0 where nothing was written.
    pub fn get(&self, loc: Loc) -> u64 {
        self.values.get(&loc).copied().unwrap_or(0)
    }

    /// Sets a location.
    pub fn set(&mut self, loc: Loc, value: u64) {
        self.values.insert(loc, value);
    }

    /// The base of a segment.
    pub fn segment_base(&self, segment: Segment) -> u64 {
        self.get(match segment {
            Segment::Fs => Loc::FsBase,
            Segment::Gs => Loc::GsBase,
        })
    }

    /// The first difference to another state, in words.
    pub fn difference(&self, other: &InPlace) -> Option<String> {
        let mut locs = self.values.keys().chain(other.values.keys());
        let differs = locs.find(|loc| self.get(**loc) != other.get(**loc));
        if let Some(loc) = differs {
            return Some(format!("{loc}: {:#x} and {:#x}", self.get(*loc), other.get(*loc)));
        }
        (self.clock != other.clock).then(|| format!("clock: {} and {}", self.clock, other.clock))
    }

    /// A number that depends on all of it.
    pub fn digest(&self) -> u64 {
        let mut hasher = FxHasher::default();
        self.clock.hash(&mut hasher);
        // What was never written is 0.
        self.values
            .iter()
            .filter(|(_, value)| **value != 0)
            .for_each(|pair| pair.hash(&mut hasher));
        hasher.finish()
    }

    /// What this native reads besides memory and its inputs.
    fn hash_read(&self, native: &Native, hasher: &mut FxHasher) {
        for n in (0..32).filter(|n| native.vec_read >> n & 1 != 0) {
            (n, self.values.get(&Loc::Vec(n))).hash(hasher);
        }
        if native.effects.contains(Effects::READ_STATE) {
            let others = self.values.iter().filter(|(loc, _)| !matches!(loc, Loc::Vec(_)));
            others.for_each(|pair| pair.hash(hasher));
        }
        if native.effects.contains(Effects::NO_REPEAT) {
            self.clock.hash(hasher);
        }
    }
}

/// The position of the first byte that a native stores, among its results.
pub(crate) const STORED: usize = 1 << 16;

/// A machine whose natives are uninterpreted functions.
pub(crate) trait Uninterpreted: Machine {
    /// Reads a byte.
    fn byte(&self, address: u64) -> Result<u8, Fault>;

    /// A native has read this byte.
    fn was_read(&mut self, _address: u64) {}

    /// May the byte be written, if it can be read?
    fn is_writable(&self, address: u64) -> bool;

    /// The state that is not SSA.
    fn in_place(&mut self) -> &mut InPlace;

    /// The result of the native at this pc with this position among its results, if it does not depend
    /// on what it reads. From [`STORED`] on, these are the bytes that it stores.
    fn chosen(&self, _ip: u64, _output: usize) -> Option<u64> {
        None
    }
}

/// Runs a native; the parameters are those of [`Machine::native`].
pub(crate) fn run(
    machine: &mut impl Uninterpreted,
    native: &Native,
    address: Option<u64>,
    inputs: &[u64],
    outputs: &mut [u64],
) -> Result<(), Fault> {
    let ip = native.inst.ip();
    let mut hasher = FxHasher::default();
    let size = native.mem_size.unwrap_or(0);
    let (loaded, inputs) = match (native.split, inputs) {
        (Split::Loaded, [value, rest @ ..]) => (Some(*value), rest),
        _ => (None, inputs),
    };
    (ip, inputs).hash(&mut hasher);
    machine.in_place().hash_read(native, &mut hasher);
    if let Some(value) = loaded {
        // As if the native had read them.
        (0..size).for_each(|i| ((value >> (8 * i)) as u8).hash(&mut hasher));
    }
    let accesses = native.effects.intersects(Effects::READ | Effects::WRITE);
    let memory = address.filter(|_| accesses && size > 0).map(|a| (a, u64::from(size)));
    if let Some((start, size)) = memory {
        for i in 0..size {
            let byte = machine.byte(start.wrapping_add(i))?;
            if native.effects.contains(Effects::READ) {
                machine.was_read(start.wrapping_add(i));
                byte.hash(&mut hasher);
            }
        }
    }
    // The extent of the access is unknown. The model accesses 8 bytes at each address that an input
    // register holds.
    let unknown = native.effects.contains(Effects::UNKNOWN_EXTENT);
    let pointers: SmallVec<[u64; 4]> =
        inputs.iter().take(native.gpr_in.len()).filter(|_| unknown).copied().collect();
    if native.effects.contains(Effects::READ) {
        pointers.iter().for_each(|at| machine.load(*at, 8).ok().hash(&mut hasher));
    }
    // The address counts as an input only of a native that computes with it (lea, bt on memory), not of
    // one that accesses memory.
    if memory.is_none() && native.split == Split::No {
        address.hash(&mut hasher);
    }
    let seed = hasher.finish();
    let nth =
        |n: u64| (seed ^ n.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let stored = |machine: &_, i: u64| {
        let chosen = Uninterpreted::chosen(machine, ip, STORED + i as usize);
        chosen.unwrap_or(nth(i) >> 32) & 0xff
    };
    if let Some((start, size)) = memory.filter(|_| native.effects.contains(Effects::WRITE)) {
        for i in 0..size {
            let at = start.wrapping_add(i);
            if !machine.is_writable(at) {
                return Err(Fault::Store(at));
            }
        }
        for i in 0..size {
            let byte = stored(machine, i);
            machine.store(start.wrapping_add(i), 1, byte)?;
        }
    }
    if native.effects.contains(Effects::WRITE) {
        for (i, at) in pointers.iter().enumerate() {
            // An address that cannot be written is skipped: the model says nothing about faults of
            // unknown extent.
            let _ = machine.store(*at, 8, nth(3000 + i as u64));
        }
    }
    for (i, output) in outputs.iter_mut().enumerate() {
        if native.split == Split::Stored {
            *output = (0..u64::from(size)).fold(0, |v, n| v | stored(machine, n) << (8 * n));
            continue;
        }
        *output = machine.chosen(ip, i).unwrap_or(nth(1000 + i as u64));
        if native.flags_out && i == native.gpr_out.len() {
            *output &= ARITH_FLAGS;
        }
    }
    let in_place = machine.in_place();
    let vectors = (0..32).filter(|n| native.vec_write >> n & 1 != 0).map(Loc::Vec);
    for (i, loc) in vectors.chain(native.writes.iter().copied()).enumerate() {
        in_place.set(loc, nth(2000 + i as u64));
    }
    if native.effects.contains(Effects::NO_REPEAT) {
        in_place.clock += 1;
    }
    Ok(())
}
