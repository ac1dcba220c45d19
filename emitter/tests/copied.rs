//! Copied blocks: where they stand, and how fragments go on in them.

mod harness;

use dynasour_emitter::blocks::{Copied, Counted, HeadCounts};
use dynasour_emitter::{Emitter, ExitReason, StubTarget, set_gs};
use dynasour_guest::decode::Bytes;
use dynasour_ir::Version;
use dynasour_ir::eval::State;
use dynasour_ir::text::version;
use harness::Bench;

const START: u64 = 0x10_0000;

fn entry(emitter: &mut Emitter, pc: u64, bytes: &[u8]) -> u64 {
    match emitter.copy(pc, &Bytes { start: pc, bytes }).expect("room") {
        Copied::Entry(entry) => entry,
        other => panic!("{pc:#x}: {other:?}"),
    }
}

/// A block that goes on at its own start stands where its line delivers it fastest, whatever was
/// copied before it.
#[test]
fn short_loops_stand_where_they_are_fast() {
    // Twelve no-operations of four bytes, `dec eax; jne` back, and an instruction of the runtime's.
    let mut looping = [0x0f, 0x1f, 0x40, 0].repeat(12);
    looping.extend([0xff, 0xc8, 0x75, (-52i8) as u8, 0x0f, 0x05]);
    looping.resize(looping.len() + 32, 0xcc);
    let mut bench = Bench::new();
    let offsets: Vec<u64> = (0..20u8)
        .map(|n| {
            // `inc rax`, a few times, and the runtime's: of another length each time.
            let mut other = [0x48, 0xff, 0xc0].repeat(usize::from(n % 7) + 1);
            other.extend([0x0f, 0x05]);
            other.resize(other.len() + 32, 0xcc);
            let pc = START + 0x1000 * u64::from(n);
            entry(&mut bench.emitter, pc + 0x800, &other);
            entry(&mut bench.emitter, pc, &looping) % 64
        })
        .collect();
    // At a line's start there would be one instruction too many in it.
    assert!(offsets.iter().all(|offset| *offset == offsets[0] && *offset != 0), "{offsets:?}");
}

/// What leads to the middle of a patch executes the displaced instructions that are left, and is never
/// led in place, where it would trap.
#[test]
fn nothing_leads_in_place_among_displaced_instructions() {
    // `test r8d, r8d; jne +9; nop`, and the same again.
    let half = [0x45, 0x85, 0xc0, 0x0f, 0x85, 9, 0, 0, 0, 0x90];
    let bytes = [&half[..], &half, &[0xcc; 32]].concat();
    let code = Bytes { start: START, bytes: &bytes };
    let mut bench = Bench::in_place();
    let first = |emitter: &mut Emitter, pc: u64| {
        let entry = entry(emitter, pc, &bytes[(pc - START) as usize..]);
        // SAFETY: at least this many bytes of code stand there.
        unsafe { std::slice::from_raw_parts(entry as *const u8, 5).to_vec() }
    };
    for pc in [START, START + 3] {
        assert_eq!(first(&mut bench.emitter, pc)[0], 0xe9, "its way out");
    }
    let entrance = bench.emitter.entrance(START, START + 9, &code).expect("room");
    assert!(entrance.is_some());
    assert_eq!(first(&mut bench.emitter, START)[..3], half[..3], "displaced");
    assert_ne!(first(&mut bench.emitter, START + 3)[0], 0xe9, "the branch alone");
    assert_eq!(first(&mut bench.emitter, START + 9)[0], 0xe9, "behind the patch, in place");
}

/// Fails its guard unless rdx is 7, before anything has been done; more values are live at once
/// than registers are free.
fn guarded(pc: u64) -> Version {
    let values: String =
        (0..8).map(|i| format!("v{} = mul.i64 v{}, v1\n", 10 + i, 9 + i)).collect();
    let sums: String =
        (0..8).map(|i| format!("v{} = xor.i64 v{}, v{}\n", 40 + i, 39 + i, 17 - i)).collect();
    let text = format!(
        "region {pc:#x} {{ version t1 {{
    anchor a0 = base.{pc:#x} []
    anchor a1 = base.0x9000 [rax = v47]
    b0(v0: i64 = rax, v1: i64 = rdx):
      v2 = eq.i64 v1, 7
      assume v2 else a0
      v9 = add.i64 v0, v1
      {values} v39 = add.i64 v0, v1
      {sums} exit a1
  }} }}"
    );
    version(&text).expect("a version")
}

/// A fragment's exit to where it began goes on in the block there for good, though all other links
/// lead to the fragment.
#[test]
fn an_exit_without_progress_never_leads_back() {
    // `inc rax; jne +0x100`
    let mut code = vec![0x48, 0xff, 0xc0, 0x0f, 0x85, 0, 1, 0, 0];
    code.resize(32, 0xcc);
    let mut bench = Bench::new();
    let fragment = bench.compile(&guarded(START));
    entry(&mut bench.emitter, START, &code);
    let mut state = State::default();
    (state.gpr[0], state.gpr[2]) = (40, 6);
    let left = bench.run(fragment, &state);
    assert_eq!((left.pc, left.state.gpr[0]), (START, 40));
    bench.emitter.resolve_exit(left.deopt.exit, StubTarget::Block).expect("a stub");
    bench.emitter.lead_to(fragment);
    (bench.ctx.gpr, bench.ctx.rflags) = (state.gpr, 0x202);
    // SAFETY: the code only computes in registers.
    let left = unsafe { bench.emitter.enter(&mut *bench.ctx, fragment) }.expect("it exists");
    let ExitReason::Block(link) = left else { panic!("{left:?}") };
    assert_eq!(
        (bench.emitter.copy_exit(link).map(|(pc, _)| pc), bench.ctx.gpr[0]),
        (Some(START + 0x109), 41)
    );
}

