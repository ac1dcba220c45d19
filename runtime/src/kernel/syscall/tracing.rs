//! `ptrace` between processes that share memory. LeakSanitizer uses it: a child that shares the
//! memory stops the threads of its parent and reads their registers.
//!
//! The kernel answers with the registers of the translator. If the tracer asks for the general
//! registers of a thread that shares its memory, and that thread is not in native code, this module
//! replaces them by the guest's registers in the thread's context. All other answers are the
//! kernel's.
//!
//! No data. The traced thread is stopped while its context is read. [`Engine::registers_of`] takes
//! the lock of the list of threads; the caller holds no lock.
//!
//! Example: `PTRACE_GETREGS` of a thread stopped in a system call. The kernel fills the structure;
//! then the general registers, `rip`, the flags and the bases of FS and GS are overwritten.

use crate::kernel::entry::Call;
use crate::kernel::process::guest_access::{guest_read, guest_write};
use crate::kernel::process::{Done, Engine, Registers, System};

/// The general registers: the index of the word in the kernel's `struct user_regs_struct`, and the
/// index in `Registers::gpr`. The order is r15, r14, r13, r12, rbp, rbx, r11 ... r8, rax, rcx, rdx,
/// rsi, rdi, rsp.
const NUMBERS: [(usize, usize); 16] = [
    (0, 15),
    (1, 14),
    (2, 13),
    (3, 12),
    (4, 5),
    (5, 3),
    (6, 11),
    (7, 10),
    (8, 9),
    (9, 8),
    (10, 0),
    (11, 1),
    (12, 2),
    (13, 6),
    (14, 7),
    (19, 4),
];
/// The index of the word of `rip` in `struct user_regs_struct` (sys/user.h).
const RIP: usize = 16;
/// The index of the word of the flags.
const FLAGS: usize = 18;
/// The index of the word of FS's base; the base of GS follows it.
const BASES: usize = 21;
/// The size of `struct user_regs_struct` in words of 8 bytes.
const USER_REGS_WORDS: usize = 27;

impl System {
    /// `ptrace`
    pub(super) fn ptrace_call(&self, engine: &dyn Engine, call: &Call) -> Done {
        const NT_PRSTATUS: u64 = 1;
        let [request, tid, what, data, ..] = call.args;
        let done = self.pass(call);
        let is_general = match request as libc::c_uint {
            libc::PTRACE_GETREGS => true,
            libc::PTRACE_GETREGSET => what == NT_PRSTATUS,
            _ => false,
        };
        if done != Done::Value(0) || !is_general || !self.process.shares_memory() {
            return done;
        }
        if let Some(registers) = engine.registers_of(tid as i32) {
            let whole = USER_REGS_WORDS * size_of::<u64>();
            let buffer = match request as libc::c_uint {
                libc::PTRACE_GETREGS => Ok((data, whole)),
                // `struct iovec`, in which the kernel has written how many bytes it filled.
                _ => guest_read::<16>(data)
                    .map(|vector| (word(&vector, 0), word(&vector, 1) as usize)),
            };
            // The kernel has just written there, so an error means that the buffer is gone.
            let _ = buffer.and_then(|(at, size)| put(&registers, at, size.min(whole)));
        }
        done
    }
}

/// Writes those registers that lie in the first `size` bytes of the `struct user_regs_struct` at
/// `at`, which the kernel has filled.
fn put(registers: &Registers, at: u64, size: usize) -> Result<(), i32> {
    let set = |word: usize, value: u64| match word * 8 {
        offset if offset < size => {
            guest_write(at.wrapping_add(offset as u64), &value.to_le_bytes())
        }
        _ => Ok(()),
    };
    NUMBERS.iter().try_for_each(|&(word, number)| set(word, registers.gpr[number]))?;
    let [fs_base, gs_base] = registers.bases;
    let others =
        [(RIP, registers.rip), (FLAGS, registers.rflags), (BASES, fs_base), (BASES + 1, gs_base)];
    others.into_iter().try_for_each(|(word, value)| set(word, value))
}

fn word(bytes: &[u8], n: usize) -> u64 {
    u64::from_le_bytes(bytes[8 * n..8 * n + 8].try_into().expect("eight bytes"))
}
