//! Fragments that count: the numbers are exact, and nothing else is different.

mod harness;

use dynasour_emitter::counting::{CountedSite, Destination, Tally};
use dynasour_emitter::{EntryState, FragmentId, SiteKind};
use dynasour_ir::Gpr;
use dynasour_ir::eval::State;
use dynasour_ir::text::version;
use harness::Bench;

/// Goes round until rcx is 0; leaves on the way each time that bit 2 of rcx is clear.
const LOOP: &str = "region 0x1000 { version t1 {
    anchor a0 = base.0x1000 [rax = v2, rcx = v3, rflags = v4]
    anchor a1 = base.0x1008 [rax = v6, rcx = v7, rflags = v8]
    anchor a2 = base.0x100c [rax = v6, rcx = v7, rflags = v8]
    b0(v0: i64 = rax, v1: i64 = rcx, v5: flags = rflags):
      jump b1(v0, v1, v5)
    b1(v2: i64, v3: i64, v4: flags):
      poll else a0
      v6 = add.i64 v2, v3
      v7 = sub.i64 v3, 1
      v8 = flags.sub.i64 v3, 1
      v9 = cond.ne v8
      assume v9 else a1
      v10 = and.i64 v7, 4
      v11 = ne.i64 v10, 0
      assume v11 else a2
      jump b1(v6, v7, v8)
  } }";

/// From the second exit on: rax doubled.
const SIDE: &str = "region 0x100c { version t2 {
    anchor a0 = base.0x100c [rax = v2]
    b0(v0: i64 = rax, v1: i64 = rcx, v3: flags = rflags):
      v2 = add.i64 v0, v0
      exit a0
  } }";

fn start(rax: u64, rcx: u64) -> State {
    let mut state = State { flags: 0x8d5, ..State::default() };
    for g in Gpr::all() {
        state.gpr[g.number()] = 0x1234_5678_9abc_def0 ^ (g.number() as u64) << 40;
    }
    (state.gpr[0], state.gpr[1]) = (rax, rcx);
    state
}

fn tally(bench: &Bench, id: FragmentId) -> Tally {
    let tally = bench.emitter.fragment(id).and_then(|f| f.tally.as_deref());
    tally.expect("it counts").clone()
}

fn guards(tally: &Tally) -> Vec<CountedSite> {
    let mut guards: Vec<_> =
        tally.sites.iter().filter(|s| s.kind == SiteKind::Guard).copied().collect();
    guards.sort_by_key(|g| g.position);
    guards
}

#[test]
fn every_part_is_counted_and_nothing_is_changed() {
    let looping = version(LOOP).expect("a version");
    let (mut plain, mut counting) = (Bench::new(), Bench::counting());
    let (f, g) = (plain.compile(&looping), counting.compile(&looping));
    assert!(
        plain.emitter.fragment(f).is_some_and(|f| f.tally.is_none()),
        "who does not count has no counters"
    );
    // From 7 on: 6, 5, 4 and then 3, where the second guard fails; from 1 on the first fails at
    // once.
    for (rcx, at) in [(7, 0x100c), (7, 0x100c), (1, 0x1008), (0x107, 0x100c)] {
        let (expected, out) = (plain.run(f, &start(5, rcx)), counting.run(g, &start(5, rcx)));
        assert_eq!(out.pc, at);
        assert_eq!((out.pc, out.state), (expected.pc, expected.state));
    }
    let tally = tally(&counting, g);
    let count = |word| counting.emitter.count(word);
    assert_eq!((count(tally.entered), count(tally.iterations)), (4, 3 * 4 + 1));
    let guards = guards(&tally);
    assert_eq!(guards.iter().map(|g| g.position).collect::<Vec<_>>(), [Some((1, 5)), Some((1, 8))]);
    assert_eq!(guards.iter().map(|g| count(g.executed)).collect::<Vec<_>>(), [13, 12]);
    assert_eq!(guards.iter().map(|g| count(g.left)).collect::<Vec<_>>(), [1, 3]);
    assert!(guards.iter().all(|g| g.host != 0 && g.cold != 0));
}

#[test]
fn failures_are_counted_wherever_they_go() {
    let mut bench = Bench::counting();
    let looping = bench.compile(&version(LOOP).expect("a version"));
    let counts = tally(&bench, looping);
    let exit = guards(&counts)[1].exit;
    let first = bench.run(looping, &start(5, 7));
    assert_eq!(first.deopt.exit, exit);
    assert_eq!(bench.emitter.destination(exit), Destination::Runtime);

    let side = version(SIDE).expect("a version");
    let side = bench.emitter.compile(&side, EntryState::FromExit(exit)).expect("it fits");
    bench.emitter.attach(exit, side).expect("both are there");
    assert_eq!(bench.emitter.destination(exit), Destination::Fragment(side));
    let again = bench.run(looping, &start(5, 7));
    assert_eq!(again.state.gpr[0], 2 * first.state.gpr[0]);
    assert_eq!((again.state.gpr[1], again.state.flags), (first.state.gpr[1], first.state.flags));

    let made = tally(&bench, side);
    let end = made.sites.iter().find(|s| s.kind == SiteKind::End).expect("a linear trace ends");
    let count = |word| bench.emitter.count(word);
    assert_eq!(count(guards(&counts)[1].left), 2);
    assert_eq!((count(made.entered), count(end.executed), end.position), (1, 1, Some((0, 1))));
    assert_eq!(bench.emitter.sharing(exit), [exit]);

    // Counts outlive what was counted.
    bench.emitter.flush_all();
    let fresh = bench.compile(&version(LOOP).expect("a version"));
    bench.run(fresh, &start(5, 1));
    assert_eq!(bench.emitter.count(guards(&counts)[1].left), 2);
    assert_eq!(bench.emitter.count(guards(&tally(&bench, fresh))[0].left), 1);
}
