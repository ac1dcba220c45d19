//! Builds guests with the system's compilers, once per content.
//!
//! Each guest has a directory `guests/NAME-HASH` below the tests' temporary directory. The hash
//! covers source, shared headers, flags and compiler version. A build runs under a file lock, in a
//! sibling directory that is renamed into place. So test threads and test processes build different
//! guests in parallel, and none sees a half-finished build.

use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::run::{Invocation, Status};

/// One program of the matrix: how to build it, how to run it, how it has to end.
#[derive(Debug, Clone, Copy)]
pub struct Guest {
    /// Name of the test; also of the executable.
    pub name: &'static str,
    /// File in `tests/guests/`; its extension selects the compiler: c, cpp, S, rs, or sh for a
    /// script that is only copied.
    pub source: &'static str,
    /// Further compiler flags, after the defaults of the language.
    pub flags: &'static [&'static str],
    /// C source of a shared library `libNAME.so`, put beside the executable.
    pub library: Option<&'static str>,
    /// Arguments. `{dir}` stands for the directory of the executable.
    pub args: &'static [&'static str],
    /// Bytes on standard input.
    pub stdin: &'static [u8],
    /// How the guest ends, natively and in every mode.
    pub expect: Status,
}

impl Guest {
    /// A guest with no arguments that exits with 0.
    pub const fn new(name: &'static str, source: &'static str) -> Guest {
        Guest {
            name,
            source,
            flags: &[],
            library: None,
            args: &[],
            stdin: b"",
            expect: Status::Exited(0),
        }
    }

    /// Sets the arguments.
    pub const fn args(self, args: &'static [&'static str]) -> Guest {
        Guest { args, ..self }
    }

    /// Sets further compiler flags.
    pub const fn flags(self, flags: &'static [&'static str]) -> Guest {
        Guest { flags, ..self }
    }

    /// Sets standard input.
    pub const fn stdin(self, stdin: &'static [u8]) -> Guest {
        Guest { stdin, ..self }
    }

    /// Adds a shared library built from this C source.
    pub const fn library(self, source: &'static str) -> Guest {
        Guest { library: Some(source), ..self }
    }

    /// Declares another exit status than 0.
    pub const fn exits(self, status: i32) -> Guest {
        Guest { expect: Status::Exited(status), ..self }
    }

    /// Declares that the guest dies of a signal.
    pub const fn dies(self, signal: i32) -> Guest {
        Guest { expect: Status::Killed(signal), ..self }
    }
}

/// A built guest.
#[derive(Debug, Clone)]
pub struct Built {
    /// Its own directory, which is also its working directory.
    pub directory: PathBuf,
    /// The executable.
    pub executable: PathBuf,
}

impl Built {
    /// The native command line of the guest.
    pub fn invocation(&self, guest: &Guest) -> Invocation {
        let directory = self.directory.to_str().expect("the target directory has a UTF-8 name");
        let mut invocation = Invocation::new(&self.executable, &self.directory)
            .args(guest.args.iter().map(|argument| argument.replace("{dir}", directory)));
        if !guest.stdin.is_empty() {
            invocation.stdin = Some(self.directory.join("stdin"));
        }
        invocation
    }
}

/// The directory `tests/guests`.
pub fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in tests/").join("guests")
}

/// Builds a guest below `tmp`, unless it has been built before.
///
/// # Errors
/// The compiler's command line and messages, or the system's message.
pub fn build(guest: &Guest, tmp: &Path) -> Result<Built, String> {
    let parent = tmp.join("guests");
    fs::create_dir_all(&parent).map_err(|error| format!("{}: {error}", parent.display()))?;
    let key = format!("{}-{:016x}", guest.name, content_hash(guest)?);
    let directory = parent.join(&key);
    let built = Built { executable: directory.join(guest.name), directory };
    if built.directory.exists() {
        return Ok(built);
    }
    let lock_path = parent.join(format!("{key}.lock"));
    let lock =
        File::create(&lock_path).map_err(|error| format!("{}: {error}", lock_path.display()))?;
    lock.lock().map_err(|error| format!("{}: {error}", lock_path.display()))?;
    if built.directory.exists() {
        return Ok(built);
    }
    let staging = parent.join(format!("{key}.new"));
    crate::scratch::fresh(&staging)?;
    compile(guest, &staging)?;
    fs::rename(&staging, &built.directory)
        .map_err(|error| format!("{}: {error}", built.directory.display()))?;
    Ok(built)
}

