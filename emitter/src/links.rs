//! How fragments lead to each other, and how everything that leads into one is found again.
//!
//! A *link* is a jump whose rel32 field may be written at any time. It leads *out*, to code of its own fragment that
//! goes to the runtime, or to an *entry* of a fragment. A fragment has several entries: one in canonical state, one behind
//! its saving of registers, one behind its loading of the extended state.
//!
//! The direct end of a fragment that has *borrowed* registers has two links. One is the end of the hot code, where the
//! guest's values are still in their slots: it enters fragments that would save the same registers in the same slots
//! behind that, and others by a *passage*, a fragment of a few moves which belongs to the fragment that it leads to. Its
//! way out is to give the registers back; behind that is the second link, in canonical state.
//!
//! Invariant: a link leads out, or to an entry of a fragment. So [`Emitter::sever`], which makes
//! nothing lead into some fragments and their passages any more, looks for those addresses, whoever has made the links.

use crate::codegen::encoded::Encoded;
use crate::codegen::exit_entry;
use crate::codegen::mach::{Site, SiteKind};
use crate::codegen::passage::passage;
use crate::emitter::{EmitError, Emitter};
use crate::fragment::{Borrowed, Exit, ExitId, Fragment, FragmentId, Link, LinkKind};
use crate::indirect::Via;
use dynasour_ir::AnchorId;
use rustc_hash::FxHashSet;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// What a passage is for: whence, with which registers in slots and the extended state loaded or not, and where to.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Way {
    restores: Borrowed,
    live: bool,
    to: FragmentId,
}

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
        let most = code.back_edges.len() + 2 * code.ends.len() + code.records.len() + code.guards.len();
        let mut links = Vec::with_capacity(most);
        let mut add = |kind, field, out, target| links.push(Link { kind, field, out, target: AtomicU64::new(target) });
        for (at, block) in &code.back_edges {
            let head = hot + u64::from(code.blocks[*block].1);
            // A loop without a poll cannot be left on request.
            let landing = code.polls.iter().find(|p| p.2 == *block).map_or(head, |p| cold + u64::from(p.1));
            add(LinkKind::BackEdge, hot + u64::from(*at), landing, head);
        }
        for end in &code.ends {
            let stub = cold + u64::from(code.unlinked_stub(end.site));
            let exit = ExitId(first_site + end.site);
            // An indirect end goes to its own lookup, a direct one to whom it is linked.
            let target = end.tail.map_or(stub, |tail| hot + u64::from(tail));
            add(LinkKind::End(exit), if end.cold { cold } else { hot } + u64::from(end.at), stub, target);
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

    /// Sets where a link of `fragment` leads, from when the fragment is linked at all.
    fn set_link(&self, fragment: FragmentId, link: &Link, target: u64) {
        link.target.store(target, Ordering::Relaxed);
        if self.fragments[fragment.0 as usize].unlinked.load(Ordering::Relaxed) == 0 {
            self.cache.patch_rel32(link.field, target);
        }
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
        if self.borrowed_link(exit).is_some() {
            return self.link_borrowed(exit, target);
        }
        let entry = self.canonical_way(from, to);
        let link = self.link_of(exit).ok_or(EmitError::Unknown)?;
        self.set_link(from, link, entry);
        Ok(())
    }

    /// Where a fragment is entered from an end of another that has given back its registers, or borrowed none.
    fn canonical_way(&self, from: FragmentId, to: &Fragment) -> u64 {
        let live = self.fragment(from).is_some_and(|from| from.extended_live);
        match (to.saves.is_empty(), live) {
            (false, _) => to.entry,
            (true, false) => to.inside.0,
            (true, true) => to.inside.1,
        }
    }

    /// Lets a direct end with borrowed registers, if this is one, continue in `target` with the guest's values in their
    /// slots. Where it leads after giving them back stays as it is.
    pub(crate) fn link_borrowed(&mut self, exit: ExitId, target: FragmentId) -> Result<(), EmitError> {
        let from = self.exit(exit).ok_or(EmitError::Unknown)?.fragment;
        if self.borrowed_link(exit).is_none() {
            return Ok(());
        }
        let entry = self.way_into(from, target)?;
        if let Some(link) = self.borrowed_link(exit) {
            self.set_link(from, link, entry);
        }
        Ok(())
    }

    /// A direct end with borrowed registers, if this is one, gives them back and leads where its canonical jump does.
    pub(crate) fn unlink_borrowed(&self, exit: ExitId) {
        if let Some((e, link)) = self.exit(exit).zip(self.borrowed_link(exit)) {
            self.set_link(e.fragment, link, link.out);
        }
    }

    /// Where the end of one fragment enters another: behind its saving of registers if all of them, and no others, are
    /// saved there already; else a passage moves those that differ.
    fn way_into(&mut self, from: FragmentId, to: FragmentId) -> Result<u64, EmitError> {
        let (a, b) = (self.fragment(from).ok_or(EmitError::Unknown)?, self.fragment(to).ok_or(EmitError::Unknown)?);
        let live = a.extended_live;
        let inside = if live { b.inside.1 } else { b.inside.0 };
        if a.restores.iter().all(|pair| b.saves.contains(pair)) && a.restores.len() == b.saves.len() {
            return Ok(inside);
        }
        let way = Way { restores: a.restores.clone(), live, to };
        let id = match self.passages.get(&way) {
            Some(id) => *id,
            None => {
                let id = self.passage(&way)?;
                self.passages.insert(way, id);
                id
            }
        };
        let passage = &self.fragments[id.0 as usize];
        for link in passage.links.iter().filter(|l| matches!(l.kind, LinkKind::Borrowed(_))) {
            self.set_link(id, link, inside);
        }
        Ok(passage.entry)
    }

    /// Makes a passage. Its only exit is for whoever is to come out on the way.
    fn passage(&mut self, way: &Way) -> Result<FragmentId, EmitError> {
        let b = self.fragment(way.to).ok_or(EmitError::Unknown)?;
        let (pc, saves, end_of_slots) = (b.pc, b.saves.clone(), b.end_of_slots);
        let without = |all: &Borrowed, others: &Borrowed| -> Borrowed {
            all.iter().filter(|pair| !others.contains(pair)).copied().collect()
        };
        let (give_back, borrow) = (without(&way.restores, &saves), without(&saves, &way.restores));
        let first_site = self.exits.len() as u32;
        let code = passage(&give_back, &borrow, &saves);
        let mark = self.cache.mark();
        let placed = self.put_code(&code, first_site, None);
        let (hot, cold) = placed.inspect_err(|_| self.cache.rewind(mark))?;
        let links = self.links(&code, (hot, cold), first_site, |_| None);
        let id = FragmentId(self.fragments.len() as u32);
        self.exits.push(Exit {
            fragment: id,
            kind: SiteKind::Poll,
            anchor: AnchorId(0),
            target: Some(pc),
            after: None,
            progress: true,
            record: None,
            jcc: None,
        });
        self.fragments.push(Fragment {
            pc,
            version: "passage".to_string(),
            entry: hot,
            checked: None,
            hot: hot..hot + code.hot.len() as u64,
            cold: cold..cold + code.cold.len() as u64,
            exits: first_site..first_site + 1,
            spill_slots: 0,
            end_of_slots,
            hot_moves: 0,
            uses_vector: false,
            touched: 0,
            saves: Borrowed::new(),
            restores: saves,
            inside: (hot, hot),
            passage_to: Some(way.to),
            extended_live: way.live,
            records: Vec::new(),
            faults: Box::default(),
            links,
            tails: Box::default(),
            unlinked: AtomicU32::new(0),
            tally: None,
        });
        Ok(id)
    }

    /// Makes a guard's exit (and every other guard's that shares its anchor) go to `target`, which was compiled from
    /// this exit's state.
    pub fn attach(&self, exit: ExitId, target: FragmentId) -> Result<(), EmitError> {
        let e = self.exit(exit).filter(|e| e.kind == SiteKind::Guard).ok_or(EmitError::Unknown)?;
        let entry = self.fragment(target).ok_or(EmitError::Unknown)?.entry;
        let record = e.record.ok_or(EmitError::Unknown)?;
        self.links_of_record(e.fragment, record).for_each(|link| self.set_link(e.fragment, link, entry));
        Ok(())
    }

    /// The links by which the sites of a record leave.
    fn links_of_record(&self, fragment: FragmentId, record: u32) -> impl Iterator<Item = &Link> {
        let links = self.fragment(fragment).map_or(&[][..], |f| &f.links);
        links.iter().filter(move |l| matches!(l.kind, LinkKind::Record(r) | LinkKind::Guard(r) if r == record))
    }

    /// Lets a guard's exit continue in `target`, the canonical fragment of the exit's target pc, by a resolved stub.
    /// Returns the stub, a fragment of its own. Deferred stores are performed there.
    ///
    /// The caller sees to progress ([`Exit::progress`]): if the exit's target is its own fragment's pc, `target` must not
    /// lead back to it.
    pub fn link_exit(&mut self, exit: ExitId, target: FragmentId) -> Result<FragmentId, EmitError> {
        let pc = self.exit(exit).and_then(|e| e.target).ok_or(EmitError::Unknown)?;
        self.fragment(target).filter(|f| f.pc == pc).ok_or(EmitError::Unknown)?;
        let (stub, end) = self.resolved(exit, pc)?;
        self.link(end, target)?;
        self.attach(exit, stub)?;
        Ok(stub)
    }

    /// As [`Emitter::link_exit`], for an exit whose target is computed: when it is not where `target` starts, the stub
    /// leaves by a guard of its own, in the exit's state.
    pub fn link_exit_if(&mut self, exit: ExitId, target: FragmentId) -> Result<FragmentId, EmitError> {
        self.exit(exit).filter(|e| e.target.is_none()).ok_or(EmitError::Unknown)?;
        let pc = self.fragment(target).ok_or(EmitError::Unknown)?.pc;
        let stub = self.resolve(exit, pc, Some(pc))?;
        let end = self.end_of(stub)?;
        self.link(end, target)?;
        self.attach(exit, stub)?;
        Ok(stub)
    }

    /// Compiles the resolved stub of an exit to `pc`; says what it is and its end.
    pub(crate) fn resolved(&mut self, exit: ExitId, pc: u64) -> Result<(FragmentId, ExitId), EmitError> {
        let stub = self.resolve(exit, pc, None)?;
        Ok((stub, self.end_of(stub)?))
    }

    /// The direct end of a stub.
    fn end_of(&self, stub: FragmentId) -> Result<ExitId, EmitError> {
        let exits = self.fragments[stub.0 as usize].exits.clone();
        exits.map(ExitId).find(|e| self.exits[e.0 as usize].kind == SiteKind::End).ok_or(EmitError::Unknown)
    }

    /// Lets a guard's exit whose target is computed look it up like an indirect trace end, in a resolved stub.
    pub fn link_indirect_exit(&mut self, exit: ExitId) -> Result<FragmentId, EmitError> {
        let e = self.exit(exit).filter(|e| e.target.is_none()).ok_or(EmitError::Unknown)?;
        let pc = self.fragment(e.fragment).ok_or(EmitError::Unknown)?.pc;
        let stub = self.resolve(exit, pc, None)?;
        self.attach(exit, stub)?;
        Ok(stub)
    }

    /// Compiles the resolved stub of an exit; see [`exit_entry::stub`].
    fn resolve(&mut self, exit: ExitId, pc: u64, only: Option<u64>) -> Result<FragmentId, EmitError> {
        let (fragment, record) = self.warm_record(exit)?;
        let live = fragment.extended_live;
        let (version, places) = exit_entry::stub(pc, record, only, fragment.touched, fragment.end_of_slots);
        self.compile_at(&version, &places, live)
    }

    /// Lets indirect trace ends find `fragment` for its pc. One fragment a pc; a later one replaces it.
    pub fn register_entry(&mut self, pc: u64, fragment: FragmentId) -> Result<(), EmitError> {
        let f = self.fragment(fragment).filter(|f| f.pc == pc).ok_or(EmitError::Unknown)?;
        let checked = f.checked.ok_or(EmitError::Unknown)?;
        self.forget_copy(pc);
        self.indirect.insert(Via::Memory, pc, checked);
        Ok(())
    }

    /// Indirect trace ends to `pc` go to the runtime again.
    pub fn forget_entry(&mut self, pc: u64) {
        self.indirect.remove(pc);
    }

    /// The links that lead into these fragments or their passages, and their owners. A back edge leads nowhere else.
    fn links_into(&self, ids: &[FragmentId]) -> Vec<(FragmentId, &Link)> {
        let ids: FxHashSet<FragmentId> = ids.iter().copied().collect();
        let doomed = |(n, f): &(usize, &Fragment)| {
            ids.contains(&FragmentId(*n as u32)) || f.passage_to.is_some_and(|to| ids.contains(&to))
        };
        let fragments = || self.fragments.iter().enumerate();
        let entries: FxHashSet<u64> =
            fragments().filter(doomed).flat_map(|(_, f)| [f.entry, f.inside.0, f.inside.1]).collect();
        let links = fragments().flat_map(|(n, f)| f.links.iter().map(move |link| (FragmentId(n as u32), link)));
        links.filter(|(_, l)| l.kind != LinkKind::BackEdge && entries.contains(&l.target())).collect()
    }

    /// Makes no link lead into these fragments any more, nor into their passages.
    pub(crate) fn sever(&self, ids: &[FragmentId]) {
        self.links_into(ids).into_iter().for_each(|(owner, link)| self.set_link(owner, link, link.out));
    }

    /// Makes everything that is linked to one fragment lead to another of the same region.
    ///
    /// # Errors
    /// They are not both fragments of one region.
    pub fn redirect(&mut self, from: FragmentId, to: FragmentId) -> Result<(), EmitError> {
        let region = self.fragment(from).ok_or(EmitError::Unknown)?.pc;
        self.fragment(to).filter(|to| to.pc == region).ok_or(EmitError::Unknown)?;
        let links: Vec<(FragmentId, LinkKind)> =
            self.links_into(&[from]).into_iter().map(|(owner, link)| (owner, link.kind)).collect();
        for (owner, kind) in links {
            let borrows = match kind {
                // A passage leads where it belongs.
                LinkKind::Borrowed(_) if self.fragments[owner.0 as usize].passage_to.is_some() => continue,
                LinkKind::Borrowed(exit) if self.link_borrowed(exit, to).is_err() => {
                    // A full cache. Canonical state always does.
                    self.unlink_borrowed(exit);
                    Some(exit)
                }
                LinkKind::Borrowed(_) | LinkKind::BackEdge => continue,
                LinkKind::End(exit) => Some(exit),
                // They lead to what was compiled for them.
                LinkKind::Record(_) | LinkKind::Guard(_) => None,
            };
            if let Some(link) = borrows.and_then(|exit| self.link_of(exit)) {
                self.set_link(owner, link, self.canonical_way(owner, &self.fragments[to.0 as usize]));
            }
        }
        Ok(())
    }

    /// Makes nothing lead into a fragment any more: links, exits and the lookup table. It stays allocated until the
    /// next flush, and whoever is inside may finish.
    pub fn invalidate(&mut self, fragment: FragmentId) -> Result<(), EmitError> {
        let pc = self.fragment(fragment).ok_or(EmitError::Unknown)?.pc;
        self.indirect.remove(pc);
        self.sever(&[fragment]);
        Ok(())
    }

    /// Makes an exit leave to the runtime again.
    pub fn unlink(&self, exit: ExitId) -> Result<(), EmitError> {
        let e = self.exit(exit).ok_or(EmitError::Unknown)?;
        match e.record {
            Some(record) => {
                self.links_of_record(e.fragment, record).for_each(|link| self.set_link(e.fragment, link, link.out));
            }
            None => {
                let link = self.link_of(exit).ok_or(EmitError::Unknown)?;
                self.set_link(e.fragment, link, link.out);
                self.unlink_borrowed(exit);
            }
        }
        Ok(())
    }

    /// Makes whoever is in a fragment leave at its next back edge or end, into the runtime, until as many have called
    /// [`Emitter::relink`]. Async-signal-safe.
    pub fn unlink_for_signal(&self, fragment: FragmentId) {
        if let Some(f) = self.fragment(fragment) {
            f.unlinked.fetch_add(1, Ordering::Relaxed);
            f.links.iter().for_each(|l| self.cache.patch_rel32(l.field, l.out));
        }
    }

    /// Undoes [`Emitter::unlink_for_signal`]. Async-signal-safe.
    pub fn relink(&self, fragment: FragmentId) {
        if let Some(f) = self.fragment(fragment)
            && f.unlinked.fetch_sub(1, Ordering::Relaxed) == 1
        {
            f.links.iter().for_each(|l| self.cache.patch_rel32(l.field, l.target()));
        }
    }
}
