//! The writer of jumps: the only code that changes generated code after it was placed.
//!
//! A jump is changed while other threads execute it. Every function here therefore changes the code
//! by one store within eight aligned bytes: a thread that executes the jump at the same time goes
//! to the old destination or to the new one (Intel SDM vol. 3, 9.1.1; AMD64 manual vol. 2, 7.6.1).
//! [`force`] is the exception.
//!
//! The module owns no data. It owns the [`Permit`] that the methods of [`Cache`] which change
//! placed code ask for; no other module can make one.
//!
//! Invariant that callers keep: the state that a jump follows (the target of a fragment's link, the
//! entry of a place, the count of an owner's unlinkings) is changed before the jump is written. So
//! a signal handler that links or unlinks the owner meanwhile writes what is true by then.
//!
//! Callers hold the emitter. All functions are async-signal-safe.
//!
//! Example: [`lead`]`(cache, 0x2000_0105, 0x2000_4000)` makes the `jmp rel32` whose field stands at
//! 0x2000_0105 lead to 0x2000_4000: the field becomes 0x3ef7, the distance from the field's end.

use super::Cache;

/// The right to change placed code. Only this module can make one.
pub(crate) struct Permit(());

const PERMIT: Permit = Permit(());

/// The opcode of `jmp rel8`.
const SHORT_JUMP: u8 = 0xeb;

/// Makes the jump with this rel32 field lead to `target`.
pub(crate) fn lead(cache: &Cache, field: u64, target: u64) {
    set_field(cache, field, relative(field, target));
}

/// The value of a rel32 field at `field` that leads to `target`.
pub(crate) fn relative(field: u64, target: u64) -> u32 {
    target.wrapping_sub(field + 4) as u32
}

/// The address to which the jump with this rel32 field leads now.
pub(crate) fn led(cache: &Cache, field: u64) -> u64 {
    let bytes = cache.read(field, 4).first_chunk().copied().unwrap_or_default();
    (field + 4).wrapping_add(i64::from(i32::from_le_bytes(bytes)) as u64)
}

/// Makes the 32-bit field of an instruction hold `value`.
pub(crate) fn set_field(cache: &Cache, field: u64, value: u32) {
    cache.patch(&PERMIT, field, value);
}

/// Replaces an instruction of eight aligned bytes.
pub(crate) fn replace(cache: &Cache, address: u64, bytes: [u8; 8]) {
    cache.patch_instruction(&PERMIT, address, bytes);
}

/// Makes the short branch at `address` a jump to the same destination.
pub(crate) fn always_take(cache: &Cache, address: u64) {
    cache.patch_byte(&PERMIT, address, SHORT_JUMP);
}

/// Makes the short jump at `address` lead this many bytes behind its end.
pub(crate) fn set_distance(cache: &Cache, address: u64, distance: u8) {
    debug_assert!(cache.read(address, 1) == [SHORT_JUMP] && distance < 0x80);
    cache.patch_byte(&PERMIT, address + 1, distance);
}

/// Has [`always_take`] changed the branch at `address`?
pub(crate) fn is_always_taken(cache: &Cache, address: u64) -> bool {
    cache.read(address, 1) == [SHORT_JUMP]
}

/// Replaces the opcode of a guard's jump, of two bytes that need not be aligned. No thread may be
/// executing there.
pub(crate) fn force(cache: &Cache, address: u64, opcode: [u8; 2]) {
    cache.patch_opcode(&PERMIT, address, opcode);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut cache = Cache::new(1 << 16).unwrap();
        let code = cache.alloc_hot(64, 64).unwrap();
        cache.write(code, &[0xe9, 0, 0, 0, 0, 0xe3, 5, 0x90]);
        for target in [code, code + 5, code + 40] {
            lead(&cache, code + 1, target);
            assert_eq!((led(&cache, code + 1), cache.read(code, 1)), (target, &[0xe9][..]));
        }
        assert!(!is_always_taken(&cache, code + 5));
        always_take(&cache, code + 5);
        assert!(is_always_taken(&cache, code + 5));
        assert_eq!(cache.read(code + 6, 2), [5, 0x90]);
        set_distance(&cache, code + 5, 9);
        assert_eq!(cache.read(code + 5, 3), [SHORT_JUMP, 9, 0x90]);
        replace(&cache, code + 8, [1, 2, 3, 4, 5, 6, 7, 8]);
        set_field(&cache, code + 12, 0x0c0b_0a09);
        assert_eq!(cache.read(code + 8, 8), [1, 2, 3, 4, 9, 10, 11, 12]);
    }
}
