//! The book of a counting run: what fragments were made, where their counters are, where their
//! failures went.
//!
//! An entry is written when a fragment is made and outlives it: ids of fragments and exits start
//! over after a flush, words of counters do not. What goes to the runtime is counted here, as it
//! comes; the rest went along the exit's link. An exit is linked to one fragment after another, so
//! each change of a link notes what its guards had counted until then.

use super::describe::{guard, hex, steps};
use crate::observe::census::{
    Code, CodeBytes, CompileTimes, Detail, End, Fragment, From, Kind, To, Went,
};
use dynasour_emitter::counting::{CountedSite, Destination, Tally};
use dynasour_emitter::{Emitter, ExitId, FragmentId, SiteKind};
use dynasour_ir::Version;
use dynasour_ir::expressions::Expressions;
use dynasour_tracer::{Path, TraceShape};
use rustc_hash::FxHashMap;

/// What there is to say of a new fragment beside what the emitter knows.
pub struct Made<'a> {
    pub version: &'a Version,
    pub path: &'a Path,
    /// The exit that it was made for.
    pub from: Option<ExitId>,
    pub times: CompileTimes,
    /// The version as built, if details are wanted.
    pub built: Option<String>,
    pub alias_guards: bool,
}

/// Since when failures of a guard went along a link to a fragment.
struct Stretch {
    to: To,
    failed: u64,
    to_runtime: u64,
}

/// A site of an entry.
struct Site {
    counted: CountedSite,
    /// Which of the fragment's guards it is.
    guard: Option<u32>,
    /// Times that it came to the runtime.
    to_runtime: u64,
    stretches: Vec<Stretch>,
}

struct Entry {
    fragment: Fragment,
    tally: Tally,
    sites: Vec<Site>,
    emitted: FragmentId,
    /// Where its ends lead, settled when the fragment is dropped.
    ends: Vec<Ended>,
}

struct Ended {
    exit: ExitId,
    target: Option<u64>,
    to: To,
}

/// See the module.
#[derive(Default)]
pub struct Ledger {
    entries: Vec<Entry>,
    /// The entries of fragments that exist.
    of: FxHashMap<FragmentId, usize>,
    /// Was some fragment made without counters?
    missed: bool,
}

impl Ledger {
    /// A fragment was made from a path.
    pub fn made(&mut self, emitter: &Emitter, id: FragmentId, made: Made<'_>) {
        let kind = match (made.path.shape, made.from) {
            (TraceShape::Loop, None) => Kind::Loop,
            (TraceShape::Linear, None) => Kind::Linear,
            (TraceShape::Loop, Some(_)) => Kind::SideLoop,
            (TraceShape::Linear, Some(_)) => Kind::Side,
        };
        let Some(entry) = self.entry(emitter, id, kind, made.from) else { return };
        entry.fragment.name = made.version.name.clone();
        entry.fragment.path = steps(made.path, made.built.is_some());
        entry.fragment.guest_instructions =
            made.path.steps.iter().map(|s| u64::from(s.block.count)).sum();
        entry.fragment.compile_ns = made.times;
        let expressions = Expressions::new(made.version);
        let mut guards = Vec::new();
        for (n, site) in
            entry.tally.sites.iter().enumerate().filter(|(_, s)| s.kind == SiteKind::Guard)
        {
            let Some(place) = site.place else { continue };
            if let Some(described) = guard(made.version, &expressions, made.path, place) {
                guards.push((n, described));
            }
        }
        guards.sort_by_key(|(_, guard)| guard.place);
        for (index, (n, mut guard)) in guards.into_iter().enumerate() {
            guard.index = index as u32;
            guard.host = (entry.sites[n].counted.host, entry.sites[n].counted.cold);
            entry.sites[n].guard = Some(guard.index);
            entry.fragment.guards.push(guard);
        }
        if let Some(built) = made.built {
            let none = Code { at: 0, hex: String::new() };
            entry.fragment.detail = Some(Detail {
                built,
                optimised: made.version.to_string(),
                alias_guards: made.alias_guards,
                entry: 0,
                hot: none.clone(),
                cold: none,
            });
        }
        if let Some(exit) = made.from {
            self.attached(emitter, exit, id);
        }
    }

    /// The resolved stub of an exit was made, and the exit leads there.
    pub fn made_stub(&mut self, emitter: &Emitter, id: FragmentId, exit: ExitId) {
        self.entry(emitter, id, Kind::Stub, Some(exit));
        self.attached(emitter, exit, id);
    }

    fn entry(
        &mut self,
        emitter: &Emitter,
        id: FragmentId,
        kind: Kind,
        from: Option<ExitId>,
    ) -> Option<&mut Entry> {
        let fragment = emitter.fragment(id)?;
        let Some(tally) = &fragment.tally else {
            self.missed = true;
            return None;
        };
        let number = self.entries.len();
        let from = from.and_then(|exit| self.origin(emitter, exit));
        self.entries.push(Entry {
            fragment: Fragment {
                id: number as u32,
                name: fragment.version.clone(),
                kind,
                pc: fragment.pc,
                from,
                path: Vec::new(),
                guest_instructions: 0,
                code_bytes: CodeBytes {
                    hot: fragment.hot.end - fragment.hot.start,
                    cold: fragment.cold.end - fragment.cold.start,
                },
                spill_slots: fragment.spill_slots,
                moves: fragment.hot_moves,
                compile_ns: CompileTimes::default(),
                entered: 0,
                iterations: None,
                guards: Vec::new(),
                ends: Vec::new(),
                polls: 0,
                faults: 0,
                dropped: false,
                detail: None,
            },
            sites: tally
                .sites
                .iter()
                .map(|s| Site { counted: *s, guard: None, to_runtime: 0, stretches: Vec::new() })
                .collect(),
            tally: (**tally).clone(),
            emitted: id,
            ends: Vec::new(),
        });
        self.of.insert(id, number);
        self.entries.last_mut()
    }

