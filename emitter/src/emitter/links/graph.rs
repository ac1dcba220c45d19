//! Operations on the graph of links that concern fragments as well as blocks.
//!
//! Links from fragment to fragment are in no list: [`Emitter::sever`] looks through the links of
//! all fragments for the entries of the fragment that nothing may lead to any more, whatever made
//! the links. Links to a place are in the list of that place ([`crate::blocks::places`]).
//!
//! Data: none of its own. Invariant: an end with borrowed registers never leads to a fragment that
//! its place does not lead to, so [`Emitter::lead_place`] unlinks such ends whenever the place's
//! entry changes. The caller holds the emitter; [`Emitter::unlink_block`] and
//! [`Emitter::relink_block`] are async-signal-safe.
//!
//! Example: links of the blocks A and B lead to the block at 0x2000. A trace of 0x2000 is placed.
//! [`Emitter::lead_to`] makes both links lead to the trace. The trace is dropped:
//! [`Emitter::invalidate`] makes the ends of other traces that lead to it lead out.

use crate::blocks::BlockId;
use crate::blocks::places::{BODY, FOREIGN};
use crate::emitter::{EmitError, Emitter};
use crate::fragment::{ExitId, Fragment, FragmentId, FragmentRole, Link, LinkKind};
use rustc_hash::FxHashSet;
use std::sync::atomic::Ordering;

impl Emitter {
    /// Links to the fragment's pc lead to it from now on. This cannot fail: if there is no room for
    /// a passage, the end enters in canonical state.
    pub fn lead_to(&mut self, fragment: FragmentId) {
        let Some(f) = self.fragment(fragment) else { return };
        let (pc, entry) = (f.pc, (f.entry - self.blocks.base) as u32);
        let place = self.blocks.place(pc);
        self.lead_place(place, entry);
        let ends: Vec<ExitId> = self.ends_to(place).collect();
        ends.into_iter().for_each(|end| self.enter_borrowed(end, fragment));
    }

    pub(crate) fn lead_place(&mut self, place: u32, entry: u32) {
        if self.blocks.places.get(place as usize).is_some_and(|p| p.entry != entry) {
            self.blocks.lead(place, entry, &self.cache, &self.fragments);
            self.register_moved();
            self.ends_to(place).for_each(|end| self.unlink_borrowed(end));
        }
    }

    /// The ends of traces that are in a place's list and follow its entry. Ends with [`BODY`] are
    /// left out: such an end may belong to the fragment that the place leads to.
    pub(crate) fn ends_to(&self, place: u32) -> impl Iterator<Item = ExitId> {
        let links = &self.blocks.links;
        let first = links.get(self.blocks.places[place as usize].links as usize);
        let all = std::iter::successors(first, |link| links.get(link.next as usize));
        let fields = all
            .filter(|link| link.place & (FOREIGN | BODY) == FOREIGN)
            .map(|link| self.blocks.base + u64::from(link.field));
        fields.filter_map(|field| {
            let owner = self.fragment(self.fragment_at(field)?)?;
            owner.links.iter().find(|link| link.field == field).and_then(|link| match link.kind {
                LinkKind::End(exit) => Some(exit),
                _ => None,
            })
        })
    }

    /// The links that lead into these fragments or their passages, and their owners. Back edges are
    /// left out: they lead to their own fragment only.
    pub(crate) fn links_into(&self, ids: &[FragmentId]) -> Vec<(FragmentId, &Link)> {
        let ids: FxHashSet<FragmentId> = ids.iter().copied().collect();
        let doomed = |(n, f): &(usize, &Fragment)| {
            ids.contains(&FragmentId(*n as u32))
                || matches!(f.role, FragmentRole::Passage(to) if ids.contains(&to))
        };
        let fragments = || self.fragments.iter().enumerate();
        let entries: FxHashSet<u64> = fragments()
            .filter(doomed)
            .flat_map(|(_, f)| [f.entry, f.inside.0, f.inside.1])
            .collect();
        // Most links lead elsewhere: the bounds tell it for less than a look into the set.
        let bounds = entries.iter().fold((u64::MAX, 0), |(a, b), e| (a.min(*e), b.max(*e)));
        let leads_in =
            |target: u64| (bounds.0..=bounds.1).contains(&target) && entries.contains(&target);
        let links = fragments()
            .flat_map(|(n, f)| f.links.iter().map(move |link| (FragmentId(n as u32), link)));
        links.filter(|(_, l)| l.kind != LinkKind::BackEdge && leads_in(l.target())).collect()
    }

