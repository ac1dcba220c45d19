//! The extended state in signal frames: a standard-format XSAVE area with the kernel's description
//! of it. The reference is the kernel's `arch/x86/kernel/fpu/signal.c`: [`restore`] accepts and
//! refuses the same states.
//!
//! ```text
//! 0    legacy area (FXSAVE format)
//! 464  the kernel's description: magic1, total size, features, area size
//! 512  XSAVE header: XSTATE_BV, XCOMP_BV, reserved
//! 576  components at their standard offsets
//! end  magic2
//! ```
//!
//! A component is *in use* if its bit of XSTATE_BV is set; else it is in its initial state, and its
//! bytes in memory may be stale.
//!
//! Data: [`layout`], computed once from the processor and the kernel. The functions work on the
//! `XState` that the caller passes, which belongs to the calling thread; no lock.
//!
//! Example: a guest that has used only x87 and SSE is interrupted. The frame has XSTATE_BV = 3, and
//! its AVX component is written as zeros.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::ops::Range;
use std::sync::OnceLock;

use dynasour_guest::context::{XSTATE_SIZE, XState};
use smallvec::{SmallVec, smallvec};

use crate::kernel::release;
use crate::protection_keys;

/// `FP_XSTATE_MAGIC1`, in the description: the legacy area is the beginning of an XSAVE area.
const MAGIC1: u32 = 0x4650_5853;
/// `FP_XSTATE_MAGIC2`, directly behind the XSAVE area.
const MAGIC2: u32 = 0x4650_5845;
/// Bytes of [`MAGIC2`].
pub const MAGIC2_SIZE: usize = 4;
/// The offset of the kernel's description of the area (`struct _fpx_sw_bytes`).
const SW_RESERVED: usize = 464;
/// Bytes of legacy area and header.
const SMALLEST: usize = 576;
/// Bytes of the legacy area.
const LEGACY: usize = 512;
/// Bits of x87 and SSE, the components of the legacy area (Intel SDM vol. 1, 13.1, as all bits of
/// components).
const LEGACY_FEATURES: u64 = 3;
/// The bit of SSE.
const SSE_FEATURE: u64 = 1 << 1;
/// The bit of AVX.
const AVX: u64 = 1 << 2;
/// The bit of protection keys.
pub const PKRU: u64 = 1 << 9;
/// Bytes of the register PKRU.
const PKRU_SIZE: usize = 4;
/// The bit of AMX tile configuration.
const TILE_CONFIGURATION: u64 = 1 << 17;
/// The bit of AMX tile data. The kernel saves it only for processes that have asked for it.
const TILE_DATA: u64 = 1 << 18;

/// The standard format of this processor, and the components that the kernel saves in a signal
/// frame.
#[derive(Debug)]
pub struct Layout {
    /// XCR0: the components that this processor has and the kernel has enabled.
    pub xcr0: u64,
    /// The components in signal frames.
    pub features: u64,
    /// Bytes of the XSAVE area in signal frames.
    pub size: usize,
    /// The MXCSR bits that may be set.
    pub mxcsr_mask: u32,
    /// The protection-key rights of a new process; `None` without protection keys.
    pkru: Option<u32>,
    /// Whether frames mark the protection-key rights as in use even if they are initial (all
    /// allowed).
    pkru_is_always_in_use: bool,
    /// Bytes that are written of the component with the protection-key rights.
    pkru_bytes: usize,
    /// Bit, offset and size of each component behind the header.
    extended: Vec<(u32, usize, usize)>,
}

/// The components that the operating system has enabled: XCR0.
pub fn enabled() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: the translator requires XSAVE, with which the instruction exists.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack))
    };
    u64::from(high) << 32 | u64::from(low)
}

/// Bytes that an area with all enabled components takes. Unlike [`layout`], this asks the processor
/// once: each `cpuid` takes 3 µs in a virtual machine.
pub fn area_size() -> usize {
    __cpuid_count(0xd, 0).ebx as usize
}