    fn site(&mut self, emitter: &Emitter, exit: ExitId) -> Option<&mut Site> {
        let entry = *self.of.get(&emitter.exit(exit)?.fragment)?;
        self.entries[entry].sites.iter_mut().find(|s| s.counted.exit == exit)
    }

    fn origin(&mut self, emitter: &Emitter, exit: ExitId) -> Option<From> {
        let fragment = *self.of.get(&emitter.exit(exit)?.fragment)? as u32;
        let sharing = emitter.sharing(exit);
        let guards = sharing.into_iter().filter_map(|e| self.site(emitter, e)?.guard);
        let mut guards: Vec<u32> = guards.collect();
        guards.sort_unstable();
        Some(From { fragment, guards })
    }

    /// An exit, and those that share its way out, lead to a fragment from now on.
    pub fn attached(&mut self, emitter: &Emitter, exit: ExitId, target: FragmentId) {
        let Some(&fragment) = self.of.get(&target) else { return };
        let to = To::Fragment { fragment: fragment as u32 };
        for exit in emitter.sharing(exit) {
            if let Some(site) = self.site(emitter, exit) {
                let failed = emitter.count(site.counted.left);
                site.stretches.push(Stretch { to, failed, to_runtime: site.to_runtime });
            }
        }
    }

    /// An exit came to the runtime.
    pub fn left(&mut self, emitter: &Emitter, exit: ExitId) {
        if let Some(site) = self.site(emitter, exit) {
            site.to_runtime += 1;
        }
    }

    /// All fragments are about to be dropped.
    pub fn close(&mut self, emitter: &Emitter) {
        self.settle(emitter);
        for entry in self.of.drain() {
            self.entries[entry.1].fragment.dropped = true;
        }
    }

    /// Notes what can only be seen while fragments exist.
    fn settle(&mut self, emitter: &Emitter) {
        for &number in self.of.values() {
            let entry = &self.entries[number];
            let ends = entry.sites.iter().filter(|s| s.counted.kind == SiteKind::End);
            let ends = ends.filter_map(|site| {
                let exit = site.counted.exit;
                let target = emitter.exit(exit)?.target;
                let to = match emitter.destination(exit) {
                    Destination::Runtime => To::Runtime,
                    Destination::Fragment(id) => {
                        To::Fragment { fragment: *self.of.get(&id)? as u32 }
                    }
                    Destination::Block => To::Block { pc: target? },
                };
                Some(Ended { exit, target, to })
            });
            let ends = ends.collect();
            let code = |range: &std::ops::Range<u64>| {
                let bytes = emitter.cache().read(range.start, (range.end - range.start) as usize);
                Code { at: range.start, hex: hex(bytes) }
            };
            let emitted = emitter.fragment(entry.emitted);
            let entry = &mut self.entries[number];
            entry.ends = ends;
            if let (Some(detail), Some(f)) = (&mut entry.fragment.detail, emitted) {
                (detail.entry, detail.hot, detail.cold) = (f.entry, code(&f.hot), code(&f.cold));
            }
        }
    }

    /// What was counted so far, and whether nothing is missing.
    pub fn report(&mut self, emitter: &Emitter) -> (Vec<Fragment>, bool) {
        self.settle(emitter);
        (self.entries.iter().map(|entry| entry.report(emitter)).collect(), !self.missed)
    }
}

impl Entry {
    fn report(&self, emitter: &Emitter) -> Fragment {
        let count = |word| emitter.count(word);
        let mut fragment = self.fragment.clone();
        fragment.entered = count(self.tally.entered);
        let is_loop = matches!(fragment.kind, Kind::Loop | Kind::SideLoop);
        fragment.iterations = is_loop.then(|| count(self.tally.iterations));
        for site in &self.sites {
            let left = count(site.counted.left);
            match site.counted.kind {
                SiteKind::Guard => {
                    let Some(guard) = site.guard.and_then(|g| fragment.guards.get_mut(g as usize))
                    else {
                        continue;
                    };
                    guard.executed = count(site.counted.executed);
                    guard.failed = left;
                    guard.went = site.went(left);
                }
                SiteKind::Poll => fragment.polls += left,
                SiteKind::Fault => fragment.faults += left,
                SiteKind::End | SiteKind::EndIndirect => {
                    let executed = count(site.counted.executed);
                    let linked = executed.saturating_sub(site.to_runtime);
                    let ended = self.ends.iter().find(|e| e.exit == site.counted.exit);
                    let mut went = Vec::new();
                    push(&mut went, To::Runtime, site.to_runtime);
                    if let Some(ended) = ended {
                        push(&mut went, ended.to, linked);
                    }
                    fragment.ends.push(End {
                        target: ended.and_then(|e| e.target),
                        executed,
                        went,
                    });
                }
            }
        }
        fragment
    }
}

impl Site {
    fn went(&self, failed: u64) -> Vec<Went> {
        let mut went = Vec::new();
        push(&mut went, To::Runtime, self.to_runtime);
        for (n, stretch) in self.stretches.iter().enumerate() {
            let next = self
                .stretches
                .get(n + 1)
                .map_or((failed, self.to_runtime), |s| (s.failed, s.to_runtime));
            let all = next.0.saturating_sub(stretch.failed);
            push(&mut went, stretch.to, all.saturating_sub(next.1 - stretch.to_runtime));
        }
        went
    }
}

fn push(went: &mut Vec<Went>, to: To, times: u64) {
    match went.iter_mut().find(|w| w.to == to) {
        Some(w) => w.times += times,
        None if times > 0 => went.push(Went { to, times }),
        None => {}
    }
}
