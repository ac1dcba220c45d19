//! Signals end to end against the real kernel; each test runs in a process of its own.
//!
//! The guest has no code: the tests make its system calls by hand. "A handler runs" means that
//! `rip` is the handler's address and that the signal frame is on the stack.

use super::*;
use crate::kernel::process::Outcome;
use crate::kernel::signal::frame::{self, Returned};
use crate::kernel::signal::{
    GuestFault, die, kernel_action, kernel_mask, own_tid, set_kernel_mask,
};
use crate::testing::{AFTER_SYSCALL, Machine, RESTORER, in_child};

const USR1: i32 = libc::SIGUSR1;
const USR2: i32 = libc::SIGUSR2;
const ALRM: i32 = libc::SIGALRM;
const SEGV: i32 = libc::SIGSEGV;
const EINTR: i64 = -(libc::EINTR as i64);

/// Runs `body` with a machine in a child; a failed assertion is a status other than 0.
fn with_machine(body: impl FnOnce(&mut Machine)) {
    let status = in_child(|| {
        body(&mut Machine::start());
        0
    });
    assert_eq!(status, 0);
}

/// The frame of the handler about to run.
fn frame_of(machine: &Machine) -> ([u8; frame::SIZE], Returned) {
    // SAFETY: the stack pointer is at the frame that was just built.
    let bytes = unsafe { (machine.context.gpr[4] as *const [u8; frame::SIZE]).read() };
    (bytes, Returned::parse(&bytes))
}

/// Starts a one-shot timer that sends SIGALRM.
fn alarm_after(microseconds: i64) {
    let zero = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let timer = libc::itimerval {
        it_interval: zero,
        it_value: libc::timeval { tv_sec: 0, tv_usec: microseconds },
    };
    // SAFETY: reads the structure.
    assert_eq!(unsafe { libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut()) }, 0);
}

/// A pipe that stays empty.
fn empty_pipe() -> [i32; 2] {
    let mut ends = [0; 2];
    // SAFETY: writes two descriptors.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    ends
}

#[test]
fn a_handler_runs_and_returns() {
    with_machine(|m| {
        m.handle(USR1, sa::SIGINFO, set_of(USR2));
        m.context.xstate.0[160..176].fill(0x11);
        m.context.xstate.0[512] |= 2;
        m.context.rflags = 0xe93;
        let sp = m.context.gpr[4];
        assert_eq!(m.kill(USR1), Outcome::Continue);
        assert_eq!(m.in_handler(), Some(USR1));
        let (bytes, returned) = frame_of(m);
        // The state is that after the kernel's own delivery at the end of kill(2).
        assert_eq!((returned.gpr[0], returned.rip, returned.gpr[4]), (0, AFTER_SYSCALL, sp));
        assert_eq!(
            (returned.gpr[1], returned.gpr[11], returned.gpr[3]),
            (AFTER_SYSCALL, 0xe93, 0xb0b)
        );
        assert_eq!(returned.mask, 0);
        assert_eq!(u64::from_le_bytes(bytes[..8].try_into().expect("8")), RESTORER);
        assert_eq!(i32::from_le_bytes(bytes[312..316].try_into().expect("4")), USR1);
        let c = &m.context;
        assert_eq!(c.gpr[4] % 16, 8);
        assert!(c.gpr[4] < sp - 128 - 440 - 576);
        assert_eq!(
            (c.gpr[7], c.gpr[6], c.gpr[2], c.gpr[0]),
            (USR1 as u64, c.gpr[4] + 312, c.gpr[4] + 8, 0)
        );
        assert_eq!((c.rflags, c.xstate.0[160]), (0xa93, 0));
        assert_eq!(m.system.mask, set_of(USR1) | set_of(USR2));
        assert_eq!(kernel_mask(), m.system.mask);
        // A second signal waits until the handler returns.
        assert_eq!(m.kill(USR2), Outcome::Continue);
        assert_eq!(m.in_handler(), None);
        m.handle(USR2, 0, 0);
        assert_eq!(m.sigreturn(), Outcome::Continue);
        assert_eq!(m.in_handler(), Some(USR2));
        assert_eq!(m.context.xstate.0[160], 0);
        assert_eq!(m.sigreturn(), Outcome::Continue);
        let c = &m.context;
        assert_eq!((c.rip, c.gpr[4], c.gpr[3], c.rflags), (AFTER_SYSCALL, sp, 0xb0b, 0xe93));
        assert_eq!((c.xstate.0[160], m.system.mask, kernel_mask()), (0x11, 0, 0));
    });
}

