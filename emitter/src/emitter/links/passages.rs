//! Passages: how the end of one fragment enters another without giving back the registers that it
//! has borrowed.
//!
//! A fragment *borrows* registers: it saves the guest's values in slots and uses the registers for
//! its own. Each register has a slot of its own, so a fragment that would save the same registers
//! can be entered behind its saving. If the sets differ, a *passage*, a fragment of a few moves,
//! restores and saves what differs on the way.
//!
//! Data: [`Emitter::passages`](Emitter), one passage for each [`Way`]. A passage belongs to the
//! fragment that it leads to: when nothing may lead to that, nothing may lead to its passages. The
//! caller holds the emitter.
//!
//! Example: A has borrowed rax and rbx, B would save rbx and rcx. The passage from A to B loads rax
//! from its slot, stores rcx in its own, and jumps behind B's saving.

use crate::codegen::mach::SiteKind;
use crate::codegen::passage::passage;
use crate::emitter::{EmitError, Emitter};
use crate::fragment::{
    Borrowed, Exit, ExitId, Fragment, FragmentId, FragmentRole, LinkKind, StartCounts,
};
use dynasour_ir::AnchorId;
use dynasour_ir::opt::contexts::Contexts;
use std::sync::atomic::AtomicU32;

/// The key of a passage: the registers whose values are in slots before it, whether the extended
/// state is loaded, and the fragment that it leads to.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Way {
    restores: Borrowed,
    live: bool,
    to: FragmentId,
}

impl Emitter {
    /// The address at which an end in canonical state enters a fragment.
    pub(crate) fn canonical_way(&self, from: FragmentId, to: &Fragment) -> u64 {
        let live = self.fragment(from).is_some_and(|from| from.extended_live);
        match (to.saves.is_empty() && !to.starts.is_counting, live) {
            (false, _) => to.entry,
            (true, false) => to.inside.0,
            (true, true) => to.inside.1,
        }
    }

    /// If this is a direct end with borrowed registers, lets it continue in `target` with the
    /// guest's values in their slots. The jump behind the code that gives them back is not changed.
    pub(crate) fn link_borrowed(
        &mut self,
        exit: ExitId,
        target: FragmentId,
    ) -> Result<(), EmitError> {
        let from = self.exit(exit).ok_or(EmitError::Unknown)?.fragment;
        if self.borrowed_link(exit).is_none() {
            return Ok(());
        }
        if self.fragment(target).is_some_and(|f| f.starts.is_counting) {
            // Starts are counted where it is entered in canonical state.
            self.unlink_borrowed(exit);
            return Ok(());
        }
        let entry = self.way_into(from, target)?;
        if let Some(link) = self.borrowed_link(exit) {
            self.set_link(from, link, entry);
        }
        Ok(())
    }

    /// If this is a direct end with borrowed registers, it gives them back from now on and leads
    /// where its canonical jump does.
    pub(crate) fn unlink_borrowed(&self, exit: ExitId) {
        if let Some((e, link)) = self.exit(exit).zip(self.borrowed_link(exit)) {
            self.set_link(e.fragment, link, link.out);
        }
    }

    /// The address at which the end of one fragment enters another. If both borrow the same
    /// registers, that is behind the other's saving; else a passage moves the registers that
    /// differ.
    pub(crate) fn way_into(&mut self, from: FragmentId, to: FragmentId) -> Result<u64, EmitError> {
        let (a, b) = (
            self.fragment(from).ok_or(EmitError::Unknown)?,
            self.fragment(to).ok_or(EmitError::Unknown)?,
        );
        let live = a.extended_live;
        let inside = if live { b.inside.1 } else { b.inside.0 };
        if a.restores.iter().all(|pair| b.saves.contains(pair)) && a.restores.len() == b.saves.len()
        {
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

    /// Makes a passage. Its only exit is taken by threads that are to leave the cache.
    pub(crate) fn passage(&mut self, way: &Way) -> Result<FragmentId, EmitError> {
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
            role: FragmentRole::Passage(way.to),
            is_resting: false,
            extended_live: way.live,
            contexts: Contexts::default(),
            records: Vec::new(),
            faults: Box::default(),
            links,
            tails: Box::default(),
            unlinked: AtomicU32::new(0),
            tally: None,
            starts: StartCounts::default(),
        });
        Ok(id)
    }
}
