//! The figures of sourir (POPL 2018) that show code, re-expressed on machine state. The
//! transformation applied to the "before" gives the "after", and the checker compares the result
//! with the guest's own code. (Fig. 14, the machine's state, is checked after a deoptimisation.)
//!
//! `tests/figures/fig_NN.ir` holds the start of a figure and, after `---`, the expected result;
//! `*.guest` holds guest code that several figures share. `FIGURES_BLESS=1 cargo test -p
//! dynasour-ir --test figures` writes the results: read the diff. Figures 1, 3, 4, 12, 13, 15 and
//! 16 show no versions (source text, syntax, semantics).

use dynasour_ir::eval::check::{Limits, check};
use dynasour_ir::eval::{self, Fault, Hooks, Leave, Machine, ModelMachine, NoHooks, Reason, State};
use dynasour_ir::opt::{
    Assumption, InlineError, OptOptions, PASSES, continuation, inject, inline, optimise_with,
    resume, specialise,
};
use dynasour_ir::reach::Point;
use dynasour_ir::region::verify_region;
use dynasour_ir::verify::assert_valid;
use dynasour_ir::{
    AnchorId, BlockId, Context, Fact, Gpr, Inst, Op, Operand, Region, Term, Ty, Value, Version,
    text,
};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Memory that the guests of the figures use.
const ARRAY: u64 = 0x1_0000;
const STACK: u64 = 0x2_0000;

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/figures").join(name)
}