#[test]
fn an_edited_frame_is_what_returns() {
    with_machine(|m| {
        m.handle(USR1, sa::SIGINFO, 0);
        assert_eq!(m.kill(USR1), Outcome::Continue);
        let bottom = m.context.gpr[4];
        let poke = |offset: u64, value: u64| {
            // SAFETY: inside the frame on the machine's stack.
            unsafe { ((bottom + offset) as *mut u64).write(value) }
        };
        poke(48 + 13 * 8, 0x1234); // rax
        poke(48 + 16 * 8, 0x5678); // rip
        poke(304, set_of(USR2)); // mask
        assert_eq!(m.sigreturn(), Outcome::Continue);
        assert_eq!(
            (m.context.gpr[0], m.context.rip, kernel_mask()),
            (0x1234, 0x5678, set_of(USR2))
        );
        // `rt_sigreturn` with an invalid frame raises SIGSEGV.
        m.context.gpr[4] = 0x10;
        assert_eq!(m.sigreturn(), Outcome::Killed(SEGV));
    });
}

#[test]
fn interrupted_calls_end_or_start_again() {
    with_machine(|m| {
        let [read_end, _] = empty_pipe();
        let mut byte = 0u8;
        let args = [read_end as u64, &raw mut byte as u64, 1];
        m.handle(ALRM, 0, 0);
        alarm_after(20_000);
        assert_eq!(m.call(libc::SYS_read, &args), Outcome::Continue);
        assert_eq!(m.in_handler(), Some(ALRM));
        assert_eq!(m.sigreturn(), Outcome::Continue);
        assert_eq!((m.context.gpr[0] as i64, m.context.rip), (EINTR, AFTER_SYSCALL));
        m.handle(ALRM, sa::RESTART, 0);
        alarm_after(20_000);
        assert_eq!(m.call(libc::SYS_read, &args), Outcome::Continue);
        assert_eq!(m.in_handler(), Some(ALRM));
        assert_eq!(m.sigreturn(), Outcome::Continue);
        assert_eq!((m.context.gpr[0] as i64, m.context.rip), (libc::SYS_read, AFTER_SYSCALL - 2));
        // `nanosleep` ends with EINTR after a handler, even with SA_RESTART.
        alarm_after(20_000);
        let time = [5i64, 0];
        assert_eq!(m.call(libc::SYS_nanosleep, &[time.as_ptr() as u64, 0]), Outcome::Continue);
        assert_eq!(m.sigreturn(), Outcome::Continue);
        assert_eq!((m.context.gpr[0] as i64, m.context.rip), (EINTR, AFTER_SYSCALL));
    });
}

/// A signal that arrives at any moment around a blocking call interrupts the call or comes before
/// it. The call never sleeps while the signal is pending.
#[test]
fn no_wake_up_is_lost() {
    with_machine(|m| {
        let [read_end, _] = empty_pipe();
        let mut byte = 0u8;
        m.handle(ALRM, 0, 0);
        let (mut before, mut during) = (0, 0);
        for round in 0..3000u64 {
            alarm_after(20 + (round % 40) as i64);
            for _ in 0..round % 600 {
                std::hint::black_box(round);
            }
            assert_eq!(
                m.call(libc::SYS_read, &[read_end as u64, &raw mut byte as u64, 1]),
                Outcome::Continue
            );
            assert_eq!(m.in_handler(), Some(ALRM));
            assert_eq!(m.sigreturn(), Outcome::Continue);
            match m.context.rip {
                AFTER_SYSCALL => during += 1,
                _ => before += 1,
            }
        }
        assert_eq!(before + during, 3000);
        assert!(during > 0);
    });
}

