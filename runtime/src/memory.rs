//! The host's accesses to guest memory. An access that faults returns an error value.
//!
//! Guest and host share one address space, so a guest address is a host address that may be
//! invalid. Each access of a value is one machine instruction of the exact width. So a naturally
//! aligned access of the guest stays atomic and keeps its order (TSO).
//!
//! Data: a table in the section `dynasour_fixups`, which the linker makes of one entry for each
//! access in the program. An entry holds the address of the access and a *landing* address behind
//! it, where execution goes on after a fault. The compiler may duplicate an access by inlining;
//! each copy has its own entry. For each thread there is also a [`FaultInfo`]: what the kernel
//! reported about the thread's last fault.
//!
//! Invariant: while one of these functions may fault, the process has a handler for SIGSEGV and
//! SIGBUS that honours [`fixup`].
//!
//! No lock: any thread may call the functions. [`fixup`] and [`note_fault`] are for the signal
//! handler and do not allocate.
//!
//! Example: the interpreter executes a load of the guest from an unmapped page by
//! `load::<u64>(addr)`. The `mov` faults. The signal handler finds the landing address with
//! [`fixup`], stores the kernel's report with [`note_fault`], sets rip to the landing address and
//! returns. `load` returns `Err(Fault)`, and the code that stops the guest takes the report from
//! [`last_fault`].

use std::arch::asm;
use std::cell::Cell;
use std::sync::OnceLock;

use crate::protection_keys;

/// A guest access faulted: its memory is not mapped, or the protection denies the access.
/// [`last_fault`] has the details.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("guest memory access faulted")]
pub struct Fault;

/// What the kernel reported about a synchronous fault (fields of `siginfo_t` and the machine
/// context).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FaultInfo {
    /// The signal: SIGSEGV, SIGBUS, SIGFPE, …
    pub signal: i32,
    /// `si_code`
    pub code: i32,
    /// `si_addr`
    pub addr: u64,
    /// The processor's exception number (`REG_TRAPNO`).
    pub trapno: u64,
    /// The processor's error code (`REG_ERR`).
    pub error: u64,
    /// The faulting linear address of the last page fault (`REG_CR2`).
    pub cr2: u64,
    /// `si_pkey`: the page's protection key, if that is what denied the access; else 0.
    pub key: u32,
}

impl FaultInfo {
    /// The value before a thread's first fault.
    const NONE: FaultInfo =
        FaultInfo { signal: 0, code: 0, addr: 0, trapno: 0, error: 0, cr2: 0, key: 0 };

    /// `si_code` of an access that the rights to a protection key deny.
    pub const SEGV_PKUERR: i32 = 4;

    /// Did the rights to a protection key deny the access?
    pub fn is_denied_by_key(&self) -> bool {
        (self.signal, self.code) == (libc::SIGSEGV, Self::SEGV_PKUERR)
    }

    /// Was the fault a write to a page that is mapped but not writable?
    pub fn is_denied_write(&self) -> bool {
        const SEGV_ACCERR: i32 = 2;
        const PAGE_FAULT: u64 = 14;
        (self.signal, self.code, self.trapno) == (libc::SIGSEGV, SEGV_ACCERR, PAGE_FAULT)
            && self.is_write()
    }

    /// Was the page fault a write?
    pub fn is_write(&self) -> bool {
        const WRITE: u64 = 1 << 1;
        self.error & WRITE != 0
    }
}

thread_local! {
    static LAST_FAULT: Cell<FaultInfo> =
        const { Cell::new(FaultInfo::NONE) };
}

/// Stores the report of a fault for [`last_fault`]. The signal handler calls it. The FS base must
/// be the host's, because the report is in a thread-local variable.
pub fn note_fault(info: FaultInfo) {
    LAST_FAULT.set(info);
}

/// The report of this thread's last fault for which the handler found a landing address.
pub fn last_fault() -> FaultInfo {
    LAST_FAULT.get()
}

/// One entry of the fix-up table. Each field is the distance from the field's own address to the
/// address that it stands for.
#[repr(C)]
struct FixupEntry {
    access: i32,
    landing: i32,
}

