//! The cases of a validation.
//!
//! The first case is the recorded state. Memory may have changed since it was recorded, and natives
//! compute something else in the evaluator, so it is mended, guard by guard, until the version as built
//! executes its whole path ([`on_path`]). The other cases are made of that one. A run of each version
//! proposes *directed* ones: where a guard has the other outcome, an address equals an earlier one or
//! overlaps it, a page cannot be accessed. Others are *random*: registers with boundary values, or near
//! each other. The kinds take turns, so that each has its share of the time.
//!
//! Data: [`Cases`], lists of changes. Invariant: the same version and state give the same cases. No lock.
//!
//! ```text
//! on path: rdi = 0x1000 …      changes: [0x1000] = 6 | rsi = 0x1004 | page 0x1 faults | rcx = -1 …
//! ```

use super::case::{Case, Change};
use super::machine::Shadow;
use super::solve::{Sources, What};
use super::{Validation, content, insts, is_poll};
use crate::eval::{Hooks, Leave, Machine, Reason, run};
use crate::op::Op;
use crate::random::Rng;
use crate::reach::Point;
use crate::semantics::ARITH_FLAGS;
use crate::types::{AnchorId, Loc, Operand, Ty};
use crate::version::{Effects, Inst, Mem, Version};
use rustc_hash::FxHashSet;

/// Times that the guards of a path are mended at most (guess: mending one may undo another).
const MOST_ROUNDS: u64 = 16;
/// Accesses of a run that are remembered, to be met by later ones (guess).
const MOST_ACCESSES: usize = 256;

/// One in so many cases has two changes; prime to the number of kinds, so that each kind is alone, too.
const PAIRS: usize = 7;

/// Changes of each kind that a run proposes.
#[derive(Default)]
struct Proposals {
    flips: Vec<Change>,
    overlaps: Vec<Change>,
    faults: Vec<Change>,
}

/// Watches a run, and proposes changes.
struct Proposer<'v, 'r> {
    version: &'v Version,
    sources: &'r Sources<'v>,
    rng: &'r mut Rng,
    seen: FxHashSet<Point>,
    pages: FxHashSet<u64>,
    accesses: Vec<(u64, u32)>,
    proposals: Proposals,
    /// What would let the guards hold that have failed, if they are to be mended.
    mended: Option<Vec<Change>>,
    /// Guards that have failed and cannot be mended.
    hopeless: u64,
    polls: u64,
}

impl Proposer<'_, '_> {
    fn access(
        &mut self,
        (inst, point): (&Inst, Point),
        mem: &Mem,
        values: &[u64],
        machine: &Shadow<'_>,
    ) {
        let segment = mem.seg.map_or(0, |s| machine.segment_base(s));
        let (base, index) = (inst.args[0], inst.args[1]);
        let scaled = content(values, index).wrapping_mul(u64::from(mem.scale));
        let rest = segment.wrapping_add(scaled).wrapping_add(mem.disp as u64);
        let address = content(values, base).wrapping_add(rest);
        let native = inst.native.and_then(|n| self.version.natives.get(n.index()));
        let size = native.map_or(inst.ty.bytes(), |native| native.mem_size.unwrap_or(0));
        if size == 0 {
            // Only the address is computed.
            return;
        }
        match native {
            None if inst.op == Op::Store => {
                self.sources.store(address, size, What::Operand(inst.args[2]));
            }
            Some(native) if native.effects.contains(Effects::WRITE) => {
                self.sources.store(address, size, What::Native(native.inst.ip()));
            }
            _ => {}
        }
        if let Some(mended) = &mut self.mended
            && !machine.can_load(address, size)
        {
            // Somewhere else, where it can be read: an address that a native computed is arbitrary.
            let elsewhere = self.accesses.last().map_or(machine.stack(), |(address, _)| *address);
            let wanted = elsewhere.wrapping_sub(rest);
            match self.sources.set(base, Ty::I64, wanted, values) {
                Some(change) => mended.push(change),
                None => self.hopeless += 1,
            }
            return;
        }
        if !self.seen.insert(point) {
            return;
        }
        if self.mended.is_none() {
            self.propose((address, size), (base, rest), values);
        }
        if self.accesses.len() < MOST_ACCESSES {
            self.accesses.push((address, size));
        }
    }

    /// Proposes other pages and other addresses for an access at `base + rest`.
    fn propose(
        &mut self,
        (address, size): (u64, u32),
        (base, rest): (Operand, u64),
        values: &[u64],
    ) {
        if self.pages.insert(address >> 12) {
            self.proposals.faults.extend([Change::Unwritable(address), Change::Faulting(address)]);
        }
        if let Some((other, length)) =
            (!self.accesses.is_empty()).then(|| self.accesses[self.rng.below(self.accesses.len())])
        {
            // The same place, or one that overlaps it at either end.
            let ends = [0, u64::from(length) - 1, u64::from(size - 1).wrapping_neg()];
            let wanted = other.wrapping_add(self.rng.pick(&ends));
            let change = self.sources.set(base, Ty::I64, wanted.wrapping_sub(rest), values);
            self.proposals.overlaps.extend(change.filter(|_| wanted != address));
        }
    }
}

impl<'m> Hooks<Shadow<'m>> for Proposer<'_, '_> {
    fn before(&mut self, inst: &Inst, point: Point, values: &[u64], machine: &Shadow<'m>) {
        if !matches!(inst.op, Op::Assume | Op::Load | Op::Store | Op::Native) {
            return;
        }
        match (inst.op, &inst.mem) {
            (Op::Assume, _) if self.mended.is_none() && self.seen.insert(point) => {
                self.proposals.flips.extend(self.sources.flip(inst.args[0], values))
            }
            (_, Some(mem)) => {
                self.access((inst, point), mem, values, machine);
            }
            _ => {}
        }
    }

