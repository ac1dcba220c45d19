//! Random guest programs as `base` blocks, and a small trace builder over them, for the property
//! tests of the optimiser. The builder does what `tracer` does, without guest bytes.
//!
//! A program is a path of blocks. A branch off the path leaves the program, or leads to a *side*: a
//! block that returns to the loop's head. Registers have roles,
//! so that most accesses hit mapped memory: rbp and rsp point into the stack, rsi and rdi anywhere
//! (also into the stack, so that they may alias), rbx is a small index, and the others hold data.

use dynasour_ir::eval::{ModelMachine, State};
use dynasour_ir::{
    Anchor, AnchorId, Block, BlockId, Builder, Cond, Context, Edge, Fact, FlagOp, Gpr, GuestTerm,
    Inst, Loc, Mem, Op, Operand, Origin, OriginKind, Term, Ty, Value, Version,
};
use std::collections::BTreeMap;

/// xorshift64*, seeded and replayable.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 33) % n
    }

    pub fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u64) as usize]
    }

    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

pub const HEAD: u64 = 0x40_1000;
pub const STACK: u64 = 0x7000_0000;
pub const ARRAY: u64 = 0x5000_0000;
/// Block i of the path branches to this plus i.
const OFF_PATH: u64 = 0x9000;
const DATA: [Gpr; 4] = [Gpr::RAX, Gpr::RCX, Gpr::RDX, Gpr::R11];
const POINTERS: [Gpr; 2] = [Gpr::RSI, Gpr::RDI];
const INTS: [Ty; 4] = [Ty::I8, Ty::I16, Ty::I32, Ty::I64];

/// A program: its blocks, sides among them, and the path through them.
pub struct Program {
    pub blocks: BTreeMap<u64, Version>,
    pub path: Vec<u64>,
    pub loops: bool,
}

/// One guest instruction in the making.
struct Guest<'r, 'v> {
    random: &'r mut Random,
    b: Builder<'v>,
}

impl Guest<'_, '_> {
    fn data(&mut self) -> Gpr {
        self.random.pick(&DATA)
    }

    fn read(&mut self, g: Gpr, ty: Ty) -> Operand {
        let full = self.b.get_gpr(g);
        if ty == Ty::I8 && self.random.chance(20) {
            let high = self.b.binary(Op::Shr, Ty::I64, full, Operand::Const(8));
            return self.b.trunc(Ty::I8, Ty::I64, high);
        }
        self.b.trunc(ty, Ty::I64, full)
    }

    /// Writes as x86 does: 32-bit writes clear the upper half, narrower ones keep the rest.
    fn write(&mut self, g: Gpr, ty: Ty, v: Operand) {
        let full = match ty {
            Ty::I64 => v,
            Ty::I32 => self.b.zext(Ty::I64, Ty::I32, v),
            Ty::I16 => {
                let old = self.b.get_gpr(g);
                self.b.pure(Op::Insert16, Ty::I64, &[old, v])
            }
            _ => {
                let old = self.b.get_gpr(g);
                let op = if self.random.chance(20) { Op::Insert8High } else { Op::Insert8Low };
                self.b.pure(op, Ty::I64, &[old, v])
            }
        };
        self.b.put(Loc::Gpr(g), full);
    }

    fn constant(&mut self, ty: Ty) -> Operand {
        let c = match self.random.below(5) {
            0 => self.random.below(4),
            1 => self.random.below(100),
            2 => ty.mask(),
            3 => 1 << self.random.below(u64::from(ty.bits())),
            _ => self.random.next(),
        };
        Operand::Const(c & ty.mask())
    }

    fn source(&mut self, ty: Ty) -> Operand {
        if self.random.chance(40) {
            return self.constant(ty);
        }
        if self.random.chance(30) {
            return self.load(ty);
        }
        let g = self.data();
        self.read(g, ty)
    }

