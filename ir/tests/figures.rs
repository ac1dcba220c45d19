//! The figures of sourir (POPL 2018) that show code, re-expressed on machine state: the transformation applied to the
//! "before" gives the "after", and what comes out is compared with the guest's own code by the checker.
//!
//! `tests/figures/fig_NN.ir` holds what the figure starts from and, behind `---`, what must come out; `*.guest` holds guest code
//! that several share. `FIGURES_BLESS=1 cargo test -p dynasour-ir --test figures` writes the results: read the diff.
//! Figures 1, 3, 4, 12, 13, 15 and 16 show no versions (source text, syntax, semantics).

use dynasour_ir::eval::check::{Limits, check};
use dynasour_ir::eval::{ModelMachine, State};
use dynasour_ir::opt::{InlineError, OptOptions, inject, inline, optimise_with};
use dynasour_ir::reach::Place;
use dynasour_ir::region::verify_region;
use dynasour_ir::verify::assert_valid;
use dynasour_ir::{BlockId, Gpr, Inst, Op, Operand, Region, Ty, Value, Version, text};
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

/// What came out is what stands behind `---` in the figure's file.
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

/// The version leaves where `base` passes, by itself and when any anchor is taken, from each of these states.
#[track_caller]
fn agrees(guest: &BTreeMap<u64, Version>, version: &Version, states: &[(State, ModelMachine)]) {
    for (state, machine) in states {
        let limits = Limits { steps: 10_000, forced: 200 };
        check(&mut guest.clone(), version, state, machine, limits).unwrap_or_else(|m| panic!("{m}"));
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
    let place = Place { block: BlockId(block), inst: at + 1 };
    inject(version, place, predicate.into()).expect("an anchor reaches the place");
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
    // x != nil at L2: the place of the second assume.
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

/// The middle version violates the deoptimisation invariant; speculative constant propagation never makes it.
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
    let mismatch =
        check(&mut guest.clone(), wrong, &state, &machine, Limits::default()).expect_err("it is not transparent");
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
    // e at L1, then what follows from constants.
    speculate(&mut first, 0, 3, Op::Eq, Value(2), 0);
    run(&mut first, &["constants", "dce"]);
    agrees(&guest, &first, &states);
    region.insert(first).unwrap();
    let mut second = region.copy("v1", "v2").unwrap();
    // The assumes without a predicate may go; those that have one stay.
    run(&mut second, &["redundant", "dce"]);
    agrees(&guest, &second, &states);
    region.insert(second).unwrap();
    verify_region(&region).unwrap();
    let shown: Vec<String> = ["v2", "v1"].iter().map(|v| shown(region.version(v).unwrap())).collect();
    expect("fig_07.ir", &shown.concat());
    // Composition (4.6) leads from v2 past v1 to v0, and v1 goes.
    assert!(region.bypass("v1") > 0);
    verify_region(&region).unwrap();
    assert_eq!(region.remove_unreferenced(), ["v1"]);
    agrees(&guest, region.version("v2").unwrap(), &states);
}

/// An inlining of size into a main: the anchor of size rebuilds main's frame.
#[test]
fn fig_10() {
    let find = |pc: u64| regions("fig_10.ir").into_iter().find(|r| r.pc == pc).unwrap().versions.remove(0);
    let (mut version, size, after) = (find(0x2000), find(0x1000), find(0x2015));
    let guest = guest("size.guest");
    let states = vec![state(&[]), state(&[(Gpr::RAX, 5)])];
    agrees(&guest, &version, &states);
    inline(&mut version, BlockId(0), &size).unwrap();
    // The popped return address is the pushed one, so control goes on at Lret, and it is known where.
    run(&mut version, &["simplify", "forward", "simplify", "redundant", "dce"]);
    agrees(&guest, &version, &states);
    let mut whole = version.clone();
    inline(&mut whole, BlockId(0), &after).unwrap();
    agrees(&guest, &whole, &states);
    // Nothing but the anchor of size needs the frame: it exists only when that is taken.
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
    let anchor = inject(&mut version, Place { block: BlockId(1), inst: at }, Value(10).into()).unwrap();
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
