//! Register allocation, by regalloc2.
//!
//! The registers that hold guest state which the version uses come first. All others are *borrowed*
//! when they are needed: saved at entry and restored at exits. The stack pointer is never
//! allocated: it keeps the guest's value, so that a signal finds the guest's stack. XMM registers hold values of
//! the version's own only where no original instruction in it names them; these are borrowed, too.
//!
//! Data: [`Allocator`], the buffers that regalloc2 uses again. Each compiling thread has its own;
//! no lock.

use super::CodegenError;
use crate::codegen::mach::{MFunc, preg, vector_preg};
use regalloc2::{Algorithm, MachineEnv, Output, PReg, RegallocOptions};
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

/// All general registers but the stack pointer.
const ALLOCATABLE: u16 = !(1 << 4);

/// The memory of the register allocator, which it uses again for the next version. Each thread that
/// compiles has its own.
#[derive(Default)]
pub struct Allocator(regalloc2::Ctx);

// SAFETY: all references to the context's arena are the context's own fields, so it can go from
// thread to thread as a whole.
unsafe impl Send for Allocator {}

impl Allocator {
    /// Allocates; `touched` are the registers with guest state of the version's own, `vectors` the XMM
    /// registers that no instruction names (bit n is register n).
    pub(super) fn run(
        &mut self,
        function: &MFunc,
        touched: u16,
        vectors: u16,
    ) -> Result<&Output, CodegenError> {
        let vectors = (0..16).filter(|n| vectors & 1 << n != 0).map(vector_preg).collect();
        let env = MachineEnv {
            preferred_regs_by_class: [registers(touched), vectors, Vec::new()],
            non_preferred_regs_by_class: [
                registers(!touched & ALLOCATABLE),
                Vec::new(),
                Vec::new(),
            ],
            scratch_by_class: [None; 3],
            fixed_stack_slots: Vec::new(),
        };
        let validate_ssa = cfg!(debug_assertions);
        let options =
            RegallocOptions { verbose_log: false, validate_ssa, algorithm: Algorithm::Ion };
        // regalloc2 panics when constraints cannot be met. That is a bug of ours, but no reason to
        // end a guest: the trace is given up. The memory is used again only after a run that did
        // not panic.
        let mut context = std::mem::take(&mut self.0);
        let mut run =
            || regalloc2::run_with_ctx(function, &env, &options, &mut context).map(|_| ());
        let done = if cfg!(debug_assertions) { Ok(run()) } else { quietly(run) };
        match done {
            Ok(done) => {
                self.0 = context;
                done.map(|()| &self.0.output).map_err(CodegenError::Registers)
            }
            Err(_) => Err(CodegenError::Allocator),
        }
    }
}

thread_local! {
    /// Is a panic of this thread expected, and caught?
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

/// From now on caught panics of the register allocator print nothing: standard error is the
/// guest's. Others are reported as before. Calls after the first do nothing.
pub fn silence_allocator() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let report = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !IS_QUIET.get() {
                report(info);
            }
        }));
    });
}

/// Runs `f`, which may panic; see [`silence_allocator`].
fn quietly<R>(f: impl FnOnce() -> R) -> std::thread::Result<R> {
    IS_QUIET.set(true);
    let done = panic::catch_unwind(AssertUnwindSafe(f));
    IS_QUIET.set(false);
    done
}

fn registers(set: u16) -> Vec<PReg> {
    (0..16).filter(|n| set & 1 << n != 0).map(preg).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn only_expected_panics_are_quiet() {
        const MESSAGE: &str = "a panic of this test";
        static REPORTED: AtomicU32 = AtomicU32::new(0);
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| match info.payload().downcast_ref::<&str>() {
            Some(&MESSAGE) => drop(REPORTED.fetch_add(1, Ordering::SeqCst)),
            // Another test's.
            _ => before(info),
        }));
        silence_allocator();
        assert!(quietly(|| std::panic::panic_any(MESSAGE)).is_err());
        assert_eq!(REPORTED.load(Ordering::SeqCst), 0);
        assert!(panic::catch_unwind(|| std::panic::panic_any(MESSAGE)).is_err());
        assert_eq!(REPORTED.load(Ordering::SeqCst), 1);
    }
}
