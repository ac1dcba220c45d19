//! Finds loops of the program that an interpreter (the guest) interprets, so that each becomes a
//! trace of its own (docs/design.md, "Recording and speculation").
//!
//! In an interpreter every iteration of the hot loop passes the same *dispatch head* and leaves it
//! by an indirect jump with changing targets. The *greens* (PyPy's word) are the state at the head
//! from which the target follows; they are found by following the target backwards. Typically they
//! are the interpreter's own program counter, in a register or in memory. The values of the greens
//! at one passage of the head are its *key*. A recording that passes the head goes on until a key
//! repeats. Then the interpreted program has gone round a loop, and the path between is the trace, if it does not
//! rather begin elsewhere in the loop ([`crate::closing`]).
//!
//! ```text
//! head: mov eax, [rbx]          greens: rbx       passages: 0x10, 0x14, 0x1c, 0x14
//!       add rbx, 4                                                  └── the loop ──┘
//!       jmp [table + rax*8]
//! ```
//!
//! The trace begins by assuming the key. Then it assumes the observed results of loads whose
//! addresses follow from the key, as far as a dispatch depends on them ([`promotions`]). So the
//! addresses of the next loads are known too, and the dispatches fold away.
//!
//! **Data.** [`DispatchHeads`] has, for each dispatch head, its greens, the keys with a trace and
//! the number of failed searches. **Invariant.** A wrong guess costs a guard that fails, never a
//! wrong result. **Callers.** Each thread has a table of its own, part of
//! [`crate::TraceSelector`]; the recorder and the runtime call it on that thread, without a lock.

use crate::build::{self, Path, Step, TraceShape};
use crate::definitions::{Definitions, Given};
use crate::policy::DefaultPolicy;
use crate::positions::positions;
use crate::recorder::Transfer;
use dynasour_guest::lift::LiftedBlock;
use dynasour_ir::predict::Surroundings;
use dynasour_ir::{Gpr, GuestTerm, Inst, Loc, Op, Operand, Term, Ty, Value, Version};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeSet;

/// Failed searches after which a head no longer counts as the dispatch head of an interpreter
/// (guess; too many waste recordings on ordinary loops).
const MAX_FAILURES: u32 = 2;
/// The same if the time of recordings is limited.
const MAX_TIMED_FAILURES: u32 = 8;
/// Failed searches of all heads together that are allowed, and again as many for each loop found
/// (guess: a search costs as much as compiling some traces).
const FREE_FAILURES: u32 = 8;
/// Most keys of one head that have a trace (guess, after context dispatch's limit of 15 versions).
const MAX_KEYS: usize = 14;
/// The number of recordings that begin as soon as the guest reaches a known dispatch head, without
/// counting first (guess; too many record a program's start-up).
const EAGER: u32 = 4;
/// Searches in a row for more loops of one head that may find none (guess; too many waste recordings).
const MOST_VAIN: u32 = 4;
/// If more operands of the loops of one head have changed, none is assumed any more (guess: they are
/// data, not code).
const MOST_UNDONE: usize = 64;
/// A register whose value is less than this many bytes above the stack pointer holds the address of
/// a frame, so it is no green (guess; too many miss a program counter that points to the stack).
const FRAMES: u64 = 1 << 20;
/// Most greens of a head (guess: an interpreter keeps its program counter in fewer locations; more
/// mean that the slice is something else).
const MAX_GREENS: usize = 12;
/// A load within this many bytes of one that drives the dispatch reads an operand (guess: of
/// experiments with several interpreters; too many assume what changes).
const NEAR: u64 = 32;
/// Most values visited when a target is followed backwards (guess; bounds the time of a search).
const MAX_SLICE: usize = 200;

/// A location on whose content an interpreter's dispatch depends.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Green {
    /// A register.
    Register(Gpr),
    /// Memory at a register's value plus a displacement.
    Slot(Gpr, i64, Ty),
}

/// The values of the greens, in the order of the greens.
pub type Key = Vec<u64>;

