//! Code that all copied blocks share.
//!
//! * **load**: the way in. It loads the extended state and jumps to the block at `stub_save[6]`.
//! * **fault_out**: leaves with [`FAULT`]; registers are as the faulting instruction found them.
//! * **stale**: leaves with [`STALE`] from a block whose guest code has changed
//!   ([`super::self_checking`]).
//!
//! No flags are changed. Unlinking blocks does not reach a thread that a signal interrupts in here;
//! [`CopyStubs::diversion`] does. Data: [`CopyStubs`], addresses that are the same after a fork.
//! The stubs are made with the emitter and never changed.
//!
//! Example: the dispatcher enters the block at host address 0x2000_5000. It puts that into
//! `stub_save[6]` and enters *load*, which restores the vector registers and jumps there.

use super::self_checking::SAVED;
use crate::asm::{Asm, Assembler, Mem, RAX, RCX, RDX};
use crate::cache::Cache;
use crate::cpu::{Cpu, LightState};
use crate::stubs::{ABORTED, StubError, Stubs};
use crate::transfers::indirect::{Displaced, Diversion};
use dynasour_guest::context::offset;
use std::ops::Range;

/// The `exit_site` of exits of blocks: this plus the number of the link.
pub(crate) const FIRST_LINK: u32 = 1 << 30;
/// The `exit_site` of counters at zero: this plus the number of the counter.
pub(crate) const FIRST_COUNTER: u32 = 0x6000_0000;
/// The `exit_site` after a fault.
pub(crate) const FAULT: u32 = 0x7fff_fff1;
/// The `exit_site` of a block whose guest bytes have changed, with its pc in `next_pc`.
pub(crate) const STALE: u32 = 0x7fff_fff2;

/// The `exit_site` of guest code that ran in place.
pub const IN_PLACE_LEFT: u32 = 0x7fff_fff3;

/// The word of `stub_save` that holds the address at which `load` goes on.
pub(crate) const LOADED: usize = 6;

/// Addresses of the stubs.
#[derive(Clone, Debug)]
pub(super) struct CopyStubs {
    pub load: u64,
    pub fault_out: u64,
    pub stale: u64,
    load_out: u64,
    /// The addresses at which the guest's rax, rcx and rdx are in `stub_save[1..4]`.
    loading: Range<u64>,
}

/// Loads the guest's extended state; changes rax, rcx and rdx. Flags stay.
fn load_extended(code: &mut Asm<u64>, cpu: &Cpu) {
    let (all, is_light, done) = (code.label(), code.label(), code.label());
    if let Some(light) = cpu.light {
        code.load(RCX, offset::X87_IS_INITIAL);
        code.jrcxz(all);
        code.load(RDX, offset::THIS);
        // The other bits are those of protection keys, at most, which XRSTOR does not look at here.
        code.load_8(RCX, Mem::at(RDX).plus(offset::XSTATE_BV as i32));
        code.lea(RCX, Mem::at(RCX).plus(-(light.components as i32)));
        code.jrcxz(is_light);
    }
    code.bind(all);
    code.store_constant(offset::X87_IS_INITIAL, 0);
    code.mov_imm_32(RAX, cpu.xstate_mask as u32);
    code.mov_imm_32(RDX, (cpu.xstate_mask >> 32) as u32);
    code.load(RCX, offset::THIS);
    code.xrstor64(Mem::at(RCX).plus(offset::XSTATE as i32));
    if let Some(light) = cpu.light {
        code.jmp_near(done);
        code.bind(is_light);
        load_light(code, light);
    }
    code.bind(done);
}

/// As [`load_extended`], if the light state is in use and nothing else. rdx is the context.
fn load_light(code: &mut Asm<u64>, light: LightState) {
    code.ldmxcsr(Mem::at(RDX).plus(offset::MXCSR as i32));
    (0..16).for_each(|r| {
        code.load_xmm(r, Mem::at(RDX).plus((offset::XMM + 16 * usize::from(r)) as i32));
    });
    code.vzeroupper();
    if let Some((masks, high)) = light.avx512 {
        let (masks, high) = (offset::XSTATE as u32 + masks, offset::XSTATE as u32 + high);
        (0..8).for_each(|r| code.load_mask_at_rdx(r, masks + 8 * u32::from(r)));
        (0..16).for_each(|r| code.load_high_zmm_at_rdx(16 + r, high + 64 * u32::from(r)));
    }
}

