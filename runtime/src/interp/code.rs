//! Interpreter operations: 24 bytes each, threaded through handler pointers.
//!
//! Words: a *slot* is an index into the thread context seen as an array of 64-bit words, so the
//! guest's general registers (slots 0 to 15) and temporaries (in `scratch`) are addressed alike. A
//! handler does one operation and calls the next one's handler in its tail: a jump, where the
//! compiler makes it one, else a call that a block's length bounds. What it returns is the next
//! operation to run: null at the end of the block, or [`FAULTED`] when a guest access faulted. A
//! handler that ends a block returns the first operation of the next one if it is linked and nobody
//! [`Watch`](super::Watch)es the edge: see `follow`.
//!
//! Every handler cuts its operands to its type, so a slot's upper bits never matter to a narrower
//! reader; every result is written zero-extended. What the operations compute is
//! [`dynasour_ir::semantics`]; a test holds the handlers to it.
//!
//! Invariant (kept by `lower`): slots lie inside the thread context, `imm` pointers point into the
//! block that owns the operation, and each list ends in an operation that ends the block. While
//! operations run (kept by [`Interp`](super::Interp)), the words [`CURRENT`], [`WATCH`] and
//! [`FRONT`] are what they say.

use super::cache::{Block, Front};
use super::flags::Kind;
use super::native::NativeOp;
use crate::memory::{self, Width};
use dynasour_guest::context::{SCRATCH_WORDS, ThreadContext, offset};
use dynasour_ir::{Cond, Ty, semantics};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Runs one operation on the context's words.
pub type Handler = unsafe fn(*mut u64, *const Code) -> *const Code;

/// One decoded operation.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Code {
    /// What to do.
    pub run: Handler,
    /// A constant, an address shape, or a pointer to a side table.
    pub imm: u64,
    /// Destination slot.
    pub d: u16,
    /// First source slot.
    pub a: u16,
    /// Second source slot.
    pub b: u16,
    /// Third source slot, scale, or flags kind.
    pub c: u16,
}

const SCRATCH: u16 = (offset::SCRATCH / 8) as u16;
/// Kind, a, b, c of the flags record.
pub const RECORD: u16 = SCRATCH;
/// Which way a block was left: 1 and 0 for a branch, the target of an indirect transfer, the
/// operation that faulted.
pub const EXIT: u16 = SCRATCH + 4;
/// Always zero while the interpreter runs.
pub const ZERO: u16 = SCRATCH + 5;
/// Address of the block being executed.
pub const CURRENT: u16 = SCRATCH + 6;
/// Which edges are to be left to the interpreter: `Watch`, see `follow`.
pub const WATCH: u16 = SCRATCH + 7;
/// Address of the cache's [`Front`].
pub const FRONT: u16 = SCRATCH + 8;
/// The first temporary.
pub const TEMPS: u16 = SCRATCH + 9;
/// One past the last temporary.
pub const TEMPS_END: u16 = SCRATCH + SCRATCH_WORDS as u16;
/// The FS base.
pub const FS_BASE: u16 = (offset::FS_BASE / 8) as u16;
/// The GS base.
pub const GS_BASE: u16 = (offset::GS_BASE / 8) as u16;

const _: () = assert!(size_of::<ThreadContext>() / 8 < u16::MAX as usize);

/// Returned instead of the next operation when a guest access faulted; the word at [`EXIT`] is the
/// operation.
pub const FAULTED: *const Code = std::ptr::without_provenance(1);

/// Returned instead of the next operation when the block's bytes are not what it was made from.
pub const STALE: *const Code = std::ptr::without_provenance(2);

/// Has a handler ended the block (by null, [`FAULTED`] or [`STALE`])?
#[inline(always)]
pub fn ended(next: *const Code) -> bool {
    next.addr() <= 2
}

/// A bit of [`WATCH`] and of the flags of an edge: calls and jumps backward.
pub const HEAD_EDGE: u16 = 1;
/// A bit of [`WATCH`] and of the flags of an edge: all of them.
pub const ANY_EDGE: u16 = 2;
/// Bits of [`WATCH`]: edges to blocks whose `user` word is not 0.
pub const USER_MASK: u64 = !0 << 32;

