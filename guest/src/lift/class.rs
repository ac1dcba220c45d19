//! The allow-lists: how each instruction is lifted (docs/design.md, "One semantics").
//!
//! *Data.* Every iced [`Code`] has exactly one [`Class`], computed when the code is first met and
//! then cached in a table of packed entries. Modelled and special instructions are listed by
//! mnemonic. Natives are listed by the CPU feature they belong to, plus a list of mnemonics of the
//! base architecture. A code on no list is [`Class::Unlisted`]; the runtime handles it like a
//! special one.
//!
//! *Invariant.* Nothing that user mode can execute is unlisted: a test goes through all of iced's
//! tables.
//!
//! *Cost.* The lists do not use [`Code::op_code`], because iced takes two milliseconds (measured)
//! to build its tables in each process. The test compares the lists with those tables.
//!
//! *Example.* `add` is modelled, `vpaddd` is native, `cpuid` is special, `ud2` is a trap.

use super::host;
use dynasour_ir::Trap;
use iced_x86::{Code, CpuidFeature as F, EncodingKind, Mnemonic as M};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU8, Ordering};

/// How an instruction is lifted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// IR operations only. With a `lock` prefix, and as a memory `xchg`, the instruction is native
    /// instead.
    Modelled,
    /// The original instruction with explicit operands.
    Native,
    /// Left to the runtime, which emulates it.
    Special,
    /// Raises a signal whatever its operands.
    Trap(Trap),
    /// On no list.
    Unlisted,
}

/// What is known of a [`Code`].
#[derive(Clone, Copy, Debug)]
pub struct ClassEntry {
    /// How it is lifted.
    pub class: Class,
    /// Computes in floating point: sets MXCSR's exception flags and may raise #XM.
    pub mxcsr: bool,
    /// Uses x87 or MMX state.
    pub x87: bool,
    /// The host is known to have the CPU features it needs.
    pub supported: bool,
}

const KNOWN: u8 = 1 << 7;
const MXCSR: u8 = 1 << 6;
const X87: u8 = 1 << 5;
const SUPPORTED: u8 = 1 << 4;

/// The classes in the order of their numbers in a packed entry.
const CLASSES: [Class; 8] = [
    Class::Modelled,
    Class::Native,
    Class::Special,
    Class::Unlisted,
    Class::Trap(Trap::Undefined),
    Class::Trap(Trap::Protection),
    Class::Trap(Trap::Breakpoint),
    Class::Trap(Trap::Fetch),
];

impl ClassEntry {
    fn pack(self) -> u8 {
        let class = CLASSES.iter().position(|c| *c == self.class).unwrap_or(0) as u8;
        let bit = |set: bool, bit: u8| if set { bit } else { 0 };
        class | bit(self.mxcsr, MXCSR) | bit(self.x87, X87) | bit(self.supported, SUPPORTED)
    }

    fn unpack(packed: u8) -> ClassEntry {
        ClassEntry {
            class: CLASSES[(packed & 7) as usize],
            mxcsr: packed & MXCSR != 0,
            x87: packed & X87 != 0,
            supported: packed & SUPPORTED != 0,
        }
    }
}

/// The entry of `code`, an instruction of 64-bit mode.
pub fn entry(code: Code) -> ClassEntry {
    static TABLE: LazyLock<Vec<AtomicU8>> =
        LazyLock::new(|| Code::values().map(|_| AtomicU8::new(0)).collect());
    let cell = &TABLE[code as usize];
    let packed = cell.load(Ordering::Relaxed);
    if packed & KNOWN != 0 {
        return ClassEntry::unpack(packed);
    }
    let entry = build(code);
    cell.store(entry.pack() | KNOWN, Ordering::Relaxed);
    entry
}

fn build(code: Code) -> ClassEntry {
    let features = code.cpuid_features();
    let support: Vec<Option<bool>> = features.iter().map(|f| host::has(*f)).collect();
    let missing = support.contains(&Some(false));
    let mut class = classify(code);
    if missing {
        class = match class {
            // Processors with SGX know the instruction even where no enclave exists, and raise
            // their own fault.
            Class::Special if code.mnemonic() == M::Enclu => Class::Native,
            Class::Special => Class::Trap(Trap::Undefined),
            // A VEX or EVEX encoding does not exist on this host; a legacy encoding may be an older
            // instruction or a hint.
            Class::Native | Class::Modelled if code.encoding() != EncodingKind::Legacy => {
                Class::Trap(Trap::Undefined)
            }
            Class::Modelled if !is_nop(code.mnemonic()) => Class::Native,
            other => other,
        };
    }
    ClassEntry {
        class,
        mxcsr: computes_in_floating_point(code),
        x87: code.mnemonic() == M::Wait
            || features.iter().any(|f| {
                matches!(f, F::FPU | F::FPU287 | F::FPU387 | F::MMX | F::D3NOW | F::D3NOWEXT)
            }),
        // Intel's reserved hints are partly undefined on AMD's processors.
        supported: code.mnemonic() != M::Reservednop && support.iter().all(|s| *s == Some(true)),
    }
}