    fn address(&mut self) -> (Mem, Operand, Operand) {
        let none = Operand::Const(0);
        match self.random.below(10) {
            0..=5 => {
                let base = self.b.get_gpr(Gpr::RBP);
                let disp = -(8 * (1 + self.random.below(3) as i64))
                    + if self.random.chance(10) { 4 } else { 0 };
                (Mem::disp(disp), base, none)
            }
            6 => (Mem::disp(8 * self.random.below(2) as i64), self.b.get_gpr(Gpr::RSP), none),
            7 => (Mem::disp((ARRAY + 64 + 8 * self.random.below(2)) as i64), none, none),
            8 => {
                let g = self.random.pick(&POINTERS);
                (Mem::disp(4 * self.random.below(3) as i64), self.b.get_gpr(g), none)
            }
            _ => {
                let g = self.random.pick(&POINTERS);
                let base = self.b.get_gpr(g);
                let index = self.b.get_gpr(Gpr::RBX);
                (Mem { scale: self.random.pick(&[1, 2, 4, 8]), disp: -8, seg: None }, base, index)
            }
        }
    }

    fn load(&mut self, ty: Ty) -> Operand {
        let (mem, base, index) = self.address();
        self.b.load(ty, mem, base, index)
    }

    fn flags(&mut self, f: Operand) {
        self.b.put(Loc::Flags, f);
    }

    fn arithmetic(&mut self, g: Gpr, ty: Ty) {
        let (op, f) = self.random.pick(&[
            (Op::Add, FlagOp::Add),
            (Op::Sub, FlagOp::Sub),
            (Op::And, FlagOp::And),
            (Op::Or, FlagOp::Or),
            (Op::Xor, FlagOp::Xor),
        ]);
        let a = self.read(g, ty);
        let b = if self.random.chance(10) { a } else { self.source(ty) };
        let r = self.b.binary(op, ty, a, b);
        let f = self.b.flags(f, ty, &[a, b]);
        self.write(g, ty, r);
        self.flags(f);
    }

    fn inc_dec(&mut self, g: Gpr, ty: Ty) {
        let a = self.read(g, ty);
        let old = self.b.get(Loc::Flags);
        let (f, c) = self.random.pick(&[(FlagOp::Inc, 1), (FlagOp::Dec, ty.mask())]);
        let r = self.b.binary(Op::Add, ty, a, Operand::Const(c));
        let f = self.b.flags(f, ty, &[a, old]);
        self.write(g, ty, r);
        self.flags(f);
    }

    fn shift(&mut self, g: Gpr, ty: Ty) {
        let a = self.read(g, ty);
        let count = if self.random.chance(70) {
            Operand::Const(self.random.below(40))
        } else {
            self.read(Gpr::RCX, Ty::I8)
        };
        let (op, f) = self.random.pick(&[
            (Op::Shl, FlagOp::Shl),
            (Op::Shr, FlagOp::Shr),
            (Op::Sar, FlagOp::Sar),
        ]);
        let old = self.b.get(Loc::Flags);
        let r = self.b.binary(op, ty, a, count);
        let f = self.b.flags(f, ty, &[a, count, old]);
        self.write(g, ty, r);
        self.flags(f);
    }

    fn condition(&mut self, g: Gpr) {
        let f = self.b.get(Loc::Flags);
        let c = self.b.cond(self.random.pick(&Cond::ALL), f);
        if self.random.chance(50) {
            let byte = self.b.zext(Ty::I8, Ty::I1, c);
            self.write(g, Ty::I8, byte);
        } else {
            let (a, b) = (self.source(Ty::I64), self.read(g, Ty::I64));
            let r = self.b.select(Ty::I64, c, a, b);
            self.write(g, Ty::I64, r);
        }
    }

    fn flag_bits(&mut self, g: Gpr) {
        let f = self.b.get(Loc::Flags);
        if self.random.chance(50) {
            let bits = self.b.pure(Op::FlagBits, Ty::I64, &[f]);
            self.write(g, Ty::I64, bits);
        } else {
            let c = self.b.cond(Cond::B, f);
            let inverted = self.b.pure(Op::Not, Ty::I1, &[c]);
            let f = self.b.flags(FlagOp::SetCf, Ty::I64, &[f, inverted]);
            self.flags(f);
        }
    }

    /// Some instructions from `pc` on, and the mark of the one behind them.
    fn instructions(&mut self, mut pc: u64, most: u64) {
        for _ in 0..1 + self.random.below(most) {
            self.b.at(pc);
            self.instruction();
            pc += 3;
        }
        self.b.at(pc);
    }

