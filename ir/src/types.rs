//! The basic types of the IR: value types, guest locations, names of values and blocks, operands.
//!
//! All are small `Copy` values without state. The `Display` of each *is* the text form, so that a
//! person reads in `explain` what the parser accepts. Everything else in the crate is built of
//! them; no lock.
//!
//! ```text
//! Loc::Gpr(Gpr::RAX)  rax  Value(3)  v3        AnchorId(0)  a0        Operand::Const(u64::MAX)  -1
//! ```

use std::fmt;

/// The type of a value. Integers are bit vectors without a sign; operations carry the sign.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Ty {
    /// A truth value.
    I1,
    /// 8 bits.
    I8,
    /// 16 bits.
    I16,
    /// 32 bits.
    I32,
    /// 64 bits.
    I64,
    /// An XMM-sized vector.
    V128,
    /// A YMM-sized vector.
    V256,
    /// A ZMM-sized vector.
    V512,
    /// The six arithmetic flags (CF, PF, AF, ZF, SF, OF) in their rflags positions.
    Flags,
}

impl Ty {
    /// Every type, in declaration order.
    pub const ALL: [Ty; 9] =
        [Ty::I1, Ty::I8, Ty::I16, Ty::I32, Ty::I64, Ty::V128, Ty::V256, Ty::V512, Ty::Flags];

    /// Width in bits of an integer or vector; 64 for flags (they are stored as an rflags image).
    pub const fn bits(self) -> u32 {
        match self {
            Ty::I1 => 1,
            Ty::I8 => 8,
            Ty::I16 => 16,
            Ty::I32 => 32,
            Ty::I64 | Ty::Flags => 64,
            Ty::V128 => 128,
            Ty::V256 => 256,
            Ty::V512 => 512,
        }
    }

    /// Size in bytes when stored in memory.
    pub const fn bytes(self) -> u32 {
        self.bits().div_ceil(8)
    }

    /// The mask of the bits a value of this type may have set (at most 64 bits).
    pub const fn mask(self) -> u64 {
        match self.bits() {
            n if n >= 64 => u64::MAX,
            n => (1 << n) - 1,
        }
    }

    /// Is this one of i8, i16, i32, i64?
    pub const fn is_machine_int(self) -> bool {
        matches!(self, Ty::I8 | Ty::I16 | Ty::I32 | Ty::I64)
    }

    /// The integer type of `bytes` bytes (1, 2, 4 or 8).
    pub const fn int_of_bytes(bytes: u32) -> Option<Ty> {
        match bytes {
            1 => Some(Ty::I8),
            2 => Some(Ty::I16),
            4 => Some(Ty::I32),
            8 => Some(Ty::I64),
            _ => None,
        }
    }

    /// `v` sign-extended from this type to 64 bits.
    pub const fn sext(self, v: u64) -> i64 {
        let n = self.bits();
        if n >= 64 { v as i64 } else { ((v << (64 - n)) as i64) >> (64 - n) }
    }

    /// The name in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Ty::I1 => "i1",
            Ty::I8 => "i8",
            Ty::I16 => "i16",
            Ty::I32 => "i32",
            Ty::I64 => "i64",
            Ty::V128 => "v128",
            Ty::V256 => "v256",
            Ty::V512 => "v512",
            Ty::Flags => "flags",
        }
    }
}

impl fmt::Display for Ty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A general-purpose register by its encoding number (rax 0, rcx 1, rdx 2, rbx 3, rsp 4, … r15 15).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gpr(u8);

#[allow(missing_docs, reason = "the names are the registers' own")]
impl Gpr {
    pub const RAX: Gpr = Gpr(0);
    pub const RCX: Gpr = Gpr(1);
    pub const RDX: Gpr = Gpr(2);
    pub const RBX: Gpr = Gpr(3);
    pub const RSP: Gpr = Gpr(4);
    pub const RBP: Gpr = Gpr(5);
    pub const RSI: Gpr = Gpr(6);
    pub const RDI: Gpr = Gpr(7);
    pub const R11: Gpr = Gpr(11);
}

const GPR_NAMES: [&str; 16] = [
    "rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13",
    "r14", "r15",
];

impl Gpr {
    /// The register with encoding `number`, which must be below 16.
    pub const fn new(number: u8) -> Gpr {
        assert!(number < 16);
        Gpr(number)
    }

