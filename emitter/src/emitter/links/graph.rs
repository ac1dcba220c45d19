//! HEADER

use crate::blocks::BlockId;
use crate::blocks::places::{BODY, FOREIGN};
use crate::emitter::{EmitError, Emitter};
use crate::fragment::{ExitId, Fragment, FragmentId, FragmentRole, Link, LinkKind};
use rustc_hash::FxHashSet;
use std::sync::atomic::Ordering;

impl Emitter {
    /// Links to the fragment's pc lead to it from now on. This cannot fail: an end that finds no
    /// room for a passage enters in canonical state.
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

    /// The ends of traces that are links to where links to a place lead. One that is bound to the
    /// place's block is not among them: it may come from the very fragment that the others lead to.
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

    /// The links that lead into these fragments or their passages, and their owners. A back edge
    /// leads nowhere else.
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
        let links = fragments()
            .flat_map(|(n, f)| f.links.iter().map(move |link| (FragmentId(n as u32), link)));
        links
            .filter(|(_, l)| l.kind != LinkKind::BackEdge && entries.contains(&l.target()))
            .collect()
    }

    /// Makes no link lead into these fragments any more, nor into their passages.
    pub(crate) fn sever(&self, ids: &[FragmentId]) {
        self.links_into(ids)
            .into_iter()
            .for_each(|(owner, link)| self.set_link(owner, link, link.out));
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
                LinkKind::Borrowed(_)
                    if matches!(
                        self.fragments[owner.0 as usize].role,
                        FragmentRole::Passage(_)
                    ) =>
                {
                    continue;
                }
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
                self.set_link(
                    owner,
                    link,
                    self.canonical_way(owner, &self.fragments[to.0 as usize]),
                );
            }
        }
        Ok(())
    }

    /// Makes nothing lead into a fragment any more: links, exits and the lookup table. It stays
    /// allocated until the next flush, and whoever is inside may finish.
    pub fn invalidate(&mut self, fragment: FragmentId) -> Result<(), EmitError> {
        let pc = self.fragment(fragment).ok_or(EmitError::Unknown)?.pc;
        self.indirect.remove(pc);
        self.sever(&[fragment]);
        Ok(())
    }

    /// Makes whoever is in a block leave at its end, into the runtime, until as many have called
    /// [`Emitter::relink_block`]. Async-signal-safe.
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
