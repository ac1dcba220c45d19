//! Instructions kept as they are: `native` IR with every register and memory operand made explicit.
//!
//! iced's `InstructionInfo` says what an instruction reads and writes. This module adds three
//! rules:
//! * a register written in part (8 or 16 bits) or under a condition is also read;
//! * flags left undefined count as written *and* read, because "undefined" may mean "kept";
//! * an operand rsp is renamed to a free register, since rsp holds the host stack while natives
//!   run.
//!
//! FS and GS become part of an explicit memory operand's address. Instructions without an explicit
//! operand (string instructions, gathers, masked moves) keep their prefix; the code that executes
//! them must set the segment's base.
//!
//! Example: `vpaddd ymm0, ymm1, [rdi+32]` becomes a `native` that reads vector register 1 and 32
//! bytes at `[rdi + 32]`, and writes vector register 0 in place.

use super::class::ClassEntry;
use super::operand::{Address, Emit};
use dynasour_ir::{Effects, Gpr, Loc, Native, Operand, Split};
use iced_x86::{
    CodeSize, Instruction, InstructionInfo, InstructionInfoFactory, Mnemonic as M, OpAccess,
    OpKind, Register, RflagsBits as R,
};
use smallvec::SmallVec;

/// The six arithmetic flags in iced's bits.
const ARITHMETIC: u32 = R::OF | R::SF | R::ZF | R::AF | R::CF | R::PF;
/// Flags that user mode can see and that no SSA value holds: natives change them in place.
const IN_PLACE_FLAGS: u32 = R::DF | R::AC;

/// The instruction cannot be a native: the runtime has to emulate it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct NotNative;

/// Sets of registers, by number.
#[derive(Default)]
struct Uses {
    gpr_read: u16,
    gpr_written: u16,
    vec_read: u32,
    vec_write: u32,
    mask_read: u8,
    mask_write: u8,
    x87: bool,
}

fn reads(access: OpAccess) -> bool {
    matches!(
        access,
        OpAccess::Read | OpAccess::CondRead | OpAccess::ReadWrite | OpAccess::ReadCondWrite
    )
}

fn writes(access: OpAccess) -> bool {
    matches!(
        access,
        OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite
    )
}

impl Uses {
    fn of(info: &InstructionInfo) -> Uses {
        let mut uses = Uses::default();
        for used in info.used_registers() {
            let (reg, access) = (used.register(), used.access());
            if reg.is_gpr() {
                let bit = 1u16 << reg.full_register().number();
                let partial = reg.size() < 4 || access == OpAccess::CondWrite;
                if reads(access) || (writes(access) && partial) {
                    uses.gpr_read |= bit;
                }
                if writes(access) {
                    uses.gpr_written |= bit;
                }
            } else if reg.is_vector_register() {
                let bit = 1u32 << reg.number();
                uses.vec_read |=
                    if reads(access) || access == OpAccess::CondWrite { bit } else { 0 };
                uses.vec_write |= if writes(access) { bit } else { 0 };
            } else if reg.is_k() {
                let bit = 1u8 << reg.number();
                uses.mask_read |= if reads(access) { bit } else { 0 };
                uses.mask_write |= if writes(access) { bit } else { 0 };
            } else if reg.is_mm() || reg.is_st() {
                uses.x87 = true;
            }
        }
        uses
    }
}

/// Renames the operand rsp to a register that the instruction does not use, and returns that
/// register.
fn rename_rsp(inst: &mut Instruction, uses: &mut Uses) -> Result<Option<Gpr>, NotNative> {
    let rsp = 1u16 << Register::RSP.number();
    if (uses.gpr_read | uses.gpr_written) & rsp == 0 {
        return Ok(None);
    }
    let busy = uses.gpr_read | uses.gpr_written;
    // rbp first: it can replace rsp in every encoding without a change of prefixes.
    const STAND_INS: [Register; 5] =
        [Register::RBP, Register::RSI, Register::RDI, Register::RBX, Register::RDX];
    let stand_in = STAND_INS.into_iter().find(|r| busy & 1 << r.number() == 0).ok_or(NotNative)?;
    let part = |reg: Register| match (reg, stand_in.number()) {
        (Register::RSP, _) => Some(stand_in),
        (Register::ESP, n) => Some(Register::EAX + n as u32),
        (Register::SP, n) => Some(Register::AX + n as u32),
        (Register::SPL, 5) => Some(Register::BPL),
        (Register::SPL, 6) => Some(Register::SIL),
        (Register::SPL, 7) => Some(Register::DIL),
        (Register::SPL, 3) => Some(Register::BL),
        (Register::SPL, _) => Some(Register::DL),
        _ => None,
    };
    let mut renamed = false;
    for operand in 0..inst.op_count() {
        if inst.op_kind(operand) == OpKind::Register
            && let Some(new) = part(inst.op_register(operand))
        {
            inst.set_op_register(operand, new);
            renamed = true;
        }
    }
    if inst.is_vsib()
        && let Some(new) = part(inst.memory_base())
    {
        inst.set_memory_base(new);
        renamed = true;
    }
    if !renamed {
        return Err(NotNative);
    }
    let bit = 1u16 << stand_in.number();
    let swap = |set: &mut u16| {
        if *set & rsp != 0 {
            *set = *set & !rsp | bit;
        }
    };
    swap(&mut uses.gpr_read);
    swap(&mut uses.gpr_written);
    Ok(Some(Gpr::new(stand_in.number() as u8)))
}

