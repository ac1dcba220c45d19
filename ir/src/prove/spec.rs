//! The side of a proof that says what is right: `base`, executed as far as the version has come, or another
//! trace.
//!
//! **Data.** A [`Spec`] is at a guest instruction, or at an opportunity of the other trace, and remembers the
//! states that it has passed. It goes on only where the version's facts show which way. **Callers.** One
//! proof.
//!
//! ```text
//! at 0x10  add rax, 1
//! at 0x14  jnz 0x10           goes on to 0x10 if the version has assumed rax + 1 != 0
//! ```

use super::facts::Facts;
use super::frame::{Frame, Position, Side, Stuck, World};
use super::simulate::Right;
use super::term::{Symbol, Term};
use crate::eval::check::Code;
use crate::op::Op;
use crate::types::{AnchorId, BlockId, Operand, Ty};
use crate::version::{GuestTerm, Inst, Term as End, Version};
use rustc_hash::FxHashMap;
use std::rc::Rc;

/// What is right.
pub enum Reference<'a> {
    /// The blocks of a program, as far as they have been asked for.
    Program { code: &'a mut dyn Code, found: FxHashMap<u64, Option<Rc<Version>>> },
    /// Another trace.
    Trace(Rc<Version>),
}

impl<'a> Reference<'a> {
    pub fn new(right: Right<'a>) -> Reference<'a> {
        match right {
            Right::Program(code) => Reference::Program { code, found: FxHashMap::default() },
            Right::Trace(version) => Reference::Trace(Rc::new(version.clone())),
        }
    }

    fn block(&mut self, pc: u64) -> Option<Rc<Version>> {
        match self {
            Reference::Program { code, found } => {
                found.entry(pc).or_insert_with(|| code.block(pc).cloned().map(Rc::new)).clone()
            }
            Reference::Trace(_) => None,
        }
    }
}

/// Where the execution is.
#[derive(Clone)]
enum Place {
    /// Before this instruction or terminator of a block, whose state has been noted.
    At(Rc<Version>, usize, usize),
    /// At the entry of a trace.
    Entry(Rc<Version>),
    /// On the way to the block of a program at this pc, which facts may tell later.
    Start(Term),
}

/// An execution of what is right.
#[derive(Clone)]
pub struct Spec {
    place: Place,
    frame: Frame,
    /// The states passed, the current one last.
    pub passed: Vec<Position>,
    steps: u32,
}

/// Most guest instructions in which the state is looked for that a version leaves in (guess; the longest
/// paths have some thousands).
const MOST_STEPS: u32 = 30_000;

impl Spec {
    /// At the entry, in this state.
    pub fn new(reference: &Reference<'_>, start: &Position) -> Result<Spec, Stuck> {
        let Position { pc, locs, .. } = *start;
        let mut frame = Frame::new(start);
        let place = match reference {
            Reference::Program { .. } => Place::Start(pc),
            Reference::Trace(version) => {
                frame.values = vec![None; version.types.len()];
                let entry = version.blocks.first().ok_or("there is no entry block")?;
                for (loc, param) in version.entry_locs.iter().zip(&entry.params) {
                    let index = loc.ssa_index().ok_or("an entry location")?;
                    frame.values[param.index()] = Some(locs[index]);
                }
                Place::Entry(version.clone())
            }
        };
        Ok(Spec { place, frame, passed: vec![start.clone()], steps: 0 })
    }

    /// The same execution in an arbitrary iteration of the loop whose head it is at, in this state.
    pub fn again(
        &self,
        world: &mut World<'_>,
        reference: &Reference<'_>,
        start: &Position,
    ) -> Result<Spec, Stuck> {
        let Reference::Trace(version) = reference else { return Spec::new(reference, start) };
        let locs = start.locs;
        let values = self.frame.values.clone();
        let mut frame = Frame { values, locs: self.frame.locs, ..Frame::new(start) };
        let Place::At(_, block, at) = self.place else { return Err("not at a head".to_string()) };
        let body = &version.blocks[block];
        let anchor = body.insts.get(at).and_then(|inst| inst.anchor);
        let anchor = &version.anchors[anchor.ok_or("not at a safe point")?.index()];
        if !anchor.stores.is_empty() {
            return Err("the other trace defers stores at its head".to_string());
        }
        for param in &body.params {
            // What the anchor does not name may be anything.
            let named = anchor.varmap.iter().find(|(_, o)| *o == Operand::Value(*param));
            let value = match named.and_then(|(loc, _)| loc.ssa_index()) {
                Some(index) => locs[index],
                None => world.terms.symbol(Symbol::Right(*param), version.ty(*param).bits()),
            };
            frame.values[param.index()] = Some(value);
        }
        let place = Place::At(version.clone(), block, at);
        Ok(Spec { place, frame, passed: vec![start.clone()], steps: 0 })
    }

