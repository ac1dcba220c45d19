//! The records of a counting run: which fragments were made, where their counters are, and where
//! control went when their guards failed. The [census](crate::observe::census) is made from them.
//!
//! Words: a *site* is a guard, safe point, possible fault or end of a fragment
//! ([`CountedSite`]). A *link period* is the time during which a site's exit was linked to one
//! fragment.
//!
//! Data: [`Ledger`], with one [`FragmentRecord`] for each fragment that was ever made. The counters
//! themselves are words of the emitter, which generated code increments.
//!
//! Invariants:
//! * An entry outlives its fragment. After a flush the ids of fragments and exits start again, so
//!   [`Ledger::close`] must be called before; the words of counters are not used again.
//! * Each failure that comes to the runtime is counted here, by [`Ledger::left`]. All other
//!   failures of a site went along the link of its exit. An exit may be linked to several fragments
//!   in turn, so each change of the link starts a link period with the counts at that time.
//!
//! The caller holds the lock of the fragments, which own the ledger.
//!
//! Example: a guard fails 10 times and comes to the runtime each time. Then a side trace, entry 7,
//! is attached to its exit: the site gets the period (fragment 7, failed 10, to the runtime 10). At
//! the end of the run the guard has failed 30 times and the runtime has counted 10: 20 failures
//! went to fragment 7.

use super::describe::{guard, hex, steps};
use crate::observe::census::{
    Code, CodeBytes, CompileTimes, Detail, End, Entrance, Fragment, From, Interpreted, Kind, To,
    Went,
};
use crate::observe::certificate::{Certificate, Proof};
use dynasour_emitter::counting::{CountedSite, Destination, Tally};
use dynasour_emitter::{Emitter, ExitId, FragmentId, SiteKind};
use dynasour_ir::expressions::Expressions;
use dynasour_ir::{Context, Version};
use dynasour_tracer::{Path, TraceShape};
use rustc_hash::FxHashMap;

/// What the ledger is told about a new fragment; it asks the emitter for everything else.
pub struct Made<'a> {
    pub version: &'a Version,
    pub path: &'a Path,
    /// The exit for which it was made, if it is a side trace.
    pub from: Option<ExitId>,
    pub times: CompileTimes,
    /// The version as built, with `--count-detail`.
    pub built: Option<BuiltText>,
    /// What was compared, with `--verify-traces`: of the version, and of its code.
    pub certificates: [Option<Certificate>; 2],
    /// What `--prove-traces` has shown.
    pub proofs: [Option<Proof>; 2],
    pub alias_guards: bool,
}

/// A version as it was built.
#[derive(Debug)]
pub struct BuiltText {
    /// Its text.
    pub text: String,
    /// By block and instruction: the address of the guest instruction that it was made for.
    pub pcs: Vec<Vec<u64>>,
}

/// The beginning of a link period: from here on, failures go to `to`.
struct LinkPeriod {
    to: To,
    /// Failures of the site before the period.
    failed: u64,
    /// Those of them that came to the runtime.
    to_runtime: u64,
}

/// A site of a fragment.
struct SiteRecord {
    counted: CountedSite,
    /// If it is a guard: its index in [`Fragment::guards`].
    guard: Option<u32>,
    /// Is it a guard that is left before a guest instruction was executed?
    is_at_entry: bool,
    /// Number of times that control came to the runtime from it.
    to_runtime: u64,
    link_periods: Vec<LinkPeriod>,
}

/// The record of a fragment.
struct FragmentRecord {
    fragment: Fragment,
    tally: Tally,
    sites: Vec<SiteRecord>,
    /// The emitter's id of the fragment; valid until the fragment is dropped.
    emitted: FragmentId,
    /// Where its ends lead: at the last [`Ledger::settle`] before the fragment was dropped.
    ends: Vec<Ended>,
}

/// Where an end of a fragment leads.
struct Ended {
    exit: ExitId,
    target: Option<u64>,
    to: To,
}

/// The records of a counting run (see the header).
#[derive(Default)]
pub struct Ledger {
    entries: Vec<FragmentRecord>,
    /// The fragments that have not been dropped, with the numbers of their entries.
    live: FxHashMap<FragmentId, usize>,
    /// Was a fragment made without counters?
    incomplete: bool,
}