/// This machine's layout.
pub fn layout() -> &'static Layout {
    static LAYOUT: OnceLock<Layout> = OnceLock::new();
    LAYOUT.get_or_init(|| {
        let xcr0 = enabled();
        let extended: Vec<_> = (2..63)
            .filter(|bit| xcr0 >> bit & 1 != 0)
            .map(|bit| {
                let leaf = __cpuid_count(0xd, bit);
                (bit, leaf.ebx as usize, leaf.eax as usize)
            })
            .filter(|(_, offset, size)| offset + size <= XSTATE_SIZE)
            .collect();
        let features = xcr0 & !TILE_DATA;
        let in_frame = extended.iter().filter(|(bit, ..)| features >> bit & 1 != 0);
        let size = in_frame.map(|(_, offset, size)| offset + size).max().unwrap_or(0).max(SMALLEST);
        let pkru = (xcr0 & PKRU != 0).then(read_pkru);
        let rights = extended.iter().find(|(bit, ..)| pkru.is_some() && 1u64 << bit == PKRU);
        let (pkru_is_always_in_use, pkru_bytes) =
            rights.map_or((false, 0), |&(_, offset, size)| pkru_in_frames(offset, size));
        Layout {
            xcr0,
            features,
            size,
            mxcsr_mask: mxcsr_mask(),
            pkru,
            pkru_is_always_in_use,
            pkru_bytes,
            extended,
        }
    })
}

impl Layout {
    /// The offset of the protection-key rights; `None` without protection keys.
    pub fn pkru_offset(&self) -> Option<usize> {
        self.extended.iter().find(|(bit, ..)| 1u64 << bit == PKRU).map(|&(_, offset, _)| offset)
    }
}

/// Sets the protection-key rights in `state`; `offset` is [`Layout::pkru_offset`].
pub fn set_pkru(state: &mut XState, offset: usize, pkru: u32) {
    state.0[offset..offset + 4].copy_from_slice(&pkru.to_le_bytes());
    let is_in_use = pkru != 0 || layout().pkru_is_always_in_use;
    let in_use = word64(&state.0, 512) & !PKRU | if is_in_use { PKRU } else { 0 };
    state.0[512..520].copy_from_slice(&in_use.to_le_bytes());
}

/// The protection-key rights in `state`. 0 (all allowed) if they are in their initial state; `None`
/// without protection keys.
pub fn pkru(state: &XState) -> Option<u32> {
    let offset = layout().pkru_offset()?;
    let is_in_use = word64(&state.0, 512) & PKRU != 0;
    Some(if is_in_use { word32(&state.0, offset) } else { 0 })
}

/// This thread's protection-key rights. Must be called only if XCR0 has the bit [`PKRU`].
fn read_pkru() -> u32 {
    let pkru;
    // SAFETY: the caller knows that the instruction exists; it reads a register.
    unsafe {
        asm!("rdpkru", in("ecx") 0, out("eax") pkru, out("edx") _,
            options(nomem, nostack, preserves_flags))
    };
    pkru
}

/// What signal frames have of the protection-key rights. First: whether they mark them as in use when they are
/// in their initial state. That depends on the processor (XINUSE, Intel SDM vol. 1, 13.6) and on the kernel, which
/// since 6.12 writes them itself. Second: how many bytes of the component at `offset` the processor writes, of
/// `size`. AMD's writes the four of the register.
fn pkru_in_frames(offset: usize, size: usize) -> (bool, usize) {
    /// No byte of rights that allow everything.
    const UNWRITTEN: u8 = !0;
    #[repr(align(64))]
    struct Area([u8; XSTATE_SIZE]);
    let mut area = Box::new(Area([0; XSTATE_SIZE]));
    area.0[offset..offset + size].fill(UNWRITTEN);
    protection_keys::with_all_rights(|| {
        // SAFETY: writes the header and one component of an aligned area of our own that has room
        // for all components.
        unsafe {
            asm!("xsave64 [{}]", in(reg) area.0.as_mut_ptr(), in("eax") PKRU as u32, in("edx") 0,
                options(nostack, preserves_flags));
        }
    });
    let is_always_in_use = word64(&area.0, 512) & PKRU != 0 || release::signals_have_all_rights();
    let is_written = |byte: &u8| *byte != UNWRITTEN;
    let written =
        area.0[offset..offset + size].iter().rposition(is_written).map_or(0, |last| last + 1);
    // The kernel writes the register in any case.
    (is_always_in_use, written.max(PKRU_SIZE))
}

