//! Measures the cost of the IR by the size of the trace: parsing, printing, verifying, each pass
//! and the default pipeline, on traces of about 20, 200 and 2,000 IR instructions, linear and
//! loops.
//!
//! `cargo bench -p dynasour-ir`, or one of it: `cargo bench -p dynasour-ir -- pipeline`. The traces
//! look like `-O0` code: locals on the stack, an array written through a pointer, a comparison and
//! a branch every ten guest instructions, every register in every varmap. The goal is the pipeline
//! on 200 instructions in less than 400 µs, and no growth worse than n log n.

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use dynasour_ir::opt::{OptOptions, PASSES, optimise};
use dynasour_ir::text::version;
use dynasour_ir::verify::verify;
use dynasour_ir::{
    Anchor, AnchorId, Block, BlockId, Builder, Cond, Context, Fact, FlagOp, Inst, Loc, Mem, Op,
    Operand, Origin, OriginKind, Term, Ty, Version,
};
use std::hint::black_box;
use std::time::Duration;

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

/// `local += 1; array[local] = local; other ^= local; if (local > bound) leave;` as a compiler
/// without optimisation translates it.
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
    b.assume(Origin { kind: OriginKind::Branch, pc: pc + 28, step: Some(0) }, holds, a);
}

fn trace(units: usize, is_loop: bool) -> Version {
    let mut version = Version::new("t1", 0x40_1000);
    version.context = Context { facts: vec![Fact::PrivateMemory] };
    version.entry_locs = (0..Loc::SSA_COUNT).map(Loc::from_ssa_index).collect();
    let params: Vec<_> =
        (0..Loc::SSA_COUNT).map(|i| version.value(Loc::from_ssa_index(i).ty())).collect();
    let mut state: State = std::array::from_fn(|i| params[i].into());
    let written = [RAX, RDX, FLAGS];
    let mut params = params;
    if is_loop {
        let args = written.iter().map(|i| state[*i]).collect();
        version.blocks.push(Block {
            params,
            insts: Vec::new(),
            term: Term::Jump { to: BlockId(1), args },
        });
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

/// A trace with about this many instructions.
fn sized(insts: usize, is_loop: bool) -> Version {
    let count = |v: &Version| v.blocks.iter().map(|b| b.insts.len()).sum::<usize>();
    let per_unit = count(&trace(2, is_loop)) - count(&trace(1, is_loop));
    trace(insts.div_ceil(per_unit).max(1), is_loop)
}

fn costs(c: &mut Criterion) {
    for (shape, is_loop) in [("linear", false), ("loop", true)] {
        for insts in [20, 200, 2_000] {
            let v = sized(insts, is_loop);
            let text = v.to_string();
            let mut group = c.benchmark_group(shape);
            group.throughput(Throughput::Elements(insts as u64));
            group
                .warm_up_time(Duration::from_millis(300))
                .measurement_time(Duration::from_secs(1))
                .sample_size(20);
            let id = |name: &str| BenchmarkId::new(name, insts);
            group.bench_function(id("print"), |b| b.iter(|| black_box(&v).to_string()));
            group.bench_function(id("parse"), |b| b.iter(|| version(black_box(&text))));
            group.bench_function(id("verify"), |b| b.iter(|| verify(black_box(&v))));
            let options = OptOptions::default();
            for pass in PASSES {
                let run = |mut v: Version| {
                    pass.run(&mut v, &options);
                    v
                };
                group.bench_function(id(pass.name), |b| {
                    b.iter_batched(|| v.clone(), run, BatchSize::SmallInput)
                });
            }
            let pipeline = |mut v: Version| {
                optimise(&mut v, &options);
                v
            };
            group.bench_function(id("pipeline"), |b| {
                b.iter_batched(|| v.clone(), pipeline, BatchSize::SmallInput)
            });
            group.finish();
        }
    }
}

criterion_group!(benches, costs);
criterion_main!(benches);
