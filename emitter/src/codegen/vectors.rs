//! The moves of XMM registers that hold values of a fragment's own, and of what the guest has in them.
//!
//! A value of a fragment is in the low eight bytes; a spill slot holds these. What the guest has there is saved
//! whole, in two slots; a third one gets the value where the code is left, because nobody looks for one in an XMM
//! register then. No move changes flags or the upper halves of YMM registers.
//!
//! Pure functions that add code; no data, no lock.

use crate::asm::{Asm, Assembler};
use crate::codegen::encoded::Target;
use crate::codegen::instruction::slot;
use crate::record::{Location, Node, Record};

/// Slots of a borrowed register.
pub const VECTOR_SLOTS: u32 = 3;
const MOVAPS: u8 = 0x28;
const MOVUPS_LOAD: u8 = 0x10;
const MOVUPS_STORE: u8 = 0x11;
const MOVQ_LOAD: u8 = 0x7e;
const MOVQ_STORE: u8 = 0xd6;

/// `to := from`, 16 bytes.
pub fn copy(code: &mut Asm<Target>, to: u8, from: u8) {
    code.put(&[0x40 | (to >> 3) << 2 | from >> 3, 0x0f, MOVAPS, 0xc0 | (to & 7) << 3 | from & 7]);
}

/// An instruction with a register and a field of the context.
fn with_field(code: &mut Asm<Target>, prefix: Option<u8>, opcode: u8, r: u8, field: usize) {
    code.put(&[0x65]);
    if let Some(prefix) = prefix {
        code.put(&[prefix]);
    }
    code.put(&[0x40 | (r >> 3) << 2, 0x0f, opcode, 0x04 | (r & 7) << 3, 0x25]);
    code.put(&(field as u32).to_le_bytes());
}

/// Loads a value.
pub fn load(code: &mut Asm<Target>, r: u8, field: usize) {
    with_field(code, Some(0xf3), MOVQ_LOAD, r, field);
}

/// Stores a value.
pub fn store(code: &mut Asm<Target>, r: u8, field: usize) {
    with_field(code, Some(0x66), MOVQ_STORE, r, field);
}

/// Stores all of a register.
pub fn save(code: &mut Asm<Target>, r: u8, field: usize) {
    with_field(code, None, MOVUPS_STORE, r, field);
}

/// Loads all of a register.
pub fn restore(code: &mut Asm<Target>, r: u8, field: usize) {
    with_field(code, None, MOVUPS_LOAD, r, field);
}

/// Lets a record find in slots what is in XMM registers, and returns these: bit n is register n. [`leave`] is to
/// store them on the way to the record.
pub fn in_slots(record: &mut Record, borrowed: &[(u8, u16)]) -> u16 {
    let mut registers = 0;
    for node in &mut record.nodes {
        if let Node::Leaf(location, _) = node
            && let Location::Vector(r) = *location
            && let Some((_, slot)) = borrowed.iter().find(|(borrowed, _)| *borrowed == r)
        {
            registers |= 1 << r;
            *location = Location::Slot(slot + 2);
        }
    }
    registers
}

/// Stores these values for a record, and gives the guest what it has in the registers that were borrowed.
pub fn leave(code: &mut Asm<Target>, values: u16, borrowed: &[(u8, u16)]) {
    for &(r, s) in borrowed.iter().filter(|(r, _)| values >> r & 1 != 0) {
        store(code, r, slot(s + 2));
    }
    borrowed.iter().for_each(|&(r, s)| restore(code, r, slot(s)));
}
