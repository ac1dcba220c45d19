//! Recordings through the dispatch loop of an interpreter follow the loop of the interpreted
//! program.

use dynasour_guest::lift::{Bytes, LiftedBlock, MAX_BLOCK, lift_block};
use dynasour_ir::eval::check::{Checked, Code, Limits, check};
use dynasour_ir::eval::{Leave, Machine, ModelMachine, NoHooks, State, run};
use dynasour_ir::opt::{OptOptions, optimise};
use dynasour_ir::predict::Registers;
use dynasour_ir::verify::assert_valid;
use dynasour_ir::{Context, Fact, Op, Term, Version};
use dynasour_tracer::guests::Green;
use dynasour_tracer::{
    DefaultPolicy, DispatchHeads, EndReason, HeadKind, NextBlock, Path, Recorder, Recording,
    Selected, Surroundings, TargetKind, TraceSelector, TraceShape, build,
};
use iced_x86::code_asm::*;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

const CODE: u64 = 0x40_0000;
const PROGRAM: u64 = 0x10_0000;
const TABLE: u64 = 0x10_3000;
const STACK: u64 = 0x7f_0000;

/// An interpreter: rbx is its program counter, rdi its accumulator, rsi a count. Opcodes: 0 adds 3,
/// 1 doubles, 2 goes back to the start of the program while the count lasts, 3 leaves, 4 adds the byte
/// behind it, 5 goes to the place whose distance from r8, the start of the program, is behind it, 6 returns:
/// goes to the place in the frame r9, and swaps the frames r9 and r10.
struct Interpreter {
    bytes: Vec<u8>,
    head: u64,
    machine: ModelMachine,
}

impl Interpreter {
    fn new(program: &[u8]) -> Interpreter {
        let mut a = CodeAssembler::new(64).unwrap();
        let [
            mut head,
            mut add_three,
            mut double,
            mut again,
            mut leave,
            mut add,
            mut jump,
            mut back,
        ] = std::array::from_fn(|_| a.create_label());
        (|| {
            a.set_label(&mut head)?;
            a.movzx(eax, byte_ptr(rbx))?;
            a.add(rbx, 1)?;
            a.jmp(qword_ptr(rdx + rax * 8))?;
            a.set_label(&mut add_three)?;
            a.add(rdi, 3)?;
            a.jmp(head)?;
            a.set_label(&mut double)?;
            a.add(rdi, rdi)?;
            a.jmp(head)?;
            a.set_label(&mut again)?;
            a.sub(rsi, 1)?;
            a.mov(rcx, PROGRAM)?;
            a.cmovnz(rbx, rcx)?;
            a.jmp(head)?;
            a.set_label(&mut add)?;
            a.movzx(eax, byte_ptr(rbx))?;
            a.add(rbx, 1)?;
            a.add(rdi, rax)?;
            a.jmp(head)?;
            a.set_label(&mut jump)?;
            a.movzx(eax, byte_ptr(rbx))?;
            a.lea(rbx, qword_ptr(r8 + rax))?;
            a.jmp(head)?;
            a.set_label(&mut back)?;
            a.mov(rbx, qword_ptr(r9 + 8))?;
            a.xchg(r9, r10)?;
            a.jmp(head)?;
            a.set_label(&mut leave)?;
            a.syscall()
        })()
        .unwrap();
        let options = iced_x86::BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
        let result = a.assemble_options(CODE, options).unwrap();
        let at = |l: &CodeLabel| result.label_ip(l).unwrap();
        let mut machine = ModelMachine::new();
        machine.map(PROGRAM, 0x4000);
        machine.map(STACK - 0x1000, 0x2000);
        machine.write(PROGRAM, program);
        for (i, l) in
            [&add_three, &double, &again, &leave, &add, &jump, &back].into_iter().enumerate()
        {
            machine.write(TABLE + 8 * i as u64, &at(l).to_le_bytes());
        }
        let head = at(&head);
        Interpreter { bytes: result.inner.code_buffer, head, machine }
    }

    fn block(&self, pc: u64) -> Arc<LiftedBlock> {
        Arc::new(lift_block(pc, &Bytes { start: CODE, bytes: &self.bytes }, MAX_BLOCK))
    }

