//! The verifier on versions that the text form cannot express, built by hand, and on every effect
//! of natives. `tests/verify/*.ir` (`verify_files.rs`) has everything else.

use dynasour_ir::eval::check::{Limits, check};
use dynasour_ir::eval::{ModelMachine, State};
use dynasour_ir::text::version;
use dynasour_ir::verify::verify;
use dynasour_ir::{BlockId, Effects, Gpr, Inst, Loc, Op, Operand, Ty, Value, Version};

fn errors(v: &Version) -> Vec<String> {
    verify(v).err().unwrap_or_default().iter().map(|e| e.to_string()).collect()
}

fn parse(body: &str) -> Version {
    let text = format!("region 0x10 {{ version {body} }}");
    version(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// The version has exactly these errors (each string is the start of an error's text).
#[track_caller]
fn breaks_version(v: &Version, expected: &[&str]) {
    let found = errors(v);
    let matching =
        found.len() == expected.len() && found.iter().zip(expected).all(|(f, e)| f.starts_with(e));
    assert!(matching, "expected {expected:#?}, found {found:#?} in\n{v}");
}

#[track_caller]
fn breaks(body: &str, expected: &str) {
    breaks_version(&parse(body), &[expected]);
}

#[track_caller]
fn accepts(body: &str) {
    breaks_version(&parse(body), &[]);
}

/// A trace with rax, rcx, rsp and flags as v0, v1, v2, v3, an anchor over them, and this body.
fn trace(body: &str) -> String {
    format!(
        "t1 {{ anchor a0 = base.0x10 [rax = v0, rcx = v1, rsp = v2, rflags = v3]
        b0(v0: i64 = rax, v1: i64 = rcx, v2: i64 = rsp, v3: flags = rflags):\n{body}\n exit a0\n }}"
    )
}

fn base(body: &str) -> String {
    format!("base {{ b0:\n at 0x10\n v0 = get.i64 rax\n{body}\n goto 0x20\n }}")
}

/// Values that the text form cannot express, built by hand.
fn with_inst(inst: Inst) -> Version {
    let mut v = parse(&base(""));
    while v.types.len() < 4 {
        v.value(Ty::I64);
    }
    v.blocks[0].insts.push(inst);
    v
}

#[test]
fn by_hand() {
    let mut v = parse(&base(""));
    v.name = "t 1".to_string();
    breaks_version(&v, &["version: the name \"t 1\" is not an identifier [shape]"]);
    let mut inst =
        Inst::new(Op::Add, Ty::I64, Some(Value(1)), &[Operand::Const(1), Operand::Const(2)]);
    inst.native = Some(dynasour_ir::NativeId(0));
    breaks_version(
        &with_inst(inst),
        &["b0[2]: a native, and nothing else, names an original instruction [op]"],
    );
    let inst =
        Inst::new(Op::Cond(dynasour_ir::Cond::L), Ty::I8, Some(Value(1)), &[Operand::Const(0)]);
    breaks_version(&with_inst(inst), &["b0[2]: cond.l cannot have type i8 [op]"]);
    let mut v = parse(&base("v1 = add.i64 v0, 1"));
    v.types[1] = Ty::I32;
    breaks_version(&v, &["b0[2]: v1 is i32, the result is i64 [type]"]);
    let mut v = parse(&base(""));
    v.blocks[0].insts.push(Inst::new(Op::Not, Ty::I64, Some(Value(7)), &[Operand::Const(1)]));
    breaks_version(&v, &["b0[2]: v7 does not exist [ssa]"]);
    // Found by the fuzz target `verify`: an unused anchor named a value past the end of the table.
    let mut v = parse(&trace("").replace("b0(", "anchor a1 = base.0x20 [rbp = 1]\n b0("));
    v.anchors[1].varmap[0].1 = Operand::Value(Value(45));
    breaks_version(&v, &["a1: v45 does not exist [varmap]"]);
}

#[test]
fn reach_in_a_line() {
    accepts(&trace("poll else a0\n assume 1 else a0\n v4 = load.i64 [v0] !a0"));
    breaks(
        &trace("store.i64 [v0], 1 !a0"),
        "b0[1]: a0 is out of reach: an effect lies since b0[0] [reach]",
    );
    for (effect, ends) in Effects::all().iter_names().map(|(name, _)| {
        let ends = ["WRITE", "FENCE", "LOCKED", "NO_REPEAT", "STATE"].contains(&name);
        (name.to_ascii_lowercase(), ends)
    }) {
        let body = trace("poll else a0\n native n0 !a0")
            .replace("t1 {", &format!("t1 {{ native n0 = 1 \"90\" effects [{effect}]\n"));
        let faults = ["read", "write", "unknown_extent", "may_trap"].contains(&effect.as_str());
        let body = if faults { body } else { body.replace(" !a0", "") };
        if ends {
            breaks(&body, "b0[2]: a0 is out of reach: an effect lies since b0[0] [reach]");
        } else {
            accepts(&body);
        }
    }
}

#[test]
fn errors_show_the_line() {
    let found = errors(&parse(&base("v1 = add.i32 v0, 1")));
    assert_eq!(
        found,
        ["b0[2]: operand 1: v0 is i64, i32 is expected [type]\n    v1 = add.i32 v0, 1"]
    );
}

#[test]
fn verify_answers_for_numbers_out_of_range() {
    let mut v = parse(&trace("poll else a0"));
    v.blocks[0].term = dynasour_ir::Term::Jump {
        to: BlockId(u32::MAX),
        args: vec![Operand::Value(Value(u32::MAX))],
    };
    breaks_version(&v, &["b0[1]: b4294967295 does not exist [jump]"]);
    let mut v = parse(&trace("poll else a0"));
    v.anchors[0].varmap[0] = (Loc::Gpr(Gpr::RAX), Operand::Value(Value(u32::MAX)));
    breaks_version(&v, &["a0: rax: v4294967295 does not exist [varmap]"]);
}

/// The verifier of single versions cannot know *when* a deferred store was due (see the header of
/// `verify`). The same text is right for a program that loads first and then stores, and wrong for
/// one that stores first: there an anchor defers a store that its pass has moved past an access
/// *before* the anchor's position. The checker, which has the program, tells the two apart.
#[test]
fn when_a_deferred_store_was_due_is_not_in_the_text() {
    let trace = version(
        "region 0x10 { version t1 context private_memory {
            anchor a0 = base.0x10 [rax = v0]
            anchor a1 = base.0x18 [rax = v2] stores [store.i64 [v1 - 8], 7]
            b0(v0: i64 = rax, v1: i64 = rsp):
              v2 = load.i64 [v1 - 8] !a0
              exit a1
        } }",
    )
    .unwrap();
    assert_eq!(errors(&trace), [""; 0]);
    let load = "v0 = get.i64 rsp\n v1 = load.i64 [v0 - 8]\n put.i64 rax, v1";
    let store = "v2 = get.i64 rsp\n store.i64 [v2 - 8], 7";
    let agrees = |first: &str, second: &str| {
        let base =
            parse(&format!("base {{ b0:\n at 0x10\n {first}\n at 0x14\n {second}\n goto 0x18 }}"));
        let mut guest = std::collections::BTreeMap::from([(0x10, base)]);
        let mut machine = ModelMachine::new();
        machine.map(0x1000, 4096);
        let mut state = State::default();
        state.gpr[Gpr::RSP.number()] = 0x1100;
        check(&mut guest, &trace, &state, &machine, Limits::default()).is_ok()
    };
    assert!(agrees(load, store), "the load comes first");
    assert!(!agrees(store, load), "the store comes first");
}