    /// The execution of a trace at its safe point, in an arbitrary iteration: with these values, and with what
    /// precedes the safe point in its block executed again.
    pub fn resumed(
        &self,
        world: &mut World<'_>,
        facts: &mut Facts,
        values: Vec<Option<Term>>,
        start: &Position,
    ) -> Result<Spec, Stuck> {
        let Place::At(version, block, at) = &self.place else { return Err("not at a head".into()) };
        let mut frame = Frame { values, locs: self.frame.locs, ..Frame::new(start) };
        let insts = &version.blocks[*block].insts;
        for inst in &insts[..*at] {
            world.step(&mut frame, facts, version, inst, Side::Shown)?;
        }
        let anchor = insts.get(*at).and_then(|inst| inst.anchor).ok_or("not at a safe point")?;
        let position = world.rebuilt(&frame, facts, version, anchor, Side::Shown)?;
        Ok(Spec { place: self.place.clone(), frame, passed: vec![position], steps: 0 })
    }

    /// The values that a trace has computed, but for those that precede its safe point in its block.
    pub fn values(&self) -> Vec<Option<Term>> {
        let mut values = self.frame.values.clone();
        if let Place::At(version, block, at) = &self.place {
            for def in version.blocks[*block].insts[..*at].iter().flat_map(|inst| &inst.defs) {
                values[def.index()] = None;
            }
        }
        values
    }

    /// The frame of the execution.
    pub fn frame(&self) -> &Frame {
        &self.frame
    }

    /// Takes the version's terms for those of the current state, which have been shown to be equal.
    pub fn adopt(&mut self, version: &Position) {
        let Some(last) = self.passed.last_mut() else { return };
        // A trace has the registers of its entry, and stores that wait.
        if last.locs == self.frame.locs {
            self.frame.locs = version.locs;
        }
        if last.memory == self.frame.memory {
            self.frame.memory = version.memory;
        }
        last.locs = version.locs;
        last.memory = version.memory;
    }

    /// Is it, as a trace, at a safe point, at the same one in each iteration? Only there may the version be at a loop's
    /// head.
    pub fn is_at_head(&self, first: Option<&Spec>) -> bool {
        let Place::At(version, block, at) = &self.place else { return false };
        let inst = version.blocks[*block].insts.get(*at);
        inst.is_some_and(|inst| inst.op == Op::Poll)
            && first.is_none_or(
                |first| matches!(first.place, Place::At(_, b, i) if (b, i) == (*block, *at)),
            )
    }

    /// Forgets what differs from another execution. Is there anything?
    pub fn meet(&mut self, other: &Spec) -> bool {
        self.frame.meet(&other.frame)
    }

    fn note(&mut self, pc: Term) {
        let Frame { locs, memory, in_place, loads, .. } = self.frame;
        self.passed.push(Position { pc, locs, memory, in_place, loads });
    }

    /// Goes on to the next state: before the next guest instruction, or the next opportunity.
    ///
    /// # Errors
    /// It does not get there.
    pub fn advance(
        &mut self,
        world: &mut World<'_>,
        reference: &mut Reference<'_>,
        facts: &mut Facts,
    ) -> Result<(), Stuck> {
        self.steps += 1;
        if self.steps > MOST_STEPS || world.questions.is_late() {
            return Err("it takes too long".to_string());
        }
        let mut noted = !matches!(self.place, Place::Entry(_));
        let (version, mut block, mut next) = match self.place.clone() {
            Place::At(version, block, inst) => (version, block, inst),
            Place::Entry(version) => (version, 0, 0),
            Place::Start(target) => {
                let target = facts.seen(&mut world.terms, target);
                let Some(pc) = world.terms.constant(target) else {
                    return Err(format!("base goes to {}", world.terms.words(target, 3)));
                };
                let block =
                    reference.block(pc).ok_or_else(|| format!("there is no code at {pc:#x}"))?;
                self.frame.values = vec![None; block.types.len()];
                (block, 0, 0)
            }
        };
        loop {
            let body = version.blocks.get(block).ok_or("a block that does not exist")?;
            while let Some(inst) = body.insts.get(next) {
                let marks = inst.op == Op::At || inst.anchor.is_some();
                if marks && !std::mem::take(&mut noted) {
                    return self.mark(world, facts, (version.clone(), block, next), inst);
                }
                self.execute(world, facts, &version, inst)?;
                next += 1;
            }
            match &body.term {
                End::Jump { to, args } => {
                    self.enter(world, &version, *to, args)?;
                    (block, next) = (to.index(), 0);
                }
                End::Branch { cond, then, otherwise } => {
                    let cond = world.operand(&self.frame, *cond, Ty::I1)?;
                    let edge = if decide(world, facts, cond, true)? { then } else { otherwise };
                    self.enter(world, &version, edge.to, &edge.args)?;
                    (block, next) = (edge.to.index(), 0);
                }
                End::Exit(_) if noted => return Err("it ends there".to_string()),
                End::Exit(anchor) => {
                    return self.opportunity(world, facts, (version.clone(), block, next), *anchor);
                }
                End::Guest(term) => return self.leave(world, reference, facts, term),
            }
        }
    }