/// Where the words of flags come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// A slot.
    Slot(u16),
    /// A constant.
    Const(u64),
}

impl Source {
    /// The word.
    ///
    /// # Safety
    /// `words` are those of a thread context, and a slot lies inside.
    #[inline]
    pub unsafe fn get(self, words: *const u64) -> u64 {
        match self {
            // SAFETY: the caller's promise.
            Source::Slot(slot) => unsafe { *words.add(slot as usize) },
            Source::Const(c) => c,
        }
    }
}

/// A description of the guest's flags at one place of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FlagState {
    /// They are in the record.
    Record,
    /// They follow from these.
    Known(Kind, [Source; 3]),
}

impl FlagState {
    /// The six flags.
    ///
    /// # Safety
    /// `words` are those of a thread context whose record was opened by the interpreter.
    pub unsafe fn bits(&self, words: *const u64) -> u64 {
        // SAFETY: the caller's promise.
        unsafe {
            match *self {
                FlagState::Record => {
                    let record = words.add(RECORD as usize);
                    Kind(*record as u16).bits(*record.add(1), *record.add(2), *record.add(3))
                }
                FlagState::Known(kind, [a, b, c]) => {
                    kind.bits(a.get(words), b.get(words), c.get(words))
                }
            }
        }
    }
}

/// What a block was made from, if stores may change it.
pub struct CodeBytes {
    /// Where.
    pub start: u64,
    /// What was there.
    pub bytes: Arc<[u8]>,
}

impl CodeBytes {
    /// Is it still there?
    #[inline(never)]
    fn unchanged(&self) -> bool {
        let mut now = [0; 64];
        self.bytes.chunks(now.len()).zip((self.start..).step_by(now.len())).all(|(then, at)| {
            let now = &mut now[..then.len()];
            memory::fetch_code(at, now) == then.len() && now == then
        })
    }
}

/// A rarely used pure operation, evaluated by [`semantics::eval`].
#[derive(Debug)]
pub struct PureOp {
    /// The operation.
    pub op: dynasour_ir::Op,
    /// Its type.
    pub ty: Ty,
    /// Operands and the masks of their types.
    pub args: Vec<(Source, u64)>,
}

impl PureOp {
    /// # Safety
    /// As for [`Source::get`].
    #[inline(never)]
    unsafe fn value(&self, words: *const u64) -> u64 {
        let mut args = [0; 3];
        for (arg, (source, mask)) in args.iter_mut().zip(&self.args) {
            // SAFETY: the caller's promise.
            *arg = unsafe { source.get(words) } & mask;
        }
        semantics::eval(self.op, self.ty, &args[..self.args.len()])
    }
}

/// A two-operand function on values cut to `T`, itself cut to `T` by the handler.
pub trait Binary {
    /// The function.
    fn apply<T: Int>(a: u64, b: u64) -> u64;
}

/// An integer type of the machine.
pub trait Int: Width {
    /// Width in bits.
    const BITS: u32;
    /// The low bits, zero-extended.
    fn cut(v: u64) -> u64;
    /// The low bits, sign-extended.
    fn sext(v: u64) -> i64;
    /// The low bits.
    fn low(v: u64) -> Self;
    /// Zero extension.
    fn wide(self) -> u64;
}

macro_rules! int {
    ($($unsigned:ty, $signed:ty;)*) => {$(
        impl Int for $unsigned {
            const BITS: u32 = <$unsigned>::BITS;
            #[inline(always)]
            fn cut(v: u64) -> u64 {
                u64::from(v as $unsigned)
            }
            #[inline(always)]
            fn sext(v: u64) -> i64 {
                i64::from(v as $signed)
            }
            #[inline(always)]
            fn low(v: u64) -> $unsigned {
                v as $unsigned
            }
            #[inline(always)]
            fn wide(self) -> u64 {
                u64::from(self)
            }
        }
    )*};
}

int! {
    u8, i8;
    u16, i16;
    u32, i32;
    u64, i64;
}

/// x86 masks shift counts to 6 bits for 64-bit operands and to 5 bits for all others.
#[inline(always)]
fn count<T: Int>(b: u64) -> u32 {
    b as u32 & if T::BITS == 64 { 63 } else { 31 }
}

