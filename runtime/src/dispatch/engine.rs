//! What a system call asks of the dispatcher of the thread that makes it: the traits [`Code`] and
//! [`Engine`].
//!
//! Data: none of its own. The thread is outside guest code, so that it may wait for other threads;
//! it holds no lock of the dispatcher's. (A child made by vfork runs here as well, with the
//! dispatcher of its suspended parent: [`Engine::run_vfork_child`].)
//!
//! Example: munmap removes a page of code. [`Code::drop_code`] finds that the page was read, and
//! has every thread drop what was made from it.

use super::compiling::Compilations;
use super::select::NO_FRAGMENT;
use super::{Dispatcher, in_place::InPlace};
use crate::changes::{Code, patches};
use crate::kernel::process::Moved;
use crate::kernel::process::Registers;
use crate::kernel::process::{self, ThreadBody};
use crate::kernel::process::{Engine, System};
use crate::kernel::signal::{self, gate};
use crate::observe::events;
use dynasour_guest::ThreadContext;
use dynasour_tracer::AbortReason;
use std::ops::Range;

impl Code for Dispatcher {
    fn drop_code(&mut self, range: Range<u64>) {
        self.machine.call_sites.take_back(&range);
        let read = self.machine.footprint.forget(&range);
        self.forget_blocks(&range);
        if read || self.machine.fragments().is_some_and(|f| f.is_made_from(&range)) {
            self.machine.invalidate(&self.peer, &range);
        }
    }
}

impl Engine for Dispatcher {
    fn make_room(&mut self, range: &Range<u64>) -> Vec<Moved> {
        let left = self.machine.leave_direct_for(&self.peer, range);
        self.abandon(AbortReason::Flushed);
        let moved = self.machine.make_room(&self.peer, range);
        if moved.is_some() {
            self.interp.for_each_entry(|entry| entry.user = NO_FRAGMENT);
        }
        left.into_iter().chain(moved).collect()
    }

    fn report(&mut self, system: &System) {
        if let Some(fragments) = self.machine.fragments() {
            fragments.verify_all_links();
        }
        // Writing the report may raise SIGPIPE or SIGXFSZ. Neither may change how the guest ends,
        // so all signals are blocked meanwhile.
        gate::with_all_blocked(|| self.write_report(system));
    }

    fn private_memory_lost(&mut self) {
        // The reason may be a second thread, which is about to start. Code that is to be dropped
        // goes first, since the new thread must not find it. From then on the new thread may guard
        // pages while this one is in a system call.
        self.drop_written();
        self.machine.pages.set_threaded();
        patches::set_shared();
        if self.machine.lose_private_memory() {
            self.flush();
        }
    }

    fn faults_are_handled(&mut self) {
        if self.machine.name_transfers() {
            self.abandon(AbortReason::Flushed);
            // Another thread's flush, if one is under way, may have begun before this request, so
            // it is not enough to wait for that one.
            self.machine.drop_all(&self.peer);
            self.forget_fragments();
        }
    }

    fn faults_are_served(&mut self) {
        self.machine.peers.faults_are_served();
    }

    fn after_fork_child(&mut self, context: &ThreadContext) {
        events::disconnect();
        if !self.copies_blocks() {
            self.selector.leave_heads_uncounted();
        }
        self.peer.attach();
        self.in_place = InPlace::default();
        self.selector.traces.dispatch.clear();
        self.abandon(AbortReason::Flushed);
        self.effort.restart();
        self.forget_race(context);
        self.compilations = Compilations::default();
        self.interp.for_each_entry(|entry| entry.user = NO_FRAGMENT);
        self.interp.inherit();
        if let Err(error) = self.machine.after_fork_child(&self.peer) {
            process::complain(&format!("cannot make a code cache for a forked child: {error}"));
            signal::die(libc::SIGABRT);
        }
    }

    fn run_vfork_child(&mut self, context: &mut ThreadContext, system: &mut System) -> ! {
        self.run_child_of_vfork(context, system)
    }

    fn registers_of(&self, tid: i32) -> Option<Registers> {
        self.machine.peers.registers_of(tid)
    }

    fn park(&self, tid: i32) -> Option<i32> {
        self.machine.peers.park(tid)
    }

    fn is_parked(&self, tid: i32) -> bool {
        self.machine.peers.is_parked(tid)
    }

    fn unpark(&self, tid: i32) {
        self.machine.peers.unpark(tid);
    }

    fn call_threads(&mut self) {
        self.machine.peers.call_process(&self.peer);
    }

    fn vfork_child_gone(&mut self) {
        self.vfork_child_is_gone();
    }

    fn new_thread(&mut self, protect: &dyn Fn(Range<u64>)) -> Option<Box<dyn ThreadBody>> {
        let idle = self.machine.dispatcher_for_thread().ok()?;
        idle.dispatcher.interp.reserved().into_iter().for_each(protect);
        Some(Box::new(idle))
    }

    fn with_locks(&mut self, f: &mut dyn FnMut()) {
        self.machine.with_locks(f);
    }
}