/// What is known of one dispatch head.
#[derive(Debug, Default)]
struct Head {
    /// Empty while they are not known.
    greens: Vec<Green>,
    /// Keys that have a trace.
    keys: Vec<Key>,
    /// Searches that found nothing, and traces that were not published.
    failures: u32,
    /// How often [`DispatchHeads::wants_now`] was asked.
    eager: u32,
    /// Searches for more loops that found none, since one was found.
    vain: u32,
    /// Are there fewer greens if loops are told by positions alone?
    has_objects: bool,
    /// Was a loop found there that is entered at the handler that closes it?
    is_shared: bool,
    /// Is it such a handler?
    closes: bool,
    /// Guest instructions of the loop that was postponed last, if no other was found since.
    postponed: Option<u64>,
}

/// What is known of all dispatch heads.
#[derive(Debug, Default)]
pub struct DispatchHeads {
    /// By pc.
    heads: FxHashMap<u64, Head>,
    /// Failures of all heads.
    failures: u32,
    /// Loops of interpreted programs that were found.
    found: u32,
    /// Is no loop ever searched for?
    disabled: bool,
    /// Is the time of recordings limited, so that failures need not be?
    timed: bool,
    /// Guest instructions of the longest loop for which there is time now; any if there is no limit.
    longest: Option<u64>,
    /// Heads whose loops are told by positions alone, whatever objects these come from.
    by_position: FxHashSet<u64>,
    /// The last of them, until the runtime has taken note of it.
    changed: Option<u64>,
    /// Heads whose loops do not assume operands.
    plain: FxHashSet<u64>,
    /// By head: addresses of operands that its loops do not assume, because one had changed.
    undone: FxHashMap<u64, BTreeSet<u64>>,
}

impl DispatchHeads {
    /// An empty table. With `search` false no loop is ever searched for. With `timed`, the time of
    /// recordings is limited, so their number is not.
    pub fn new(search: bool, timed: bool) -> DispatchHeads {
        DispatchHeads { disabled: !search, timed, ..DispatchHeads::default() }
    }

    /// Should a recording that passes `head` search for a loop of an interpreted program?
    pub fn wants(&self, head: u64) -> bool {
        self.may_search() && self.heads.get(&head).is_none_or(|h| h.failures < self.most_failures())
    }

    fn most_failures(&self) -> u32 {
        if self.timed { MAX_TIMED_FAILURES } else { MAX_FAILURES }
    }

    fn may_search(&self) -> bool {
        !self.disabled && (self.timed || self.failures < FREE_FAILURES * (1 + self.found))
    }

    /// Should a recording begin at `head` now, without counting first?
    pub fn wants_now(&mut self, head: u64) -> bool {
        let (may_search, most_failures) = (self.may_search(), self.most_failures());
        let h = self.heads.entry(head).or_default();
        if h.postponed.zip(self.longest).is_some_and(|(waits, longest)| waits > longest) {
            return false;
        }
        h.eager += 1;
        may_search && h.failures < most_failures && h.keys.len() < MAX_KEYS && h.eager <= EAGER
    }

    /// Should another loop be searched for at `head`, where the guest comes often and in none of the
    /// loops that have traces?
    pub fn wants_more(&self, head: u64) -> bool {
        let wants = |h: &Head| {
            h.failures < self.most_failures() && h.keys.len() < MAX_KEYS && h.vain < MOST_VAIN
        };
        self.may_search() && self.heads.get(&head).is_some_and(wants)
    }

    /// A search for more loops at `head` has found none.
    pub fn found_no_more(&mut self, head: u64) {
        if let Some(h) = self.heads.get_mut(&head) {
            h.vain += 1;
        }
    }

    /// Does `head` have traces of such loops?
    pub fn has_loops(&self, head: u64) -> bool {
        self.heads.get(&head).is_some_and(|h| !h.keys.is_empty())
    }

    /// A loop that was found at `head` is entered at the handler that closes it.
    pub(crate) fn set_shared(&mut self, head: u64) {
        self.heads.entry(head).or_default().is_shared = true;
    }