    /// Records from the head, which is known as a dispatch head, until the recorder is done.
    fn record(
        &mut self,
        state: &mut State,
        heads: &mut DispatchHeads,
    ) -> Result<(Path, EndReason), String> {
        self.record_from(state, heads, TargetKind::Dispatch)
    }

    /// Records from the head, of which this is known, until the recorder is done.
    fn record_from(
        &mut self,
        state: &mut State,
        heads: &mut DispatchHeads,
        known: TargetKind,
    ) -> Result<(Path, EndReason), String> {
        let policy = DefaultPolicy::default();
        let entry = Registers { gpr: state.gpr, ..Registers::default() };
        let mut recorder = Recorder::new(self.head, HeadKind::Other, Vec::new(), entry, &policy);
        let mut block = self.block(self.head);
        loop {
            let Some(following) = self.execute(&block, state) else {
                return Err(format!("{:?}", recorder.runtime_instruction(&block)));
            };
            let next = following.pc;
            let target = if next == self.head { known } else { TargetKind::Ordinary };
            let recording = self.around(state, |around| {
                let recording = recorder.step_through(&block, next, target, heads, around);
                recorder.prepare(&following, around);
                recording
            });
            match recording {
                Recording::Continue => {}
                Recording::Done(path, end) => return Ok((path, end)),
                Recording::Aborted(reason) => return Err(format!("{reason:?}")),
            }
            block = following;
        }
    }

    /// Starts a recording at the block where the interpreter is, and goes on until the selector wants something.
    fn select(&mut self, state: &mut State, selector: &mut TraceSelector, pc: u64) -> Selected {
        let mut block = self.block(pc);
        self.around(state, |around| {
            selector.start(Arc::clone(&block), HeadKind::Other, Vec::new(), around);
        });
        loop {
            let Some(following) = self.execute(&block, state) else { panic!("it has left") };
            let lifted = || Arc::clone(&following);
            let (pc, target, refused) = (following.pc, TargetKind::Ordinary, None);
            let to = NextBlock { pc, target, refused, lifted: &lifted };
            let selected = self.around(state, |around| selector.executes(&to, around));
            if let Some(selected) = selected {
                return selected;
            }
            block = following;
        }
    }

    /// Executes a block; the next one, if it does not leave the interpreter.
    fn execute(&mut self, block: &LiftedBlock, state: &mut State) -> Option<Arc<LiftedBlock>> {
        match run(&block.version, state, &mut self.machine, &mut NoHooks, &mut 10_000).unwrap() {
            Leave::Goto(next) => Some(self.block(next)),
            _ => None,
        }
    }

