//! Hand-written traces through the emitter: each outcome is compared with the evaluator's and with
//! what is expected.

mod harness;

use dynasour_emitter::{EntryState, FragmentId, SiteKind, StubTarget};
use dynasour_ir::Gpr;
use dynasour_ir::eval::State;
use dynasour_ir::text::version;
use dynasour_ir::verify::assert_valid;
use harness::{Area, Bench};

fn state(registers: &[(Gpr, u64)], flags: u64) -> State {
    let mut s = State { flags, ..State::default() };
    for g in Gpr::all() {
        s.gpr[g.number()] = 0x1111_0000 * (g.number() as u64 + 1) + 7;
    }
    for (g, v) in registers {
        s.gpr[g.number()] = *v;
    }
    s
}

#[test]
fn a_straight_trace() {
    let v = version(
        "region 0x1000 { version t1 {
    anchor a0 = base.0x2000 [rax = v2, rcx = 5, rflags = v3]
    b0(v0: i64 = rax, v1: i64 = rdx, v9: flags = rflags):
      v2 = add.i64 v0, v1
      v3 = flags.add.i64 v0, v1
      exit a0
  } }",
    )
    .unwrap();
    assert_valid(&v);
    let mut bench = Bench::new();
    let f = bench.compile(&v);
    let before = state(&[(Gpr::RAX, 3), (Gpr::RDX, u64::MAX)], 0x8d5);
    let out = bench.run(f, &before);
    let mut expected = before.clone();
    expected.gpr[0] = 2;
    expected.gpr[1] = 5;
    expected.flags = 1 | 0x10;
    assert_eq!(out.pc, 0x2000);
    assert_eq!(out.state, expected);
}

#[test]
fn a_loop_over_memory() {
    let mut area = Area::new(0x6100_0000, 4096);
    for (i, c) in area.bytes_mut().chunks_exact_mut(4).enumerate() {
        c.copy_from_slice(&(i as i32 - 500).to_le_bytes());
    }
    let v = version(
        "region 0x401136 { version t2 {
    anchor a0 = base.0x401140 [rax = v3, rcx = v4, rflags = v5]
    b0(v0: i64 = rax, v1: i64 = rcx, v2: flags = rflags, v6: i64 = rdi):
      jump b1(v0, v1, v2)
    b1(v3: i64, v4: i64, v5: flags):
      poll else a0
      v12 = lt.s.i64 v4, 100
      assume v12 else a0
      v7 = load.i32 [v6 + v4*4] !a0
      v9 = sext32.i64 v7
      v10 = add.i64 v3, v9
      v11 = add.i64 v4, 1
      v13 = flags.sub.i64 v11, 100
      jump b1(v10, v11, v13)
  } }",
    )
    .unwrap();
    assert_valid(&v);
    let mut bench = Bench::new();
    let f = bench.compile(&v);
    println!("{}", bench.emitter.listing(f).unwrap());
    let before = state(&[(Gpr::RAX, 1), (Gpr::RCX, 0), (Gpr::RDI, area.start)], 0);
    let out = bench.run(f, &before);
    let mut expected = before.clone();
    expected.gpr[0] = (1 + (0..100).map(|i| i - 500).sum::<i64>()) as u64;
    expected.gpr[1] = 100;
    expected.flags = 0x44;
    assert_eq!(out.pc, 0x401140);
    assert_eq!(out.state, expected);
    // A page fault leaves through the anchor, with the state of the iteration.
    let before = state(&[(Gpr::RAX, 1), (Gpr::RCX, 0), (Gpr::RDI, area.start + 4096 - 40)], 0);
    let out = bench.run(f, &before);
    assert_eq!(out.deopt.kind, SiteKind::Fault);
    assert_eq!(out.state.gpr[1], 10);
}

