//! The evaluator: each way of leaving a version, and the state in which it leaves.

use dynasour_ir::eval::check::{Limits, check, run_base, same_result};
use dynasour_ir::eval::{
    EvalError, Fault, ForceNth, Hooks, Leave, Machine, ModelMachine, NoHooks, Reason, State, run,
};
use dynasour_ir::reach::Point;
use dynasour_ir::text::{regions, version};
use dynasour_ir::verify::assert_valid;
use dynasour_ir::{AnchorId, BlockId, Gpr, Loc, Trap, Version};
use std::collections::BTreeMap;

fn parse(body: &str) -> Version {
    let v = version(&format!("region 0x10 {{ version {body} }}"))
        .unwrap_or_else(|e| panic!("{e}\n{body}"));
    assert_valid(&v);
    v
}

fn state(registers: &[(Gpr, u64)]) -> State {
    let mut state = State::default();
    registers.iter().for_each(|(gpr, value)| state.gpr[gpr.number()] = *value);
    state
}

/// One mapped page at 0x1000 with the bytes 0, 1, 2, …
fn machine() -> ModelMachine {
    let mut machine = ModelMachine::new();
    machine.write(0x1000, &(0..4096).map(|i| i as u8).collect::<Vec<u8>>());
    machine
}

fn go(v: &Version, state: &mut State, machine: &mut ModelMachine) -> Result<Leave, EvalError> {
    run(v, state, machine, &mut NoHooks, &mut 1_000)
}

const RAX: Gpr = Gpr::RAX;
const RCX: Gpr = Gpr::RCX;

#[test]
fn base_reads_and_writes_locations() {
    let v = parse(
        "base { b0:\n at 0x10\n v0 = get.i64 rax\n v1 = add.i64 v0, 5\n put.i64 rcx, v1\n v2 = \
            flags.sub.i64 v0, v0
        put.flags rflags, v2\n v3 = get.i64 fsbase\n put.i64 gsbase, v3\n v4 = load.i16 fs:[v0 + \
        v0*2 - 0x20]
        v5 = zext16.i64 v4\n put.i64 rdx, v5\n goto v1 }",
    );
    let (mut s, mut m) = (state(&[(RAX, 0x10)]), machine());
    m.put(Loc::FsBase, 0x1000);
    assert_eq!(go(&v, &mut s, &mut m), Ok(Leave::Goto(0x15)));
    assert_eq!((s.gpr[RCX.number()], s.gpr[Gpr::RDX.number()], s.flags), (0x15, 0x1110, 0x44));
    assert_eq!(m.get(Loc::GsBase), 0x1000);
}

#[test]
fn every_end_of_base() {
    for (term, leave) in [
        ("goto 0x20", Leave::Goto(0x20)),
        ("branch 1 then 0x20 else 0x30", Leave::Goto(0x20)),
        ("branch 0 then 0x20 else 0x30", Leave::Goto(0x30)),
        ("call 0x20 return 0x15", Leave::Goto(0x20)),
        ("ret 0x20", Leave::Goto(0x20)),
        ("syscall next 0x12", Leave::Syscall { next: 0x12 }),
        ("special 0x10", Leave::Special { pc: 0x10 }),
        ("trap undefined 0x10", Leave::Trap { pc: 0x10, trap: Trap::Undefined }),
    ] {
        let v = parse(&format!("base {{ b0:\n at 0x10\n {term} }}"));
        assert_eq!(go(&v, &mut State::default(), &mut machine()), Ok(leave), "{term}");
    }
}

#[test]
fn a_fault_in_base_names_the_guest_instruction() {
    let v = parse(
        "base { b0:\n at 0x10\n put.i64 rcx, 1\n at 0x14\n v0 = load.i64 [0x1ffc]\n put.i64 rcx, \
            2\n goto 1 }",
    );
    let mut s = State::default();
    // The access starts in the mapped page and ends beyond it.
    assert_eq!(
        go(&v, &mut s, &mut machine()),
        Ok(Leave::Fault { pc: 0x14, fault: Fault::Load(0x2000) })
    );
    assert_eq!(s.gpr[RCX.number()], 1);
}

