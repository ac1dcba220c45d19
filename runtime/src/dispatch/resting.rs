//! Dispatchers of threads that have ended, for the next threads.

use super::Dispatcher;
use super::fragments::FragmentError;
use super::peers::Peer;
use crate::kernel::process::System;
use crate::kernel::process::{Ending, ThreadBody};
use dynasour_guest::ThreadContext;
use dynasour_tracer::AbortReason;
use std::sync::Arc;

/// A dispatcher that no thread uses.
pub struct Resting {
    pub dispatcher: Box<Dispatcher>,
    /// Its native code is in memory that is shared with the process that this one was forked from.
    is_parents: bool,
}

// SAFETY: what a dispatcher counts references to without atomics is its own: blocks, their IR, and
// the view of code through which they were made. They go from thread to thread together, and no
// thread keeps any of them.
unsafe impl Send for Resting {}

impl Resting {
    pub fn new(dispatcher: Dispatcher) -> Resting {
        Resting { dispatcher: Box::new(dispatcher), is_parents: false }
    }

    pub fn peer(&self) -> &Arc<Peer> {
        &self.dispatcher.peer
    }

    pub fn belong_to_parent(&mut self) {
        self.is_parents = true;
    }

    pub fn become_own(&mut self) -> Result<(), FragmentError> {
        if std::mem::take(&mut self.is_parents) {
            self.dispatcher.interp.unshare_after_fork()?;
        }
        Ok(())
    }
}

impl ThreadBody for Resting {
    fn run(&mut self, context: &mut ThreadContext, system: &mut System) -> Ending {
        let ended = self.dispatcher.run(context, system);
        self.dispatcher.publish();
        ended
    }

    fn rest(mut self: Box<Self>) {
        self.dispatcher.abandon(AbortReason::Signal);
        let machine = self.dispatcher.machine;
        machine.rest(*self);
    }
}
