//! Proofs of right passes succeed; of what the checker shows to be wrong there is none.

use super::facts::Facts;
use super::term::{Node, Symbol, Term, Terms};
use super::*;
use crate::builder::Builder;
use crate::op::{ArgTy, Cond, FlagOp, Op};
use crate::opt::{OptOptions, optimise_with, pass};
use crate::random::cases::{Case, agrees, case, passes};
use crate::random::program::Program;
use crate::random::{Rng, generate};
use crate::semantics::{self, ARITH_FLAGS};
use crate::side_conditions::SideCondition;
use crate::side_conditions::tests::without;
use crate::types::{Gpr, Loc, Operand, Ty};
use crate::verify::verify;
use crate::version::{Anchor, Block, Inst, Mem, Term as End, Version};

/// Operations with their types, conditions and flags among them.
fn operations() -> Vec<(Op, Ty)> {
    let ints = [Ty::I8, Ty::I16, Ty::I32, Ty::I64];
    let mut all = Vec::new();
    for ty in ints {
        let plain = Op::PLAIN.iter().filter(|op| op.is_pure() && !matches!(op, Op::Zext(_)));
        for op in plain {
            let fits = match op {
                Op::Bswap => ty == Ty::I32 || ty == Ty::I64,
                Op::Trunc => ty != Ty::I64,
                Op::Insert8Low | Op::Insert8High | Op::Insert16 | Op::FlagBits => ty == Ty::I64,
                _ => true,
            };
            if fits {
                all.push((*op, ty));
            }
        }
        for from in [Ty::I1, Ty::I8, Ty::I16, Ty::I32] {
            if from.bits() < ty.bits() {
                all.push((Op::Zext(from), ty));
                all.push((Op::Sext(from), ty));
            }
        }
        all.extend(FlagOp::TABLE.iter().map(|(flag_op, ..)| (Op::Flags(*flag_op), ty)));
    }
    all.extend(Cond::ALL.map(|cond| (Op::Cond(cond), Ty::I64)));
    all.extend([Op::And, Op::Or, Op::Xor, Op::Not, Op::Select].map(|op| (op, Ty::I1)));
    all
}

/// The types of an operation's operands.
fn operands(op: Op, ty: Ty) -> Vec<Ty> {
    let (types, _) = op.signature();
    let of = |arg: &ArgTy| match arg {
        ArgTy::Same => ty,
        ArgTy::Is(ty) => *ty,
    };
    types.iter().map(of).collect()
}

/// A term of a type: a constant, a symbol, or one made before.
fn term(terms: &mut Terms, rng: &mut Rng, pool: &[(Term, Ty)], ty: Ty) -> Term {
    let made: Vec<Term> = pool.iter().filter(|(_, t)| *t == ty).map(|(term, _)| *term).collect();
    match rng.below(6) {
        0 | 1 if ty != Ty::Flags => terms.number(rng.interesting(), ty.bits()),
        0..4 if !made.is_empty() => rng.pick(&made),
        _ if ty == Ty::Flags => terms.symbol(Symbol::Entry(Loc::Flags), 64),
        n => {
            let loc = Loc::from_ssa_index(n);
            let whole = terms.symbol(Symbol::Entry(loc), 64);
            terms.slice(whole, 0, ty.bits())
        }
    }
}

#[test]
fn normal_forms_keep_the_value() {
    let operations = operations();
    for seed in 0..400 {
        let (mut terms, mut rng) = (Terms::default(), Rng::new(seed));
        let mut pool = Vec::new();
        for _ in 0..200 {
            let (op, ty) = rng.pick(&operations);
            let args: Vec<Term> = operands(op, ty)
                .into_iter()
                .map(|ty| term(&mut terms, &mut rng, &pool, ty))
                .collect();
            let values: Vec<u64> = args.iter().map(|a| terms.first_sample(*a)).collect();
            let made = terms.pure(op, ty, &args);
            let expected = semantics::eval(op, ty, &values);
            assert_eq!(
                terms.first_sample(made),
                expected,
                "{op}.{ty} of {:?} is {}",
                args.iter().map(|a| terms.words(*a, 5)).collect::<Vec<_>>(),
                terms.words(made, 5)
            );
            let result = match op.signature().1 {
                crate::op::ResultTy::Is(ty) => ty,
                _ => ty,
            };
            pool.push((made, result));
            // Parts, and parts put together.
            if let (Some(low), true) = (Some(8 * rng.below(8) as u32), result == Ty::I64) {
                let part = terms.slice(made, low, 8);
                assert_eq!(terms.first_sample(part), expected >> low & 0xff);
                let parts: Vec<Term> = (0..8).map(|i| terms.slice(made, 8 * i, 8)).collect();
                let whole = terms.bytes(&parts);
                assert_eq!(terms.first_sample(whole), expected, "{}", terms.words(whole, 5));
            }
        }
    }
}

