//! Two signals at instructions all over a delivery that finds none at first: neither may be lost. A
//! debugger places them, because by chance they come there once in a million times.
//!
//! The child stops before and after each delivery. The first one is single-stepped, to count its
//! instructions; each further one up to another place, where the first signal comes. The second one
//! is sent as soon as the kernel delivers the first.

use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};

use crate::kernel::process::Outcome;
use crate::testing::Machine;

/// Places of a delivery at which the signals come.
const PLACES: usize = 60;
const SIGNAL: Signal = Signal::SIGUSR1;

/// The child. Returns its exit status.
fn deliver_in_rounds() -> i32 {
    ptrace::traceme().expect("the parent traces");
    let mut machine = Machine::start();
    machine.handle(SIGNAL as i32, 0, 0);
    let mut handled = 0;
    let mut deliver = |handled: &mut usize| {
        machine.context.rip = 0;
        assert_eq!(machine.system.deliver_pending(&mut machine.context), Outcome::Continue);
        while machine.in_handler() == Some(SIGNAL as i32) {
            *handled += 1;
            assert_eq!(machine.sigreturn(), Outcome::Continue);
        }
    };
    for place in 0..=PLACES {
        nix::sys::signal::raise(Signal::SIGSTOP).expect("it stops");
        deliver(&mut handled);
        nix::sys::signal::raise(Signal::SIGSTOP).expect("it stops");
        // A signal that came after the delivery.
        deliver(&mut handled);
        if handled != 2 * place {
            eprintln!("{handled} signals were handled after those at place {place} of {PLACES}");
            return 1;
        }
    }
    0
}

/// Lets the child run to its next SIGSTOP; the error is its exit status. The `extra` signals are
/// sent to it one after the other, whenever the one before is delivered.
fn run_to_stop(child: Pid, mut extra: usize) -> Result<(), i32> {
    let mut passed_on = None;
    loop {
        ptrace::cont(child, passed_on).expect("it goes on");
        match waitpid(child, None).expect("a child") {
            WaitStatus::Stopped(_, Signal::SIGSTOP) => return Ok(()),
            WaitStatus::Stopped(_, signal) => {
                if extra > 0 {
                    extra -= 1;
                    kill(child, SIGNAL).expect("it lives");
                }
                passed_on = Some(signal);
            }
            WaitStatus::Exited(_, status) => return Err(status),
            status => panic!("{status:?}"),
        }
    }
}

/// Single-steps the child until its next SIGSTOP, or `most` instructions. Returns their number.
fn step(child: Pid, most: usize) -> usize {
    (0..most)
        .find(|_| {
            ptrace::step(child, None).expect("it goes on");
            match waitpid(child, None).expect("a child") {
                WaitStatus::Stopped(_, Signal::SIGTRAP) => false,
                WaitStatus::Stopped(_, Signal::SIGSTOP) => true,
                status => panic!("{status:?}"),
            }
        })
        .unwrap_or(most)
}

#[test]
fn two_signals_at_any_place_of_a_delivery_both_arrive() {
    // SAFETY: the child calls only the code under test, and exits.
    let child = match unsafe { fork() }.expect("a child") {
        ForkResult::Child => {
            let status = std::panic::catch_unwind(deliver_in_rounds).unwrap_or(99);
            // SAFETY: ends the child.
            unsafe { libc::_exit(status) }
        }
        ForkResult::Parent { child } => child,
    };
    waitpid(child, None).expect("it stops before the first delivery");
    ptrace::setoptions(child, ptrace::Options::PTRACE_O_EXITKILL).expect("it is traced");
    let instructions = step(child, usize::MAX);
    assert!(instructions > PLACES, "{instructions} instructions");
    for place in 0..PLACES {
        run_to_stop(child, 0).expect("it stops before each delivery");
        let steps = instructions * place / PLACES;
        assert_eq!(step(child, steps), steps);
        kill(child, SIGNAL).expect("it lives");
        run_to_stop(child, 1).expect("it stops after each delivery");
    }
    assert_eq!(run_to_stop(child, 0), Err(0));
}
