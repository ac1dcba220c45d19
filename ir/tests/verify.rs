//! One program per rule that breaks it, and the programs beside the edge that do not.

use dynasour_ir::text::version;
use dynasour_ir::verify::verify;
use dynasour_ir::{BlockId, Effects, Fact, Gpr, Inst, Loc, Op, Operand, Ty, Value, Version};

fn errors(v: &Version) -> Vec<String> {
    verify(v).err().unwrap_or_default().iter().map(|e| e.to_string()).collect()
}

fn parse(body: &str) -> Version {
    let text = format!("region 0x10 {{ version {body} }}");
    version(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// The only errors of this version are these (each is matched as the start of an error's text).
#[track_caller]
fn breaks_version(v: &Version, expected: &[&str]) {
    let found = errors(v);
    let matching = found.len() == expected.len() && found.iter().zip(expected).all(|(f, e)| f.starts_with(e));
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

/// Values that are not values of the text form: built by hand.
fn with_inst(inst: Inst) -> Version {
    let mut v = parse(&base(""));
    while v.types.len() < 4 {
        v.value(Ty::I64);
    }
    v.blocks[0].insts.push(inst);
    v
}

#[test]
fn well_formed_programs_pass() {
    accepts(
        &trace("v4 = add.i64 v0, v1\n store.i64 [v4], v1 !a0")
            .replace("exit a0", "exit a1")
            .replace("b0(", "anchor a1 = base.0x18 [rax = v4, rcx = v1, rsp = v2, rflags = v3]\n b0("),
    );
    accepts(&base("put.i64 rcx, v0"));
}

#[test]
fn shape() {
    breaks("t1 { }", "version: there is no entry block [shape]");
    let mut v = parse(&base(""));
    v.name = "t 1".to_string();
    breaks_version(&v, &["version: the name \"t 1\" is not an identifier [shape]"]);
    let mut v = parse(&base(""));
    v.context.facts = vec![Fact::PrivateMemory, Fact::RegEquals(Gpr::RAX, 1)];
    breaks_version(&v, &["version: the context is not sorted"]);
    breaks("t1 { anchor a0 = base.1 [] b0(v0: i64):\n exit a0 }", "b0: 1 entry parameters but 0 entry locations");
    breaks("t1 { anchor a0 = base.1 [] b0(v0: i64 = fsbase):\n exit a0 }", "b0: entry location fsbase is not an SSA");
    breaks(
        "t1 { anchor a0 = base.1 [] b0(v0: i64 = rax, v1: i64 = rax):\n exit a0 }",
        "b0: entry location rax appears twice [shape]",
    );
    breaks(
        "t1 { anchor a0 = base.1 [] b0(v0: i32 = rax):\n exit a0 }",
        "b0: entry parameter: v0 is i32, i64 is expected [type]",
    );
    breaks("t1 { b0:\n jump b1()\n b1:\n jump b0() }", "b1[0]: a jump to the entry block [shape]");
    breaks("base { b0:\n at 1\n goto 2\n b1:\n at 2\n goto 3 }", "version: a base version is one block");
    breaks("base { anchor a0 = base.1 [] b0:\n at 1\n goto 2 }", "version: a base version has neither");
    breaks("base { b0:\n v0 = get.i64 rax\n goto 2 }", "b0[0]: an instruction of base belongs to an `at` [shape]");
    breaks(&trace("v4 = get.i64 rax"), "b0[0]: get in a trace [shape]");
    breaks(&trace("put.i64 rax, v0"), "b0[0]: put in a trace [shape]");
    breaks(&trace("at 0x10"), "b0[0]: at in a trace [shape]");
    breaks_version(
        &parse(&base("assume 1")),
        &["b0[2]: assume in base [shape]", "b0[2]: an anchor to fall back to is missing [anchor]"],
    );
}

#[test]
fn op() {
    breaks(&base("v1 = add.i1 1, 1"), "b0[2]: add cannot have type i1 [op]");
    breaks(&base("v1 = load.v128 [v0]"), "b0[2]: load cannot have type v128 [op]");
    breaks(&base("v1 = zext32.i16 v0"), "b0[2]: zext32 cannot have type i16 [op]");
    breaks(&base("v1 = bswap.i16 1"), "b0[2]: bswap cannot have type i16 [op]");
    breaks(&base("v1 = get.i32 rax"), "b0[2]: get cannot have type i32 [op]");
    breaks(&base("v1 = get.v512 zmm1"), "b0[2]: get cannot have type v512 [op]");
    breaks(&base("v1 = add.i64 v0"), "b0[2]: 1 operands, 2 are expected [op]");
    breaks(&base("v1 = add.i64 [v0], 1"), "b0[2]: a load or store, and nothing else, has an address [op]");
    breaks(&base("v1 = load.i64 v0, 0"), "b0[2]: a load or store, and nothing else, has an address [op]");
    breaks(&base("v1 = load.i64 [v0*3]"), "b0[2]: the scale of an address is 1, 2, 4 or 8 [op]");
    breaks(&base("add.i64 v0, 1"), "b0[2]: 0 results, 1 expected [op]");
    breaks(&base("v1 = put.i64 rax, v0"), "b0[2]: 1 results, 0 expected [op]");
    breaks(&base("at v0"), "b0[2]: the pc of `at` is a constant [op]");
    let mut inst = Inst::new(Op::Add, Ty::I64, Some(Value(1)), &[Operand::Const(1), Operand::Const(2)]);
    inst.native = Some(dynasour_ir::NativeId(0));
    breaks_version(&with_inst(inst), &["b0[2]: a native, and nothing else, names an original instruction [op]"]);
    let inst = Inst::new(Op::Cond(dynasour_ir::Cond::L), Ty::I8, Some(Value(1)), &[Operand::Const(0)]);
    breaks_version(&with_inst(inst), &["b0[2]: cond.l cannot have type i8 [op]"]);
}

#[test]
fn types() {
    breaks(&base("v1 = add.i32 v0, 1"), "b0[2]: operand 1: v0 is i64, i32 is expected [type]");
    breaks(&base("v1 = shl.i64 v0, v0"), "b0[2]: operand 2: v0 is i64, i8 is expected [type]");
    breaks(&base("v1 = add.i8 256, 1"), "b0[2]: operand 1: constant 256 does not fit i8 [type]");
    breaks(&base("v1 = select.i64 2, 0, 1"), "b0[2]: operand 1: constant 2 does not fit i1 [type]");
    breaks(&base("v1 = cond.l 2"), "b0[2]: operand 1: constant 2 does not fit flags [type]");
    breaks(&base("v1 = trunc.i8 v0\n v2 = trunc.i32 v1"), "b0[3]: v1 is i8, which cannot be truncated to i32 [type]");
    breaks("base { b0:\n at 1\n v0 = get.i64 rax\n branch v0 then 1 else 2 }", "b0[2]: condition: v0 is i64");
    breaks("base { b0:\n at 1\n v0 = get.flags rflags\n goto v0 }", "b0[2]: target: v0 is flags");
    breaks(
        "t1 { anchor a0 = base.1 [] b0:\n jump b1(1)\n b1(v0: v128):\n exit a0 }",
        "b1: v0: vectors are not values [type]",
    );
    let mut v = parse(&base("v1 = add.i64 v0, 1"));
    v.types[1] = Ty::I32;
    breaks_version(&v, &["b0[2]: v1 is i32, the result is i64 [type]"]);
}

#[test]
fn ssa() {
    breaks(&base("v0 = add.i64 1, 1"), "b0[2]: v0 is defined twice [ssa]");
    breaks(&base("v1 = add.i64 v9, 1"), "b0[2]: v9 is not defined [ssa]");
    breaks(&base("v1 = add.i64 v2, 1\n v2 = add.i64 1, 1"), "b0[2]: v2 is used where its definition does not reach");
    breaks(&base("v1 = add.i64 v1, 1"), "b0[2]: v1 is used where its definition does not reach [ssa]");
    breaks(
        "t1 { anchor a0 = base.1 [] b0:\n jump b1(v1)\n b1(v0: i64):\n v1 = add.i64 v0, 1\n jump b1(v1) }",
        "b0[0]: v1 is used where its definition does not reach [ssa]",
    );
    let mut v = parse(&base(""));
    v.blocks[0].insts.push(Inst::new(Op::Not, Ty::I64, Some(Value(7)), &[Operand::Const(1)]));
    breaks_version(&v, &["b0[2]: v7 does not exist [ssa]"]);
    let mut v = parse(&trace(""));
    v.blocks[0].params[1] = v.blocks[0].params[0];
    breaks_version(&v, &["b0: v0 is defined twice [ssa]", "a0: v1 is not defined [position]"]);
}

#[test]
fn jumps() {
    breaks("t1 { b0:\n jump b7() }", "b0[0]: b7 does not exist [jump]");
    breaks("t1 { b0:\n jump b1()\n b1(v0: i64):\n jump b1(v0) }", "b0[0]: 0 operands, b1 has 1 parameters [jump]");
    breaks(
        "t1 { b0(v1: i64 = rax):\n jump b1(v1)\n b1(v0: i32):\n jump b1(v0) }",
        "b0[0]: operand 1: v1 is i64, i32 is expected [jump]",
    );
}

#[test]
fn natives() {
    let with = |table: &str, inst: &str| {
        format!("base {{ native n0 = 0x10 {table}\n b0:\n at 0x10\n v0 = get.i64 rax\n {inst}\n goto 0x20 }}")
    };
    accepts(&with("\"d1 d0\" in [rax] out [rax, rflags]", "v1, v2 = native n0 v0"));
    breaks(&with("\"90\"", "native n1"), "b0[2]: this native does not exist [native]");
    breaks(&with("\"90\" mem 8", "native n0"), "b0[2]: an address is there if and only if");
    breaks(&with("\"90\"", "native n0 [v0]"), "b0[2]: an address is there if and only if");
    breaks(&with("\"90\" in [rax, rcx]", "native n0 v0"), "b0[2]: 1 operands, 2 expected [native]");
    breaks(&with("\"90\" in [rax, rflags]", "native n0 v0, v0"), "b0[2]: operand 2: v0 is i64, flags is expected");
    breaks(&with("\"90\" out [rax]", "native n0"), "b0[2]: 0 results, 1 expected [native]");
    breaks(&with("\"90\" writes [zmm0]", "native n0"), "n0: it writes in-place state without the effect `state`");
    breaks(&with("\"90\" vec_write 1", "native n0"), "n0: it writes in-place state without the effect `state`");
    breaks(&with("\"90\" vec_read 1", "native n0"), "n0: it reads vector registers without");
    breaks(&with("\"90\" writes [rax] effects [state]", "native n0"), "n0: an SSA location is among");
    breaks(&with("\"90\" in [rax, rax]", "native n0 v0, v0"), "n0: a register is declared twice [native]");
}

#[test]
fn anchor_presence() {
    breaks(&trace("assume 1"), "b0[0]: an anchor to fall back to is missing [anchor]");
    breaks(&trace("poll"), "b0[0]: an anchor to fall back to is missing [anchor]");
    breaks(&trace("v4 = load.i64 [v0]"), "b0[0]: an anchor to fall back to is missing [anchor]");
    breaks(&trace("store.i64 [v0], 1").replace("exit a0", "jump b1()\n b1:\n jump b1()"), "b0[0]: an anchor");
    breaks(&trace("v4 = add.i64 v0, 1 !a0"), "b0[0]: this never falls back to an anchor [anchor]");
    breaks(&trace("poll else a9"), "b0[0]: a9 does not exist [anchor]");
    breaks(&trace("").replace("exit a0", "exit a9"), "b0[0]: a9 does not exist [anchor]");
    breaks(
        "t1 { native n0 = 1 \"f7 f1\" effects [may_trap]\n anchor a0 = base.1 [] b0:\n native n0\n exit a0 }",
        "b0[0]: an anchor to",
    );
    let mut v = parse(&base("v1 = load.i64 [v0]"));
    v.blocks[0].insts[2].anchor = Some(dynasour_ir::AnchorId(0));
    breaks_version(&v, &["b0[2]: a0 does not exist [anchor]"]);
}

#[test]
fn varmap() {
    let with = |varmap: &str| {
        format!("t1 {{ anchor a0 = base.1 [{varmap}] b0(v0: i64 = rax, v1: flags = rflags):\n exit a0 }}")
    };
    accepts(&with("rax = 1, rcx = v0, rflags = v1"));
    breaks(&with("rcx = v0, rax = v0"), "a0: rcx before rax: not sorted or repeated [varmap]");
    breaks(&with("rax = v0, rax = v0"), "a0: rax before rax: not sorted or repeated [varmap]");
    breaks(&with("rax = v1"), "a0: rax: v1 is flags, i64 is expected [varmap]");
    breaks(&with("rflags = 2"), "a0: rflags: constant 2 does not fit flags [varmap]");
    breaks(&with("zmm0 = v0"), "a0: zmm0 is not an SSA location [varmap]");
    breaks(&with("").replace("base.1", "base.v1"), "a0: target: v1 is flags, i64 is expected [varmap]");
}

#[test]
fn totality() {
    breaks(
        "t1 { anchor a0 = base.1 [rax = v0] anchor a1 = base.2 [rax = v1, rcx = v1] b0(v0: i64 = rax):
         poll else a0\n v1 = add.i64 v0, 1\n exit a1 }",
        "a0: rcx is missing, which a1 names [total]",
    );
    // An anchor that nothing uses does not count, and its operands mean nothing.
    accepts(
        "t1 { anchor a0 = base.1 [rax = v7, rcx = v9, rdx = 0] anchor a1 = base.2 [rax = v1] b0(v0: i64 = rax):
         v1 = add.i64 v0, 1\n exit a1 }",
    );
}

#[test]
fn position() {
    // Both uses are dominated by v1's definition except the first.
    breaks(
        "t1 { anchor a0 = base.1 [rax = v1] b0(v0: i64 = rax):\n poll else a0\n v1 = add.i64 v0, 1\n exit a0 }",
        "a0: v1 is not available at b0[0], where the anchor's uses begin [position]",
    );
    breaks("t1 { anchor a0 = base.1 [rax = v1] b0(v0: i64 = rax):\n exit a0 }", "a0: v1 is not defined [position]");
    breaks("t1 { anchor a0 = base.v1 [] b0(v0: i64 = rax):\n exit a0 }", "a0: v1 is not defined [position]");
}

#[test]
fn reach_in_a_line() {
    accepts(&trace("poll else a0\n assume 1 else a0\n v4 = load.i64 [v0] !a0"));
    breaks(&trace("store.i64 [v0], 1 !a0"), "b0[1]: a0 is out of reach: an effect lies since b0[0] [reach]");
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
fn reach_over_the_back_edge() {
    let looping = |head: &str, body: &str| {
        format!(
            "t1 {{ anchor a0 = base.1 [rax = v0] anchor a1 = base.1 [rax = v1]
            b0(v0: i64 = rax):\n {head}\n jump b1(v0)\n b1(v1: i64):\n {body}\n jump b1(v1) }}"
        )
    };
    // The position in the loop is passed again in every iteration.
    accepts(&looping("", "poll else a1\n store.i64 [v1], 1 !a1"));
    // The position is outside: without an effect in the loop it stays in reach.
    accepts(&looping("poll else a0", "poll else a0"));
    // With one it does not, though the store comes after the use.
    breaks(
        &looping("poll else a0", "poll else a0\n store.i64 [v1], 1 !a1"),
        "b1[0]: a0 is out of reach: an effect lies since b0[0] [reach]",
    );
    // An entry anchor used in the loop only: its position is in the loop.
    accepts(&looping("", "poll else a0\n v2 = load.i64 [v1] !a0"));
}

