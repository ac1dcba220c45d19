//! The same for the passes over any control flow and for what joins versions: each side condition is switched off in turn,
//! and random programs, or where those hardly ever need it a program made for it, show that the loss is noticed.

use super::side::Side;
use super::side::tests::without;
use super::{OptOptions, continuation, inline, optimise_with, pass};
use crate::eval::check::{Limits, check, run_base};
use crate::eval::{Hooks, Leave, Machine, ModelMachine, State};
use crate::random::cases::{Wrong, agrees, case, optimised, passes};
use crate::random::program::Program;
use crate::random::trace::{Options, build_all};
use crate::random::{Rng, generate, whole};
use crate::text;
use crate::types::{AnchorId, BlockId};
use crate::verify::verify;
use crate::version::{Term, Version};
use std::collections::HashMap;

/// Random programs that a side condition may take to be missed.
const PROGRAMS: u64 = 1_000;

/// The side conditions that are tried here.
pub(super) const SIDES: &[Side] = &[
    Side::ConstantsPosition,
    Side::FactsJoin,
    Side::ParamsTrivial,
    Side::RedundantKnown,
    Side::InjectReach,
    Side::InjectUntouched,
    Side::LoopsSteady,
    Side::LicmPrivate,
    Side::LicmDisjoint,
    Side::LicmBarrier,
    Side::MergeSameValue,
    Side::DelayEffect,
    Side::DelayAnchor,
    Side::DelayDeferred,
    Side::DelayOnlyEntry,
    Side::FramesPrivate,
    Side::FramesDisjoint,
    Side::FramesBarrier,
    Side::FramesWritten,
    Side::InlineContext,
    Side::InlinePending,
    Side::ContinuationCheck,
    Side::SlotsPrivate,
    Side::SlotsAlone,
    Side::SlotsBarrier,
    Side::MonitorFixed,
];

/// Passes over whole programs and over traces.
fn by_passes(side: Side, seed: u64) -> Result<(), Wrong> {
    let mut program = generate::program(&mut Rng::new(seed));
    let heads = generate::heads(&program);
    let whole = whole::case(&mut program, seed);
    let traces: Vec<_> = heads.into_iter().filter_map(|head| case(&mut program, head, seed)).collect();
    for case in whole.into_iter().chain(traces) {
        let passes = passes(&mut Rng::new(!seed));
        let (version, hits) = without(side, || optimised(&case, &passes));
        if hits > 0 {
            agrees(&mut program, &case, &version?)?;
        }
    }
    Ok(())
}

/// Continuations from every anchor of a whole program.
fn by_continuation(side: Side, seed: u64) -> Result<(), Wrong> {
    struct StopAt(u64);
    impl<M: Machine> Hooks<M> for StopAt {
        fn at(&mut self, pc: u64, _state: &State, _machine: &M) -> bool {
            pc == self.0
        }
    }
    let mut program = generate::program(&mut Rng::new(seed));
    let mut rng = Rng::new(seed);
    let options = Options { peel: false, older_anchor: 0 };
    let Some(mut original) = build_all(&mut program, Program::pc(0), "t1", 8, options, &mut rng) else { return Ok(()) };
    // What is constant in a varmap is what has to be checked.
    optimise_with(&mut original, &["simplify", "constants"], &OptOptions::default());
    for anchor in (0..original.anchors.len() as u32).map(AnchorId) {
        let (made, hits) = without(side, || continuation(&original, anchor, "c1"));
        let Ok(version) = made else { continue };
        verify(&version).map_err(|e| Wrong::Verifier(e[0].to_string()))?;
        let (mut state, mut machine) = (generate::state(&mut rng), generate::machine(&mut rng));
        let mut hooks = StopAt(version.region);
        let stopped = run_base(&mut program, Program::pc(0), &mut state, &mut machine, &mut hooks, &mut 2_000);
        if hits > 0 && stopped == Ok(Leave::Stopped { pc: version.region }) {
            // A state that never passed the entry: its registers are anything.
            let other = generate::state(&mut rng);
            state.gpr = std::array::from_fn(|i| if i == 4 { state.gpr[i] } else { other.gpr[i] });
            let limits = Limits { steps: 2_000, forced: 8 };
            check(&mut program, &version, &state, &machine, limits).map_err(|m| Wrong::Checker(m.to_string()))?;
        }
    }
    Ok(())
}

