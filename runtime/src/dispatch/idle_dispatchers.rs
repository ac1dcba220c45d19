//! Dispatchers of threads that have ended, kept for the next threads.
//!
//! A dispatcher holds interpreted blocks and memory for native code, which are expensive to make.
//! Data: [`IdleDispatcher`], in the list of the [`Machine`](super::Machine), behind that list's
//! lock. A dispatcher that a thread runs is in no list.
//!
//! Example: a thread ends: [`ThreadBody::park`] puts its dispatcher into the list. The guest makes
//! another thread: [`Machine::dispatcher_for_thread`](super::Machine::dispatcher_for_thread) takes
//! it out again.

use super::Dispatcher;
use super::peers::Peer;
use crate::kernel::process::System;
use crate::kernel::process::{Ending, ThreadBody};
use dynasour_guest::ThreadContext;
use dynasour_tracer::AbortReason;
use std::sync::Arc;

/// The dispatcher of a thread that has ended, or of a new thread before and while it runs.
pub struct IdleDispatcher {
    pub dispatcher: Box<Dispatcher>,
}

// SAFETY: a dispatcher owns every `Rc` that it holds (to blocks, to their IR, and to the view of
// code through which they were made). All clones of these move from thread to thread together with
// it, and no thread keeps one.
unsafe impl Send for IdleDispatcher {}

impl IdleDispatcher {
    pub fn new(dispatcher: Dispatcher) -> IdleDispatcher {
        IdleDispatcher { dispatcher: Box::new(dispatcher) }
    }

    pub fn peer(&self) -> &Arc<Peer> {
        &self.dispatcher.peer
    }

    /// In a forked child: the interpreter's memory is shared with the parent.
    pub fn inherit(&mut self) {
        self.dispatcher.interp.inherit();
    }
}

impl ThreadBody for IdleDispatcher {
    fn run(&mut self, context: &mut ThreadContext, system: &mut System) -> Ending {
        let ended = self.dispatcher.run(context, system);
        self.dispatcher.publish_counts();
        ended
    }

    fn park(mut self: Box<Self>) {
        self.dispatcher.abandon(AbortReason::Signal);
        self.dispatcher.rests.clock_begins_again();
        let machine = self.dispatcher.machine;
        machine.keep_idle(*self);
    }
}