const PUSHED: &str = "t1 CONTEXT {
    anchor a0 = base.1 [rax = v0, rsp = v2] stores [store.i64 [v2], 0x1234]
    anchor a1 = base.2 [rax = v0, rsp = v1]
    b0(v0: i64 = rax, v1: i64 = rsp):
    v2 = sub.i64 v1, 8
    poll else a0
    BODY
    exit a1 }";

#[test]
fn deferred_rule_a() {
    let of = |store: &str, context: &str| {
        PUSHED.replace("store.i64 [v2], 0x1234", store).replace("BODY", "").replace("CONTEXT", context)
    };
    accepts(&of("store.i64 [v2], 0x1234", ""));
    accepts(&of("store.i64 [v1 - 16], 0x1234", ""));
    let complaint = "a0: deferred store 1 is not a pushed return address, and private_memory is not assumed [deferred]";
    for other in ["store.i64 [v0], 0x1234", "store.i64 [v2], v0", "store.i32 [v2], 0x1234", "store.i64 [v2 + v0*8], 1"]
    {
        breaks(&of(other, ""), complaint);
        accepts(&of(other, "context private_memory"));
    }
    breaks(&of("store.i1 [v2], 1", "context private_memory"), "a0: deferred store 1, not a store [deferred]");
    breaks(&of("store.i32 [v2], v0", "context private_memory"), "a0: deferred store 1, value: v0 is i64");
}

