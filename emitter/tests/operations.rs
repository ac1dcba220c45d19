//! Every pure operation at every width, on registers and constants, against `semantics::eval`:
//! results, flags, and each condition of each flags operation, both as values at a trace's end and
//! as records.

mod harness;

use dynasour_emitter::FragmentId;
use dynasour_ir::eval::State;
use dynasour_ir::op::{ArgTy, ResultTy};
use dynasour_ir::semantics::{self, ARITH_FLAGS};
use dynasour_ir::{
    Anchor, AnchorId, Block, Builder, Cond, FlagOp, Gpr, Inst, Loc, Op, Operand, Term, Ty, Value,
    Version,
};
use harness::Bench;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn interesting(&mut self) -> u64 {
        match self.next() % 6 {
            0 => self.next() % 4,
            1 => u64::MAX - self.next() % 4,
            2 => 1 << (self.next() % 64),
            3 => (1 << (self.next() % 64)) - 1,
            4 => self.next() % 70,
            _ => self.next(),
        }
    }
}

const INPUTS: [Gpr; 3] = [Gpr::RAX, Gpr::RCX, Gpr::RSI];

/// An operand of the given type: from input register `i`, or the constant that the register will
/// hold.
fn operand(b: &mut Builder, param: Value, ty: Ty, constant: Option<u64>) -> Operand {
    if let Some(c) = constant {
        return Operand::Const(c & ty.mask());
    }
    match ty {
        Ty::I64 => param.into(),
        Ty::Flags => b.flags(FlagOp::FromBits, Ty::I64, &[param.into()]),
        _ => b.trunc(ty, Ty::I64, param.into()),
    }
}

struct Case {
    op: Op,
    ty: Ty,
    args: Vec<Ty>,
    /// Bit i: argument i is a constant.
    constants: u32,
    /// Leave through a record instead of a trace end.
    record: bool,
}

impl Case {
    fn expected(&self, inputs: &[u64; 3]) -> u64 {
        let args: Vec<u64> = self
            .args
            .iter()
            .zip(inputs)
            .map(|(t, v)| if *t == Ty::Flags { v & ARITH_FLAGS } else { v & t.mask() })
            .collect();
        semantics::eval(self.op, self.ty, &args)
    }

    fn result(&self) -> Ty {
        match self.op.signature().1 {
            ResultTy::Is(t) => t,
            _ => self.ty,
        }
    }

    /// A trace that leaves the result in rbx (an integer) or rflags, and keeps rdx and r9.
    fn version(&self, inputs: &[u64; 3]) -> Version {
        let mut v = Version::new("t1", 0x1000);
        let params = entry_params(&mut v);
        let mut b = Builder::new(&mut v);
        let args: Vec<Operand> = (0..self.args.len())
            .map(|i| {
                operand(
                    &mut b,
                    params[i],
                    self.args[i],
                    (self.constants >> i & 1 != 0).then_some(inputs[i]),
                )
            })
            .collect();
        let result = self.result();
        let value = b.version.value(result);
        b.insts.push(Inst::new(self.op, self.ty, Some(value), &args));
        let (loc, out) = match result {
            Ty::Flags => (Loc::Flags, value.into()),
            Ty::I64 => (Loc::Gpr(Gpr::RBX), value.into()),
            _ => (Loc::Gpr(Gpr::RBX), b.zext(Ty::I64, result, value.into())),
        };
        let mut insts = b.insts;
        v.anchor(Anchor::new(Operand::Const(0x2000), vec![(loc, out)]));
        if self.record {
            let mut leave = Inst::new(Op::Assume, Ty::I64, None, &[Operand::Const(0)]);
            leave.anchor = Some(AnchorId(0));
            insts.push(leave);
        }
        v.blocks.push(Block { params, insts, term: Term::Exit(AnchorId(0)) });
        v
    }

    fn check(&self, bench: &mut Bench, random: &mut Random) {
        let mut inputs = [0; 3];
        inputs.iter_mut().for_each(|i| *i = random.interesting());
        let version = self.version(&inputs);
        if bench.emitter.fragments().len() > 2000 {
            bench.emitter.flush_all();
        }
        let fragment = bench.compile(&version);
        for _ in 0..3 {
            self.run(bench, fragment, &version, &inputs, random);
            for (i, input) in inputs.iter_mut().enumerate() {
                if self.constants >> i & 1 == 0 {
                    *input = random.interesting();
                }
            }
        }
    }

    fn run(
        &self,
        bench: &mut Bench,
        f: FragmentId,
        version: &Version,
        inputs: &[u64; 3],
        random: &mut Random,
    ) {
        let mut state = State { flags: random.next() & ARITH_FLAGS, ..State::default() };
        state.gpr.iter_mut().for_each(|g| *g = random.next());
        for (g, v) in INPUTS.iter().zip(inputs) {
            state.gpr[g.number()] = *v;
        }
        let mut expected = state.clone();
        match self.result() {
            Ty::Flags => expected.flags = self.expected(inputs),
            _ => expected.gpr[Gpr::RBX.number()] = self.expected(inputs),
        }
        let out = bench.run(f, &state);
        let listing = || bench.emitter.listing(f).unwrap();
        assert_eq!(out.state, expected, "{inputs:x?}\n{version}\n{}", listing());
        assert_eq!(out.pc, 0x2000);
    }
}