const TRACE: &str = "t1 context private_memory {
    anchor a0 = base.0x10 [rax = v0, rcx = v1, rflags = v2]
    anchor a1 = base.v1 [rax = v4, rcx = v0, rflags = 1] stores [store.i8 [0x1000], 0xaa, \
    store.i16 [0x1001], 0xbbcc]
    b0(v0: i64 = rax, v1: i64 = rcx, v2: flags = rflags):
    poll else a0
    v3 = lt.u.i64 v0, 10
    assume v3 else a0
    v4 = load.i64 [v1] !a0
    store.i32 [v1 + 8], 7 !a0
    exit a1 }";

fn leave(anchor: u32, reason: Reason, inst: usize, pc: u64) -> Result<Leave, EvalError> {
    Ok(Leave::Anchor {
        anchor: AnchorId(anchor),
        reason,
        point: Point { block: BlockId(0), inst },
        pc,
    })
}

#[test]
fn a_trace_ends_with_varmap_and_deferred_stores() {
    let (mut s, mut m) = (state(&[(RAX, 3), (RCX, 0x1010)]), machine());
    assert_eq!(go(&parse(TRACE), &mut s, &mut m), leave(1, Reason::End, 5, 0x1010));
    // The varmap is applied at once: the new value of rax does not reach rcx, nor the reverse.
    assert_eq!((s.gpr[RAX.number()], s.gpr[RCX.number()], s.flags), (0x1716_1514_1312_1110, 3, 1));
    assert_eq!(m.load(0x1000, 8), Ok(0x0706_0504_03bb_ccaa));
    assert_eq!(m.load(0x1018, 4), Ok(7));
}

#[test]
fn failed_assumptions_and_faults_fall_back() {
    let untouched = |s: &State, m: &ModelMachine| assert_eq!((s.flags, m), (0x40, &machine()));
    let run_with = |rax: u64, rcx: u64| {
        let (mut s, mut m) = (State { flags: 0x40, ..state(&[(RAX, rax), (RCX, rcx)]) }, machine());
        let left = go(&parse(TRACE), &mut s, &mut m);
        untouched(&s, &m);
        left
    };
    assert_eq!(run_with(10, 0x1010), leave(0, Reason::Assume, 2, 0x10));
    assert_eq!(run_with(1, 0x3000), leave(0, Reason::Fault(Fault::Load(0x3000)), 3, 0x10));
    // The load still fits the page, the store does not.
    assert_eq!(run_with(1, 0x1ff8), leave(0, Reason::Fault(Fault::Store(0x2000)), 4, 0x10));
    let mut protected = machine();
    protected.protect(0x1000);
    let left = go(&parse(TRACE), &mut state(&[(RCX, 0x1010)]), &mut protected);
    assert_eq!(left, leave(0, Reason::Fault(Fault::Store(0x1018)), 4, 0x10));
}

#[test]
fn any_opportunity_can_be_forced() {
    let v = parse(TRACE);
    let mut hooks = ForceNth::default();
    let (mut s, mut m) = (state(&[(RCX, 0x1010)]), machine());
    run(&v, &mut s, &mut m, &mut hooks, &mut 100).expect("it runs");
    assert_eq!(hooks.seen, 4);
    for (nth, inst) in [(0, 0), (1, 2), (2, 3), (3, 4)] {
        let (mut s, mut m) = (state(&[(RCX, 0x1010)]), machine());
        let left = run(&v, &mut s, &mut m, &mut ForceNth { seen: 0, nth: Some(nth) }, &mut 100);
        assert_eq!(
            (left, s, &m),
            (leave(0, Reason::Forced, inst, 0x10), state(&[(RCX, 0x1010)]), &machine())
        );
    }
}

#[test]
fn a_deferred_store_must_not_fault() {
    let (mut s, mut m) = (state(&[(RCX, 0x3000)]), ModelMachine::new());
    m.map(0x3000, 16);
    let error =
        EvalError::DeferredStore { anchor: AnchorId(1), store: 0, fault: Fault::Store(0x1000) };
    assert_eq!(go(&parse(TRACE), &mut s, &mut m), Err(error));
}

