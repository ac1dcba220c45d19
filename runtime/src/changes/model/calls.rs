//! System calls, and what the host writes itself, step by step.

use super::bug::Bug;
use super::state::{MAPPING, OUTPUT, Op, Program, STORE, State, X};
use super::steps::{SETTLE, Transition};

impl State {
    /// `mprotect`, `munmap`, `mmap` and `mremap`.
    pub fn mapping_call(&self, program: &Program, t: usize, op: Op) -> Transition {
        let p = op.page();
        let late = program.has(Bug::ProtectOpensFirst) && matches!(op, Op::Protect(..))
            || program.has(Bug::UnmapDropsLate) && matches!(op, Op::Unmap(_));
        let exclusive = !late
            && ![Bug::NotExclusive, Bug::WakesWhileChanging].iter().any(|bug| program.has(*bug));
        let keeps = matches!(op, Op::Protect(_, X)) && self.pages[p].record.is_some();
        let fresh = matches!(op, Op::Map(..));
        let mut state = self.clone();
        match self.threads[t].stage {
            0 if exclusive => self.take_exclusive(t, 1),
            0 | 1 => {
                // Whether code is kept is decided once.
                state.threads[t].fetched = u8::from(keeps || fresh);
                if !late && !fresh {
                    state.pages[p].announced[MAPPING] += 1;
                }
                if !keeps && !late && !fresh {
                    state.drop_page(t, p);
                }
                state.at_stage(t, 2)
            }
            2 => {
                if self.threads[t].fetched == 0 {
                    state.pages[p].guarded = None;
                }
                state.at_stage(t, 3)
            }
            3 => {
                state.change_mapping(t, op);
                state.rights_changed(program, p);
                state.at_stage(t, 4)
            }
            4 => {
                state.moment += 1;
                state.published = state.moment;
                let page = &mut state.pages[p];
                match op {
                    Op::Protect(_, rights) => {
                        page.guarded = None;
                        page.record = page.record.and(Some(rights));
                    }
                    Op::Map(_, rights) if self.threads[t].effect.is_some() => {
                        if program.has(Bug::FreshLosesGuards) {
                            page.guarded = None;
                        }
                        page.record = Some(rights);
                    }
                    Op::Map(..) => {}
                    _ => page.record = None,
                }
                if !late && !fresh {
                    page.announced[MAPPING] -= 1;
                }
                let drops = self.threads[t].fetched == 0
                    || matches!(op, Op::Map(_, rights) if rights & X != 0);
                if drops && !program.has(Bug::NoSecondDrop) {
                    state.drop_page(t, p);
                }
                state.at_stage(t, 5)
            }
            _ => {
                if exclusive {
                    state.exclusive = None;
                }
                state.at_stage(t, SETTLE)
            }
        }
    }

    /// What the kernel does.
    fn change_mapping(&mut self, t: usize, op: Op) {
        let page = &mut self.pages[op.page()];
        match op {
            Op::Protect(_, rights) if page.mapped => {
                page.rights = rights;
                self.threads[t].denies = rights & X == 0;
            }
            Op::Unmap(_) => {
                (page.mapped, page.rights) = (false, 0);
                self.threads[t].denies = true;
            }
            Op::Map(p, rights) if !page.mapped => {
                (page.mapped, page.rights) = (true, rights);
                self.write(t, p);
            }
            _ => {}
        }
    }

    pub fn output(&self, program: &Program, t: usize, p: usize) -> Transition {
        let mut state = self.clone();
        match self.threads[t].stage {
            0 => {
                state.pages[p].announced[OUTPUT] += 1;
                state.at_stage(t, if self.pages[p].guarded.is_some() { 1 } else { 5 })
            }
            1 => self.take_exclusive(t, 2),
            2 if self.pages[p].guarded.is_some() => {
                state.pages[p].announced[STORE] += 1;
                if program.has(Bug::OutputsOpenFirst) {
                    state.pages[p].guarded = None;
                }
                state.drop_page(t, p);
                state.at_stage(t, 3)
            }
            2 => {
                state.exclusive = None;
                state.at_stage(t, 5)
            }
            3 => {
                state.pages[p].guarded = None;
                state.at_stage(t, 4)
            }
            4 => {
                state.pages[p].announced[STORE] -= 1;
                state.exclusive = None;
                state.at_stage(t, 5)
            }
            5 if self.pages[p].kernel_writable() => {
                state.write(t, p);
                state.at_stage(t, 6)
            }
            5 if !self.threads[t].forbidden => {
                Transition::Violation("a system call cannot write where the guest may")
            }
            5 => state.at_stage(t, 6),
            _ => {
                state.pages[p].announced[OUTPUT] =
                    state.pages[p].announced[OUTPUT].saturating_sub(1);
                state.at_stage(t, SETTLE)
            }
        }
    }

    pub fn host_store(&self, program: &Program, t: usize, p: usize) -> Transition {
        let mut state = self.clone();
        let page = &self.pages[p];
        match self.threads[t].stage {
            0 if page.kernel_writable() => {
                state.write(t, p);
                state.at_stage(t, SETTLE)
            }
            0 => state.at_stage(t, 1),
            _ if page.guarded.is_some() => {
                (state.pages[p].written, state.written) = (true, true);
                if self.threaded && !program.has(Bug::HostStoreOpens) {
                    state.write(t, p);
                    return state.at_stage(t, SETTLE);
                }
                state.pages[p].guarded = None;
                state.at_stage(t, 0)
            }
            _ if state.is_writable(program, p) => state.at_stage(t, 0),
            _ => state.refused(t, "a store of the host's fails that the guest's rights allow"),
        }
    }

    /// A jump is written into code that only calls can change.
    pub fn patch(&self, program: &Program, t: usize, p: usize) -> Transition {
        let mut state = self.clone();
        let page = &mut state.pages[p];
        let is_exclusive = !program.has(Bug::PatchNotExclusive);
        match self.threads[t].stage {
            0 if is_exclusive => self.take_exclusive(t, 1),
            0 | 1 if page.record == Some(X) && page.mapped => {
                state.threads[t].fetched = page.version;
                state.at_stage(t, 2)
            }
            2 if page.mapped => {
                page.patched = Some(self.threads[t].fetched);
                state.at_stage(t, 3)
            }
            _ => {
                if is_exclusive {
                    state.exclusive = None;
                }
                state.at_stage(t, SETTLE)
            }
        }
    }
}
