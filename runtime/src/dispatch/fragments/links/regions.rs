//! Fragments that leave their regions, because code has changed, and come back when it is what it was.

use super::{Fragments, Role};
use dynasour_emitter::{ExitId, FragmentId};

impl Fragments {
    /// Takes `id` out of its region; what is entered there next is the next one, if any.
    pub(super) fn leave_region(&mut self, pc: u64, id: FragmentId) {
        let Some(region) = self.regions.get_mut(&pc) else { return };
        let was_first = region.fragments.first() == Some(&id);
        region.fragments.retain(|other| *other != id);
        let next = region.fragments.first().copied();
        if next.is_none() {
            self.regions.remove(&pc);
        }
        if was_first {
            self.emitter.forget_entry(pc);
            if let Some(next) = next {
                self.register(pc, next);
            }
            self.lead_links(pc, next);
        }
    }

    /// Among copied blocks: links to `pc` lead to the fragment, or if there is none to the block.
    fn lead_links(&mut self, pc: u64, fragment: Option<FragmentId>) {
        if self.heads.threshold == 0 || self.chaos.is_some() {
            return;
        }
        match fragment {
            Some(fragment) => self.emitter.lead_to(fragment),
            None => self.emitter.stop_counting(pc),
        }
    }

    /// None of a region's fragments does: if they look for themselves whether their code is there, it has changed too often.
    pub(super) fn drop_changed(&mut self, pc: u64) {
        let all = self.regions.get(&pc).map_or(Vec::new(), |region| region.fragments.clone());
        let changed: Vec<FragmentId> = all.into_iter().filter(|id| self.sources.is_checked(*id)).collect();
        self.emitter.put_to_rest(&changed);
        for id in changed {
            self.leave_region(pc, id);
            self.sources.drop_source(id);
        }
    }

    /// The fragments of a region that rest and whose code is what it was come back.
    pub(super) fn wake(&mut self, pc: u64) {
        if !self.sources.rests(Role::Region(pc)) {
            return;
        }
        let awake = self.sources.wake(Role::Region(pc), &self.pages);
        if awake.is_empty() {
            return;
        }
        awake.iter().for_each(|id| self.emitter.wake(*id));
        self.stats.woken += awake.len() as u64;
        let mut all = self.regions.remove(&pc).unwrap_or_default();
        all.fragments.extend(awake);
        all.fragments.sort_unstable_by_key(|id| self.rank(*id));
        let first = all.fragments[0];
        self.regions.insert(pc, all);
        self.register(pc, first);
        self.lead_links(pc, Some(first));
        self.links_changed();
    }

    /// The order in which a region's fragments are tried: loops of an interpreted program first, for their entries test
    /// where in that program it is, the newest first; then the others, the oldest first.
    pub(super) fn rank(&self, id: FragmentId) -> (bool, i64) {
        let age = i64::from(id.0);
        if self.guest_loops.contains(&id) { (false, -age) } else { (true, age) }
    }

    /// The fragment that an exit had of its own, if it rests and can come back, is attached again.
    pub(super) fn wake_side(&mut self, exit: ExitId) -> bool {
        if !self.sources.rests(Role::Side(exit)) {
            return false;
        }
        let awake = self.sources.wake(Role::Side(exit), &self.pages);
        self.stats.woken += awake.len() as u64;
        // An exit has one at a time.
        let Some(&id) = awake.last().filter(|id| self.emitter.wake_attached(exit, **id).is_ok()) else { return false };
        self.note_attached(exit, id);
        self.links_changed();
        true
    }
}