/// The MXCSR bits that may be set (Intel SDM vol. 1, 11.6.6).
fn mxcsr_mask() -> u32 {
    #[repr(align(16))]
    struct Area([u8; LEGACY]);
    let mut area = Area([0; LEGACY]);
    // SAFETY: writes 512 bytes of an aligned local.
    unsafe {
        asm!("fxsave64 [{}]", in(reg) area.0.as_mut_ptr(), options(nostack, preserves_flags))
    };
    match word32(&area.0, 28) {
        0 => 0xffbf,
        mask => mask,
    }
}

fn word32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn word64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// The bytes of the legacy area that belong to x87 (bit 0): control word to operand pointer, and
/// the registers.
const X87: [Range<usize>; 2] = [0..24, 32..160];
/// The bytes of the legacy area that belong to SSE (bit 1), without MXCSR.
const SSE: Range<usize> = 160..416;

/// The extended state of a signal frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Image {
    /// The XSAVE area and, behind it, `MAGIC2`.
    pub bytes: Vec<u8>,
    /// The ranges of `bytes` that are written to the stack, in ascending order. The kernel and the
    /// processor do not write the others.
    pub written: SmallVec<[Range<usize>; 12]>,
}

/// Builds the extended state of a signal frame from `state`.
pub fn save(state: &XState) -> Image {
    let layout = layout();
    let mut image = vec![0; layout.size + MAGIC2_SIZE];
    let mut written: SmallVec<[Range<usize>; 12]> = smallvec![0..SSE.end, SW_RESERVED..SMALLEST];
    let in_use = word64(&state.0, 512) & layout.features;
    // Components in their initial state are written with their initial values, because their bytes
    // in `state` may be stale.
    image[0..2].copy_from_slice(&0x37fu16.to_le_bytes());
    if in_use & 1 != 0 {
        for range in X87 {
            image[range.clone()].copy_from_slice(&state.0[range]);
        }
    }
    image[24..28].copy_from_slice(&state.0[24..28]);
    image[28..32].copy_from_slice(&layout.mxcsr_mask.to_le_bytes());
    if in_use & 2 != 0 {
        image[SSE].copy_from_slice(&state.0[SSE]);
    }
    for &(bit, offset, size) in &layout.extended {
        let is_in_use = in_use >> bit & 1 != 0;
        if is_in_use {
            image[offset..offset + size].copy_from_slice(&state.0[offset..offset + size]);
        }
        // Tile configuration is not written while it is initial; all other components are (measured
        // on Sapphire Rapids).
        if layout.features >> bit & 1 != 0 && (is_in_use || 1 << bit != TILE_CONFIGURATION) {
            let bytes = if 1 << bit == PKRU { layout.pkru_bytes } else { size };
            written.push(offset..offset + bytes);
        }
    }
    image[512..520].copy_from_slice(&(in_use | LEGACY_FEATURES).to_le_bytes());
    let total = image.len() as u32;
    image[SW_RESERVED..SW_RESERVED + 4].copy_from_slice(&MAGIC1.to_le_bytes());
    image[SW_RESERVED + 4..SW_RESERVED + 8].copy_from_slice(&total.to_le_bytes());
    image[SW_RESERVED + 8..SW_RESERVED + 16].copy_from_slice(&layout.features.to_le_bytes());
    image[SW_RESERVED + 16..SW_RESERVED + 20].copy_from_slice(&(layout.size as u32).to_le_bytes());
    image[layout.size..].copy_from_slice(&MAGIC2.to_le_bytes());
    written.push(layout.size..image.len());
    written.sort_unstable_by_key(|range| range.start);
    Image { bytes: image, written }
}