/// Counts rcx down by one an iteration; leaves through the guard's anchor.
const COUNTDOWN: &str = "region 0x1000 { version t1 {
    anchor a0 = base.0x1000 [rcx = v2, rflags = v3]
    anchor a1 = base.0x2000 [rcx = v4, rflags = v5, rdx = v6] stores [store.i64 [v7 - 8], v4]
    b0(v0: i64 = rcx, v1: flags = rflags, v7: i64 = rsp):
      jump b1(v0, v1)
    b1(v2: i64, v3: flags):
      poll else a0
      v4 = sub.i64 v2, 1
      v5 = flags.sub.i64 v2, 1
      v6 = add.i64 v4, 1000
      v8 = cond.ne v5
      assume v8 else a1
      jump b1(v4, v5)
  } }";

/// Accesses at large constant addresses, and a guard that compares with one.
#[test]
fn accesses_near_each_other() {
    let area = Area::new(0x61_0000_0000, 4096);
    let v = version(
        "region 0x1000 { version t1 context private_memory {
    anchor a0 = base.0x1000 [rax = v0, rcx = v1]
    anchor a1 = base.0x1008 [rax = v0, rcx = v1]
    anchor a2 = base.0x1010 [rax = v0, rcx = v1]
    anchor a3 = base.0x1018 [rax = v0, rcx = v1]
    anchor a4 = base.0x2000 [rax = v8, rcx = v6]
    b0(v0: i64 = rax, v1: i64 = rcx):
      store.i64 [0x6100000010], v0 !a0
      store.i64 [0x6100000018], 0x6100000020 !a1
      v2 = load.i64 [0x6100000018] !a2
      v3 = eq.i64 v2, 0x6100000020
      assume v3 else a2
      store.i32 [v2 + v1*4], 77 !a2
      v4 = load.i32 [#0x6100000020 + v1*4] !a3
      v5 = load.i64 [0x6100000010] !a3
      v6 = zext32.i64 v4
      v7 = sub.i64 v5, 0x6100000000
      v8 = add.i64 v7, -0x60ffffffff
      exit a4
  } }",
    )
    .unwrap();
    assert_valid(&v);
    let mut bench = Bench::new();
    let f = bench.compile(&v);
    let before = state(&[(Gpr::RAX, 0x1234_5678_9abc), (Gpr::RCX, 6)], 0x8d5);
    let out = bench.run(f, &before);
    let mut expected = before.clone();
    expected.gpr[0] = 0x1234_5678_9abc - 0x61_0000_0000 - 0x60_ffff_ffff;
    expected.gpr[1] = 77;
    assert_eq!((out.pc, &out.state), (0x2000, &expected), "{}", bench.emitter.listing(f).unwrap());
    assert_eq!(area.bytes()[0x18..0x20], 0x61_0000_0020u64.to_le_bytes());
}

/// Adds rdx to rax and ends at 0x3000, or with `rax` as its target.
fn adder(pc: u64, target: &str) -> dynasour_ir::Version {
    version(&format!(
        "region {pc:#x} {{ version t1 {{
    anchor a0 = base.{target} [rax = v2, rflags = v3]
    b0(v0: i64 = rax, v1: i64 = rdx):
      v2 = add.i64 v0, v1
      v3 = flags.add.i64 v0, v1
      exit a0
  }} }}"
    ))
    .unwrap()
}