/// Where there have been many calls, everything is dropped once, and calls are the host's from then
/// on.
#[test]
fn many_places_to_return_to_make_returns_go_by_the_stack() {
    const CALLS: u64 = 40_000;
    // `call` to the last byte, a `ret`, again and again.
    let end = START + 5 * CALLS;
    let calls = (0..CALLS).flat_map(|n| {
        let behind = START + 5 * (n + 1);
        std::iter::once(0xe8).chain(((end - behind) as u32).to_le_bytes())
    });
    let mut code: Vec<u8> = calls.chain([0xc3]).collect();
    code.resize(code.len() + 32, 0xcc);
    let code = Bytes { start: START, bytes: &code };
    let mut bench = Bench::with_cache(16 << 20);
    let emitter = &mut bench.emitter;
    let first = |emitter: &Emitter, entry: u64| emitter.cache().read(entry, 1)[0];
    let Ok(Copied::Entry(pushes)) = emitter.copy(START, &code) else { panic!("it can be copied") };
    assert_eq!(first(emitter, pushes), 0x68, "push");
    let full =
        (1..CALLS).find(|n| emitter.copy(START + 5 * n, &code).is_err_and(|error| error.is_full()));
    assert!(full.is_some_and(|n| n > 1000), "{full:?}");
    emitter.flush_all();
    let Ok(Copied::Entry(calls)) = emitter.copy(START, &code) else { panic!("it can be copied") };
    assert_eq!(first(emitter, calls), 0x65, "what keeps the landing begins with a store");
    assert!((0..CALLS).all(|n| emitter.copy(START + 5 * n, &code).is_ok()), "this is done once");
}

/// Runs from the copy at `pc`, rax being `rax`; how it left, and rax then.
fn run(bench: &mut Bench, pc: u64, code: &[u8], rax: u64) -> (ExitReason, u64) {
    let entry = entry(&mut bench.emitter, pc, code);
    bench.ctx.gpr[0] = rax;
    // SAFETY: this thread's context; the guest counts in a register.
    let left = unsafe {
        set_gs(&mut *bench.ctx);
        bench.emitter.enter_copy(&mut *bench.ctx, entry)
    };
    (left, bench.ctx.gpr[0])
}

#[test]
fn heads_are_counted_until_told_otherwise_and_again() {
    // `dec eax; jne` back, and an instruction of the runtime's.
    let mut looping = vec![0xff, 0xc8, 0x75, 0xfc, 0x0f, 0x05];
    looping.resize(40, 0xcc);
    let mut bench = Bench::new();
    bench.emitter.count_heads(HeadCounts { threshold: 10, functions: |_| false });
    let (left, rax) = run(&mut bench, START, &looping, 100);
    let ExitReason::Hot(counter) = left else { panic!("{left:?}") };
    assert_eq!(rax, 100 - 9, "it leaves before the tenth round");
    let count = bench.emitter.counted(counter).expect("a counter");
    assert_eq!((count.counts, count.executions), (Counted::Head(START), 10));
    assert!(bench.emitter.pause_counting(START) && !bench.emitter.pause_counting(START));
    let (left, rax) = run(&mut bench, START, &looping, rax);
    assert!(matches!(left, ExitReason::Block(_)) && rax == 0, "{left:?} {rax}");
    assert!(bench.emitter.count_again(START, 5));
    assert_eq!(run(&mut bench, START, &looping, 100), (ExitReason::Hot(counter), 96));
    assert_eq!(bench.emitter.counted(counter).map(|count| count.executions), Some(5));
    // What is no head, or counted already, stays as it is.
    assert!(!bench.emitter.count_again(START + 2, 5));
    // Until it is set it leaves each time, and has hardly counted anything.
    assert_eq!(run(&mut bench, START, &looping, 96), (ExitReason::Hot(counter), 96));
    bench.emitter.set_counter(counter, 7);
    assert_eq!(bench.emitter.counted(counter).map(|count| count.executions), Some(1));
    assert!(!bench.emitter.count_again(START, 1));
    assert_eq!(run(&mut bench, START, &looping, 100), (ExitReason::Hot(counter), 94));
}

#[test]
fn functions_are_heads_if_they_may_be() {
    // `call` to the next but one instruction; the runtime's; `dec eax; jmp` to the runtime's.
    let mut calling = vec![0xe8, 2, 0, 0, 0, 0x0f, 0x05, 0xff, 0xc8, 0xeb, 0xfa];
    calling.resize(48, 0xcc);
    for (functions, is_head) in [((|_| false) as fn(u64) -> bool, false), (|_| true, true)] {
        let mut stack = [0u64; 16];
        let mut bench = Bench::new();
        bench.emitter.count_heads(HeadCounts { threshold: 3, functions });
        let function = START + 7;
        let mut lefts = (0..4).map(|n| {
            bench.ctx.gpr[4] = stack.as_mut_ptr_range().end as u64 - 8;
            let code = [&calling[..7], &calling[7..]].concat();
            if n == 0 {
                entry(&mut bench.emitter, function, &calling[7..]);
            }
            run(&mut bench, START, &code, 100).0
        });
        assert_eq!(lefts.any(|left| matches!(left, ExitReason::Hot(_))), is_head);
        drop(lefts);
        assert!(bench.emitter.is_called(function));
    }
}