fn read(name: &str) -> String {
    std::fs::read_to_string(path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn regions(name: &str) -> Vec<Region> {
    let content = read(name);
    let source = content.split("---\n").next().unwrap_or_default();
    text::regions(source).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// The one region of a file.
fn region(name: &str) -> Region {
    let mut regions = regions(name);
    assert_eq!(regions.len(), 1, "{name}");
    regions.remove(0)
}

/// The `base` blocks of a file, by their pcs.
fn guest(name: &str) -> BTreeMap<u64, Version> {
    let versions = regions(name).into_iter().flat_map(|r| r.versions);
    versions.filter(|v| v.is_base()).map(|v| (v.region, v)).collect()
}

/// The result equals the text after `---` in the figure's file.
fn expect(name: &str, found: &str) {
    let content = read(name);
    let (source, expected) = content.split_once("---\n").unwrap_or((&content, ""));
    if std::env::var_os("FIGURES_BLESS").is_some() {
        std::fs::write(path(name), format!("{source}---\n{found}")).unwrap();
    } else {
        assert_eq!(found, expected, "{name}");
    }
}

/// A version without the list of its dead values.
fn shown(version: &Version) -> String {
    let mut out = String::new();
    write!(out, "{version:#}").unwrap();
    out
}

fn run(version: &mut Version, passes: &[&str]) {
    optimise_with(version, passes, &OptOptions::default());
    assert_valid(version);
}

/// A state with memory for an array of 4 and a stack.
fn state(gprs: &[(Gpr, u64)]) -> (State, ModelMachine) {
    let mut machine = ModelMachine::new();
    machine.map(ARRAY, 4096);
    machine.map(STACK - 4096, 8192);
    machine.write(ARRAY, &[4, 0, 0, 0, 0, 0, 0, 0, 1]);
    machine.write(STACK, &0x9000u64.to_le_bytes());
    let mut state = State::default();
    (state.gpr[Gpr::RSP.number()], state.gpr[Gpr::RBP.number()]) = (STACK, STACK + 0x100);
    gprs.iter().for_each(|(gpr, value)| state.gpr[gpr.number()] = *value);
    (state, machine)
}

/// From each of these states the version leaves where `base` passes, by itself and with any anchor
/// taken.
#[track_caller]
fn agrees(guest: &BTreeMap<u64, Version>, version: &Version, states: &[(State, ModelMachine)]) {
    for (state, machine) in states {
        let limits = Limits { steps: 10_000, forced: 200 };
        check(&mut guest.clone(), version, state, machine, limits)
            .unwrap_or_else(|m| panic!("{m}"));
    }
}

fn by_rdi() -> Vec<(State, ModelMachine)> {
    [0, ARRAY, ARRAY + 8, 42, 0x10].iter().map(|x| state(&[(Gpr::RDI, *x)])).collect()
}

/// Appends `op.i64 a, c` to the instructions before `at` of block 0, and an assume of it there.
fn speculate(version: &mut Version, block: u32, at: usize, op: Op, a: Value, c: u64) {
    let predicate = version.value(Ty::I1);
    let inst = Inst::new(op, Ty::I64, Some(predicate), &[a.into(), Operand::Const(c)]);
    version.blocks[block as usize].insts.insert(at, inst);
    let point = Point { block: BlockId(block), inst: at + 1 };
    inject(version, point, predicate.into()).expect("an anchor reaches the point");
}

/// A fresh copy of the base version of size.
#[test]
fn fig_08() {
    let mut region = region("fig_08.ir");
    let guest = guest("size.guest");
    agrees(&guest, region.version("vb").unwrap(), &by_rdi());
    let copy = region.copy("vb", "vdup").unwrap();
    region.insert(copy).unwrap();
    verify_region(&region).unwrap();
    agrees(&guest, region.version("vdup").unwrap(), &by_rdi());
    expect("fig_08.ir", &shown(region.active().unwrap()));
}

/// A speculation that the argument is not nil eliminates one of the branches.
#[test]
fn fig_09() {
    let mut version = region("fig_09.ir").copy("vb", "vpruned").unwrap();
    // x != nil at L2: the point of the second assume.
    speculate(&mut version, 0, 3, Op::Ne, Value(2), 0);
    run(&mut version, &["constants", "unreachable", "dce"]);
    agrees(&guest("size.guest"), &version, &by_rdi());
    expect("fig_09.ir", &shown(&version));
}

/// Speculation on x: el is replaced by 32, and the varmap restores it.
#[test]
fn fig_05() {
    let mut version = region("fig_05.ir").version("vb").unwrap().clone();
    version.name = "vo".to_string();
    speculate(&mut version, 0, 3, Op::Ne, Value(2), 0);
    run(&mut version, &["constants", "unreachable", "redundant", "dce"]);
    agrees(&guest("size.guest"), &version, &by_rdi());
    expect("fig_05.ir", &shown(&version));
}

/// The middle version violates the deoptimisation invariant; speculative constant propagation never
/// makes it.
#[test]
fn fig_06() {
    let region = region("fig_06.ir");
    let guest = guest("fig_06.ir");
    let wrong = region.version("vw").unwrap();
    assert_valid(wrong);
    let (state, machine) = state(&[(Gpr::RDI, 7)]);
    let unforced = Limits { forced: 0, ..Limits::default() };
    check(&mut guest.clone(), wrong, &state, &machine, unforced)
        .expect("it is equivalent as long as it does not deoptimise");
    let mismatch = check(&mut guest.clone(), wrong, &state, &machine, Limits::default())
        .expect_err("it is not transparent");
    assert!(mismatch.to_string().contains("rdi: base 0x7, version 0x2a"), "{mismatch}");

    let mut version = region.version("vo").unwrap().clone();
    agrees(&guest, &version, &by_rdi());
    run(&mut version, &["constants", "redundant", "dce"]);
    agrees(&guest, &version, &by_rdi());
    expect("fig_06.ir", &shown(&version));
}

/// Chained assumes: a copy of a copy.
#[test]
fn fig_07() {
    let mut region = region("fig_07.ir");
    let guest = guest("fig_07.ir");
    let states: Vec<_> = [0, 1].iter().map(|e| state(&[(Gpr::RDX, *e)])).collect();
    let mut first = region.copy("v0", "v1").unwrap();
    // e at L1, then the consequences of constants.
    speculate(&mut first, 0, 3, Op::Eq, Value(2), 0);
    run(&mut first, &["constants", "dce"]);
    agrees(&guest, &first, &states);
    region.insert(first).unwrap();
    let mut second = region.copy("v1", "v2").unwrap();
    // The assumes without a predicate may be removed; those with one stay.
    run(&mut second, &["redundant", "dce"]);
    agrees(&guest, &second, &states);
    region.insert(second).unwrap();
    verify_region(&region).unwrap();
    let shown: Vec<String> =
        ["v2", "v1"].iter().map(|v| shown(region.version(v).unwrap())).collect();
    expect("fig_07.ir", &shown.concat());
    // Composition (4.6) leads from v2 past v1 to v0, and v1 is removed.
    assert!(region.bypass("v1") > 0);
    verify_region(&region).unwrap();
    assert_eq!(region.remove_unreferenced(), ["v1"]);
    agrees(&guest, region.version("v2").unwrap(), &states);
}

/// An inlining of size into a main: the anchor of size rebuilds main's frame.
#[test]
fn fig_10() {
    let find =
        |pc: u64| regions("fig_10.ir").into_iter().find(|r| r.pc == pc).unwrap().versions.remove(0);
    let (mut version, size, after) = (find(0x2000), find(0x1000), find(0x2015));
    let guest = guest("size.guest");
    let states = vec![state(&[]), state(&[(Gpr::RAX, 5)])];
    agrees(&guest, &version, &states);
    inline(&mut version, BlockId(0), &size).unwrap();
    // The popped return address is the pushed one, so control continues at Lret, which is known.
    run(&mut version, &["simplify", "forward", "simplify", "redundant", "dce"]);
    agrees(&guest, &version, &states);
    let mut whole = version.clone();
    inline(&mut whole, BlockId(0), &after).unwrap();
    agrees(&guest, &whole, &states);
    // Only the anchor of size needs the frame, so the frame exists only if that anchor is taken.
    run(&mut version, &["frames", "dce"]);
    agrees(&guest, &version, &states);
    let error = inline(&mut version.clone(), BlockId(0), &after).unwrap_err();
    assert!(matches!(error, InlineError::Pending(_)), "what a print shows may not wait: {error}");
    expect("fig_10.ir", &shown(&version));
}

/// Moving an assume forward in the instruction stream.
#[test]
fn fig_11() {
    let mut version = region("fig_11.ir").versions.remove(0);
    let at = version.blocks[1].insts.iter().position(|i| i.def() == Some(Value(10))).unwrap() + 1;
    let guest = moved_size();
    agrees(&guest, &version, &by_rdi());
    let anchor =
        inject(&mut version, Point { block: BlockId(1), inst: at }, Value(10).into()).unwrap();
    assert_eq!(anchor.0, 0, "the anchor at the entry reaches the branch");
    run(&mut version, &["constants", "redundant", "dce"]);
    agrees(&guest, &version, &by_rdi());
    expect("fig_11.ir", &shown(&version));
}

/// size as Fig. 11 has it: x becomes x[0] in the branch.
fn moved_size() -> BTreeMap<u64, Version> {
    let mut guest = guest("size.guest");
    let block = "region 0x100a { version base { b0:
      at 0x100a
      v0 = get.i64 rdi
      v1 = load.i64 [v0]
      put.i64 rdi, v1
      v2 = get.i64 rcx
      v3 = mul.i64 v1, v2
      put.i64 rax, v3
      goto 0x1030
    } }";
    guest.insert(0x100a, text::version(block).unwrap());
    guest
}

/// The one version that is not `base`.
fn optimised(name: &str) -> Version {
    regions(name).into_iter().flat_map(|r| r.versions).find(|v| !v.is_base()).expect("there is one")
}

/// A compiled function: the anchor after the call of `add` rebuilds j, the guard of the type
/// leaves the loop.
#[test]
fn fig_02() {
    let (mut version, guest) = (optimised("fig_02.ir"), guest("fig_02.ir"));
    let states: Vec<_> = [(0, 3, 7), (0, 3, 8), (2, 2, 7), (1, 600, 7)]
        .iter()
        .map(|(i, limit, tag)| {
            let gprs = [(Gpr::RCX, *i), (Gpr::RDX, *limit), (Gpr::RDI, ARRAY), (Gpr::new(9), *tag)];
            let (state, mut machine) = state(&gprs);
            // A hole in the middle of the array.
            machine.write(ARRAY + 16, &[0xff; 8]);
            (state, machine)
        })
        .collect();
    agrees(&guest, &version, &states);
    run(&mut version, &["hoist", "simplify", "dce", "params", "dce"]);
    agrees(&guest, &version, &states);
    expect("fig_02.ir", &shown(&version));
    let body = &version.blocks[1].insts;
    let checks = |v: Value| body.iter().any(|i| i.def() == Some(v));
    assert!(!checks(Value(23)), "the type is checked before the loop only:\n{version}");
}

/// The abstract machine state ⟨P I L K* M E⟩ after a deoptimisation in inlined code: I and L are
/// the pc, M is memory, E the registers; the continuation ⟨I L x E⟩ is the caller's frame on the
/// guest's stack, with its return address.
#[test]
fn fig_14() {
    let source = read("fig_10.ir");
    let inlined = text::version(source.split("---\n").nth(1).expect("Fig. 10's result")).unwrap();
    let (mut state, mut machine) = state(&[]);
    let mut force = ForceFirst { anchor: AnchorId(2), taken: false };
    let leave = eval::run(&inlined, &mut state, &mut machine, &mut force, &mut 1_000).unwrap();
    assert!(
        matches!(leave, Leave::Anchor { pc: 0x1005, reason: Reason::Forced, .. }),
        "L: {leave:?}"
    );
    assert_eq!(
        machine.load(STACK - 8, 8),
        Ok(0x2015),
        "K: the return address that was never pushed"
    );
    assert_eq!(machine.load(STACK + 16, 8), Ok(4), "K: the environment of the caller");
    assert_eq!(
        (state.gpr[Gpr::RSP.number()], state.gpr[Gpr::RCX.number()]),
        (STACK - 8, 32),
        "E: the callee's"
    );
}

/// Takes one anchor the first time it can.
struct ForceFirst {
    anchor: AnchorId,
    taken: bool,
}

impl Hooks<ModelMachine> for ForceFirst {
    fn force(&mut self, anchor: AnchorId, _point: Point) -> bool {
        anchor == self.anchor && !std::mem::replace(&mut self.taken, true)
    }
}

/// Deoptimisation points keep variables alive: when e leaves the loop, nothing needs y any more; x
/// stays.
#[test]
fn fig_17() {
    let (mut version, guest) = (optimised("fig_17.ir"), guest("fig_17.ir"));
    let states: Vec<_> = [(3, 5), (0, 5), (2, 4)]
        .iter()
        .map(|(z, e)| state(&[(Gpr::RDI, *z), (Gpr::RDX, *e)]))
        .collect();
    run(&mut version, &["dce"]);
    assert!(
        version.blocks[1].insts.iter().any(|i| i.def() == Some(Value(9))),
        "the anchor needs y:\n{version}"
    );
    agrees(&guest, &version, &states);
    run(&mut version, &["hoist", "dce"]);
    agrees(&guest, &version, &states);
    expect("fig_17.ir", &shown(&version));
}

/// Long-running execution is stuck in poorly optimised code: one version for the whole of it, debug
/// tested all the time.
#[test]
fn fig_18() {
    let (mut version, guest) = (optimised("fig_18.ir"), guest("fig_18.ir"));
    agrees(&guest, &version, &[state(&[])]);
    run(&mut version, &["constants", "unreachable", "dce"]);
    agrees(&guest, &version, &[state(&[])]);
    let branches = version.blocks.iter().filter(|b| matches!(b.term, Term::Branch { .. })).count();
    assert_eq!(branches, 2, "nothing is known of debug:\n{version}");
    expect("fig_18.ir", &shown(&version));
}

/// A continuation allows switching to optimised code from within the loop.
#[test]
fn fig_19() {
    let (stuck, guest) = (optimised("fig_18.ir"), guest("fig_18.ir"));
    let mut version = continuation(&stuck, AnchorId(1), "continuation").unwrap();
    assert_eq!(version.region, 0x1010);
    let states: Vec<_> = [(0, 0), (300, 0), (300, 1), (5000, 0)]
        .iter()
        .map(|(x, debug)| state(&[(Gpr::RAX, *x), (Gpr::RBX, *debug)]))
        .collect();
    agrees(&guest, &version, &states);
    // debug is known to be false where the switch is made.
    version.context = Context { facts: vec![Fact::RegEquals(Gpr::RBX, 0)] };
    run(&mut version, &["constants", "unreachable", "params", "dce"]);
    agrees(&guest, &version, &states);
    expect("fig_19.ir", &shown(&version));
    let prints = version.blocks.iter().flat_map(|b| &b.insts).any(|i| i.op == Op::Print);
    assert!(!prints, "Lslow is gone:\n{version}");
}

/// Undoing an isolated assumption: e2 is dropped; e1, e3 and the code that depends on them stay.
#[test]
fn fig_20() {
    let (parent, guest) = (optimised("fig_20.ir"), guest("fig_20.ir"));
    let equals = |value: u32, constant: u64| Assumption {
        anchor: AnchorId(0),
        op: Op::Eq,
        value: Value(value),
        constant,
    };
    let assumptions = [equals(1, 1), equals(2, 2), equals(3, 3)];
    let states: Vec<_> = [(1, 2, 3), (1, 9, 3), (1, 2, 9), (9, 2, 3)]
        .iter()
        .map(|(c, d, i)| state(&[(Gpr::RAX, 4), (Gpr::RCX, *c), (Gpr::RDX, *d), (Gpr::RDI, *i)]))
        .collect();
    let passes = ["constants", "unreachable", "simplify", "params", "dce"];
    let mut all = specialise(&parent, "spec123", &assumptions).unwrap();
    run(&mut all, &passes);
    agrees(&guest, &all, &states);
    assert!(shown(&all).contains("print 6\n"), "1 + 2 + 3 is known:\n{all}");

    // The second state fails e2. A version under e1 and e3 continues there.
    let (mut state, mut machine) = states[1].clone();
    let leave = eval::run(&all, &mut state, &mut machine, &mut NoHooks, &mut 1_000).unwrap();
    let Leave::Anchor { anchor, pc: 0x1000, reason: Reason::Assume, .. } = leave else {
        panic!("{leave:?}")
    };
    assert_eq!(anchor, AnchorId(0));
    let mut rest = resume(&parent, AnchorId(0), "spec13", &assumptions, 1).unwrap();
    run(&mut rest, &passes);
    agrees(&guest, &rest, &states);
    agrees(&guest, &rest, &[(state, machine)]);
    expect("fig_20.ir", &format!("{}{}", shown(&all), shown(&rest)));
}

/// Loop with a dead store to x (Guo and Palsberg): removing the store is wrong, though the trace
/// never reads x; deferring it to the exits is right.
#[test]
fn fig_21() {
    let (trace, guest) = (optimised("fig_21.ir"), guest("fig_21.ir"));
    let states: Vec<_> = [0, 1, 2, 5].iter().map(|e| state(&[(Gpr::RCX, *e)])).collect();
    agrees(&guest, &trace, &states);
    let mut unsound = trace.clone();
    unsound.blocks[1].insts.retain(|i| i.op != Op::Store);
    assert_valid(&unsound);
    let (state, machine) = &states[2];
    let mismatch = check(&mut guest.clone(), &unsound, state, machine, Limits::default())
        .expect_err("x is lost");
    assert!(mismatch.to_string().contains("byte at 0x1fff8"), "{mismatch}");
    // No pass removes the store.
    let mut version = trace.clone();
    for pass in PASSES {
        run(&mut version, &[pass.name]);
        agrees(&guest, &version, &states);
    }
    let mut version = trace;
    run(&mut version, &["peel", "simplify", "forward", "sink", "params", "dce"]);
    agrees(&guest, &version, &states);
    expect("fig_21.ir", &shown(&version));
    let stores = version.blocks[1].insts.iter().filter(|i| i.op == Op::Store).count();
    assert_eq!(stores, 0, "the loop writes nothing:\n{version}");
}

/// Lazy deoptimisation (7.2): an event breaks the assumption, and nothing is checked on the path.
#[test]
fn sec_7_2() {
    let (mut version, guest) = (optimised("sec_7_2.ir"), guest("sec_7_2.ir"));
    let with = |value: u8, rdi: u64| {
        let (state, mut machine) = state(&[(Gpr::RDI, rdi)]);
        machine.write(ARRAY + 16, &[value, 0, 0, 0, 0, 0, 0, 0]);
        (state, machine)
    };
    // The last two write to the constant after a while, the last one in its middle.
    let states = vec![with(5, ARRAY + 64), with(6, ARRAY + 64), with(5, ARRAY), with(5, ARRAY + 3)];
    agrees(&guest, &version, &states);
    run(&mut version, &["monitor", "dce"]);
    agrees(&guest, &version, &states);
    expect("sec_7_2.ir", &shown(&version));
    let (mut state, mut machine) = states[2].clone();
    let leave = eval::run(&version, &mut state, &mut machine, &mut NoHooks, &mut 1_000).unwrap();
    assert!(
        matches!(leave, Leave::Anchor { pc: 0x1008, reason: Reason::Fault(Fault::Watched(_)), .. }),
        "{leave:?}"
    );
    assert_eq!(
        machine.load(ARRAY + 16, 8),
        Ok(5),
        "the event has not happened yet; base lets it happen"
    );
}
