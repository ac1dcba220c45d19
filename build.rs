//! Links the `dynasour` command statically where the system has static libraries.
//!
//! *Why.* `LD_PRELOAD`, `LD_LIBRARY_PATH`, `LD_TRACE_LOADED_OBJECTS`, `LD_DEBUG` and similar
//! variables are meant for the guest. If dynasour had a dynamic linker of its own, that linker
//! would obey them first. (It would also cost a millisecond of each start, measured.)
//!
//! *How.* `-C target-feature=+crt-static` would do it. But cargo can pass that only together with a
//! `--target`, because procedural macros are dynamic libraries, and with `--target` the binaries
//! move to another directory. So the linker is told directly: `-static-pie`, and for each library
//! that rustc asks for a *linker script* that names the archive. The directory with the scripts
//! comes first in the search path. Without static libraries, or with `DYNASOUR_DYNAMIC` set, the
//! command is linked dynamically and a warning says so.
//!
//! Example: `libm.a` in `OUT_DIR` contains `INPUT(/usr/lib/x86_64-linux-gnu/libm.a)`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// The libraries that rustc passes as `-l` for a program that uses the Rust standard library.
const LIBRARIES: [&str; 6] = ["c", "m", "dl", "rt", "pthread", "util"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=DYNASOUR_DYNAMIC");
    let target = env::var("TARGET").unwrap_or_default();
    let wanted = target == "x86_64-unknown-linux-gnu" && env::var_os("DYNASOUR_DYNAMIC").is_none();
    let directory = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    if wanted && write_scripts(&directory).is_some() {
        // Only for the command: tests are linked as usual.
        println!("cargo::rustc-link-arg-bin=dynasour=-L{}", directory.display());
        println!("cargo::rustc-link-arg-bin=dynasour=-static-pie");
    } else {
        println!(
            "cargo::warning=no static C library: dynasour will obey LD_PRELOAD and its like itself \
             (see build.rs)"
        );
    }
}

/// Writes one script per library; `None` if an archive is missing or a script cannot be written.
fn write_scripts(directory: &Path) -> Option<()> {
    for name in LIBRARIES {
        write(directory, name, &format!("INPUT({})", archive(name)?))?;
    }
    // The unwinder calls the C library and the C library calls the unwinder.
    let parts = ["gcc_eh", "gcc", "c"].map(archive);
    let [unwinder, support, c] = parts;
    write(directory, "gcc_s", &format!("GROUP({} {} {})", unwinder?, support?, c?))
}

fn write(directory: &Path, name: &str, script: &str) -> Option<()> {
    fs::write(directory.join(format!("lib{name}.a")), script).ok()
}

/// The path at which the compiler finds `libNAME.a`.
fn archive(name: &str) -> Option<String> {
    let file = format!("lib{name}.a");
    let output = Command::new("cc").arg(format!("-print-file-name={file}")).output().ok()?;
    let path = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    // If the compiler finds no such file, it prints the file's name without a directory.
    (path != file && Path::new(&path).is_absolute()).then_some(path)
}
