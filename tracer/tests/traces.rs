//! Traces built from assembled guest code verify, and leave only in states that `base` passes
//! through.

use dynasour_guest::lift::{Bytes, LiftedBlock, MAX_BLOCK, lift_block};
use dynasour_ir::eval::check::{Checked, Code, Limits, check};
use dynasour_ir::eval::{Leave, ModelMachine, NoHooks, State, run};
use dynasour_ir::opt::{OptOptions, Shape, normalise, optimise};
use dynasour_ir::predict::Registers;
use dynasour_ir::verify::assert_valid;
use dynasour_ir::{Context, Effects, Fact, Gpr, Inst, Operand, Term, Version};
use dynasour_tracer::{
    DefaultPolicy, EndReason, HeadKind, Path, Recorder, Recording, Step, TargetKind, TraceShape,
    build,
};
use iced_x86::code_asm::*;
use std::collections::HashMap;
use std::sync::Arc;

const CODE: u64 = 0x40_0000;
const DATA: u64 = 0x10_0000;
const STACK: u64 = 0x7f_0000;

struct Program {
    bytes: Vec<u8>,
    blocks: HashMap<u64, Arc<LiftedBlock>>,
}

impl Program {
    fn assemble(f: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> Program {
        let mut assembler = CodeAssembler::new(64).expect("64 bits is valid");
        f(&mut assembler).expect("the code assembles");
        let bytes = assembler.assemble(CODE).expect("the code encodes");
        Program { bytes, blocks: HashMap::new() }
    }

    fn lifted(&mut self, pc: u64) -> Option<Arc<LiftedBlock>> {
        if !(CODE..CODE + self.bytes.len() as u64).contains(&pc) {
            return None;
        }
        let code = Bytes { start: CODE, bytes: &self.bytes };
        let block =
            self.blocks.entry(pc).or_insert_with(|| Arc::new(lift_block(pc, &code, MAX_BLOCK)));
        Some(Arc::clone(block))
    }

    /// Runs `base` from `head` in `state`, recording until the recorder is done.
    fn record(&mut self, head: u64, state: State, machine: ModelMachine, stable: u16) -> Path {
        self.follow((head, HeadKind::Other), state, machine, stable, &[]).0
    }

    /// The same for a head of some kind, with other fragments around.
    fn follow(
        &mut self,
        (head, kind): (u64, HeadKind),
        mut state: State,
        mut machine: ModelMachine,
        stable: u16,
        kinds: &[(u64, TargetKind)],
    ) -> (Path, EndReason) {
        let policy = DefaultPolicy::default();
        let stable = dynasour_ir::Gpr::all()
            .filter(|g| stable & (1 << g.number()) != 0)
            .map(|g| (g, state.gpr[g.number()]))
            .collect();
        let mut recorder = Recorder::new(head, kind, stable, Registers::default(), &policy);
        let mut pc = head;
        loop {
            let block = self.lifted(pc).expect("the program stays in its code");
            let leave = run(&block.version, &mut state, &mut machine, &mut NoHooks, &mut 10_000)
                .expect("well-formed");
            let recording = match leave {
                Leave::Goto(next) => {
                    pc = next;
                    let target = kinds
                        .iter()
                        .find(|(pc, _)| *pc == next)
                        .map_or(TargetKind::Ordinary, |l| l.1);
                    recorder.step(&block, next, target)
                }
                Leave::Syscall { .. } | Leave::Trap { .. } => recorder.runtime_instruction(&block),
                other => panic!("unexpected {other:?}"),
            };
            match recording {
                Recording::Continue => {}
                Recording::Done(path, end) => return (path, end),
                Recording::Aborted(reason) => panic!("aborted: {reason:?}"),
            }
        }
    }
}

impl Code for Program {
    fn block(&mut self, pc: u64) -> Option<&Version> {
        self.lifted(pc)?;
        self.blocks.get(&pc).map(|b| &b.version)
    }
}

fn machine() -> ModelMachine {
    let mut machine = ModelMachine::new();
    machine.map(DATA, 0x1000);
    machine.map(STACK - 0x1000, 0x2000);
    for i in 0..64u64 {
        machine.write(DATA + 8 * i, &(i * 77 % 100).to_le_bytes());
    }
    machine
}

fn state(n: u64) -> State {
    let mut state = State::default();
    state.gpr[7] = DATA; // rdi
    state.gpr[4] = STACK; // rsp
    state.gpr[6] = n; // rsi
    state.gpr[1] = n & 7; // rcx
    state
}

/// Builds the trace of `head`, then checks it, before and after optimisation, from several states.
fn check_trace(mut program: Program, head: u64, shape: TraceShape, stable: u16) -> Version {
    let path = program.record(head, state(5), machine(), stable);
    assert_eq!(path.shape, shape);
    let context = Context { facts: vec![Fact::PrivateMemory] };
    let version = build::build(&path, "t1", context, &DefaultPolicy::default())
        .expect("the path can be built")
        .version;
    assert_valid(&version);
    for n in [5, 0, 1, 2, 3, 9, 40] {
        let checked = check(&mut program, &version, &state(n), &machine(), Limits::default());
        match checked {
            Ok(Checked::Compared { evaluations, .. }) => assert!(evaluations > 0),
            Ok(Checked::ContextFails) => panic!("nothing was checked"),
            Err(mismatch) => panic!("n = {n}: {mismatch}"),
        }
    }
    version
}

#[test]
fn a_counted_loop_over_memory() {
    let program = Program::assemble(|a| {
        let mut head = a.create_label();
        a.set_label(&mut head)?;
        a.add(rax, qword_ptr(rdi + rsi * 8))?;
        a.sub(rsi, 1)?;
        a.jne(head)?;
        a.syscall()
    });
    let version = check_trace(program, CODE, TraceShape::Loop, 0);
    assert_eq!(version.blocks.len(), 2);
}

#[test]
fn a_loop_that_keeps_its_variables_in_the_stack_frame() {
    let program = Program::assemble(|a| {
        let mut head = a.create_label();
        a.set_label(&mut head)?;
        a.mov(eax, dword_ptr(rsp - 8))?;
        a.cdqe()?;
        a.mov(rax, qword_ptr(rdi + rax * 8))?;
        a.add(qword_ptr(rsp - 16), rax)?;
        a.add(dword_ptr(rsp - 8), 1)?;
        a.mov(eax, esi)?;
        a.cmp(dword_ptr(rsp - 8), eax)?;
        a.jl(head)?;
        a.syscall()
    });
    check_trace(program, CODE, TraceShape::Loop, 0);
}

#[test]
fn calls_and_returns_are_followed() {
    let program = Program::assemble(|a| {
        let (mut head, mut callee, mut over) =
            (a.create_label(), a.create_label(), a.create_label());
        a.set_label(&mut head)?;
        a.call(callee)?;
        a.dec(rsi)?;
        a.jg(head)?;
        a.jmp(over)?;
        a.set_label(&mut callee)?;
        a.push(rbx)?;
        a.lea(rbx, ptr(rsi + 3))?;
        a.add(rax, rbx)?;
        a.pop(rbx)?;
        a.ret()?;
        a.set_label(&mut over)?;
        a.syscall()
    });
    check_trace(program, CODE, TraceShape::Loop, 0);
}

/// A loop that calls one function twice; the function's code is behind the loop.
fn two_calls_of_one_function() -> Program {
    Program::assemble(|a| {
        let (mut top, mut function) = (a.create_label(), a.create_label());
        a.set_label(&mut top)?;
        a.call(function)?;
        a.call(function)?;
        a.dec(rsi)?;
        a.jg(top)?;
        a.syscall()?;
        a.set_label(&mut function)?;
        a.add(rax, rsi)?;
        a.ret()
    })
}

#[test]
fn a_function_called_twice_is_inlined_twice() {
    let path = two_calls_of_one_function().record(CODE, state(5), machine(), 0);
    assert_eq!(path.steps.len(), 5, "call, ret, call, ret, jump back");
    check_trace(two_calls_of_one_function(), CODE, TraceShape::Loop, 0);
}

#[test]
fn a_function_called_again_is_no_loop() {
    let mut program = two_calls_of_one_function();
    let function = program.record(CODE, state(5), machine(), 0).steps[0].next;
    // The state after the first call.
    let mut machine = machine();
    machine.write(STACK, &(CODE + 5).to_le_bytes());
    let path = program.record(function, state(5), machine, 0);
    assert_eq!(
        (path.shape, path.steps.len(), path.steps[1].next),
        (TraceShape::Linear, 2, function)
    );
}

#[test]
fn recursion_is_followed_some_levels() {
    // main calls f; f calls itself while rsi counts down.
    let mut program = Program::assemble(|a| {
        let mut f = a.create_label();
        let mut done = a.create_label();
        a.call(f)?;
        a.syscall()?;
        a.set_label(&mut f)?;
        a.add(rax, rsi)?;
        a.dec(rsi)?;
        a.jle(done)?;
        a.call(f)?;
        a.set_label(&mut done)?;
        a.ret()?;
        Ok(())
    });
    let path = program.record(CODE, state(40), machine(), 0);
    assert_eq!(path.steps.len(), 9, "the call, and four times f up to its branch and f's own call");
    assert_eq!(path.steps[8].next, path.steps[0].next);
    check_trace(program, CODE, TraceShape::Linear, 0);
}

/// A loop one of whose parts stands behind it, and an inner loop that it executes if rcx is not 0.
fn a_part_behind() -> Program {
    Program::assemble(|a| {
        let (mut head, mut middle, mut behind) =
            (a.create_label(), a.create_label(), a.create_label());
        let mut inner = a.create_label();
        a.set_label(&mut head)?;
        a.test(rsi, 1)?;
        a.jne(behind)?;
        a.add(rax, rsi)?;
        a.set_label(&mut middle)?;
        a.dec(rsi)?;
        a.jg(head)?;
        a.syscall()?;
        a.set_label(&mut behind)?;
        a.mov(rdx, rcx)?;
        a.set_label(&mut inner)?;
        a.lea(rax, qword_ptr(rax * 8 + 5))?;
        a.sub(rdx, 1)?;
        a.jg(inner)?;
        a.jmp(middle)
    })
}

#[test]
fn a_loop_with_a_part_behind_it_comes_round() {
    let mut program = a_part_behind();
    let record = |rounds: u64, program: &mut Program| {
        let mut state = state(5);
        state.gpr[1] = rounds;
        program.follow((CODE, HeadKind::Other), state, machine(), 0, &[])
    };
    let (path, end) = record(0, &mut program);
    assert_eq!((path.shape, end), (TraceShape::Loop, EndReason::Cycle));
    assert_eq!(path.steps.len(), 4, "head, behind, the jump back, middle");
    let version = build::build(&path, "t1", Context::default(), &DefaultPolicy::default());
    let version = version.expect("a loop").version;
    for n in 0..9 {
        let checked = check(&mut program, &version, &state(n), &machine(), Limits::default());
        assert!(matches!(checked, Ok(Checked::Compared { .. })), "n = {n}: {checked:?}");
    }
    let (path, end) = record(3, &mut program);
    assert_eq!((path.shape, end), (TraceShape::Linear, EndReason::OtherHead));
    assert_eq!(path.steps.len(), 2, "up to the branch of the inner loop, round which it goes");
    check_trace(program, CODE, TraceShape::Linear, 0);
}

#[test]
fn several_executions_of_a_function_become_one_trace() {
    // f is Fibonacci's: of rsi, in rax.
    let mut program = Program::assemble(|a| {
        let (mut f, mut done) = (a.create_label(), a.create_label());
        a.call(f)?;
        a.syscall()?;
        a.set_label(&mut f)?;
        a.mov(rax, rsi)?;
        a.cmp(rsi, 2)?;
        a.jb(done)?;
        a.push(rsi)?;
        a.dec(rsi)?;
        a.call(f)?;
        a.pop(rsi)?;
        a.push(rax)?;
        a.sub(rsi, 2)?;
        a.call(f)?;
        a.pop(rcx)?;
        a.add(rax, rcx)?;
        a.set_label(&mut done)?;
        a.ret()
    });
    let (f, caller) = (CODE + 7, CODE + 5);
    let mut machine = machine();
    machine.write(STACK, &caller.to_le_bytes());
    let mut record = |n: u64| {
        let (path, end) =
            program.follow((f, HeadKind::Function), state(n), machine.clone(), 0, &[]);
        assert_eq!((path.shape, end), (TraceShape::Linear, EndReason::Return), "n = {n}");
        path
    };
    let mut path = record(3);
    path.others = [0, 4, 2].map(|n| record(n).steps).to_vec();
    let context = Context { facts: vec![Fact::PrivateMemory] };
    let built = build::build(&path, "t1", context, &DefaultPolicy::default()).expect("a tree");
    let mut version = built.version;
    for _ in 0..2 {
        assert_valid(&version);
        let exits = version.blocks.iter().filter_map(|block| match block.term {
            Term::Exit(anchor) => Some(version.anchors[anchor.index()].passes),
            _ => None,
        });
        let mut passes: Vec<u32> = exits.collect();
        passes.sort_unstable();
        assert_eq!(passes, [0, 2, 4, 8], "calls of f within f: {version}");
        for n in 0..9 {
            let checked = check(&mut program, &version, &state(n), &machine, Limits::default());
            assert!(matches!(checked, Ok(Checked::Compared { .. })), "n = {n}: {checked:?}");
        }
        optimise(&mut version, &OptOptions::default());
        assert_eq!(normalise(&mut version), Some(Shape::Tree));
    }
}

#[test]
fn an_indirect_call_is_guarded_behind_its_push() {
    let program = Program::assemble(|a| {
        let (mut head, mut callee) = (a.create_label(), a.create_label());
        a.set_label(&mut head)?;
        a.mov(rbx, CODE + 0x20)?;
        a.call(rbx)?;
        a.dec(rsi)?;
        a.jg(head)?;
        a.syscall()?;
        for _ in 0..(0x20 - 20) {
            a.nop()?;
        }
        a.set_label(&mut callee)?;
        a.inc(rax)?;
        a.ret()
    });
    let version = check_trace(program, CODE, TraceShape::Loop, 0);
    let computed: Vec<_> =
        version.anchors.iter().filter(|a| a.target.as_const().is_none()).map(|a| a.after).collect();
    assert_eq!(computed, [Some(CODE + 0x22)], "{version}");
}

#[test]
fn a_linear_trace_ends_before_the_system_call() {
    let program = Program::assemble(|a| {
        a.lea(rax, ptr(rsi + rsi * 2))?;
        a.test(rax, rax)?;
        a.setns(al)?;
        a.syscall()
    });
    let version = check_trace(program, CODE, TraceShape::Linear, 0);
    assert_eq!(version.blocks.len(), 1);
}

#[test]
fn a_stable_shift_count_is_assumed_at_entry() {
    let program = Program::assemble(|a| {
        let mut head = a.create_label();
        a.set_label(&mut head)?;
        a.mov(rax, rsi)?;
        a.shl(rax, cl)?;
        a.add(rbx, rax)?;
        a.dec(rsi)?;
        a.jg(head)?;
        a.syscall()
    });
    let version = check_trace(program, CODE, TraceShape::Loop, 1 << 1);
    assert!(version.blocks[0].insts.iter().any(|i| i.op == dynasour_ir::Op::Assume), "{version}");
}

/// What the exit says that leads to a trace need not be assumed, and is a constant from the start.
#[test]
fn a_register_that_the_context_knows_is_a_constant() {
    let mut program = Program::assemble(|a| {
        a.mov(rax, rsi)?;
        a.shl(rax, cl)?;
        a.add(rbx, rax)?;
        a.syscall()
    });
    let path = program.record(CODE, state(5), machine(), 1 << 1);
    let context = Context { facts: vec![Fact::RegEquals(Gpr::RCX, 5), Fact::PrivateMemory] };
    let version = build::build(&path, "t1", context, &DefaultPolicy::default())
        .expect("the path can be built")
        .version;
    assert_valid(&version);
    let insts = || version.blocks.iter().flat_map(|block| &block.insts);
    assert!(insts().all(|i| i.op != dynasour_ir::Op::Assume), "{version}");
    let count = version.blocks[0].params[Gpr::RCX.number()];
    assert!(insts().all(|i| !i.args.contains(&count.into())), "{version}");
    let compared = |n| check(&mut program, &version, &state(n), &machine(), Limits::default());
    let [known, other] = [5, 6].map(compared);
    assert!(matches!(known, Ok(Checked::Compared { .. })), "{version}");
    assert!(matches!(other, Ok(Checked::ContextFails)), "{version}");
}

#[test]
fn a_restartable_instruction_has_an_anchor_at_its_own_pc() {
    let mut program = Program::assemble(|a| {
        a.mov(rax, qword_ptr(rdi))?;
        a.rep().movsb()?;
        a.syscall()
    });
    let block = program.lifted(CODE).expect("a block");
    let path = Path {
        head: CODE,
        shape: TraceShape::Linear,
        steps: vec![Step { block, next: CODE, observed: None }],
        stable: Vec::new(),
        guest: None,
        entry: Box::default(),
        others: Vec::new(),
        runs: None,
    };
    let version = build::build(&path, "t1", Context::default(), &DefaultPolicy::default())
        .expect("the path is built")
        .version;
    let restartable = |i: &&Inst| {
        i.native.is_some_and(|n| version.natives[n.index()].effects.contains(Effects::RESTARTABLE))
    };
    let copy =
        version.blocks[0].insts.iter().find(restartable).expect("the native is in the trace");
    let anchor = &version.anchors[copy.anchor.expect("it may fault").index()];
    assert_eq!(anchor.target, Operand::Const(CODE + 3), "{version}");
}

#[test]
fn the_trace_of_a_function_ends_where_it_returns() {
    let mut program = Program::assemble(|a| {
        a.add(rax, 1)?;
        a.ret()
    });
    let mut machine = machine();
    machine.write(STACK, &(CODE + 0x100).to_le_bytes());
    let (path, end) = program.follow((CODE, HeadKind::Function), state(5), machine, 0, &[]);
    assert_eq!((path.shape, end), (TraceShape::Linear, EndReason::Return));
}

#[test]
fn calls_are_followed_into_functions_that_have_a_loop_of_their_own() {
    let mut program = Program::assemble(|a| {
        let mut function = a.create_label();
        let mut head = a.create_label();
        a.set_label(&mut head)?;
        a.call(function)?;
        a.sub(rsi, 1)?;
        a.jnz(head)?;
        a.syscall()?;
        a.set_label(&mut function)?;
        a.add(rax, 1)?;
        a.ret()
    });
    let function = CODE + 5 + 4 + 2 + 2;
    let kinds = [(function, TargetKind::Loop)];
    let (path, end) = program.follow((CODE, HeadKind::Other), state(5), machine(), 0, &kinds);
    assert_eq!((path.shape, end, path.steps.len()), (TraceShape::Loop, EndReason::Cycle, 3));
}

#[test]
fn what_an_exit_leads_to_goes_back_to_the_loop_if_that_is_near() {
    let mut program = Program::assemble(|a| {
        let (mut head, mut body, mut exit) = (a.create_label(), a.create_label(), a.create_label());
        a.set_label(&mut head)?;
        a.add(rbx, 1)?;
        a.jnz(exit)?;
        a.set_label(&mut body)?;
        a.add(rcx, 1)?;
        a.jnz(head)?;
        a.set_label(&mut exit)?;
        a.add(rdx, 1)?;
        a.jnz(body)
    });
    let exit = CODE + 4 + 2 + 4 + 2;
    let mut follow = |kind, kinds: &[(u64, TargetKind)]| {
        let (path, end) = program.follow((exit, kind), state(5), machine(), 0, kinds);
        assert_eq!((path.shape, end), (TraceShape::Linear, EndReason::OtherHead));
        path.steps.len()
    };
    assert_eq!(follow(HeadKind::Exit, &[(CODE, TargetKind::Loop)]), 2, "home");
    assert_eq!(follow(HeadKind::Exit, &[]), 1, "there is no loop");
    assert_eq!(follow(HeadKind::Other, &[(CODE, TargetKind::Loop)]), 1, "it begins at a head");
}

#[test]
fn a_trace_goes_through_a_dispatch_loop_up_to_its_indirect_jump() {
    let mut program = Program::assemble(|a| {
        let mut dispatch = a.create_label();
        a.set_label(&mut dispatch)?;
        a.add(rdi, 8)?;
        a.jmp(rax)?; // the handler below
        a.add(rsi, 1)?;
        a.jmp(dispatch)
    });
    let handler = CODE + 4 + 2;
    let mut start = state(5);
    start.gpr[0] = handler;
    let target = |kind| [(CODE, kind)];
    let (path, end) = program.follow(
        (handler, HeadKind::Other),
        start.clone(),
        machine(),
        0,
        &target(TargetKind::Loop),
    );
    assert_eq!((path.steps.len(), end), (1, EndReason::OtherHead));
    let (path, end) = program.follow(
        (handler + 4, HeadKind::Other),
        start,
        machine(),
        0,
        &target(TargetKind::Dispatch),
    );
    assert_eq!((path.steps.len(), end, path.shape), (2, EndReason::Dispatch, TraceShape::Linear));
    assert!(path.jumps_indirectly());
}

/// Builds the trace of the iterations from `head` in the states that begin at these words of the data,
/// and checks it, before and after optimisation. Returns the number of its blocks.
fn check_iterations(mut program: Program, head: u64, words: &[u64]) -> usize {
    let at = |word: u64| {
        let mut state = state(word);
        state.gpr[7] = DATA + 8 * word;
        state.gpr[6] = 7;
        state
    };
    let mut paths = words.iter().map(|word| program.record(head, at(*word), machine(), 0));
    let mut path = paths.next().expect("a main path");
    path.others = paths.map(|other| other.steps).collect();
    let context = Context { facts: vec![Fact::PrivateMemory] };
    let mut version = build::build(&path, "t1", context, &DefaultPolicy::default())
        .expect("the path can be built")
        .version;
    for pass in ["nothing", "everything"] {
        if pass == "everything" {
            optimise(&mut version, &OptOptions::default());
            assert_eq!(normalise(&mut version), Some(Shape::Tree));
        }
        assert_valid(&version);
        for word in 0..20 {
            let entry = at(word);
            match check(&mut program, &version, &entry, &machine(), Limits::default()) {
                Ok(Checked::Compared { evaluations, .. }) => assert!(evaluations > 0),
                Ok(Checked::ContextFails) => panic!("nothing was checked"),
                Err(mismatch) => panic!("from word {word}, after {pass}: {mismatch}\n{version}"),
            }
        }
    }
    version.blocks.len()
}

/// The words of the data, modulo 100: 0, 77, 54, 31, 8, 85, 62, 39, 16, 93 …
#[test]
fn iterations_that_part_at_branches() {
    let program = Program::assemble(|a| {
        let (mut head, mut odd, mut low, mut join) =
            (a.create_label(), a.create_label(), a.create_label(), a.create_label());
        a.set_label(&mut head)?;
        a.mov(rax, qword_ptr(rdi))?;
        a.add(rdi, 8)?;
        a.mov(qword_ptr(rsp - 8), rdx)?;
        a.test(rax, 1)?;
        a.jne(odd)?;
        a.add(rdx, rax)?;
        a.cmp(rax, 20)?;
        a.jb(low)?;
        a.xor(rdx, qword_ptr(rsp - 8))?;
        a.jmp(join)?;
        a.set_label(&mut low)?;
        a.add(qword_ptr(rsp - 16), rax)?;
        a.jmp(join)?;
        a.set_label(&mut odd)?;
        a.imul_3(rdx, rdx, 3)?;
        a.set_label(&mut join)?;
        a.dec(rsi)?;
        a.jne(head)?;
        a.syscall()
    });
    // Even and not low; odd; even and low.
    assert_eq!(check_iterations(program, CODE, &[2, 1, 0]), 6);
}

#[test]
fn iterations_that_part_at_an_indirect_jump() {
    let program = Program::assemble(|a| {
        let (mut head, mut join) = (a.create_label(), a.create_label());
        let mut cases = [a.create_label(), a.create_label(), a.create_label()];
        let (mut second, mut third) = (a.create_label(), a.create_label());
        a.set_label(&mut head)?;
        a.mov(rax, qword_ptr(rdi))?;
        a.add(rdi, 8)?;
        a.lea(rbx, ptr(cases[0]))?;
        a.test(rax, 1)?;
        a.je(second)?;
        a.lea(rbx, ptr(cases[1]))?;
        a.set_label(&mut second)?;
        a.cmp(rax, 8)?;
        a.jne(third)?;
        a.lea(rbx, ptr(cases[2]))?;
        a.set_label(&mut third)?;
        a.lea(rbp, qword_ptr(rbx))?;
        a.jmp(rbp)?;
        a.set_label(&mut cases[0])?;
        a.add(rdx, rax)?;
        a.jmp(join)?;
        a.set_label(&mut cases[1])?;
        a.xor(rdx, rax)?;
        a.jmp(join)?;
        a.set_label(&mut cases[2])?;
        a.neg(rdx)?;
        a.set_label(&mut join)?;
        a.dec(rsi)?;
        a.jne(head)?;
        a.syscall()
    });
    // The branches before the jump decide where it goes.
    assert_eq!(check_iterations(program, CODE, &[0, 1, 4]), 6);
    let program = Program::assemble(|a| {
        let mut head = a.create_label();
        let mut cases = [a.create_label(), a.create_label(), a.create_label()];
        let mut join = a.create_label();
        a.set_label(&mut head)?;
        a.mov(rax, qword_ptr(rdi))?;
        a.add(rdi, 8)?;
        a.mov(rcx, rax)?;
        a.and(rcx, 3)?;
        a.shl(rcx, 4)?;
        a.lea(rbx, ptr(cases[0]))?;
        a.add(rbx, rcx)?;
        a.jmp(rbx)?;
        // Sixteen bytes each; one of four is the second case again.
        for (n, case) in cases.iter_mut().enumerate() {
            a.set_label(case)?;
            a.add(rdx, n as i32 + 1000)?;
            a.jmp(join)?;
            a.nops_with_size(16 - 7 - 2)?;
        }
        a.xor(rdx, rax)?;
        a.set_label(&mut join)?;
        a.dec(rsi)?;
        a.jne(head)?;
        a.syscall()
    });
    assert!(check_iterations(program, CODE, &[0, 1, 2]) >= 6);
}

/// An iteration that ends where another one goes on cannot be told from it: it is left out.
#[test]
fn an_iteration_that_is_the_beginning_of_another_is_left_out() {
    let mut program = Program::assemble(|a| {
        let (mut head, mut odd) = (a.create_label(), a.create_label());
        a.set_label(&mut head)?;
        a.add(rax, qword_ptr(rdi))?;
        a.test(rax, 1)?;
        a.jne(odd)?;
        a.add(rdi, 8)?;
        a.set_label(&mut odd)?;
        a.dec(rsi)?;
        a.jne(head)?;
        a.syscall()
    });
    let mut path = program.record(CODE, state(5), machine(), 0);
    assert!(path.shape == TraceShape::Loop && path.steps.len() > 1);
    path.others = vec![path.steps[..path.steps.len() - 1].to_vec()];
    let version = build::build(&path, "t1", Context::default(), &DefaultPolicy::default())
        .expect("the path is built")
        .version;
    assert_valid(&version);
    assert_eq!(version.blocks.len(), 2);
}
