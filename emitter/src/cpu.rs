//! Features of this processor and kernel, asked once at the start.
//!
//! Data: [`Cpu`], a copy of the answers that each emitter keeps. Invariant: generated code uses an
//! instruction beyond the x86-64 base set only if [`Cpu`] has its feature. Any thread may ask.
//!
//! Example: without `bmi2` there is no `pext`, so checked entries compare by `loop`, and blocks do
//! not return through the stack.

use std::arch::is_x86_feature_detected;

/// The features that code generation asks about.
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    /// Shifts by any register without flags (shlx, shrx, sarx), rorx.
    pub bmi2: bool,
    /// tzcnt
    pub bmi1: bool,
    /// lzcnt
    pub lzcnt: bool,
    /// popcnt
    pub popcnt: bool,
    /// vzeroupper exists
    pub avx: bool,
    /// `loop` is as fast as any other branch, which it is on AMD's processors.
    pub has_fast_loop: bool,
    /// rd/wr fs/gsbase may be used in user mode.
    pub fsgsbase: bool,
    /// The extended-state components that are saved and restored: all of XCR0 but protection keys,
    /// whose register holds the guest's rights while the host runs, too.
    pub xstate_mask: u64,
    /// Bytes of the standard XSAVE format with all of XCR0.
    pub xstate_size: usize,
    /// The extended state that is loaded without XRSTOR; none if this processor has components that are not known.
    pub light: Option<LightState>,
}

/// The components that most guests have in use (bits of XSTATE_BV): SSE, and with AVX-512 the mask registers and ZMM16
/// to ZMM31, which the C library uses. If these alone are in use, and the x87 state in the processor is the initial one,
/// moves load the state in 4 ns, where XRSTOR takes 90 to 120 (measured).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LightState {
    /// Their bits.
    pub components: u64,
    /// Where the mask registers, and ZMM16, stand in the standard XSAVE format; none without AVX-512.
    pub avx512: Option<(u32, u32)>,
}

impl LightState {
    /// Bits of XSTATE_BV (Intel SDM vol. 1, 13.1): x87, SSE and AVX; AVX-512's masks, upper halves, and registers.
    const LEGACY: u64 = 7;
    const SSE: u64 = 1 << 1;
    const MASKS: u32 = 5;
    const HIGH: u32 = 7;
    const AVX512: u64 = 7 << LightState::MASKS;

    /// That of a processor with these components.
    pub fn of(components: u64) -> Option<LightState> {
        let offset = |component| std::arch::x86_64::__cpuid_count(0xd, component).ebx;
        match components {
            LightState::LEGACY => Some(LightState { components: LightState::SSE, avx512: None }),
            _ if components == LightState::LEGACY | LightState::AVX512 => {
                let own = 1 << LightState::MASKS | 1 << LightState::HIGH;
                let avx512 = Some((offset(LightState::MASKS), offset(LightState::HIGH)));
                Some(LightState { components: LightState::SSE | own, avx512 })
            }
            _ => None,
        }
    }
}

/// The time stamp counter.
pub fn ticks() -> u64 {
    // SAFETY: every x86-64 processor has it.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// The protection-key component, which stays live in hardware.
const PKRU: u64 = 1 << 9;

/// "AuthenticAMD", as CPUID gives it.
const AMD: [u32; 3] = [0x6874_7541, 0x6974_6e65, 0x444d_4163];

impl Cpu {
    /// Asks this machine.
    pub fn detect() -> Cpu {
        let xsave = is_x86_feature_detected!("xsave");
        // SAFETY: cpuid exists on every x86-64; xgetbv is executed only if CPUID says OSXSAVE.
        let (xcr0, xstate_size) = unsafe {
            let leaf = std::arch::x86_64::__cpuid_count(0xd, 0);
            if xsave { (xgetbv0(), leaf.ebx as usize) } else { (0, 0) }
        };
        let vendor = std::arch::x86_64::__cpuid(0);
        // SAFETY: getauxval only reads the auxiliary vector.
        let hwcap2 = unsafe { libc::getauxval(libc::AT_HWCAP2) };
        Cpu {
            bmi2: is_x86_feature_detected!("bmi2"),
            bmi1: is_x86_feature_detected!("bmi1"),
            lzcnt: is_x86_feature_detected!("lzcnt"),
            popcnt: is_x86_feature_detected!("popcnt"),
            avx: is_x86_feature_detected!("avx"),
            has_fast_loop: [vendor.ebx, vendor.edx, vendor.ecx] == AMD,
            fsgsbase: hwcap2 & 2 != 0,
            xstate_mask: xcr0 & !PKRU,
            xstate_size,
            light: LightState::of(xcr0 & !PKRU),
        }
    }
}

/// Reads XCR0.
///
/// # Safety
/// The operating system must have enabled XSAVE.
unsafe fn xgetbv0() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: the caller vouches for XSAVE; reads only.
    unsafe {
        std::arch::asm!(
            "xgetbv", in("ecx") 0, out("eax") low, out("edx") high,
            options(nomem, nostack)
        )
    };
    u64::from(high) << 32 | u64::from(low)
}