#[test]
fn warm_exits_get_resolved_stubs() {
    let stack = Area::new(0x6200_0000, 4096);
    let mut bench = Bench::new();
    let countdown = version(COUNTDOWN).unwrap();
    let looping = bench.compile(&countdown);
    let next = bench.compile(&adder(0x2000, "0x3000"));
    let before = state(&[(Gpr::RCX, 5), (Gpr::RSP, stack.start + 2048)], 0x8d5);
    let cold = bench.run(looping, &before);
    assert_eq!((cold.pc, cold.deopt.stores.len()), (0x2000, 1));
    let stub = bench.emitter.resolve_exit(cold.deopt.exit, StubTarget::Fragment(next)).unwrap();
    let out = bench.run(looping, &before);
    assert_eq!(out.pc, 0x3000);
    let mut expected = cold.state.clone();
    expected.gpr[0] = expected.gpr[0].wrapping_add(1000);
    expected.flags = out.state.flags;
    assert_eq!(out.state, expected, "{}", bench.emitter.listing(stub).unwrap());
    assert_eq!(
        out.deopt.exit,
        dynasour_emitter::ExitId(bench.emitter.fragment(next).unwrap().exits.start)
    );
    let stored = &stack.bytes()[2040..2048];
    assert_eq!(stored, 0u64.to_le_bytes());
    // And back to the runtime.
    bench.emitter.unlink(cold.deopt.exit).unwrap();
    assert_eq!(bench.run(looping, &before), cold);
    bench.emitter.resolve_exit(cold.deopt.exit, StubTarget::Fragment(next)).unwrap();
    bench.emitter.invalidate(next).unwrap();
    let out = bench.run(looping, &before);
    assert_eq!((out.pc, out.state), (0x2000, cold.state));
}

#[test]
fn a_side_trace_starts_in_the_state_of_its_exit() {
    let stack = Area::new(0x6300_0000, 4096);
    let mut bench = Bench::new();
    let looping = bench.compile(&version(COUNTDOWN).unwrap());
    let before = state(&[(Gpr::RCX, 3), (Gpr::RSP, stack.start + 2048)], 0);
    let cold = bench.run(looping, &before);
    let body = adder(0x2000, "0x3000");
    let side = bench.emitter.compile(&body, EntryState::FromExit(cold.deopt.exit)).unwrap();
    bench.emitter.attach(cold.deopt.exit, side).unwrap();
    let out = bench.run(looping, &before);
    let mut expected = cold.state.clone();
    expected.gpr[0] = expected.gpr[0].wrapping_add(1000);
    expected.flags = out.state.flags;
    assert_eq!((out.pc, out.state), (0x3000, expected));
}

#[test]
fn linked_ends_and_indirect_ends() {
    let mut bench = Bench::new();
    let first = bench.compile(&adder(0x1000, "v2"));
    let second = bench.compile(&adder(0x2000, "0x3000"));
    let third = bench.compile(&adder(0x3000, "0x4000"));
    let before = state(&[(Gpr::RAX, 0x1ff0), (Gpr::RDX, 0x10)], 0x8d5);
    let out = bench.run(first, &before);
    assert_eq!(out.deopt.kind, SiteKind::EndIndirect);
    assert_eq!((out.pc, out.state.gpr[0]), (0x2000, 0x2000));
    bench.emitter.register_entry(0x2000, second).unwrap();
    let out = bench.run(first, &before);
    assert_eq!((out.pc, out.state.gpr[0]), (0x3000, 0x2010));
    bench.emitter.link(out.deopt.exit, third).unwrap();
    let out = bench.run(first, &before);
    let mut expected = before.clone();
    expected.gpr[0] = 0x2020;
    expected.flags = out.state.flags;
    assert_eq!((out.pc, out.state), (0x4000, expected));
    // A pc that shares the slot is not mistaken for it.
    let aliased = state(&[(Gpr::RAX, 0x1_1ff0), (Gpr::RDX, 0x10)], 0);
    assert_eq!(bench.run(first, &aliased).pc, 0x1_2000);
    bench.emitter.forget_entry(0x2000);
    assert_eq!(bench.run(first, &before).pc, 0x2000);
    bench.emitter.register_entry(0x2000, second).unwrap();
    bench.emitter.unlink_for_signal(first);
    assert_eq!(bench.run(first, &before).pc, 0x2000);
    bench.emitter.relink(first);
    assert_eq!(bench.run(first, &before).pc, 0x4000);
}

