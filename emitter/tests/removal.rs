//! Copied blocks that are removed one by one: what leads to them leads out, what was written in
//! their place is copied anew, and what they took is used again.

mod harness;

use dynasour_emitter::blocks::Copied;
use dynasour_emitter::{Emitter, ExitReason};
use dynasour_guest::decode::{Bytes, Fetch};
use harness::{Area, Bench};
use std::ops::Range;

/// A caller's page and, on the next one, what it jumps to.
const START: u64 = 0x10_0ff0;
const TARGET: u64 = 0x10_1000;

/// `inc rax; jne TARGET`, and at the target `lea rbx, [rax + n]`, for some `n` `inc rbx`, and an
/// instruction of the runtime's.
fn code(n: u8) -> Vec<u8> {
    let mut code = vec![0x48, 0xff, 0xc0, 0x0f, 0x85, 0, 0, 0, 0];
    let relative = (TARGET - (START + 9)) as u32;
    code[5..].copy_from_slice(&relative.to_le_bytes());
    code.resize((TARGET - START) as usize, 0xcc);
    code.extend([0x48, 0x8d, 0x58, n]);
    if n % 2 == 1 {
        code.extend([0x48, 0xff, 0xc3]);
    }
    // syscall: the runtime's
    code.extend([0x0f, 0x05]);
    code.resize(code.len() + 32, 0xcc);
    code
}

fn entry(emitter: &mut Emitter, pc: u64, code: &dyn Fetch) -> u64 {
    match emitter.copy(pc, code).expect("room") {
        Copied::Entry(entry) => entry,
        other => panic!("{pc:#x}: {other:?}"),
    }
}

/// Runs from `pc` until an instruction of the runtime's, copying what is missing. Returns rbx.
fn run(bench: &mut Bench, pc: u64, code: &dyn Fetch) -> u64 {
    let mut next = entry(&mut bench.emitter, pc, code);
    loop {
        // SAFETY: the code only computes in registers.
        let left = unsafe { bench.emitter.enter_copy(&mut *bench.ctx, next) };
        let ExitReason::Block(link) = left else { panic!("{left:?}") };
        let (pc, _) = bench.emitter.copy_exit(link).expect("a link");
        match bench.emitter.copy(pc, code).expect("room") {
            Copied::Entry(entry) => next = entry,
            _ => return bench.ctx.gpr[3],
        }
    }
}

#[test]
fn what_changes_is_copied_anew_and_takes_no_more_memory() {
    let mut bench = Bench::new();
    let mut used = Vec::new();
    for round in 0..1000u64 {
        let n = (round % 100) as u8;
        let bytes = code(n);
        let code = Bytes { start: START, bytes: &bytes };
        bench.ctx.gpr[0] = round;
        let expected = round + 1 + u64::from(n) + u64::from(n % 2);
        assert_eq!(run(&mut bench, START, &code), expected, "round {round}");
        bench.ctx.gpr[0] = round;
        assert_eq!(run(&mut bench, START, &code), expected, "linked, round {round}");
        // The jump goes now and then; what it leads to each time.
        let range = if round % 10 == 0 { 0..u64::MAX } else { TARGET..TARGET + 1 };
        assert!(bench.emitter.is_copied_from(&range));
        let doomed = bench.emitter.remove_copied(&range);
        assert_eq!(doomed.len(), if round % 10 == 0 { 2 } else { 1 });
        assert!(!bench.emitter.is_copied_from(&(TARGET..TARGET + 1)));
        bench.emitter.reclaim(doomed);
        used.push(bench.emitter.cache().used());
    }
    assert_eq!(used[20], used[999]);
}

/// Everything is also dropped so that blocks are made otherwise: when transfers are to name
/// themselves.
#[test]
fn what_was_doomed_before_blocks_became_different_is_not_reclaimed() {
    let mut bench = Bench::new();
    let bytes = code(0);
    let code = Bytes { start: START, bytes: &bytes };
    run(&mut bench, START, &code);
    let doomed = bench.emitter.remove_copied(&(START..TARGET + 64));
    assert!(!doomed.is_empty());
    assert!(bench.emitter.name_transfers());
    bench.emitter.flush_all();
    // Its indices are nobody's now.
    bench.emitter.reclaim(doomed);
    assert_eq!(run(&mut bench, START, &code), bench.ctx.gpr[0]);
}

