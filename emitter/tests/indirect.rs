//! Indirect trace ends: who is found, and a signal at each instruction on the way.
//!
//! A run is single-stepped by the trap flag. At the n-th step inside the code cache the test does
//! what the runtime's handler does for an asynchronous signal (unlink, divert), for every n. The
//! state that comes out must be exact: that before the first fragment, between the two, or after
//! the second.

mod harness;

use dynasour_emitter::{Emitter, ExitReason, FragmentId, set_gs};
use dynasour_guest::ThreadContext;
use dynasour_ir::eval::State;
use dynasour_ir::semantics::ARITH_FLAGS;
use dynasour_ir::text::version;
use dynasour_ir::{Gpr, Version};
use harness::Bench;
use std::cell::Cell;
use std::sync::Once;

const TRAP_FLAG: i64 = 0x100;

/// The run under way on this thread.
#[derive(Clone, Copy)]
struct Run {
    emitter: *const Emitter,
    context: *const ThreadContext,
    /// Steps in the code cache so far.
    steps: u32,
    /// The signal arrives before this one.
    signal_at: u32,
    /// Where it found the thread, and what it unlinked.
    signalled: Option<(u64, Option<FragmentId>)>,
}

thread_local! {
    static RUN: Cell<Option<Run>> = const { Cell::new(None) };
}

extern "C" fn on_step(
    _signal: libc::c_int,
    _info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    /// By encoding number: rax, rcx, rdx, rsi.
    const GREGS: [(usize, libc::c_int); 4] =
        [(0, libc::REG_RAX), (1, libc::REG_RCX), (2, libc::REG_RDX), (6, libc::REG_RSI)];
    // SAFETY: the kernel passes a valid ucontext; the run's emitter and context outlive it, and the
    // host's FS base is in place, so that thread locals work.
    unsafe {
        let regs = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
        let Some(mut run) = RUN.get() else {
            regs[libc::REG_EFL as usize] &= !TRAP_FLAG;
            return;
        };
        regs[libc::REG_EFL as usize] |= TRAP_FLAG;
        let emitter = &*run.emitter;
        let rip = regs[libc::REG_RIP as usize] as u64;
        if run.signalled.is_none() && emitter.cache().range().contains(&rip) {
            run.steps += 1;
            if run.steps == run.signal_at {
                let fragment = emitter.fragment_at(rip);
                fragment.into_iter().for_each(|f| emitter.unlink_for_signal(f));
                if let Some(diversion) = emitter.diversion(rip) {
                    regs[libc::REG_RIP as usize] = diversion.rip as i64;
                    for (register, saved) in diversion.displaced.places() {
                        let (_, slot) =
                            GREGS.iter().find(|(n, _)| n == register).copied().unwrap_or_default();
                        regs[slot as usize] = (*run.context).stub_save[*saved] as i64;
                    }
                }
                run.signalled = Some((rip, fragment));
            }
            RUN.set(Some(run));
        }
    }
}

fn install_handler() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: installs a handler that only touches the run.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_step as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(libc::SIGTRAP, &action, std::ptr::null_mut());
        }
    });
}

/// Runs `first` on `before`, with a signal at the given step in the cache. Where did it find the
/// thread, and how did it come out?
fn stepped(
    bench: &mut Bench,
    first: FragmentId,
    before: &State,
    signal_at: u32,
) -> (Option<u64>, Option<(u64, State)>) {
    install_handler();
    bench.ctx.gpr = before.gpr;
    bench.ctx.rflags = 0x202 | before.flags;
    bench.ctx.stub_save = [0xdead_0000_dead; 8];
    let (emitter, context) = (&raw const *bench.emitter, &raw const *bench.ctx);
    RUN.set(Some(Run { emitter, context, steps: 0, signal_at, signalled: None }));
    // SAFETY: this thread's context; the guest is two harmless fragments. The first signal sets the
    // trap flag, which stays set until the handler finds no run.
    let left = unsafe {
        set_gs(&mut *bench.ctx);
        libc::raise(libc::SIGTRAP);
        bench.emitter.enter(&mut *bench.ctx, first).unwrap()
    };
    let run = RUN.take().unwrap();
    let (rip, fragment) = run.signalled.unzip();
    fragment.flatten().into_iter().for_each(|f| bench.emitter.relink(f));
    match left {
        ExitReason::Exit(exit) => drop(bench.emitter.deopt(exit, &mut bench.ctx).unwrap()),
        ExitReason::Indirect(_) => bench.ctx.rip = bench.ctx.next_pc,
        _ => return (rip, None),
    }
    (
        rip,
        Some((bench.ctx.rip, State { gpr: bench.ctx.gpr, flags: bench.ctx.rflags & ARITH_FLAGS })),
    )
}

