//! Machine code against the version that it was made from: does it leave only in states that the version
//! may leave in?
//!
//! The code is lifted back into IR by whoever knows how ([`crate::validate::Lowered`]), and executed on symbols
//! beside the version, from its entry and from the heads of its loops ([`super::code_cuts`]). Wherever it could
//! leave (guards, what may fault, safe points, ends) the way out is followed, and the version must pass the guest
//! state that results. With a proof of the version ([`super::prove`]) the code does what was recorded.
//!
//! How guest state lies in registers and spill slots is said by versions, too ([`Provable`]): what an exit's record
//! computes becomes instructions and an anchor. So one semantics serves for all.
//!
//! **Data.** [`CodeProof`] owns terms and facts. **Callers.** [`prove_code`].
//!
//! ```text
//! code      mov rbx, rdi; add rbx, 8; cmp rbx, rsi; je cold 3     host: rbx = rdi + 8
//! record 3  rdi = node (rbx)                                      guest: rdi = rdi + 8, as the version's a3 says
//! ```

use super::code_cuts::CodeCut;
use super::facts::{Contents, Facts};
use super::frame::{Frame, Position, Side, Stuck, World};
use super::questions::Questions;
use super::simulate::{Limits, Outcome, Verdict};
use super::solver::Solver;
use super::spec::{Reference, Spec};
use super::stopwatch::Stopwatch;
use super::term::{MemoryNode, Symbol, Term, Terms};
use crate::op::Op;
use crate::reach::may_fault;
use crate::types::{Gpr, Loc, Operand, Ty};
use crate::validate::Lowered;
use crate::version::{GuestTerm, Inst, Segment, Term as End, Version};
use rustc_hash::FxHashMap;
use std::rc::Rc;

/// A word of the context at entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Word {
    /// What this host register holds.
    Register(Gpr),
    /// The base of a segment.
    Base(Segment),
    /// This number.
    Number(u64),
}

/// Machine code that can be executed on symbols.
pub trait Provable: Lowered {
    /// Words of the context at entry, by their addresses.
    fn words(&self) -> Vec<(u64, Word)>;

    /// The addresses of all words of eight bytes that the code keeps values in.
    fn slots(&self) -> Vec<u64>;

    /// How the guest's state lies in the host's at entry: a version without blocks but its entry, which ends
    /// with the anchor that rebuilds the guest's state. Its entry locations are the host's registers; it reads
    /// the context, and assumes what holds of the host's state.
    fn entering(&self) -> Version;

    /// The same for control that has left the code to `at`. `load` reads words of the context that are known
    /// numbers: address and bytes.
    ///
    /// # Errors
    /// Control cannot be there.
    fn leaving(
        &self,
        at: u64,
        load: &mut dyn FnMut(u64, u32) -> Option<u64>,
    ) -> Result<Version, String>;
}

/// Guest instructions of code without a head or an end after which a proof is given up (guess).
const MOST_INSTRUCTIONS: u32 = 200_000;

/// A proof under way.
pub struct CodeProof<'a> {
    pub world: World<'a>,
    pub reference: Reference<'a>,
    version: Rc<Version>,
    code: &'a mut dyn Provable,
    pub places: Vec<Place>,
    pub cuts: FxHashMap<u64, CodeCut>,
    states: u64,
    instructions: u32,
    /// What is known at a head has changed since its segment was followed.
    pub again: bool,
}

/// Where the host keeps a value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    Register(usize),
    Word(u64),
}

/// Where the code is on one of its ways, and where the version is beside it.
#[derive(Clone)]
pub struct Way {
    pub at: u64,
    pub frame: Frame,
    pub facts: Facts,
    pub spec: Spec,
    /// The head where the segment began; none at the entry.
    pub cut: Option<u64>,
    /// It stands at that head, and has yet to execute its first instruction.
    pub begins: bool,
}

