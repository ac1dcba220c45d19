//! The native oracle (docs/design.md, "Correctness"): small guests run in the interpreter and,
//! single-stepped, on the processor. All state is compared after every instruction.
//!
//! Each guest runs in a process of its own, on one core with its native twin: the test program
//! executes itself again. The guests are those of `tests/guests/`; those in C get the miniature
//! library of `tests/guests/bare/` instead of glibc.
//!
//! * `DYNASOUR_ORACLE_STEPS=N` changes the number of steps from [`STEPS`];
//! * `DYNASOUR_ORACLE_FULL=1` compares all writable memory after every step;
//! * `DYNASOUR_FRAGMENTS_CASES=N` and `DYNASOUR_FRAGMENTS_SEED=N` choose the cases of the
//!   comparison of fragments ([`fragments`]);
//! * `DYNASOUR_ORACLE_PROGRAM=FILE cargo test --test oracle any_program` compares any static
//!   program without glibc.

mod fragments;
mod lockstep;
mod native;
mod state;

use std::path::{Path, PathBuf};
use std::process::Command;

use dynasour_testkit::build::{self, Guest};
use lockstep::End;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

/// Steps that are compared of each guest (guess; more take longer, and later code is not covered).
const STEPS: u64 = 30_000;
/// Seconds after which a comparison counts as stuck (guess).
const TIMEOUT: u32 = 300;

/// Environment variable that tells a process to do the comparison itself.
const INSIDE: &str = "DYNASOUR_ORACLE_INSIDE";
/// Environment variable: the state to damage on the interpreter's side after [`DISTURBED_STEP`]
/// steps, to test the comparison.
const DISTURB: &str = "DYNASOUR_ORACLE_DISTURB";
const DISTURBED_STEP: u64 = 1000;

/// Flags for guests in C: nothing of glibc, and no red zone, since the guests push flags in inline
/// assembly.
const BARE: &[&str] = &[
    "-Itests/guests/bare",
    "-nostdlib",
    "-static",
    "-no-pie",
    "-ffreestanding",
    "-fno-stack-protector",
    "-fno-asynchronous-unwind-tables",
    "-mno-red-zone",
    "-fcf-protection=none",
    "-Wl,--build-id=none",
    "-lgcc",
];

/// Compares `executable` in a new process, as the test called `name`. Returns whether the two sides
/// agreed, and the output.
fn compare_outside(name: &str, executable: &Path, disturb: Option<&str>) -> (bool, String) {
    let test = std::env::current_exe().expect("the test's own file");
    let mut command = Command::new(test);
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]).env(INSIDE, executable);
    command.envs(disturb.map(|what| (DISTURB, what)));
    let output = command.output().expect("the test starts");
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    println!("{text}\n{}", output.status);
    (output.status.success(), text)
}

fn build(guest: &Guest) -> PathBuf {
    let built = build::build(guest, Path::new(env!("CARGO_TARGET_TMPDIR")))
        .unwrap_or_else(|error| panic!("{error}"));
    built.executable
}

/// Compares the guest that this process was told to compare, if any; panics on a difference.
fn compare_inside() -> Option<End> {
    let executable = PathBuf::from(std::env::var_os(INSIDE)?);
    let steps =
        std::env::var("DYNASOUR_ORACLE_STEPS").ok().map(|n| n.parse().expect("a number of steps"));
    // SAFETY: plain system calls.
    let core = unsafe {
        libc::alarm(TIMEOUT);
        libc::sched_getcpu()
    };
    let mut cores = CpuSet::new();
    cores.set(usize::try_from(core).unwrap_or(0)).expect("a core that exists");
    sched_setaffinity(Pid::from_raw(0), &cores).expect("a core to run on");
    let start = std::time::Instant::now();
    let disturb = std::env::var(DISTURB).ok().map(|what| (DISTURBED_STEP, what));
    let agreement = lockstep::compare(&executable, steps.unwrap_or(STEPS), disturb);
    let agreement = agreement.unwrap_or_else(|report| panic!("{report}"));
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{} steps agree, {} encodings, {:?}, {seconds:.2} s",
        agreement.steps,
        agreement.codes.len(),
        agreement.end
    );
    Some(agreement.end)
}

/// One test: `end` is how the guest must end if the step limit allows it to end.
fn oracle(name: &str, guest: &Guest, end: End) {
    match compare_inside() {
        Some(found) => {
            assert!(found == end || found == End::Budget, "ended with {found:?} instead of {end:?}")
        }
        None => assert!(
            compare_outside(name, &build(guest), None).0,
            "{name}: the two sides differ, see above"
        ),
    }
}

macro_rules! guests {
    ($($name:ident: $source:literal $flags:expr, $end:expr;)*) => {
        $(#[test]
        fn $name() {
            let guest = Guest::new(concat!("oracle_", stringify!($name)), $source).flags($flags);
            oracle(stringify!($name), &guest, $end);
        })*
    };
}