/// A signal that was accepted before the call keeps the call from being made. The handler runs
/// first, and its frame leads back to the `syscall` instruction.
#[test]
fn a_signal_in_the_window_diverts_the_call() {
    with_machine(|m| {
        m.handle(USR1, 0, 0);
        // Accept a signal outside of any call: the next call must not be made.
        let pid = std::process::id() as i32;
        // SAFETY: sends a signal that has a handler.
        unsafe { libc::kill(pid, USR1) };
        assert_eq!(m.context.pending.load(Ordering::Relaxed), 1);
        assert_eq!(kernel_mask(), !SYNCHRONOUS & !UNBLOCKABLE);
        let [read_end, _] = empty_pipe();
        let mut byte = 0u8;
        assert_eq!(
            m.call(libc::SYS_read, &[read_end as u64, &raw mut byte as u64, 1]),
            Outcome::Continue
        );
        assert_eq!(m.in_handler(), Some(USR1));
        assert_eq!(frame_of(m).1.rip, AFTER_SYSCALL - 2);
        assert_eq!(frame_of(m).1.gpr[0] as i64, libc::SYS_read);
    });
}

#[test]
fn temporary_masks() {
    with_machine(|m| {
        m.handle(USR1, 0, set_of(ALRM));
        let block = set_of(USR1) | set_of(USR2);
        let how = libc::SIG_SETMASK as u64;
        assert_eq!(m.result(libc::SYS_rt_sigprocmask, &[how, &raw const block as u64, 0, 8]), 0);
        assert_eq!(m.kill(USR1), Outcome::Continue);
        assert_eq!(m.in_handler(), None);
        let mut pending = 0u64;
        assert_eq!(m.result(libc::SYS_rt_sigpending, &[&raw mut pending as u64, 8]), 0);
        assert_eq!(pending, set_of(USR1));
        let temporary = set_of(libc::SIGCHLD) | set_of(SEGV);
        assert_eq!(
            m.call(libc::SYS_rt_sigsuspend, &[&raw const temporary as u64, 8]),
            Outcome::Continue
        );
        assert_eq!(m.in_handler(), Some(USR1));
        // The handler runs under the temporary mask and the mask of its action. After it the guest
        // has its old mask.
        assert_eq!(m.system.mask, temporary | set_of(USR1) | set_of(ALRM));
        assert_eq!(kernel_mask(), host_mask(m.system.mask));
        assert_eq!(frame_of(m).1.mask, block);
        assert_eq!(m.sigreturn(), Outcome::Continue);
        assert_eq!((m.context.gpr[0] as i64, m.system.mask), (EINTR, block));
        // ppoll and pselect6 do the same.
        assert_eq!(m.kill(USR1), Outcome::Continue);
        let args = [0, 0, 0, &raw const temporary as u64, 8];
        assert_eq!(m.call(libc::SYS_ppoll, &args), Outcome::Continue);
        assert_eq!(m.in_handler(), Some(USR1));
        assert_eq!(m.sigreturn(), Outcome::Continue);
        assert_eq!(m.context.gpr[0] as i64, EINTR);
        assert_eq!(m.kill(USR1), Outcome::Continue);
        let pair = [&raw const temporary as u64, 8];
        let args = [0, 0, 0, 0, 0, pair.as_ptr() as u64];
        assert_eq!(m.call(libc::SYS_pselect6, &args), Outcome::Continue);
        assert_eq!(m.in_handler(), Some(USR1));
        assert_eq!(m.sigreturn(), Outcome::Continue);
        // Nothing pending and a timeout: no signal, mask unchanged.
        let zero = [0i64, 0];
        let args = [0, 0, zero.as_ptr() as u64, &raw const temporary as u64, 8];
        assert_eq!(m.result(libc::SYS_ppoll, &args), 0);
        assert_eq!((m.system.signals.effective_mask(), kernel_mask()), (block, block));
    });
}

