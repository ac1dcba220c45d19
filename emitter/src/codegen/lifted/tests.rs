//! Lifted code does what its version does, and broken code is found.

use super::*;
use crate::codegen::encoded::Relocation;
use crate::codegen::mach::SiteKind;
use crate::codegen::{self, Allocator};

use crate::emitter::{Config, Emitter, EntryState, StubTarget};
use crate::fragment::ExitId;
use crate::record::{Location, Node, Record};
use dynasour_ir::eval::{Leave, Machine, ModelMachine, NoHooks, run};
use dynasour_ir::opt::{OptOptions, optimise_with};
use dynasour_ir::predict::{NativeResults, Registers};
use dynasour_ir::prove::{self, Verdict};
use dynasour_ir::random::cases::{Case, case, passes};
use dynasour_ir::random::program::Program;
use dynasour_ir::random::{Rng, generate};
use dynasour_ir::validate::{Disagreement, Limits, Report, Start, Subject, validate_code};
use dynasour_ir::{Native, Op};
use iced_x86::{ConstantOffsets, Decoder, DecoderOptions, Instruction, Mnemonic, OpKind};
use std::cell::RefCell;

/// Guest instructions of the longest path that a random trace is made of.
const LENGTH: u64 = 200;

/// Compares code with the recorded blocks.
fn agrees(
    program: &mut Program,
    case: &Case,
    version: &Version,
    (code, request): (&CompiledCode, &Request),
) -> Result<Report, Box<Disagreement>> {
    let (state, machine) = &case.states[0];
    let machine: RefCell<ModelMachine> = RefCell::new(machine.clone());
    let read = |address: u64, size: u32| machine.borrow_mut().load(address, size).ok();
    let subject = Subject {
        code: program,
        built: &case.trace,
        optimised: version,
        entry: Registers { gpr: state.gpr, rflags: state.flags, segments: [0; 2] },
        results: &NativeResults::default(),
        read: &read,
        constants: &[],
        length: LENGTH,
        start: &Start::default(),
    };
    let mut lifted = LiftedCode::new(code, version, request);
    validate_code(subject, &mut lifted, Limits::default())
}

/// The small guest simplifies natives that use registers: has the trace none?
fn is_simple(case: &Case) -> bool {
    let is_simple = |n: &Native| n.gpr_in.is_empty() && n.gpr_out.is_empty() && !n.flags_out;
    case.trace.natives.iter().all(is_simple)
}

/// The optimised traces of random programs, compiled.
fn each(
    seeds: std::ops::Range<u64>,
    mut f: impl FnMut(u64, &mut Program, &Case, &Version, (CompiledCode, Request)),
) {
    let emitter =
        Emitter::new(Config { cache_size: 1 << 20, ..Config::default() }).expect("memory");
    let mut allocator = Allocator::default();
    for seed in seeds {
        let mut program = generate::program(&mut Rng::new(seed));
        for head in generate::heads(&program) {
            let Some(case) = case(&mut program, head, seed) else { continue };
            if !is_simple(&case) {
                continue;
            }
            let mut version = case.trace.clone();
            let names = passes(&mut Rng::new(!seed ^ head)).into_iter().filter(|n| *n != "monitor");
            let names: Vec<&str> = ["split", "forward"].into_iter().chain(names).collect();
            optimise_with(&mut version, &names, &OptOptions::default());
            let request =
                emitter.request(version.region, EntryState::Canonical).expect("a request");
            if let Ok(code) = codegen::compile(&version, &request, &mut allocator) {
                f(seed, &mut program, &case, &version, (code, request));
            }
        }
    }
}

#[test]
fn code_does_what_was_recorded() {
    let (mut traces, mut states, mut whole) = (0, 0, 0);
    each(0..200, |seed, program, case, version, (code, request)| {
        let result = agrees(program, case, version, (&code, &request));
        let report = result.unwrap_or_else(|wrong| {
            panic!("seed {seed}: {wrong}\n{}{}{version}", wrong.setup, case.trace)
        });
        traces += 1;
        states += report.states;
        whole += u64::from(report.whole);
    });
    assert!(traces > 300 && states > 20 * traces && 10 * whole > 8 * traces, "{traces} {states}");
}

