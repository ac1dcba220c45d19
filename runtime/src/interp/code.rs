//! Interpreter operations: 24 bytes each, threaded through handler pointers.
//!
//! Words: a *slot* is an index into the thread context seen as an array of 64-bit words. The
//! guest's general registers (slots 0 to 15) and the temporaries (in `scratch`) are addressed
//! alike. A *handler* is the function that executes one kind of operation.
//!
//! A handler executes its operation and then calls the next operation's handler. The compiler turns
//! that call into a jump where it can; elsewhere the length of a block bounds the depth. The last
//! handler of a block returns the first operation of the next block if that is linked and the edge
//! is not watched ([`Watch`](super::Watch), see `follow`). Else it returns null. A handler whose
//! guest access faults returns [`FAULTED`].
//!
//! The module owns no data: operations belong to their block, slots to the thread context.
//!
//! Invariants kept by `lower`:
//! * Slots lie inside the thread context.
//! * A pointer in `imm` points into the block that owns the operation.
//! * Each list ends with an operation that ends the block.
//!
//! Invariants kept by the handlers:
//! * A handler cuts its operands to its type, so the upper bits of a slot do not matter to a
//!   narrower reader. It writes its result zero-extended.
//! * The result is the one that [`dynasour_ir::semantics`] defines; a test compares them.
//!
//! Invariant kept by [`Interp`](super::Interp), the only caller, while operations run: the words
//! [`CURRENT`], [`WATCH`], [`FRONT`] and [`ZERO`] hold what their comments say.
//!
//! Example: `add eax, 5; jmp l` becomes two operations. `binary::<Add, u32, true>` has a = d = 0
//! (eax) and imm = 5. `end` sets [`EXIT`] to 1 and follows link 0. The description of the add's
//! flags is written to [`RECORD`] between the two by `record`, from the result in slot 0.

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
/// How the block was left: 1 for a branch taken and 0 for one not taken, or the target of an
/// indirect transfer, or the address of the operation that faulted.
pub const EXIT: u16 = SCRATCH + 4;
/// Always zero while the interpreter runs.
pub const ZERO: u16 = SCRATCH + 5;
/// Address of the block being executed.
pub const CURRENT: u16 = SCRATCH + 6;
/// The edges at which operations return to the interpreter ([`Watch`](super::Watch), see `follow`).
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

/// Is `next` null, [`FAULTED`] or [`STALE`], and not an operation?
#[inline(always)]
pub fn ended(next: *const Code) -> bool {
    next.addr() <= 2
}

/// A bit of [`WATCH`] and of an edge's flags: the edge is a call or a jump backward.
pub const HEAD_EDGE: u16 = 1;
/// A bit of [`WATCH`] and of an edge's flags: every edge has it.
pub const ANY_EDGE: u16 = 2;
/// Bits of [`WATCH`]: edges to blocks whose `user` word is not 0.
pub const USER_MASK: u64 = !0 << 32;

/// Where an operand's word comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OperandSource {
    /// A slot.
    Slot(u16),
    /// A constant.
    Const(u64),
}

impl OperandSource {
    /// The word.
    ///
    /// # Safety
    /// `words` points to a thread context, and the slot lies inside it.
    #[inline]
    pub unsafe fn get(self, words: *const u64) -> u64 {
        match self {
            // SAFETY: the caller's promise.
            OperandSource::Slot(slot) => unsafe { *words.add(slot as usize) },
            OperandSource::Const(c) => c,
        }
    }
}

/// A description of the guest's flags at one point of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FlagState {
    /// They are in the record.
    Record,
    /// They follow from these words, as the kind says.
    Known(Kind, [OperandSource; 3]),
}