    fn fails(&mut self, inst: &Inst, values: &[u64]) -> bool {
        let Some(mended) = &mut self.mended else { return true };
        match self.sources.flip(inst.args[0], values) {
            Some(change) => mended.push(change),
            None => self.hopeless += 1,
        }
        false
    }

    fn force(&mut self, _anchor: AnchorId, point: Point) -> bool {
        if is_poll(self.version, point) {
            self.polls = self.polls.saturating_sub(1);
        }
        self.polls == 0
    }
}

/// Runs a version, and returns what was proposed. With `mends` it goes on where guards fail.
fn propose<'v, 'r>(
    validation: &mut Validation<'_>,
    (version, sources): (&'v Version, &'r Sources<'v>),
    case: &Case,
    rng: &'r mut Rng,
    mends: bool,
) -> (Option<Leave>, Proposer<'v, 'r>) {
    let (mut state, mut machine) =
        (case.state.clone(), Shadow::new(case, &validation.memory, version));
    let mut proposer = Proposer {
        version,
        sources,
        rng,
        seen: FxHashSet::default(),
        pages: FxHashSet::default(),
        accesses: Vec::new(),
        proposals: Proposals::default(),
        mended: mends.then(Vec::new),
        hopeless: 0,
        polls: validation.iterations() + 1,
    };
    sources.begin();
    // Enough for each instruction in each iteration, and loops without polls end.
    let most = insts(version) * (validation.iterations() + 2);
    let mut steps = most;
    let left = run(version, &mut state, &mut machine, &mut proposer, &mut steps);
    validation.report.steps += most - steps;
    (left.ok(), proposer)
}

/// The case in which the version as built executes its whole path, if one is found, else the one that
/// comes farthest. Says whether it was found.
pub(super) fn on_path(validation: &mut Validation<'_>, mut case: Case) -> (Case, bool) {
    let built = validation.subject.built;
    let sources = Sources::new(built);
    let mut rng = Rng::new(0);
    for _ in 0..MOST_ROUNDS {
        let (left, found) = propose(validation, (built, &sources), &case, &mut rng, true);
        let failed = matches!(left, Some(Leave::Anchor { reason: Reason::Fault(_), .. }));
        let mended = found.mended.unwrap_or_default();
        if mended.is_empty() {
            return (case, !failed && found.hopeless == 0);
        }
        // Where two change the same, the first one is right: it decides what the later ones see.
        for change in mended.into_iter().rev() {
            case = case.with(change, built, &validation.memory);
        }
    }
    (case, false)
}

/// Cases to come.
#[derive(Clone)]
pub(super) struct Cases {
    /// The changes of each kind, the next one last.
    kinds: [Vec<Change>; 3],
    turn: usize,
}

impl Cases {
    /// The cases that runs of both versions propose, from the case that executes the path.
    pub fn new(validation: &mut Validation<'_>, on_path: &Case, rng: &mut Rng) -> Cases {
        let mut kinds = [const { Vec::new() }; 3];
        for version in [validation.subject.optimised, validation.subject.built] {
            let sources = Sources::new(version);
            let (_, proposer) = propose(validation, (version, &sources), on_path, rng, false);
            let Proposals { flips, overlaps, faults } = proposer.proposals;
            for (kind, mut changes) in kinds.iter_mut().zip([flips, overlaps, faults]) {
                shuffle(&mut changes, rng);
                // Those of the optimised version come last in the list, so first in turn.
                kind.splice(0..0, changes);
            }
        }
        Cases { kinds, turn: 0 }
    }

    /// The next case.
    pub fn next(&mut self, validation: &Validation<'_>, on_path: &Case, rng: &mut Rng) -> Case {
        let version = validation.subject.optimised;
        let turn = self.turn;
        self.turn += 1;
        let mut change = |case: &Case, turn: usize, rng: &mut Rng| {
            let kind = turn % (self.kinds.len() + 1);
            let directed = self.kinds.get_mut(kind).and_then(Vec::pop);
            let change = directed.unwrap_or_else(|| random(version, case, rng));
            case.with(change, version, &validation.memory)
        };
        let mut case = change(on_path, turn, rng);
        if turn % PAIRS == PAIRS - 1 {
            case = change(&case, turn / PAIRS, rng);
        }
        case.peer = !version.context.private_memory() && turn % 3 == 2;
        case
    }
}

fn shuffle(changes: &mut [Change], rng: &mut Rng) {
    for i in (1..changes.len()).rev() {
        changes.swap(i, rng.below(i + 1));
    }
}

/// A register or the flags with another content.
fn random(version: &Version, case: &Case, rng: &mut Rng) -> Change {
    let locs = &version.entry_locs;
    let loc = if locs.is_empty() { Loc::Flags } else { rng.pick(locs) };
    let near =
        |value: u64, rng: &mut Rng| value.wrapping_add(rng.below(33) as u64).wrapping_sub(16);
    let value = match rng.below(3) {
        _ if loc == Loc::Flags => rng.bits() & ARITH_FLAGS,
        0 => rng.interesting(),
        1 => near(case.state.get(loc).unwrap_or(0), rng),
        _ => near(case.state.gpr[rng.below(16)], rng),
    };
    Change::Loc(loc, value)
}