/// Side traces, which begin in the states of exits.
#[test]
fn code_of_side_traces_does_what_was_recorded() {
    let mut emitter =
        Emitter::new(Config { cache_size: 1 << 20, ..Config::default() }).expect("memory");
    let mut allocator = Allocator::default();
    let (mut traces, mut states) = (0, 0);
    each(0..200, |seed, program, _, version, (code, _)| {
        emitter.flush_all();
        let request = emitter.request(version.region, EntryState::Canonical).expect("a request");
        let id = emitter.place(&request, code).expect("room");
        let exits = emitter.fragment(id).expect("it is there").exits.clone().map(ExitId);
        for exit in exits.filter(|e| emitter.exit(*e).is_some_and(|e| e.kind == SiteKind::Guard)) {
            let target = emitter.exit(exit).and_then(|e| e.target);
            let side = target.and_then(|target| case(program, target, seed));
            let is_private = |version: &Version| version.context.private_memory();
            let fits = |c: &Case| is_simple(c) && is_private(&c.trace) == is_private(version);
            let Some(side) = side.filter(fits) else { continue };
            let from = EntryState::FromExit(exit);
            let Ok(request) = emitter.request(side.trace.region, from) else { continue };
            let Ok(code) = codegen::compile(&side.trace, &request, &mut allocator) else {
                continue;
            };
            let compared = agrees(program, &side, &side.trace, (&code, &request));
            let report = compared.unwrap_or_else(|wrong| {
                panic!("seed {seed}, {exit:?}: {wrong}\n{}{version}{}", wrong.setup, side.trace)
            });
            traces += 1;
            states += report.states;
        }
    });
    assert!(traces > 100 && states > 10 * traces, "{traces} {states}");
}

/// Tries to prove that code does what its version does.
fn proof(version: &Version, (code, request): (&CompiledCode, &Request)) -> Verdict {
    let mut solver = prove::solver().unwrap_or_else(|| Box::new(prove::Nobody));
    let mut lifted = LiftedCode::new(code, version, request);
    prove::prove_code(version, &mut lifted, &mut *solver, prove::Limits::default()).verdict
}

/// Random traces are full of operations whose flags nothing defines; those of real programs are proven more often.
#[test]
fn code_is_proven() {
    let (mut traces, mut proven) = (0, 0);
    each(0..200, |seed, _, _, version, (code, request)| {
        traces += 1;
        match proof(version, (&code, &request)) {
            Verdict::Proven => proven += 1,
            verdict => println!("seed {seed}: {verdict:?}"),
        }
    });
    println!("{proven} of {traces} proven");
    let least = if prove::solver().is_some() { 50 } else { 30 };
    assert!(traces > 300 && 100 * proven > least * traces, "{proven} of {traces}");
}

/// What a record says as a version is what it says when it is applied.
#[test]
fn passages_say_what_records_do() {
    let mut rng = Rng::new(1);
    let mut records = 0;
    each(0..100, |seed, _, _, _, (code, _)| {
        for record in &code.records {
            let mut context = ThreadContext::new();
            context.raw = std::array::from_fn(|_| rng.interesting());
            context.raw_flags = rng.interesting() & ARITH_FLAGS;
            context.scratch.iter_mut().take(64).for_each(|slot| *slot = rng.interesting());
            let mut state = State { gpr: context.raw, flags: context.raw_flags };
            let mut machine = ModelMachine::boundless(seed);
            let mut right = machine.clone();
            for (i, slot) in context.scratch.iter().enumerate().take(64) {
                machine.store(passages::slot(i as u16), 8, *slot).expect("memory");
            }
            let wanted = left_by(record, &mut context);
            let passage = passages::of_record(record, 0, false);
            let left = run(&passage, &mut state, &mut machine, &mut NoHooks, &mut 10_000);
            let Ok(Leave::Anchor { pc, .. }) = left else { panic!("seed {seed}: {left:?}") };
            assert_eq!(pc, wanted.pc);
            assert_eq!((state.gpr, state.flags), (wanted.state.gpr, wanted.state.flags));
            for &(address, size, value) in &wanted.stores {
                right.store(address, size, value).expect("memory");
            }
            for &(address, size, _) in &wanted.stores {
                assert_eq!(machine.load(address, size), right.load(address, size));
            }
            records += 1;
        }
    });
    assert!(records > 500, "{records}");
}