#[test]
fn deferred_rule_a_through_a_loop() {
    let text = |next: &str| {
        format!(
            "t1 {{ anchor a0 = base.1 [rax = v1, rsp = v3] stores [store.i64 [v3 - 8], 0x1234]
            b0(v0: i64 = rsp, v1: i64 = rax):\n v2 = sub.i64 v0, 8\n jump b1(v2)
            b1(v3: i64):\n poll else a0\n v4 = add.i64 v3, 16\n jump b1({next}) }}"
        )
    };
    accepts(&text("v4"));
    accepts(&text("v3"));
    breaks(&text("v1"), "a0: deferred store 1 is not a pushed return address");
}

#[test]
fn deferred_rule_b() {
    let of = |body: &str| PUSHED.replace("BODY", &format!("{body}\n poll else a0")).replace("CONTEXT", "");
    let last = |body: &str| PUSHED.replace("BODY", body).replace("CONTEXT", "");
    accepts(&of("v3 = load.i64 [v1] !a0"));
    accepts(&of("v3 = load.i64 [v2 - 8] !a0"));
    breaks(&of("v3 = load.i64 [v2] !a0"), "b0[2]: this touches a store, which a0 defers [deferred]");
    breaks(&of("v3 = load.i8 [v1 - 1] !a0"), "b0[2]: this touches a store, which a0 defers [deferred]");
    breaks(&of("v3 = load.i64 [v0] !a0"), "b0[2]: this may touch a store, which a0 defers [deferred]");
    // Unless a guard says that the two are apart: v0 - v2 is not in [-7, 8).
    let guarded = |n: u64, size: u64| {
        format!(
            "v4 = sub.i64 v0, v2\n v5 = add.i64 v4, 7\n v6 = le.u.i64 {n}, v5\n assume v6 else a0\n \
             v3 = load.i{} [v0] !a0",
            8 * size
        )
    };
    accepts(&of(&guarded(15, 8)));
    accepts(&of(&guarded(15, 4)));
    breaks(&of(&guarded(14, 8)), "b0[6]: this may touch a store, which a0 defers [deferred]");
    breaks(&of(&guarded(15, 8).replace("[v0]", "[v0 - 1]")), "b0[6]: this may touch a store");
    // Performed: the store itself, or one that covers it. Anything else must not touch it.
    accepts(&last("store.i64 [v2], 0x1234 !a0"));
    accepts(&last("store.i64 [v1 - 8], v0 !a0"));
    breaks(&last("store.i8 [v2], 1 !a0"), "b0[2]: this touches a store, which a0 defers [deferred]");
    breaks(&last("store.i64 [v0], 1 !a0"), "b0[2]: this may touch a store, which a0 defers [deferred]");
    for (effects, complaint) in [
        ("fence", Some("a fence or locked operation passes a store")),
        ("locked", Some("a fence or locked operation passes a store")),
        ("read, unknown_extent", Some("an access of unknown extent may touch a store")),
        ("read", Some("an access of unknown extent may touch a store")),
        ("may_trap", None),
    ] {
        let faults = !matches!(effects, "fence" | "locked");
        let anchor = if faults { " !a0" } else { "" };
        let body = last(&format!("native n0{anchor}"))
            .replace("anchor a0", &format!("native n0 = 1 \"90\" effects [{effects}]\n anchor a0"));
        match complaint {
            // A fence that no anchor of the pending store follows lets it pass only if it was performed before.
            Some(_) if !faults => breaks(&body.replace("exit a1", "exit a0"), "b0[3]: a0 is out of reach"),
            Some(c) => breaks(&body, &format!("b0[2]: {c}, which a0 defers [deferred]")),
            None => accepts(&body),
        }
    }
    let explicit = |address: &str| {
        last(&format!("native n0 {address} !a0"))
            .replace("anchor a0", "native n0 = 1 \"90\" mem 16 effects [read]\n anchor a0")
    };
    accepts(&explicit("[v1]"));
    breaks(&explicit("[v2 - 15]"), "b0[2]: this touches a store, which a0 defers [deferred]");
}