/// Combines rax and rdx by way of `n` values that are live at once, and ends at `target`.
fn busy(pc: u64, target: u64, n: u32) -> dynasour_ir::Version {
    let values: String = (0..n)
        .map(|i| format!("v{} = mul.i64 v{}, v1\n", 10 + i, if i == 0 { 0 } else { 9 + i }))
        .collect();
    let sums: String =
        (0..n).map(|i| format!("v{} = xor.i64 v{}, v{}\n", 40 + i, 39 + i, 9 + n - i)).collect();
    version(&format!(
        "region {pc:#x} {{ version t1 {{
    anchor a0 = base.{target:#x} [rax = v{}]
    b0(v0: i64 = rax, v1: i64 = rdx):
      {values} v39 = add.i64 v0, v1
      {sums} exit a0
  }} }}",
        39 + n
    ))
    .unwrap()
}

#[test]
fn what_leads_into_a_fragment_by_a_passage_is_taken_away_with_the_rest() {
    let mut bench = Bench::new();
    let [first, same, other] = [(0x1000, 0x2000, 4), (0x2000, 0x3000, 4), (0x3000, 0x4000, 8)]
        .map(|(pc, target, n)| bench.compile(&busy(pc, target, n)));
    let before = state(&[(Gpr::RAX, 3), (Gpr::RDX, 5)], 0x8d5);
    let passages =
        |b: &Bench| b.emitter.fragments().iter().filter(|f| f.version == "passage").count();
    // Each on its own, then linked: behind the saves, and by a passage.
    let one = bench.run(first, &before);
    let two = bench.run(same, &one.state);
    let three = bench.run(other, &two.state);
    bench.emitter.link(one.deopt.exit, same).unwrap();
    assert_eq!((bench.run(first, &before).state, passages(&bench)), (two.state.clone(), 0));
    bench.emitter.link(two.deopt.exit, other).unwrap();
    assert_eq!((bench.run(first, &before), passages(&bench)), (three.clone(), 1));
    // Whoever is asked to come out of the passage does.
    let passage = FragmentId(bench.emitter.fragments().len() as u32 - 1);
    bench.emitter.unlink_for_signal(passage);
    let out = bench.run(first, &before);
    assert_eq!((out.deopt.kind, out.pc, out.state), (SiteKind::Poll, 0x3000, two.state.clone()));
    bench.emitter.relink(passage);
    // Resting, woken, linked again by the same passage, and gone.
    for _ in 0..2 {
        bench.emitter.put_to_rest(&[other]);
        assert_eq!(bench.run(first, &before), two);
        bench.emitter.wake(other);
        assert_eq!(bench.run(first, &before), two);
        bench.emitter.link(two.deopt.exit, other).unwrap();
        assert_eq!((bench.run(first, &before), passages(&bench)), (three.clone(), 1));
    }
    bench.emitter.invalidate(other).unwrap();
    assert_eq!(bench.run(first, &before), two);
    bench.emitter.invalidate(same).unwrap();
    assert_eq!(bench.run(first, &before), one);
}