/// A fault in code: what it is, and whether there was a place for it.
type Fault = (&'static str, fn(&mut CompiledCode, &mut Rng) -> bool);

/// An element that a fault may hit.
fn one<'a, T>(items: &'a mut [T], rng: &mut Rng) -> Option<&'a mut T> {
    if items.is_empty() { None } else { Some(&mut items[rng.below(items.len())]) }
}

/// A record that an exit uses, in which the fault is to be.
fn record<'c>(code: &'c mut CompiledCode, rng: &mut Rng) -> Option<&'c mut Record> {
    one(&mut code.records, rng).filter(|record| !record.locations.is_empty())
}

/// The instructions of the hot code in which no field depends on where the code stands: offset and
/// instruction.
fn instructions(code: &CompiledCode) -> Vec<(usize, Instruction)> {
    let start = code.encoded.inside.1 as usize;
    let mut decoder = Decoder::new(64, &code.encoded.hot[start..], DecoderOptions::NONE);
    let mut all = Vec::new();
    while decoder.can_decode() {
        let at = start + decoder.position();
        let inst = decoder.decode();
        let relocated =
            |r: &Relocation| !r.cold && (at..at + inst.len()).contains(&(r.at as usize));
        if !inst.is_invalid() && !code.encoded.relocations.iter().any(relocated) {
            all.push((at, inst));
        }
    }
    all
}

/// Changes the bytes of an instruction.
fn instruction(
    code: &mut CompiledCode,
    rng: &mut Rng,
    fits: impl Fn(&Instruction) -> bool,
    f: impl FnOnce(&mut [u8], &Instruction),
) -> bool {
    let mut all = instructions(code);
    all.retain(|(_, inst)| fits(inst));
    let Some((at, inst)) = one(&mut all, rng).copied() else { return false };
    let bytes = &mut code.encoded.hot[at..at + inst.len()];
    let before = bytes.to_vec();
    f(bytes, &inst);
    *bytes != before[..]
}

fn offsets(bytes: &[u8]) -> ConstantOffsets {
    let mut decoder = Decoder::new(64, bytes, DecoderOptions::NONE);
    let inst = decoder.decode();
    decoder.get_constant_offsets(&inst)
}