/// The callees of a program's first block, inlined after `frames` has made their return addresses wait.
fn by_inlining(side: Side, seed: u64) -> Result<(), Wrong> {
    let mut program = generate::program(&mut Rng::new(seed));
    let mut rng = Rng::new(seed);
    let options = Options { peel: false, older_anchor: 0 };
    let Some(mut version) = build_all(&mut program, Program::pc(0), "t1", 1, options, &mut rng) else { return Ok(()) };
    version.context.facts.push(crate::Fact::PrivateMemory);
    let mut hits = 0;
    for _ in 0..4 {
        optimise_with(&mut version, &["unreachable", "simplify", "forward", "frames", "dce"], &OptOptions::default());
        let exit = (0..version.blocks.len()).find_map(|b| match version.blocks[b].term {
            Term::Exit(a) => Some((BlockId(b as u32), version.anchors[a.index()].target.as_const()?)),
            _ => None,
        });
        let Some((block, pc)) = exit else { break };
        let Some(callee) = build_all(&mut program, pc, "t2", 1, options, &mut rng) else { break };
        let (done, more) = without(side, || inline(&mut version, block, &callee));
        hits += more;
        if done.is_err() {
            break;
        }
        verify(&version).map_err(|e| Wrong::Verifier(e[0].to_string()))?;
    }
    for _ in 0..4 {
        let (state, machine) = (generate::state(&mut rng), generate::machine(&mut rng));
        let limits = Limits { steps: 2_000, forced: 24 };
        if hits > 0 {
            check(&mut program, &version, &state, &machine, limits).map_err(|m| Wrong::Checker(m.to_string()))?;
        }
    }
    Ok(())
}

#[test]
fn every_side_condition_is_needed() {
    let mut missed = Vec::new();
    for side in SIDES.iter().filter(|side| !RARE.contains(side)) {
        let attempt: fn(Side, u64) -> Result<(), Wrong> = match side {
            Side::ContinuationCheck => by_continuation,
            Side::InlineContext | Side::InlinePending => by_inlining,
            _ => by_passes,
        };
        match (0..PROGRAMS).find_map(|seed| Some((seed, attempt(*side, seed).err()?))) {
            Some((seed, Wrong::Verifier(_))) => println!("{side:?}: the verifier, program {seed}"),
            Some((seed, Wrong::Checker(_))) => println!("{side:?}: the checker, program {seed}"),
            None => missed.push(side),
        }
    }
    assert!(missed.is_empty(), "nobody noticed the loss of {missed:?}");
}

/// Which random programs hardly ever need: [`witnesses`] has programs for them.
const RARE: &[Side] = &[
    Side::LicmDisjoint,
    Side::DelayDeferred,
    Side::InlineContext,
    Side::SlotsPrivate,
    Side::MonitorFixed,
    // The model has no native that writes memory nobody knows where, and a fence or an event shows nothing of memory that
    // is private: these have no witness.
    Side::LicmBarrier,
    Side::FramesBarrier,
    Side::SlotsBarrier,
];

/// A program made for one side condition: guest code, a version, what is done to it, and the state that shows the loss.
struct Witness {
    side: Side,
    source: &'static str,
    passes: &'static [&'static str],
    rdi: u64,
}

const ARRAY: u64 = 0x1_0000;