    /// Does every instruction of an interpreted program pass `head`, so that a trace of an ordinary loop there
    /// would slow them all?
    pub(crate) fn is_shared(&self, head: u64) -> bool {
        self.heads.get(&head).is_some_and(|h| h.is_shared)
    }

    /// `head` is the handler that closes a loop, which was found elsewhere.
    pub(crate) fn set_closing(&mut self, head: u64) {
        self.heads.entry(head).or_default().closes = true;
    }

    /// Is `head` the handler that closes a loop which was found elsewhere?
    pub(crate) fn closes(&self, head: u64) -> bool {
        self.heads.get(&head).is_some_and(|h| h.closes)
    }

    /// Does a recording that begins at `head` search for a loop at once? Otherwise it does when it has left the
    /// head by an indirect jump; a handler that closes loops may first jump to code that it shares with others.
    pub(crate) fn searches_at_once(&self, head: u64) -> bool {
        (self.closes(head) || self.has_loops(head)) && self.wants(head)
    }

    /// The greens of `head`; empty while they are not known.
    pub fn greens(&self, head: u64) -> &[Green] {
        self.heads.get(&head).map_or(&[], |h| &h.greens)
    }

    /// Finds the greens of a head of which these are the steps from one passage on, with the registers there.
    /// False if there are none.
    pub(crate) fn find_greens(&mut self, head: u64, steps: &[Step], gpr: &[u64; 16]) -> bool {
        let dispatches = Dispatches::of(steps);
        let slice = |by_position| match &dispatches {
            Some(dispatches) => dispatches.slice(gpr, by_position, |_| true),
            None => Vec::new(),
        };
        let of_positions = slice(true);
        let greens = match self.by_position.contains(&head) {
            true => of_positions.clone(),
            false => slice(false),
        };
        let h = self.heads.entry(head).or_default();
        h.has_objects = !of_positions.is_empty() && of_positions != greens;
        h.greens = greens;
        !h.greens.is_empty()
    }

    /// Are the loops of `head` told by positions alone?
    pub(crate) fn is_by_position(&self, head: u64) -> bool {
        self.by_position.contains(&head)
    }

    /// No trace could be made of a loop of `head`, or it was too slow. From now on its loops are told by
    /// positions alone. False if they are already, or if that makes no difference.
    pub fn tell_by_position(&mut self, head: u64) -> bool {
        match self.heads.get_mut(&head) {
            Some(h) if h.has_objects && self.by_position.insert(head) => {
                h.greens.clear();
                h.keys.clear();
                self.changed = Some(head);
                true
            }
            _ => false,
        }
    }

    /// The head whose loops are told by position since the last call, if there is one.
    pub fn take_changed(&mut self) -> Option<u64> {
        self.changed.take()
    }

    /// The key of a passage of `head` in this state, if the greens are known and can be read.
    pub fn key(&self, head: u64, around: &Surroundings<'_>) -> Option<Key> {
        let greens = self.greens(head);
        let value = |green: &Green| match *green {
            Green::Register(g) => Some(around.gpr[g.number()]),
            Green::Slot(g, disp, ty) => {
                (around.read)(around.gpr[g.number()].wrapping_add(disp as u64), ty.bytes())
                    .map(|v| v & ty.mask())
            }
        };
        if greens.is_empty() { None } else { greens.iter().map(value).collect() }
    }

    /// Is there a trace for this key?
    pub fn knows(&self, head: u64, key: &Key) -> bool {
        self.heads.get(&head).is_some_and(|h| h.keys.contains(key))
    }

    /// Notes that a trace for this key is being made. False if the head has too many.
    pub(crate) fn add(&mut self, head: u64, key: Key) -> bool {
        let h = self.heads.entry(head).or_default();
        let has_room = h.keys.len() < MAX_KEYS;
        if has_room {
            h.keys.push(key);
            (h.vain, h.postponed) = (0, None);
            self.found += 1;
        }
        has_room
    }