fn does_not_repeat(mnemonic: M) -> bool {
    matches!(
        mnemonic,
        M::Rdtsc
            | M::Rdtscp
            | M::Rdrand
            | M::Rdseed
            | M::Rdpid
            | M::Cpuid
            | M::Rdpmc
            | M::Rdpru
            | M::Xgetbv
    ) || matches!(
        mnemonic,
        M::Umonitor
            | M::Umwait
            | M::Tpause
            | M::Monitorx
            | M::Mwaitx
            | M::Lar
            | M::Lsl
            | M::Verr
            | M::Verw
    ) || matches!(mnemonic, M::Rdsspd | M::Rdsspq | M::Ptwrite | M::Mcommit)
}

fn is_fence(mnemonic: M) -> bool {
    matches!(
        mnemonic,
        M::Mfence | M::Lfence | M::Sfence | M::Serialize | M::Cpuid | M::Mcommit | M::Rdtscp
    ) || matches!(
        mnemonic,
        M::Clflush | M::Clflushopt | M::Clwb | M::Umwait | M::Tpause | M::Mwaitx
    )
}

/// The locations outside SSA values that an instruction writes: vector and mask registers, x87,
/// MXCSR, DF.
fn writes_in_place(uses: &Uses, x87: bool, mxcsr: bool, flags: bool) -> SmallVec<[Loc; 2]> {
    let vectors = (0..32).filter(|n| uses.vec_write >> n & 1 != 0).map(Loc::Vec);
    let masks = (0..8).filter(|n| uses.mask_write >> n & 1 != 0).map(Loc::Mask);
    let others = [(x87, Loc::X87), (mxcsr, Loc::Mxcsr), (flags, Loc::Df)];
    vectors
        .chain(masks)
        .chain(others.into_iter().filter_map(|(written, loc)| written.then_some(loc)))
        .collect()
}

/// May keep its old destination, which iced's tables do not say.
fn may_keep_destination(mnemonic: M) -> bool {
    // Without shadow stacks rdssp does nothing; lar and lsl write only if the selector is valid.
    matches!(mnemonic, M::Rdsspd | M::Rdsspq | M::Lar | M::Lsl)
}

/// May keep the flags: a shift or rotation whose count is zero.
fn may_keep_flags(mnemonic: M) -> bool {
    matches!(mnemonic, M::Rcl | M::Rcr | M::Shld | M::Shrd)
        || matches!(
            mnemonic,
            M::Cmpsb | M::Cmpsw | M::Cmpsd | M::Cmpsq | M::Scasb | M::Scasw | M::Scasd | M::Scasq
        )
}

/// Two answers. Does the instruction read arithmetic flags, or keep some of those that it does not
/// write? Does it write any?
fn arithmetic_flags(inst: &Instruction) -> (bool, bool) {
    let (mnemonic, modified) = (inst.mnemonic(), inst.rflags_modified());
    // rcl and rcr by the full width still write OF, though iced says that they write nothing.
    let writes = modified & ARITHMETIC != 0 || matches!(mnemonic, M::Rcl | M::Rcr);
    let reads = inst.rflags_read() & ARITHMETIC != 0
        || writes
            && (modified & ARITHMETIC != ARITHMETIC
                || inst.rflags_undefined() & ARITHMETIC != 0
                || may_keep_flags(mnemonic));
    (reads, writes)
}

/// Does the instruction read or write memory?
fn memory_effects(info: &InstructionInfo, mnemonic: M) -> Effects {
    let accesses = || info.used_memory().iter().map(|used| used.access());
    let mut effects = Effects::empty();
    effects.set(Effects::READ, accesses().any(reads));
    effects.set(Effects::WRITE, accesses().any(writes));
    if mnemonic == M::Clzero {
        effects |= Effects::WRITE | Effects::UNKNOWN_EXTENT;
    }
    effects
}

/// The instruction without the registers of its memory operand's address.
fn without_address(original: &Instruction) -> Instruction {
    let mut bare = *original;
    bare.set_memory_base(Register::None);
    bare.set_memory_index(Register::None);
    bare.set_memory_displ_size(if original.memory_base().is_gpr32() { 4 } else { 8 });
    bare.set_code_size(CodeSize::Code64);
    bare
}