/// The error that the processor would refuse a frame's state, or that it cannot be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("bad extended state in a signal frame")]
pub struct BadState;

/// Sets the state with which a new process and a signal handler start: every component is initial,
/// and the protection-key rights are the kernel's default.
pub fn reset(state: &mut XState) {
    state.0[0..24].fill(0);
    state.0[32..].fill(0);
    begin(state);
}

/// As [`reset`], for a state that is all zeros. It does not write to the pages of components that are initial, and
/// asks the processor for the [`layout`] only if that is needed.
pub fn begin(state: &mut XState) {
    state.0[0..2].copy_from_slice(&0x37fu16.to_le_bytes());
    state.0[24..28].copy_from_slice(&0x1f80u32.to_le_bytes());
    if enabled() & PKRU != 0
        && let (Some(pkru), Some(offset)) = (layout().pkru, layout().pkru_offset())
    {
        set_pkru(state, offset, pkru);
    }
}

/// Loads the extended state of a signal frame from `address`; 0 means the initial state. `read`
/// copies guest memory and fails if it cannot be read.
///
/// # Errors
/// The frame's state is refused; `state` is then the initial one.
pub fn restore(
    state: &mut XState,
    address: u64,
    read: impl Fn(u64, &mut [u8]) -> Result<(), BadState>,
) -> Result<(), BadState> {
    let restored = load(state, address, read);
    if restored.is_err() {
        reset(state);
    }
    restored
}

