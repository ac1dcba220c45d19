//! The x87 instruction pointer (FIP) and opcode (FOP) that the guest sees in its extended state.
//!
//! The processor records the address of each x87 instruction that is not a control instruction.
//! That instruction is a copy, in the code cache or in a thunk of the interpreter. The guest's pc
//! of it is in `ThreadContext::x87_pc`. Before the guest sees the state, [`show`] replaces the
//! address by the pc, and the opcode by the guest's: the copy may encode its operand otherwise.
//!
//! Data: FIP and FOP in `ThreadContext::xstate`, and `x87_pc`. Invariant: a FIP of zero stays zero,
//! because AMD's processors save the pointers only while an exception is pending.
//!
//! The functions are called by the thread of the context, outside native code. No lock.
//!
//! Example: `fdiv st, st(1)` at 0x401000 divides by zero in a copied block, and the next x87
//! instruction faults. The state that the block leaves has the cache's address; the signal frame
//! shows 0x401000.

use dynasour_guest::ThreadContext;

use crate::memory;

/// The offset of FOP, 2 bytes, in the legacy area (Intel SDM vol. 1, table 10-2).
const OPCODE: usize = 6;
/// The bytes of FIP in the legacy area.
const POINTER: std::ops::Range<usize> = 8..16;
/// The offset of XSTATE_BV in the extended state.
const STATE_BITS: usize = 512;
/// The bit of XSTATE_BV that says that x87 is not in its initial state.
const X87: u8 = 1;

/// FIP in the extended state; 0 if x87 is in its initial state.
fn pointer(context: &ThreadContext) -> u64 {
    if context.xstate.0[STATE_BITS] & X87 == 0 {
        return 0;
    }
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&context.xstate.0[POINTER]);
    u64::from_le_bytes(bytes)
}

/// Makes the extended state show the guest's pointer and opcode.
pub fn show(context: &mut ThreadContext) {
    let recorded = pointer(context);
    if recorded == 0 || recorded == context.x87_pc {
        return;
    }
    context.xstate.0[POINTER].copy_from_slice(&context.x87_pc.to_le_bytes());
    let opcode = &mut context.xstate.0[OPCODE..OPCODE + 2];
    if *opcode != [0, 0] {
        let mut code = [0; 15];
        let readable = memory::fetch_code(context.x87_pc, &mut code);
        if let Some(of_guest) = opcode_of(&code[..readable]) {
            opcode.copy_from_slice(&of_guest.to_le_bytes());
        }
    }
}

/// Called when the guest has loaded its extended state: takes the guest's pointer from it.
pub fn loaded(context: &mut ThreadContext) {
    context.x87_pc = pointer(context);
}

/// FOP of the x87 instruction that begins with these bytes: the lower three bits of the first
/// opcode byte, and the second byte.
fn opcode_of(code: &[u8]) -> Option<u16> {
    const SEGMENTS: [u8; 6] = [0x26, 0x2e, 0x36, 0x3e, 0x64, 0x65];
    let is_prefix = |byte: &u8| {
        SEGMENTS.contains(byte) || matches!(byte, 0x40..=0x4f | 0x66 | 0x67 | 0xf0 | 0xf2 | 0xf3)
    };
    let at = code.iter().position(|byte| !is_prefix(byte))?;
    match code[at..] {
        [first @ 0xd8..=0xdf, second, ..] => Some(u16::from(first & 7) << 8 | u16::from(second)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_opcode_is_behind_prefixes() {
        // fdiv st, st(1); fld tbyte fs:[r8]
        assert_eq!(opcode_of(&[0xd8, 0xf1, 0x90]), Some(0x0f1));
        assert_eq!(opcode_of(&[0x64, 0x41, 0xdb, 0x28]), Some(0x328));
        assert_eq!(opcode_of(&[0x90, 0xd8, 0xf1]), None);
        assert_eq!(opcode_of(&[0xd8]), None);
    }

    #[test]
    fn a_noted_address_is_replaced_and_nothing_else() {
        let code = [0xd8_u8, 0xf1];
        let mut context = Box::new(ThreadContext::new());
        context.x87_pc = code.as_ptr() as u64;
        show(&mut context);
        assert_eq!(pointer(&context), 0, "nothing was saved");
        context.xstate.0[STATE_BITS] |= X87;
        context.xstate.0[POINTER].copy_from_slice(&0x7000_1234_u64.to_le_bytes());
        context.xstate.0[OPCODE] = 0x30;
        show(&mut context);
        assert_eq!(pointer(&context), context.x87_pc);
        assert_eq!(context.xstate.0[OPCODE..OPCODE + 2], 0x0f1_u16.to_le_bytes());
        context.xstate.0[OPCODE] = 0x30;
        show(&mut context);
        assert_eq!(context.xstate.0[OPCODE], 0x30, "what the guest loaded stays");
        context.xstate.0[POINTER].fill(0);
        loaded(&mut context);
        assert_eq!(context.x87_pc, 0);
    }
}