    /// Notes that a search found nothing or, with `made`, that the trace noted last for `head` was
    /// not published.
    pub fn fail(&mut self, head: u64, made: bool) {
        self.failures += 1;
        if let Some(h) = self.heads.get_mut(&head) {
            h.failures += 1;
            if made {
                h.keys.pop();
            }
            if h.keys.is_empty() {
                // The greens may have been wrong; the next search finds them anew.
                h.greens.clear();
            }
        }
    }

    /// A trace of `head` was too slow. From now on its loops assume less: no objects that positions come
    /// from, or no operands. False if they do not already.
    pub fn assume_less(&mut self, head: u64) -> bool {
        self.tell_by_position(head) || self.plain.insert(head)
    }

    /// Operands of loops of `head`, at these addresses, have changed: they are not assumed again. The
    /// traces of these keys are gone.
    pub fn undo(&mut self, head: u64, keys: &[Key], addresses: impl IntoIterator<Item = u64>) {
        let undone = self.undone.entry(head).or_default();
        undone.extend(addresses);
        if undone.len() > MOST_UNDONE {
            self.plain.insert(head);
        }
        if let Some(h) = self.heads.get_mut(&head) {
            h.keys.retain(|known| !keys.contains(known));
            (h.vain, h.eager) = (0, 0);
        }
    }

    /// The operands that the loops of `head` do not assume.
    pub(crate) fn undone(&self, head: u64) -> Vec<u64> {
        self.undone.get(&head).into_iter().flatten().copied().collect()
    }

    /// Do the loops of `head` assume operands?
    pub(crate) fn assumes_operands(&self, head: u64) -> bool {
        !self.plain.contains(&head)
    }

    /// The trace noted last for `head` is not made now, but may be later.
    pub fn postpone(&mut self, head: u64) {
        if let Some(h) = self.heads.get_mut(&head) {
            h.keys.pop();
        }
    }

    /// From now on there is time for loops of so many guest instructions.
    pub fn set_longest(&mut self, instructions: u64) {
        self.longest = Some(instructions);
    }

    /// A loop of so many guest instructions was found at `head`: it is postponed if there is no time for it now.
    /// Returns whether it is.
    pub(crate) fn postpone_if_dear(&mut self, head: u64, instructions: u64) -> bool {
        let is_too_dear = self.longest.is_some_and(|longest| instructions > longest);
        if is_too_dear && let Some(h) = self.heads.get_mut(&head) {
            h.postponed = Some(instructions);
        }
        is_too_dear
    }

    /// The guest instructions of a loop of `head` for which there was no time, if no other was found since.
    pub fn postponed(&self, head: u64) -> Option<u64> {
        self.heads.get(&head)?.postponed
    }

    /// The guest instructions of the shortest loop for which there was no time, if there is one.
    pub fn waiting(&self) -> Option<u64> {
        self.heads.values().filter_map(|h| h.postponed).min()
    }

    /// The fragments of `head` have been dropped.
    pub fn forget(&mut self, head: u64) {
        self.heads.remove(&head);
    }

    /// All fragments have been dropped.
    pub fn clear(&mut self) {
        self.heads.clear();
    }
}

/// A loop of an interpreted program.
#[derive(Clone, Debug)]
pub struct GuestLoop {
    /// The values of the greens at the head.
    pub key: Key,
    /// The greens.
    pub greens: Vec<Green>,
    /// Greens that are registers, with their values at the head.
    pub registers: Vec<(Gpr, u64)>,
    /// Registers that had the same value at each passage of the head: bit n is register n.
    pub stable: u16,
    /// Registers that had their value at the passages with this key, and no other passages: bit n is
    /// register n. They tell whether the interpreted program is at the loop's start, also where the
    /// greens are in memory.
    pub telling: u16,
    /// Is it told by positions alone, whatever objects these come from?
    pub is_by_position: bool,
    /// Are the operands of the interpreted program assumed, too?
    pub assumes_operands: bool,
    /// The addresses of those that are not, because one had changed.
    pub undone: Vec<u64>,
    /// The pc of the block that ends in the dispatch.
    pub dispatch: u64,
    /// Is the head the handler that closes the loop, which is passed once in an iteration and seldom by anything
    /// else?
    pub is_closing: bool,
}