impl Emit<'_, '_> {
    /// Emits the instruction as a `native`.
    pub fn native(
        &mut self,
        entry: ClassEntry,
        factory: &mut InstructionInfoFactory,
    ) -> Result<(), NotNative> {
        let original = self.inst;
        let mnemonic = original.mnemonic();
        let mut operands = 0..original.op_count();
        let memory_operand = operands.find(|i| original.op_kind(*i) == OpKind::Memory);
        let vsib = original.is_vsib();
        let explicit = memory_operand.is_some() && !vsib;

        let info = factory.info(original);
        let mut effects = memory_effects(info, mnemonic);
        // A register index addresses the whole address space as a bit string. The operand is the
        // element that holds the bit, and the index is the bit's number within the element.
        let bit_string = explicit
            && matches!(mnemonic, M::Bts | M::Btr | M::Btc)
            && original.op1_kind() == OpKind::Register;
        let implicit_memory = info.used_memory().len() > usize::from(explicit);
        let access = memory_operand.map_or(OpAccess::None, |i| info.op_access(i));

        let bare = if explicit { without_address(original) } else { *original };
        let mut uses = Uses::of(factory.info(&bare));
        // A restartable one shows its outputs if it faults, before it has written them, too.
        let restartable = original.is_string_instruction() || vsib;
        if may_keep_destination(mnemonic) || restartable {
            uses.gpr_read |= uses.gpr_written;
        }
        let mut inst = *original;
        let stand_in = match rename_rsp(&mut inst, &mut uses) {
            // sysexit and its kind fault before they change rsp.
            Err(NotNative) if original.is_privileged() => {
                uses = Uses::default();
                None
            }
            stand_in => stand_in?,
        };

        if original.code().encoding() == iced_x86::EncodingKind::Legacy {
            // A legacy encoding keeps the upper part of its destination.
            uses.vec_read |= uses.vec_write;
        }
        let x87 = uses.x87 || entry.x87;
        let modified = original.rflags_modified();
        let (flags_in, flags_out) = arithmetic_flags(original);

        let mxcsr_written = entry.mxcsr || matches!(mnemonic, M::Ldmxcsr | M::Vldmxcsr);
        let in_place = writes_in_place(&uses, x87, mxcsr_written, modified & IN_PLACE_FLAGS != 0);

        let locked = original.has_lock_prefix() || mnemonic == M::Xchg && memory_operand.is_some();
        let size = original.memory_size().size() as u32;
        let unknown_extent =
            vsib || implicit_memory || explicit && size == 0 && access != OpAccess::NoMemAccess;
        let reads_state = uses.vec_read != 0
            || uses.mask_read != 0
            || x87
            || entry.mxcsr
            || matches!(mnemonic, M::Stmxcsr | M::Vstmxcsr)
            || original.rflags_read() & IN_PLACE_FLAGS != 0;
        let may_trap = mxcsr_written
            || x87
            || !entry.supported
            || original.is_privileged()
            || matches!(mnemonic, M::Div | M::Idiv | M::Rdpmc | M::Xgetbv);
        let others = [
            (unknown_extent, Effects::UNKNOWN_EXTENT),
            (is_fence(mnemonic), Effects::FENCE),
            (locked, Effects::LOCKED),
            (does_not_repeat(mnemonic), Effects::NO_REPEAT),
            (may_trap, Effects::MAY_TRAP),
            (!in_place.is_empty(), Effects::STATE),
            (reads_state, Effects::READ_STATE),
            (restartable, Effects::RESTARTABLE),
        ];
        others.into_iter().filter(|(holds, _)| *holds).for_each(|(_, effect)| effects |= effect);

        let numbers = |set: u16| (0..16u8).filter(move |n| set >> n & 1 != 0).map(Gpr::new);
        let native = Native {
            inst,
            mem_size: explicit.then_some(if access == OpAccess::NoMemAccess { 0 } else { size }),
            split: Split::No,
            gpr_in: numbers(uses.gpr_read).collect(),
            gpr_out: numbers(uses.gpr_written).collect(),
            flags_in,
            flags_out,
            vec_read: uses.vec_read,
            vec_write: uses.vec_write,
            writes: in_place,
            effects,
        };
        let address =
            explicit.then(|| if bit_string { self.bit_string_element() } else { self.address() });
        let index = bit_string.then(|| self.bit_string_index());
        self.emit_native(native, address, index, stand_in);
        Ok(())
    }

    /// `index` replaces the guest's value of the index register, which is then the only register
    /// input.
    fn emit_native(
        &mut self,
        native: Native,
        address: Option<Address>,
        index: Option<Operand>,
        stand_in: Option<Gpr>,
    ) {
        let guest_register = |g: Gpr| if Some(g) == stand_in { Gpr::RSP } else { g };
        let mut args: SmallVec<[Operand; 8]> = SmallVec::new();
        let mut mem = None;
        if let Some(Address { mem: shape, base, index }) = address {
            args.extend([base, index]);
            mem = Some(shape);
        }
        for g in &native.gpr_in {
            args.push(index.unwrap_or_else(|| self.b.get_gpr(guest_register(*g))));
        }
        if native.flags_in {
            args.push(self.flags());
        }
        let outputs: SmallVec<[Loc; 4]> = native
            .gpr_out
            .iter()
            .map(|g| Loc::Gpr(guest_register(*g)))
            .chain(native.flags_out.then_some(Loc::Flags))
            .collect();
        let results = self.b.native(native, mem, &args);
        for (loc, v) in outputs.into_iter().zip(results) {
            self.b.put(loc, v.into());
        }
    }
}
