//! `ptrace` between processes that share memory, as LeakSanitizer does it: a companion stops its
//! maker's threads and looks at their registers.
//!
//! The kernel knows the registers of the translator. Where the tracer asks for the general
//! registers of a thread of the same memory that is not in native code, it gets the guest's, which
//! the thread keeps in its context. Everything else is the kernel's answer.

use crate::kernel::entry::Call;
use crate::kernel::process::guest_access::{guest_read, guest_write};
use crate::kernel::process::{Done, Engine, Registers, System};

/// Words of the kernel's `struct user_regs_struct` that have a number in `Registers::gpr`: r15 …
/// r8, rax, rcx, rdx, rsi, rdi.
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
/// Other words of it.
const RIP: usize = 16;
const FLAGS: usize = 18;
const BASES: usize = 21;
/// Its size in words.
const WORDS: usize = 27;

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
            let whole = WORDS * size_of::<u64>();
            let place = match request as libc::c_uint {
                libc::PTRACE_GETREGS => Ok((data, whole)),
                // `struct iovec`; the kernel has written how much there is.
                _ => guest_read::<16>(data)
                    .map(|vector| (word(&vector, 0), word(&vector, 1) as usize)),
            };
            // The kernel could write there.
            let _ = place.and_then(|(at, size)| put(&registers, at, size.min(whole)));
        }
        done
    }
}

/// Puts the registers among the first `size` bytes of the structure at `at`, which the kernel has
/// written.
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