#[test]
fn computed_targets_are_told_apart_by_stubs() {
    let stack = Area::new(0x6500_0000, 4096);
    let v = version(
        "region 0x1000 { version t1 context private_memory {
    anchor a0 = base.0x5000 [rax = v2, rflags = v4]
    anchor a1 = base.v1 [rax = v2, rflags = v4] stores [store.i64 [v5 - 8], v2]
    anchor a2 = base.0x1000 [rax = v0, rflags = v7]
    b0(v0: i64 = rax, v1: i64 = rdx, v5: i64 = rsp, v7: flags = rflags):
      v6 = load.i64 [v5 - 8] !a2
      v2 = mul.i64 v0, 3
      v4 = flags.sub.i64 v2, 7
      v3 = eq.i64 v1, 0x5000
      assume v3 else a1
      exit a0
  } }",
    )
    .unwrap();
    assert_valid(&v);
    let mut bench = Bench::new();
    let first = bench.compile(&v);
    let at = |pc: u64| state(&[(Gpr::RAX, 3), (Gpr::RDX, pc), (Gpr::RSP, stack.start + 64)], 0x8d5);
    let targets = [0x2000, 0x3000];
    let alone = targets.map(|pc| bench.run(first, &at(pc)));
    let elsewhere = bench.run(first, &at(0x4000));
    let mut exit = alone[0].deopt.exit;
    let behind = targets.map(|pc| bench.compile(&adder(pc, "0x7000")));
    for n in 0..2 {
        // What no stub is for leaves as it did before, by an exit of the last stub.
        for pc in &targets[n..] {
            let (out, stands) = (bench.run(first, &at(*pc)), bench.run(first, &at(0x4000)));
            assert_eq!((out.pc, out.deopt.exit, out.deopt.stores.len()), (*pc, exit, 1));
            assert_eq!((stands.pc, stands.state), (0x4000, elsewhere.state.clone()));
        }
        bench.emitter.resolve_exit(exit, StubTarget::FragmentIf(behind[n])).unwrap();
        exit = bench.run(first, &at(0x4000)).deopt.exit;
        assert!(
            bench
                .emitter
                .exit(exit)
                .is_some_and(|e| e.kind == SiteKind::Guard && e.target.is_none())
        );
    }
    for (n, pc) in targets.into_iter().enumerate() {
        let expected = bench.run(behind[n], &alone[n].state);
        let out = bench.run(first, &at(pc));
        assert_eq!(
            (out.pc, out.state, out.deopt.exit),
            (0x7000, expected.state, expected.deopt.exit)
        );
        assert_eq!(stack.bytes()[56..64], 9u64.to_le_bytes());
    }
}

#[test]
fn a_poll_in_the_entry_block_does_not_move_the_entries() {
    let mut bench = Bench::new();
    let text =
        busy(0x2000, 0x3000, 4).to_string().replace("rdx):\n", "rdx):\n      poll else a1\n");
    let text = text.replacen("    b0(", "    anchor a1 = base.0x2000 [rax = v0]\n    b0(", 1);
    let first = bench.compile(&busy(0x1000, 0x2000, 4));
    let polling = bench.compile(&version(&text).unwrap());
    let before = state(&[(Gpr::RAX, 3), (Gpr::RDX, 5)], 0x8d5);
    let one = bench.run(first, &before);
    let two = bench.run(polling, &one.state);
    bench.emitter.link(one.deopt.exit, polling).unwrap();
    assert_eq!(bench.run(first, &before), two);
}

/// Doubles xmm0 and ends at `target`.
fn doubler(pc: u64, target: u64) -> dynasour_ir::Version {
    version(&format!(
        "region {pc:#x} {{ version t1 {{
    native n0 = {pc:#x} \"66 0f d4 c0\" vec_read 0x1 vec_write 0x1 effects [state, read_state] ; \
    paddq xmm0,xmm0
    anchor a0 = base.{target:#x} []
    b0():
      native n0 ; paddq xmm0,xmm0
      exit a0
  }} }}"
    ))
    .unwrap()
}

#[test]
fn the_extended_state_is_loaded_by_the_first_fragment_that_uses_it() {
    const XMM0: usize = 160;
    const XSTATE_BV: usize = 512;
    let mut bench = Bench::new();
    let xmm0 = |b: &Bench| u64::from_le_bytes(b.ctx.xstate.0[XMM0..XMM0 + 8].try_into().unwrap());
    bench.ctx.xstate.0[XMM0] = 5;
    bench.ctx.xstate.0[XSTATE_BV] |= 2;
    let before = state(&[(Gpr::RAX, 1), (Gpr::RDX, 1)], 0x8d5);
    let chain = [
        adder(0x1000, "0x2000"),
        doubler(0x2000, 0x3000),
        adder(0x3000, "0x4000"),
        doubler(0x4000, 0x5000),
    ];
    let fragments: Vec<_> = chain.iter().map(|v| bench.compile(v)).collect();
    let doubled = [5, 10, 10, 20];
    for (n, expected) in doubled.into_iter().enumerate() {
        // All that is linked so far, from a fragment that does not use the state.
        bench.ctx.xstate.0[XMM0] = 5;
        let out = bench.run(fragments[0], &before);
        assert_eq!((out.pc, xmm0(&bench)), (0x2000 + 0x1000 * n as u64, expected));
        assert_eq!(out.state.gpr[1..], before.gpr[1..]);
        if let Some(next) = fragments.get(n + 1) {
            bench.emitter.link(out.deopt.exit, *next).unwrap();
        }
    }
    // And entered at a fragment that does.
    bench.ctx.xstate.0[XMM0] = 5;
    let out = bench.run(fragments[1], &before);
    assert_eq!((out.pc, xmm0(&bench), out.state.flags & 1), (0x5000, 20, 0));
}