    /// The encoding number, 0 to 15.
    pub const fn number(self) -> usize {
        self.0 as usize
    }

    /// All sixteen, in encoding order.
    pub fn all() -> impl Iterator<Item = Gpr> {
        (0..16).map(Gpr)
    }

    /// The name of the 64-bit register.
    pub const fn name(self) -> &'static str {
        GPR_NAMES[self.0 as usize]
    }
}

impl fmt::Display for Gpr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Debug for Gpr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A register or flag that holds guest state outside memory.
///
/// `Gpr` and `Flags` are SSA values in every version. The others stay *in place*: only `native`
/// instructions write them, and such a write ends the reach of an anchor (docs/design.md, "The
/// IR").
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Loc {
    /// A general-purpose register, 64 bits.
    Gpr(Gpr),
    /// The six arithmetic flags.
    Flags,
    /// A vector register (zmm0 to zmm31, of which xmm and ymm are parts).
    Vec(u8),
    /// A mask register k0 to k7.
    Mask(u8),
    /// The x87 and MMX state.
    X87,
    /// SSE control and status.
    Mxcsr,
    /// The direction flag and the other non-arithmetic user flags (AC, ID).
    Df,
    /// The FS segment base.
    FsBase,
    /// The GS segment base.
    GsBase,
}

impl Loc {
    /// How many locations can be SSA values: the sixteen GPRs and the flags.
    pub const SSA_COUNT: usize = 17;

    /// A dense index for the SSA locations: GPRs 0 to 15, flags 16.
    pub const fn ssa_index(self) -> Option<usize> {
        match self {
            Loc::Gpr(g) => Some(g.number()),
            Loc::Flags => Some(16),
            _ => None,
        }
    }

    /// The inverse of [`Loc::ssa_index`].
    pub const fn from_ssa_index(index: usize) -> Loc {
        if index == 16 { Loc::Flags } else { Loc::Gpr(Gpr::new(index as u8)) }
    }

    /// The type of the value held here.
    pub const fn ty(self) -> Ty {
        match self {
            Loc::Flags => Ty::Flags,
            Loc::Vec(_) => Ty::V512,
            _ => Ty::I64,
        }
    }
}

impl fmt::Display for Loc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Loc::Gpr(g) => g.fmt(f),
            Loc::Flags => f.write_str("rflags"),
            Loc::Vec(n) => write!(f, "zmm{n}"),
            Loc::Mask(n) => write!(f, "k{n}"),
            Loc::X87 => f.write_str("x87"),
            Loc::Mxcsr => f.write_str("mxcsr"),
            Loc::Df => f.write_str("df"),
            Loc::FsBase => f.write_str("fsbase"),
            Loc::GsBase => f.write_str("gsbase"),
        }
    }
}

macro_rules! index_type {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u32);

        impl $name {
            /// The position in the table it indexes.
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}

index_type!(
    /// An SSA value of one version.
    Value,
    "v"
);
index_type!(
    /// A block of one version; block 0 is the entry.
    BlockId,
    "b"
);
index_type!(
    /// An anchor of one version.
    AnchorId,
    "a"
);
index_type!(
    /// An entry of a version's table of `native` instructions.
    NativeId,
    "n"
);

/// What an instruction reads: an SSA value, or a constant of the type its context asks for (kept
/// zero-extended).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operand {
    /// An SSA value.
    Value(Value),
    /// A constant, zero-extended to 64 bits from the width its use asks for.
    Const(u64),
}

impl Operand {
    /// The constant, if it is one.
    pub const fn as_const(self) -> Option<u64> {
        match self {
            Operand::Const(c) => Some(c),
            Operand::Value(_) => None,
        }
    }

    /// The value, if it is one.
    pub const fn as_value(self) -> Option<Value> {
        match self {
            Operand::Value(v) => Some(v),
            Operand::Const(_) => None,
        }
    }
}

impl From<Value> for Operand {
    fn from(v: Value) -> Operand {
        Operand::Value(v)
    }
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Operand::Value(v) => v.fmt(f),
            Operand::Const(c) if c < 0x1_0000 => write!(f, "{c}"),
            Operand::Const(c) if c > u64::MAX - 0x1_0000 => write!(f, "{}", c as i64),
            Operand::Const(c) => write!(f, "{c:#x}"),
        }
    }
}

impl fmt::Debug for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
