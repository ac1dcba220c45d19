//! `int 0x80`: system calls by their numbers in the kernel's i386 table. 64-bit programs may make
//! them, too.
//!
//! The guest's arguments are the lower halves of rbx, rcx, rdx, rsi, rdi and rbp. The result is in
//! rax, all 64 bits of it; no other register changes.
//!
//! * Most calls are made as they are, by an `int 0x80` of the host in a window
//!   ([`entry::windowed_32`]). Guest and host share the address space, so the kernel itself
//!   converts the structures and checks the guest's pointers (`Treatment::Kernel`).
//! * Calls about state that the translator emulates (signals, mappings, threads, programs, its own
//!   files in `/proc`) become the 64-bit calls that [`System`] emulates: with the same arguments
//!   (`Treatment::Same`), or by a conversion in [`files`], [`memory`], [`processes`] or [`signals`]
//!   (`Treatment::Own`).
//! * The few others fail with ENOSYS, and a message on stderr says why once per call
//!   (`Treatment::Refused`).
//!
//! Data: the constant [`table`], and the set of refused calls that have been reported.
//!
//! Invariant: an address of the host is never an argument of a call by a 32-bit number, because the
//! kernel would lose its upper half. Calls with converted structures are 64-bit calls.
//!
//! The dispatcher calls [`System::syscall_32`] on the guest's thread, without locks.
//!
//! Example: `stat64` (195) is made as it is, and the kernel writes the i386 layout into the guest's
//! buffer; if the path is `/proc/self/exe`, `files::stat64` opens the guest's executable and makes
//! `fstat64` (197) instead.

mod files;
mod memory;
mod outputs;
mod processes;
mod signals;
mod table;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use dynasour_guest::ThreadContext;

use crate::changes::hiding;
use crate::kernel::entry::{self, Call};
use crate::kernel::process::complain;
use crate::kernel::process::guest_access::{guest_read, guest_write};
use crate::kernel::process::seccomp::ARCHITECTURE_32;
use crate::kernel::process::{Done, Engine, Outcome, System};
use crate::kernel::signal::GuestFault;
use table::Treatment;

/// The bytes of the instruction `int 0x80`.
const INT_80: [u8; 2] = [0xcd, 0x80];

/// Whether the instruction at `pc` is a 32-bit system call.
pub(crate) fn is_at(pc: u64) -> bool {
    let mut bytes = [0; INT_80.len()];
    crate::memory::fetch_code(pc, &mut bytes) == bytes.len() && bytes == INT_80
}

/// A 32-bit word of the guest's; the error is an errno.
fn word(address: u64) -> Result<u32, i32> {
    guest_read(address).map(u32::from_le_bytes)
}

/// `N` adjacent 32-bit words of the guest's; the error is an errno.
fn words<const N: usize>(address: u64) -> Result<[u32; N], i32> {
    let mut words = [0; N];
    for (n, slot) in words.iter_mut().enumerate() {
        *slot = word(address.wrapping_add(4 * n as u64))?;
    }
    Ok(words)
}

/// Writes adjacent 32-bit words; the error is an errno.
fn write_words(address: u64, words: &[u32]) -> Result<(), i32> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    guest_write(address, &bytes)
}

/// How a call ended that was handled by a function whose errors are errnos.
fn done(result: Result<Done, i32>) -> Done {
    result.unwrap_or_else(Done::error)
}

/// Prints why the call `nr` is refused, the first time.
fn report_refused(nr: u32, name: &str, reason: &str) {
    /// Call numbers that have a bit each (guess: more than the table has). A call with a larger
    /// number is reported each time.
    const NUMBERS: usize = 512;
    static REPORTED: [AtomicU64; NUMBERS / 64] = [const { AtomicU64::new(0) }; NUMBERS / 64];
    let bit = 1 << (nr % 64);
    let before =
        REPORTED.get(nr as usize / 64).map_or(0, |bits| bits.fetch_or(bit, Ordering::Relaxed));
    if before & bit == 0 {
        complain(&format!("32-bit system call {name} ({nr}, int 0x80): not supported: {reason}"));
    }
}

