//! Each guest of `tests/guests/`, native and under every mode: identical stdout, stderr and exit
//! status.
//!
//! One test per guest. A failure names the mode, the first difference and a command line that
//! replays it. `DYNASOUR_MODES=interp cargo test --test matrix sorting -- --nocapture` runs one
//! guest in one mode and prints times.

use dynasour_testkit::Lab;
use dynasour_testkit::list;
use dynasour_testkit::mode::Mode;

fn check(name: &str) {
    let lab = Lab::new(env!("CARGO_BIN_EXE_dynasour"), env!("CARGO_TARGET_TMPDIR"));
    let guest = list::guest(name).expect("the list that made this test has the guest");
    if let Err(report) = lab.compare_guest(guest, &Mode::matrix()) {
        panic!("\n{report}\n");
    }
}

macro_rules! tests {
    ($($name:ident: $source:literal $(.$method:ident($argument:expr))*,)*) => {
        $(
            #[test]
            fn $name() {
                check(stringify!($name));
            }
        )*
    };
}

dynasour_testkit::for_each_guest!(tests);
