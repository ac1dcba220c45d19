//! The `dynasour` command.
//!
//! There is no Rust `main`: std's start-up would change what the guest inherits (it ignores SIGPIPE, installs
//! handlers and an alternate stack, opens descriptors 0 to 2), so the C runtime calls us directly (DESIGN 7).

#![no_main]

mod cli;

use clap::Parser;
use cli::{Cli, Command};
use std::ffi::{c_char, c_int};

/// Called by the C runtime. The arguments reach `std::env` by glibc's own initialisation.
#[unsafe(no_mangle)]
extern "C" fn main(_argc: c_int, _argv: *const *const c_char) -> c_int {
    // Usage errors end here with status 2, `--help` and `--version` with 0.
    let cli = Cli::parse();
    match cli.command {
        Command::Run(args) => match dynasour_runtime::run(&args.into_config()) {
            Ok(never) => match never {},
            Err(error) => {
                eprintln!("dynasour: {error}");
                error.exit_status()
            }
        },
    }
}