    fn instruction(&mut self) {
        let ty = if self.random.chance(50) {
            self.random.pick(&[Ty::I32, Ty::I64])
        } else {
            self.random.pick(&INTS)
        };
        let g = self.data();
        match self.random.below(17) {
            0..=2 => self.arithmetic(g, ty),
            3 => {
                let v = self.source(ty);
                self.write(g, ty, v);
            }
            4 => {
                let v = self.source(ty);
                let (mem, base, index) = self.address();
                self.b.store(ty, mem, base, index, v);
            }
            5 => {
                // mov to a stack slot and a count in it: what -O0 code is made of.
                let base = self.b.get_gpr(Gpr::RBP);
                let old = self.b.load(ty, Mem::disp(-8), base, Operand::Const(0));
                let one = self.constant(ty);
                let r = self.b.binary(Op::Add, ty, old, one);
                let f = self.b.flags(FlagOp::Add, ty, &[old, one]);
                self.b.store(ty, Mem::disp(-8), base, Operand::Const(0), r);
                self.flags(f);
            }
            6 => self.inc_dec(g, ty),
            7 => self.shift(g, ty),
            8 => {
                let a = self.read(g, ty);
                let b = self.source(ty);
                let f = self.b.flags(self.random.pick(&[FlagOp::Sub, FlagOp::And]), ty, &[a, b]);
                self.flags(f);
            }
            9 => self.condition(g),
            10 => {
                let narrow = self.random.pick(&[Ty::I8, Ty::I16, Ty::I32]);
                let a = self.source(narrow);
                let wide = self.random.pick(&[Ty::I32, Ty::I64]);
                let signed = self.random.chance(50);
                let r = if signed {
                    self.b.sext(wide, narrow, a)
                } else {
                    self.b.zext(wide, narrow, a)
                };
                self.write(g, wide, r);
            }
            11 => {
                let p = self.random.pick(&POINTERS);
                let a = self.b.get_gpr(p);
                let step = Operand::Const(self.random.pick(&[8, 4, u64::MAX - 7]));
                let r = self.b.binary(Op::Add, Ty::I64, a, step);
                self.b.put(Loc::Gpr(p), r);
            }
            12 => {
                let v = self.source(Ty::I64);
                let rsp = self.b.get_gpr(Gpr::RSP);
                self.b.store(Ty::I64, Mem::disp(-8), rsp, Operand::Const(0), v);
                let r = self.b.binary(Op::Add, Ty::I64, rsp, Operand::Const(8u64.wrapping_neg()));
                self.b.put(Loc::Gpr(Gpr::RSP), r);
            }
            13 => {
                let rsp = self.b.get_gpr(Gpr::RSP);
                let v = self.b.load(Ty::I64, Mem::disp(0), rsp, Operand::Const(0));
                let r = self.b.binary(Op::Add, Ty::I64, rsp, Operand::Const(8));
                self.b.put(Loc::Gpr(Gpr::RSP), r);
                self.b.put(Loc::Gpr(g), v);
            }
            14 => {
                let f = self.b.get(Loc::Flags);
                let carry = self.b.cond(Cond::B, f);
                let (a, b) = (self.read(g, ty), self.source(ty));
                let f =
                    self.b.flags(self.random.pick(&[FlagOp::Adc, FlagOp::Sbb]), ty, &[a, b, carry]);
                self.flags(f);
            }
            15 => self.flag_bits(g),
            _ => {
                let a = self.b.get_gpr(g);
                let b = self.source(Ty::I64);
                let op = self.random.pick(&[Op::Mul, Op::MulHighU, Op::MulHighS, Op::Sub, Op::Add]);
                let r = self.b.binary(op, Ty::I64, a, b);
                self.write(g, Ty::I64, r);
            }
        }
    }
}