fn state(target: u64) -> State {
    let mut s = State { flags: 0x8d5, ..State::default() };
    for g in Gpr::all() {
        s.gpr[g.number()] = 0x1111_0000 * (g.number() as u64 + 1) + 7;
    }
    s.gpr[Gpr::RBX.number()] = target;
    s
}

/// Jumps to where rbx says, changing rcx, rsi and rdi, but no flags.
fn jumper() -> Version {
    version(
        "region 0x1000 { version t1 {
    anchor a0 = base.v0 after 0x1004 [rcx = v1, rsi = v2, rdi = v3]
    b0(v0: i64 = rbx, v1: i64 = rdi, v2: i64 = rcx, v3: i64 = rsi):
      exit a0
  } }",
    )
    .unwrap()
}

/// Adds rdx to rax; with `flags`, sets them.
fn adder(pc: u64, flags: bool) -> Version {
    let (named, made) =
        if flags { (", rflags = v3", "v3 = flags.add.i64 v0, v1") } else { ("", "") };
    version(&format!(
        "region {pc:#x} {{ version t1 {{
    anchor a0 = base.0x9000 [rax = v2{named}]
    b0(v0: i64 = rax, v1: i64 = rdx):
      v2 = add.i64 v0, v1
      {made}
      exit a0
  }} }}"
    ))
    .unwrap_or_else(|e| panic!("{e}"))
}

fn between(before: &State) -> State {
    let mut s = before.clone();
    (s.gpr[1], s.gpr[6], s.gpr[7]) = (before.gpr[7], before.gpr[1], before.gpr[6]);
    s
}

/// A destination for `pc`, and one that shares its word in the first table if `collide`: then the
/// miss stub finds it.
fn signal_everywhere(pc: u64, flags: bool, collide: bool, registered: bool) {
    for bench in [Bench::new(), Bench::naming_transfers()] {
        signals(bench, pc, flags, collide, registered);
    }
}

fn signals(mut bench: Bench, pc: u64, flags: bool, collide: bool, registered: bool) {
    let first = bench.compile(&jumper());
    let second = bench.compile(&adder(pc, flags));
    let listing = |b: &Bench| [first, second].map(|f| b.emitter.listing(f).unwrap()).concat();
    if registered {
        bench.emitter.register_entry(pc, second).unwrap();
    }
    if collide {
        let other = bench.compile(&adder(pc + 0x1_0000, true));
        bench.emitter.register_entry(pc + 0x1_0000, other).unwrap();
    }
    let before = state(pc);
    let between = between(&before);
    let mut after = between.clone();
    after.gpr[0] = before.gpr[0] + before.gpr[2];
    let undisturbed = stepped(&mut bench, first, &before, u32::MAX).1.unwrap();
    if flags && registered {
        after.flags = undisturbed.1.flags;
    }
    let expected = if registered { (0x9000, after.clone()) } else { (pc, between.clone()) };
    assert_eq!(undisturbed, expected, "{}", listing(&bench));
    let mut seen = [0; 3];
    for n in 1.. {
        let (Some(rip), out) = stepped(&mut bench, first, &before, n) else { break };
        let at = format!("signal at {rip:#x}\n{}", listing(&bench));
        let which = match out {
            None => {
                assert_eq!(
                    (bench.ctx.gpr, bench.ctx.rflags & ARITH_FLAGS),
                    (before.gpr, before.flags),
                    "{at}"
                );
                0
            }
            Some((0x9000, state)) => {
                assert_eq!(state, after, "{at}");
                2
            }
            Some((to, state)) => {
                assert_eq!((to, state), (pc, between.clone()), "{at}");
                1
            }
        };
        seen[which] += 1;
    }
    // On the way in, from the first fragment to the second's body, and from there on.
    assert!(seen[0] > 5 && seen[1] > 8 && (seen[2] > 5) == registered, "{seen:?}");
    if collide {
        assert!(seen[1] > 20, "the miss stub takes longer: {seen:?}");
    }
}

#[test]
fn signals_on_the_way_to_a_checked_entry() {
    signal_everywhere(0x40_2000, false, false, true);
}

#[test]
fn signals_on_the_way_to_an_entry_where_flags_are_dead() {
    signal_everywhere(0x40_2000, true, false, true);
}

#[test]
fn signals_on_the_way_to_a_high_address() {
    signal_everywhere(0x7fff_f678_9abc, false, false, true);
    signal_everywhere(0x8765_4321, true, false, true);
}

