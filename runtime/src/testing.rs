//! Support for the tests of system calls and signals: a process that acts as the host of a guest
//! without code.
//!
//! Data: [`Machine`], a context, a [`System`], a stack, and [`Notes`] instead of the dispatcher.
//!
//! Invariant: a test that changes what belongs to the whole process (dispositions, masks, memory
//! layout) runs its body in a child made by [`in_child`]. No lock: the child has one thread unless
//! the test makes more.
//!
//! Example: `in_child(|| { let mut m = Machine::start(); m.handle(libc::SIGUSR1, 0, 0);
//! m.kill(libc::SIGUSR1); m.in_handler().unwrap_or(0) })` returns SIGUSR1.

use dynasour_guest::ThreadContext;
use dynasour_guest::space::Brk;

use std::ops::Range;

use crate::changes::Code;
use crate::kernel::process::Registers;
use crate::kernel::process::{Config, Engine, Inherited, Outcome, System};
use crate::kernel::process::{Ending, ThreadBody};
use crate::kernel::signal::{FaultHooks, sa};

/// A new context, and the system of a guest that runs `/bin/guest` and whose `execve` runs new
/// programs natively.
pub(crate) fn context_and_system() -> (Box<ThreadContext>, System) {
    let brk = Brk::new(0).expect("room for a break");
    let config = Config::alone(c"/bin/guest".to_owned(), brk);
    (ThreadContext::new(), System::new(Inherited::record(), config))
}

/// Hooks of a host without native code.
const NO_HOOKS: FaultHooks =
    FaultHooks { thunk: |_| None, fragment: |_| None, cache_end: |_| None, accepted: |_, _| None };

/// Makes the calling process, which must be a child made by [`in_child`], the host of a guest.
pub(crate) fn start(system: &mut System, context: &mut ThreadContext) {
    start_with(system, context, NO_HOOKS);
}

/// As [`start`], with these hooks.
pub(crate) fn start_with(system: &mut System, context: &mut ThreadContext, hooks: FaultHooks) {
    // SAFETY: both live until the child exits.
    unsafe { system.start(context, hooks) }.expect("memory for a stack");
}

