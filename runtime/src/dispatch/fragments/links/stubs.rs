//! Resolved stubs: an exit is led on natively by code that the dispatcher compiles without the
//! lock.
//!
//! ```text
//!   with the lock      want_stub: is it allowed? what code generation needs is copied (StubWork)
//!   without            StubWork::compile
//!   with the lock      install_stub: is it still allowed? the exit's state changes, the stub is
//!                      placed and linked, and the exit leads to it
//! ```
//!
//! In between the exit's state stays as it was, so other threads go on to count it. If anything
//! that a compilation may rely on went away (`generation`), the stub is dropped: the exit comes to
//! the runtime again.
//!
//! Data: [`Fragments`] keeps at most one [`StubWork`], from `want_stub` until the dispatcher takes
//! it under the same lock. Invariants: an exit's state is changed before its code is written; a
//! stub leads only where [`policy::allowed`](super::policy::allowed) says when it is installed.
//!
//! Example: a guard to 0x1080 has come to the runtime 16 times. `want_stub` copies the record of
//! the exit, the stub is compiled (`mov rax, rbx` and a jump), and `install_stub` makes the exit
//! `Counted`.

use super::exits::{Event, Stub};
use super::policy::Destination;
use crate::dispatch::fragments::Fragments;
use crate::dispatch::validation;
use dynasour_emitter::codegen::Allocator;
use dynasour_emitter::{CodegenError, CompiledStub, ExitId, FragmentId, StubRequest, StubTarget};

/// A resolved stub that is to be compiled without the lock.
#[derive(Debug)]
pub struct StubWork {
    event: Event,
    to: Destination,
    generation: u64,
    request: StubRequest,
}

impl StubWork {
    /// Compiles the stub.
    ///
    /// # Errors
    /// Its stores may need a register too many.
    pub fn compile(&self, allocator: &mut Allocator) -> Result<CompiledStub, CodegenError> {
        self.request.compile(allocator)
    }

    /// Compares the stub with the record of its exit, with `--verify-traces`. Does not return if they
    /// disagree.
    pub fn verify(&self, stub: &CompiledStub) {
        validation::stub_or_end(self.request.exit(), self.request.verify(stub));
    }
}

impl Fragments {
    /// Asks the dispatcher for a resolved stub that leads an exit to `to`, if that is allowed. The
    /// exit's state is to change by `event`.
    pub(super) fn want_stub(
        &mut self,
        exit: ExitId,
        event: Event,
        to: Destination,
        target: StubTarget,
    ) {
        if self.may_become(exit, event, to)
            && let Ok(request) = self.emitter.stub_request(exit, target)
        {
            let generation = self.generation;
            self.wanted_stub = Some(StubWork { event, to, generation, request });
        }
    }

    fn may_become(&self, exit: ExitId, event: Event, to: Destination) -> bool {
        self.exits.can(exit, event)
            && self.origin(exit).is_some_and(|origin| self.may_lead(origin, to))
    }

    /// Lets an exit to `pc` lead to a version of the region there.
    pub(super) fn link_to_version(&mut self, exit: ExitId, pc: u64, next: FragmentId) {
        let to = Destination::Fragment(pc, self.rank(next));
        self.want_stub(exit, Event::Link, to, StubTarget::Fragment(next));
    }

    /// Lets an exit with a computed target look it up.
    pub(super) fn link_to_tables(&mut self, exit: ExitId) {
        self.want_stub(exit, Event::Link, Destination::Tables, StubTarget::Tables);
    }

    /// The stub that is wanted. The dispatcher takes it before it releases the lock.
    pub fn take_wanted_stub(&mut self) -> Option<StubWork> {
        self.wanted_stub.take()
    }

    /// Lets the exit lead through its stub, if that is still wanted. True if the cache is full.
    pub fn install_stub(
        &mut self,
        work: &StubWork,
        compiled: Result<CompiledStub, CodegenError>,
    ) -> bool {
        let &StubWork { event, to, generation, ref request } = work;
        let (exit, target) = (request.exit(), request.target());
        if self.retired || generation != self.generation || !self.may_become(exit, event, to) {
            return false;
        }
        if let StubTarget::Fragment(next) | StubTarget::FragmentIf(next) = target
            && !self.is_successor(exit, to, next)
        {
            return false;
        }
        self.exits.change(exit, event);
        match compiled.map_err(Into::into).and_then(|stub| self.emitter.lead_exit(stub)) {
            Ok(stub) => {
                self.stats.stubs += 1;
                self.note_stub(stub, exit);
                match target {
                    StubTarget::Fragment(next) | StubTarget::FragmentIf(next) => {
                        self.tell_linked(exit, next);
                    }
                    _ => self.tell_linked_to_place(exit),
                }
                let to_body = matches!(to, Destination::Body(_));
                self.exits.add_stub(stub, Stub { origin: exit, to_body });
                self.links_changed();
                if self.logs.code {
                    eprintln!(
                        "dynasour: stub of {exit:?}\n{}",
                        self.emitter.listing(stub).unwrap_or_default()
                    );
                }
                false
            }
            // Without a stub the exit goes on to come to the runtime.
            Err(error) => {
                self.exits.change(exit, Event::Unlinked);
                error.is_full()
            }
        }
    }

    /// Is `next` still what an exit may lead to?
    fn is_successor(&self, exit: ExitId, to: Destination, next: FragmentId) -> bool {
        let Destination::Fragment(pc, _) = to else { return false };
        self.origin(exit).is_some_and(|origin| self.successor(exit, origin, pc) == Some(next))
    }
}