unsafe extern "C" {
    #[link_name = "__start_dynasour_fixups"]
    static FIXUPS_START: FixupEntry;
    #[link_name = "__stop_dynasour_fixups"]
    static FIXUPS_END: FixupEntry;
}

/// Where to continue after a fault of the host instruction at `host_rip`, if it is one of this
/// module's guest accesses. May be called in a signal handler.
pub fn fixup(host_rip: u64) -> Option<u64> {
    let start = &raw const FIXUPS_START;
    let end = &raw const FIXUPS_END;
    let count = (end as usize - start as usize) / size_of::<FixupEntry>();
    // SAFETY: the linker defines both symbols as the bounds of the section, which holds nothing but
    // entries.
    let table = unsafe { std::slice::from_raw_parts(start, count) };
    let resolve =
        |field: &i32| (std::ptr::from_ref(field) as u64).wrapping_add_signed(i64::from(*field));
    table.iter().find(|e| resolve(&e.access) == host_rip).map(|e| resolve(&e.landing))
}

/// The assembly text of a table entry that says: after a fault at label 2, execution continues at
/// label 3.
macro_rules! fixup_entry {
    () => {
        ".pushsection dynasour_fixups,\"aR\",@progbits\n.long 2b - .\n.long 3b - .\n.popsection"
    };
}

pub(crate) use fixup_entry;

mod sealed {
    pub trait Sealed {}
}

/// The integer widths a guest access can have.
pub trait Width: sealed::Sealed + Copy {
    /// Reads one value.
    ///
    /// # Safety
    /// See [`load`].
    unsafe fn load(addr: u64) -> Result<Self, Fault>;
    /// Writes one value.
    ///
    /// # Safety
    /// See [`store`].
    unsafe fn store(addr: u64, value: Self) -> Result<(), Fault>;
}

macro_rules! width {
    ($ty:ty, $class:ident, $load:literal, $store:literal) => {
        impl sealed::Sealed for $ty {}
        impl Width for $ty {
            #[inline(always)]
            unsafe fn load(addr: u64) -> Result<$ty, Fault> {
                let value: $ty;
                let failed: u32;
                // SAFETY: one load; if it faults, execution goes on at label 3 with `failed` still
                // 1. The caller answers for the address being the guest's.
                unsafe {
                    asm!("mov {failed:e}, 1", concat!("2: ", $load), "mov {failed:e}, 0", "3:",
                        fixup_entry!(), value = out($class) value, failed = out(reg) failed,
                        addr = in(reg) addr, options(nostack, preserves_flags));
                }
                if failed == 0 { Ok(value) } else { Err(Fault) }
            }

            #[inline(always)]
            unsafe fn store(addr: u64, value: $ty) -> Result<(), Fault> {
                let failed: u32;
                // SAFETY: one store; if it faults, execution goes on at label 3 with `failed` still
                // 1. The caller answers for the address being the guest's.
                unsafe {
                    asm!("mov {failed:e}, 1", concat!("2: ", $store), "mov {failed:e}, 0", "3:",
                        fixup_entry!(), value = in($class) value, failed = out(reg) failed,
                        addr = in(reg) addr, options(nostack, preserves_flags));
                }
                if failed == 0 { Ok(()) } else { Err(Fault) }
            }
        }
    };
}

width!(u8, reg_byte, "mov {value}, byte ptr [{addr}]", "mov byte ptr [{addr}], {value}");
width!(u16, reg, "mov {value:x}, word ptr [{addr}]", "mov word ptr [{addr}], {value:x}");
width!(u32, reg, "mov {value:e}, dword ptr [{addr}]", "mov dword ptr [{addr}], {value:e}");
width!(u64, reg, "mov {value}, qword ptr [{addr}]", "mov qword ptr [{addr}], {value}");

/// Reads `T` at a guest address with one instruction.
///
/// # Errors
/// [`Fault`] if the memory cannot be read (the process's SIGSEGV/SIGBUS handler must honour
/// [`fixup`]).
///
/// # Safety
/// `addr` must be an address that the guest computed. If it is an address of host memory, the
/// host's value is returned.
#[inline(always)]
pub unsafe fn load<T: Width>(addr: u64) -> Result<T, Fault> {
    // SAFETY: the caller's promise.
    unsafe { T::load(addr) }
}

