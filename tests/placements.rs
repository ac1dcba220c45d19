//! Selected guests under every guard placement, with every head compiled at once and with guards
//! that fail at random. The output of a program must not depend on where its guards stand.

use dynasour_runtime::config::placement::PLACEMENTS;
use dynasour_testkit::mode::Mode;
use dynasour_testkit::{Lab, list};

fn check(name: &str) {
    let lab = Lab::new(env!("CARGO_BIN_EXE_dynasour"), env!("CARGO_TARGET_TMPDIR"));
    let guest = list::guest(name).expect("a guest of the list");
    let flags = [
        "--tier dynamo --threshold 1",
        "--tier dynamo --threshold 2 --chaos 1/5,3",
        "--tier full --threshold 20",
    ];
    let modes: Vec<Mode> = PLACEMENTS
        .iter()
        .flat_map(|placement| flags.map(|flags| (placement.name(), flags)))
        .map(|(name, flags)| Mode {
            name,
            flags: ["--policy", name]
                .into_iter()
                .chain(flags.split(' '))
                .map(str::to_owned)
                .collect(),
        })
        .collect();
    if let Err(report) = lab.compare_guest(guest, &modes) {
        panic!("\n{report}\n");
    }
}

macro_rules! guests {
    ($($name:ident)*) => { $(#[test] fn $name() { check(stringify!($name)); })* };
}

guests! {
    sorting
    sorting_unoptimised
    carry_chains
    flags_alu
    jump_tables
    computed_goto
    exceptions
    hashing
    string_instructions
    self_modifying
    signals_faults
    threads
}