#[test]
fn what_was_doomed_before_a_flush_is_not_reclaimed() {
    let mut bench = Bench::new();
    let bytes = code(2);
    let code = Bytes { start: START, bytes: &bytes };
    run(&mut bench, START, &code);
    let doomed = bench.emitter.remove_copied(&(0..u64::MAX));
    bench.emitter.flush_all();
    let first = entry(&mut bench.emitter, START, &code);
    bench.emitter.reclaim(doomed);
    assert_eq!(entry(&mut bench.emitter, START, &code), first);
    assert_ne!(entry(&mut bench.emitter, TARGET, &code), first);
    assert_eq!(run(&mut bench, START, &code), bench.ctx.gpr[0] + 2);
}

/// A thread keeps the landings of calls whose blocks are gone; what is put in their place is never
/// returned to by them.
#[test]
fn landings_are_forgotten_before_their_memory_is_used_again() {
    const SLOTS: u64 = 4096;
    let mut bench = Bench::returning_by_stack();
    // `call TARGET; syscall`, and there `lea rbx, [rax + 2]; ret`.
    let mut bytes = vec![0xe8, 0, 0, 0, 0, 0x0f, 0x05];
    bytes[1..5].copy_from_slice(&((TARGET - (START + 5)) as u32).to_le_bytes());
    bytes.resize((TARGET - START) as usize, 0xcc);
    bytes.extend([0x48, 0x8d, 0x58, 2, 0xc3]);
    bytes.resize(bytes.len() + 32, 0xcc);
    let code = Bytes { start: START, bytes: &bytes };
    let mut stack = vec![0u64; SLOTS as usize + 1];
    let bottom = stack.as_mut_ptr() as u64;
    let (mut used, mut places, mut reused) = (Vec::new(), std::collections::HashSet::new(), 0);
    for round in 0..6000 {
        let place = entry(&mut bench.emitter, START, &code);
        reused += u32::from(!places.insert(place));
        for _ in 0..2 {
            (bench.ctx.gpr[0], bench.ctx.gpr[4]) = (round, bottom + 8 * (1 + round % SLOTS));
            assert_eq!(run(&mut bench, START, &code), round + 2);
        }
        let (_, block) = bench
            .emitter
            .all_blocks()
            .find(|(_, host)| host.contains(&place))
            .expect("it is there");
        let kept =
            bench.ctx.landings.iter().filter(|landing| block.contains(&u64::from(**landing)));
        assert_eq!(kept.count(), 1, "round {round}");
        let doomed = bench.emitter.remove_copied(&(START..START + 1));
        assert_eq!(doomed.len(), 1);
        bench.emitter.reclaim(doomed);
        used.push(bench.emitter.cache().used());
    }
    assert!(reused > 1000 && used[3000] == used[5999], "{reused}");
}

/// Guest memory that stores may change at any time.
struct Shared<'a>(&'a Area);

impl Fetch for Shared<'_> {
    fn fetch(&self, addr: u64, buf: &mut [u8]) -> usize {
        Bytes { start: self.0.start, bytes: self.0.bytes() }.fetch(addr, buf)
    }

    fn is_writable(&self, _range: Range<u64>) -> bool {
        true
    }
}

/// Runs what stands at the area's start up to its `syscall`, with flags that it does not touch.
fn run_checked(bench: &mut Bench, area: &Area, flags: u64) -> u64 {
    let code = Shared(area);
    (bench.ctx.gpr[1], bench.ctx.gpr[0], bench.ctx.rflags) = (0x1111, 0x2222, 0x202 | flags);
    let mut pc = area.start;
    while let Copied::Entry(next) = bench.emitter.copy(pc, &code).expect("room") {
        // SAFETY: the code only computes in registers.
        match unsafe { bench.emitter.enter_copy(&mut *bench.ctx, next) } {
            ExitReason::Block(link) => pc = bench.emitter.copy_exit(link).expect("a link").0,
            ExitReason::Stale => {
                pc = bench.ctx.next_pc;
                bench.emitter.copied_stale(pc);
            }
            other => panic!("{other:?}"),
        }
    }
    const FLAGS: u64 = 0x8d5;
    assert_eq!(
        (bench.ctx.gpr[1], bench.ctx.gpr[0], bench.ctx.rflags & FLAGS),
        (0x1111, 0x2222, flags)
    );
    bench.ctx.gpr[3]
}