guests! {
    asm_hello: "asm_hello.S" &[], End::Exited(42);
    asm_sieve: "asm_sieve.S" &[], End::Exited(0);
    asm_calls: "asm_calls.S" &[], End::Exited(1);
    asm_flags: "asm_flags.S" &[], End::Exited(0);
    asm_strings: "asm_strings.S" &[], End::Exited(0);
    asm_vector: "asm_vector.S" &[], End::Exited(0);
    flags_alu: "flags_alu.c" BARE, End::Exited(0);
    flags_shift: "flags_shift.c" BARE, End::Exited(0);
    flags_register: "flags_register.c" BARE, End::Exited(0);
    muldiv: "muldiv.c" BARE, End::Exited(0);
    carry_chains: "carry_chains.c" BARE, End::Exited(0);
    bit_operations: "bit_operations.c" BARE, End::Exited(0);
    partial_registers: "partial_registers.c" BARE, End::Exited(0);
    string_instructions: "string_instructions.c" BARE, End::Exited(0);
    locked: "locked.c" BARE, End::Exited(0);
    sse: "sse.c" BARE, End::Exited(0);
    avx: "avx.c" BARE, End::Exited(0);
    avx512: "avx512.c" BARE, End::Exited(0);
    x87: "x87.c" BARE, End::Exited(0);
    mmx: "mmx.c" BARE, End::Exited(0);
    jump_tables: "jump_tables.c" BARE, End::Exited(0);
    computed_goto: "computed_goto.c" BARE, End::Exited(0);
    recursion: "recursion.c" BARE, End::Exited(0);
    bytecode: "bytecode.c" BARE, End::Exited(0);
    call_tricks: "call_tricks.c" BARE, End::Exited(0);
    tail_calls: "tail_calls.c" BARE, End::Exited(0);
    indirect_calls: "indirect_calls.c" BARE, End::Exited(0);
    hashing: "hashing.c" BARE, End::Exited(0);
    sorting: "sorting.c" BARE, End::Exited(0);
    fpe_skip: "fpe_skip.c" BARE, End::Exited(0);
    segv_ucontext: "segv_ucontext.c" BARE, End::Exited(0);
    sigill: "sigill.c" BARE, End::Exited(4);
}

/// The program named by `DYNASOUR_ORACLE_PROGRAM`, for manual runs.
#[test]
fn any_program() {
    if compare_inside().is_none() {
        let Some(program) = std::env::var_os("DYNASOUR_ORACLE_PROGRAM") else { return };
        assert!(compare_outside("any_program", &PathBuf::from(program), None).0);
    }
}

/// Number of seeds that every run of the tests compares (guess).
const FRAGMENT_CASES: u64 = 6000;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

#[test]
fn fragments_equal_the_interpreter() {
    if std::env::var_os(INSIDE).is_none() {
        let (agreed, _) =
            compare_outside("fragments_equal_the_interpreter", Path::new("fragments"), None);
        assert!(agreed, "a fragment differs, see above");
        return;
    }
    let first = setting("DYNASOUR_FRAGMENTS_SEED", 1);
    let cases = setting("DYNASOUR_FRAGMENTS_CASES", FRAGMENT_CASES);
    let start = std::time::Instant::now();
    let tally = fragments::campaign(first, cases).unwrap_or_else(|report| panic!("{report}"));
    println!("{tally:?} in {:.1} s", start.elapsed().as_secs_f64());
    // A campaign that covers nothing would prove nothing.
    if cases >= FRAGMENT_CASES {
        let kinds = [
            tally.loops,
            tally.forced,
            tally.guards,
            tally.polls,
            tally.faults,
            tally.ends,
            tally.vector,
        ];
        assert!(u64::from(tally.traces) > cases / 2 && kinds.iter().all(|n| *n > 100), "{tally:?}");
    }
}

#[test]
fn copied_blocks_equal_the_interpreter() {
    if std::env::var_os(INSIDE).is_none() {
        let (agreed, _) =
            compare_outside("copied_blocks_equal_the_interpreter", Path::new("fragments"), None);
        assert!(agreed, "a copied block differs, see above");
        return;
    }
    let first = setting("DYNASOUR_FRAGMENTS_SEED", 1);
    let cases = setting("DYNASOUR_FRAGMENTS_CASES", FRAGMENT_CASES);
    let tally =
        fragments::copies::campaign(first, cases).unwrap_or_else(|report| panic!("{report}"));
    println!("{tally:?}");
    if cases >= FRAGMENT_CASES {
        let kinds = [tally.ends, tally.faults, tally.exits, tally.indirect, tally.cuts];
        assert!(u64::from(tally.runs) > cases && kinds.iter().all(|n| *n > 100), "{tally:?}");
    }
}

#[test]
fn fragments_that_were_wrong() {
    if std::env::var_os(INSIDE).is_none() {
        let (agreed, _) =
            compare_outside("fragments_that_were_wrong", Path::new("fragments"), None);
        assert!(agreed, "a fragment differs, see above");
        return;
    }
    fragments::kept().unwrap_or_else(|report| panic!("{report}"));
}

#[test]
fn a_difference_is_reported_where_it_arises() {
    if compare_inside().is_some() {
        return;
    }
    let program = build(&Guest::new("oracle_asm_flags", "asm_flags.S"));
    for (what, expected) in [
        ("register", "r14: native 0x0, interpreted 0x1\n"),
        ("flag", "rflags: native "),
        ("vector", "_0000000000000001\n"),
        ("stack", "]: native 0000000000000000, interpreted 0000000000000001\n"),
    ] {
        let (agreed, text) =
            compare_outside("a_difference_is_reported_where_it_arises", &program, Some(what));
        assert!(!agreed && text.contains(expected), "{what}");
        // No operand names this memory: the difference is found when all memory is compared, before
        // the next system call.
        let step = if what == "stack" { "  before this instruction" } else { "step 1001 at 0x" };
        assert!(text.contains(step), "{what}");
    }
}