const FAULTS: [Fault; 22] = [
    ("an instruction of the hot code is left out", |code, rng| {
        instruction(code, rng, |i| i.mnemonic() != Mnemonic::Nop, |bytes, _| bytes.fill(0x90))
    }),
    ("two instructions are exchanged", |code, rng| {
        let all = instructions(code);
        let mut pairs: Vec<_> =
            all.windows(2).filter(|w| w[0].0 + w[0].1.len() == w[1].0).collect();
        let Some(pair) = one(&mut pairs, rng) else { return false };
        let (start, middle) = (pair[0].0, pair[0].1.len());
        let bytes = &mut code.encoded.hot[start..pair[1].0 + pair[1].1.len()];
        let before = bytes.to_vec();
        bytes.rotate_left(middle);
        *bytes != before[..]
    }),
    ("an immediate is one more", |code, rng| {
        let has = |i: &Instruction| {
            (0..i.op_count()).any(|n| {
                matches!(
                    i.op_kind(n),
                    OpKind::Immediate8
                        | OpKind::Immediate8to32
                        | OpKind::Immediate8to64
                        | OpKind::Immediate32
                        | OpKind::Immediate32to64
                )
            })
        };
        instruction(code, rng, has, |bytes, _| {
            let at = offsets(bytes).immediate_offset();
            bytes[at] = bytes[at].wrapping_add(1);
        })
    }),
    ("a displacement is eight more", |code, rng| {
        let has = |i: &Instruction| i.memory_displ_size() > 0 && !i.is_ip_rel_memory_operand();
        instruction(code, rng, has, |bytes, _| {
            let at = offsets(bytes).displacement_offset();
            bytes[at] = bytes[at].wrapping_add(8);
        })
    }),
    ("a register in an instruction", |code, rng| {
        let has = |i: &Instruction| i.op_count() == 2 && i.op_kind(1) == OpKind::Register;
        instruction(code, rng, has, |bytes, inst| {
            // The reg field of the ModRM byte, which is the last one, or stands before a displacement.
            let offsets = offsets(bytes);
            let end = match offsets.has_displacement() {
                true => offsets.displacement_offset(),
                false => inst.len(),
            };
            let sib = inst.op_kind(0) == OpKind::Memory && end >= 3 && bytes[end - 2] & 7 == 4;
            bytes[end - if sib { 2 } else { 1 }] ^= 8;
        })
    }),
    ("the width of an instruction", |code, rng| {
        instruction(
            code,
            rng,
            |i| i.code().op_code().is_instruction(),
            |bytes, _| {
                if bytes[0] & 0xf8 == 0x48 {
                    bytes[0] &= !8;
                }
            },
        )
    }),
    ("a guard jumps in the opposite case", |code, rng| {
        let mut guards: Vec<u32> = code.encoded.guards.iter().map(|guard| guard.at).collect();
        let Some(at) = one(&mut guards, rng).copied() else { return false };
        let opcode = &mut code.encoded.hot[at as usize + 1];
        let is_jump = *opcode & 0xf0 == 0x80;
        *opcode ^= u8::from(is_jump);
        is_jump
    }),
    ("a bit of the cold code", |code, rng| {
        one(&mut code.encoded.cold, rng).is_some_and(|byte| {
            *byte ^= 1 << rng.below(8);
            true
        })
    }),
    ("a constant of a record", |code, rng| {
        record(code, rng).is_some_and(|record| {
            let target = usize::from(record.target);
            let nodes = record.nodes.iter_mut().enumerate().filter(|(i, _)| *i != target);
            let mut constants: Vec<&mut u64> = nodes
                .filter_map(|(_, node)| match node {
                    Node::Const(c) => Some(c),
                    _ => None,
                })
                .collect();
            one(&mut constants, rng).is_some_and(|c| {
                **c ^= 1;
                true
            })
        })
    }),
    ("an operation of a record", |code, rng| {
        record(code, rng).is_some_and(|record| {
            let ops = record.nodes.iter_mut().filter_map(|node| match node {
                Node::Op(op @ (Op::Add | Op::Sub), ..) => Some(op),
                _ => None,
            });
            let mut ops: Vec<&mut Op> = ops.collect();
            one(&mut ops, rng).is_some_and(|op| {
                **op = if **op == Op::Add { Op::Sub } else { Op::Add };
                true
            })
        })
    }),
    ("the address of a deferred store", |code, rng| {
        let mut with: Vec<_> = code.records.iter_mut().filter(|r| !r.stores.is_empty()).collect();
        one(&mut with, rng).is_some_and(|record| {
            record.stores[0].mem.disp += 8;
            true
        })
    }),
    ("the value of a deferred store", |code, rng| {
        let mut with: Vec<_> = code.records.iter_mut().filter(|r| !r.stores.is_empty()).collect();
        one(&mut with, rng).is_some_and(|record| {
            let (before, count) = (record.stores[0].args[2], record.nodes.len());
            record.stores[0].args[2] = rng.below(count) as u16;
            before != record.stores[0].args[2]
        })
    }),
    ("a bit of the hot code", |code, rng| {
        let start = code.encoded.inside.1 as usize;
        let byte = one(&mut code.encoded.hot[start..], rng);
        byte.is_some_and(|byte| {
            *byte ^= 1 << rng.below(8);
            true
        })
    }),
    ("a jump of the hot code", |code, rng| {
        let blocks = code.encoded.blocks.len();
        let mut jumps: Vec<_> = code
            .encoded
            .relocations
            .iter_mut()
            .filter(|r| !r.cold && matches!(r.target, Target::Block(_)))
            .collect();
        one(&mut jumps, rng).is_some_and(|jump| {
            let before = jump.target;
            jump.target = Target::Block(rng.below(blocks));
            jump.target != before
        })
    }),
    ("the number of an exit", |code, rng| {
        let sites = code.sites.len() as u32;
        let mut numbers: Vec<_> = code
            .encoded
            .relocations
            .iter_mut()
            .filter(|r| matches!(r.target, Target::Exit(_)))
            .collect();
        one(&mut numbers, rng).is_some_and(|number| {
            let before = number.target;
            number.target = Target::Exit(rng.below(sites as usize) as u32);
            number.target != before
        })
    }),
    ("the pc of an exit", |code, rng| {
        record(code, rng).is_some_and(|record| {
            let node = &mut record.nodes[usize::from(record.target)];
            let Node::Const(pc) = node else { return false };
            *pc += 16;
            true
        })
    }),
    ("a location of a record", |code, rng| {
        record(code, rng).is_some_and(|record| {
            let at = rng.below(record.locations.len());
            let before = record.locations[at].1;
            record.locations[at].1 = rng.below(record.nodes.len()) as u16;
            before != record.locations[at].1
        })
    }),
    ("a location that a record lacks", |code, rng| {
        record(code, rng).is_some_and(|record| {
            let at = rng.below(record.locations.len());
            record.locations.remove(at);
            true
        })
    }),
    ("a register of a record", |code, rng| {
        record(code, rng).is_some_and(|record| {
            let leaves = record.nodes.iter_mut().filter_map(|node| match node {
                Node::Leaf(Location::Reg(r), _) => Some(r),
                _ => None,
            });
            let mut leaves: Vec<&mut u8> = leaves.collect();
            one(&mut leaves, rng).is_some_and(|register| {
                **register = (**register + 1 + rng.below(15) as u8) % 16;
                true
            })
        })
    }),
    ("a slot of a record", |code, rng| {
        record(code, rng).is_some_and(|record| {
            let leaves = record.nodes.iter_mut().filter_map(|node| match node {
                Node::Leaf(Location::Slot(s), _) => Some(s),
                _ => None,
            });
            let mut leaves: Vec<&mut u16> = leaves.collect();
            one(&mut leaves, rng).is_some_and(|slot| {
                **slot += 1;
                true
            })
        })
    }),
    ("a deferred store that a record lacks", |code, rng| {
        let mut with: Vec<_> = code.records.iter_mut().filter(|r| !r.stores.is_empty()).collect();
        one(&mut with, rng).is_some_and(|record| record.stores.pop().is_some())
    }),
    ("a register that is saved in another slot", |code, rng| {
        one(&mut code.registers.saves, rng).is_some_and(|(_, slot)| {
            *slot += 16;
            true
        })
    }),
];