#[test]
fn loops_carry_their_parameters_and_budgets_end_them() {
    let v = parse(
        "t1 { anchor a0 = base.0x10 [rax = v2, rcx = v3]
        b0(v0: i64 = rax, v1: i64 = rcx):\n jump b1(v0, v1)
        b1(v2: i64, v3: i64):\n v4 = ne.i64 v2, 5\n assume v4 else a0\n v5 = add.i64 v2, 1\n jump \
        b1(v3, v5) }",
    );
    let mut s = State::default();
    let mut budget = 100;
    let left = run(&v, &mut s, &mut machine(), &mut NoHooks, &mut budget);
    assert!(matches!(left, Ok(Leave::Anchor { reason: Reason::Assume, pc: 0x10, .. })), "{left:?}");
    // The two registers exchange their values; the jump's arguments are read before the parameters
    // are written.
    assert_eq!((s.gpr[RAX.number()], s.gpr[RCX.number()]), (5, 5));
    assert_eq!(budget, 100 - 1 - 10 * 4 - 2);
    assert_eq!(
        run(&v, &mut state(&[(RAX, 9), (RCX, 9)]), &mut machine(), &mut NoHooks, &mut 50),
        Ok(Leave::Budget)
    );
}

#[test]
fn natives_are_functions_of_what_they_declare() {
    let v = parse(
        "t1 { native n0 = 0x10 \"48 0f bc c1\" in [rax, rflags] out [rax, rflags]
        native n1 = 0x20 \"0f 10 07\" mem 16 vec_write 1 effects [read, state]
        native n2 = 0x30 \"0f a2\" out [rax] effects [no_repeat]
        native n3 = 0x40 \"0f 11 07\" mem 16 vec_read 1 effects [write, read_state]
        anchor a0 = base.0x20 [rax = v0, rflags = v1]
        anchor a1 = base.0x40 [rax = v2, rflags = v3]
        anchor a2 = base.0x50 [rax = v4, rflags = v3]
        b0(v0: i64 = rax, v1: flags = rflags):
        v2, v3 = native n0 v0, v1\n native n1 [v0] !a0\n v4 = native n2\n native n3 [v0 + 16] \
        !a1\n exit a2 }",
    );
    let result = |rax: u64, flags: u64, change: &dyn Fn(&mut ModelMachine)| {
        let (mut s, mut m) = (State { flags, ..state(&[(RAX, rax)]) }, machine());
        change(&mut m);
        let left = go(&v, &mut s, &mut m).expect("it runs");
        (left, s, m)
    };
    let plain = result(0x1100, 0, &|_| {});
    assert!(matches!(plain.0, Leave::Anchor { reason: Reason::End, .. }));
    assert_eq!(plain, result(0x1100, 0, &|_| {}));
    // Flags reach n0; memory reaches n1 and through its vector register n3; a second cpuid differs
    // from the first.
    assert_ne!(plain.1.flags, result(0x1100, 1, &|_| {}).1.flags);
    let mut other = result(0x1100, 0, &|m| m.write(0x1100, &[0xff]));
    assert_eq!(plain.1, other.1);
    assert_ne!(plain.2.clone().load(0x1110, 8), other.2.load(0x1110, 8));
    let (mut s, mut m) = (state(&[(RAX, 0x1100)]), plain.2.clone());
    go(&v, &mut s, &mut m).expect("it runs");
    assert_ne!(plain.1.gpr[RAX.number()], s.gpr[RAX.number()]);
    // A fault in n3 comes before it writes anything.
    let (left, _, after) = result(0x1fe8, 0, &|_| {});
    assert!(
        matches!(left, Leave::Anchor { anchor: AnchorId(1), reason: Reason::Fault(_), .. }),
        "{left:?}"
    );
    assert_eq!(after.clone().load(0x1ff8, 8), machine().load(0x1ff8, 8));
}

struct StopAt(u64);

impl<M: Machine> Hooks<M> for StopAt {
    fn at(&mut self, pc: u64, _: &State, _: &M) -> bool {
        pc == self.0
    }
}

fn code(text: &str) -> BTreeMap<u64, Version> {
    let all = regions(text).unwrap_or_else(|e| panic!("{e}"));
    all.into_iter().flat_map(|r| r.versions).map(|v| (v.region, v)).collect()
}

const COUNT: &str = "
    region 0x10 { version base { b0:\n at 0x10\n v0 = get.i64 rax\n v1 = add.i64 v0, 1\n put.i64 \
    rax, v1\n at 0x14
        v2 = get.i64 rax\n v3 = ne.i64 v2, 9\n branch v3 then 0x10 else 0x20 } }
    region 0x20 { version base { b0:\n at 0x20\n store.i64 [0x1000], 1\n goto 0x30 } }";