/// Tries to prove that code does what its version does.
pub fn prove_code<'a>(
    version: &Version,
    code: &'a mut dyn Provable,
    solver: &'a mut dyn Solver,
    limits: Limits,
) -> Outcome {
    let since = Stopwatch::start();
    let tables = code.tables();
    let mut places: Vec<Place> = (0..Loc::SSA_COUNT).map(Place::Register).collect();
    let words = code.words().into_iter().map(|(address, _)| address);
    let mut words: Vec<u64> = words.chain(code.slots()).collect();
    words.sort_unstable();
    words.dedup();
    places.extend(words.into_iter().map(Place::Word));
    let world = World {
        terms: Terms::default(),
        contents: Contents::default(),
        questions: Questions::new(solver, since, limits.time),
        private: version.context.private_memory(),
        fetches: false,
        executed: FxHashMap::default(),
        tables,
    };
    let version = Rc::new(version.clone());
    let reference = Reference::Trace(version.clone());
    let cuts = world.tables.heads.iter().map(|(head, _)| (*head, CodeCut::default())).collect();
    let (states, instructions, again) = (0, 0, true);
    let mut proof =
        CodeProof { world, reference, version, code, places, cuts, states, instructions, again };
    let verdict = match proof.run() {
        Ok(()) => Verdict::Proven,
        Err(why) if proof.world.questions.is_late() => {
            Verdict::Unknown { why: format!("out of time: {why}") }
        }
        Err(why) => Verdict::Unknown { why },
    };
    let questions = proof.world.questions.asked;
    Outcome { verdict, states: proof.states, questions, time: since.elapsed() }
}