/// The class of `code`, an instruction of 64-bit mode, on a processor that has every feature.
pub fn classify(code: Code) -> Class {
    let mnemonic = code.mnemonic();
    match mnemonic {
        // monitor and mwait are undefined outside the kernel. The others are undefined because
        // Linux does not enable them.
        M::Ud0 | M::Ud1 | M::Ud2 | M::Monitor | M::Mwait => return Class::Trap(Trap::Undefined),
        M::Uiret | M::Testui | M::Clui | M::Stui | M::Senduipi | M::Getsec | M::Getsecq => {
            return Class::Trap(Trap::Undefined);
        }
        M::Int3 => return Class::Trap(Trap::Breakpoint),
        _ => {}
    }
    if is_special(code) {
        return Class::Special;
    }
    if code.is_privileged() {
        // In user mode the processor refuses these, each with its own fault; executing them gives
        // exactly that fault.
        return Class::Native;
    }
    if is_modelled(code) {
        return Class::Modelled;
    }
    if is_base_native(mnemonic) || code.cpuid_features().iter().any(|f| is_native_feature(*f)) {
        return Class::Native;
    }
    Class::Unlisted
}

/// Does `code` set the x87 instruction pointer to its own address? All x87 instructions do but the
/// control instructions (Intel SDM vol. 1, 8.1.8). Of these `fnstenv`, `fnsave`, `fldenv`, `frstor`
/// and `fninit`, which show or load the pointer, are [`Class::Special`].
pub fn sets_x87_pointer(code: Code) -> bool {
    let mnemonic = code.mnemonic();
    let is_control = matches!(
        mnemonic,
        M::Wait | M::Fnclex | M::Fldcw | M::Fnstcw | M::Fnstsw | M::Fneni | M::Fndisi | M::Fnsetpm
    );
    let is_x87 = mnemonic == M::Fisttp
        || code.cpuid_features().iter().any(|f| matches!(f, F::FPU | F::FPU287 | F::FPU387));
    is_x87 && !is_control && !shows_or_loads_x87_pointer(mnemonic)
}

fn shows_or_loads_x87_pointer(mnemonic: M) -> bool {
    matches!(mnemonic, M::Fnstenv | M::Fnsave | M::Fldenv | M::Frstor | M::Fninit)
}

/// Has no effect that a program can observe: hints, prefetches, landing pads (`endbr64`).
pub fn is_nop(mnemonic: M) -> bool {
    matches!(
        mnemonic,
        M::Nop
            | M::Endbr64
            | M::Endbr32
            | M::Cldemote
            | M::Prefetch
            | M::Prefetchnta
            | M::Prefetcht0
            | M::Prefetcht1
            | M::Prefetcht2
            | M::Prefetchw
            | M::Prefetchwt1
            | M::Prefetchit0
            | M::Prefetchit1
    )
}

fn is_modelled(code: Code) -> bool {
    if code == Code::Bswap_r16 {
        // Architecturally undefined.
        return false;
    }
    let mnemonic = code.mnemonic();
    is_nop(mnemonic)
        || code.is_jcc_short_or_near()
        || matches!(
            mnemonic,
            M::Mov
                | M::Movzx
                | M::Movsx
                | M::Movsxd
                | M::Movbe
                | M::Lea
                | M::Xchg
                | M::Xadd
                | M::Xlatb
                | M::Bswap
        )
        || matches!(
            mnemonic,
            M::Add | M::Or | M::Adc | M::Sbb | M::And | M::Sub | M::Xor | M::Cmp | M::Test
        )
        || matches!(mnemonic, M::Inc | M::Dec | M::Neg | M::Not | M::Mul | M::Imul)
        || matches!(mnemonic, M::Shl | M::Sal | M::Shr | M::Sar | M::Rol | M::Ror)
        || matches!(mnemonic, M::Shlx | M::Shrx | M::Sarx | M::Rorx | M::Andn)
        || matches!(
            mnemonic,
            M::Bt | M::Bts | M::Btr | M::Btc | M::Bsf | M::Bsr | M::Tzcnt | M::Lzcnt | M::Popcnt
        )
        || matches!(mnemonic, M::Cbw | M::Cwde | M::Cdqe | M::Cwd | M::Cdq | M::Cqo)
        || matches!(mnemonic, M::Lahf | M::Sahf | M::Clc | M::Stc | M::Cmc)
        || matches!(mnemonic, M::Push | M::Pop | M::Leave | M::Call | M::Ret | M::Jmp | M::Syscall)
        || matches!(mnemonic, M::Jrcxz | M::Jecxz | M::Loop | M::Loope | M::Loopne)
        || matches!(
            mnemonic,
            M::Seta
                | M::Setae
                | M::Setb
                | M::Setbe
                | M::Sete
                | M::Setg
                | M::Setge
                | M::Setl
                | M::Setle
                | M::Setne
                | M::Setno
                | M::Setnp
                | M::Setns
                | M::Seto
                | M::Setp
                | M::Sets
        )
        || matches!(
            mnemonic,
            M::Cmova
                | M::Cmovae
                | M::Cmovb
                | M::Cmovbe
                | M::Cmove
                | M::Cmovg
                | M::Cmovge
                | M::Cmovl
                | M::Cmovle
                | M::Cmovne
                | M::Cmovno
                | M::Cmovnp
                | M::Cmovns
                | M::Cmovo
                | M::Cmovp
                | M::Cmovs
        )
}

