//! Which features the host processor has, by iced's names for CPU features.
//!
//! [`has`] answers only for features that a processor able to run dynasour may lack. For the others
//! it returns `None`; executing the instruction then shows whether it exists.

use iced_x86::CpuidFeature as F;
use std::arch::is_x86_feature_detected as detected;
use std::arch::x86_64::{__cpuid, __cpuid_count, CpuidResult};
use std::sync::LazyLock;

/// Does a 32-bit bsf or bsr of zero keep the upper half of its destination? It does on AMD's
/// processors; Intel's manual says that some processors clear it. So the processor is asked once.
pub(super) fn scan_of_zero_keeps_upper_half() -> bool {
    static KEEPS: LazyLock<bool> = LazyLock::new(|| {
        let mut destination = u64::MAX;
        // SAFETY: only the named registers and the flags change.
        unsafe {
            std::arch::asm!("bsf {d:e}, {s:e}", d = inout(reg) destination, s = in(reg) 0u64)
        };
        destination == u64::MAX
    });
    *KEEPS
}

/// Does andn clear PF, whatever its result? The manual leaves PF undefined: Intel's processors
/// clear it, AMD's set it as `and` does. On a processor without andn the answer does not matter.
pub(super) fn andn_clears_parity() -> bool {
    static CLEARS: LazyLock<bool> = LazyLock::new(|| {
        let mut parity = 0u8;
        if detected!("bmi1") {
            // SAFETY: there is andn; only the named registers and the flags change. The result, 0,
            // has even parity.
            unsafe {
                std::arch::asm!("andn {r}, {r}, {r}", "setp \
                    {p}", r = inout(reg) 0u64 => _, p = out(reg_byte) parity)
            };
        }
        parity == 0
    });
    *CLEARS
}

/// Is F3 90 `pause` even if a REX prefix extends its register to r8?
pub(super) fn pause_names_no_register() -> bool {
    static NONE: LazyLock<bool> = LazyLock::new(|| {
        let mut r8 = 1u64;
        // SAFETY: only the named registers change.
        unsafe {
            std::arch::asm!(".byte 0xf3, 0x49, 0x90", inout("rax") 0u64 => _, inout("r8") r8)
        };
        r8 == 1
    });
    *NONE
}

/// Does a prefix F2 or F3 before loope or loopne choose between the two? It does on AMD's
/// processors, not on Intel's.
pub(super) fn loop_prefix_chooses_condition() -> bool {
    static CHOOSES: LazyLock<bool> = LazyLock::new(|| {
        let mut jumped = 1u64;
        // SAFETY: only the named registers and the flags change. With ZF set and the count at 2,
        // `repne loope` jumps over the mov if it is a loope, and falls through if it is a loopne.
        unsafe {
            std::arch::asm!("cmp {jumped}, {jumped}", ".byte 0xf2, 0xe1, 3f - 2f", "2:",
                "mov {jumped}, 0", "3:",
                jumped = inout(reg) jumped, inout("rcx") 2u64 => _);
        }
        jumped == 0
    });
    *CHOOSES
}