/// Writes `T` at a guest address with one instruction.
///
/// # Errors
/// [`Fault`] if the memory cannot be written; then no byte of it has changed.
///
/// # Safety
/// `addr` must be an address that the guest computed and may write. Nothing stops a guest that
/// writes to host memory (docs/limits.md, "Trust").
#[inline(always)]
pub unsafe fn store<T: Width>(addr: u64, value: T) -> Result<(), Fault> {
    // SAFETY: the caller's promise.
    unsafe { T::store(addr, value) }
}

/// Atomically replaces the 32-bit word at `addr` if it is `old`; returns the word's value before.
///
/// # Errors
/// As [`store`].
///
/// # Safety
/// As for [`store`].
pub unsafe fn compare_exchange(addr: u64, old: u32, new: u32) -> Result<u32, Fault> {
    let mut value = old;
    let failed: u32;
    // SAFETY: one locked instruction; if it faults, execution goes on at label 3 with `failed`
    // still 1. The caller answers for the address being the guest's.
    unsafe {
        asm!("mov {failed:e}, 1", "2: lock cmpxchg dword ptr [{addr}], {new:e}",
            "mov {failed:e}, 0", "3:", fixup_entry!(), inout("eax") value, new = in(reg) new,
            failed = out(reg) failed, addr = in(reg) addr, options(nostack));
    }
    if failed == 0 { Ok(value) } else { Err(Fault) }
}

/// Tests whether the byte at `addr` can be written, by writing its present value to it atomically.
///
/// # Errors
/// As [`store`].
///
/// # Safety
/// As for [`store`].
pub unsafe fn probe_write(addr: u64) -> Result<(), Fault> {
    let failed: u32;
    // SAFETY: one locked instruction that changes nothing; if it faults, execution goes on at label
    // 3.
    unsafe {
        asm!("mov {failed:e}, 1", "2: lock or byte ptr [{addr}], 0", "mov {failed:e}, 0", "3:",
            fixup_entry!(), failed = out(reg) failed, addr = in(reg) addr, options(nostack));
    }
    if failed == 0 { Ok(()) } else { Err(Fault) }
}

/// Copies by `rep movsb`. Returns the number of bytes that it did *not* copy because of a fault.
///
/// # Safety
/// The host side of the copy must be valid for `len` bytes.
unsafe fn copy(from: u64, to: u64, len: usize) -> usize {
    let mut left = len;
    // SAFETY: the instruction is restartable: at a fault rcx holds the number of bytes that are
    // left, and execution goes on at label 3.
    unsafe {
        asm!("2: rep movsb", "3:", fixup_entry!(), inout("rcx") left, inout("rsi") from => _,
            inout("rdi") to => _, options(nostack, preserves_flags));
    }
    left
}

/// Copies guest memory at `addr` into `buf`; returns the length of the prefix that could be read.
pub fn copy_in(addr: u64, buf: &mut [u8]) -> usize {
    // SAFETY: `buf` is valid for writing; the guest side may fault, which ends the copy.
    buf.len() - unsafe { copy(addr, buf.as_mut_ptr() as u64, buf.len()) }
}

/// Reads up to eight bytes of guest memory, zero-extended. `None` if they cannot be read.
pub fn read_word(addr: u64, size: u32) -> Option<u64> {
    let mut bytes = [0; 8];
    let wanted = bytes.get_mut(..size as usize)?;
    (copy_in(addr, wanted) == size as usize).then(|| u64::from_le_bytes(bytes))
}