/// A subject: the case's trace after passes.
fn attempt(program: &mut Program, version: &Version, solver: &mut dyn Solver) -> Outcome {
    let limits = Limits { time: std::time::Duration::from_secs(20) };
    prove(Claim { right: Right::Program(program), version, constants: &[] }, solver, limits)
}

/// The cases of a program. A proof says nothing about other threads, so that there is no peer.
fn each(seed: u64, mut f: impl FnMut(&mut Program, &Case, u64)) {
    let mut program = generate::program(&mut Rng::new(seed));
    for head in generate::heads(&program) {
        if let Some(case) = case(&mut program, head, seed)
            && !case.states[0].1.has_peer()
        {
            f(&mut program, &case, head);
        }
    }
}

fn made(case: &Case, names: &[&str]) -> Version {
    let mut version = case.trace.clone();
    optimise_with(&mut version, names, &OptOptions::default());
    version
}

/// What is proven is right: whatever side condition a pass lacks, the checker finds nothing against a
/// version of which there is a proof. Returns how many versions there were, how many of them the checker
/// found to be wrong, and how many were proven and refuted.
fn never_proven(solver: &mut dyn Solver, seeds: std::ops::Range<u64>) -> [u64; 4] {
    let mut counts = [0; 4];
    for seed in seeds {
        each(seed, |program, case, head| {
            let names = passes(&mut Rng::new(!seed ^ head));
            for condition in SideCondition::ALL {
                let mut version = case.trace.clone();
                let ((), hits) = without(*condition, || {
                    for pass in names.iter().filter_map(|name| pass(name)) {
                        pass.run(&mut version, &OptOptions::default());
                    }
                });
                if hits == 0 || verify(&version).is_err() {
                    continue;
                }
                counts[0] += 1;
                let wrong = agrees(program, case, &version);
                let outcome = attempt(program, &version, solver);
                let right = Right::Trace(&case.trace);
                let claim = Claim { right, version: &version, constants: &[] };
                let beside = prove(claim, solver, Limits::default());
                let verdicts = [&outcome.verdict, &beside.verdict];
                let proven = verdicts.contains(&&Verdict::Proven);
                counts[1] += u64::from(wrong.is_err());
                counts[2] += u64::from(proven);
                counts[3] += u64::from(matches!(outcome.verdict, Verdict::Refuted { .. }));
                if let (true, Err(wrong)) = (proven, wrong) {
                    panic!("seed {seed}, {condition:?}, {names:?} is proven: {wrong}\n{version}");
                }
            }
        });
    }
    counts
}

#[test]
fn what_is_wrong_is_not_proven_by_terms_alone() {
    let [all, wrong, proven, refuted] = never_proven(&mut Nobody, 0..400);
    println!("{all} versions, {wrong} wrong, {proven} proven");
    assert_eq!(refuted, 0);
    assert!(wrong > 50 && 5 * proven > all, "{all} versions, {wrong} wrong, {proven} proven");
}

#[test]
fn right_passes_are_mostly_proven_by_terms_alone() {
    let (mut traces, mut proven, mut beside) = (0, 0, 0);
    for seed in 0..200 {
        each(seed, |program, case, head| {
            let names = passes(&mut Rng::new(!seed ^ head));
            let version = made(case, &names);
            let outcome = attempt(program, &version, &mut Nobody);
            traces += 1;
            proven += u64::from(outcome.verdict == Verdict::Proven);
            let claim =
                Claim { right: Right::Trace(&case.trace), version: &version, constants: &[] };
            let outcome = prove(claim, &mut Nobody, Limits::default());
            beside += u64::from(outcome.verdict == Verdict::Proven);
        });
    }
    println!("{proven} of {traces}, {beside} beside the trace before the passes");
    assert!(
        traces > 200 && 2 * proven > traces && 2 * beside > traces,
        "{proven}, {beside}, {traces}"
    );
}

