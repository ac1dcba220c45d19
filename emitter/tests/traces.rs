//! Hand-written traces through the emitter: each outcome is compared with the evaluator's and with what is expected.

mod harness;

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
    assert_eq!(out.deopt.kind, dynasour_emitter::SiteKind::Fault);
    assert_eq!(out.state.gpr[1], 10);
}