    fn execute(
        &mut self,
        world: &mut World<'_>,
        facts: &mut Facts,
        version: &Version,
        inst: &Inst,
    ) -> Result<(), Stuck> {
        if inst.op != Op::Assume {
            return world.step(&mut self.frame, facts, version, inst, Side::Shown);
        }
        let cond = world.operand(&self.frame, inst.args[0], Ty::I1)?;
        let cond = facts.seen(&mut world.terms, cond);
        match world.questions.follows(&mut world.terms, facts, cond) {
            true => Ok(()),
            false => {
                let words = world.terms.words(cond, 3);
                Err(format!("it is not known that it passes the guard {words}"))
            }
        }
    }

    /// Notes the state before an instruction.
    fn mark(
        &mut self,
        world: &mut World<'_>,
        facts: &Facts,
        place: (Rc<Version>, usize, usize),
        inst: &Inst,
    ) -> Result<(), Stuck> {
        if let Some(anchor) = inst.anchor {
            return self.opportunity(world, facts, place, anchor);
        }
        let pc = world.operand(&self.frame, inst.args[0], Ty::I64)?;
        self.place = Place::At(place.0, place.1, place.2);
        self.note(pc);
        Ok(())
    }

    fn opportunity(
        &mut self,
        world: &mut World<'_>,
        facts: &Facts,
        (version, block, next): (Rc<Version>, usize, usize),
        anchor: AnchorId,
    ) -> Result<(), Stuck> {
        let position = world.rebuilt(&self.frame, facts, &version, anchor, Side::Shown)?;
        self.place = Place::At(version, block, next);
        self.passed.push(position);
        Ok(())
    }

    fn enter(
        &mut self,
        world: &mut World<'_>,
        version: &Version,
        to: BlockId,
        args: &[Operand],
    ) -> Result<(), Stuck> {
        world.enter(&mut self.frame, version, to, args)
    }

    fn leave(
        &mut self,
        world: &mut World<'_>,
        reference: &mut Reference<'_>,
        facts: &mut Facts,
        term: &GuestTerm,
    ) -> Result<(), Stuck> {
        let target = match *term {
            GuestTerm::Goto(to) | GuestTerm::Ret(to) | GuestTerm::Call { target: to, .. } => to,
            GuestTerm::Branch { taken, fall, .. } if taken == fall => Operand::Const(taken),
            GuestTerm::Branch { cond, taken, fall } => {
                let cond = world.operand(&self.frame, cond, Ty::I1)?;
                // The way that was recorded is asked for first.
                let first = reference.block(taken).is_some();
                Operand::Const(if decide(world, facts, cond, first)? { taken } else { fall })
            }
            GuestTerm::Syscall { .. } | GuestTerm::Special { .. } | GuestTerm::Trap { .. } => {
                return Err("base leaves for the runtime".to_string());
            }
        };
        let target = world.operand(&self.frame, target, Ty::I64)?;
        let target = facts.seen(&mut world.terms, target);
        self.place = Place::Start(target);
        self.note(target);
        Ok(())
    }
}

/// Is a condition known to hold, or not to hold? `first` says which is asked first.
fn decide(world: &mut World<'_>, facts: &Facts, cond: Term, first: bool) -> Result<bool, Stuck> {
    let cond = facts.seen(&mut world.terms, cond);
    for holds in [first, !first] {
        let goal = if holds { cond } else { world.terms.not(cond) };
        if world.questions.follows(&mut world.terms, facts, goal) {
            return Ok(holds);
        }
    }
    let words = world.terms.words(cond, 3);
    Err(format!("it is not known which way base goes by {words}"))
}