/// A term as a solver knows it: nothing is folded, because what it is made of are symbols.
#[cfg(feature = "prove")]
#[test]
fn the_solver_computes_what_the_processor_does() {
    let mut z3 = Z3 { work: 50_000_000 };
    let mut rng = Rng::new(7);
    let mut decided = 0;
    for (op, ty) in operations() {
        let types = operands(op, ty);
        for round in 0..12 {
            let mut terms = Terms::default();
            let (mut args, mut values, mut hold) = (Vec::new(), Vec::new(), Vec::new());
            for (i, arg) in types.iter().enumerate() {
                // Counts are constants in half of the rounds, as in most code.
                let constant = i == 1 && round % 2 == 0 && *arg == Ty::I8;
                let value = match arg {
                    Ty::Flags => rng.bits() & semantics::ARITH_FLAGS,
                    ty if round < 6 => rng.interesting() & ty.mask(),
                    ty => rng.bits() & ty.mask(),
                };
                let symbol = match arg {
                    Ty::Flags => terms.symbol(Symbol::Entry(Loc::Flags), 64),
                    ty => {
                        let whole = terms.symbol(Symbol::Entry(Loc::from_ssa_index(i)), 64);
                        terms.slice(whole, 0, ty.bits())
                    }
                };
                let number = terms.number(value, arg.bits());
                values.push(value);
                if constant {
                    args.push(number);
                    continue;
                }
                args.push(symbol);
                hold.push(match arg {
                    Ty::Flags => terms.equal_flags(symbol, number),
                    _ => terms.equal(symbol, number),
                });
            }
            let expected = semantics::eval(op, ty, &values);
            let made = terms.pure(op, ty, &args);
            let bits = Terms::result_bits(op, ty);
            // Of flags each condition is asked for; those that the manual does not define are free.
            let conditions: Vec<(Term, u64)> = match op {
                Op::Flags(_) => [Cond::O, Cond::B, Cond::E, Cond::S, Cond::P, Cond::L, Cond::Le]
                    .into_iter()
                    .map(|cond| {
                        let holds = u64::from(semantics::cond_holds(cond, expected));
                        (terms.pure(Op::Cond(cond), Ty::I64, &[made]), holds)
                    })
                    .collect(),
                _ => vec![(made, expected)],
            };
            for (term, value) in conditions {
                let bits = if matches!(op, Op::Flags(_)) { 1 } else { bits };
                let right = terms.number(value, bits);
                let wrong = terms.number(value ^ 1, bits);
                let goal = terms.equal(term, right);
                let opposite = terms.equal(term, wrong);
                let answer = z3.follows(&terms, &hold, goal, Depth::Terms);
                let words =
                    || format!("{op}.{ty} {values:x?} = {value:#x}: {}", terms.words(term, 4));
                match answer {
                    Answer::Follows => decided += 1,
                    _ if matches!(op, Op::Flags(_)) => {}
                    answer => panic!("{}: {answer:?}", words()),
                }
                let answer = z3.follows(&terms, &hold, opposite, Depth::Terms);
                assert!(answer != Answer::Follows, "{}: the opposite follows", words());
            }
        }
    }
    println!("{decided} decided");
    assert!(decided > 5_000, "{decided}");
}

#[cfg(feature = "prove")]
#[test]
fn what_is_wrong_is_not_proven_by_the_solver() {
    let [all, wrong, proven, refuted] = never_proven(&mut Z3::default(), 0..60);
    let words = format!("{all} versions, {wrong} wrong, {proven} proven, {refuted} refuted");
    println!("{words}");
    assert!(wrong > 5 && 2 * proven > all && refuted > 10, "{words}");
}