/// Does the step end in an indirect jump or call?
pub(crate) fn dispatches(step: &Step) -> bool {
    match &step.block.version.blocks[0].term {
        Term::Guest(GuestTerm::Goto(target) | GuestTerm::Call { target, .. }) => {
            target.as_const().is_none()
        }
        _ => false,
    }
}

/// May the block end in the dispatch of an interpreter? It does if it ends in an indirect jump or
/// call that does not just go through a slot at a fixed address, as those to shared libraries do.
pub(crate) fn may_be_dispatch(block: &LiftedBlock) -> bool {
    let code = &block.version.blocks[0];
    let Term::Guest(GuestTerm::Goto(target) | GuestTerm::Call { target, .. }) = &code.term else {
        return false;
    };
    target.as_value().is_some_and(|v| {
        let load = code.insts.iter().find(|i| i.op == Op::Load && i.def() == Some(v));
        load.is_none_or(|i| i.args.iter().any(|a| a.as_const().is_none()))
    })
}

/// Which of the steps are dispatches of the interpreter, by number. An interpreter dispatches by indirect
/// jumps, or by indirect calls from one place. The other indirect transfers follow data: calls of an
/// object's methods, jump tables of functions that it calls. So the more frequent kind counts; of two that
/// are equally frequent the one that comes first.
fn dispatches_among(steps: &[Step]) -> impl Fn(usize) -> bool {
    let calls = |step: &Step| Transfer::of(&step.block, step.next) == Transfer::Call;
    let all: Vec<(usize, &Step)> =
        steps.iter().enumerate().filter(|(_, step)| may_be_dispatch(&step.block)).collect();
    // Where an indirect jump is: nowhere; and how often each kind comes, with its first step.
    let mut kinds: Vec<(Option<u64>, usize)> = Vec::new();
    for (_, step) in &all {
        let place = calls(step).then_some(step.block.pc);
        match kinds.iter_mut().find(|kind| kind.0 == place) {
            Some(kind) => kind.1 += 1,
            None => kinds.push((place, 1)),
        }
    }
    // `max_by_key` returns the last of several.
    let place = kinds.iter().rev().max_by_key(|kind| kind.1).map(|kind| kind.0);
    let chosen: FxHashSet<usize> = all
        .into_iter()
        .filter(|(_, step)| Some(calls(step).then_some(step.block.pc)) == place)
        .map(|(n, _)| n)
        .collect();
    move |n| chosen.contains(&n)
}

/// Registers that are no greens, but from which targets of dispatches in this loop follow, too: of those in
/// `stable`, with their values at the head, `gpr`. For example an interpreter's jumps may add to the
/// start of the program, which no other instruction reads. A word that is loaded without an index is a field
/// of an object, which may be another object the next time.
pub(crate) fn more_registers(
    steps: &[Step],
    gpr: &[u64; 16],
    stable: u16,
    greens: &[Green],
) -> Vec<(Gpr, u64)> {
    let Some(dispatches) = Dispatches::of(steps) else { return Vec::new() };
    let may_pass = |load: &Inst| load.ty != Ty::I64 || load.args[1].as_const().is_none();
    let found = dispatches.slice(gpr, false, may_pass);
    let registers = found.into_iter().filter_map(|green| match green {
        Green::Register(g) => Some(g),
        Green::Slot(..) => None,
    });
    registers
        .filter(|g| stable & 1 << g.number() != 0 && !greens.contains(&Green::Register(*g)))
        .map(|g| (g, gpr[g.number()]))
        .collect()
}

/// The dispatches of a path from a head on.
struct Dispatches {
    /// The path, in one block.
    version: Version,
    /// Where they lead to, if that is not always the same.
    targets: Vec<Operand>,
}