/// Runs `body` in a forked child, because `body` changes the state of the whole process. Returns
/// the child's exit status, or 1000 plus the number of the signal that killed the child. The child
/// is killed after 20 seconds.
pub(crate) fn in_child(body: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child calls only `body`, which allocates at most (glibc's fork keeps malloc
    // usable), and `_exit`.
    unsafe {
        match libc::fork() {
            0 => {
                libc::alarm(20);
                let status =
                    std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(99);
                libc::_exit(status)
            }
            -1 => panic!("fork failed"),
            pid => {
                let mut status = 0;
                assert_eq!(libc::waitpid(pid, &mut status, 0), pid);
                if libc::WIFSIGNALED(status) {
                    1000 + libc::WTERMSIG(status)
                } else {
                    libc::WEXITSTATUS(status)
                }
            }
        }
    }
}

/// An engine for tests. It notes which of its methods were called, and runs vfork children and
/// threads by functions that the test supplies.
#[derive(Default)]
pub(crate) struct Notes {
    pub(crate) dropped: Vec<Range<u64>>,
    pub(crate) shared: bool,
    pub(crate) handled: bool,
    pub(crate) served: bool,
    pub(crate) forked: bool,
    pub(crate) reported: bool,
    pub(crate) child: Option<fn(&mut ThreadContext, &mut System) -> i32>,
    pub(crate) thread: Option<fn(&mut ThreadContext, &mut System) -> Ending>,
}

struct Body(fn(&mut ThreadContext, &mut System) -> Ending);

impl ThreadBody for Body {
    fn run(&mut self, context: &mut ThreadContext, system: &mut System) -> Ending {
        (self.0)(context, system)
    }

    fn park(self: Box<Self>) {}
}

impl Code for Notes {
    fn drop_code(&mut self, range: Range<u64>) {
        self.dropped.push(range);
    }
}

impl Engine for Notes {
    fn report(&mut self, _: &System) {
        self.reported = true;
    }

    fn private_memory_lost(&mut self) {
        self.shared = true;
    }

    fn faults_are_handled(&mut self) {
        self.handled = true;
    }

    fn faults_are_served(&mut self) {
        self.served = true;
    }

    fn after_fork_child(&mut self, _context: &ThreadContext) {
        self.forked = true;
    }

    fn run_vfork_child(&mut self, context: &mut ThreadContext, system: &mut System) -> ! {
        crate::kernel::process::exit(self.child.map_or(98, |child| child(context, system)))
    }

    fn vfork_child_gone(&mut self) {}

    fn call_threads(&mut self) {}

    fn registers_of(&self, _: i32) -> Option<Registers> {
        None
    }

    fn park(&self, _: i32) -> Option<i32> {
        None
    }

    fn is_parked(&self, _: i32) -> bool {
        false
    }

    fn unpark(&self, _: i32) {}

    fn new_thread(&mut self, _: &dyn Fn(Range<u64>)) -> Option<Box<dyn ThreadBody>> {
        self.thread.map(|thread| Box::new(Body(thread)) as Box<dyn ThreadBody>)
    }

    fn with_locks(&mut self, f: &mut dyn FnMut()) {
        f();
    }
}

/// A guest without code. The test makes its system calls by [`Machine::call`].
pub(crate) struct Machine {
    pub(crate) context: Box<ThreadContext>,
    pub(crate) system: System,
    pub(crate) engine: Notes,
    stack: Box<[u64; 8192]>,
}

/// The address behind the guest's `syscall` instruction.
pub(crate) const AFTER_SYSCALL: u64 = 0x1002;

impl Machine {
    /// Starts the guest. The caller runs in a child made by [`in_child`].
    pub(crate) fn start() -> Machine {
        let (mut context, mut system) = context_and_system();
        start(&mut system, &mut context);
        let mut machine =
            Machine { context, system, engine: Notes::default(), stack: Box::new([0; 8192]) };
        machine.context.gpr[4] = machine.stack.as_mut_ptr_range().end as u64 - 256;
        machine.context.gpr[3] = 0xb0b;
        machine
    }

    /// Makes a system call from the instruction before [`AFTER_SYSCALL`].
    pub(crate) fn call(&mut self, nr: libc::c_long, args: &[u64]) -> Outcome {
        self.context.rip = AFTER_SYSCALL;
        self.context.gpr[0] = nr as u64;
        for (&arg, register) in args.iter().zip([7, 6, 2, 10, 8, 9]) {
            self.context.gpr[register] = arg;
        }
        self.system.syscall(&mut self.context, &mut self.engine)
    }

    /// Makes a system call that no signal interrupts, and returns the result in rax.
    pub(crate) fn result(&mut self, nr: libc::c_long, args: &[u64]) -> i64 {
        assert_eq!(self.call(nr, args), Outcome::Continue);
        assert_eq!(self.context.rip, AFTER_SYSCALL);
        self.context.gpr[0] as i64
    }

    /// Installs a handler at `HANDLER + signo` with `flags` and SA_RESTORER.
    pub(crate) fn handle(&mut self, signo: i32, flags: u64, mask: u64) {
        let action = [HANDLER + signo as u64, flags | sa::RESTORER, RESTORER, mask];
        let args = [signo as u64, action.as_ptr() as u64, 0, 8];
        assert_eq!(self.result(libc::SYS_rt_sigaction, &args), 0);
    }

    /// The number of the signal whose handler is about to run, if one is.
    pub(crate) fn in_handler(&self) -> Option<i32> {
        self.context.rip.checked_sub(HANDLER).filter(|signo| *signo <= 64).map(|signo| signo as i32)
    }

    /// Sends a signal to this process by the guest's `kill`.
    pub(crate) fn kill(&mut self, signo: i32) -> Outcome {
        // `std` asks the kernel each time, so this is the pid of the forked child.
        let pid = std::process::id();
        self.call(libc::SYS_kill, &[pid.into(), signo as u64])
    }

    /// Returns from the handler: pops the return address as `ret` does, and makes the restorer's
    /// system call.
    pub(crate) fn sigreturn(&mut self) -> Outcome {
        self.context.gpr[4] += 8;
        self.call(libc::SYS_rt_sigreturn, &[])
    }
}

/// Handlers lie from this address on, one for each signal number.
pub(crate) const HANDLER: u64 = 0x4000_0000;
/// The address of the restorer.
pub(crate) const RESTORER: u64 = 0x4100_0000;
