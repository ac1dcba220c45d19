//! Building programs, forking children, and running a loaded program in one.

use std::ffi::{CString, OsStr};
use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{LazyLock, Mutex, MutexGuard};

use dynasour_guest::image::{LoadOptions, Loaded, check};
use nix::sys::signal::{SigHandler, Signal, signal};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, dup2_stdout, fork, pipe};

/// Lets one test run at a time: a child that another test forks would inherit descriptors that keep
/// program files busy.
pub fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A program that prints how it was started.
pub const SHOW: &str = include_str!("show.c");

/// The smallest useful program.
pub const EXIT_42: &str = "int main(void) { return 42; }";

/// Ways to link a program: a name and the compiler's options.
pub const KINDS: [(&str, &[&str]); 4] = [
    ("pie", &["-pie", "-fPIE"]),
    ("exec", &["-no-pie", "-fno-pie"]),
    ("static", &["-static", "-no-pie", "-fno-pie"]),
    ("static-pie", &["-static-pie", "-fPIE"]),
];

/// A new temporary directory.
pub fn scratch() -> tempfile::TempDir {
    tempfile::tempdir().expect("scratch directory")
}

/// Writes a file with the given mode.
pub fn file(path: &Path, contents: impl AsRef<[u8]>, mode: u32) {
    fs::write(path, contents).expect("file written");
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("mode set");
}

/// Compiles C source into `directory` under `name`.
pub fn compile(directory: &Path, name: &str, source: &str, options: &[&str]) -> PathBuf {
    let output = directory.join(name);
    let input = directory.join(format!("{name}.c"));
    fs::write(&input, source).expect("source written");
    let status =
        Command::new("cc").arg("-O1").args(options).arg("-o").arg(&output).arg(&input).status();
    assert!(status.expect("cc runs").success(), "cc {options:?} {name}");
    output
}

/// EXIT_42 in one of the [`KINDS`], as bytes; built once.
pub fn exit_42(kind: &str) -> Vec<u8> {
    static BUILT: LazyLock<Vec<(&str, Vec<u8>)>> = LazyLock::new(|| {
        let directory = scratch();
        let build = |(kind, options): (&'static str, &[&str])| {
            (kind, fs::read(compile(directory.path(), kind, EXIT_42, options)).expect("built"))
        };
        KINDS.map(build).to_vec()
    });
    BUILT.iter().find(|(name, _)| *name == kind).expect("a kind").1.clone()
}

pub fn c_strings(list: &[&str]) -> Vec<CString> {
    list.iter().map(|&string| CString::new(string).expect("no NUL")).collect()
}

/// How a child ended, and what it wrote to standard output.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    pub status: Result<i32, Signal>,
    pub stdout: Vec<u8>,
}

/// Forks a child that runs `body` and exits with its value, or with 101 if it panics.
pub fn in_child(body: impl FnOnce() -> i32) -> Outcome {
    let (reader, writer) = pipe().expect("pipe");
    // SAFETY: tests run one at a time, so no other thread of this process holds a lock that the
    // child needs, except the harness's idle ones.
    match unsafe { fork() }.expect("fork") {
        ForkResult::Child => {
            drop(reader);
            let status = catch_unwind(AssertUnwindSafe(|| {
                dup2_stdout(&writer).expect("stdout");
                drop(writer);
                // The harness would keep the message of a panic in memory, which ends with the child.
                std::panic::set_hook(Box::new(|panic| {
                    let _ = nix::unistd::write(std::io::stdout(), panic.to_string().as_bytes());
                }));
                body()
            }));
            // SAFETY: ends the child at once, without the parent's exit handlers.
            unsafe { libc::_exit(status.unwrap_or(101)) }
        }
        ForkResult::Parent { child } => {
            drop(writer);
            let mut stdout = Vec::new();
            fs::File::from(reader).read_to_end(&mut stdout).expect("child's stdout");
            let status = match waitpid(child, None).expect("child") {
                WaitStatus::Exited(_, status) => Ok(status),
                WaitStatus::Signaled(_, signal, _) => Err(signal),
                other => panic!("child: {other:?}"),
            };
            Outcome { status, stdout }
        }
    }
}

/// Loads a program in a child and jumps to it.
pub fn run_loaded(
    path: &Path,
    arguments: &[&str],
    environment: &[&str],
    options: &LoadOptions,
) -> Outcome {
    in_child(|| {
        let plan = check(path).expect("accepted");
        let loaded =
            plan.load(&c_strings(arguments), &c_strings(environment), options).expect("loaded");
        for each in [Signal::SIGSEGV, Signal::SIGBUS, Signal::SIGPIPE] {
            // SAFETY: default dispositions run no code.
            unsafe { signal(each, SigHandler::SigDfl) }.expect("disposition");
        }
        jump_to(&loaded)
    })
}

/// Jumps to a loaded program with its initial registers, replacing this process's own execution.
fn jump_to(loaded: &Loaded) -> ! {
    // SAFETY: the child needs its own stack and code no more; the loader has prepared the new
    // program's.
    unsafe {
        std::arch::asm!(
            "mov rsp, rdi",
            "push rsi",
            "xor eax, eax",
            "xor ebx, ebx",
            "xor ecx, ecx",
            "xor edx, edx",
            "xor esi, esi",
            "xor edi, edi",
            "xor ebp, ebp",
            "xor r8d, r8d",
            "xor r9d, r9d",
            "xor r10d, r10d",
            "xor r11d, r11d",
            "xor r12d, r12d",
            "xor r13d, r13d",
            "xor r14d, r14d",
            "xor r15d, r15d",
            "ret",
            in("rdi") loaded.places.stack_pointer,
            in("rsi") loaded.entry_pc,
            options(noreturn),
        )
    }
}

/// Runs a program natively: the kernel's counterpart of [`run_loaded`].
pub fn run_native(path: &Path, arguments: &[&str], environment: &[&str]) -> Outcome {
    use std::os::unix::process::{CommandExt, ExitStatusExt};
    let mut command = Command::new(path);
    command.arg0(arguments[0]).args(&arguments[1..]).env_clear();
    for entry in environment {
        let (name, value) = entry.split_once('=').expect("NAME=VALUE");
        command.env(name, value);
    }
    let output = command.stderr(std::process::Stdio::inherit()).output().expect("native run");
    let status = match (output.status.code(), output.status.signal()) {
        (Some(code), _) => Ok(code),
        (None, signal) => Err(Signal::try_from(signal.expect("a signal")).expect("a known signal")),
    };
    Outcome { status, stdout: output.stdout }
}

/// The error number with which the kernel refuses to execute a file; `None` when it executes it.
pub fn native_refusal(path: &Path, arguments: &[&OsStr]) -> Result<Vec<u8>, i32> {
    use std::os::unix::process::CommandExt;
    let mut command = Command::new(path);
    command.arg0(arguments[0]).args(&arguments[1..]).env_clear();
    match command.output() {
        Ok(output) => Ok(output.stdout),
        Err(error) => Err(error.raw_os_error().expect("an errno")),
    }
}

/// Bytes as an argument.
pub fn os(bytes: &[u8]) -> &OsStr {
    OsStr::from_bytes(bytes)
}

/// Seeded random numbers (SplitMix64). `DYNASOUR_SEED` replaces the seed; each use prints it.
pub struct Random(u64);

impl Random {
    pub fn new(user: &str) -> Random {
        let seed =
            std::env::var("DYNASOUR_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
        println!("{user}: DYNASOUR_SEED={seed}");
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, which is small.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}