impl Dispatches {
    /// Those in these steps; none if no version can be made of them.
    fn of(steps: &[Step]) -> Option<Dispatches> {
        let path = Path {
            head: steps.first()?.block.pc,
            shape: TraceShape::Linear,
            steps: steps.to_vec(),
            stable: Vec::new(),
            guest: None,
            entry: Box::default(),
            others: Vec::new(),
            runs: None,
        };
        let (version, jumps) = build::with_targets(&path, &DefaultPolicy::default()).ok()?;
        let is_dispatch = dispatches_among(steps);
        let targets =
            jumps.into_iter().filter(|(_, step)| is_dispatch(*step)).map(|(t, _)| t).collect();
        Some(Dispatches { version, targets })
    }

    /// The state at the head, where the registers are `gpr`, from which the targets follow, through the loads that
    /// `passes` accepts. With `by_position`, objects that positions are loaded from do not belong to it. The steps
    /// must pass the head twice, because a dispatch often depends on a value that was loaded one dispatch earlier.
    fn slice(&self, gpr: &[u64; 16], by_position: bool, passes: fn(&Inst) -> bool) -> Vec<Green> {
        let targets = &self.targets;
        let entry = &self.version.blocks[0];
        let defs = Definitions::new(
            &entry.insts,
            entry.params.iter().copied().zip(self.version.entry_locs.iter().copied()),
        );
        let positions = positions_if(by_position, &defs, targets);
        let at_head = positions_if(by_position, &defs, &targets[..targets.len().min(1)]);
        let is_frame = |g: Gpr| gpr[g.number()].wrapping_sub(gpr[Gpr::RSP.number()]) < FRAMES;
        let mut greens = Vec::new();
        let mut seen = FxHashSet::default();
        let mut work = targets.clone();
        while let Some(operand) = work.pop() {
            let Operand::Value(v) = operand else { continue };
            if !seen.insert(v) || seen.len() > MAX_SLICE {
                continue;
            }
            if let Some(loc) = defs.param(v) {
                if let Loc::Gpr(g) = loc
                    && !is_frame(g)
                {
                    greens.push(Green::Register(g));
                }
                continue;
            }
            let Some(inst) = defs.inst(v).filter(|i| i.op == Op::Load || i.op.is_pure()) else {
                continue;
            };
            match (inst.op, inst.mem) {
                (Op::Load, _) if !passes(inst) => {}
                (Op::Load, Some(mem)) => {
                    if let Some(stored) = defs.stored_before(v) {
                        work.push(stored);
                        continue;
                    }
                    // The object that a position is loaded from is none itself. What it holds now says where the
                    // program is only if that is the position at the head.
                    let is_loaded = defs.is_loaded_position(v, &positions);
                    if is_loaded && !at_head.contains(&v) {
                        continue;
                    }
                    if let Some((g, disp)) = defs.slot(inst, &mem) {
                        greens.push(Green::Slot(g, disp, inst.ty));
                    }
                    if !is_loaded {
                        work.extend_from_slice(&inst.args);
                    }
                }
                // The condition of a `select` is assumed; it is not part of the position in the
                // interpreted program.
                (Op::Select, _) => work.extend_from_slice(&inst.args[1..]),
                _ => work.extend_from_slice(&inst.args),
            }
        }
        greens.sort_unstable_by_key(|g| match *g {
            Green::Register(g) => (g.number(), 0),
            Green::Slot(g, disp, _) => (g.number() + 16, disp),
        });
        greens.dedup();
        if greens.len() > MAX_GREENS { Vec::new() } else { greens }
    }
}

/// The positions from which these jumps are fetched, if they are wanted.
pub(crate) fn positions_if(
    wanted: bool,
    defs: &Definitions<'_>,
    targets: &[Operand],
) -> FxHashSet<Value> {
    if wanted { positions(defs, targets) } else { FxHashSet::default() }
}

/// A load of a path: where it was observed to read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ObservedLoad {
    pub value: Value,
    pub address: u64,
    pub ty: Ty,
    /// The value that it has read.
    pub observed: u64,
}

