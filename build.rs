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
//! fails, the command is linked with `-static-pie`. What the program defines for that, and a shorter
//! start-up than the C library's where its version is known, is in `src/fixed_address.rs`. Without
//! static libraries, or with `DYNASOUR_DYNAMIC` set, it is linked dynamically, and a warning says so. With
//! the feature `prove` it is dynamic, too, because the solver's library is.
//!
//! *Order.* The functions that a start executes lie together at the front of the code: pages of a
//! file are mapped sixteen at a time, and mapping and unmapping sixteen costs 7 µs (measured), so a
//! start whose functions lie everywhere is 0.3 ms slower (measured). `src/order/functions.txt` lists
//! them; `src/order/record.py` makes that list. A name that no longer exists does no harm. Only release
//! builds have an order, because the linker takes ten seconds for it.
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

/// The functions that a start executes, one a line, in the order of their execution: a pattern of a
/// name, or the archive and the object that has it.
const FUNCTIONS: &str = "src/order/functions.txt";

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

/// What a program at a fixed address has to define, before the C library does.
const DEFINITIONS: &str = "src/fixed_address.rs";

/// The versions of glibc whose start-up is the one that [`DEFINITIONS`] can replace.
const KNOWN_STARTS: [&str; 1] = ["2.36"];

/// The program that is linked to try it: threads, thread-local destructors, unwinding, exit.
const TRIAL: &str = r#"
struct Dropped;
impl Drop for Dropped {
    fn drop(&mut self) {
        println!("dropped");
    }
}
thread_local!(static LOCAL: Dropped = Dropped);
unsafe extern "C" {
    safe fn gnu_get_libc_version() -> *const std::ffi::c_char;
}
fn main() {
    // SAFETY: a constant of the C library.
    println!("{}", unsafe { std::ffi::CStr::from_ptr(gnu_get_libc_version()) }.to_str().unwrap());
    std::thread::spawn(|| LOCAL.with(|_| ())).join().expect("a thread");
    std::panic::set_hook(Box::new(|_| ()));
    println!("{}", std::panic::catch_unwind(|| std::fs::read("/").expect("no file")).is_err());
}
"#;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={FUNCTIONS}");
    println!("cargo::rerun-if-env-changed=DYNASOUR_DYNAMIC");
    println!("cargo::rerun-if-changed={DEFINITIONS}");
    println!("cargo::rustc-check-cfg=cfg(fixed_address, own_start)");
    let target = env::var("TARGET").unwrap_or_default();
    // The solver of the feature `prove` is a dynamic library.
    let proves = env::var_os("CARGO_FEATURE_PROVE").is_some();
    let wanted = target == "x86_64-unknown-linux-gnu"
        && !proves
        && env::var_os("DYNASOUR_DYNAMIC").is_none();
    let directory = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    if !wanted || write_scripts(&directory).is_none() {
        if proves {
            return;
        }
        println!(
            "cargo::warning=no static C library: dynasour will obey LD_PRELOAD and its like itself \
             (see build.rs)"
        );
        return;
    }
    let search = format!("-L{}", directory.display());
    let arguments = match fixed_address(&directory) {
        Some(arguments) if works(&directory, &search, &arguments, "fixed_address") => {
            println!("cargo::rustc-cfg=fixed_address");
            if works(&directory, &search, &arguments, "own_start") {
                println!("cargo::rustc-cfg=own_start");
            }
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
    let script = directory.join("fixed_address.ld");
    let provide = |function| format!("PROVIDE({function} = dynasour_does_nothing);\n");
    let order =
        if env::var("PROFILE").as_deref() == Ok("release") { order()? } else { String::new() };
    fs::write(&script, OPTIONAL.map(provide).concat() + &order).ok()?;
    arguments.push(script.display().to_string());
    Some(arguments)
}

/// The part of a linker script that puts the [`FUNCTIONS`] first, and the constants of the crates
/// that a start executes.
fn order() -> Option<String> {
    let functions = fs::read_to_string(FUNCTIONS).ok()?;
    let crates = ["dynasour_runtime", "dynasour_guest"].map(|name| format!("*lib{name}-*.rlib:*"));
    let in_crates =
        |sections: &str| crates.each_ref().map(|c| format!("{c}({sections}) ")).concat();
    let section = |line: &str| match line.split_once(':') {
        Some((archive, object)) => format!("    *{archive}:{object}(.text .text.*)\n"),
        None => format!("    *(.text.{line}* .text.unlikely.{line}*)\n"),
    };
    // Of a generic function, all copies of the crates, in case the hash of the name has changed.
    let copies = |line: &str| {
        let (name, _) = line.rsplit_once("17h").filter(|(_, hash)| *hash != "*")?;
        let sections = format!(".text.{name}17h* .text.unlikely.{name}17h*");
        Some(format!("    {} *dynasour-*.rcgu.o({sections})\n", in_crates(&sections)))
    };
    let all = functions.lines().map(section).chain(functions.lines().filter_map(copies));
    let text = all.fold("    *Scrt1.o(.text)\n".to_string(), |text, line| text + &line);
    let constants = in_crates(".rodata .rodata.*");
    Some(format!(
        "SECTIONS {{ .text.start : {{\n{text}}} }} INSERT BEFORE .text;\n\
         SECTIONS {{ .rodata.start : {{\n{constants}}} }} INSERT BEFORE .rodata;\n"
    ))
}

/// Can a program be linked with these arguments and `cfg`, and does it run?
fn works(directory: &Path, search: &str, arguments: &[String], cfg: &str) -> bool {
    let (source, program) = (directory.join("trial.rs"), directory.join("trial"));
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let Ok(definitions) = fs::canonicalize(DEFINITIONS) else { return false };
    let text = format!("#[path = {definitions:?}]\nmod fixed_address;\n{TRIAL}");
    let linked = fs::write(&source, text).is_ok()
        && Command::new(rustc)
            .args(["--edition=2024", "--cfg", cfg, "-o"])
            .arg(&program)
            .arg(&source)
            .args(
                std::iter::once(search)
                    .chain(arguments.iter().map(String::as_str))
                    .flat_map(|argument| ["-C".to_string(), format!("link-arg={argument}")]),
            )
            .output()
            .is_ok_and(|rustc| rustc.status.success());
    let Some(run) = linked.then(|| Command::new(&program).output().ok()).flatten() else {
        return false;
    };
    let printed = String::from_utf8_lossy(&run.stdout);
    let Some((version, rest)) = printed.split_once('\n') else { return false };
    rest == "dropped\ntrue\n" && (cfg != "own_start" || KNOWN_STARTS.contains(&version))
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