/// Most faults of each kind are found. The others change nothing that can be seen: bits of padding,
/// exits that cannot be taken, registers that hold the same. None that is found is proven.
#[test]
fn broken_code_is_found() {
    for (name, fault) in FAULTS {
        let (mut made, mut found, mut harmless) = (0, 0, 0);
        each(0..100, |seed, program, case, version, (mut code, request)| {
            if fault(&mut code, &mut Rng::new(seed)) {
                made += 1;
                let compared = agrees(program, case, version, (&code, &request));
                found += u64::from(compared.is_err());
                let verdict = proof(version, (&code, &request));
                harmless += u64::from(verdict == Verdict::Proven);
                if let (Err(wrong), Verdict::Proven) = (compared, verdict) {
                    panic!("{name}, seed {seed}: proven, but {wrong}");
                }
            }
        });
        println!("{name}: {found} of {made}; {harmless} are proven to change nothing");
        assert!(made >= 3 && 4 * found >= made, "{name}: {found} of {made}");
    }
}

/// Stubs do what the records of their exits say; most bits of them matter.
#[test]
fn stubs_do_what_records_say() {
    let mut emitter =
        Emitter::new(Config { cache_size: 1 << 20, ..Config::default() }).expect("memory");
    let mut allocator = Allocator::default();
    let (mut stubs, mut broken, mut found) = (0, 0, 0);
    each(0..60, |seed, _, _, version, (code, _)| {
        emitter.flush_all();
        let request = emitter.request(version.region, EntryState::Canonical).expect("a request");
        let id = emitter.place(&request, code).expect("room");
        let exits = emitter.fragment(id).expect("it is there").exits.clone().map(ExitId);
        for exit in exits {
            let to = match emitter.exit(exit).and_then(|e| e.target) {
                Some(_) => StubTarget::Place,
                None => StubTarget::Tables,
            };
            let Ok(request) = emitter.stub_request(exit, to) else { continue };
            let Ok(mut stub) = request.compile(&mut allocator) else { continue };
            if let Err(wrong) = request.verify(&stub) {
                panic!("seed {seed}, {exit:?}: {wrong}\n{}{version}", wrong.setup);
            }
            stubs += 1;
            let (start, end) = (stub.code.encoded.inside.1 as usize, stub.code.encoded.hot.len());
            if start < end {
                broken += 1;
                stub.code.encoded.hot[start] ^= 0x40;
                found += u64::from(request.verify(&stub).is_err());
            }
        }
    });
    assert!(stubs > 200 && broken > 100 && 2 * found > broken, "{stubs} {broken} {found}");
}