/// Emulated by the runtime: the instruction touches segments, privileged or hidden state, or state
/// that the translator itself uses.
fn is_special(code: Code) -> bool {
    if shows_or_loads_x87_pointer(code.mnemonic()) {
        return true;
    }
    if code.cpuid_features().iter().any(|f| {
        matches!(f, F::AMX_TILE | F::AMX_BF16 | F::AMX_INT8 | F::AMX_FP16 | F::AMX_COMPLEX | F::LWP)
            || matches!(
                f,
                F::XSAVE | F::XSAVEC | F::XSAVEOPT | F::FXSR | F::RTM | F::HLE_or_RTM | F::SGX1
            )
            || matches!(
                f,
                F::PADLOCK_ACE | F::PADLOCK_PHE | F::PADLOCK_PMM | F::PADLOCK_RNG | F::PADLOCK_GMI
            )
            || matches!(f, F::PADLOCK_UNDOC | F::FSGSBASE | F::ENQCMD | F::HRESET | F::TDX | F::TSE)
    }) && !matches!(code.mnemonic(), M::Xgetbv | M::Xsetbv)
        && !code.is_privileged()
    {
        return true;
    }
    matches!(
        code,
        Code::Mov_rm16_Sreg
            | Code::Mov_r32m16_Sreg
            | Code::Mov_r64m16_Sreg
            | Code::Mov_Sreg_rm16
            | Code::Mov_Sreg_r32m16
            | Code::Mov_Sreg_r64m16
            | Code::Pushw_FS
            | Code::Pushq_FS
            | Code::Pushw_GS
            | Code::Pushq_GS
            | Code::Popw_FS
            | Code::Popq_FS
            | Code::Popw_GS
            | Code::Popq_GS
            | Code::Leavew
            | Code::Retnw
            | Code::Retnw_imm16
            | Code::Call_rm16
            | Code::Jmp_rm16
            | Code::Call_m1616
            | Code::Call_m1632
            | Code::Call_m1664
            | Code::Jmp_m1616
            | Code::Jmp_m1632
            | Code::Jmp_m1664
    ) || matches!(
        code.mnemonic(),
        M::Enter
            | M::Retf
            | M::Iret
            | M::Iretd
            | M::Iretq
            | M::Lfs
            | M::Lgs
            | M::Lss
            | M::Int
            | M::Int1
            | M::Pushf
            | M::Pushfq
            | M::Popf
            | M::Popfq
            | M::Sysenter
            | M::Sgdt
            | M::Sidt
            | M::Sldt
            | M::Smsw
            | M::Str
            | M::Wrpkru
            | M::Rdpkru
            | M::Vmcall
            | M::Vmmcall
            | M::Vmgexit
            | M::Vmfunc
            | M::Tdcall
            | M::Xabort
            | M::Hreset
            | M::Incsspd
            | M::Incsspq
            | M::Saveprevssp
            | M::Rstorssp
            | M::Wrssd
            | M::Wrssq
            | M::Pcommit
            | M::Llwpcb
            | M::Slwpcb
    )
}