#[test]
fn blocks_of_code_that_may_change_compare_it() {
    let mut bench = Bench::new();
    let mut area = Area::new(0x7000_0000_0000, 4096);
    let mut made = 0;
    for n in 0..8u8 {
        // mov ebx, n; nop…; syscall
        let code = [&[0xbb, n, 0, 0, 0][..], &[0x90; 7][..usize::from(n)], &[0x0f, 0x05]].concat();
        area.bytes_mut()[..code.len()].copy_from_slice(&code);
        for flags in [0, 0x8d5, 0x800, 0x41] {
            assert_eq!(run_checked(&mut bench, &area, flags), u64::from(n));
        }
        let blocks = bench.emitter.copy_figures().blocks;
        assert_eq!(blocks, made + 1, "one for each state of the code");
        made = blocks;
    }
    let doomed = bench.emitter.remove_copied(&(0..u64::MAX));
    assert_eq!(doomed.len(), 8);
    bench.emitter.reclaim(doomed);
}

#[test]
fn code_that_keeps_changing_is_not_copied() {
    let mut bench = Bench::new();
    let mut area = Area::new(0x7000_0010_0000, 4096);
    area.bytes_mut()[..7].copy_from_slice(&[0xbb, 0, 0, 0, 0, 0x0f, 0x05]);
    let start = area.start;
    let gave_up = (0..100u8).find(|n| {
        area.bytes_mut()[1] = *n;
        if matches!(bench.emitter.copy(start, &Shared(&area)), Ok(Copied::Writable)) {
            return true;
        }
        run_checked(&mut bench, &area, 0);
        false
    });
    assert!(gave_up.is_some_and(|n| n > 8), "{gave_up:?}");
}

/// Where [`WithSlot`] has its word.
const SLOT: u64 = 0x10_4008;

/// Code, and a word that only calls change.
struct WithSlot<'b> {
    code: Bytes<'b>,
    word: Option<u64>,
}

impl Fetch for WithSlot<'_> {
    fn fetch(&self, address: u64, buffer: &mut [u8]) -> usize {
        self.code.fetch(address, buffer)
    }

    fn constant(&self, pc: u64, address: u64) -> Option<u64> {
        assert!((START..TARGET).contains(&pc));
        self.word.filter(|_| address == SLOT)
    }
}

#[test]
fn a_constant_is_jumped_to_until_its_page_changes() {
    for (opcode, takes_back) in [(0x25, false), (0x15, true)] {
        let mut bench = Bench::new();
        let mut bytes = code(2);
        // `inc rax; jmp [SLOT]` or `call [SLOT]`, and a second target behind the first.
        bytes[3..9].copy_from_slice(&[0xff, opcode, 0, 0, 0, 0]);
        bytes[5..9].copy_from_slice(&((SLOT - (START + 9)) as u32).to_le_bytes());
        let second = START + bytes.len() as u64;
        bytes.extend([0x48, 0x8d, 0x58, 5, 0x0f, 0x05]);
        bytes.resize(bytes.len() + 32, 0xcc);
        let mut stack = [0u64; 8];
        let rsp = stack.as_mut_ptr() as u64 + 48;
        for (round, (target, sum)) in (0..).zip([(TARGET, 2), (second, 5), (TARGET, 2)]) {
            let code = WithSlot { code: Bytes { start: START, bytes: &bytes }, word: Some(target) };
            for _ in 0..3 {
                (bench.ctx.gpr[0], bench.ctx.gpr[4]) = (round, rsp);
                assert_eq!(run(&mut bench, START, &code), round + 1 + sum);
                assert_eq!(bench.ctx.gpr[4], if takes_back { rsp - 8 } else { rsp });
                assert_eq!(stack[5], if takes_back { START + 9 } else { 0 });
            }
            assert!(bench.emitter.is_copied_from(&(SLOT..SLOT + 1)));
            let doomed = bench.emitter.remove_copied(&(SLOT..SLOT + 1));
            assert_eq!(doomed.len(), 1);
            bench.emitter.reclaim(doomed);
        }
        // What may be written is read each time.
        let code = WithSlot { code: Bytes { start: START, bytes: &bytes }, word: None };
        entry(&mut bench.emitter, START, &code);
        assert!(!bench.emitter.is_copied_from(&(SLOT..SLOT + 1)));
    }
}