/// Does the host have `feature`? `None`: this module does not know.
pub(super) fn has(feature: F) -> Option<bool> {
    let has = match feature {
        F::INTEL8086
        | F::INTEL186
        | F::INTEL286
        | F::INTEL386
        | F::INTEL486
        | F::X64
        | F::CPUID
        | F::CMOV
        | F::CX8 => true,
        F::FPU
        | F::FPU287
        | F::FPU387
        | F::MMX
        | F::SSE
        | F::SSE2
        | F::TSC
        | F::SYSCALL
        | F::MULTIBYTENOP
        | F::PAUSE => true,
        F::CLFSH | F::FXSR | F::MSR => true,
        F::SSE3 => detected!("sse3"),
        F::SSSE3 => detected!("ssse3"),
        F::SSE4_1 => detected!("sse4.1"),
        F::SSE4_2 => detected!("sse4.2"),
        F::SSE4A => detected!("sse4a"),
        F::AVX => detected!("avx"),
        F::AVX2 => detected!("avx2"),
        F::FMA => detected!("fma"),
        F::F16C => detected!("f16c"),
        F::AES => detected!("aes"),
        F::PCLMULQDQ => detected!("pclmulqdq"),
        F::VAES => detected!("vaes"),
        F::VPCLMULQDQ => detected!("vpclmulqdq"),
        F::GFNI => detected!("gfni"),
        F::SHA => detected!("sha"),
        F::BMI1 => detected!("bmi1"),
        F::BMI2 => detected!("bmi2"),
        F::LZCNT => detected!("lzcnt"),
        F::POPCNT => detected!("popcnt"),
        F::MOVBE => detected!("movbe"),
        F::ADX => detected!("adx"),
        F::CMPXCHG16B => detected!("cmpxchg16b"),
        F::RDRAND => detected!("rdrand"),
        F::RDSEED => detected!("rdseed"),
        F::AVX512F => detected!("avx512f"),
        F::AVX512VL => detected!("avx512vl"),
        F::AVX512BW => detected!("avx512bw"),
        F::AVX512DQ => detected!("avx512dq"),
        F::AVX512CD => detected!("avx512cd"),
        F::AVX512_IFMA => detected!("avx512ifma"),
        F::AVX512_VBMI => detected!("avx512vbmi"),
        F::AVX512_VBMI2 => detected!("avx512vbmi2"),
        F::AVX512_VNNI => detected!("avx512vnni"),
        F::AVX512_BITALG => detected!("avx512bitalg"),
        F::AVX512_VPOPCNTDQ => detected!("avx512vpopcntdq"),
        F::AVX512_BF16 => detected!("avx512bf16"),
        F::AVX512_VP2INTERSECT => detected!("avx512vp2intersect"),
        F::AVX512_FP16 => detected!("avx512fp16"),
        F::AVX_VNNI => detected!("avxvnni"),
        F::AVX_IFMA => detected!("avxifma"),
        F::AVX_NE_CONVERT => detected!("avxneconvert"),
        F::AVX_VNNI_INT8 => detected!("avxvnniint8"),
        F::AVX_VNNI_INT16 => detected!("avxvnniint16"),
        F::SHA512 => detected!("sha512"),
        F::SM3 => detected!("sm3"),
        F::SM4 => detected!("sm4"),
        // Only processors that are too old to run dynasour have these.
        F::AVX512ER | F::AVX512PF | F::AVX512_4FMAPS | F::AVX512_4VNNIW => false,
        F::AMX_TILE => extended_features().edx >> 24 & 1 != 0,
        F::AMX_INT8 => extended_features().edx >> 25 & 1 != 0,
        F::AMX_BF16 => extended_features().edx >> 22 & 1 != 0,
        F::TSXLDTRK => extended_features().edx >> 16 & 1 != 0,
        F::RTM => extended_features().ebx >> 11 & 1 != 0,
        F::SGX1 => extended_features().ebx >> 2 & 1 != 0,
        F::ENQCMD => extended_features().ecx >> 29 & 1 != 0,
        F::LWP => amd_extended(15),
        // Only VIA's processors have these.
        F::PADLOCK_ACE
        | F::PADLOCK_PHE
        | F::PADLOCK_PMM
        | F::PADLOCK_RNG
        | F::PADLOCK_GMI
        | F::PADLOCK_UNDOC => false,
        F::XOP => amd_extended(11),
        F::FMA4 => amd_extended(16),
        F::TBM => amd_extended(21),
        _ => return None,
    };
    Some(has)
}

/// cpuid leaf 7, where Intel announces most extensions.
fn extended_features() -> CpuidResult {
    static LEAF: LazyLock<CpuidResult> = LazyLock::new(|| match __cpuid(0).eax {
        0..7 => CpuidResult { eax: 0, ebx: 0, ecx: 0, edx: 0 },
        _ => __cpuid_count(7, 0),
    });
    *LEAF
}

/// A bit of ecx of leaf 0x8000_0001, where AMD announces its own extensions.
fn amd_extended(bit: u32) -> bool {
    // Cached, because `cpuid` leaves the virtual machine (10 µs, measured).
    static ECX: LazyLock<u32> = LazyLock::new(|| {
        if __cpuid(0x8000_0000).eax > 0x8000_0000 { __cpuid(0x8000_0001).ecx } else { 0 }
    });
    *ECX >> bit & 1 != 0
}