const WITNESSES: &[Witness] = &[
    Witness {
        side: Side::LicmDisjoint,
        source: r#"
region 0x1000 {
  version base {
    b0:
      at 0x1000
      v0 = get.i64 rsi
      v1 = load.i64 [v0]
      v2 = add.i64 v1, 1
      put.i64 rax, v2
      at 0x1004
      v3 = get.i64 rdi
      v4 = get.i64 rax
      store.i64 [v3], v4
      at 0x1008
      v5 = get.i64 rax
      v6 = lt.u.i64 v5, 9
      branch v6 then 0x1000 else 0x1020
  }
  version t1 context private_memory {
    anchor a0 = base.0x1000 [rax = v3]
    anchor a1 = base.0x1004 [rax = v5]
    anchor a2 = base.0x1008 [rax = v5]
    b0(v0: i64 = rax, v1: i64 = rsi, v2: i64 = rdi):
      jump b1(v0)
    b1(v3: i64):
      poll else a0
      v4 = load.i64 [v1] !a0
      v5 = add.i64 v4, 1
      store.i64 [v2], v5 !a1
      v6 = lt.u.i64 v5, 9
      assume v6 else a2
      jump b1(v5)
  }
}
"#,
        passes: &["licm"],
        rdi: ARRAY,
    },
    Witness {
        side: Side::DelayDeferred,
        source: r#"
region 0x1000 {
  version base {
    b0:
      at 0x1000
      v0 = get.i64 rsp
      store.i64 [v0 - 8], 5
      at 0x1004
      v1 = get.i64 rsp
      store.i64 [v1 - 8], 7
      at 0x1008
      v2 = get.i64 rdi
      v3 = load.i64 [v2]
      put.i64 rax, v3
      goto 0x100c
  }
  version t1 context private_memory {
    anchor a0 = base.0x1000 [rax = v0]
    anchor a1 = base.0x1008 [rax = v0] stores [store.i64 [v1 - 8], 7]
    anchor a2 = base.0x100c [rax = v6] stores [store.i64 [v1 - 8], 7]
    b0(v0: i64 = rax, v1: i64 = rsp, v2: i64 = rdi):
      store.i64 [v1 - 8], 5 !a0
      v3 = sub.i64 v2, v1
      v4 = add.i64 v3, 15
      v5 = le.u.i64 15, v4
      assume v5 else a1
      v6 = load.i64 [v2] !a1
      exit a2
  }
}
"#,
        passes: &["delay"],
        rdi: ARRAY,
    },
    Witness {
        side: Side::SlotsPrivate,
        source: r#"
region 0x1000 {
  version base {
    b0:
      at 0x1000
      v0 = get.i64 rsi
      v1 = load.i64 [v0]
      put.i64 rax, v1
      at 0x1004
      v2 = get.i64 rsi
      v3 = load.i64 [v2]
      put.i64 rcx, v3
      goto 0x1008
  }
  version t1 {
    anchor a0 = base.0x1000 [rax = v0, rcx = v1]
    anchor a1 = base.0x1004 [rax = v3, rcx = v1]
    anchor a2 = base.0x1008 [rax = v3, rcx = v4]
    b0(v0: i64 = rax, v1: i64 = rcx, v2: i64 = rsi):
      v3 = load.i64 [v2] !a0
      v4 = load.i64 [v2] !a1
      exit a2
  }
}
"#,
        passes: &["slots"],
        rdi: ARRAY,
    },
    Witness {
        side: Side::MonitorFixed,
        source: r#"
region 0x1000 {
  version base {
    b0:
      at 0x1000
      v0 = get.i64 rcx
      v1 = load.i64 [v0 + 0x10000]
      put.i64 rax, v1
      goto 0x1004
  }
  version t1 {
    anchor a0 = base.0x1000 [rax = v0]
    anchor a1 = base.0x1004 [rax = v2]
    b0(v0: i64 = rax, v1: i64 = rcx):
      v2 = load.i64 [v1 + 0x10000] !a0
      v3 = eq.i64 v2, 0
      assume v3 else a0
      exit a1
  }
}
"#,
        passes: &["monitor"],
        rdi: ARRAY,
    },
    Witness {
        side: Side::InlineContext,
        source: r#"
region 0x1000 {
  version base {
    b0:
      at 0x1000
      goto 0x1004
  }
  version t1 {
    anchor a0 = base.0x1004 []
    b0(v0: i64 = rdi):
      exit a0
  }
}
region 0x1004 {
  version base {
    b0:
      at 0x1004
      v0 = get.i64 rdi
      v1 = add.i64 v0, 1
      put.i64 rax, v1
      goto 0x1008
  }
  version t2 context rdi == 4 {
    anchor a0 = base.0x1008 [rax = 5]
    b0(v0: i64 = rdi):
      exit a0
  }
}
"#,
        passes: &[],
        rdi: ARRAY,
    },
];

impl Witness {
    /// Does the program, from its state, what the version does when `side` is switched off?
    fn holds_without(&self, side: Option<Side>) -> Result<(), Wrong> {
        let regions = text::regions(self.source).expect("a witness parses");
        let versions: Vec<Version> = regions.into_iter().flat_map(|r| r.versions).collect();
        let (base, mut others): (Vec<Version>, Vec<Version>) = versions.into_iter().partition(Version::is_base);
        let mut guest: HashMap<u64, Version> = base.into_iter().map(|v| (v.region, v)).collect();
        let mut version = others.remove(0);
        let mut apply = || {
            if let [callee] = &others[..] {
                inline(&mut version, BlockId(0), callee).expect("it can be inlined");
            }
            self.passes.iter().filter_map(|name| pass(name)).for_each(|p| {
                p.run(&mut version, &OptOptions::default());
            });
        };
        match side {
            Some(side) => without(side, apply).0,
            None => apply(),
        }
        verify(&version).map_err(|e| Wrong::Verifier(e[0].to_string()))?;
        let mut machine = ModelMachine::new();
        machine.write(ARRAY, &[0; 64]);
        machine.write(ARRAY + 8, &[7]);
        if self.side == Side::SlotsPrivate {
            machine.share(ARRAY);
        }
        let mut state = State::default();
        (state.gpr[1], state.gpr[4], state.gpr[6], state.gpr[7]) = (8, ARRAY + 0x100, ARRAY, self.rdi);
        // Repeating a load that a peer changes is nothing wrong, so there nothing is forced.
        let forced = if self.side == Side::SlotsPrivate { 0 } else { 16 };
        let limits = Limits { steps: 1_000, forced };
        check(&mut guest, &version, &state, &machine, limits).map_err(|m| Wrong::Checker(m.to_string()))?;
        Ok(())
    }
}

#[test]
fn witnesses() {
    for witness in WITNESSES {
        let side = witness.side;
        assert!(RARE.contains(&side));
        assert!(witness.holds_without(None).is_ok(), "{side:?}: {:?}", witness.holds_without(None));
        assert!(witness.holds_without(Some(side)).is_err(), "nobody noticed the loss of {side:?}");
    }
}