#[cfg(feature = "prove")]
#[test]
fn right_passes_are_proven() {
    let (mut traces, mut proven, mut why) = (0, 0, Vec::new());
    for seed in 0..60 {
        each(seed, |program, case, head| {
            let names = passes(&mut Rng::new(!seed ^ head));
            let outcome = attempt(program, &made(case, &names), &mut Z3::default());
            traces += 1;
            match outcome.verdict {
                Verdict::Proven => proven += 1,
                Verdict::Refuted { setup, what } => panic!("{names:?}: {what}\n{setup}"),
                Verdict::Unknown { why: what } => why.push(format!("{seed} {names:?}: {what}")),
            }
        });
    }
    println!("{proven} of {traces}\n{}", why.join("\n"));
    assert!(10 * proven > 9 * traces, "{proven} of {traces}: {why:#?}");
}

/// Long chains neither nest deeply nor take long: sums, and low bits of what is made of one value twice.
#[test]
fn long_chains_are_made_in_time() {
    let mut terms = Terms::default();
    let symbol =
        |terms: &mut Terms, i: usize| terms.symbol(Symbol::Entry(Loc::from_ssa_index(i % 16)), 64);
    let (mut sum, mut mixed) = (symbol(&mut terms, 0), symbol(&mut terms, 1));
    let mut flags = terms.symbol(Symbol::Entry(Loc::Flags), 64);
    for i in 0..20_000 {
        let other = symbol(&mut terms, i);
        let product = terms.pure(Op::Mul, Ty::I64, &[sum, other]);
        sum = terms.pure(Op::Add, Ty::I64, &[sum, product]);
        let both = terms.pure(Op::And, Ty::I64, &[mixed, other]);
        mixed = terms.pure(Op::Xor, Ty::I64, &[mixed, both]);
        flags = terms.pure(Op::Flags(FlagOp::Inc), Ty::I64, &[other, flags]);
    }
    let before = terms.len();
    for ty in [Ty::I8, Ty::I16, Ty::I32] {
        terms.pure(Op::Trunc, ty, &[sum]);
        terms.pure(Op::Trunc, ty, &[mixed]);
    }
    let carry = terms.pure(Op::Cond(Cond::B), Ty::I64, &[flags]);
    assert!(matches!(terms.node(carry), Node::Pure(Op::Cond(Cond::B), ..)));
    assert!(terms.len() < before + 300_000, "{}", terms.len());
    let mut facts = Facts::default();
    let mut all = carry;
    for i in 0..20_000 {
        let number = terms.number(i, 64);
        let less = terms.pure(Op::LtU, Ty::I64, &[number, sum]);
        all = terms.pure(Op::And, Ty::I1, &[all, less]);
    }
    facts.learn(&mut terms, all);
    assert!(facts.hold.len() > 10_000 && facts.has(&terms, carry));
}

/// A version with thousands of branches, and one with a loop that has two entries.
#[test]
fn odd_control_flow_is_refused_in_time() {
    let branches = 3_000;
    let mut text =
        String::from("region 0x1000 {\n  version t1 {\n    anchor a0 = base.0x1000 []\n");
    text +=
        "    b0(v0: i64 = rax):\n      v1 = eq.i64 v0, 0\n      branch v1 then b1() else b2()\n";
    for i in 0..branches {
        let (one, two) = (2 * i + 1, 2 * i + 2);
        let (c, next) = (2 * i + 2, 2 * i + 3);
        text += &format!(
            "    b{one}:\n      jump b{two}()\n    b{two}:\n      v{c} = eq.i64 v0, {i}\n"
        );
        text += &format!("      branch v{c} then b{next}() else b{}()\n", next + 1);
    }
    text += &format!(
        "    b{}:\n      exit a0\n    b{}:\n      exit a0\n  }}\n}}\n",
        2 * branches + 1,
        2 * branches + 2
    );
    let file = crate::text::file(&text).unwrap_or_else(|e| panic!("{e}"));
    let version = &file.regions[0].versions[0];
    let claim = Claim { right: Right::Trace(version), version, constants: &[] };
    let limits = Limits { time: std::time::Duration::from_millis(300) };
    let outcome = prove(claim, &mut Nobody, limits);
    assert!(outcome.time < std::time::Duration::from_secs(30), "{outcome:?}");
    let text = "region 0x1000 {\n  version t1 {\n    anchor a0 = base.0x1000 []\n    b0(v0: i64 = rax):\n      \
                v1 = eq.i64 v0, 0\n      branch v1 then b1() else b2()\n    b1:\n      poll else a0\n      jump b2()\n    \
                b2:\n      poll else a0\n      jump b1()\n  }\n}\n";
    let file = crate::text::file(text).unwrap_or_else(|e| panic!("{e}"));
    let version = &file.regions[0].versions[0];
    let claim = Claim { right: Right::Trace(version), version, constants: &[] };
    let outcome = prove(claim, &mut Nobody, Limits::default());
    let why = "a loop has more than one entry".to_string();
    assert_eq!(outcome.verdict, Verdict::Unknown { why });
}

