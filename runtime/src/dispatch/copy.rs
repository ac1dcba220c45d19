//! The copy tier: blocks of guest code as native code, and the interpreter for what cannot be copied.
//!
//! A stretch lasts until the runtime has to do something: a system call, a fault, a signal. Instructions that blocks
//! leave out are interpreted one by one; code in pages that stores may change is interpreted until it is left.

use super::Dispatcher;
use crate::interp::{BlockEntry, EdgeKind, Policy, Stop, Watch};
use crate::process;
use crate::signal;
use crate::syscall::{Outcome, System};
use dynasour_emitter::Left;
use dynasour_emitter::copy::Copied;
use dynasour_guest::ThreadContext;
use std::sync::atomic::Ordering;

/// Stops the interpreter where code begins that can be copied.
struct UntilCopyable;

impl Policy for UntilCopyable {
    type Stop = ();

    fn watch(&self) -> Watch {
        Watch::All
    }

    fn edge(&mut self, _: &ThreadContext, _: u64, to: &mut BlockEntry, _: EdgeKind) -> Option<()> {
        (!to.writable).then_some(())
    }
}

impl Dispatcher<'_> {
    /// One stretch of the copy tier.
    pub(super) fn copied(&mut self, context: &mut ThreadContext, system: &mut System) -> Outcome {
        let code = self.interp.code();
        let mut indirect = false;
        loop {
            if context.pending.load(Ordering::Relaxed) != 0 {
                return system.deliver_pending(context);
            }
            let Some(fragments) = &mut self.fragments else { return Outcome::Continue };
            let copied = match fragments.copy(context.rip, &*code, indirect) {
                Ok(copied) => copied,
                Err(error) if error.is_full() => {
                    self.overflowed();
                    indirect = false;
                    continue;
                }
                // Nothing that cannot be interpreted.
                Err(_) => Copied::Instruction,
            };
            let left = match copied {
                Copied::Entry(entry) => fragments.enter_copy(context, entry),
                Copied::Instruction => {
                    indirect = false;
                    match self.interp.run_one(context) {
                        None => continue,
                        Some(stop) => return self.stopped(context, system, stop),
                    }
                }
                Copied::Writable => {
                    indirect = false;
                    match self.interp.run(context, &mut UntilCopyable) {
                        Stop::Policy(()) => continue,
                        stop => return self.stopped(context, system, stop),
                    }
                }
            };
            indirect = false;
            match left {
                Left::Block(link) => context.rip = fragments.copy_exit(link).unwrap_or(context.rip),
                Left::Indirect => {
                    context.rip = context.next_pc;
                    indirect = true;
                }
                Left::Fault => {
                    if !fragments.copy_state(context, &*code) {
                        process::complain("internal error: a copied block faulted whose code has changed unnoticed");
                        signal::die(libc::SIGABRT);
                    }
                    if let Some(stop) = self.interp.run_one(context) {
                        return self.stopped(context, system, stop);
                    }
                }
                // Nothing ran, or a fragment left, of which this tier has none.
                Left::Aborted | Left::Exit(_) => {}
            }
        }
    }
}
