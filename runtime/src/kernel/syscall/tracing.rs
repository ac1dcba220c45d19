//! `ptrace` between processes that share memory. LeakSanitizer uses it: a child that shares the
//! memory stops the threads of its parent and reads their registers.
//!
//! The kernel answers with the registers of the translator. If the tracer asks for the general
//! registers of a thread that shares its memory, and that thread is not in native code, this module
//! replaces them by the guest's registers in the thread's context. All other answers are the
//! kernel's.
//!
//! A thread must not be stopped while it holds a lock of the translator's, which the tracer needs,
//! too. So `PTRACE_ATTACH` and `PTRACE_INTERRUPT` return when the thread has stopped at a place
//! where it holds none: `dispatch/peers/parking.rs` has the protocol.
//!
//! No data. The traced thread is stopped while its context is read. [`Engine::registers_of`] takes
//! the lock of the list of threads; the caller holds no lock.
//!
//! Example: `PTRACE_GETREGS` of a thread stopped in a system call. The kernel fills the structure;
//! then the general registers, `rip`, the flags and the bases of FS and GS are overwritten.

use crate::kernel::entry::{self, Call};
use crate::kernel::process::guest_access::{guest_read, guest_write};
use crate::kernel::process::{Done, Engine, Registers, System};
use std::time::{Duration, Instant};

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
    pub(super) fn ptrace_call(&mut self, engine: &dyn Engine, call: &Call) -> Done {
        const NT_PRSTATUS: u64 = 1;
        let [request, tid, what, data, ..] = call.args;
        if let Some(stop) = Stop::of(request) {
            return self.stop(engine, call, stop);
        }
        let done = self.pass(call);
        if request == u64::from(libc::PTRACE_TRACEME) && done == Done::Value(0) {
            self.asked_for_tracer = true;
        }
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

/// A request that stops a thread.
#[derive(Clone, Copy)]
pub(super) enum Stop {
    Attach,
    Interrupt,
}

impl Stop {
    pub(super) fn of(request: u64) -> Option<Stop> {
        match request as libc::c_uint {
            libc::PTRACE_ATTACH => Some(Stop::Attach),
            libc::PTRACE_INTERRUPT => Some(Stop::Interrupt),
            _ => None,
        }
    }

    /// Stops a thread once more that runs again: by the signal or the request that has stopped it.
    fn again(self, pid: i32, tid: i32) -> bool {
        match self {
            Stop::Attach => raw(libc::SYS_tgkill, &[pid as u64, tid as u64, libc::SIGSTOP as u64]),
            Stop::Interrupt => ptrace(libc::PTRACE_INTERRUPT, tid, 0),
        }
    }

    /// Is it this stop that `waitid` has reported with the status `status`?
    fn has_made(self, status: i32) -> bool {
        match self {
            Stop::Attach => status == libc::SIGSTOP,
            Stop::Interrupt => status == libc::SIGTRAP | libc::PTRACE_EVENT_STOP << 8,
        }
    }
}

/// How long the tracer tries (guess). A thread that others have stopped, too, may never come to a
/// place where it holds no lock.
const PATIENCE: Duration = Duration::from_secs(2);

impl System {
    /// A request that stops a thread: waits until it is stopped at a place where it holds no lock.
    fn stop(&self, engine: &dyn Engine, call: &Call, stop: Stop) -> Done {
        let tid = call.args[1] as i32;
        let parking = if self.process.shares_memory() { engine.park(tid) } else { None };
        let done = self.pass(call);
        if let Some(pid) = parking {
            if done == Done::Value(0) {
                await_stop(engine, stop, pid, tid);
            }
            engine.unpark(tid);
        }
        done
    }
}

/// Waits until the thread is stopped, and lets it run on until it is stopped while it is parked or
/// asleep in a call of the guest's. The report of the last stop is left for the guest.
fn await_stop(engine: &dyn Engine, stop: Stop, pid: i32, tid: i32) {
    let start = Instant::now();
    let mut waits = false;
    while start.elapsed() < PATIENCE {
        if std::mem::replace(&mut waits, true) {
            std::thread::sleep(PAUSE);
        }
        let status = match peek(tid) {
            Seen::Runs => continue,
            Seen::Stopped(status) => status,
            Seen::Gone => return,
        };
        let is_ours = stop.has_made(status);
        let was_asleep =
            || host_registers(tid).is_some_and(|(rip, rax)| entry::was_asleep(rip, rax));
        if is_ours && (engine.is_parked(tid) || was_asleep()) {
            return;
        }
        // If another signal has come first, the thread takes it.
        let signal = if is_ours { 0 } else { status & 0x7f };
        let runs = ptrace(libc::PTRACE_CONT, tid, signal as u64);
        std::thread::sleep(PAUSE);
        if !runs || is_ours && !stop.again(pid, tid) {
            return;
        }
    }
}

/// The pause between two looks at a thread, and before it is stopped again (guess: longer than most
/// locks are held).
const PAUSE: Duration = Duration::from_micros(50);

/// What `waitid` says about a traced thread.
enum Seen {
    Runs,
    Stopped(i32),
    Gone,
}

/// Looks at a traced thread; the report of its stop stays.
fn peek(tid: i32) -> Seen {
    const FLAGS: i32 =
        libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT | libc::WNOHANG | libc::__WALL;
    // SAFETY: a `siginfo_t` of zeros is one without a signal.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let address = &raw mut info as u64;
    if !raw(libc::SYS_waitid, &[libc::P_PID as u64, tid as u64, address, FLAGS as u64]) {
        return Seen::Gone;
    }
    match info.si_code {
        // SAFETY: the kernel has filled `info` for a child.
        libc::CLD_TRAPPED | libc::CLD_STOPPED => Seen::Stopped(unsafe { info.si_status() }),
        0 => Seen::Runs,
        _ => Seen::Gone,
    }
}

/// `rip` and `rax` of a stopped thread; none if it is not stopped any more.
fn host_registers(tid: i32) -> Option<(u64, i64)> {
    let mut registers = [0u64; USER_REGS_WORDS];
    /// The index of the word of `rax` in `struct user_regs_struct`.
    const RAX: usize = 10;
    ptrace(libc::PTRACE_GETREGS, tid, registers.as_mut_ptr() as u64)
        .then(|| (registers[RIP], registers[RAX] as i64))
}

/// A `ptrace` of the host's own, without an address; has it succeeded?
fn ptrace(request: libc::c_uint, tid: i32, data: u64) -> bool {
    raw(libc::SYS_ptrace, &[u64::from(request), tid as u64, 0, data])
}

/// A system call about a traced thread that writes at most to a variable of the caller's; has it
/// succeeded?
fn raw(nr: i64, args: &[u64]) -> bool {
    // SAFETY: the callers pass numbers, or the address of a variable that is large enough.
    unsafe { entry::raw(&Call::new(nr, args)) == 0 }
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