/// A sum that is kept in memory: `sum += step` in a loop, as code without optimisation has it.
const SUM: &str = r#"
region 0x1000 {
  version base {
    native n0 = 0x1000 "f2 0f 10 45 f8" mem 8 vec_read 0x1 vec_write 0x1 writes [zmm0] effects [read, state, read_state]
    native n1 = 0x1005 "f2 0f 58 45 f0" mem 8 vec_read 0x1 vec_write 0x1 writes [zmm0, mxcsr] effects [read, may_trap, state, read_state]
    native n2 = 0x100a "f2 0f 11 45 f8" mem 8 vec_read 0x1 effects [write, read_state]
    b0:
      at 0x1000
      v0 = get.i64 rbp
      native n0 [v0 - 8]
      at 0x1005
      native n1 [v0 - 16]
      at 0x100a
      native n2 [v0 - 8]
      at 0x100f
      v1 = get.i64 rax
      v2 = sub.i64 v1, 1
      v3 = flags.sub.i64 v1, 1
      put.i64 rax, v2
      put.flags rflags, v3
      at 0x1013
      v4 = get.flags rflags
      v5 = cond.ne v4
      branch v5 then 0x1000 else 0x1015
  }
  version t1 context private_memory {
    native n0 = 0x1000 "f2 0f 10 45 f8" mem 8 vec_read 0x1 vec_write 0x1 writes [zmm0] effects [read, state, read_state]
    native n1 = 0x1005 "f2 0f 58 45 f0" mem 8 vec_read 0x1 vec_write 0x1 writes [zmm0, mxcsr] effects [read, may_trap, state, read_state]
    native n2 = 0x100a "f2 0f 11 45 f8" mem 8 vec_read 0x1 effects [write, read_state]
    anchor a0 = base.0x1000 [rax = v3, rflags = v4]
    anchor a1 = base.0x1005 [rax = v3, rflags = v4]
    anchor a2 = base.0x100a [rax = v3, rflags = v4]
    anchor a3 = base.0x1013 [rax = v5, rflags = v6]
    b0(v0: i64 = rbp, v1: i64 = rax, v2: flags = rflags):
      jump b1(v1, v2)
    b1(v3: i64, v4: flags):
      poll else a0
      native n0 [v0 - 8] !a0
      native n1 [v0 - 16] !a1
      native n2 [v0 - 8] !a2
      v5 = sub.i64 v3, 1
      v6 = flags.sub.i64 v3, 1
      v7 = cond.ne v6
      assume v7 else a3 from branch 0x1013 step 0
      jump b1(v5, v6)
  }
}"#;