    /// Calls `f` with this state.
    fn around<R>(&mut self, state: &State, f: impl FnOnce(&Surroundings<'_>) -> R) -> R {
        let machine = RefCell::new(&mut self.machine);
        let read = |address: u64, size: u32| machine.borrow_mut().load(address, size).ok();
        let (gpr, rflags) = (&state.gpr, state.flags);
        f(&Surroundings { gpr, rflags, segments: [0; 2], read: &read })
    }
}

fn state() -> State {
    let mut s = State::default();
    s.gpr[3] = PROGRAM;
    s.gpr[2] = TABLE;
    s.gpr[6] = 1000;
    s.gpr[4] = STACK;
    s.gpr[8] = PROGRAM;
    s
}

#[test]
fn the_loop_of_the_program_becomes_a_trace_without_dispatches() {
    let mut interpreter = Interpreter::new(&[0, 0, 1, 0, 2, 3]);
    let mut heads = DispatchHeads::default();
    let (path, end) = interpreter.record(&mut state(), &mut heads).unwrap();
    assert_eq!(
        (end, path.shape, path.head),
        (EndReason::GuestLoop, TraceShape::Loop, interpreter.head)
    );
    // Five instructions of the interpreted program: a dispatch and a handler for each.
    assert_eq!(path.steps.len(), 10);
    let guest = path.guest.as_ref().unwrap();
    assert!(guest.registers.iter().any(|(g, _)| g.number() == 3), "{guest:?}");
    let mut version =
        build::build(&path, "t1", Context::default(), &DefaultPolicy::default()).unwrap().version;
    assert_valid(&version);
    optimise(&mut version, &OptOptions::default());
    assert_valid(&version);
    let body = &version.blocks.last().unwrap().insts;
    // Loaded values are compared with constants; no target is computed.
    let loads: Vec<_> = body.iter().filter(|i| i.op == Op::Load).collect();
    assert!(loads.iter().all(|l| l.args[0].as_const().is_some()), "{version}");
    // Each iteration assumes five opcodes, three (or five) table entries, and the direction of
    // `again`.
    let guards = body.iter().filter(|i| i.op == Op::Assume).count();
    assert!(guards <= 11, "{guards} guards\n{version}");
}

/// The first dispatches do not depend on r8, from which the loop's jump counts.
#[test]
fn registers_of_a_jump_are_assumed() {
    let mut interpreter = Interpreter::new(&[0, 0, 0, 5, 6, 3, 1, 2]);
    let (path, end) = interpreter.record(&mut state(), &mut DispatchHeads::default()).unwrap();
    assert_eq!((end, path.steps.len()), (EndReason::GuestLoop, 12));
    let registers = &path.guest.as_ref().unwrap().registers;
    assert!(
        registers.iter().any(|(g, value)| (g.number(), *value) == (8, PROGRAM)),
        "{registers:x?}"
    );
    let mut version =
        build::build(&path, "t1", Context::default(), &DefaultPolicy::default()).unwrap().version;
    optimise(&mut version, &OptOptions::default());
    assert_valid(&version);
    let body = &version.blocks.last().unwrap().insts;
    let mut loads = body.iter().filter(|i| i.op == Op::Load);
    assert!(loads.all(|l| l.args[0].as_const().is_some()), "{version}");
}

/// Operands of the interpreted program become constants, until the runtime has found that this is too
/// slow.
#[test]
fn operands_are_assumed_until_that_does_not_pay() {
    let mut interpreter = Interpreter::new(&[4, 9, 0, 4, 70, 2, 3]);
    let (mut heads, head) = (DispatchHeads::new(true, true), interpreter.head);
    let mut added = |heads: &mut DispatchHeads| {
        let (path, end) = interpreter.record(&mut state(), heads).unwrap();
        assert_eq!(end, EndReason::GuestLoop);
        let version = build::build(&path, "t1", Context::default(), &DefaultPolicy::default())
            .unwrap()
            .version;
        assert_valid(&version);
        let constants = version.blocks.last().unwrap().insts.iter().filter(|i| i.op == Op::Add);
        let constants: Vec<u64> = constants.filter_map(|i| i.args[1].as_const()).collect();
        heads.fail(head, true);
        [9, 70].map(|operand| constants.contains(&operand))
    };
    assert_eq!(added(&mut heads), [true, true]);
    // One operand has changed: only that is not assumed again.
    heads.undo(head, &[], [PROGRAM + 1]);
    assert_eq!(added(&mut heads), [false, true]);
    assert!(heads.assume_less(head));
    assert_eq!(added(&mut heads), [false, false]);
    assert!(!heads.assume_less(head), "it does already");
}

/// A function of the interpreted program returns to two places, by turns. Told by frames, the loop has both
/// returns; told by positions alone it has one, and a trace of both iterations parts where it returns to.
#[test]
fn iterations_part_at_the_position_that_they_return_to() {
    // 0: add 4, return; 8: add 3, jump 0; 16: double, jump 0.
    let mut program = [3; 24];
    program[..3].copy_from_slice(&[4, 4, 6]);
    program[8..11].copy_from_slice(&[0, 5, 0]);
    program[16..19].copy_from_slice(&[1, 5, 0]);
    let mut interpreter = Interpreter::new(&program);
    let (frames, head) = ([PROGRAM + 0x100, PROGRAM + 0x200], interpreter.head);
    for (frame, place) in frames.into_iter().zip([PROGRAM + 8, PROGRAM + 16]) {
        interpreter.machine.write(frame + 8, &place.to_le_bytes());
    }
    let mut state = state();
    (state.gpr[9], state.gpr[10]) = (frames[0], frames[1]);
    let mut heads = DispatchHeads::new(true, true);
    let (path, end) = interpreter.record(&mut state.clone(), &mut heads).unwrap();
    assert_eq!((end, path.steps.len()), (EndReason::GuestLoop, 16));
    assert!(heads.tell_by_position(head));
    let mut paths = Vec::new();
    for order in [[0, 1], [1, 0]] {
        (state.gpr[9], state.gpr[10]) = (frames[order[0]], frames[order[1]]);
        let (path, end) = interpreter.record(&mut state.clone(), &mut heads).unwrap();
        assert_eq!((end, path.steps.len()), (EndReason::GuestLoop, 8));
        assert!(path.guest.as_ref().unwrap().is_by_position);
        heads.postpone(head);
        paths.push(path);
    }
    assert!(!heads.tell_by_position(head), "it is already");
    let mut path = paths.remove(0);
    path.others = vec![paths.remove(0).steps];
    let mut version =
        build::build(&path, "t1", Context::default(), &DefaultPolicy::default()).unwrap().version;
    assert_valid(&version);
    let parts = |version: &Version| {
        let branches = version.blocks.iter().filter(|b| matches!(b.term, Term::Branch { .. }));
        branches.count()
    };
    assert_eq!(parts(&version), 1, "{version}");
    optimise(&mut version, &OptOptions::default());
    assert_valid(&version);
    assert_eq!(parts(&version), 1, "{version}");
    let (machine, mut program) = (interpreter.machine.clone(), Blocks::of(&interpreter));
    for order in [[0, 1], [1, 0], [0, 0]] {
        (state.gpr[9], state.gpr[10]) = (frames[order[0]], frames[order[1]]);
        match check(&mut program, &version, &state, &machine, Limits::default()) {
            Ok(Checked::Compared { evaluations, .. }) => assert!(evaluations > 0),
            Ok(Checked::ContextFails) => panic!("nothing was checked"),
            Err(mismatch) => panic!("{order:?}: {mismatch}\n{version}"),
        }
    }
}

/// A green in memory is loaded and tested before anything else, on an anchor at the head: what it refuses may go on in
/// another loop of the head.
#[test]
fn greens_in_memory_are_tested_at_the_entry() {
    // 0: add 3, return to 0.
    let mut interpreter = Interpreter::new(&[0, 6, 3]);
    let frame = PROGRAM + 0x100;
    interpreter.machine.write(frame + 8, &PROGRAM.to_le_bytes());
    let mut state = state();
    (state.gpr[9], state.gpr[10]) = (frame, frame);
    let (path, _) = interpreter.record(&mut state, &mut DispatchHeads::new(true, true)).unwrap();
    let guest = path.guest.as_ref().unwrap();
    let slots = guest.greens.iter().filter(|green| matches!(green, Green::Slot(..))).count();
    assert!(slots > 0, "{guest:?}");
    let context = Context { facts: vec![Fact::PrivateMemory] };
    let built = build::build(&path, "t1", context, &DefaultPolicy::default());
    let mut version = built.unwrap().version;
    assert_valid(&version);
    let first = &version.blocks[0].insts;
    let loads = first.iter().filter(|i| i.op == Op::Load).count();
    assert_eq!(loads, slots, "{version}");
    for guard in first.iter().filter(|i| i.op == Op::Assume) {
        let anchor = &version.anchors[guard.anchor.unwrap().0 as usize];
        assert_eq!(anchor.target.as_const(), Some(interpreter.head), "{version}");
    }
    // The address may be no address if the registers differ.
    assert!(!guest.registers.is_empty());
    optimise(&mut version, &OptOptions::default());
    let first = &version.blocks[0].insts;
    let position = |op| first.iter().position(|i| i.op == op);
    assert!(position(Op::Assume) < position(Op::Load) && position(Op::Load).is_some(), "{version}");
}

/// The interpreter's code, block by block.
struct Blocks {
    bytes: Vec<u8>,
    known: HashMap<u64, LiftedBlock>,
}

impl Blocks {
    fn of(interpreter: &Interpreter) -> Blocks {
        Blocks { bytes: interpreter.bytes.clone(), known: HashMap::new() }
    }
}

impl Code for Blocks {
    fn block(&mut self, pc: u64) -> Option<&Version> {
        let inside = (CODE..CODE + self.bytes.len() as u64).contains(&pc);
        let code = Bytes { start: CODE, bytes: &self.bytes };
        let block = || lift_block(pc, &code, MAX_BLOCK);
        inside.then(|| &self.known.entry(pc).or_insert_with(block).version)
    }
}

#[test]
fn a_head_that_is_left_by_an_indirect_jump_is_searched_at_once() {
    let mut interpreter = Interpreter::new(&[0, 0, 1, 0, 2, 3]);
    let mut heads = DispatchHeads::default();
    let (path, end) =
        interpreter.record_from(&mut state(), &mut heads, TargetKind::Ordinary).unwrap();
    assert_eq!((end, path.steps.len()), (EndReason::GuestLoop, 10));
    let registers = path.guest.unwrap().registers;
    assert!(registers.iter().all(|(g, value)| path.entry.gpr[g.number()] == *value));
}

/// The handler `again` jumps to the dispatch that all handlers share. A recording that begins there finds a
/// second loop nevertheless, once the first one was found at the dispatch.
#[test]
fn more_loops_are_found_at_the_handler_that_closes_one() {
    // Both loops begin at 0. The first one goes to 2, the second one to 0x12.
    let mut program = [3; 0x20];
    program[..6].copy_from_slice(&[5, 2, 0, 1, 0, 2]);
    program[0x12..0x18].copy_from_slice(&[1, 0, 0, 1, 0, 2]);
    let mut interpreter = Interpreter::new(&program);
    let mut selector = TraceSelector::new(Box::new(DefaultPolicy::default()), None, 1);
    let mut state = state();
    let head = interpreter.head;
    let first = match interpreter.select(&mut state, &mut selector, head) {
        Selected::Recorded(path, EndReason::GuestLoop) => path,
        other => panic!("{other:?}"),
    };
    let closing = first.head;
    assert!(first.guest.unwrap().is_closing && closing != head);
    // The interpreted program goes on in the other loop, until it is there, too.
    state.gpr[8] = PROGRAM + 0x10;
    let mut block = interpreter.execute(&interpreter.block(closing), &mut state).unwrap();
    while block.pc != closing {
        block = interpreter.execute(&block, &mut state).unwrap();
    }
    let second = match interpreter.select(&mut state, &mut selector, closing) {
        Selected::Recorded(path, EndReason::GuestLoop) => path,
        other => panic!("{other:?}"),
    };
    assert_eq!((second.head, second.steps.len()), (closing, first.steps.len() + 4));
}

#[test]
fn where_the_search_fails_the_path_ends_as_without_it() {
    // Each iteration of the program has one dispatch: that is an ordinary loop.
    let mut interpreter = Interpreter::new(&[2, 3]);
    let mut heads = DispatchHeads::default();
    let (path, end) =
        interpreter.record_from(&mut state(), &mut heads, TargetKind::Ordinary).unwrap();
    assert_eq!((end, path.shape, path.steps.len()), (EndReason::Cycle, TraceShape::Loop, 2));
    assert!(path.guest.is_none());
}

#[test]
fn a_known_loop_is_where_other_recordings_end() {
    let mut interpreter = Interpreter::new(&[0, 1, 2, 3]);
    let mut heads = DispatchHeads::default();
    let (first, end) = interpreter.record(&mut state(), &mut heads).unwrap();
    assert_eq!(end, EndReason::GuestLoop);
    let (second, end) = interpreter.record(&mut state(), &mut heads).unwrap();
    assert_eq!((end, second.shape), (EndReason::DispatchHead, TraceShape::Linear));
    assert!(second.guest.is_none() && first.guest.is_some());
    // After that trace has been dropped, the loop is found again.
    heads.fail(interpreter.head, true);
    let (_, end) = interpreter.record(&mut state(), &mut heads).unwrap();
    assert_eq!(end, EndReason::GuestLoop);
}

#[test]
fn a_program_without_a_loop_is_given_up() {
    let mut program = vec![0; 0x2800];
    program[0x27ff] = 3;
    let mut interpreter = Interpreter::new(&program);
    let mut heads = DispatchHeads::default();
    for _ in 0..2 {
        assert!(heads.wants(interpreter.head));
        let failed = interpreter.record(&mut state(), &mut heads).unwrap_err();
        assert!(failed.contains("NoGuestLoop"), "{failed}");
    }
    assert!(!heads.wants(interpreter.head));
}