/// A program from a seed: `blocks` blocks of up to `length` instructions.
pub fn program(random: &mut Random, blocks: u64, length: u64, loops: bool) -> Program {
    let mut map = BTreeMap::new();
    let mut path = Vec::new();
    // A loop counts r12 down in a block of its own, so that every evaluation ends.
    let start = |i: u64| HEAD + (i + u64::from(loops)) * 0x100;
    if loops {
        map.insert(HEAD, countdown(start(0)));
        path.push(HEAD);
    }
    for i in 0..blocks {
        let head = start(i);
        let mut version = Version::new("base", head);
        let mut guest = Guest { b: Builder::new(&mut version), random };
        guest.instructions(head, length);
        let next = if i + 1 < blocks { start(i + 1) } else { HEAD };
        let term = if i + 1 == blocks && !loops {
            GuestTerm::Goto(Operand::Const(0x9999))
        } else if i + 1 < blocks && guest.random.chance(20) {
            // An indirect jump through a register that was just set.
            let target = guest.b.get_gpr(Gpr::R11);
            GuestTerm::Goto(target)
        } else {
            let f = guest.b.get(Loc::Flags);
            let cond = guest.b.cond(guest.random.pick(&Cond::ALL), f);
            if guest.random.chance(50) {
                GuestTerm::Branch { cond, taken: next, fall: OFF_PATH + i }
            } else {
                GuestTerm::Branch { cond, taken: OFF_PATH + i, fall: next }
            }
        };
        let has_side = loops && guest.random.chance(60);
        let insts = std::mem::take(&mut guest.b.insts);
        drop(guest);
        version.blocks.push(Block { params: Vec::new(), insts, term: Term::Guest(term) });
        map.insert(head, version);
        path.push(head);
        if has_side {
            map.insert(OFF_PATH + i, side(random, OFF_PATH + i));
        }
    }
    Program { blocks: map, path, loops }
}

/// `dec r12; jz out`
fn countdown(next: u64) -> Version {
    let mut version = Version::new("base", HEAD);
    let mut b = Builder::new(&mut version);
    b.at(HEAD);
    let (counter, flags) = (b.get_gpr(Gpr::new(12)), b.get(Loc::Flags));
    let less = b.binary(Op::Add, Ty::I64, counter, Operand::Const(u64::MAX));
    let flags = b.flags(FlagOp::Dec, Ty::I64, &[counter, flags]);
    b.put(Loc::Gpr(Gpr::new(12)), less);
    b.put(Loc::Flags, flags);
    b.at(HEAD + 3);
    let cond = b.cond(Cond::E, flags);
    let insts = b.insts;
    let term = Term::Guest(GuestTerm::Branch { cond, taken: 0x8000, fall: next });
    version.blocks.push(Block { params: Vec::new(), insts, term });
    version
}

/// A few instructions, and back to the loop's head.
fn side(random: &mut Random, pc: u64) -> Version {
    let mut version = Version::new("base", pc);
    let mut guest = Guest { b: Builder::new(&mut version), random };
    guest.instructions(pc, 3);
    let insts = std::mem::take(&mut guest.b.insts);
    let term = Term::Guest(GuestTerm::Goto(Operand::Const(HEAD)));
    version.blocks.push(Block { params: Vec::new(), insts, term });
    version
}

/// The SSA locations that some block of the program writes.
fn written_locations(program: &Program) -> [bool; Loc::SSA_COUNT] {
    let mut written = [false; Loc::SSA_COUNT];
    for inst in program.blocks.values().flat_map(|v| &v.blocks[0].insts) {
        if let Op::Put(loc) = inst.op {
            written[loc.ssa_index().unwrap()] = true;
        }
    }
    written
}

/// Declares every SSA location as an entry parameter; returns the operand of each, and the
/// parameters.
fn entry_state(version: &mut Version) -> ([Operand; Loc::SSA_COUNT], Vec<Value>) {
    let mut state = [Operand::Const(0); Loc::SSA_COUNT];
    let mut params: Vec<Value> = Vec::new();
    for (i, slot) in state.iter_mut().enumerate() {
        let loc = Loc::from_ssa_index(i);
        let v = version.value(loc.ty());
        version.entry_locs.push(loc);
        params.push(v);
        *slot = v.into();
    }
    (state, params)
}

/// The trace of the program's path, as `tracer` builds it, and of those of its sides that `takes` returns
/// true for.
pub fn tree(program: &Program, private_memory: bool, takes: impl FnMut(u64) -> bool) -> Version {
    Trace::build(program, private_memory, takes)
}

/// The operand that each SSA location holds.
type Locations = [Operand; Loc::SSA_COUNT];

/// A trace in the making.
struct Trace<'p> {
    program: &'p Program,
    version: Version,
    written: [bool; Loc::SSA_COUNT],
    state: Locations,
    reach: Option<AnchorId>,
    /// The parameters of the block that begins now.
    params: Vec<Value>,
    insts: Vec<Inst>,
}