impl CodeProof<'_> {
    fn run(&mut self) -> Result<(), Stuck> {
        self.entry()?;
        let mut heads: Vec<u64> = self.cuts.keys().copied().collect();
        heads.sort_unstable();
        // Each round drops at least one thing that was taken to be known at a head.
        while std::mem::take(&mut self.again) {
            for head in &heads {
                if let Some(way) = self.head(*head)? {
                    self.follow(way)?;
                }
            }
        }
        Ok(())
    }

    fn entry(&mut self) -> Result<(), Stuck> {
        let version = self.version();
        let terms = &mut self.world.terms;
        let locs = std::array::from_fn(|i| terms.symbol(Symbol::Entry(Loc::from_ssa_index(i)), 64));
        let memory = terms.memory(MemoryNode::Initial(0));
        let in_place = terms.initial_in_place(0);
        let pc = terms.number(version.region, 64);
        let mut words = terms.memory(MemoryNode::Initial(u32::MAX));
        for (address, word) in self.code.words() {
            let address = self.world.terms.number(address, 64);
            let value = match word {
                Word::Register(gpr) => locs[gpr.number()],
                Word::Base(segment) => self.world.terms.symbol(Symbol::Base(segment), 64),
                Word::Number(number) => self.world.terms.number(number, 64),
            };
            words = self.world.store(words, address, value);
        }
        let start = Position { pc, locs, memory, in_place, loads: in_place };
        let frame = Frame { context: Some(words), ..Frame::new(&start) };
        let mut facts = Facts::default();
        let entering = self.code.entering();
        // What is still to be stored was shown not to fault where the parent left.
        let guest = self.passage(&frame, &mut facts, &entering, true)?;
        self.world.assume_context(&mut facts, &version, &guest.locs);
        let spec = Spec::new(&self.reference, &Position { pc, ..guest })?;
        let at = self.world.tables.entry;
        self.follow(Way { at, frame, facts, spec, cut: None, begins: false })
    }

    /// The guest's state that a passage rebuilds from the host's.
    fn passage(
        &mut self,
        frame: &Frame,
        facts: &mut Facts,
        version: &Version,
        enters: bool,
    ) -> Result<Position, Stuck> {
        let entry = version.blocks.first().ok_or("a passage without a block")?;
        let mut frame = frame.clone();
        frame.values = vec![None; version.types.len()];
        for (loc, param) in version.entry_locs.iter().zip(&entry.params) {
            let index = loc.ssa_index().ok_or("an entry location")?;
            frame.values[param.index()] = Some(frame.locs[index]);
        }
        for inst in &entry.insts {
            if inst.op == Op::Assume {
                let cond = self.world.operand(&frame, inst.args[0], Ty::I1)?;
                facts.learn(&mut self.world.terms, cond);
            } else {
                self.world.step(&mut frame, facts, version, inst, Side::Claims)?;
            }
        }
        let End::Exit(anchor) = entry.term else { return Err("a passage without an end".into()) };
        if enters {
            for store in &version.anchors[anchor.index()].stores {
                let [base, index, _] = store.args;
                let address = self.world.address(&frame, facts, &store.mem, base, index)?;
                facts.access(address, store.ty.bytes(), true);
            }
        }
        self.world.rebuilt(&frame, facts, version, anchor, Side::Claims)
    }

    /// Follows a way and those that part from it, each to an end or to a head.
    fn follow(&mut self, way: Way) -> Result<(), Stuck> {
        let mut ways = vec![way];
        while let Some(way) = ways.pop() {
            self.path(way, &mut ways)?;
        }
        Ok(())
    }

    /// Follows a way to its end; those that part from it are left to be followed.
    fn path(&mut self, mut way: Way, parted: &mut Vec<Way>) -> Result<(), Stuck> {
        loop {
            let Some(block) = self.code.block(way.at).cloned() else {
                return self.leave(way.at, &mut way);
            };
            way.frame.values = vec![None; block.types.len()];
            let (mut body, mut entered) = (&block.blocks[0], 0);
            let mut pc = way.at;
            let term = loop {
                entered += 1;
                for inst in &body.insts {
                    if way.facts.contradict {
                        return Ok(());
                    }
                    match (inst.op, inst.args.first()) {
                        (Op::At, Some(Operand::Const(at))) => {
                            pc = *at;
                            self.instruction(pc, &mut way)?;
                            if self.cuts.contains_key(&pc) && !std::mem::take(&mut way.begins) {
                                way.at = pc;
                                return self.arrive(way);
                            }
                        }
                        _ => self.execute(pc, &mut way, &block, inst)?,
                    }
                }
                match &body.term {
                    End::Guest(term) => break term,
                    End::Jump { to, args } if entered < block.blocks.len() => {
                        self.world.enter(&mut way.frame, &block, *to, args)?;
                        body = &block.blocks[to.index()];
                    }
                    _ => return Err(format!("{pc:#x} branches within itself")),
                }
            };
            way.at = match *term {
                GuestTerm::Branch { cond, taken, fall } => {
                    let cond = self.world.operand(&way.frame, cond, Ty::I1)?;
                    let cond = way.facts.seen(&mut self.world.terms, cond);
                    let opposite = self.world.terms.not(cond);
                    let out = self.world.tables.ways.get(&pc).copied();
                    for (to, fact) in [(fall, opposite), (taken, cond)] {
                        // The way out has been followed whether it is taken or not.
                        if Some(to) == out {
                            continue;
                        }
                        let mut way = Way { at: to, ..way.clone() };
                        way.facts.learn(&mut self.world.terms, fact);
                        if !way.facts.contradict {
                            parted.push(way);
                        }
                    }
                    return Ok(());
                }
                GuestTerm::Goto(to) => self.target(&way, to)?,
                _ => return Err(format!("{pc:#x} does not go on in the code")),
            };
        }
    }

    /// Where a jump leads.
    fn target(&mut self, way: &Way, to: Operand) -> Result<u64, Stuck> {
        let to = self.world.operand(&way.frame, to, Ty::I64)?;
        self.world.terms.constant(to).ok_or_else(|| "a jump to a computed address".to_string())
    }

    /// Before an instruction of the code: where it may leave, the version passes the state.
    fn instruction(&mut self, pc: u64, way: &mut Way) -> Result<(), Stuck> {
        self.instructions += 1;
        if self.instructions > MOST_INSTRUCTIONS || self.world.questions.is_late() {
            return Err(format!("at {pc:#x}"));
        }
        match self.world.tables.ways.get(&pc).copied() {
            Some(out) => self
                .way_out(out, way, 0)
                .map(drop)
                .map_err(|why| format!("the way out at {pc:#x}: {why}")),
            None => Ok(()),
        }
    }

    /// Executes one instruction of the lifted code.
    fn execute(
        &mut self,
        pc: u64,
        way: &mut Way,
        block: &Version,
        inst: &Inst,
    ) -> Result<(), Stuck> {
        let Way { frame, facts, .. } = way;
        // What may fault and has no record must be known not to.
        let has_record = self.world.tables.ways.contains_key(&pc);
        if let (false, Some(mem)) = (has_record, &inst.mem)
            && inst.op != Op::Native
        {
            let address = self.world.address(frame, facts, mem, inst.args[0], inst.args[1])?;
            let write = inst.op == Op::Store;
            if self.world.context(frame, address).is_none()
                && !facts.accessible(&mut self.world.terms, address, inst.ty.bytes(), write)
            {
                return Err(format!("{pc:#x} may fault without a record"));
            }
        }
        if inst.op == Op::Native && !has_record && may_fault(block, inst) {
            return Err(format!("the native at {pc:#x} may fault without a record"));
        }
        self.world.step(frame, facts, block, inst, Side::Claims)
    }

    /// Control has left the code.
    fn leave(&mut self, at: u64, way: &mut Way) -> Result<(), Stuck> {
        let wanted = self.left(at, &way.frame, &mut way.facts)?;
        self.passes(way, &wanted, 0).map_err(|why| format!("the end at {at:#x}: {why}"))
    }

    fn passes(&mut self, way: &mut Way, wanted: &Position, least: usize) -> Result<(), Stuck> {
        self.states += 1;
        let Way { facts, spec, .. } = way;
        self.world.passes((&mut self.reference, spec), facts, wanted, least)
    }

    /// The guest's state when control has left the code to `at`.
    fn left(&mut self, at: u64, frame: &Frame, facts: &mut Facts) -> Result<Position, Stuck> {
        let words = frame.context.ok_or("code without a context")?;
        let world = &mut self.world;
        let mut load = |address: u64, bytes: u32| {
            let address = world.terms.number(address, 64);
            let word = world.read(facts, words, address, bytes);
            world.terms.constant(word)
        };
        let leaving = self.code.leaving(at, &mut load)?;
        self.passage(frame, facts, &leaving, false)
    }

    /// Follows a way out of the code, taken or not; the version must pass the guest's state there, which is the
    /// result.
    pub fn way_out(&mut self, out: u64, way: &mut Way, least: usize) -> Result<Position, Stuck> {
        let (mut frame, mut facts) = (way.frame.clone(), way.facts.clone());
        let mut at = out;
        while let Some(block) = self.code.block(at).cloned() {
            frame.values = vec![None; block.types.len()];
            let [body] = &block.blocks[..] else { return Err(format!("{at:#x} branches")) };
            for inst in body.insts.iter().filter(|inst| inst.op != Op::At) {
                self.world.step(&mut frame, &mut facts, &block, inst, Side::Claims)?;
            }
            let End::Guest(GuestTerm::Goto(to)) = body.term else {
                return Err(format!("{at:#x} does not leave"));
            };
            let to = self.world.operand(&frame, to, Ty::I64)?;
            at = self.world.terms.constant(to).ok_or("a way out to a computed address")?;
        }
        let wanted = self.left(at, &frame, &mut facts)?;
        self.passes(way, &wanted, least)?;
        Ok(wanted)
    }

    /// The version.
    pub fn version(&self) -> Rc<Version> {
        self.version.clone()
    }

    /// What a place holds.
    pub fn held(&mut self, frame: &Frame, facts: &Facts, place: Place) -> Result<Term, Stuck> {
        match place {
            Place::Register(index) => Ok(facts.seen(&mut self.world.terms, frame.locs[index])),
            Place::Word(address) => {
                let words = frame.context.ok_or("code without a context")?;
                let address = self.world.terms.number(address, 64);
                Ok(self.world.read(facts, words, address, 8))
            }
        }
    }

    /// The address at which control leaves at a head.
    pub fn landing(&self, head: u64) -> Option<u64> {
        let landing = self.world.tables.heads.iter().find(|(at, _)| *at == head);
        landing.map(|(_, landing)| *landing)
    }
}