/// Adds to the `promoted` values the operands of the interpreted program: the loads, in the order of
/// the path, whose addresses follow from constants and lie near those of promoted loads, but not those
/// that `may_change`, by address. A position that was loaded from an object is not near its operands. Returns
/// the loads added.
pub(crate) fn promote_operands(
    defs: &Definitions<'_>,
    positions: &FxHashSet<Value>,
    loads: &[ObservedLoad],
    may_change: impl Fn(u64) -> bool,
    promoted: &mut FxHashSet<Value>,
) -> Vec<ObservedLoad> {
    let mut added = Vec::new();
    let is_near = |load: &&ObservedLoad| {
        promoted.contains(&load.value) && !defs.is_loaded_position(load.value, positions)
    };
    let mut near: BTreeSet<u64> = loads.iter().filter(is_near).map(|l| l.address).collect();
    for load in loads {
        let around = load.address.saturating_sub(NEAR)..=load.address.saturating_add(NEAR);
        if promoted.contains(&load.value)
            || may_change(load.address)
            || near.range(around).next().is_none()
        {
            continue;
        }
        let Some(inst) = defs.inst(load.value).filter(|i| i.mem.is_some_and(|m| m.seg.is_none()))
        else {
            continue;
        };
        let mut budget = MAX_SLICE;
        if inst.args.iter().all(|a| defs.is_known(*a, promoted, &mut budget)) {
            promoted.insert(load.value);
            near.insert(load.address);
            added.push(*load);
        }
    }
    added
}

/// The values that must be assumed so that the targets of `jumps` are constants. A jump whose target cannot be made
/// constant is left out.
pub(crate) fn promotions(
    defs: &Definitions<'_>,
    jumps: &[Operand],
    given: Given<'_>,
) -> FxHashSet<Value> {
    let mut all = FxHashSet::default();
    for jump in jumps {
        let mut found = all.clone();
        let mut budget = MAX_SLICE;
        if defs.follows(*jump, given, &mut found, &mut budget) {
            all = found;
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use dynasour_guest::lift::{Bytes, MAX_BLOCK, lift_block};
    use std::sync::Arc;

    /// A step whose block at `pc` is this one instruction.
    fn step(pc: u64, bytes: &[u8]) -> Step {
        let block = Arc::new(lift_block(pc, &Bytes { start: pc, bytes }, MAX_BLOCK));
        Step { block, next: 0x9000, observed: None }
    }

    /// The numbers of the dispatches among jumps (j), calls at two places (c, d), and jumps through a slot
    /// at a fixed address (p).
    fn dispatches(kinds: &str) -> Vec<usize> {
        let step = |kind: char| match kind {
            'j' => step(0x1000, &[0xff, 0xe0]),
            'c' => step(0x2000, &[0xff, 0x13]),
            'd' => step(0x3000, &[0xff, 0x13]),
            _ => step(0x4000, &[0xff, 0x25, 0, 0, 0, 0]),
        };
        let steps: Vec<Step> = kinds.chars().map(step).collect();
        let is_dispatch = dispatches_among(&steps);
        (0..steps.len()).filter(|n| is_dispatch(*n)).collect()
    }

    #[test]
    fn nothing_is_recorded_at_once_while_a_loop_waits_for_time() {
        let mut heads = DispatchHeads::new(true, true);
        heads.set_longest(100);
        assert!(heads.wants_now(0x1000) && heads.waiting().is_none());
        assert!(heads.postpone_if_dear(0x1000, 200) && !heads.postpone_if_dear(0x1000, 50));
        assert!((0..2 * EAGER).all(|_| !heads.wants_now(0x1000)), "it would be postponed again");
        assert_eq!(heads.waiting(), Some(200));
        heads.set_longest(300);
        assert!((1..EAGER).all(|_| heads.wants_now(0x1000)) && !heads.wants_now(0x1000));
    }

    #[test]
    fn dispatches_are_the_more_frequent_kind_of_transfer() {
        assert_eq!(dispatches("jcjcj"), [0, 2, 4], "jumps, and calls of methods");
        assert_eq!(dispatches("cjpcdcd"), [0, 3, 5], "calls from one place");
        assert_eq!(dispatches("cj"), [0], "the first of two");
        assert_eq!(dispatches("jcdp"), [0]);
        assert!(dispatches("pp").is_empty(), "calls of shared libraries");
    }
}