/// Whether the kernel has 32-bit calls at all. `None`: it was not asked, because a signal must be
/// delivered first.
fn is_available() -> Option<bool> {
    const GETPID: u64 = 20;
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    if let Some(&available) = AVAILABLE.get() {
        return Some(available);
    }
    // SAFETY: `getpid` has no arguments and changes nothing.
    match unsafe { entry::windowed_32(&Call { nr: GETPID, args: [0; 6] }) } {
        entry::NOT_ENTERED => None,
        result => Some(*AVAILABLE.get_or_init(|| result != entry::NO_CALLS_32)),
    }
}

impl System {
    /// Performs the 32-bit system call at `pc`, as [`System::syscall`] performs others.
    pub(crate) fn syscall_32(
        &mut self,
        context: &mut ThreadContext,
        engine: &mut dyn Engine,
        pc: u64,
    ) -> Outcome {
        // It is not known what 32-bit calls read.
        hiding::stop();
        let done = match is_available() {
            Some(true) => {
                let g = &context.gpr;
                let args = [g[3], g[1], g[2], g[6], g[7], g[5]].map(|r| u64::from(r as u32));
                let call = Call { nr: u64::from(g[0] as u32), args };
                let kept = (g[1], g[11]);
                context.rip = pc + INT_80.len() as u64;
                let done = match self.screen(context, &call, ARCHITECTURE_32) {
                    Some(done) => done,
                    None => self.perform_32(context, engine, &call),
                };
                if done == Done::Registers {
                    (context.gpr[1], context.gpr[11]) = kept;
                }
                done
            }
            Some(false) => {
                context.rip = pc;
                return self.raise(context, GuestFault::protection(entry::MISSING_GATE_ERROR));
            }
            None => Done::Restart,
        };
        match done {
            Done::Value(value) => context.gpr[0] = value as u64,
            Done::Restart => context.rip = pc,
            Done::Registers | Done::Outcome(Outcome::Continue) => {}
            Done::Outcome(outcome) => return outcome,
        }
        self.after_call(context)
    }

    fn perform_32(
        &mut self,
        context: &mut ThreadContext,
        engine: &mut dyn Engine,
        call: &Call,
    ) -> Done {
        let nr = call.nr as u32;
        match table::treatment(nr) {
            Treatment::Kernel => self.pass_32(engine, call),
            Treatment::Same(same) => {
                let call = Call { nr: same as u64, args: call.args };
                self.perform_writing(context, engine, &call)
            }
            Treatment::Own(handler) => handler(self, context, engine, call),
            Treatment::Refused(reason) => refuse(nr, table::name(nr), reason),
        }
    }

    /// Has the kernel perform a 32-bit call with the guest's number and arguments. Write-protected
    /// pages of code to which the call may write are open during the call.
    fn pass_32(&self, engine: &mut dyn Engine, call: &Call) -> Done {
        let pages = self.process.pages();
        let _outputs = pages
            .announces_outputs()
            .then(|| pages.announce_written(engine, outputs::outputs(call.nr as u32, &call.args)));
        // `with_held_pending` knows 64-bit numbers only. Each 32-bit call is treated as one that
        // may read a signalfd, which costs two more system calls where the guest has one.
        let may_read = libc::SYS_read as u64;
        // SAFETY: the guest's own call; calls that would touch the translator do not come here.
        match self.with_held_pending(may_read, self.mask, || unsafe { entry::windowed_32(call) }) {
            entry::NOT_ENTERED => Done::Restart,
            value => Done::Value(value),
        }
    }

    /// Performs the 64-bit call `nr` for a 32-bit one.
    fn perform_64(
        &mut self,
        context: &mut ThreadContext,
        engine: &mut dyn Engine,
        nr: i64,
        args: &[u64],
    ) -> Done {
        self.perform_writing(context, engine, &Call::new(nr, args))
    }
}

/// Fails with ENOSYS and, the first time, a message.
fn refuse(nr: u32, name: &str, reason: &str) -> Done {
    report_refused(nr, name, reason);
    Done::error(libc::ENOSYS)
}