/// Flags that are packed as `lahf; seto al` does, and put together again, are the flags; with another mask or shift,
/// or with the overflow of others, they are not taken for them.
#[test]
fn flags_that_were_taken_apart_are_recognised() {
    let (mut right, mut other) = (0, 0);
    for seed in 0..2000 {
        let (mut terms, mut rng) = (Terms::default(), Rng::new(seed));
        let [one, two] = [0, 1].map(|i| terms.symbol(Symbol::Entry(Loc::from_ssa_index(i)), 64));
        let entry = terms.symbol(Symbol::Entry(Loc::Flags), 64);
        let sum = terms.pure(Op::Flags(FlagOp::Add), Ty::I32, &[one, two]);
        let [flags, of_overflow] = match rng.below(3) {
            0 => [entry, entry],
            1 => [sum, sum],
            _ => [entry, sum],
        };
        // One of these is wrong in some of the cases.
        let wrong = |rng: &mut Rng, number: u64, others: &[u64]| match rng.below(6) {
            0 => rng.pick(others),
            _ => number,
        };
        let low = ARITH_FLAGS & 0xff;
        let lahf = wrong(&mut rng, low, &[low & !1, 0xff, low ^ 0x80]);
        let (down, kept) =
            (wrong(&mut rng, 8, &[7, 9, 0]), wrong(&mut rng, low, &[low | 2, low & !4]));
        let up = wrong(&mut rng, 11, &[10, 12, 43]);
        let number = |terms: &mut Terms, n: u64| terms.number(n, 64);
        let bits = terms.pure(Op::FlagBits, Ty::I64, &[flags]);
        let mask = number(&mut terms, lahf);
        let bits = terms.pure(Op::And, Ty::I64, &[bits, mask]);
        let byte = terms.slice(bits, 0, 8);
        let word = terms.pure(Op::Insert8High, Ty::I64, &[one, byte]);
        let overflow = terms.pure(Op::Cond(Cond::O), Ty::I64, &[of_overflow]);
        let overflow = terms.pure(Op::Zext(Ty::I1), Ty::I8, &[overflow]);
        let packed = terms.pure(Op::Insert8Low, Ty::I64, &[word, overflow]);
        let (down, up) = (terms.number(down, 8), terms.number(up, 8));
        let high = terms.pure(Op::Shr, Ty::I64, &[packed, down]);
        let mask = number(&mut terms, kept);
        let high = terms.pure(Op::And, Ty::I64, &[high, mask]);
        let mask = number(&mut terms, 1);
        let bit = terms.pure(Op::And, Ty::I64, &[packed, mask]);
        let bit = terms.pure(Op::Shl, Ty::I64, &[bit, up]);
        let image = terms.pure(Op::Or, Ty::I64, &[high, bit]);
        let raw = terms.raw(Op::Flags(FlagOp::FromBits), Ty::I64, &[image]);
        match terms.image_of(image) {
            Some(found) => {
                assert!(!terms.differ(found, raw), "seed {seed}: {}", terms.words(image, 9));
                right += 1;
            }
            None => other += 1,
        }
    }
    assert!(right > 400 && other > 400, "{right} {other}");
}

