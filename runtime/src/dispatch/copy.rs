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

impl Dispatcher {
    /// One stretch of the copy tier, from interpreting on.
    pub(super) fn copied(&mut self, context: &mut ThreadContext, system: &mut System) -> Outcome {
        let code = self.interp.code();
        let mut indirect = false;
        loop {
            if context.pending.load(Ordering::Relaxed) != 0 {
                self.peer.leave();
                return system.deliver_pending(context);
            }
            let Some(mut fragments) = self.machine.fragments() else { return Outcome::Continue };
            let copied = match fragments.copy(context.rip, &*code, std::mem::take(&mut indirect)) {
                Ok(copied) => copied,
                Err(error) if error.is_full() => {
                    drop(fragments);
                    self.peer.leave();
                    self.overflowed();
                    return Outcome::Continue;
                }
                // Nothing that cannot be interpreted.
                Err(_) => Copied::Instruction,
            };
            let stop = match copied {
                Copied::Entry(entry) => {
                    let way = fragments.way_to_copy(entry);
                    self.peer.visit();
                    drop(fragments);
                    // SAFETY: `context` is this thread's, and GS points to it; the code is not flushed while this thread
                    // is in the cache.
                    let left = unsafe { way.run(context) };
                    let Some(mut fragments) = self.machine.fragments() else { return Outcome::Continue };
                    indirect = fragments.left_copy(left, context);
                    if left != Left::Fault {
                        drop(fragments);
                        if !self.peer.enter(context) {
                            return Outcome::Continue;
                        }
                        continue;
                    }
                    if !fragments.copy_state(context, &*code) {
                        process::complain("internal error: a copied block faulted whose code has changed unnoticed");
                        signal::die(libc::SIGABRT);
                    }
                    drop(fragments);
                    if !self.peer.enter(context) {
                        return Outcome::Continue;
                    }
                    self.interp.run_one(context)
                }
                Copied::Instruction => {
                    drop(fragments);
                    self.interp.run_one(context)
                }
                Copied::Writable => {
                    drop(fragments);
                    match self.interp.run(context, &mut UntilCopyable) {
                        Stop::Policy(()) => continue,
                        stop => {
                            self.peer.leave();
                            return self.stopped(context, system, stop);
                        }
                    }
                }
            };
            if let Some(stop) = stop {
                self.peer.leave();
                return self.stopped(context, system, stop);
            }
        }
    }
}