#[test]
fn synchronous_signals_that_somebody_sends() {
    with_machine(|m| {
        m.handle(SEGV, 0, 0);
        let block = set_of(SEGV);
        let args = |how: i32, set: &u64| [how as u64, std::ptr::from_ref(set) as u64, 0, 8];
        assert_eq!(m.result(libc::SYS_rt_sigprocmask, &args(libc::SIG_BLOCK, &block)), 0);
        assert_eq!(kernel_mask(), 0, "the six stay unblocked");
        assert_eq!(m.kill(SEGV), Outcome::Continue);
        assert_eq!(m.in_handler(), None);
        let mut pending = 0u64;
        assert_eq!(m.result(libc::SYS_rt_sigpending, &[&raw mut pending as u64, 8]), 0);
        assert_eq!(pending, block);
        assert_eq!(
            m.call(libc::SYS_rt_sigprocmask, &args(libc::SIG_UNBLOCK, &block)),
            Outcome::Continue
        );
        assert_eq!(m.in_handler(), Some(SEGV));
        assert_eq!(m.sigreturn(), Outcome::Continue);
        // Ignored, then default.
        let mut action = vec![SIG_IGN, 0, 0, 0];
        let install = [SEGV as u64, action.as_mut_ptr() as u64, 0, 8];
        assert_eq!(m.result(libc::SYS_rt_sigaction, &install), 0);
        assert_eq!(m.kill(SEGV), Outcome::Continue);
        action[0] = SIG_DFL;
        assert_eq!(m.result(libc::SYS_rt_sigaction, &install), 0);
        assert_eq!(m.kill(SEGV), Outcome::Killed(SEGV));
    });
}

#[test]
fn faults_of_the_guest() {
    with_machine(|m| {
        let fault = GuestFault {
            signo: SEGV,
            code: 1,
            addr: 0x77,
            trapno: 14,
            err: 6,
            cr2: Some(0x77),
            key: 0,
        };
        assert_eq!(m.system.raise(&mut m.context, fault), Outcome::Killed(SEGV));
        m.handle(libc::SIGBUS, 0, 0);
        assert!(!m.engine.handled);
        m.handle(SEGV, sa::SIGINFO | sa::RESETHAND, 0);
        assert!(m.engine.handled);
        m.context.rip = 0x9999;
        assert_eq!(m.system.raise(&mut m.context, fault), Outcome::Continue);
        assert_eq!(m.in_handler(), Some(SEGV));
        let (bytes, returned) = frame_of(m);
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8"));
        assert_eq!(
            (returned.rip, word(184) & 0x10000),
            (0x9999, 0x10000),
            "rip, and RF as in a fault's rflags"
        );
        assert_eq!((word(200), word(208), word(224)), (6, 14, 0x77), "err, trapno, cr2");
        assert_eq!((word(312) as i32, word(320) as i32, word(328)), (SEGV, 1, 0x77), "siginfo");
        // Blocked while its handler runs, and RESETHAND took the handler away.
        assert_eq!(m.system.raise(&mut m.context, fault), Outcome::Killed(SEGV));
        assert_eq!(m.system.process.action(SEGV).handler, SIG_DFL);
    });
}

#[test]
fn alternate_stacks() {
    with_machine(|m| {
        let mut stack = vec![0u8; 32768];
        let stack_t = [stack.as_mut_ptr() as u64, 0, stack.len() as u64];
        assert_eq!(m.result(libc::SYS_sigaltstack, &[stack_t.as_ptr() as u64, 0]), 0);
        m.handle(SEGV, sa::ONSTACK | sa::NODEFER, 0);
        let fault = GuestFault::protection(0);
        // The ordinary stack is unusable.
        m.context.gpr[4] = 0x20;
        assert_eq!(m.system.raise(&mut m.context, fault), Outcome::Continue);
        let sp = m.context.gpr[4];
        assert!(stack.as_ptr_range().contains(&(sp as *const u8)));
        assert_eq!(frame_of(m).1.stack.size, 32768);
        // Nested: further down the same stack, until it is full.
        assert_eq!(m.system.raise(&mut m.context, fault), Outcome::Continue);
        assert!(m.context.gpr[4] < sp);
        let mut outcome = Outcome::Continue;
        for _ in 0..40 {
            outcome = m.system.raise(&mut m.context, fault);
        }
        assert_eq!(outcome, Outcome::Killed(SEGV));
        // Without an alternate stack the frame cannot be stored, so SIGSEGV kills.
        m.handle(SEGV, 0, 0);
        m.context.gpr[4] = 0x20;
        assert_eq!(m.system.raise(&mut m.context, fault), Outcome::Killed(SEGV));
    });
}

