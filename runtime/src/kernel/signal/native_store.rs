//! A deferred store of native code that faulted at a guarded page, performed by the signal handler.
//!
//! An exit of a fragment performs the stores that the fragment has deferred. No table has an
//! address at which to continue after a fault of such a store, because the fragment has written to
//! the same page before. It faults if another thread has translated code from that page in the
//! meantime: the page is guarded then. Opening the page would hide the stores of other threads. So
//! the handler decodes the store, writes the bytes past the guard, and continues behind the
//! instruction.
//!
//! This module only decodes; it owns no data and takes no lock. Only the signal handler calls it,
//! for an instruction in the code cache. The decoder allocates only its tables, at its first use;
//! they exist, because the code has been translated by the same decoder.
//!
//! Example: `mov [rsi + 8], rax` with rsi = 0x1000 is a store of the eight bytes of rax at 0x1008.

use dynasour_guest::space::{PAGE, page_down};
use iced_x86::{Decoder, DecoderError, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

/// Bytes of the longest instruction (Intel SDM vol. 2, 2.3.11).
const LONGEST: u64 = 15;

/// A store that has not been performed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Store {
    /// The guest address.
    pub address: u64,
    /// The value, little-endian.
    value: [u8; 8],
    /// Bytes of the value that are stored.
    size: usize,
    /// The address of the instruction behind the store.
    pub next: u64,
}

impl Store {
    /// The bytes to be written.
    pub fn bytes(&self) -> &[u8] {
        &self.value[..self.size]
    }
}

/// The store at `rip`, if the instruction there is a `mov` of a general register or a constant to
/// memory. `register` gives the value of a general register by its number.
///
/// # Safety
/// An instruction at `rip` has been executed, in a mapping that extends to `end`.
pub unsafe fn at(rip: u64, end: u64, register: impl Fn(usize) -> u64) -> Option<Store> {
    let in_page = (page_down(rip) + PAGE).min(end) - rip;
    // SAFETY: the bytes up to the end of the page can be read, as the instruction's first can.
    let (inst, error) = unsafe { decode(rip, in_page) };
    let inst = match error {
        // SAFETY: the instruction extends into the next page. It was executed, so that page can be
        // read.
        DecoderError::NoMoreBytes => unsafe { decode(rip, LONGEST.min(end - rip)) }.0,
        _ => inst,
    };
    store_of(&inst, register)
}

/// # Safety
/// `len` bytes at `rip` can be read.
unsafe fn decode(rip: u64, len: u64) -> (Instruction, DecoderError) {
    // SAFETY: the caller's promise.
    let code = unsafe { std::slice::from_raw_parts(rip as *const u8, len.min(LONGEST) as usize) };
    let mut decoder = Decoder::with_ip(64, code, rip, DecoderOptions::NONE);
    let inst = decoder.decode();
    (inst, decoder.last_error())
}

fn store_of(inst: &Instruction, register: impl Fn(usize) -> u64) -> Option<Store> {
    if inst.mnemonic() != Mnemonic::Mov
        || inst.op0_kind() != OpKind::Memory
        || inst.segment_prefix() != Register::None
    {
        return None;
    }
    let value_of = |name: Register| match name {
        // Segments other than FS and GS have base 0 in 64-bit mode.
        Register::CS | Register::DS | Register::ES | Register::SS => Some(0),
        _ if name.is_gpr64() => Some(register(name.number())),
        _ if name.is_gpr32() => Some(u64::from(register(name.number()) as u32)),
        Register::AH | Register::CH | Register::DH | Register::BH => {
            Some(register(name.full_register().number()) >> 8)
        }
        _ if name.is_gpr() => Some(register(name.full_register().number())),
        _ => None,
    };
    let value = match inst.op1_kind() {
        OpKind::Register => value_of(inst.op1_register()).filter(|_| inst.op1_register().is_gpr()),
        _ => inst.try_immediate(1).ok(),
    }?;
    Some(Store {
        address: inst.virtual_address(0, 0, |name, _, _| value_of(name))?,
        value: value.to_le_bytes(),
        size: inst.memory_size().size(),
        next: inst.next_ip(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Address, bytes and length of the store that `code` encodes, where register n contains
    /// n * 0x0101_0101_0101_0101.
    fn store(code: &[u8]) -> Option<(u64, Vec<u8>, u64)> {
        let start = code.as_ptr() as u64;
        let register = |number: usize| number as u64 * 0x0101_0101_0101_0101;
        // SAFETY: the bytes are there.
        let store = unsafe { at(start, start + code.len() as u64, register) }?;
        Some((store.address, store.bytes().to_vec(), store.next - start))
    }

    #[test]
    fn stores_of_every_width_are_decoded() {
        const RSI: u64 = 0x0606_0606_0606_0606;
        assert_eq!(store(&[0x48, 0x89, 0x4e, 8]), Some((RSI + 8, vec![1; 8], 4)));
        assert_eq!(store(&[0x89, 0x0e]), Some((RSI, vec![1; 4], 2)));
        assert_eq!(store(&[0x66, 0x89, 0x16]), Some((RSI, vec![2; 2], 3)));
        assert_eq!(store(&[0x44, 0x88, 0x06]), Some((RSI, vec![8], 3)));
        assert_eq!(store(&[0x88, 0x3e]), Some((RSI, vec![3], 2)), "bh");
        let constant = [0x48, 0xc7, 0x06, 0xfe, 0xff, 0xff, 0xff];
        assert_eq!(store(&constant), Some((RSI, (-2i64).to_le_bytes().to_vec(), 7)));
        assert_eq!(store(&[0xc6, 0x04, 0x4e, 5]), Some((RSI + 0x0202_0202_0202_0202, vec![5], 4)));
    }

    #[test]
    fn other_instructions_are_not_stores() {
        assert_eq!(store(&[0x48, 0x8b, 0x4e, 8]), None, "a load");
        assert_eq!(store(&[0x01, 0x0e]), None, "reads and writes");
        assert_eq!(store(&[0x65, 0x89, 0x0e]), None, "another segment");
        assert_eq!(store(&[0x0f, 0x11, 0x06]), None, "a vector");
        assert_eq!(store(&[0x48, 0x89]), None, "cut off");
    }
}
