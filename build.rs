//! Links the `dynasour` command statically where the system has static libraries, at a fixed address
//! where that works.
//!
//! *Why.* `LD_PRELOAD`, `LD_LIBRARY_PATH`, `LD_TRACE_LOADED_OBJECTS`, `LD_DEBUG` and similar
//! variables are meant for the guest. If dynasour had a dynamic linker of its own, that linker
//! would obey them first. It would also cost a millisecond of each start. And a static program that
//! can lie anywhere has 12,800 addresses to correct on 49 pages, which costs another 0.15 ms
//! (measured).
//!
//! *How.* `-C target-feature=+crt-static` would do it. But cargo can pass that only together with a
//! `--target`, because procedural macros are dynamic libraries, and with `--target` the binaries
//! move to another directory. So the linker is told directly: `-static` or `-static-pie`, and for
//! each library that rustc asks for a *linker script* that names the archive. The directory with the
//! scripts comes first in the search path.
//!
//! The fixed address is high, because low addresses are the guest's. Some objects cannot go there:
//! those of the C compiler's start-up code that are made for low addresses, which a Rust program does
//! not need, and calls of functions that the C library calls only if they exist, which then lie at
//! address 0, out of reach. Such functions are given a definition that does nothing. Whether all of
//! that works depends on the C library, so a small program is linked in the same way and run. If it
//! fails, the command is linked with `-static-pie`. Without static libraries, or with
//! `DYNASOUR_DYNAMIC` set, it is linked dynamically, and a warning says so.
//!
//! Example: `libm.a` in `OUT_DIR` contains `INPUT(/usr/lib/x86_64-linux-gnu/libm.a)`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// The libraries that rustc passes as `-l` for a program that uses the Rust standard library.
const LIBRARIES: [&str; 6] = ["c", "m", "dl", "rt", "pthread", "util"];

/// Where the command lies: below the addresses at which Linux puts programs that can lie anywhere,
/// and the break of all programs.
const ADDRESS: &str = "0x555500000000";

/// Functions of glibc that it calls only if something else in the program needs them.
const OPTIONAL: [&str; 20] = [
    "__call_tls_dtors",
    "__default_pthread_attr_freeres",
    "__glibc_tls_internal_free",
    "__libc_dlerror_result_free",
    "__libpthread_freeres",
    "__malloc_arena_thread_freeres",
    "__malloc_fork_lock_parent",
    "__malloc_fork_unlock_child",
    "__malloc_fork_unlock_parent",
    "__mq_notify_fork_subprocess",
    "__nss_action_freeres",
    "__nss_database_fork_prepare_parent",
    "__nss_database_fork_subprocess",
    "__nss_database_freeres",
    "__nss_module_freeres",
    "__pthread_initialize_minimal",
    "__res_thread_freeres",
    "__timer_fork_subprocess",
    "_dl_find_object_init",
    "__gmon_start__",
];

/// What a program at a fixed address has to define, before the C library does: what optional
/// functions do, and the correction of addresses, which glibc's start-up code calls.
const DEFINITIONS: &str = r#"
#[unsafe(no_mangle)]
extern "C" fn dynasour_does_nothing() {}
#[unsafe(no_mangle)]
extern "C" fn _dl_relocate_static_pie() {}
"#;

/// The program that is linked to try it: threads, thread-local destructors, unwinding, exit.
const TRIAL: &str = r#"
struct Dropped;
impl Drop for Dropped {
    fn drop(&mut self) {
        println!("dropped");
    }
}
thread_local!(static LOCAL: Dropped = Dropped);
fn main() {
    std::thread::spawn(|| LOCAL.with(|_| ())).join().expect("a thread");
    std::panic::set_hook(Box::new(|_| ()));
    println!("{}", std::panic::catch_unwind(|| std::fs::read("/").expect("no file")).is_err());
}
"#;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=DYNASOUR_DYNAMIC");
    println!("cargo::rustc-check-cfg=cfg(fixed_address)");
    let target = env::var("TARGET").unwrap_or_default();
    let wanted = target == "x86_64-unknown-linux-gnu" && env::var_os("DYNASOUR_DYNAMIC").is_none();
    let directory = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    fs::write(directory.join("fixed_address.rs"), DEFINITIONS).expect("OUT_DIR can be written");
    if !wanted || write_scripts(&directory).is_none() {
        println!(
            "cargo::warning=no static C library: dynasour will obey LD_PRELOAD and its like itself \
             (see build.rs)"
        );
        return;
    }
    let search = format!("-L{}", directory.display());
    let arguments = match fixed_address(&directory) {
        Some(arguments) if works(&directory, &search, &arguments) => {
            println!("cargo::rustc-cfg=fixed_address");
            arguments
        }
        _ => vec!["-static-pie".into()],
    };
    // Only for the command: tests are linked as usual.
    for argument in std::iter::once(&search).chain(&arguments) {
        println!("cargo::rustc-link-arg-bin=dynasour={argument}");
    }
}

/// The linker's arguments for a static program at [`ADDRESS`]; none if an object is missing.
fn fixed_address(directory: &Path) -> Option<Vec<String>> {
    let mut arguments: Vec<String> = ["-no-pie", "-static", "-nostartfiles"].map(Into::into).into();
    arguments.push(format!("-Wl,--image-base={ADDRESS}"));
    for object in ["Scrt1.o", "crti.o", "crtn.o"] {
        arguments.push(found(object)?);
    }
    let script = directory.join("optional.ld");
    let provide = |function| format!("PROVIDE({function} = dynasour_does_nothing);\n");
    fs::write(&script, OPTIONAL.map(provide).concat()).ok()?;
    arguments.push(script.display().to_string());
    Some(arguments)
}

/// Can a program be linked with these arguments, and does it run?
fn works(directory: &Path, search: &str, arguments: &[String]) -> bool {
    let (source, program) = (directory.join("trial.rs"), directory.join("trial"));
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let linked = fs::write(&source, format!("{DEFINITIONS}{TRIAL}")).is_ok()
        && Command::new(rustc)
            .args(["--edition=2024", "-o"])
            .arg(&program)
            .arg(&source)
            .args(
                std::iter::once(search)
                    .chain(arguments.iter().map(String::as_str))
                    .flat_map(|argument| ["-C".to_string(), format!("link-arg={argument}")]),
            )
            .output()
            .is_ok_and(|rustc| rustc.status.success());
    let runs = || Command::new(&program).output().is_ok_and(|run| run.stdout == b"dropped\ntrue\n");
    linked && runs()
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
    found(&format!("lib{name}.a"))
}

/// The path at which the compiler finds an archive or an object.
fn found(file: &str) -> Option<String> {
    let output = Command::new("cc").arg(format!("-print-file-name={file}")).output().ok()?;
    let path = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    // If the compiler finds no such file, it prints the file's name without a directory.
    (path != file && Path::new(&path).is_absolute()).then_some(path)
}
