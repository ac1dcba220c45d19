//! Register allocation, by regalloc2.
//!
//! The registers that hold guest state of the version's own come first; all others are *borrowed*
//! when they are needed. The stack pointer is never allocated: it stays the guest's, so that a
//! signal finds the guest's stack.

use super::CodegenError;
use crate::codegen::mach::{MFunc, preg};
use regalloc2::{Algorithm, MachineEnv, Output, PReg, RegallocOptions};
use std::panic::{self, AssertUnwindSafe};

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
    /// Allocates; `touched` are the registers with guest state of the version's own (bit n is
    /// register n).
    pub(super) fn run(&mut self, function: &MFunc, touched: u16) -> Result<&Output, CodegenError> {
        let env = MachineEnv {
            preferred_regs_by_class: [registers(touched), Vec::new(), Vec::new()],
            non_preferred_regs_by_class: [registers(!touched & ALLOCATABLE), Vec::new(), Vec::new()],
            scratch_by_class: [None; 3],
            fixed_stack_slots: Vec::new(),
        };
        let validate_ssa = cfg!(debug_assertions);
        let options = RegallocOptions { verbose_log: false, validate_ssa, algorithm: Algorithm::Ion };
        // regalloc2 panics when constraints cannot be met. That is a bug of ours, but no reason to
        // end a guest: the trace is given up. The memory is used again only after a run that did
        // not panic.
        let mut context = std::mem::take(&mut self.0);
        let run = || regalloc2::run_with_ctx(function, &env, &options, &mut context).map(|_| ());
        match panic::catch_unwind(AssertUnwindSafe(run)) {
            Ok(done) => {
                self.0 = context;
                done.map(|()| &self.0.output).map_err(CodegenError::Registers)
            }
            Err(cause) if cfg!(debug_assertions) => panic::resume_unwind(cause),
            Err(_) => Err(CodegenError::Allocator),
        }
    }
}

fn registers(set: u16) -> Vec<PReg> {
    (0..16).filter(|n| set & 1 << n != 0).map(preg).collect()
}