fn load(
    state: &mut XState,
    address: u64,
    read: impl Fn(u64, &mut [u8]) -> Result<(), BadState>,
) -> Result<(), BadState> {
    if address == 0 {
        reset(state);
        return Ok(());
    }
    let layout = layout();
    let mut image = vec![0; layout.size];
    read(address, &mut image[..LEGACY])?;
    let size = word32(&image, SW_RESERVED + 16) as usize;
    let total = word32(&image, SW_RESERVED + 4) as usize;
    let mut extended = word32(&image, SW_RESERVED) == MAGIC1
        && (SMALLEST..=layout.size).contains(&size)
        && size <= total;
    if extended {
        let mut magic = [0; 4];
        read(address.wrapping_add(size as u64), &mut magic)?;
        extended = u32::from_le_bytes(magic) == MAGIC2;
    }
    // Without a valid description only the legacy area is loaded, as by FXRSTOR.
    let wanted =
        if extended { word64(&image, SW_RESERVED + 8) & layout.features } else { LEGACY_FEATURES };
    let alignment = if extended { 64 } else { 16 };
    if !address.is_multiple_of(alignment) {
        return Err(BadState);
    }
    let mut in_use = LEGACY_FEATURES;
    if extended {
        read(address, &mut image[..size])?;
        in_use = word64(&image, 512);
        let reserved_is_zero = image[520..536].iter().all(|&byte| byte == 0);
        if in_use & !layout.xcr0 != 0 || !reserved_is_zero {
            return Err(BadState);
        }
    }
    // MXCSR is checked if SSE or AVX is loaded. It is loaded only together with SSE.
    let mxcsr = word32(&image, 24);
    if wanted & (SSE_FEATURE | AVX) != 0 && mxcsr & !layout.mxcsr_mask != 0 {
        return Err(BadState);
    }
    reset(state);
    let present = wanted & in_use;
    if present & 1 != 0 {
        for range in X87 {
            state.0[range.clone()].copy_from_slice(&image[range]);
        }
    }
    if wanted & SSE_FEATURE != 0 {
        state.0[24..28].copy_from_slice(&mxcsr.to_le_bytes());
    }
    if present & 2 != 0 {
        state.0[SSE].copy_from_slice(&image[SSE]);
    }
    for &(bit, offset, bytes) in &layout.extended {
        if present >> bit & 1 != 0 && offset + bytes <= size {
            state.0[offset..offset + bytes].copy_from_slice(&image[offset..offset + bytes]);
        }
    }
    // Components that the frame does not have become initial. That is also true of the rights,
    // which then allow everything.
    let untouched = word64(&state.0, 512) & !wanted & !PKRU;
    state.0[512..520].copy_from_slice(&(present | untouched).to_le_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use dynasour_guest::ThreadContext;

    /// Reads `image` as if it stood at address 64 * 1024.
    const BASE: u64 = 64 << 10;
    fn reader(image: &[u8]) -> impl Fn(u64, &mut [u8]) -> Result<(), BadState> {
        move |address, out| {
            let start = (address - BASE) as usize;
            out.copy_from_slice(image.get(start..start + out.len()).ok_or(BadState)?);
            Ok(())
        }
    }

    fn filled() -> Box<ThreadContext> {
        let mut context = ThreadContext::new();
        let layout = layout();
        for (i, byte) in context.xstate.0[32..416].iter_mut().enumerate() {
            *byte = i as u8;
        }
        for &(bit, offset, size) in layout.extended.iter().filter(|c| c.0 <= 7) {
            context.xstate.0[offset..offset + size].fill(bit as u8 + 1);
        }
        context.xstate.0[512..520].copy_from_slice(&(layout.features & 0xff).to_le_bytes());
        context.xstate.0[24..28].copy_from_slice(&0x1fa0u32.to_le_bytes());
        context
    }

    #[test]
    fn what_is_saved_is_restored() {
        let context = filled();
        let image = save(&context.xstate);
        let mut other = ThreadContext::new();
        assert_eq!(restore(&mut other.xstate, BASE, reader(&image.bytes)), Ok(()));
        assert_eq!(save(&other.xstate), image);
        // The bytes of components in their initial state may be stale.
        let in_use = word64(&context.xstate.0, 512);
        let components = layout().extended.iter().filter(|(bit, ..)| in_use >> bit & 1 != 0);
        let components = components.map(|(_, offset, size)| *offset..offset + size);
        for range in [0..28, 32..416, 512..520].into_iter().chain(components) {
            assert!(other.xstate.0[range.clone()] == context.xstate.0[range]);
        }
    }

    #[test]
    fn stale_bytes_of_initial_components_do_not_leak() {
        let mut context = filled();
        context.xstate.0[512..520].fill(0);
        let image = save(&context.xstate).bytes;
        assert_eq!(word64(&image, 512), 3);
        assert!(image[160..416].iter().chain(&image[576..layout().size]).all(|&byte| byte == 0));
        assert_eq!(word32(&image, 24), 0x1fa0);
    }

    #[test]
    fn bad_states_are_refused_as_the_processor_refuses_them() {
        let good = save(&filled().xstate).bytes;
        let mut state = ThreadContext::new();
        let mut attempt = |at: usize, byte: u8, address: u64| {
            let mut image = good.clone();
            image[at] = byte;
            restore(&mut state.xstate, address, |a, out| reader(&image)(a - address + BASE, out))
        };
        assert_eq!(attempt(0, 0, BASE), Ok(()));
        assert_eq!(attempt(519, 0x80, BASE), Err(BadState), "unknown component");
        assert_eq!(attempt(527, 0x80, BASE), Err(BadState), "compacted format");
        assert_eq!(attempt(26, 1, BASE), Err(BadState), "reserved MXCSR bit");
        assert_eq!(attempt(0, 0, BASE + 16), Err(BadState), "misaligned");
        let end = good.len() - 1;
        assert_eq!(attempt(end, 0, BASE), Ok(()), "without magic2 only the legacy area counts");
        assert_eq!(word64(&state.xstate.0, 512) & !PKRU, 3);
    }

    #[test]
    fn no_state_means_initial_state() {
        let (mut context, mut initial) = (filled(), ThreadContext::new());
        reset(&mut initial.xstate);
        assert_eq!(restore(&mut context.xstate, 0, |_, _| Err(BadState)), Ok(()));
        assert!(save(&context.xstate) == save(&initial.xstate));
        assert_eq!(context.xstate.0[0..2], [0x7f, 3]);
    }
}