#[test]
fn a_signal_gets_a_loop_out_at_its_poll() {
    let mut bench = Bench::new();
    let f = bench.compile(&version(COUNTDOWN).unwrap());
    bench.emitter.unlink_for_signal(f);
    let before = state(&[(Gpr::RCX, u64::MAX)], 0);
    let out = bench.run(f, &before);
    assert_eq!(out.deopt.kind, SiteKind::Poll);
    assert_eq!((out.pc, out.state.gpr[1]), (0x1000, u64::MAX - 1));
    assert_eq!(out.state.flags & 0x40, 0);
    bench.emitter.relink(f);
    let stack = Area::new(0x6400_0000, 4096);
    let before = state(&[(Gpr::RCX, 1000), (Gpr::RSP, stack.start + 64)], 0);
    assert_eq!(bench.run(f, &before).pc, 0x2000);
}

#[test]
fn pending_work_keeps_the_guest_out() {
    let mut bench = Bench::new();
    let f = bench.compile(&adder(0x1000, "0x3000"));
    let before = state(&[], 0x8d5);
    bench.ctx.gpr = before.gpr;
    bench.ctx.rflags = 0x202 | before.flags;
    bench.ctx.pending.store(1, std::sync::atomic::Ordering::Relaxed);
    // SAFETY: this thread's context.
    let left = unsafe {
        dynasour_emitter::set_gs(&mut *bench.ctx);
        bench.emitter.enter(&mut *bench.ctx, f).unwrap()
    };
    assert_eq!(left, dynasour_emitter::ExitReason::Aborted);
    assert_eq!(bench.ctx.gpr, before.gpr);
    bench.ctx.pending.store(0, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(bench.run(f, &before).pc, 0x3000);
}

#[test]
fn a_full_cache_is_flushed_and_filled_again() {
    let mut bench = Bench::with_cache(4096);
    let v = adder(0x1000, "0x3000");
    let mut fills = 0;
    for i in 0..500 {
        let f = match bench.emitter.compile(&v, EntryState::Canonical) {
            Ok(f) => f,
            Err(e) => {
                assert!(e.is_full(), "{e}");
                fills += 1;
                bench.emitter.flush_all();
                bench.compile(&v)
            }
        };
        let out = bench.run(f, &state(&[(Gpr::RAX, i), (Gpr::RDX, 7)], 0));
        assert_eq!((out.pc, out.state.gpr[0]), (0x3000, i + 7));
    }
    assert!(fills > 5);
    bench.emitter.reset_after_fork().unwrap();
    let f = bench.compile(&v);
    assert_eq!(bench.run(f, &state(&[], 0)).pc, 0x3000);
}

/// 30 values live at once, used by a later sum and by a varmap.
#[test]
fn register_pressure() {
    let mut text = String::from(
        "region 0x1000 { version t1 {\n anchor a0 = base.0x9000 [rbx = s29, rsi = m7, r15 = m29]\n",
    );
    text.push_str(
        " anchor a1 = base.0x2000 [rbx = s29, rsi = m3, r15 = m11]\n b0(v0: i64 = rax, \
        v1: i64 = rcx):\n",
    );
    for i in 0..30 {
        text.push_str(&format!("  m{i} = mul.i64 v{}, {}\n", i % 2, 3 + 2 * i));
    }
    text.push_str("  s0 = xor.i64 m0, m29\n");
    for i in 1..30 {
        text.push_str(&format!("  s{i} = add.i64 s{}, m{i}\n", i - 1));
    }
    text.push_str("  c = lt.u.i64 s29, m5\n  assume c else a0\n  exit a1\n } }");
    // Names to the numbers that the text form wants.
    let mut names: Vec<String> =
        (0..30).map(|i| format!("m{i}")).chain((0..30).map(|i| format!("s{i}"))).collect();
    names.push("c".into());
    for (n, name) in names.iter().enumerate().rev() {
        let number = format!("v{}", n + 2);
        for (before, after) in [("  ", " = "), (" ", ","), (" ", "\n"), ("= ", "]"), (" ", " else")]
        {
            text = text
                .replace(&format!("{before}{name}{after}"), &format!("{before}{number}{after}"));
        }
    }
    let v = version(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    let mut bench = Bench::new();
    let f = bench.compile(&v);
    for (a, c) in [(1u64, 2u64), (u64::MAX, 12345), (1 << 40, 3)] {
        let before = state(&[(Gpr::RAX, a), (Gpr::RCX, c)], 0x8d5);
        let m: Vec<u64> = (0..30).map(|i| [a, c][i % 2].wrapping_mul(3 + 2 * i as u64)).collect();
        let sum = m[1..].iter().fold(m[0] ^ m[29], |s, x| s.wrapping_add(*x));
        let mut expected = before.clone();
        expected.gpr[3] = sum;
        let holds = sum < m[5];
        expected.gpr[6] = if holds { m[3] } else { m[7] };
        expected.gpr[15] = if holds { m[11] } else { m[29] };
        let out = bench.run(f, &before);
        assert_eq!((out.pc, out.state), (if holds { 0x2000 } else { 0x9000 }, expected));
    }
}

/// Counts rcx down and collects flags that are made before the poll; `{}` is what the loop does
/// with them.
fn flags_before_the_poll(of_them: &str) -> dynasour_ir::Version {
    let text = format!(
        "region 0x1000 {{ version t1 {{
    anchor a0 = base.0x1000 [rcx = v2, rdx = v6, rflags = v3]
    anchor a1 = base.0x2000 [rcx = v4, rdx = v7, rflags = v5]
    b0(v0: i64 = rcx, v1: i64 = rdx):
      jump b1(v0, v1)
    b1(v2: i64, v6: i64):
      v3 = flags.sub.i64 v2, 5
      poll else a0
      v4 = sub.i64 v2, 1
      v5 = flags.sub.i64 v2, 1
      {of_them}
      v8 = cond.ne v5
      assume v8 else a1
      jump b1(v4, v7)
  }} }}"
    );
    version(&text).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn a_poll_behind_flags_of_its_loop() {
    let mut bench = Bench::new();
    // Only exits look at the flags: they are made there.
    let f = bench.compile(&flags_before_the_poll("v7 = add.i64 v6, 1"));
    bench.emitter.unlink_for_signal(f);
    let out = bench.run(f, &state(&[(Gpr::RCX, 6), (Gpr::RDX, 0)], 0));
    assert_eq!((out.deopt.kind, out.pc), (SiteKind::Poll, 0x1000));
    assert_eq!((out.state.gpr[1], out.state.gpr[2], out.state.flags & 0x40), (5, 1, 0x40));
    // The loop itself looks at them: who leaves at the poll makes them on the way.
    let f = bench.compile(&flags_before_the_poll("v9 = flagbits v3\n      v7 = add.i64 v6, v9"));
    bench.emitter.unlink_for_signal(f);
    let out = bench.run(f, &state(&[(Gpr::RCX, 6), (Gpr::RDX, 0)], 0));
    assert_eq!((out.deopt.kind, out.pc), (SiteKind::Poll, 0x1000));
    assert_eq!((out.state.gpr[1], out.state.gpr[2], out.state.flags & 0x40), (5, 0, 0x40));
}