fn widths(op: Op) -> &'static [Ty] {
    match op {
        Op::Bswap => &[Ty::I32, Ty::I64],
        Op::And | Op::Or | Op::Xor | Op::Not => &[Ty::I1, Ty::I8, Ty::I16, Ty::I32, Ty::I64],
        Op::Trunc => &[Ty::I1, Ty::I8, Ty::I16, Ty::I32],
        Op::Insert8Low | Op::Insert8High | Op::Insert16 | Op::Cond(_) | Op::FlagBits => &[Ty::I64],
        Op::Flags(FlagOp::FromBits | FlagOp::SetCf) => &[Ty::I64],
        _ => &[Ty::I8, Ty::I16, Ty::I32, Ty::I64],
    }
}

fn run_op(op: Op, rounds: usize) {
    let mut bench = Bench::new();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for &ty in widths(op) {
        let args: Vec<Ty> = op
            .signature()
            .0
            .iter()
            .map(|a| match a {
                ArgTy::Same => ty,
                ArgTy::Is(t) => *t,
            })
            .collect();
        for constants in 0..1 << args.len() {
            // The bit-test index lies within its operand.
            for record in [false, true] {
                for _ in 0..rounds {
                    Case { op, ty, args: args.clone(), constants, record }
                        .check(&mut bench, &mut random);
                }
            }
        }
    }
}

#[test]
fn plain_operations() {
    for op in Op::PLAIN.into_iter().filter(|op| op.is_pure() && !matches!(op, Op::Zext(_))) {
        run_op(op, 6);
    }
}

#[test]
fn extensions() {
    let mut bench = Bench::new();
    let mut random = Random(77);
    for from in [Ty::I1, Ty::I8, Ty::I16, Ty::I32] {
        for to in [Ty::I8, Ty::I16, Ty::I32, Ty::I64].into_iter().filter(|t| t.bits() > from.bits())
        {
            for op in [Op::Zext(from), Op::Sext(from)] {
                for constants in 0..2 {
                    let case = Case { op, ty: to, args: vec![from], constants, record: false };
                    (0..6).for_each(|_| case.check(&mut bench, &mut random));
                }
            }
        }
    }
}

#[test]
fn flags_operations() {
    for (op, _, _) in FlagOp::TABLE.into_iter().filter(|(op, ..)| *op != FlagOp::Bt) {
        run_op(Op::Flags(op), 6);
    }
}

#[test]
fn conditions_of_flag_bits() {
    Cond::ALL.into_iter().for_each(|c| run_op(Op::Cond(c), 4));
}

/// Each condition of each flags operation, as a value and as a guard that is not taken.
#[test]
fn conditions_of_operations() {
    let mut bench = Bench::new();
    let mut random = Random(4242);
    for (op, _, signature) in FlagOp::TABLE {
        for ty in [Ty::I8, Ty::I16, Ty::I32, Ty::I64] {
            for cond in Cond::ALL {
                for constants in 0..1u32 << signature.len() {
                    one_condition(&mut bench, &mut random, op, ty, cond, constants);
                }
            }
        }
    }
}

