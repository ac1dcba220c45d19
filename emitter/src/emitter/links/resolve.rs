//! Resolved stubs: how a guard's exit goes on natively, and how ends and stubs join the lists of
//! places.
//!
//! A guard leaves with the guest's values wherever its fragment keeps them. A *resolved stub*, a
//! fragment without guest instructions ([`crate::codegen::exit_entry`]), performs the exit's
//! deferred stores, moves the values home, and ends in canonical state at the exit's target. Its
//! end is linked like that of a trace:
//! * to a version of the region at the target ([`Emitter::link_exit`]); if the target is computed,
//!   after a comparison with the region's pc ([`Emitter::link_exit_if`]);
//! * to the tables of indirect transfers ([`Emitter::link_indirect_exit`]);
//! * to a place, the body of a block, or a counter before that ([`Emitter::link_exit_to_copy`]).
//!
//! The stub is linked first and [attached](Emitter::attach) last, so that no thread finds it half
//! made. All guards that share an anchor share the link.
//!
//! A stub is compiled while the caller holds the emitter, unlike a trace: it has no guest
//! instruction, only moves, stores and a comparison.
//!
//! Data: none of its own. Invariant: an end in the list of a place has the target that the place
//! says. The caller holds the emitter, and sees to progress (`policy.rs` of the runtime).
//!
//! Example: a guard at 0x1000 leaves to 0x1080 with rax in rbx. Its stub is `mov rax, rbx; jmp <the
//! place of 0x1080>`.

use crate::blocks::Counted;
use crate::blocks::places::{BODY, FOREIGN, Link};
use crate::codegen::exit_entry;
use crate::codegen::mach::SiteKind;
use crate::emitter::{EmitError, Emitter};
use crate::fragment::{ExitId, FragmentId, FragmentRole, set_target};

impl Emitter {
    /// Lets a guard's exit continue in `target`, the canonical fragment of the exit's target pc, by
    /// a resolved stub. Returns the stub, a fragment of its own. Deferred stores are performed
    /// there.
    pub fn link_exit(&mut self, exit: ExitId, target: FragmentId) -> Result<FragmentId, EmitError> {
        let pc = self.exit(exit).and_then(|e| e.target).ok_or(EmitError::Unknown)?;
        self.fragment(target).filter(|f| f.pc == pc).ok_or(EmitError::Unknown)?;
        let (stub, end) = self.resolved(exit, pc)?;
        self.link(end, target)?;
        self.attach(exit, stub)?;
        Ok(stub)
    }

    /// As [`Emitter::link_exit`], for an exit whose target is computed: when it is not where
    /// `target` starts, the stub leaves by a guard of its own, in the exit's state.
    pub fn link_exit_if(
        &mut self,
        exit: ExitId,
        target: FragmentId,
    ) -> Result<FragmentId, EmitError> {
        self.exit(exit).filter(|e| e.target.is_none()).ok_or(EmitError::Unknown)?;
        let pc = self.fragment(target).ok_or(EmitError::Unknown)?.pc;
        let stub = self.resolve(exit, pc, Some(pc))?;
        let end = self.end_of(stub)?;
        self.link(end, target)?;
        self.attach(exit, stub)?;
        Ok(stub)
    }

    /// Compiles the resolved stub of an exit to `pc`. Returns the stub and its end.
    pub(crate) fn resolved(
        &mut self,
        exit: ExitId,
        pc: u64,
    ) -> Result<(FragmentId, ExitId), EmitError> {
        let stub = self.resolve(exit, pc, None)?;
        Ok((stub, self.end_of(stub)?))
    }

    /// The direct end of a stub.
    pub(crate) fn end_of(&self, stub: FragmentId) -> Result<ExitId, EmitError> {
        let exits = self.fragments[stub.0 as usize].exits.clone();
        exits
            .map(ExitId)
            .find(|e| self.exits[e.0 as usize].kind == SiteKind::End)
            .ok_or(EmitError::Unknown)
    }

    /// Lets a guard's exit whose target is computed look it up like an indirect trace end, in a
    /// resolved stub.
    pub fn link_indirect_exit(&mut self, exit: ExitId) -> Result<FragmentId, EmitError> {
        let e = self.exit(exit).filter(|e| e.target.is_none()).ok_or(EmitError::Unknown)?;
        let pc = self.fragment(e.fragment).ok_or(EmitError::Unknown)?.pc;
        let stub = self.resolve(exit, pc, None)?;
        self.attach(exit, stub)?;
        Ok(stub)
    }

    /// Compiles the resolved stub of an exit; see [`exit_entry::stub`].
    pub(crate) fn resolve(
        &mut self,
        exit: ExitId,
        pc: u64,
        only: Option<u64>,
    ) -> Result<FragmentId, EmitError> {
        let (fragment, record) = self.warm_record(exit)?;
        let live = fragment.extended_live;
        let (version, places) =
            exit_entry::stub(pc, record, only, fragment.touched, fragment.end_of_slots);
        let stub = self.compile_at(&version, &places, live)?;
        self.fragments[stub.0 as usize].role = FragmentRole::Stub;
        Ok(stub)
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

    /// Lets a guard's exit continue in a resolved stub, and from there where links to its target
    /// lead. If `block` is set it continues in the target's block, which must have been copied.
    /// With a threshold it is counted, and continues in the block, too. Returns the stub.
    pub fn link_exit_to_copy(
        &mut self,
        exit: ExitId,
        block: bool,
        threshold: Option<u64>,
    ) -> Result<FragmentId, EmitError> {
        let pc = self.exit(exit).and_then(|e| e.target).ok_or(EmitError::Unknown)?;
        let place = self.blocks.place(pc);
        if (block || threshold.is_some()) && self.blocks.places[place as usize].block == 0 {
            return Err(EmitError::Unknown);
        }
        let (stub, end) = self.resolved(exit, pc)?;
        let counter = match threshold {
            Some(n) => self.blocks.counter(place, Counted::Exit(exit, pc), n, &mut self.cache)?,
            None => None,
        };
        match counter {
            Some(entry) => {
                let link = self.link_of(end).ok_or(EmitError::Unknown)?;
                let (field, target) = (link.field, self.blocks.base + u64::from(entry));
                set_target(&self.fragments, field, target, &self.cache);
            }
            None => {
                let body = if block || threshold.is_some() { BODY } else { 0 };
                self.link_to(end, place | FOREIGN | body)?;
            }
        }
        self.attach(exit, stub)?;
        Ok(stub)
    }
}
