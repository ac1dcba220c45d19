//! The guest's extended state in memory: where each component lies in the standard XSAVE layout,
//! and which components are valid.
//!
//! A component whose XSTATE_BV bit is clear is in its initial state, and its bytes are stale (Intel
//! SDM vol. 1, 13.6). [`initialise`] writes the initial state to the bytes and sets the bit.
//!
//! Data: none. The state is in the [`ThreadContext`]; [`Layout`] describes the machine.
//!
//! Invariant: a native initialises only the components that it uses. So upper parts of vector
//! registers that the guest has not used stay marked as unused (docs/design.md, "Running a guest").
//!
//! No lock: a context belongs to one thread.
//!
//! Example: the first `addsd` of a guest finds the bit of [`SSE`] clear. `initialise(context, SSE)`
//! writes zeros to the 256 bytes of xmm0 to xmm15 and sets the bit; the bits of [`AVX`] and
//! [`ZMM_HIGH`] stay clear.

use dynasour_guest::context::{HOST_MXCSR, ThreadContext};
use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::sync::LazyLock;

/// x87 and MMX.
pub const X87: u64 = 1;
/// The low 128 bits of vector registers 0 to 15.
pub const SSE: u64 = 1 << 1;
/// Bits 128 to 255 of vector registers 0 to 15.
pub const AVX: u64 = 1 << 2;
/// Mask registers.
pub const OPMASK: u64 = 1 << 5;
/// Bits 256 to 511 of vector registers 0 to 15.
pub const ZMM_HIGH: u64 = 1 << 6;
/// Vector registers 16 to 31.
pub const HIGH_16: u64 = 1 << 7;

/// Byte offset of vector register 0 in the legacy area.
pub const LEGACY_VECTORS: usize = 160;
/// Byte offset of MXCSR.
pub const MXCSR: usize = 24;
/// Byte offset of XSTATE_BV.
pub const STATE_BITS: usize = 512;

/// The byte offsets of the components beyond the legacy area, and the components that this machine
/// has.
pub struct Layout {
    /// Offset of the upper halves of ymm0 to ymm15.
    pub avx: usize,
    /// Offset of k0 to k7.
    pub opmask: usize,
    /// Offset of the upper halves of zmm0 to zmm15.
    pub zmm_high: usize,
    /// Offset of zmm16 to zmm31.
    pub high_16: usize,
    /// The components that the operating system has enabled (XCR0).
    pub enabled: u64,
}

impl Layout {
    /// The layout of this machine.
    pub fn get() -> &'static Layout {
        static LAYOUT: LazyLock<Layout> = LazyLock::new(|| {
            let xsave = __cpuid(1).ecx & (1 << 27) != 0;
            // SAFETY: the operating system enabled XSAVE (CPUID.1:ECX.OSXSAVE), so xgetbv exists.
            let enabled = if xsave { unsafe { read_xcr0() } } else { X87 | SSE };
            let offset = |component: u32| __cpuid_count(0xd, component).ebx as usize;
            Layout {
                avx: offset(2),
                opmask: offset(5),
                zmm_high: offset(6),
                high_16: offset(7),
                enabled,
            }
        });
        &LAYOUT
    }

    /// Does the machine have 512-bit vectors and mask registers?
    pub fn has_avx512(&self) -> bool {
        let all = OPMASK | ZMM_HIGH | HIGH_16;
        self.enabled & all == all
    }
}

#[target_feature(enable = "xsave")]
fn read_xcr0() -> u64 {
    // SAFETY: register 0 always exists.
    unsafe { _xgetbv(0) }
}

/// The components whose bytes are valid.
pub fn valid(context: &ThreadContext) -> u64 {
    let mut bits = [0; 8];
    bits.copy_from_slice(&context.xstate.0[STATE_BITS..STATE_BITS + 8]);
    u64::from_le_bytes(bits)
}

/// Declares exactly `components` valid.
pub fn set_valid(context: &mut ThreadContext, components: u64) {
    context.xstate.0[STATE_BITS..STATE_BITS + 8].copy_from_slice(&components.to_le_bytes());
}

/// Makes `components` valid: writes the initial state to the bytes of those that are not.
#[cold]
pub fn initialise(context: &mut ThreadContext, components: u64) {
    let layout = Layout::get();
    let have = valid(context);
    let missing = components & !have;
    let mut zero = |component: u64, start: usize, len: usize| {
        if missing & component != 0
            && let Some(bytes) = context.xstate.0.get_mut(start..start + len)
        {
            bytes.fill(0);
        }
    };
    // In the initial state of x87 everything but the control word is zero. MXCSR lies between its
    // parts and does not belong to it.
    zero(X87, 0, MXCSR);
    zero(X87, 32, 128);
    zero(SSE, LEGACY_VECTORS, 256);
    zero(AVX, layout.avx, 256);
    zero(OPMASK, layout.opmask, 64);
    zero(ZMM_HIGH, layout.zmm_high, 512);
    zero(HIGH_16, layout.high_16, 1024);
    if missing & X87 != 0 {
        context.xstate.0[0..2].copy_from_slice(&0x37fu16.to_le_bytes());
    }
    set_valid(context, have | components);
}

/// Proof that the processor's MXCSR is the guest's. [`GuestMxcsr::store`] must end its life: it
/// saves the guest's MXCSR in the context and loads the host's.
///
/// The host must not compute with floating-point numbers in between: the guest's rounding mode
/// would apply, and an exception could trap.
pub struct GuestMxcsr;

impl GuestMxcsr {
    /// Loads the guest's MXCSR into the processor.
    pub fn load(context: &ThreadContext) -> GuestMxcsr {
        let mut word = [0; 4];
        word.copy_from_slice(&context.xstate.0[MXCSR..MXCSR + 4]);
        set_mxcsr(u32::from_le_bytes(word));
        GuestMxcsr
    }

    /// Stores the processor's MXCSR in the context and loads the host's.
    pub fn store(self, context: &mut ThreadContext) {
        let mut word = 0u32;
        // SAFETY: stores a register into a local variable.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack, preserves_flags)) };
        context.xstate.0[MXCSR..MXCSR + 4].copy_from_slice(&word.to_le_bytes());
        set_mxcsr(HOST_MXCSR);
    }
}

fn set_mxcsr(word: u32) {
    // SAFETY: the guest's word was accepted by the processor or the kernel before, so no reserved
    // bit is set in it.
    unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack, preserves_flags)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_bytes_become_the_initial_state() {
        let mut context = ThreadContext::new();
        context.xstate.0[LEGACY_VECTORS..LEGACY_VECTORS + 256].fill(0xaa);
        context.xstate.0[0..24].fill(0xbb);
        context.xstate.0[40] = 9;
        initialise(&mut context, SSE);
        assert_eq!(valid(&context), SSE);
        assert_eq!(context.xstate.0[LEGACY_VECTORS + 17], 0);
        assert_eq!(context.xstate.0[40], 9, "another component is left alone");
        initialise(&mut context, X87 | SSE);
        assert_eq!(context.xstate.0[0..4], [0x7f, 3, 0, 0]);
        assert_eq!(context.xstate.0[MXCSR..MXCSR + 2], [0x80, 0x1f], "MXCSR stays");
        context.xstate.0[LEGACY_VECTORS] = 5;
        initialise(&mut context, SSE);
        assert_eq!(context.xstate.0[LEGACY_VECTORS], 5, "valid bytes stay");
    }
}