fn one_condition(
    bench: &mut Bench,
    random: &mut Random,
    op: FlagOp,
    ty: Ty,
    cond: Cond,
    constants: u32,
) {
    let mut inputs: [u64; 3] = std::array::from_fn(|_| random.interesting());
    if op == FlagOp::Bt {
        inputs[1] &= u64::from(ty.bits()) - 1;
    }
    let types: Vec<Ty> =
        op.args().iter().map(|a| if let ArgTy::Is(t) = a { *t } else { ty }).collect();
    let mut v = Version::new("t1", 0x1000);
    let params = entry_params(&mut v);
    let mut b = Builder::new(&mut v);
    let args: Vec<Operand> = (0..types.len())
        .map(|i| {
            operand(&mut b, params[i], types[i], (constants >> i & 1 != 0).then_some(inputs[i]))
        })
        .collect();
    let f = b.flags(op, ty, &args);
    let c = b.cond(cond, f);
    let chosen = b.select(Ty::I64, c, params[0].into(), Operand::Const(99));
    let byte = b.zext(Ty::I64, Ty::I1, c);
    let mut guard = Inst::new(Op::Assume, Ty::I64, None, &[c]);
    guard.anchor = Some(AnchorId(0));
    b.insts.push(guard);
    let insts = b.insts;
    let varmap = |tag| {
        vec![(Loc::Gpr(Gpr::RBX), chosen), (Loc::Gpr(Gpr::RDX), byte), (Loc::Gpr(Gpr::R11), tag)]
    };
    v.anchor(Anchor::new(Operand::Const(0x3000), varmap(Operand::Const(1))));
    v.anchor(Anchor::new(Operand::Const(0x2000), varmap(Operand::Const(2))));
    v.blocks.push(Block { params, insts, term: Term::Exit(AnchorId(1)) });
    let values: Vec<u64> = types
        .iter()
        .zip(&inputs)
        .map(|(t, i)| if *t == Ty::Flags { i & ARITH_FLAGS } else { i & t.mask() })
        .collect();
    let holds = semantics::cond_holds(cond, semantics::eval(Op::Flags(op), ty, &values));
    if bench.emitter.fragments().len() > 2000 {
        bench.emitter.flush_all();
    }
    let fragment = bench.compile(&v);
    let mut state = State { flags: random.next() & ARITH_FLAGS, ..State::default() };
    state.gpr.iter_mut().for_each(|g| *g = random.next());
    for (g, i) in INPUTS.iter().zip(inputs) {
        state.gpr[g.number()] = i;
    }
    let mut expected = state.clone();
    expected.gpr[Gpr::RBX.number()] = if holds { inputs[0] } else { 99 };
    expected.gpr[Gpr::RDX.number()] = u64::from(holds);
    expected.gpr[Gpr::R11.number()] = if holds { 2 } else { 1 };
    let out = bench.run(fragment, &state);
    let listing = || bench.emitter.listing(fragment).unwrap();
    assert_eq!(out.state, expected, "{inputs:x?}\n{v}\n{}", listing());
    assert_eq!(out.pc, if holds { 0x2000 } else { 0x3000 });
}

/// Many large constants, most of them within 2 GiB of each other or of the negation of such a one: they
/// share registers.
#[test]
fn large_constants() {
    let mut bench = Bench::new();
    let mut random = Random(0x1234_5678_9abc_def1);
    for _ in 0..400 {
        let centres = [0, 1].map(|_| random.next() >> (random.next() % 24));
        let constant = |random: &mut Random| {
            let near = centres[(random.next() % 2) as usize];
            let distance = match random.next() % 4 {
                0 => 0,
                1 => random.next() % 4096,
                2 => (random.next() as i32) as u64,
                _ => random.next() >> 32,
            };
            let c = near.wrapping_add(distance);
            if random.next().is_multiple_of(4) { c.wrapping_neg() } else { c }
        };
        let mut v = Version::new("t1", 0x1000);
        let params = entry_params(&mut v);
        let mut state = State { flags: random.next() & ARITH_FLAGS, ..State::default() };
        state.gpr.iter_mut().for_each(|g| *g = random.next());
        let inputs = INPUTS.map(|g| state.gpr[g.number()]);
        let mut b = Builder::new(&mut v);
        let (mut value, mut expected): (Operand, u64) = (params[0].into(), inputs[0]);
        for _ in 0..20 {
            let op = [Op::Add, Op::Add, Op::Sub, Op::Xor, Op::And, Op::Or, Op::Mul]
                [(random.next() % 7) as usize];
            let mut args = [(value, expected), (Operand::Const(0), constant(&mut random))];
            args[1].0 = Operand::Const(args[1].1);
            if random.next().is_multiple_of(3) {
                // An input is used again, so that its register must survive.
                let i = (random.next() % 3) as usize;
                args[0] = (params[i].into(), inputs[i]);
                let c = constant(&mut random);
                let sum = b.binary(Op::Add, Ty::I64, args[0].0, Operand::Const(c));
                args[0] = (sum, args[0].1.wrapping_add(c));
                args[1] = (value, expected);
            }
            value = b.binary(op, Ty::I64, args[0].0, args[1].0);
            expected = semantics::eval(op, Ty::I64, &[args[0].1, args[1].1]);
        }
        let insts = b.insts;
        let out = vec![
            (Loc::Gpr(Gpr::RBX), value),
            (Loc::Gpr(Gpr::RDI), Operand::Const(constant(&mut random))),
        ];
        let Operand::Const(in_rdi) = out[1].1 else { unreachable!("it was made above") };
        v.anchor(Anchor::new(Operand::Const(0x2000), out));
        v.blocks.push(Block { params, insts, term: Term::Exit(AnchorId(0)) });
        let fragment = bench.compile(&v);
        let out = bench.run(fragment, &state);
        state.gpr[Gpr::RBX.number()] = expected;
        state.gpr[Gpr::RDI.number()] = in_rdi;
        assert_eq!(out.state, state, "{v}\n{}", bench.emitter.listing(fragment).unwrap());
    }
}

/// Gives the version an entry parameter for each input.
fn entry_params(v: &mut Version) -> Vec<Value> {
    let param = |g: &Gpr| {
        v.entry_locs.push(Loc::Gpr(*g));
        v.value(Ty::I64)
    };
    INPUTS.iter().map(param).collect()
}