impl<'p> Trace<'p> {
    fn build(
        program: &'p Program,
        private_memory: bool,
        mut takes: impl FnMut(u64) -> bool,
    ) -> Version {
        let mut version = Version::new("t1", HEAD);
        if private_memory {
            version.context = Context { facts: vec![Fact::PrivateMemory] };
        }
        let written = written_locations(program);
        let (state, params) = entry_state(&mut version);
        let (reach, insts) = (None, Vec::new());
        let mut t = Trace { program, version, written, state, reach, params, insts };
        if program.loops {
            t.enter_loop();
        }
        // Sides that are built behind the path: the block that branches, the side's pc, and the state.
        let mut sides: Vec<(usize, u64, Locations)> = Vec::new();
        let mut exit = None;
        for (step, pc) in program.path.iter().enumerate() {
            let next = program.path.get(step + 1).copied();
            let (at, at_start, term) = t.block(*pc);
            match term {
                GuestTerm::Goto(target) => {
                    let a = t.anchor(target, &t.state.clone());
                    match next {
                        Some(next) => {
                            let mut b = Builder::new(&mut t.version);
                            let p = b.binary(Op::Eq, Ty::I64, target, Operand::Const(next));
                            let (kind, step) = (OriginKind::Target, Some(step as u32));
                            b.assume(Origin { kind, pc: *pc, step }, p, a);
                            t.insts.append(&mut b.insts);
                        }
                        None => exit = Some(a),
                    }
                }
                GuestTerm::Branch { cond, taken, fall } => {
                    let next = next.unwrap_or(HEAD);
                    let other = if next == taken { fall } else { taken };
                    let mut b = Builder::new(&mut t.version);
                    let mut p = cond;
                    if next != taken {
                        p = b.binary(Op::Xor, Ty::I1, p, Operand::Const(1));
                    }
                    t.insts.append(&mut b.insts);
                    if program.blocks.contains_key(&other) && takes(other) {
                        let this = t.version.blocks.len();
                        sides.push((this, other, t.state));
                        let edge = |to: usize| Edge { to: BlockId(to as u32), args: Vec::new() };
                        let (then, otherwise) = (edge(this + 1), edge(0));
                        t.finish(Term::Branch { cond: p, then, otherwise });
                        t.reach = None;
                        continue;
                    }
                    let a = t.anchor(Operand::Const(at), &at_start);
                    t.reach = Some(a);
                    let mut assume = Inst::new(Op::Assume, Ty::I64, None, &[p]);
                    assume.anchor = Some(a);
                    t.insts.push(assume);
                }
                _ => unreachable!(),
            }
        }
        t.finish(match exit {
            Some(a) => Term::Exit(a),
            None => Term::Jump { to: BlockId(1), args: t.written_operands() },
        });
        while let Some((branch, pc, state)) = sides.pop() {
            let this = BlockId(t.version.blocks.len() as u32);
            if let Term::Branch { otherwise, .. } = &mut t.version.blocks[branch].term {
                otherwise.to = this;
            }
            (t.state, t.reach) = (state, None);
            t.block(pc);
            t.finish(Term::Jump { to: BlockId(1), args: t.written_operands() });
        }
        t.version
    }

    /// The entry jumps to the loop's head, where a poll stands.
    fn enter_loop(&mut self) {
        let args = self.written_operands();
        self.finish(Term::Jump { to: BlockId(1), args });
        for i in (0..Loc::SSA_COUNT).filter(|i| self.written[*i]) {
            let v = self.version.value(Loc::from_ssa_index(i).ty());
            self.params.push(v);
            self.state[i] = v.into();
        }
        let a = self.anchor(Operand::Const(HEAD), &self.state.clone());
        let mut poll = Inst::new(Op::Poll, Ty::I64, None, &[]);
        poll.anchor = Some(a);
        self.insts.push(poll);
        self.reach = Some(a);
    }

    fn finish(&mut self, term: Term) {
        let (params, insts) = (std::mem::take(&mut self.params), std::mem::take(&mut self.insts));
        self.version.blocks.push(Block { params, insts, term });
    }

    fn written_operands(&self) -> Vec<Operand> {
        (0..Loc::SSA_COUNT).filter(|i| self.written[*i]).map(|i| self.state[i]).collect()
    }

    fn anchor(&mut self, target: Operand, state: &Locations) -> AnchorId {
        let varmap = (0..Loc::SSA_COUNT)
            .filter(|i| self.written[*i])
            .map(|i| (Loc::from_ssa_index(i), state[i]))
            .collect();
        self.version.anchor(Anchor::new(target, varmap))
    }