/// As [`read_word`], on a thread on which nobody handles faults: asks the kernel.
pub fn read_word_by_kernel(addr: u64, size: u32) -> Option<u64> {
    let mut bytes = [0; 8];
    let wanted = bytes.get_mut(..size as usize)?;
    let to = libc::iovec { iov_base: wanted.as_mut_ptr().cast(), iov_len: wanted.len() };
    let from = libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: wanted.len() };
    // SAFETY: writes at most the bytes of `to`; the kernel checks the address of `from`.
    let read = unsafe {
        libc::process_vm_readv(std::process::id() as i32, &raw const to, 1, &raw const from, 1, 0)
    };
    (read == size as isize).then(|| u64::from_le_bytes(bytes))
}

/// Copies `bytes` to guest memory at `addr`; returns the length of the prefix that could be
/// written. A guarded page of code cannot be written by it; [`crate::changes::host::copy_out`] can
/// write there.
///
/// # Safety
/// As for [`store`].
pub unsafe fn copy_out_open(addr: u64, bytes: &[u8]) -> usize {
    // SAFETY: `bytes` is valid for reading; the guest side may fault, which ends the copy.
    bytes.len() - unsafe { copy(bytes.as_ptr() as u64, addr, bytes.len()) }
}

/// What reads code when the host has patched some: see [`read_code_by`].
static READ_PATCHED: OnceLock<fn(addr: u64, buf: &mut [u8]) -> usize> = OnceLock::new();

/// From now on [`fetch_code`] reads by this function, which knows what the host has patched.
pub fn read_code_by(read: fn(addr: u64, buf: &mut [u8]) -> usize) {
    let _ = READ_PATCHED.set(read);
}

/// Reads code bytes at `addr` into `buf`: the guest's own, where the host has patched code. Returns
/// the length of the readable prefix.
pub fn fetch_code(addr: u64, buf: &mut [u8]) -> usize {
    match READ_PATCHED.get() {
        Some(read) => read(addr, buf),
        None => copy_code(addr, buf),
    }
}

/// Reads code bytes at `addr` into `buf`, as they stand there; returns the length of the readable
/// prefix. Protection keys do not restrict it, because they do not restrict the processor's
/// instruction fetch.
pub fn copy_code(addr: u64, buf: &mut [u8]) -> usize {
    let len = copy_in(addr, buf);
    if len == buf.len() || !last_fault().is_denied_by_key() {
        return len;
    }
    protection_keys::with_all_rights(|| copy_in(addr, buf))
}

/// A signal handler for the tests of this crate. Like the real handler it honours [`fixup`].
#[cfg(test)]
pub(crate) mod test_handler {
    use super::*;
    use std::ops::Range;
    use std::sync::Once;

    thread_local! {
        /// Start and end of the host code that a test runs natively, and the address at which to
        /// continue after a fault in it.
        static RUNNING: Cell<(u64, u64, u64)> = const { Cell::new((0, 0, 0)) };
        static FAULTED_AT: Cell<u64> = const { Cell::new(0) };
    }

    /// From now on a fault of this thread in `code` continues at `landing`.
    pub fn expect_faults(code: Range<u64>, landing: u64) {
        RUNNING.set((code.start, code.end, landing));
        FAULTED_AT.set(0);
    }

    /// Where the expected fault happened, if it did.
    pub fn faulted_at() -> Option<u64> {
        Some(FAULTED_AT.get()).filter(|rip| *rip != 0)
    }

    fn expected(rip: u64) -> Option<u64> {
        let (start, end, landing) = RUNNING.get();
        let inside = (start..end).contains(&rip);
        inside.then(|| {
            FAULTED_AT.set(rip);
            landing
        })
    }

    extern "C" fn on_fault(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        // SAFETY: the kernel passes valid pointers to an SA_SIGINFO handler.
        let (info, context) = unsafe { (&*info, &mut *context.cast::<libc::ucontext_t>()) };
        let regs = &mut context.uc_mcontext.gregs;
        let rip = regs[libc::REG_RIP as usize] as u64;
        match crate::interp::fixup(rip).or_else(|| expected(rip)) {
            Some(landing) => {
                regs[libc::REG_RIP as usize] = landing as i64;
                note_fault(FaultInfo {
                    signal,
                    code: info.si_code,
                    // SAFETY: the signals for which the handler is installed carry an address.
                    addr: unsafe { info.si_addr() } as u64,
                    trapno: regs[libc::REG_TRAPNO as usize] as u64,
                    error: regs[libc::REG_ERR as usize] as u64,
                    cr2: regs[libc::REG_CR2 as usize] as u64,
                    ..FaultInfo::default()
                });
            }
            // SAFETY: plain system calls; the fault repeats with the default action and ends the
            // test.
            None => unsafe {
                libc::signal(signal, libc::SIG_DFL);
            },
        }
    }