/// Native instructions of the base architecture, which no CPU feature bit covers.
fn is_base_native(mnemonic: M) -> bool {
    matches!(mnemonic, M::Div | M::Idiv | M::Rcl | M::Rcr | M::Shld | M::Shrd | M::Bswap)
        || matches!(mnemonic, M::Cmpxchg | M::Cmpxchg8b | M::Cmpxchg16b | M::Cld | M::Std)
        || matches!(
            mnemonic,
            M::Movsb | M::Movsw | M::Movsd | M::Movsq | M::Cmpsb | M::Cmpsw | M::Cmpsd | M::Cmpsq
        )
        || matches!(
            mnemonic,
            M::Stosb | M::Stosw | M::Stosd | M::Stosq | M::Lodsb | M::Lodsw | M::Lodsd | M::Lodsq
        )
        || matches!(mnemonic, M::Scasb | M::Scasw | M::Scasd | M::Scasq)
        || matches!(mnemonic, M::Cpuid | M::Rdtsc | M::Rdtscp | M::Rdpmc | M::Xgetbv | M::Rdpru)
        || matches!(
            mnemonic,
            M::Lar | M::Lsl | M::Verr | M::Verw | M::Pause | M::Wait | M::Reservednop
        )
}

fn is_native_feature(feature: F) -> bool {
    matches!(
        feature,
        F::FPU | F::FPU287 | F::FPU387 | F::MMX | F::D3NOW | F::D3NOWEXT | F::SSE | F::SSE2
            | F::SSE3 | F::SSSE3 | F::SSE4_1 | F::SSE4_2 | F::SSE4A | F::AVX | F::AVX2 | F::FMA
            | F::FMA4 | F::F16C | F::XOP | F::TBM | F::AVX512F | F::AVX512VL | F::AVX512BW
            | F::AVX512DQ | F::AVX512CD | F::AVX512ER | F::AVX512PF | F::AVX512_4FMAPS
            | F::AVX512_4VNNIW | F::AVX512_BF16 | F::AVX512_BITALG | F::AVX512_IFMA
            | F::AVX512_VBMI | F::AVX512_VBMI2 | F::AVX512_VNNI | F::AVX512_VP2INTERSECT
            | F::AVX512_VPOPCNTDQ | F::AVX512_FP16 | F::AVX_VNNI | F::AVX_IFMA
            | F::AVX_NE_CONVERT | F::AVX_VNNI_INT8 | F::AVX_VNNI_INT16 | F::SHA512 | F::SM3
            | F::SM4 | F::AES | F::VAES | F::PCLMULQDQ | F::VPCLMULQDQ | F::GFNI | F::SHA
            | F::AESKLE | F::WIDE_KL | F::BMI1 | F::BMI2 | F::ADX | F::RDRAND | F::RDSEED
            | F::RDPID | F::RDPRU | F::CLFSH | F::CLFLUSHOPT | F::CLWB | F::CLZERO | F::MOVDIRI
            | F::MOVDIR64B | F::SERIALIZE | F::WAITPKG | F::MONITORX | F::PTWRITE | F::MCOMMIT
            | F::CET_SS | F::RAO_INT | F::CMPCCXADD
    )
        // These are harmless outside transactions, and the translator never lets one start.
        || matches!(feature, F::TSXLDTRK)
}

/// Floating-point arithmetic on vector registers, told by the mnemonic's element suffix. Moves,
/// logic and shuffles have the suffixes too but never touch MXCSR.
fn computes_in_floating_point(code: Code) -> bool {
    const NOT_ARITHMETIC: [&str; 24] = [
        "mov",
        "and",
        "or",
        "xor",
        "blend",
        "shuf",
        "unpck",
        "perm",
        "broadcast",
        "insert",
        "extract",
        "gather",
        "scatter",
        "compress",
        "expand",
        "maskmov",
        "test",
        "fpclass",
        "rcp14",
        "rsqrt14",
        "rcpps",
        "rcpss",
        "rsqrtps",
        "rsqrtss",
    ];
    const SUFFIXES: [&str; 10] = ["ps", "pd", "ss", "sd", "ph", "sh", "psx", "phx", "psz", "bf16"];
    if code.is_string_instruction() {
        return false;
    }
    let vector = code.cpuid_features().iter().any(|f| {
        matches!(
            f,
            F::SSE
                | F::SSE2
                | F::SSE3
                | F::SSE4_1
                | F::AVX
                | F::AVX2
                | F::FMA
                | F::FMA4
                | F::F16C
                | F::XOP
        ) || matches!(
            f,
            F::AVX512F
                | F::AVX512DQ
                | F::AVX512ER
                | F::AVX512_FP16
                | F::AVX512_BF16
                | F::AVX512_4FMAPS
        ) || matches!(f, F::AVX_NE_CONVERT)
    });
    let name = format!("{:?}", code.mnemonic()).to_lowercase();
    let name = name.strip_prefix('v').unwrap_or(&name);
    let converts = name.starts_with("cvt");
    let arithmetic = SUFFIXES.iter().any(|s| name.ends_with(s))
        && !NOT_ARITHMETIC.iter().any(|p| name.starts_with(p));
    vector && (converts || arithmetic)
}