impl CopyStubs {
    /// Generates the stubs.
    pub fn generate(cache: &mut Cache, cpu: &Cpu, stubs: &Stubs) -> Result<CopyStubs, StubError> {
        let kept = [RAX, RCX, RDX].map(|r| (r, offset::STUB_SAVE + 8 * (1 + usize::from(r))));
        let mut code = Asm::new();
        let load = code.bound();
        kept.into_iter().for_each(|(r, field)| code.store(r, field));
        let loading = code.bound();
        load_extended(&mut code, cpu);
        code.store_constant(offset::EXTENDED_AWAY, 0);
        kept.into_iter().for_each(|(r, field)| code.load(r, field));
        code.jmp_through(Mem::context(offset::STUB_SAVE + 8 * LOADED));
        let load_out = code.bound();
        code.store_constant(offset::EXIT_SITE, ABORTED as u32);
        code.jmp_to(stubs.leave_canonical);

        let fault_out = code.bound();
        code.store_constant(offset::EXIT_SITE, FAULT);
        code.jmp_to(stubs.leave_canonical);

        let stale = code.bound();
        code.store(RCX, offset::NEXT_PC);
        code.store_constant(offset::EXIT_SITE, STALE);
        code.unpack_flags();
        code.load(RAX, offset::STUB_SAVE + 8 * SAVED[0]);
        code.load(RCX, offset::STUB_SAVE + 8 * SAVED[1]);
        code.jmp_to(stubs.leave_canonical);

        let placed = cache.put_stubs(code)?;
        Ok(CopyStubs {
            load: placed.at(load),
            fault_out: placed.at(fault_out),
            stale: placed.at(stale),
            load_out: placed.at(load_out),
            loading: placed.range(loading, load_out),
        })
    }

    /// The way out of a thread that a signal has interrupted in here. Async-signal-safe.
    pub fn diversion(&self, host_rip: u64) -> Option<Diversion> {
        let displaced =
            if host_rip >= self.loading.start { Displaced::Three } else { Displaced::None };
        let inside = (self.load..self.load_out).contains(&host_rip);
        inside.then_some(Diversion { rip: self.load_out, displaced })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::asm::{RDI, RSP};
    use crate::stubs::set_gs;
    use dynasour_guest::ThreadContext;
    use dynasour_guest::context::{HOST_MXCSR, XState};

    /// Bits of XSTATE_BV.
    const X87: u64 = 1;
    const AVX: u64 = 4;

    /// Loads the extended state of the context of the thread that calls it, and saves it to the area at rdi.
    fn loader(cpu: &Cpu) -> (Cache, u64) {
        let mut code = Asm::new();
        let start = code.bound();
        load_extended(&mut code, cpu);
        code.mov_imm_32(RAX, cpu.xstate_mask as u32);
        code.mov_imm_32(RDX, (cpu.xstate_mask >> 32) as u32);
        code.xsave64(Mem::at(RDI));
        code.vzeroupper();
        code.fninit();
        code.push_imm(HOST_MXCSR as i32);
        code.ldmxcsr(Mem::at(RSP));
        code.pop(RAX);
        code.ret();
        let mut cache = Cache::new(1 << 20).expect("memory");
        let placed = cache.put_stubs(code).expect("room");
        let start = placed.at(start);
        (cache, start)
    }

    /// Where the state of each component stands that is in use in `area`, without MXCSR's mask.
    fn in_use(area: &XState, cpu: &Cpu) -> Vec<std::ops::Range<usize>> {
        let used = u64::from_le_bytes(area.0[512..520].try_into().expect("eight bytes"));
        let extended = (2..63).filter(|n| used & cpu.xstate_mask >> n & 1 != 0).map(|n| {
            let leaf = std::arch::x86_64::__cpuid_count(0xd, n);
            leaf.ebx as usize..(leaf.ebx + leaf.eax) as usize
        });
        let legacy = [(1, 0..24), (1, 32..160), (2, 160..416)];
        let legacy = legacy.into_iter().filter(|(bit, _)| used & bit != 0).map(|(_, range)| range);
        legacy.chain([24..28, 512..520]).chain(extended).collect()
    }

    #[test]
    fn both_ways_load_the_same() {
        let cpu = Cpu::detect();
        let Some(light) = cpu.light else { return };
        let (_first, by_moves) = loader(&cpu);
        let (_second, by_xrstor) = loader(&Cpu { light: None, ..cpu });
        let all = light.components;
        // SAFETY: XSAVE is there, or no state would be light.
        let keys = unsafe { std::arch::x86_64::_xgetbv(0) } & 1 << 9;
        for (components, initial, is_light) in [
            (all, 1, true),
            (all, 0, false),
            (all | AVX, 1, false),
            (all | X87, 1, false),
            (0, 1, false),
        ] {
            let mut context = ThreadContext::new();
            for (n, byte) in context.xstate.0.iter_mut().enumerate().skip(32) {
                *byte = (n * 7 + 3) as u8;
            }
            context.xstate.0[512..576].fill(0);
            context.xstate.0[512..520].copy_from_slice(&(components | keys).to_le_bytes());
            // Rounds upwards.
            context.xstate.0[24..28].copy_from_slice(&0x5f80u32.to_le_bytes());
            let [moved, restored] = [by_moves, by_xrstor].map(|loader| {
                let mut area = XState([0; _]);
                context.x87_is_initial = initial;
                // SAFETY: code made above with this signature, which needs GS; it changes only registers that a
                // called function may change.
                unsafe {
                    set_gs(&mut *context);
                    let load: unsafe extern "sysv64" fn(*mut XState) = std::mem::transmute(loader);
                    load(&mut area);
                }
                (area, context.x87_is_initial)
            });
            assert_eq!((moved.1, restored.1), (u64::from(is_light), 0), "{components:#x}");
            for range in in_use(&restored.0, &cpu) {
                assert_eq!(moved.0.0[range.clone()], restored.0.0[range], "{components:#x}");
            }
        }
    }
}