/// The solver shows for all values what `normal_forms_keep_the_value` shows for some.
#[cfg(feature = "prove")]
#[test]
fn normal_forms_are_proven() {
    let operations = operations();
    let (mut asked, mut proven) = (0, 0);
    for seed in 0..60 {
        let (mut terms, mut rng) = (Terms::default(), Rng::new(seed));
        let mut pool = Vec::new();
        for _ in 0..60 {
            let (op, ty) = rng.pick(&operations);
            let args: Vec<Term> = operands(op, ty)
                .into_iter()
                .map(|ty| term(&mut terms, &mut rng, &pool, ty))
                .collect();
            let made = terms.pure(op, ty, &args);
            let raw = terms.raw(op, ty, &args);
            let result = match op.signature().1 {
                crate::op::ResultTy::Is(ty) => ty,
                _ => ty,
            };
            pool.push((made, result));
            // What the manual leaves undefined is only the same in the same term.
            if made == raw || terms.constant(made).is_some() || matches!(op, Op::Flags(_)) {
                continue;
            }
            let goal = terms.raw(Op::Eq, result, &[raw, made]);
            asked += 1;
            match (Z3 { work: 2_000_000 }).follows(&terms, &[], goal, Depth::Terms) {
                Answer::Follows => proven += 1,
                Answer::Unknown => {}
                Answer::Refuted(state) => {
                    let words = [raw, made].map(|term| terms.words(term, 6));
                    panic!("seed {seed}: {} is not {}: {state:?}", words[0], words[1]);
                }
            }
        }
    }
    println!("{proven} of {asked} proven");
    assert!(asked > 500 && 10 * proven > 9 * asked, "{proven} of {asked}");
}

/// Pass `simplify` folds sums and shifts into addresses: terms alone show each to be the same.
#[test]
fn folded_addresses_are_proven() {
    let mut folded = 0;
    for seed in 0..600 {
        let mut rng = Rng::new(seed);
        let mut version = Version::new("t1", 0x1000);
        let mut params = Vec::new();
        for index in 0..Loc::SSA_COUNT {
            let loc = Loc::from_ssa_index(index);
            params.push(version.value(loc.ty()));
            version.entry_locs.push(loc);
        }
        let mut b = Builder::new(&mut version);
        let mut pool: Vec<Operand> = params[..3].iter().map(|v| (*v).into()).collect();
        for _ in 0..6 {
            let (x, y) = (rng.pick(&pool), rng.pick(&pool));
            let number = Operand::Const(rng.interesting());
            let count = Operand::Const(rng.below(5) as u64);
            pool.push(match rng.below(4) {
                0 => b.binary(Op::Add, Ty::I64, x, y),
                1 => b.binary(Op::Shl, Ty::I64, x, count),
                2 => b.binary(Op::Sub, Ty::I64, x, number),
                _ => b.binary(Op::Add, Ty::I64, x, number),
            });
        }
        let (mut insts, last) = (b.insts, pool.len() - 1);
        let before =
            Anchor::new(Operand::Const(0x1000), vec![(Loc::Gpr(Gpr::RAX), params[0].into())]);
        let before = version.anchor(before);
        let loaded = version.value(Ty::I64);
        let mut load = Inst::new(Op::Load, Ty::I64, Some(loaded), &[pool[last], pool[last - 1]]);
        load.mem = Some(Mem {
            scale: 1 << rng.below(4),
            disp: i64::from(rng.bits() as i32 >> rng.below(32)),
            seg: None,
        });
        load.anchor = Some(before);
        insts.push(load);
        let after = Anchor::new(Operand::Const(0x2000), vec![(Loc::Gpr(Gpr::RAX), loaded.into())]);
        let after = version.anchor(after);
        version.blocks.push(Block { params, insts, term: End::Exit(after) });
        crate::verify::assert_valid(&version);
        let mut simple = version.clone();
        optimise_with(&mut simple, &["simplify", "dce"], &OptOptions::default());
        folded += u64::from(simple != version);
        let claim = Claim { right: Right::Trace(&version), version: &simple, constants: &[] };
        let outcome = prove(claim, &mut Nobody, Limits::default());
        assert_eq!(outcome.verdict, Verdict::Proven, "seed {seed}: {version}{simple}");
    }
    assert!(folded > 500, "{folded}");
}