    /// Translates a block. Returns its last instruction's pc, the state before that, and its end in terms
    /// of the trace.
    fn block(&mut self, pc: u64) -> (u64, Locations, GuestTerm) {
        let base = &self.program.blocks[&pc];
        let mut map: Vec<Operand> = vec![Operand::Const(0); base.types.len()];
        let (mut at, mut at_start) = (pc, self.state);
        for inst in &base.blocks[0].insts {
            match inst.op {
                Op::At => (at, at_start) = (inst.args[0].as_const().unwrap(), self.state),
                Op::Get(loc) => map[inst.defs[0].index()] = self.state[loc.ssa_index().unwrap()],
                Op::Put(loc) => self.state[loc.ssa_index().unwrap()] = subst(&map, inst.args[0]),
                op if op.is_pure() => {
                    let args: Vec<Operand> = inst.args.iter().map(|a| subst(&map, *a)).collect();
                    let mut b = Builder::new(&mut self.version);
                    map[inst.defs[0].index()] = b.pure(op, inst.ty, &args);
                    self.insts.append(&mut b.insts);
                }
                _ => {
                    let anchor =
                        self.reach.unwrap_or_else(|| self.anchor(Operand::Const(at), &at_start));
                    self.reach = Some(anchor);
                    let mut b = Builder::new(&mut self.version);
                    copy_effect(&mut b, base, inst, &mut map, anchor);
                    self.insts.append(&mut b.insts);
                    if inst.op == Op::Store {
                        self.reach = None;
                    }
                }
            }
        }
        let Term::Guest(term) = &base.blocks[0].term else { unreachable!() };
        let term = match *term {
            GuestTerm::Goto(target) => GuestTerm::Goto(subst(&map, target)),
            GuestTerm::Branch { cond, taken, fall } => {
                GuestTerm::Branch { cond: subst(&map, cond), taken, fall }
            }
            _ => unreachable!(),
        };
        (at, at_start, term)
    }
}

/// Copies an instruction with an effect from the base block into the trace.
fn copy_effect(
    b: &mut Builder,
    base: &Version,
    inst: &Inst,
    map: &mut [Operand],
    anchor: AnchorId,
) {
    let mut copy = inst.clone();
    copy.args.iter_mut().for_each(|a| *a = subst(map, *a));
    copy.anchor = Some(anchor);
    for d in &mut copy.defs {
        let v = b.version.value(base.ty(*d));
        map[d.index()] = v.into();
        *d = v;
    }
    b.insts.push(copy);
}

fn subst(map: &[Operand], o: Operand) -> Operand {
    match o {
        Operand::Value(v) => map[v.index()],
        Operand::Const(_) => o,
    }
}

/// A machine state: pointers into mapped memory, mostly; sometimes aliasing the stack slots,
/// sometimes unmapped.
pub fn entry(random: &mut Random, program: &Program) -> (State, ModelMachine) {
    let mut machine = ModelMachine::new();
    for area in [STACK - 4096, ARRAY] {
        let bytes: Vec<u8> =
            (0..8192).map(|_| if random.chance(50) { 0 } else { random.next() as u8 }).collect();
        machine.write(area, &bytes);
    }
    if random.chance(5) {
        machine.protect(STACK);
    }
    let mut state = State::default();
    for g in DATA {
        state.gpr[g.number()] = if random.chance(50) { random.below(20) } else { random.next() };
    }
    state.gpr[Gpr::RBX.number()] = random.below(6);
    state.gpr[Gpr::RBP.number()] = STACK + 0x200;
    state.gpr[Gpr::RSP.number()] = STACK + 0x1c0 + 8 * random.below(9);
    for p in POINTERS {
        state.gpr[p.number()] = match random.below(20) {
            0 => 0x10,
            1..=6 => STACK + 0x1e0 + 4 * random.below(10),
            7..=9 => ARRAY + 56 + 4 * random.below(6),
            _ => ARRAY + 0x400,
        };
    }
    if random.chance(50) {
        state.gpr[Gpr::R11.number()] = program.path.get(1).copied().unwrap_or(0);
    }
    state.gpr[12] = 1 + random.below(8);
    state.flags = random.next() & dynasour_ir::semantics::ARITH_FLAGS;
    (state, machine)
}