    /// Makes no link lead into these fragments any more, nor into their passages.
    pub(crate) fn sever(&self, ids: &[FragmentId]) {
        self.links_into(ids)
            .into_iter()
            .for_each(|(owner, link)| self.set_link(owner, link, link.out));
    }

    /// The fragments whose links lead to this one.
    pub fn leading_to(&self, fragment: FragmentId) -> Vec<FragmentId> {
        self.links_into(&[fragment]).into_iter().map(|(owner, _)| owner).collect()
    }

    /// Makes every link that leads to one fragment lead to another fragment of the same region,
    /// except the links of the fragments in `staying`.
    ///
    /// # Errors
    /// They are not both fragments of one region.
    pub fn redirect(
        &mut self,
        from: FragmentId,
        to: FragmentId,
        staying: &[FragmentId],
    ) -> Result<(), EmitError> {
        let region = self.fragment(from).ok_or(EmitError::Unknown)?.pc;
        self.fragment(to).filter(|to| to.pc == region).ok_or(EmitError::Unknown)?;
        let mut links: Vec<(FragmentId, LinkKind)> =
            self.links_into(&[from]).into_iter().map(|(owner, link)| (owner, link.kind)).collect();
        links.retain(|(owner, _)| !staying.contains(owner));
        for (owner, kind) in links {
            let borrows = match kind {
                // A passage belongs to the fragment that it leads to, and keeps leading there.
                LinkKind::Borrowed(_)
                    if matches!(
                        self.fragments[owner.0 as usize].role,
                        FragmentRole::Passage(_)
                    ) =>
                {
                    continue;
                }
                LinkKind::Borrowed(exit) if self.link_borrowed(exit, to).is_err() => {
                    // The cache has no room for a passage. An entry in canonical state needs none.
                    self.unlink_borrowed(exit);
                    Some(exit)
                }
                LinkKind::Borrowed(_) | LinkKind::BackEdge => continue,
                LinkKind::End(exit) => Some(exit),
                // These lead to code that was compiled for their state, not to the region.
                LinkKind::Record(_) | LinkKind::Guard(_) => None,
            };
            if let Some(link) = borrows.and_then(|exit| self.link_of(exit)) {
                self.set_link(
                    owner,
                    link,
                    self.canonical_way(owner, &self.fragments[to.0 as usize]),
                );
            }
        }
        Ok(())
    }

    /// Makes nothing lead into a fragment any more: links, exits and the lookup table. The code
    /// stays until the next flush, so a thread inside may finish.
    pub fn invalidate(&mut self, fragment: FragmentId) -> Result<(), EmitError> {
        let pc = self.fragment(fragment).ok_or(EmitError::Unknown)?.pc;
        self.indirect.remove(pc);
        self.sever(&[fragment]);
        Ok(())
    }

    /// Makes threads in a block leave at its end, into the runtime, until [`Emitter::relink_block`]
    /// has been called as often as this. Async-signal-safe.
    pub fn unlink_block(&self, block: BlockId) {
        self.blocks.unlink(block.0, &self.indirect, &self.cache);
    }

    /// Undoes [`Emitter::unlink_block`]. Async-signal-safe.
    pub fn relink_block(&self, block: BlockId) {
        let blocks = &self.blocks;
        let Some(b) = blocks.blocks.get(block.0 as usize) else { return };
        blocks.unlinked.fetch_sub(1, Ordering::Relaxed);
        if b.unlinked.fetch_sub(1, Ordering::Relaxed) == 1 {
            blocks.links[blocks.links_of(block.0)]
                .iter()
                .for_each(|link| blocks.set(link, false, &self.cache));
        }
    }
}