#[test]
fn unreachable_blocks_are_checked_for_types_only() {
    accepts("t1 { anchor a0 = base.1 [] b0:\n exit a0\n b1:\n v0 = add.i64 v1, 1\n jump b1() }");
    breaks("t1 { anchor a0 = base.1 [] b0:\n exit a0\n b1:\n v0 = add.i64 v1\n jump b1() }", "b1[0]: 1 operands");
}

#[test]
fn errors_show_the_line() {
    let found = errors(&parse(&base("v1 = add.i32 v0, 1")));
    assert_eq!(found, ["b0[2]: operand 1: v0 is i64, i32 is expected [type]\n    v1 = add.i32 v0, 1"]);
}

#[test]
fn verify_answers_for_numbers_out_of_range() {
    let mut v = parse(&trace("poll else a0"));
    v.blocks[0].term = dynasour_ir::Term::Jump { to: BlockId(u32::MAX), args: vec![Operand::Value(Value(u32::MAX))] };
    breaks_version(&v, &["b0[1]: b4294967295 does not exist [jump]"]);
    let mut v = parse(&trace("poll else a0"));
    v.anchors[0].varmap[0] = (Loc::Gpr(Gpr::RAX), Operand::Value(Value(u32::MAX)));
    breaks_version(&v, &["a0: rax: v4294967295 does not exist [varmap]"]);
}
