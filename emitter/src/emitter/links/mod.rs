//! Links: how pieces of generated code lead to each other, and how everything that leads to one
//! piece is found again.
//!
//! A *link* is a jump whose destination may change at any time. It leads *out*, to code that goes
//! to the runtime, or to its *target*. What owns links can be *unlinked*: then all its links lead
//! out, and a thread inside comes to the runtime soon; when it is relinked they lead to their
//! targets again.
//!
//! ```text
//!                    target set            owner unlinked (signal, rest, removal)
//!   leads out  ◄──────────────►  leads to ──────────────────────► leads out, target kept
//!   (no target)  target gone     its target ◄────────────────────
//!                                          relinked as often as unlinked
//! ```
//!
//! | module | what it does |
//! | --- | --- |
//! | [`graph`] | operations that concern fragments and blocks: redirecting and severing links |
//! | [`passages`] | how an end enters a fragment that has borrowed other registers |
//! | [`resolve`] | resolved stubs of guards' exits; ends and exits that join the lists of places |
//! | [`verify`] | the verifier of all this |
//!
//! The links of blocks and the lists of places are in [`crate::blocks::places`], the jumps of one
//! fragment in [`crate::fragment`]. Only [`crate::cache::writer`] writes jumps.
//!
//! This module has the links that a fragment is made with and what is done with one fragment's
//! links. Which exit *may* lead where is the runtime's decision (its `fragments/links/policy.rs`).
//!
//! The direct end of a fragment that has *borrowed* registers has two links. One is the end of the
//! hot code, where the guest's values are still in their slots: it enters a fragment that would
//! save the same registers behind its saving, and any other fragment by a passage. Its way out is
//! to give the registers back; behind that is the second link, in canonical state.
//!
//! Data: none of its own. It changes a fragment's links, the places and links in
//! [`crate::blocks::Blocks`], and the tables of [`crate::transfers::lookup`]. Invariants: those of
//! [`verify::Rule`]. The caller holds the emitter; [`Emitter::unlink_for_signal`] and
//! [`Emitter::relink`] are async-signal-safe.
//!
//! Example: the trace at 0x1000 ends at 0x2000, where another trace begins. `link(end, second)`
//! sets the end's target to the second trace's entry, then writes the jump. A signal unlinks the
//! first trace: the jump leads to the end's stub; the thread comes out, and `relink` writes the
//! target again. The second trace rests: the target becomes the stub.

mod graph;
pub(crate) mod passages;
mod resolve;
pub mod verify;

use crate::codegen::encoded::Encoded;
use crate::codegen::mach::{Site, SiteKind};
use crate::emitter::{EmitError, Emitter};
use crate::fragment::{ExitId, FragmentId, Link, LinkKind};
use crate::transfers::indirect::Via;
use std::sync::atomic::AtomicU64;

impl Emitter {
    /// The patchable jumps of a fragment: back edges, trace ends, records.
    ///
    /// `way` says of a guard's site which record it has, and where its cold code is.
    pub(crate) fn links(
        &self,
        code: &Encoded,
        (hot, cold): (u64, u64),
        first_site: u32,
        way: impl Fn(Site) -> Option<(u32, u64)>,
    ) -> Box<[Link]> {
        let most =
            code.back_edges.len() + 2 * code.ends.len() + code.records.len() + code.guards.len();
        let mut links = Vec::with_capacity(most);
        let mut add = |kind, field, out, target| {
            links.push(Link { kind, field, out, target: AtomicU64::new(target) })
        };
        for (at, block) in &code.back_edges {
            let head = hot + u64::from(code.blocks[*block].1);
            // A loop without a poll cannot be left on request.
            let landing =
                code.polls.iter().find(|p| p.2 == *block).map_or(head, |p| cold + u64::from(p.1));
            add(LinkKind::BackEdge, hot + u64::from(*at), landing, head);
        }
        for end in &code.ends {
            let stub = cold + u64::from(code.unlinked_stub(end.site));
            let exit = ExitId(first_site + end.site);
            // An indirect end leads to its own tail, a direct one to its stub until it is linked.
            let target = end.tail.map_or(stub, |tail| hot + u64::from(tail));
            add(
                LinkKind::End(exit),
                if end.cold { cold } else { hot } + u64::from(end.at),
                stub,
                target,
            );
            if let Some((at, restored)) = end.borrowed {
                let restored = cold + u64::from(restored);
                add(LinkKind::Borrowed(exit), hot + u64::from(at), restored, restored);
            }
        }
        for r in &code.records {
            let out = r.out.map_or(self.stubs.leave_raw, |out| cold + u64::from(out));
            add(LinkKind::Record(r.record as u32), cold + u64::from(r.at), out, out);
        }
        for (guard, field) in code.guards.iter().filter_map(|g| Some((g, g.way_out?))) {
            if let Some((record, out)) = way(guard.site) {
                add(LinkKind::Guard(record), hot + u64::from(field), out, out);
            }
        }
        links.into()
    }

    /// Sets where a link of `fragment` leads while the fragment is linked.
    pub(crate) fn set_link(&self, fragment: FragmentId, link: &Link, target: u64) {
        self.fragments[fragment.0 as usize].lead(link, target, &self.cache);
    }

    fn find_link(&self, exit: ExitId, kind: LinkKind) -> Option<&Link> {
        self.fragment(self.exit(exit)?.fragment)?.links.iter().find(|l| l.kind == kind)
    }