macro_rules! binary {
    ($($(#[$doc:meta])* $name:ident = |$t:ident, $a:ident, $b:ident| $body:expr;)*) => {$(
        $(#[$doc])*
        pub struct $name;
        impl Binary for $name {
            #[inline(always)]
            fn apply<$t: Int>($a: u64, $b: u64) -> u64 {
                $body
            }
        }
    )*};
}

binary! {
    /// Addition.
    Add = |T, a, b| a.wrapping_add(b);
    /// Subtraction.
    Sub = |T, a, b| a.wrapping_sub(b);
    /// And.
    And = |T, a, b| a & b;
    /// Or.
    Or = |T, a, b| a | b;
    /// Exclusive or.
    Xor = |T, a, b| a ^ b;
    /// Low product.
    Mul = |T, a, b| a.wrapping_mul(b);
    /// Left shift.
    Shl = |T, a, b| a << count::<T>(b);
    /// Logical right shift.
    Shr = |T, a, b| a >> count::<T>(b);
    /// Arithmetic right shift.
    Sar = |T, a, b| (T::sext(a) >> count::<T>(b)) as u64;
    /// Equality.
    Eq = |T, a, b| u64::from(a == b);
    /// Inequality.
    Ne = |T, a, b| u64::from(a != b);
    /// Unsigned less.
    LtU = |T, a, b| u64::from(a < b);
    /// Unsigned less or equal.
    LeU = |T, a, b| u64::from(a <= b);
    /// Signed less.
    LtS = |T, a, b| u64::from(T::sext(a) < T::sext(b));
    /// Signed less or equal.
    LeS = |T, a, b| u64::from(T::sext(a) <= T::sext(b));
    /// Unsigned greater.
    GtU = |T, a, b| u64::from(a > b);
    /// Unsigned greater or equal.
    GeU = |T, a, b| u64::from(a >= b);
    /// Signed greater.
    GtS = |T, a, b| u64::from(T::sext(a) > T::sext(b));
    /// Signed greater or equal.
    GeS = |T, a, b| u64::from(T::sext(a) >= T::sext(b));
}

/// Reads a slot.
#[inline(always)]
unsafe fn get(w: *mut u64, slot: u16) -> u64 {
    // SAFETY: slots lie inside the context (module invariant).
    unsafe { *w.add(slot as usize) }
}

/// Writes a slot.
#[inline(always)]
unsafe fn set(w: *mut u64, slot: u16, v: u64) {
    // SAFETY: slots lie inside the context (module invariant).
    unsafe { *w.add(slot as usize) = v }
}

/// The second operand: a constant or a slot.
#[inline(always)]
unsafe fn second<const IMM: bool>(w: *mut u64, op: &Code) -> u64 {
    // SAFETY: module invariant.
    if IMM { op.imm } else { unsafe { get(w, op.b) } }
}

macro_rules! handlers {
    ($($(#[$doc:meta])* fn $name:ident $(<$($g:ident: $bound:ident),* $(; const $k:ident: $kt:ty)*>)? ($w:ident, $op:ident) $body:block)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// The module's invariant.
        #[allow(clippy::macro_metavars_in_unsafe, reason = "the handlers of this module are the arguments")]
        pub unsafe fn $name $(<$($g: $bound,)* $(const $k: $kt),*>)? ($w: *mut u64, ip: *const Code) -> *const Code {
            // SAFETY: the module's invariant.
            unsafe {
                let $op = &*ip;
                $body
                #[allow(unreachable_code, reason = "some handlers end the block")]
                {
                    let next = ip.add(1);
                    ((*next).run)($w, next)
                }
            }
        }
    )*};
}

handlers! {
    /// d = a op b
    fn binary<B: Binary, T: Int; const IMM: bool>(w, op) {
        let (a, b) = (T::cut(get(w, op.a)), T::cut(second::<IMM>(w, op)));
        set(w, op.d, T::cut(B::apply::<T>(a, b)));
    }
    /// The first operation of a block that stores may change.
    fn check_bytes(_w, op) {
        if !(*(op.imm as *const CodeBytes)).unchanged() {
            return STALE;
        }
    }
    /// Branch on a op b; c is the kind to record of (a, b). An immediate is i32, the recorded b its
    /// upper half. d are the flags of the edge if taken.
    fn branch_compare<B: Binary, T: Int; const IMM: bool>(w, op) {
        let a = get(w, op.a);
        let (b, recorded) = if IMM {
            (i64::from(op.imm as i32) as u64, (op.imm as i64 >> 32) as u64)
        } else {
            let b = get(w, op.b);
            (b, b)
        };
        set(w, RECORD, u64::from(op.c));
        set(w, RECORD + 1, a);
        set(w, RECORD + 2, recorded);
        return leave(w, B::apply::<T>(T::cut(a), T::cut(b)), op.d);
    }
    /// Branch on an i1; d are the flags of the edge if taken.
    fn branch(w, op) {
        return leave(w, get(w, op.a) & 1, op.d);
    }
    /// End the block; a direct successor; d are the flags of the edge.
    fn end(w, op) {
        return leave(w, 1, op.d);
    }
    /// End the block where the runtime has to do something.
    fn end_stop(_w, _op) {
        return std::ptr::null();
    }
    /// End the block; the target is in a; d are the flags of the edge.
    fn end_indirect(w, op) {
        let target = get(w, op.a);
        set(w, EXIT, target);
        let front = &*(get(w, FRONT) as *const Front);
        return follow(w, front.find(target), op.d);
    }
    /// d = zero extension of a.
    fn zext<T: Int>(w, op) {
        set(w, op.d, T::cut(get(w, op.a)));
    }
    /// d = sign extension of a from F to T.
    fn sext<F: Int, T: Int>(w, op) {
        set(w, op.d, T::cut(F::sext(get(w, op.a)) as u64));
    }
    /// d = constant.
    fn constant(w, op) {
        set(w, op.d, op.imm);
    }
    /// d = !a
    fn not<T: Int>(w, op) {
        set(w, op.d, T::cut(!get(w, op.a)));
    }
    /// d = -a
    fn neg<T: Int>(w, op) {
        set(w, op.d, T::cut(get(w, op.a).wrapping_neg()));
    }
    /// d = a with its low T replaced by b.
    fn insert<T: Int; const IMM: bool>(w, op) {
        let low = T::cut(u64::MAX);
        set(w, op.d, get(w, op.a) & !low | T::cut(second::<IMM>(w, op)));
    }
    /// d = a with its second byte replaced by b.
    fn insert_high<Z: Never; const IMM: bool>(w, op) {
        set(w, op.d, get(w, op.a) & !0xff00 | (second::<IMM>(w, op) & 0xff) << 8);
    }
    /// d = c ? a : b
    fn select<T: Int>(w, op) {
        let v = if get(w, op.c) & 1 != 0 { get(w, op.a) } else { get(w, op.b) };
        set(w, op.d, T::cut(v));
    }
    /// d = a + (b << c) + imm
    fn address(w, op) {
        let v = get(w, op.a).wrapping_add(get(w, op.b) << (op.c & 3)).wrapping_add(op.imm);
        set(w, op.d, v);
    }
    /// d = load [a + imm]
    fn load<T: Int>(w, op) {
        match memory::load::<T>(get(w, op.a).wrapping_add(op.imm)) {
            Ok(v) => set(w, op.d, v.wide()),
            Err(memory::Fault) => return faulted(w, op),
        }
    }
    /// d = load [a + (b << c) + imm]
    fn load_indexed<T: Int>(w, op) {
        match memory::load::<T>(get(w, op.a).wrapping_add(get(w, op.b) << (op.c & 3)).wrapping_add(op.imm)) {
            Ok(v) => set(w, op.d, v.wide()),
            Err(memory::Fault) => return faulted(w, op),
        }
    }
    /// d = sign extension to T of load F [a + (b << c) + imm]
    fn load_sext<F: Int, T: Int>(w, op) {
        match memory::load::<F>(get(w, op.a).wrapping_add(get(w, op.b) << (op.c & 3)).wrapping_add(op.imm)) {
            Ok(v) => set(w, op.d, T::cut(F::sext(v.wide()) as u64)),
            Err(memory::Fault) => return faulted(w, op),
        }
    }
    /// store [a + imm], d
    fn store<T: Int>(w, op) {
        if memory::store(get(w, op.a).wrapping_add(op.imm), T::low(get(w, op.d))).is_err() {
            return faulted(w, op);
        }
    }
    /// store [a + (b << c) + imm], d
    fn store_indexed<T: Int>(w, op) {
        let addr = get(w, op.a).wrapping_add(get(w, op.b) << (op.c & 3)).wrapping_add(op.imm);
        if memory::store(addr, T::low(get(w, op.d))).is_err() {
            return faulted(w, op);
        }
    }
    /// store [a + (b << c) + low half of imm], high half of imm
    fn store_constant<T: Int>(w, op) {
        let addr = get(w, op.a)
            .wrapping_add(get(w, op.b) << (op.c & 3))
            .wrapping_add_signed(i64::from(op.imm as i32));
        if memory::store(addr, T::low((op.imm as i64 >> 32) as u64)).is_err() {
            return faulted(w, op);
        }
    }
    /// Record flags: kind c, words a and b (or the constant).
    fn record<Z: Never; const IMM: bool>(w, op) {
        set(w, RECORD, u64::from(op.c));
        set(w, RECORD + 1, get(w, op.a));
        set(w, RECORD + 2, second::<IMM>(w, op));
    }
    /// Record any description of flags.
    fn record_state(w, op) {
        if let FlagState::Known(kind, sources) = &*(op.imm as *const FlagState) {
            let words = sources.map(|s| s.get(w));
            set(w, RECORD, u64::from(kind.0));
            for (i, word) in words.into_iter().enumerate() {
                set(w, RECORD + 1 + i as u16, word);
            }
        }
    }
    /// d = the bits of flags.
    fn flag_bits(w, op) {
        set(w, op.d, (*(op.imm as *const FlagState)).bits(w));
    }
    /// d = does condition c hold of flags?
    fn condition(w, op) {
        let bits = (*(op.imm as *const FlagState)).bits(w);
        set(w, op.d, u64::from(semantics::cond_holds(Cond::ALL[(op.c & 15) as usize], bits)));
    }
    /// d = any pure operation.
    fn pure(w, op) {
        set(w, op.d, (*(op.imm as *const PureOp)).value(w));
    }
    /// An original instruction; the address of its memory operand is in a.
    fn native(w, op) {
        if (*(op.imm as *const NativeOp)).run(w.cast(), get(w, op.a)) {
            return faulted(w, op);
        }
    }
}

/// Satisfied by everything: lets a handler with only a constant parameter use the common pattern.
pub trait Never {}
impl<T> Never for T {}

/// Ends a block with direct successors: the first if `exit` is not 0.
#[inline(always)]
unsafe fn leave(w: *mut u64, exit: u64, taken: u16) -> *const Code {
    // SAFETY: module invariant.
    unsafe {
        set(w, EXIT, exit);
        let current = get(w, CURRENT) as *const Block;
        let (link, flags) = if exit != 0 { (0, taken) } else { (1, ANY_EDGE) };
        follow(w, (*current).links[link], flags)
    }
}

/// The first operation of `next`, which becomes the current block; null if there is none, if
/// control is wanted elsewhere, or if somebody watches the edge.
#[inline(always)]
unsafe fn follow(w: *mut u64, next: *const Block, flags: u16) -> *const Code {
    if next.is_null() {
        return std::ptr::null();
    }
    // SAFETY: module invariant; links and the front lead to live blocks.
    unsafe {
        let pending =
            AtomicU32::from_ptr(w.byte_add(offset::PENDING).cast()).load(Ordering::Relaxed);
        let watch = get(w, WATCH);
        let user = u64::from((*next).entry.user) << 32;
        if u64::from(pending) | watch & (u64::from(flags) | user) != 0 {
            return std::ptr::null();
        }
        set(w, CURRENT, next as u64);
        (*next).start
    }
}

#[cold]
unsafe fn faulted(w: *mut u64, op: &Code) -> *const Code {
    // SAFETY: module invariant.
    unsafe { set(w, EXIT, std::ptr::from_ref(op).addr() as u64) };
    FAULTED
}