fn content_hash(guest: &Guest) -> Result<u64, String> {
    let mut hasher = DefaultHasher::new();
    let directory = sources();
    let shared = ["guest.h", "asm.h", "bare/bare.h"];
    for name in [guest.source].iter().chain(guest.library.iter()).chain(shared.iter()) {
        let path = directory.join(name);
        fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?.hash(&mut hasher);
    }
    let compiler = compiler(guest)?;
    if let Some(program) = compiler.first() {
        let version = Command::new(program).arg("--version").output();
        version.map_err(|error| missing(program, &error))?.stdout.hash(&mut hasher);
    }
    compiler.hash(&mut hasher);
    guest.flags.hash(&mut hasher);
    guest.stdin.hash(&mut hasher);
    Ok(hasher.finish())
}

/// The compiler and its default flags; empty for a script.
fn compiler(guest: &Guest) -> Result<Vec<&'static str>, String> {
    let (_, extension) = guest.source.rsplit_once('.').unwrap_or(("", ""));
    Ok(match extension {
        "c" => vec!["cc", "-O2", "-std=gnu11", "-w"],
        "cpp" => vec!["c++", "-O2", "-std=gnu++17", "-w"],
        "S" => vec!["cc", "-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none"],
        "rs" => vec!["rustc", "--edition=2021", "-Copt-level=2", "-Cpanic=unwind", "-Adead_code"],
        "sh" => vec![],
        _ => return Err(format!("{}: no rule to build a guest from this", guest.source)),
    })
}

fn compile(guest: &Guest, directory: &Path) -> Result<(), String> {
    let source = sources().join(guest.source);
    let executable = directory.join(guest.name);
    let compiler = compiler(guest)?;
    match compiler.split_first() {
        // A script is copied; `fs::copy` keeps its permission bits.
        None => {
            fs::copy(&source, &executable)
                .map_err(|error| format!("{}: {error}", source.display()))?;
        }
        Some((program, defaults)) => {
            let mut words: Vec<OsString> = defaults.iter().map(OsString::from).collect();
            words.extend(["-o".into(), executable.into_os_string(), source.into_os_string()]);
            // Libraries must follow the source on the command line, so the guest's own flags come
            // last.
            words.extend(guest.flags.iter().map(OsString::from));
            run_compiler(program, &words)?;
        }
    }
    if let Some(library) = guest.library {
        let output = directory.join(format!("lib{}.so", guest.name));
        let mut words: Vec<OsString> =
            ["-O2", "-shared", "-fPIC", "-o"].iter().map(OsString::from).collect();
        words.extend([output.into_os_string(), sources().join(library).into_os_string()]);
        run_compiler("cc", &words)?;
    }
    if !guest.stdin.is_empty() {
        let path = directory.join("stdin");
        fs::write(&path, guest.stdin).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

fn run_compiler(program: &str, words: &[OsString]) -> Result<(), String> {
    let output =
        Command::new(program).args(words).output().map_err(|error| missing(program, &error))?;
    if output.status.success() {
        return Ok(());
    }
    let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
    Err(format!("{program} {}\n{}", words.join(" "), String::from_utf8_lossy(&output.stderr)))
}

fn missing(program: &str, error: &std::io::Error) -> String {
    format!(
        "{program}: {error} (the guests need the Debian packages gcc, g++, libc6-dev, and rustc)"
    )
}
