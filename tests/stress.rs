//! The stress job: 16 threads that do everything at once
//! ([`threads_stress`](guests/threads_stress.c)), in each tier.
//!
//! The threads use timers, queued signals, faults, forks, other programs, and changes of
//! protections and of code, at random from a seed. The guest itself checks its results, that no
//! signal and no timer expiration is lost, and that no thread gets stuck. This test watches the
//! process from outside: its memory and its descriptors, the host's included, must not grow.
//!
//! A run takes 5 seconds. `DYNASOUR_STRESS=300 cargo test --release --test stress` is the job of 5
//! minutes, all tiers at once; with `-- --test-threads=1` one after the other.
//! `DYNASOUR_STRESS_SEED=N` chooses the seed.

use std::fs;
use std::time::Duration;

use dynasour_testkit::mode::Mode;
use dynasour_testkit::{Lab, build, list};

const THREADS: &str = "16";

/// What a run without errors reports.
const EXPECTED: &str =
    "balance 0, 0 sums of expirations wrong, 0 threads idle, 0 timers unheard, ticks\n";

/// Resident kilobytes that no run may exceed (guess; most of it is the code cache, 64 MiB at most).
/// A limit too high hides a leak.
const MOST_RESIDENT: u64 = 400 << 10;

/// Kilobytes by which the peak of the second half of a run may exceed that of the first (guess; a
/// limit too high hides a leak).
const MOST_GROWTH: u64 = 32 << 10;

/// The most open descriptors: the guest's 35, and room for the host's and for those open for a
/// moment (guess).
const MOST_DESCRIPTORS: u64 = 35 + 16;

/// The largest values that were seen.
#[derive(Clone, Copy, Default)]
struct Most {
    resident: u64,
    descriptors: u64,
}

impl Most {
    fn of(process: u32) -> Option<Most> {
        let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        let resident = resident.trim_end_matches("kB").trim().parse().ok()?;
        let descriptors = fs::read_dir(format!("/proc/{process}/fd")).ok()?.count() as u64;
        Some(Most { resident, descriptors })
    }

    fn and(self, other: Most) -> Most {
        Most {
            resident: self.resident.max(other.resident),
            descriptors: self.descriptors.max(other.descriptors),
        }
    }
}

fn from_environment(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| {
        text.parse().unwrap_or_else(|_| panic!("{name} must be a number"))
    })
}

fn stress(mode: Mode) {
    let lab = Lab::new(env!("CARGO_BIN_EXE_dynasour"), env!("CARGO_TARGET_TMPDIR"));
    let guest = list::guest("threads_stress").expect("the list has the guest");
    let built = build::build(guest, &lab.tmp).expect("the guest builds");
    let seconds = from_environment("DYNASOUR_STRESS", 5);
    let seed = from_environment("DYNASOUR_STRESS_SEED", 1);
    let mut native = built.invocation(guest);
    native.args = [seed.to_string(), (seconds * 1000).to_string(), THREADS.to_owned()]
        .map(Into::into)
        .to_vec();
    native.limit = Duration::from_secs(seconds * 2 + 150);
    let run = lab.launcher.wrap(&mode, &native);

    let mut seen = Vec::new();
    let outcome =
        run.run_observed(Duration::from_millis(50), |process| seen.extend(Most::of(process)));
    let replay = format!("\n{}\n  replay: {run}", outcome.excerpt());
    assert_eq!(outcome.status, dynasour_testkit::run::Status::Exited(0), "{replay}");
    assert_eq!(String::from_utf8_lossy(&outcome.stdout), EXPECTED, "{replay}");
    assert_eq!(String::from_utf8_lossy(&outcome.stderr), "", "{replay}");

    assert!(seen.len() >= 10, "the process was seen {} times{replay}", seen.len());
    let (early, late) = seen.split_at(seen.len() / 2);
    let [early, late] =
        [early, late].map(|half| half.iter().fold(Most::default(), |most, one| most.and(*one)));
    println!(
        "{}: {} KiB, then {}; {} descriptors, then {}",
        mode.name, early.resident, late.resident, early.descriptors, late.descriptors
    );
    assert!(late.resident <= MOST_RESIDENT, "{} KiB resident{replay}", late.resident);
    let growth = late.resident.saturating_sub(early.resident);
    assert!(growth <= MOST_GROWTH, "memory grew by {growth} KiB{replay}");
    assert!(late.descriptors <= MOST_DESCRIPTORS, "{} descriptors{replay}", late.descriptors);
}

macro_rules! modes {
    ($($name:ident: $flags:literal,)*) => {
        $(
            #[test]
            fn $name() {
                stress(Mode::new(stringify!($name), $flags));
            }
        )*
    };
}

modes! {
    interp: "--tier interp",
    dynamo: "--tier dynamo",
    copy: "--tier copy",
    direct: "--tier direct",
    stack: "--tier copy --returns stack",
    full: "--tier full --threshold 50",
}