/// A place in the cold code, and what is to be changed there.
type Change = (&'static str, fn(&[u8]) -> bool, usize);

/// What else the code may do with XMM registers on its ways out.
const CHANGES: [Change; 3] = [
    ("another XMM register is given back", |b| matches!(b, [0x65, 0x40 | 0x44, 0x0f, 0x10, ..]), 4),
    (
        "another XMM register is stored for a record",
        |b| matches!(b, [0x65, 0x66, 0x40 | 0x44, 0x0f, 0xd6, ..]),
        5,
    ),
    (
        "an XMM register is stored elsewhere",
        |b| matches!(b, [0x65, 0x66, 0x40 | 0x44, 0x0f, 0xd6, ..]),
        7,
    ),
];

/// The sum and the step are in XMM registers that the guest does not use. Each fault of the ways out is found.
#[test]
fn faults_of_vector_registers_are_found() {
    let file = dynasour_ir::text::file(SUM).expect("a file");
    let versions = || file.regions.iter().flat_map(|r| &r.versions).cloned();
    let mut base: std::collections::BTreeMap<u64, Version> =
        versions().filter(Version::is_base).map(|v| (v.region, v)).collect();
    let built = versions().find(|v| !v.is_base()).expect("a trace");
    let mut version = built.clone();
    dynasour_ir::opt::optimise(&mut version, &OptOptions::default());
    let emitter =
        Emitter::new(Config { cache_size: 1 << 20, ..Config::default() }).expect("memory");
    let request = emitter.request(version.region, EntryState::Canonical).expect("a request");
    let mut allocator = Allocator::default();
    let code = || codegen::compile(&version, &request, &mut Allocator::default());
    let whole = codegen::compile(&version, &request, &mut allocator).expect("code");
    assert!(whole.registers.vectors.len() >= 2, "{version}");
    let mut compared = |code: &CompiledCode| {
        let mut machine = ModelMachine::boundless(7);
        machine.map(0x8000, 16);
        let machine = RefCell::new(machine);
        let read = |address: u64, size: u32| machine.borrow_mut().load(address, size).ok();
        let mut gpr = [0x9000; 16];
        gpr[0] = 5;
        let subject = Subject {
            code: &mut base,
            built: &built,
            optimised: &version,
            entry: Registers { gpr, rflags: 0, segments: [0; 2] },
            results: &NativeResults::default(),
            read: &read,
            constants: &[],
            length: LENGTH,
            start: &Start::default(),
        };
        let mut lifted = LiftedCode::new(code, &version, &request);
        validate_code(subject, &mut lifted, Limits::default())
    };
    let report = compared(&whole).unwrap_or_else(|wrong| panic!("{wrong}\n{version}"));
    assert!(report.states > 10, "{report:?}");
    assert_eq!(proof(&version, (&whole, &request)), Verdict::Proven);
    for (name, is_it, byte) in CHANGES {
        let cold = &whole.encoded.cold;
        let places: Vec<usize> = (0..cold.len()).filter(|at| is_it(&cold[*at..])).collect();
        let found = places.iter().filter(|at| {
            let mut broken = code().expect("code");
            broken.encoded.cold[**at + byte] ^= 8;
            compared(&broken).is_err()
        });
        let found = found.count();
        println!("{name}: {found} of {}", places.len());
        assert!(
            !places.is_empty() && 4 * found >= 3 * places.len(),
            "{name}: {found} of {places:?}"
        );
    }
}