#[test]
fn a_program_runs_from_block_to_block() {
    let (mut s, mut m) = (State::default(), machine());
    let left = run_base(&mut code(COUNT), 0x10, &mut s, &mut m, &mut NoHooks, &mut 1_000);
    assert_eq!((left, s.gpr[RAX.number()], m.load(0x1000, 8)), (Ok(Leave::Goto(0x30)), 9, Ok(1)));
    let mut s = State::default();
    let left =
        run_base(&mut code(COUNT), 0x10, &mut s, &mut machine(), &mut StopAt(0x14), &mut 1_000);
    assert_eq!((left, s.gpr[RAX.number()]), (Ok(Leave::Stopped { pc: 0x14 }), 1));
}

/// A trace of `COUNT` that leaves with rax = `value` at `pc`, with this deferred store.
fn claims(value: &str, pc: u64, stores: &str) -> Result<(), String> {
    let v = parse(&format!(
        "t1 context private_memory {{ anchor a0 = base.{pc:#x} [rax = {value}] {stores}
        b0(v0: i64 = rax):\n v1 = add.i64 v0, 1\n exit a0 }}"
    ));
    check(&mut code(COUNT), &v, &State::default(), &machine(), Limits::default())
        .map(|_| ())
        .map_err(|m| m.what)
}

#[test]
fn the_checker_accepts_exactly_the_states_of_base() {
    assert_eq!(claims("v0", 0x10, ""), Ok(()));
    assert_eq!(claims("v1", 0x14, ""), Ok(()));
    assert_eq!(claims("7", 0x10, ""), Ok(()));
    assert_eq!(claims("9", 0x20, ""), Ok(()));
    assert_eq!(claims("9", 0x30, "stores [store.i64 [0x1000], 1]"), Ok(()));
    for (value, pc, stores, part) in [
        (
            "v0",
            0x14,
            "",
            "base passes 0x14 9 times, never in this state; the nearest differs in: rax: base \
                0x1, version 0x0",
        ),
        ("9", 0x10, "", "base passes 0x10 9 times"),
        ("8", 0x20, "", "rax: base 0x9, version 0x8"),
        ("9", 0x30, "", "byte at 0x1000: 0x01 and 0x00"),
        ("9", 0x20, "stores [store.i64 [0x1000], 1]", "byte at 0x1000: 0x00 and 0x01"),
        ("9", 0x40, "", "base never comes to 0x40"),
    ] {
        let what = claims(value, pc, stores).expect_err("wrong claim");
        assert!(what.contains(part), "{value} at {pc:#x}: {what}");
    }
}

#[test]
fn the_checker_asks_the_context() {
    let v = parse("t1 context rax == 5 { anchor a0 = base.0x99 [] b0:\n exit a0 }");
    let checked = |s: &State| check(&mut code(COUNT), &v, s, &machine(), Limits::default());
    assert_eq!(
        checked(&State::default()).ok(),
        Some(dynasour_ir::eval::check::Checked::ContextFails)
    );
    assert!(checked(&state(&[(RAX, 5)])).is_err());
}

#[test]
fn two_versions_are_compared() {
    let make = |value: u64, pc: u64| {
        parse(&format!("t{value} {{ anchor a0 = base.{pc} [rax = {value}] b0:\n exit a0 }}"))
    };
    let same = |a: &Version, b: &Version| same_result(a, b, &State::default(), &machine(), 10);
    assert_eq!(same(&make(1, 2), &make(1, 2)), Ok(()));
    assert!(
        same(&make(1, 2), &make(2, 2))
            .is_err_and(|e| e.contains("rax=0x1") && e.contains("rax=0x2"))
    );
    assert!(same(&make(1, 2), &make(1, 3)).is_err());
}

#[test]
fn boundless_memory_compares_with_what_was_never_written() {
    let (mut a, b) = (ModelMachine::boundless(7), ModelMachine::boundless(7));
    let old = a.load(0xffff_ffff_ffff_fff8, 8).expect("everything is accessible");
    a.store(0xffff_ffff_ffff_fff8, 8, old).expect("everything is accessible");
    assert_eq!(a, b);
    a.store(0xffff_ffff_ffff_fffc, 8, !old).expect("it wraps");
    assert!(a.first_difference(&b).is_some_and(|d| d.starts_with("byte at 0x")));
    assert_ne!(a, ModelMachine::boundless(8));
}
