//! Time of the optimiser's pipeline by the size of the trace, and where it goes.
//!
//! `cargo bench -p dynasour-ir` prints, for traces of about 20, 200 and 500 guest instructions, linear and loops, the
//! fastest of several runs and what each pass took in it. The traces look like `-O0` code: locals on the stack, an array
//! written through a pointer, a comparison and a branch every ten instructions, every register in every varmap.

use dynasour_ir::opt::{OptOptions, OptStats, PASSES, optimise};
use dynasour_ir::{
    Anchor, AnchorId, Block, BlockId, Builder, Cond, Context, Fact, FlagOp, Inst, Loc, Mem, Op, Operand, Term, Ty,
    Version,
};
use std::time::{Duration, Instant};

const RUNS: usize = 30;
/// Guest instructions of one unit.
const UNIT: usize = 10;
const RAX: usize = 0;
const RDX: usize = 2;
const RBP: usize = 5;
const FLAGS: usize = 16;

type State = [Operand; Loc::SSA_COUNT];

fn anchor(b: &mut Builder, pc: u64, state: &State) -> AnchorId {
    let varmap = state.iter().enumerate().map(|(i, o)| (Loc::from_ssa_index(i), *o)).collect();
    b.version.anchor(Anchor::new(Operand::Const(pc), varmap))
}

fn load(b: &mut Builder, ty: Ty, mem: Mem, base: Operand, anchor: AnchorId) -> Operand {
    let v = b.load(ty, mem, base, Operand::Const(0));
    b.insts.last_mut().expect("it was just appended").anchor = Some(anchor);
    v
}

fn store(b: &mut Builder, ty: Ty, mem: Mem, base: Operand, value: Operand, anchor: AnchorId) {
    b.store(ty, mem, base, Operand::Const(0), value);
    b.insts.last_mut().expect("it was just appended").anchor = Some(anchor);
}

/// `local += 1; array[local] = local; other ^= local; if (local > bound) leave;` as a compiler without optimisation
/// translates it.
fn unit(b: &mut Builder, n: usize, state: &mut State) {
    let pc = 0x40_1000 + 64 * n as u64;
    let local = Mem::disp(-4 - 4 * (n as i64 % 12));
    let other = Mem::disp(-64 - 8 * (n as i64 % 3));
    let rbp = state[RBP];
    let a = anchor(b, pc, state);
    let x = load(b, Ty::I32, local, rbp, a);
    let x1 = b.binary(Op::Add, Ty::I32, x, Operand::Const(1));
    state[FLAGS] = b.flags(FlagOp::Add, Ty::I32, &[x, Operand::Const(1)]);
    state[RAX] = b.zext(Ty::I64, Ty::I32, x1);
    store(b, Ty::I32, local, rbp, x1, a);
    let a = anchor(b, pc + 8, state);
    let wide = b.sext(Ty::I64, Ty::I32, x1);
    let scaled = b.binary(Op::Shl, Ty::I64, wide, Operand::Const(2));
    state[RDX] = b.binary(Op::Add, Ty::I64, scaled, Operand::Const(0x60_0000));
    store(b, Ty::I32, Mem::disp(0), state[RDX], x1, a);
    let a = anchor(b, pc + 16, state);
    let y = load(b, Ty::I64, other, rbp, a);
    let y = b.binary(Op::Xor, Ty::I64, y, state[RAX]);
    state[FLAGS] = b.flags(FlagOp::Xor, Ty::I64, &[y, state[RAX]]);
    store(b, Ty::I64, other, rbp, y, a);
    let a = anchor(b, pc + 24, state);
    let bound = load(b, Ty::I32, Mem::disp(-100), rbp, a);
    state[FLAGS] = b.flags(FlagOp::Sub, Ty::I32, &[x1, bound]);
    let holds = b.cond(Cond::Le, state[FLAGS]);
    let a = anchor(b, pc + 28, state);
    b.assume(holds, a);
}

fn trace(units: usize, is_loop: bool) -> Version {
    let mut version = Version::new("t1", 0x40_1000);
    version.context = Context { facts: vec![Fact::PrivateMemory] };
    version.entry_locs = (0..Loc::SSA_COUNT).map(Loc::from_ssa_index).collect();
    let params: Vec<_> = (0..Loc::SSA_COUNT).map(|i| version.value(Loc::from_ssa_index(i).ty())).collect();
    let mut state: State = std::array::from_fn(|i| params[i].into());
    let written = [RAX, RDX, FLAGS];
    let mut params = params;
    if is_loop {
        let args = written.iter().map(|i| state[*i]).collect();
        version.blocks.push(Block { params, insts: Vec::new(), term: Term::Jump { to: BlockId(1), args } });
        params = written.iter().map(|i| version.value(Loc::from_ssa_index(*i).ty())).collect();
        written.iter().zip(&params).for_each(|(i, p)| state[*i] = (*p).into());
    }
    let mut b = Builder::new(&mut version);
    if is_loop {
        let a = anchor(&mut b, 0x40_1000, &state);
        let mut poll = Inst::new(Op::Poll, Ty::I64, None, &[]);
        poll.anchor = Some(a);
        b.insts.push(poll);
    }
    (0..units).for_each(|n| unit(&mut b, n, &mut state));
    let term = if is_loop {
        Term::Jump { to: BlockId(1), args: written.iter().map(|i| state[*i]).collect() }
    } else {
        Term::Exit(anchor(&mut b, 0x40_2000, &state))
    };
    let insts = b.insts;
    version.blocks.push(Block { params, insts, term });
    version
}

/// The fastest of several runs, and what its passes took.
fn best(version: &Version) -> (Duration, OptStats) {
    let run = || {
        let mut copy = version.clone();
        let start = Instant::now();
        let stats = optimise(&mut copy, &OptOptions::default());
        (start.elapsed(), stats)
    };
    (0..RUNS).map(|_| run()).min_by_key(|(time, _)| *time).expect("at least one run")
}

fn main() {
    println!("{:>6} {:>6} {:>9} {:>6}  µs of each pass", "guest", "shape", "IR", "µs");
    for units in [2, 20, 50] {
        for is_loop in [false, true] {
            let version = trace(units, is_loop);
            let (time, stats) = best(&version);
            let share = |name: &str| {
                stats.passes.iter().filter(|p| p.name == name).map(|p| p.time.as_secs_f64() * 1e6).sum::<f64>()
            };
            let passes: Vec<String> = PASSES.iter().map(|p| format!("{} {:.0}", p.name, share(p.name))).collect();
            let shape = if is_loop { "loop" } else { "linear" };
            let after = stats.passes.last().map_or(0, |p| p.insts);
            let (guest, micros) = (units * UNIT, time.as_secs_f64() * 1e6);
            println!("{guest:>6} {shape:>6} {:>4}/{after:<4} {micros:>6.0}  {}", stats.insts_before, passes.join(", "));
        }
    }
}
