//! Resolved stubs: how a guard's exit goes on natively, and how ends and stubs join the lists of
//! places.
//!
//! A guard leaves with the guest's values wherever its fragment keeps them. A *resolved stub*, a
//! fragment without guest instructions ([`crate::codegen::exit_entry`]), performs the exit's
//! deferred stores, moves the values home, and ends in canonical state at the exit's target. Its
//! end is linked like that of a trace:
//! * to a version of the region at the target; if the target is computed, after a comparison with
//!   the region's pc;
//! * to the tables of indirect transfers;
//! * to a place, the body of a block, or a counter before that.
//!
//! The stub is linked first and [attached](Emitter::attach) last, so that no thread finds it half
//! made. All guards that share an anchor share the link.
//!
//! A stub is compiled without the lock, like a trace: [`StubRequest`](crate::emitter::StubRequest)
//! says what is needed, and [`Emitter::lead_exit`] places the code, links it and lets the exit lead
//! there.
//!
//! Data: none of its own. Invariant: an end in the list of a place has the target that the place
//! says. The caller holds the emitter, and sees to progress (`policy.rs` of the runtime).
//!
//! Example: a guard at 0x1000 leaves to 0x1080 with rax in rbx. Its stub is `mov rax, rbx; jmp <the
//! place of 0x1080>`.

use crate::blocks::Counted;
use crate::blocks::places::{BODY, FOREIGN, Link};
use crate::codegen::mach::SiteKind;
use crate::emitter::compile::{CompiledStub, StubTarget};
use crate::emitter::{EmitError, Emitter};
use crate::fragment::{ExitId, FragmentId, FragmentRole, set_target};

impl Emitter {
    /// Places a resolved stub, links its end, and lets its exit continue in it. Returns the stub, a
    /// fragment of its own.
    ///
    /// # Errors
    /// There is no room, everything was dropped since the request was made, or what the stub leads
    /// to has been dropped. The exit stays as it is.
    pub fn lead_exit(&mut self, stub: CompiledStub) -> Result<FragmentId, EmitError> {
        let CompiledStub { exit, to, epoch, code } = stub;
        if epoch != self.epoch {
            return Err(EmitError::Stale);
        }
        let place = match (to, self.exit(exit).and_then(|e| e.target)) {
            (StubTarget::Place | StubTarget::Block | StubTarget::CountedBlock(_), Some(pc)) => {
                self.blocks.place(pc)
            }
            _ => 0,
        };
        let is_copied = self.blocks.places.get(place as usize).is_some_and(|p| p.block != 0);
        if matches!(to, StubTarget::Block | StubTarget::CountedBlock(_)) && !is_copied {
            return Err(EmitError::Unknown);
        }
        let stub = self.publish(code)?;
        self.fragments[stub.0 as usize].role = FragmentRole::Stub;
        match to {
            StubTarget::Fragment(target) | StubTarget::FragmentIf(target) => {
                let end = self.end_of(stub)?;
                self.link(end, target)?;
            }
            StubTarget::Tables => {}
            StubTarget::Place => self.link_to(self.end_of(stub)?, place | FOREIGN)?,
            StubTarget::Block => self.link_to(self.end_of(stub)?, place | FOREIGN | BODY)?,
            StubTarget::CountedBlock(threshold) => {
                let end = self.end_of(stub)?;
                self.link_to_counter(end, exit, place, threshold)?;
            }
        }
        self.attach(exit, stub)?;
        Ok(stub)
    }

    /// Lets the end of a stub lead to a counter and then to the block of its place; to the block if
    /// there is no room for a counter.
    fn link_to_counter(
        &mut self,
        end: ExitId,
        exit: ExitId,
        place: u32,
        threshold: u64,
    ) -> Result<(), EmitError> {
        let pc = self.exit(exit).and_then(|e| e.target).ok_or(EmitError::Unknown)?;
        let counted = Counted::Exit(exit, pc);
        let Some(entry) = self.blocks.counter(place, counted, threshold, &mut self.cache)? else {
            return self.link_to(end, place | FOREIGN | BODY);
        };
        let field = self.link_of(end).ok_or(EmitError::Unknown)?.field;
        let target = self.blocks.base + u64::from(entry);
        set_target(&self.fragments, field, target, &self.cache);
        Ok(())
    }

    /// The direct end of a stub.
    pub(crate) fn end_of(&self, stub: FragmentId) -> Result<ExitId, EmitError> {
        let exits = self.fragments[stub.0 as usize].exits.clone();
        exits
            .map(ExitId)
            .find(|e| self.exits[e.0 as usize].kind == SiteKind::End)
            .ok_or(EmitError::Unknown)
    }

    /// Lets a trace's direct end continue where links to its target lead, now and later. That makes
    /// the target a head.
    pub fn link_end(&mut self, exit: ExitId) -> Result<(), EmitError> {
        let e = self.exit(exit).filter(|e| e.kind == SiteKind::End).ok_or(EmitError::Unknown)?;
        let pc = e.target.ok_or(EmitError::Unknown)?;
        let place = self.blocks.place(pc);
        self.link_to(exit, place | FOREIGN)?;
        if self.blocks.heads.are_counted() {
            self.blocks.found_head(place, false);
            self.blocks.count_found(&mut self.cache, &self.fragments);
            self.register_moved();
        }
        Ok(())
    }

    /// Makes a trace's end a link to `place`, if the place has code.
    pub(crate) fn link_to(&mut self, exit: ExitId, place: u32) -> Result<(), EmitError> {
        let link = self.link_of(exit).ok_or(EmitError::Unknown)?;
        let (field, out, before) = (link.field, link.out, link.target());
        let base = self.blocks.base;
        let link = Link::new((field - base) as u32, (out - base) as u32, place);
        let target = self.blocks.target(&link);
        if before == target || target == out {
            return Ok(());
        }
        // An end that was linked to one fragment is in no list.
        if let Some(number) = self.blocks.foreign_link(place, link.field) {
            self.blocks.links[number as usize].place = place;
        } else {
            let number = self.blocks.links.len() as u32;
            self.blocks.links.push(link);
            self.blocks.join(number);
        }
        set_target(&self.fragments, field, target, &self.cache);
        if let Some(fragment) = self.fragment_at(target) {
            self.enter_borrowed(exit, fragment);
        }
        Ok(())
    }

    /// As [`Emitter::link_borrowed`]. If there is no room for a passage, the end enters in
    /// canonical state.
    pub(crate) fn enter_borrowed(&mut self, end: ExitId, fragment: FragmentId) {
        if self.link_borrowed(end, fragment).is_err() {
            self.unlink_borrowed(end);
        }
    }
}