    /// Installs the handler for the process, once.
    pub fn install() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP] {
                // SAFETY: the structure is plain data, and the handler only touches its own frame.
                unsafe {
                    let mut action: libc::sigaction = std::mem::zeroed();
                    action.sa_sigaction = on_fault as *const () as usize;
                    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
                    assert_eq!(libc::sigaction(signal, &action, std::ptr::null_mut()), 0);
                }
            }
        });
    }

    /// Two pages of which only the first can be accessed; returns the address of the first.
    pub fn page_then_hole() -> u64 {
        // SAFETY: a fresh anonymous mapping, of which the second half is then made inaccessible.
        unsafe {
            let p = libc::mmap(
                std::ptr::null_mut(),
                8192,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert_ne!(p, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(p.byte_add(4096), 4096, libc::PROT_NONE), 0);
            p as u64
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_and_stores_of_each_width() {
        let mut word = 0x8877_6655_4433_2211u64;
        let at = &raw mut word as u64;
        // SAFETY: the address is that of a live local variable.
        unsafe {
            assert_eq!(load::<u8>(at + 1), Ok(0x22));
            assert_eq!(load::<u16>(at + 1), Ok(0x3322));
            assert_eq!(load::<u32>(at + 2), Ok(0x6655_4433));
            assert_eq!(load::<u64>(at), Ok(0x8877_6655_4433_2211));
            assert_eq!(store(at, 0xaau8), Ok(()));
            assert_eq!(store(at + 2, 0xbbccu16), Ok(()));
            assert_eq!(store(at + 4, 0xdead_beefu32), Ok(()));
            assert_eq!(load::<u64>(at), Ok(0xdead_beef_bbcc_22aa));
            assert_eq!(compare_exchange(at, 1, 2), Ok(0xbbcc_22aa));
            assert_eq!(compare_exchange(at, 0xbbcc_22aa, 7), Ok(0xbbcc_22aa));
            assert_eq!(load::<u32>(at), Ok(7));
        }
    }

    #[test]
    fn a_fault_is_an_error_value_with_its_address() {
        test_handler::install();
        let page = test_handler::page_then_hole();
        // SAFETY: the pages are the test's own.
        unsafe {
            assert_eq!(load::<u64>(page + 4088), Ok(0));
            assert_eq!(load::<u64>(page + 4092), Err(Fault));
            assert_eq!(load::<u8>(page + 4096), Err(Fault));
            assert_eq!(last_fault().addr, page + 4096);
            assert_eq!(last_fault().signal, libc::SIGSEGV);
            assert_eq!(store(page + 4096, 1u16), Err(Fault));
            assert_eq!(compare_exchange(page + 4096, 0, 1), Err(Fault));
            assert_eq!(store(page + 4095, 1u8), Ok(()));
        }
    }

    #[test]
    fn bulk_copies_stop_at_the_hole() {
        test_handler::install();
        let page = test_handler::page_then_hole();
        // SAFETY: the pages are the test's own.
        assert_eq!(unsafe { copy_out_open(page + 4090, &[7; 10]) }, 6);
        let mut buf = [0; 10];
        assert_eq!(copy_in(page + 4090, &mut buf), 6);
        assert_eq!(buf, [7, 7, 7, 7, 7, 7, 0, 0, 0, 0]);
        assert_eq!(fetch_code(page + 4096, &mut buf), 0);
        assert_eq!(fetch_code(page + 4000, &mut buf), 10);
    }

    #[test]
    fn other_addresses_have_no_fixup() {
        assert_eq!(fixup(other_addresses_have_no_fixup as *const () as u64), None);
        assert_eq!(fixup(0), None);
    }
}