/// Accesses that facts keep apart share no byte: the solver says so, too.
#[cfg(feature = "prove")]
#[test]
fn what_facts_keep_apart_is_apart() {
    let (mut apart, mut solver) = (0, Z3 { work: 5_000_000 });
    for seed in 0..1_600 {
        let (mut terms, mut rng) = (Terms::default(), Rng::new(seed));
        let mut facts = Facts::default();
        let bases: Vec<Term> =
            (0..2).map(|i| terms.symbol(Symbol::Entry(Loc::from_ssa_index(i)), 64)).collect();
        let small = |rng: &mut Rng| match rng.below(3) {
            0 => rng.below(40) as u64,
            1 => (rng.below(40) as u64).wrapping_neg(),
            _ => rng.interesting(),
        };
        let address = |terms: &mut Terms, rng: &mut Rng| {
            let base = match rng.below(4) {
                0 => terms.number(0, 64),
                1 => terms.minus(bases[0], bases[1]),
                n => bases[n - 2],
            };
            terms.plus(base, small(rng))
        };
        for _ in 0..3 {
            let value = address(&mut terms, &mut rng);
            let number = terms.number(small(&mut rng), 64);
            let op = rng.pick(&[Op::Eq, Op::Ne, Op::LtU, Op::LeU]);
            let args = if rng.one_in(2) { [value, number] } else { [number, value] };
            let fact = terms.pure(op, Ty::I64, &args);
            facts.learn(&mut terms, fact);
        }
        for _ in 0..6 {
            let (one, two) = (address(&mut terms, &mut rng), address(&mut terms, &mut rng));
            let (bytes, size) = (1 << rng.below(4), 1 << rng.below(4));
            if facts.contradict || !facts.apart(&mut terms, (one, bytes), (two, size)) {
                continue;
            }
            let goal = terms.apart((one, bytes), (two, size));
            let answer = solver.follows(&terms, &facts.hold, goal, Depth::Terms);
            let words = [one, two].map(|term| terms.words(term, 4));
            assert_eq!(
                answer,
                Answer::Follows,
                "seed {seed}: {bytes} at {}, {size} at {}",
                words[0],
                words[1]
            );
            apart += 1;
        }
    }
    println!("{apart} apart");
    assert!(apart > 800, "{apart}");
}

#[test]
fn a_term_is_made_once() {
    let mut terms = Terms::default();
    let rax = terms.symbol(Symbol::Entry(Loc::from_ssa_index(0)), 64);
    let four = terms.number(4, 64);
    let flags = terms.pure(Op::Flags(FlagOp::Sub), Ty::I64, &[rax, four]);
    let less = terms.pure(Op::Cond(Cond::B), Ty::I64, &[flags]);
    assert_eq!(less, terms.pure(Op::LtU, Ty::I64, &[rax, four]));
    let low = terms.pure(Op::Trunc, Ty::I32, &[rax]);
    let wide = terms.pure(Op::Zext(Ty::I32), Ty::I64, &[low]);
    assert_eq!(low, terms.pure(Op::Trunc, Ty::I32, &[wide]));
    let left = terms.plus(rax, 5);
    let nine = terms.number(9, 64);
    assert_eq!(terms.equal(left, nine), terms.equal(rax, four));
    assert!(matches!(terms.node(left), Node::Sum(..)));
}

/// A trace among other threads that compares its code first reads nothing that `base` does not read, as far as others
/// can tell; a further read of data is seen.
#[test]
fn guards_of_code_are_no_accesses() {
    let attempt = |read: &str, origin: &str| {
        let text = format!(
            "region 0x1000 {{
  version base {{
    b0:
      at 0x1000
      v0 = get.i64 rdi
      v1 = load.i64 [v0]
      put.i64 rax, v1
      goto 0x1003
  }}
  version t1 {{
    anchor a0 = base.0x1000 []
    anchor a1 = base.0x1003 [rax = v2]
    b0(v0: i64 = rdi):
      v1 = load.i16 [{read}] !a0
      v3 = eq.i16 v1, 0x8b48
      assume v3 else a0 {origin}
      v2 = load.i64 [v0] !a0
      exit a1
  }}
}}
"
        );
        let file = crate::text::file(&text).unwrap_or_else(|e| panic!("{e}"));
        let [base, trace] = [0, 1].map(|i| &file.regions[0].versions[i]);
        let mut program = std::collections::BTreeMap::from([(0x1000, base.clone())]);
        let claim = Claim { right: Right::Program(&mut program), version: trace, constants: &[] };
        prove(claim, &mut Nobody, Limits::default()).verdict
    };
    assert_eq!(attempt("0x1000", "from code 0x1000 step 0"), Verdict::Proven);
    assert_ne!(attempt("0x1000", "from memory 0x1000 step 0"), Verdict::Proven);
    assert_ne!(attempt("0x1000", ""), Verdict::Proven);
}