#[test]
fn signals_on_the_way_through_the_second_table() {
    signal_everywhere(0x40_2000, false, true, true);
    signal_everywhere(0x7fff_f678_9abc, true, true, true);
}

#[test]
fn signals_on_the_way_to_nowhere() {
    signal_everywhere(0x40_2000, false, false, false);
    signal_everywhere(0x40_2000, true, true, false);
}

#[test]
fn pcs_that_share_a_word_are_told_apart() {
    let mut bench = Bench::with_cache(4 << 20);
    let first = bench.compile(&jumper());
    // All in one word of the first table; pairs that differ in one half only; bits above the low
    // half.
    let mut pcs: Vec<u64> = (0..40).map(|i| 0x1234 + (i << 16)).collect();
    pcs.extend([0x1_0000_1234, 0x7f00_0000_1234, 0xffff_8000_0000_1234, 0x8000_1234, 0x7fff_1234]);
    for (i, pc) in pcs.iter().enumerate() {
        let mut s = state(*pc);
        assert_eq!(bench.run(first, &s).pc, *pc, "not registered yet");
        let f = bench.compile(&adder(*pc, i % 2 == 0));
        bench.emitter.register_entry(*pc, f).unwrap();
        s.gpr[0] = i as u64;
        let out = bench.run(first, &s);
        assert_eq!((out.pc, out.state.gpr[0]), (0x9000, i as u64 + s.gpr[2]));
    }
    let found = pcs.iter().filter(|pc| bench.run(first, &state(**pc)).pc == 0x9000).count();
    // Bits above 32 do not count in the second table's hash.
    assert!(found >= pcs.len() - 1, "{found} of {}", pcs.len());
    for pc in &pcs {
        bench.emitter.forget_entry(*pc);
        let out = bench.run(first, &state(*pc));
        assert_eq!((out.pc, out.state), (*pc, between(&state(*pc))));
    }
    // Where no code can be, and what an empty slot could be taken for.
    for pc in [0, u64::MAX] {
        assert_eq!(bench.run(first, &state(pc)).pc, pc);
    }
}

#[test]
fn who_jumps_is_known_from_the_next_flush_on() {
    let mut bench = Bench::new();
    let first = bench.compile(&jumper());
    assert!(bench.emitter.name_transfers() && bench.emitter.name_transfers(), "not yet");
    let out = bench.run(first, &state(0x40_2000));
    assert_eq!((out.deopt.after, bench.emitter.transfer(&bench.ctx)), (Some(0x1004), None));
    bench.emitter.flush_all();
    assert!(!bench.emitter.name_transfers());
    for from in [0x1004, 0x8000_1004, 0x7fff_f678_9abc] {
        let text = jumper().to_string().replace("0x1004", &format!("{from:#x}"));
        let first = bench.compile(&version(&text).unwrap());
        let before = state(0x40_2000);
        let out = bench.run(first, &before);
        assert_eq!((out.pc, out.state), (0x40_2000, between(&before)));
        assert_eq!(bench.emitter.transfer(&bench.ctx), Some(from));
    }
    // Who does not know leaves nobody else's name behind.
    let first =
        bench.compile(&version(&jumper().to_string().replace("after 0x1004 ", "")).unwrap());
    let out = bench.run(first, &state(0x40_2000));
    assert_eq!((out.deopt.after, bench.emitter.transfer(&bench.ctx)), (None, None));
}

#[test]
fn a_jump_to_itself_and_to_nothing_after_a_flush() {
    let mut bench = Bench::new();
    let looping = version(
        "region 0x1000 { version t1 {
    anchor a0 = base.v5 [rbx = v5, rcx = v4]
    b0(v0: i64 = rbx, v1: i64 = rcx):
      v4 = sub.i64 v1, 1
      v3 = eq.i64 v1, 0
      v5 = select.i64 v3, 0x9000, v0
      exit a0
  } }",
    )
    .unwrap_or_else(|e| panic!("{e}"));
    let f = bench.compile(&looping);
    bench.emitter.register_entry(0x1000, f).unwrap();
    let mut s = state(0x1000);
    s.gpr[1] = 100_000;
    let out = bench.run(f, &s);
    assert_eq!((out.pc, out.state.gpr[1], out.state.flags), (0x9000, u64::MAX, s.flags));
    bench.emitter.flush_all();
    let f = bench.compile(&looping);
    let out = bench.run(f, &s);
    assert_eq!((out.pc, out.state.gpr[1]), (0x1000, 99_999));
}