#[test]
fn host_faults_are_fixed_up_or_reported() {
    with_machine(|_| {
        assert_eq!(crate::memory::copy_in(8, &mut [0; 4]), 0);
        assert_eq!(crate::memory::last_fault().addr, 8);
    });
    let status = in_child(|| {
        let _machine = Machine::start();
        // SAFETY: none: this is the bug that the handler is to report.
        unsafe { std::ptr::dangling::<u64>().cast::<u64>().byte_add(0x1000).read_volatile() as i32 }
    });
    assert_eq!(status, 1000 + SEGV);
    assert_eq!(in_child(|| die(libc::SIGFPE)), 1000 + libc::SIGFPE);
}

#[test]
fn what_is_inherited_is_recorded() {
    let status = in_child(|| {
        // SAFETY: dispositions and mask of this process.
        unsafe {
            libc::signal(libc::SIGPIPE, libc::SIG_IGN);
            libc::signal(libc::SIGFPE, libc::SIG_IGN);
        }
        set_kernel_mask(set_of(USR1) | set_of(libc::SIGBUS));
        let m = Machine::start();
        assert_eq!(m.system.mask, set_of(USR1) | set_of(libc::SIGBUS));
        assert_eq!(kernel_mask(), set_of(USR1));
        assert_eq!(m.system.process.action(libc::SIGPIPE).handler, SIG_IGN);
        assert_eq!(m.system.process.action(libc::SIGFPE).handler, SIG_IGN);
        assert_eq!(
            kernel_action(libc::SIGFPE).handler,
            crate::kernel::signal::host_entry::signal_entry()
        );
        assert_eq!(kernel_action(libc::SIGPIPE).handler, SIG_IGN);
        0
    });
    assert_eq!(status, 0);
}

/// A fault of the host kills the child at once, by the fault's signal and with a report. The thread
/// holds the lock of the code pages, which the handler of a guest's fault would take.
#[test]
fn a_fault_of_our_own_is_reported_while_its_thread_holds_a_lock() {
    let [reader, writer] = empty_pipe();
    let status = in_child(|| {
        let _machine = Machine::start();
        let pages = crate::changes::host::installed();
        // SAFETY: a new page that cannot be written to, and a copy of a descriptor.
        let page = unsafe {
            libc::dup2(writer, 2);
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, flags, -1, 0)
        };
        // SAFETY: none: the test makes the host fault, which is the bug to be reported.
        pages.while_locked(|| unsafe { page.cast::<u8>().write_volatile(1) });
        1
    });
    assert_eq!(status, 1000 + SEGV);
    let mut bytes = [0; 200];
    // SAFETY: reads into `bytes`; the writing end is closed, so it cannot wait.
    let len = unsafe {
        libc::close(writer);
        libc::read(reader, bytes.as_mut_ptr().cast(), bytes.len())
    };
    let report = String::from_utf8_lossy(&bytes[..len as usize]);
    assert!(report.starts_with("dynasour: internal error: signal 11 at 0x"), "{report}");
    assert!(report.contains("This is a bug of dynasour"), "{report}");
}

/// A blocked signal of the six that is sent to the process is held for all of its threads; one
/// that is sent to a thread is held for that thread.
#[test]
fn a_blocked_fault_signal_waits_for_the_process_or_the_thread() {
    with_machine(|m| {
        let synchronous = SYNCHRONOUS;
        m.result(libc::SYS_rt_sigprocmask, &[0, &raw const synchronous as u64, 0, 8]);
        assert_eq!(m.kill(SEGV), Outcome::Continue);
        assert_eq!((held::pending(), m.system.signals.accepted()), (set_of(SEGV), 0));
        let mut info = SigInfo([0; 128]);
        let wait = [&raw const synchronous as u64, &raw mut info as u64, 0, 8];
        assert_eq!(m.result(libc::SYS_rt_sigtimedwait, &wait), i64::from(SEGV));
        assert_eq!((info.code(), held::pending()), (libc::SI_USER, 0));
        let [pid, tid] = [u64::from(std::process::id()), own_tid() as u64];
        let sent = SigInfo::of_fault(SEGV, libc::SI_QUEUE, 7);
        let args = [pid, tid, SEGV as u64, &raw const sent as u64];
        assert_eq!(m.result(libc::SYS_rt_tgsigqueueinfo, &args), 0);
        assert_eq!((held::pending(), m.system.signals.accepted()), (0, set_of(SEGV)));
        assert_eq!(m.result(libc::SYS_rt_sigtimedwait, &wait), i64::from(SEGV));
        assert_eq!(info, sent);
    });
}