impl FlagState {
    /// The six flags.
    ///
    /// # Safety
    /// `words` points to a thread context whose record the interpreter has opened.
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

/// The guest bytes that a block was made from, if plain stores may change them.
pub struct CodeBytes {
    /// The address of the first.
    pub start: u64,
    /// The bytes when the block was made.
    pub bytes: Arc<[u8]>,
}

impl CodeBytes {
    /// Does guest memory still hold these bytes?
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
    pub args: Vec<(OperandSource, u64)>,
}

impl PureOp {
    /// # Safety
    /// As for [`OperandSource::get`].
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
    ($(
        $(#[$doc:meta])*
        fn $name:ident $(<$($g:ident: $bound:ident),* $(; const $k:ident: $kt:ty)*>)?
            ($w:ident, $op:ident) $body:block
    )*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// The module's invariant.
        #[allow(clippy::macro_metavars_in_unsafe, reason = "only this module's handlers")]
        pub unsafe fn $name $(<$($g: $bound,)* $(const $k: $kt),*>)?
            ($w: *mut u64, ip: *const Code) -> *const Code
        {
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
    /// The first operation of a block whose bytes stores may change: compares them.
    fn check_bytes(_w, op) {
        if !(*(op.imm as *const CodeBytes)).unchanged() {
            return STALE;
        }
    }
    /// Branch on a op b, and record flags of kind c over the words a and b. d has the flags of the
    /// edge that is taken. With a constant, the low half of imm is compared with a and its high
    /// half is recorded as b, both sign-extended.
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
    /// Branch on the i1 in a; d has the flags of the edge that is taken.
    fn branch(w, op) {
        return leave(w, get(w, op.a) & 1, op.d);
    }
    /// End the block with one direct successor; d has the flags of the edge.
    fn end(w, op) {
        return leave(w, 1, op.d);
    }
    /// End the block where the runtime has to do something.
    fn end_stop(_w, _op) {
        return std::ptr::null();
    }
    /// End the block with the target in a; d has the flags of the edge.
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
        let index = get(w, op.b) << (op.c & 3);
        match memory::load::<T>(get(w, op.a).wrapping_add(index).wrapping_add(op.imm)) {
            Ok(v) => set(w, op.d, v.wide()),
            Err(memory::Fault) => return faulted(w, op),
        }
    }
    /// d = sign extension to T of load F [a + (b << c) + imm]
    fn load_sext<F: Int, T: Int>(w, op) {
        let index = get(w, op.b) << (op.c & 3);
        match memory::load::<F>(get(w, op.a).wrapping_add(index).wrapping_add(op.imm)) {
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
    /// Record the description of flags that imm points to.
    fn record_state(w, op) {
        if let FlagState::Known(kind, sources) = &*(op.imm as *const FlagState) {
            let words = sources.map(|s| s.get(w));
            set(w, RECORD, u64::from(kind.0));
            for (i, word) in words.into_iter().enumerate() {
                set(w, RECORD + 1 + i as u16, word);
            }
        }
    }
    /// d = the bits of the flags that imm describes.
    fn flag_bits(w, op) {
        set(w, op.d, (*(op.imm as *const FlagState)).bits(w));
    }
    /// d = 1 if condition c holds of the flags that imm describes, else 0.
    fn condition(w, op) {
        let bits = (*(op.imm as *const FlagState)).bits(w);
        set(w, op.d, u64::from(semantics::cond_holds(Cond::ALL[(op.c & 15) as usize], bits)));
    }
    /// d = the value of the pure operation that imm points to.
    fn pure(w, op) {
        set(w, op.d, (*(op.imm as *const PureOp)).value(w));
    }
    /// Execute the original instruction that imm points to; the address of its memory operand is in
    /// a.
    fn native(w, op) {
        if (*(op.imm as *const NativeOp)).run(w.cast(), get(w, op.a)) {
            return faulted(w, op);
        }
    }
}

/// Every type has this trait. It lets a handler that has only a constant parameter use the pattern
/// of the macro, which wants a type parameter first.
pub trait Never {}
impl<T> Never for T {}

/// Ends a block with direct successors: goes to the first if `exit` is not 0, else to the second.
/// `taken` has the flags of the first edge.
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

/// Makes `next` the current block and returns its first operation. Returns null, and changes
/// nothing, if `next` is null, if the context's `pending` is set, or if the policy watches the
/// edge.
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