impl Ledger {
    /// Records a fragment that was made from a path.
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
        entry.fragment.guest_instructions = made.path.instructions();
        entry.fragment.interpreted = made.path.guest.as_ref().map(|guest| Interpreted {
            key: guest.key.clone(),
            registers: guest.registers.iter().map(|(g, value)| (g.to_string(), *value)).collect(),
            is_by_position: guest.is_by_position,
            assumes_operands: guest.assumes_operands,
        });
        let facts = |context: &Context| {
            let of_registers = context.facts.iter().filter(|fact| fact.register().is_some());
            of_registers.map(ToString::to_string).collect()
        };
        entry.fragment.entrance.known = facts(&made.version.context);
        if let Some(fragment) = emitter.fragment(id).filter(|_| made.from.is_none()) {
            entry.fragment.entrance.needs = facts(&fragment.contexts.entry);
            entry.fragment.entrance.needs_more = !fragment.contexts.is_sufficient;
        }
        entry.fragment.compile_ns = made.times;
        entry.fragment.certificates = made.certificates;
        entry.fragment.proofs = made.proofs;
        let expressions = Expressions::new(made.version);
        let mut guards = Vec::new();
        for (n, site) in
            entry.tally.sites.iter().enumerate().filter(|(_, s)| s.kind == SiteKind::Guard)
        {
            let Some(position) = site.position else { continue };
            if let Some(described) = guard(made.version, &expressions, position) {
                guards.push((n, described));
            }
        }
        guards.sort_by_key(|(_, guard)| guard.position);
        let mut of_site: FxHashMap<String, u32> = FxHashMap::default();
        for (index, (n, mut guard)) in guards.into_iter().enumerate() {
            guard.index = index as u32;
            let alike = of_site.entry(guard.site.clone()).or_default();
            *alike += 1;
            if *alike > 1 {
                guard.site = format!("{}#{alike}", guard.site);
            }
            guard.host = (entry.sites[n].counted.host, entry.sites[n].counted.cold);
            entry.sites[n].guard = Some(guard.index);
            entry.fragment.guards.push(guard);
        }
        if let Some(built) = made.built {
            let none = Code { at: 0, hex: String::new() };
            entry.fragment.detail = Some(Detail {
                built: built.text,
                pcs: built.pcs,
                optimised: made.version.to_string(),
                alias_guards: made.alias_guards,
                entry: 0,
                hot: none.clone(),
                cold: none,
                positions: Vec::new(),
            });
        }
        if let Some(exit) = made.from {
            self.attached(emitter, exit, id);
        }
    }

    /// Records the resolved stub of an exit, to which the exit leads from now on.
    pub fn made_stub(&mut self, emitter: &Emitter, id: FragmentId, exit: ExitId) {
        self.entry(emitter, id, Kind::Stub, Some(exit));
        self.attached(emitter, exit, id);
    }

    /// Makes the entry of a fragment; none if the fragment has no counters.
    fn entry(
        &mut self,
        emitter: &Emitter,
        id: FragmentId,
        kind: Kind,
        from: Option<ExitId>,
    ) -> Option<&mut FragmentRecord> {
        let fragment = emitter.fragment(id)?;
        let Some(tally) = &fragment.tally else {
            self.incomplete = true;
            return None;
        };
        let number = self.entries.len();
        let from = from.and_then(|exit| self.origin(emitter, exit));
        self.entries.push(FragmentRecord {
            fragment: Fragment {
                id: number as u32,
                name: fragment.version.clone(),
                kind,
                pc: fragment.pc,
                from,
                path: Vec::new(),
                guest_instructions: 0,
                interpreted: None,
                entrance: Entrance::default(),
                code_bytes: CodeBytes {
                    hot: fragment.hot.end - fragment.hot.start,
                    cold: fragment.cold.end - fragment.cold.start,
                },
                spill_slots: fragment.spill_slots,
                moves: fragment.hot_moves,
                compile_ns: CompileTimes::default(),
                certificates: [None; 2],
                proofs: [None, None],
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
                .map(|s| SiteRecord {
                    counted: *s,
                    guard: None,
                    is_at_entry: emitter.exit(s.exit).is_some_and(|exit| {
                        let leads_back = exit.target == Some(fragment.pc);
                        exit.kind == SiteKind::Guard && leads_back && !exit.progress
                    }),
                    to_runtime: 0,
                    link_periods: Vec::new(),
                })
                .collect(),
            tally: (**tally).clone(),
            emitted: id,
            ends: Vec::new(),
        });
        self.live.insert(id, number);
        self.entries.last_mut()
    }

    /// The site that leaves by `exit`.
    fn site(&mut self, emitter: &Emitter, exit: ExitId) -> Option<&mut SiteRecord> {
        let entry = *self.live.get(&emitter.exit(exit)?.fragment)?;
        self.entries[entry].sites.iter_mut().find(|s| s.counted.exit == exit)
    }

    /// `exit` as the origin of a fragment that is made for it.
    fn origin(&mut self, emitter: &Emitter, exit: ExitId) -> Option<From> {
        let fragment = *self.live.get(&emitter.exit(exit)?.fragment)? as u32;
        let sharing = emitter.sharing(exit);
        let guards = sharing.into_iter().filter_map(|e| self.site(emitter, e)?.guard);
        let mut guards: Vec<u32> = guards.collect();
        guards.sort_unstable();
        Some(From { fragment, guards })
    }

    /// Records that `exit`, and the exits that share its link, lead to `target` from now on.
    pub fn attached(&mut self, emitter: &Emitter, exit: ExitId, target: FragmentId) {
        let Some(&fragment) = self.live.get(&target) else { return };
        let to = To::Fragment { fragment: fragment as u32 };
        for exit in emitter.sharing(exit) {
            if let Some(site) = self.site(emitter, exit) {
                let failed = emitter.count(site.counted.left);
                site.link_periods.push(LinkPeriod { to, failed, to_runtime: site.to_runtime });
            }
        }
    }

    /// Counts that control came to the runtime by `exit`.
    pub fn left(&mut self, emitter: &Emitter, exit: ExitId) {
        if let Some(site) = self.site(emitter, exit) {
            site.to_runtime += 1;
        }
    }

    /// Records that all fragments are dropped. To be called while they still exist.
    pub fn close(&mut self, emitter: &Emitter) {
        self.settle(emitter);
        for (_, number) in self.live.drain() {
            self.entries[number].fragment.dropped = true;
        }
    }

    /// Copies what only the emitter knows into the entries of live fragments: destinations of ends,
    /// and native code.
    fn settle(&mut self, emitter: &Emitter) {
        for &number in self.live.values() {
            let entry = &self.entries[number];
            let ends = entry.sites.iter().filter(|s| s.counted.kind == SiteKind::End);
            let ends = ends.filter_map(|site| {
                let exit = site.counted.exit;
                let target = emitter.exit(exit)?.target;
                let to = match emitter.destination(exit) {
                    Destination::Runtime => To::Runtime,
                    Destination::Fragment(id) => {
                        To::Fragment { fragment: *self.live.get(&id)? as u32 }
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
                let positions = f.tally.iter().flat_map(|tally| tally.positions.iter());
                detail.positions = positions.map(|(at, (b, i))| (*at, *b, *i)).collect();
            }
        }
    }

    /// The census records of all fragments with their counts so far, and whether each fragment had
    /// counters. `order` tells the number of a version in its region.
    pub fn report(
        &mut self,
        emitter: &Emitter,
        order: impl Fn(FragmentId) -> Option<u32>,
    ) -> (Vec<Fragment>, bool) {
        self.settle(emitter);
        let mut fragments: Vec<Fragment> =
            self.entries.iter().map(|entry| entry.report(emitter)).collect();
        for (id, number) in &self.live {
            fragments[*number].entrance.order = order(*id);
        }
        (fragments, !self.incomplete)
    }
}

impl FragmentRecord {
    /// The census record with the counts so far.
    fn report(&self, emitter: &Emitter) -> Fragment {
        let count = |word| emitter.count(word);
        let mut fragment = self.fragment.clone();
        fragment.entered = count(self.tally.entered);
        let is_loop = matches!(fragment.kind, Kind::Loop | Kind::SideLoop);
        fragment.iterations = is_loop.then(|| count(self.tally.iterations));
        for site in &self.sites {
            let left = count(site.counted.left);
            fragment.entrance.refused += if site.is_at_entry { left } else { 0 };
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
                    add(&mut went, To::Runtime, site.to_runtime);
                    if let Some(ended) = ended {
                        add(&mut went, ended.to, linked);
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

impl SiteRecord {
    /// Where control went in `failed` failures.
    fn went(&self, failed: u64) -> Vec<Went> {
        let mut went = Vec::new();
        add(&mut went, To::Runtime, self.to_runtime);
        for (n, period) in self.link_periods.iter().enumerate() {
            let next = self
                .link_periods
                .get(n + 1)
                .map_or((failed, self.to_runtime), |s| (s.failed, s.to_runtime));
            let all = next.0.saturating_sub(period.failed);
            add(&mut went, period.to, all.saturating_sub(next.1 - period.to_runtime));
        }
        went
    }
}

/// Adds `times` to the count of a destination.
fn add(went: &mut Vec<Went>, to: To, times: u64) {
    match went.iter_mut().find(|w| w.to == to) {
        Some(w) => w.times += times,
        None if times > 0 => went.push(Went { to, times }),
        None => {}
    }
}
