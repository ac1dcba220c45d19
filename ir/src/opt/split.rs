//! Pass `split`: scalar SSE instructions leave the access of their memory operand to a load or store of
//! the IR, so that other passes may forward, sink or hoist it: what is computed in floating point then stays out
//! of memory like integers.
//!
//! ```text
//! native n0 [v5 - 8] !a0            ; movsd [rbp-8],xmm0     v1 = native n0
//!                                                           store.i64 [v5 - 8], v1 !a0
//! native n1 [v5 - 8] !a1            ; mulsd xmm1,[rbp-8]     v2 = load.i64 [v5 - 8] !a1
//!                                                           native n1 v2 !a1
//! ```
//!
//! Side conditions: `private_memory`, because otherwise hardly an access can be left out; and enough XMM registers that
//! the version does not use, because the values live there. An access that stays becomes the native's own again where
//! code is generated.
//!
//! The caller owns the version; no data between runs, no lock.

use super::OptOptions;
use super::monitor::fixed_address;
use crate::op::Op;
use crate::reach::may_fault;
use crate::types::{NativeId, Operand, Ty};
use crate::version::{Effects, Inst, Native, Split, Version};
use smallvec::{SmallVec, smallvec};

/// Fewer unused XMM registers than this are not worth it (guess: two values of a loop, and two for what is
/// under way).
const FEWEST_FREE: u32 = 4;

/// Runs the pass; returns the number of natives that were split.
pub(super) fn run(version: &mut Version, options: &OptOptions) -> usize {
    if version.is_base() || !version.context.private_memory() || !has_room(version) {
        return 0;
    }
    let mut split = vec![None; version.natives.len()];
    for (native, split) in version.natives.iter().zip(&mut split) {
        *split = native.may_split();
    }
    for inst in
        version.blocks.iter().flat_map(|b| &b.insts).filter(|i| is_constant(i, version, options))
    {
        if let Some(n) = inst.native {
            split[n.index()] = None;
        }
    }
    if split.iter().all(Option::is_none) {
        return 0;
    }
    for (native, split) in version.natives.iter_mut().zip(&split) {
        if let Some(split) = split {
            native.split = *split;
            native.effects -= Effects::READ | Effects::WRITE;
        }
    }
    let mut count = 0;
    for b in 0..version.blocks.len() {
        let insts = std::mem::take(&mut version.blocks[b].insts);
        let mut made = Vec::with_capacity(insts.len());
        for inst in insts {
            let of = inst.native.and_then(|n| *split.get(n.index())?);
            match of {
                Some(Split::Loaded) => made.extend(loaded(version, inst)),
                Some(Split::Stored) => made.extend(stored(version, inst)),
                Some(Split::No) | None => {
                    made.push(inst);
                    continue;
                }
            }
            count += 1;
        }
        version.blocks[b].insts = made;
    }
    count
}

/// Does it read at a fixed address what the guest can only read? No store changes that, so nothing is to be gained, and
/// nobody need guard it.
fn is_constant(inst: &Inst, version: &Version, options: &OptOptions) -> bool {
    let size = inst.native.and_then(|n| version.natives.get(n.index())?.mem_size);
    let place = fixed_address(inst).zip(size);
    let is_read_only = |read: &dyn Fn(u64, u32) -> Option<u64>| {
        place.is_some_and(|(address, size)| read(address, size).is_some())
    };
    options.constant_memory.is_some_and(is_read_only)
}

/// Does the version leave enough XMM registers unused?
fn has_room(version: &Version) -> bool {
    version.free_sse_registers().is_some_and(|free| free.count_ones() >= FEWEST_FREE)
}

fn ty_of(version: &Version, native: Option<NativeId>) -> Ty {
    let native = native.map(|n| &version.natives[n.index()]);
    native.and_then(Native::split_ty).expect("it may be split")
}

fn loaded(version: &mut Version, mut inst: Inst) -> [Inst; 2] {
    let ty = ty_of(version, inst.native);
    let value = version.value(ty);
    let rest: SmallVec<[Operand; 3]> = inst.args.drain(2..).collect();
    let mut load = Inst::new(Op::Load, ty, Some(value), &inst.args);
    (load.mem, load.anchor) = (inst.mem.take(), inst.anchor);
    inst.args = smallvec![value.into()];
    inst.args.extend(rest);
    without_fault(version, &mut inst);
    [load, inst]
}

fn stored(version: &mut Version, mut inst: Inst) -> [Inst; 2] {
    let ty = ty_of(version, inst.native);
    let value = version.value(ty);
    let rest: SmallVec<[Operand; 3]> = inst.args.drain(2..).collect();
    let mut store = Inst::new(Op::Store, ty, None, &inst.args);
    store.args.push(value.into());
    (store.mem, store.anchor) = (inst.mem.take(), inst.anchor);
    (inst.args, inst.defs) = (rest, smallvec![value]);
    without_fault(version, &mut inst);
    [inst, store]
}

/// The native keeps its anchor only if it may still raise an exception.
fn without_fault(version: &Version, native: &mut Inst) {
    native.anchor = native.anchor.filter(|_| may_fault(version, native));
}
