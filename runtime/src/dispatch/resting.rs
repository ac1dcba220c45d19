//! Dispatchers of threads that have ended, for the next threads.

use super::Dispatcher;
use super::fragments::FragmentError;
use super::peers::Peer;
use crate::kernel::process::{Ending, ThreadBody};
use crate::kernel::syscall::System;
use dynasour_guest::ThreadContext;
use dynasour_tracer::AbortReason;
use std::sync::Arc;

/// A dispatcher that no thread uses.
pub struct IdleDispatcher {
    pub dispatcher: Box<Dispatcher>,
    /// Its native code is in memory that is shared with the process that this one was forked from.
    is_shared_with_parent: bool,
}

// SAFETY: what a dispatcher counts references to without atomics is its own: blocks, their IR, and
// the view of code through which they were made. They go from thread to thread together, and no
// thread keeps any of them.
unsafe impl Send for IdleDispatcher {}

impl IdleDispatcher {
    pub fn new(dispatcher: Dispatcher) -> IdleDispatcher {
        IdleDispatcher { dispatcher: Box::new(dispatcher), is_shared_with_parent: false }
    }

    pub fn peer(&self) -> &Arc<Peer> {
        &self.dispatcher.peer
    }

    pub fn mark_shared_with_parent(&mut self) {
        self.is_shared_with_parent = true;
    }

    pub fn unshare(&mut self) -> Result<(), FragmentError> {
        if std::mem::take(&mut self.is_shared_with_parent) {
            self.dispatcher.interp.unshare_after_fork()?;
        }
        Ok(())
    }
}

impl ThreadBody for IdleDispatcher {
    fn run(&mut self, context: &mut ThreadContext, system: &mut System) -> Ending {
        let ended = self.dispatcher.run(context, system);
        self.dispatcher.publish_counts();
        ended
    }

    fn rest(mut self: Box<Self>) {
        self.dispatcher.abandon(AbortReason::Signal);
        let machine = self.dispatcher.machine;
        machine.keep_idle(*self);
    }
}