    /// The link by which an exit leaves in canonical state, or from its record.
    pub(crate) fn link_of(&self, exit: ExitId) -> Option<&Link> {
        self.find_link(exit, self.exit(exit)?.record.map_or(LinkKind::End(exit), LinkKind::Record))
    }

    /// The link by which a direct end leaves with the guest's values in their slots.
    pub(crate) fn borrowed_link(&self, exit: ExitId) -> Option<&Link> {
        self.find_link(exit, LinkKind::Borrowed(exit))
    }

    /// Lets a trace's direct end continue in `target`, whose region is the end's target pc.
    pub fn link(&mut self, exit: ExitId, target: FragmentId) -> Result<(), EmitError> {
        let e = self.exit(exit).filter(|e| e.kind == SiteKind::End).ok_or(EmitError::Unknown)?;
        let (from, pc) = (e.fragment, e.target);
        let to = self.fragment(target).filter(|f| Some(f.pc) == pc).ok_or(EmitError::Unknown)?;
        if self.borrowed_link(exit).is_some() && !to.starts.is_counting {
            return self.link_borrowed(exit, target);
        }
        self.unlink_borrowed(exit);
        let entry = self.canonical_way(from, to);
        let link = self.link_of(exit).ok_or(EmitError::Unknown)?;
        self.set_link(from, link, entry);
        Ok(())
    }

    /// Makes a guard's exit go to `target`, which was compiled from this exit's state. The exits of
    /// all guards that share its anchor go there, too.
    pub fn attach(&self, exit: ExitId, target: FragmentId) -> Result<(), EmitError> {
        let e = self.exit(exit).filter(|e| e.kind == SiteKind::Guard).ok_or(EmitError::Unknown)?;
        let entry = self.fragment(target).ok_or(EmitError::Unknown)?.entry;
        let record = e.record.ok_or(EmitError::Unknown)?;
        self.links_of_record(e.fragment, record)
            .for_each(|link| self.set_link(e.fragment, link, entry));
        Ok(())
    }

    /// The links by which the sites of a record leave.
    pub(crate) fn links_of_record(
        &self,
        fragment: FragmentId,
        record: u32,
    ) -> impl Iterator<Item = &Link> {
        let links = self.fragment(fragment).map_or(&[][..], |f| &f.links);
        links.iter().filter(
            move |l| matches!(l.kind, LinkKind::Record(r) | LinkKind::Guard(r) if r == record),
        )
    }

    /// Lets indirect trace ends find `fragment` for its pc. A later fragment of the same pc
    /// replaces it.
    pub fn register_entry(&mut self, pc: u64, fragment: FragmentId) -> Result<(), EmitError> {
        let f = self.fragment(fragment).filter(|f| f.pc == pc).ok_or(EmitError::Unknown)?;
        let checked = f.checked.ok_or(EmitError::Unknown)?;
        self.blocks.forget_registered(pc);
        self.indirect.insert(Via::Memory, pc, checked);
        Ok(())
    }

    /// Indirect trace ends to `pc` go to the runtime again.
    pub fn forget_entry(&mut self, pc: u64) {
        self.indirect.remove(pc);
    }

    /// Makes an exit leave to the runtime again.
    pub fn unlink(&self, exit: ExitId) -> Result<(), EmitError> {
        let e = self.exit(exit).ok_or(EmitError::Unknown)?;
        match e.record {
            Some(record) => {
                self.links_of_record(e.fragment, record)
                    .for_each(|link| self.set_link(e.fragment, link, link.out));
            }
            None => {
                let link = self.link_of(exit).ok_or(EmitError::Unknown)?;
                self.set_link(e.fragment, link, link.out);
                self.unlink_borrowed(exit);
            }
        }
        Ok(())
    }

    /// Makes threads in a fragment leave at its next back edge or end, into the runtime, until
    /// [`Emitter::relink`] has been called as often as this. Async-signal-safe.
    pub fn unlink_for_signal(&self, fragment: FragmentId) {
        if let Some(f) = self.fragment(fragment) {
            f.unlink(&self.cache);
        }
    }

    /// Undoes [`Emitter::unlink_for_signal`]. Async-signal-safe.
    pub fn relink(&self, fragment: FragmentId) {
        if let Some(f) = self.fragment(fragment) {
            f.relink(&self.cache);
        }
    }

    /// Makes nothing lead to these fragments any more. The table of indirect jumps may still do so,
    /// until [`Emitter::forget_entry`].
    pub fn put_to_rest(&mut self, ids: &[FragmentId]) {
        for &id in ids {
            if let Some(fragment) = self.fragments.get_mut(id.0 as usize) {
                fragment.is_resting = true;
            }
        }
        self.sever(ids);
        for &id in ids {
            self.unlink_for_signal(id);
        }
    }

    /// A resting fragment can be run again.
    pub fn wake(&mut self, id: FragmentId) {
        if let Some(fragment) = self.fragments.get_mut(id.0 as usize) {
            fragment.is_resting = false;
        }
        self.relink(id);
    }

    /// A resting fragment that was [attached](Emitter::attach) to an exit can be run again, from
    /// there.
    ///
    /// # Errors
    /// There is no such exit or fragment.
    pub fn wake_attached(&mut self, exit: ExitId, id: FragmentId) -> Result<(), EmitError> {
        self.wake(id);
        self.attach(exit, id)
    }
}
