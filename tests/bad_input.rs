//! Input that must be refused, and guests that crash.
//!
//! * A file that cannot be run is refused with one line that names it and the reason, and status
//!   127 (it does not exist) or 126 (it cannot be run). Nothing of it is executed.
//! * A usage error has status 2; nothing is executed either.
//! * A guest that crashes has the same wait status as natively.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Write;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use dynasour_testkit::run::{self, Invocation, Outcome, Status, text};
use dynasour_testkit::{build, list, scratch};

const DYNASOUR: &str = env!("CARGO_BIN_EXE_dynasour");
const TIERS: [&str; 5] = ["interp", "dynamo", "copy", "direct", "full"];

/// An empty directory of this test's own.
fn directory(name: &str) -> PathBuf {
    run::disable_core_dumps();
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bad_input").join(name);
    scratch::fresh(&directory).expect("a scratch directory");
    directory
}

/// The built executable of a guest of the matrix.
fn guest(name: &str) -> PathBuf {
    let guest = list::guest(name).expect("a guest of the list");
    build::build(guest, Path::new(env!("CARGO_TARGET_TMPDIR"))).expect("it builds").executable
}

fn write(path: &Path, bytes: impl AsRef<[u8]>, mode: u32) {
    scratch::write_program(path, bytes.as_ref(), mode).expect("a program");
}

fn dynasour(directory: &Path, words: &[&str]) -> Outcome {
    Invocation::new(DYNASOUR, directory).args(words).run()
}

/// Asserts that a run refused its program: one line `dynasour: NAME: …`, and nothing else. Returns
/// the reason.
#[track_caller]
fn reason(outcome: &Outcome, name: &str, status: i32) -> String {
    let message = text(&outcome.stderr);
    assert_eq!(outcome.status, Status::Exited(status), "{message}");
    assert_eq!(text(&outcome.stdout), "", "something was executed");
    let line = message.strip_suffix('\n').filter(|line| !line.contains('\n'));
    let line = line.unwrap_or_else(|| panic!("not one line: {message:?}"));
    let reason = line.strip_prefix(&format!("dynasour: {name}: "));
    reason.unwrap_or_else(|| panic!("{line:?} does not name {name:?}")).to_owned()
}

/// Runs `./NAME` in `directory`; the run must be refused for a reason that contains `part`.
#[track_caller]
fn refused(directory: &Path, name: &str, status: i32, part: &str) {
    let name = format!("./{name}");
    let reason = reason(&dynasour(directory, &["run", "--", &name]), &name, status);
    assert!(reason.contains(part), "{reason:?} does not say {part:?}");
}

#[test]
fn files_that_are_no_programs() {
    let here = directory("files");
    let program = fs::read(guest("asm_hello")).expect("a program");
    refused(&here, "missing", 127, "no such file or directory");
    fs::create_dir(here.join("directory")).expect("mkdir");
    refused(&here, "directory", 126, "is a directory");
    write(&here.join("plain"), &program, 0o644);
    refused(&here, "plain", 126, "permission denied");
    refused(&here, "plain/below", 126, "Not a directory");
    write(&here.join("empty"), "", 0o755);
    refused(&here, "empty", 126, "neither an ELF file nor a script");
    write(&here.join("text"), "echo executed\n", 0o755);
    refused(&here, "text", 126, "neither an ELF file nor a script");
    write(&here.join("script"), "#!/nonexistent/shell\necho executed\n", 0o755);
    refused(
        &here,
        "script",
        126,
        "script interpreter /nonexistent/shell: no such file or directory",
    );
    write(&here.join("nameless"), "#!\necho executed\n", 0o755);
    refused(&here, "nameless", 126, "#! line");
    symlink("dangling", here.join("dangling")).expect("symlink");
    refused(&here, "dangling", 126, "symbolic link");
    nix::unistd::mkfifo(&here.join("fifo"), nix::sys::stat::Mode::S_IRWXU).expect("mkfifo");
    refused(&here, "fifo", 126, "not a regular file");
    // A name with a newline, which would break the line.
    let broken = dynasour(&here, &["run", "--", "./two\nlines"]);
    assert_eq!(reason(&broken, r#""./two\nlines""#, 127), "no such file or directory");
    let unheard = dynasour(&here, &["run", "--", "no-such-command"]);
    assert_eq!(reason(&unheard, "no-such-command", 127), "command not found");
    let nothing = dynasour(&here, &["run", "--", ""]);
    assert_eq!(reason(&nothing, r#""""#, 127), "no such file or directory");
}

/// Fields of an ELF header and of program headers, by their position in a 64-bit file (System V
/// gABI).
mod field {
    use std::ops::Range;

    pub const CLASS: Range<usize> = 4..5;
    pub const BYTE_ORDER: Range<usize> = 5..6;
    pub const TYPE: Range<usize> = 16..18;
    pub const MACHINE: Range<usize> = 18..20;
    pub const ENTRY: Range<usize> = 24..32;
    pub const PROGRAM_HEADERS: Range<usize> = 32..40;
    pub const PROGRAM_HEADER_SIZE: Range<usize> = 54..56;
    pub const PROGRAM_HEADER_COUNT: Range<usize> = 56..58;

    /// Within a program header.
    pub const FILE_OFFSET: usize = 8;
    pub const ADDRESS: usize = 16;
    pub const FILE_SIZE: usize = 32;
    pub const MEMORY_SIZE: usize = 40;
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// Position of the program header of the first loadable segment.
fn first_load(bytes: &[u8]) -> usize {
    const PT_LOAD: [u8; 4] = [1, 0, 0, 0];
    let table = number(bytes, field::PROGRAM_HEADERS.start) as usize;
    (table..).step_by(56).find(|&at| bytes[at..at + 4] == PT_LOAD).expect("a segment")
}

/// `program` with the field at `at` set to the little-endian `value`.
fn changed(program: &[u8], at: Range<usize>, value: u64) -> Vec<u8> {
    let mut bytes = program.to_vec();
    let len = at.len();
    bytes[at].copy_from_slice(&value.to_le_bytes()[..len]);
    bytes
}

#[test]
fn elf_files_that_cannot_be_run() {
    let here = directory("elf");
    let program = fs::read(guest("asm_hello")).expect("a program");
    let check = |bytes: &[u8], part: &str| {
        write(&here.join("program"), bytes, 0o755);
        refused(&here, "program", 126, part);
    };
    check(&changed(&program, field::CLASS, 1), "32-bit");
    check(&changed(&program, field::BYTE_ORDER, 2), "big-endian");
    check(&changed(&program, field::TYPE, 1), "not an executable ELF file");
    check(&changed(&program, field::MACHINE, 183), "another machine");
    check(&changed(&program, field::ENTRY, 0), "entry point");
    check(&changed(&program, field::PROGRAM_HEADERS, u64::MAX), "program headers");
    check(&changed(&program, field::PROGRAM_HEADER_SIZE, 8), "program headers");
    check(&changed(&program, field::PROGRAM_HEADER_COUNT, 0), "no program headers");
    check(&changed(&program, field::PROGRAM_HEADER_COUNT, 0xffff), "program headers");
    check(b"\x7fELF", "truncated header");
    check(&program[..64], "program headers beyond the end of the file");
    let load = first_load(&program);
    let word = |offset: usize| load + offset..load + offset + 8;
    check(&changed(&program, word(field::FILE_OFFSET), 1 << 40), "corrupt");
    check(&changed(&program, word(field::FILE_SIZE), 1 << 62), "corrupt");
    // A real 32-bit program, if the compiler can make one.
    let mut compile = Command::new("cc");
    compile
        .args(["-m32", "-nostdlib", "-static", "-x", "c", "-o"])
        .arg(here.join("small"))
        .arg("-")
        .current_dir(&here);
    let source = b"void _start(void) { for (;;) ; }";
    if piped(&mut compile, source).status.success() {
        refused(&here, "small", 126, "32-bit");
    }
}

#[test]
fn segments_that_cannot_be_mapped() {
    let here = directory("segments");
    let program = fs::read(guest("asm_hello")).expect("a program");
    let load = first_load(&program);
    let word = |offset: usize| load + offset..load + offset + 8;
    let fixed = number(&program, load + field::ADDRESS);
    let cases = [
        changed(&program, word(field::ADDRESS), fixed + (1 << 47)),
        changed(&program, word(field::ADDRESS), u64::MAX - 0xfff),
        changed(&program, word(field::MEMORY_SIZE), 1 << 46),
        changed(&program, word(field::MEMORY_SIZE), 1 << 60),
        // The lowest pages, which no process may map.
        changed(
            &program,
            word(field::ADDRESS),
            number(&program, load + field::FILE_OFFSET) & 0xfff,
        ),
    ];
    for bytes in &cases {
        write(&here.join("program"), bytes, 0o755);
        refused(&here, "program", 126, "");
    }
}

#[test]
fn a_missing_dynamic_linker() {
    let here = directory("linker");
    let mut program = fs::read(guest("start_pie")).expect("a program");
    let (linker, missing) = (b"/lib64/ld-linux-x86-64.so.2", b"/lib64/ld-nobody-x86-64.so.2");
    let at = program
        .windows(linker.len())
        .position(|window| window == linker)
        .expect("a dynamic linker");
    program[at..at + linker.len()].copy_from_slice(&missing[..linker.len()]);
    write(&here.join("program"), &program, 0o755);
    refused(
        &here,
        "program",
        126,
        "ELF interpreter /lib64/ld-nobody-x86-64.so.: no such file or directory",
    );
}

/// Headers truncated at each length and with single bytes changed: each file is refused properly,
/// or runs as under the kernel.
#[test]
fn headers_with_any_byte_wrong() {
    let here = directory("bytes");
    let program = fs::read(guest("asm_hello")).expect("a program");
    let headers = 64 + 56 * usize::from(program[field::PROGRAM_HEADER_COUNT.start]);
    let cut = (0..headers).step_by(7).map(|len| program[..len].to_vec());
    let flipped = (0..headers).step_by(3).map(|at| {
        let mut bytes = program.clone();
        bytes[at] ^= 0x55 << (at % 2);
        bytes
    });
    let mut executed = 0;
    for bytes in cut.chain(flipped) {
        write(&here.join("program"), &bytes, 0o755);
        let ours = dynasour(&here, &["run", "--", "./program"]);
        if ours.status == Status::Exited(126) {
            reason(&ours, "./program", 126);
            continue;
        }
        executed += 1;
        let native = Invocation::new(here.join("program"), &here).run();
        assert_eq!(native.difference(&ours), None, "{:?}", &bytes[..headers.min(bytes.len())]);
    }
    assert!(executed > 0, "bytes without a meaning were refused too");
}

#[test]
fn usage_errors() {
    let here = directory("usage");
    let bad: &[&[&str]] = &[
        &[],
        &["frobnicate"],
        &["run"],
        &["run", "--"],
        &["run", "--frobnicate", "--", "touch", "marker"],
        &["run", "--tier", "fast", "--", "touch", "marker"],
        &["run", "--tier=", "--", "touch", "marker"],
        &["run", "--threshold", "0", "--", "touch", "marker"],
        &["run", "--threshold", "-1", "--", "touch", "marker"],
        &["run", "--threshold", "many", "--", "touch", "marker"],
        &["run", "--threshold", "5000000000", "--", "touch", "marker"],
        &["run", "--cache-size", "1", "--", "touch", "marker"],
        &["run", "--cache-size", "64X", "--", "touch", "marker"],
        &["run", "--chaos", "1/0", "--", "touch", "marker"],
        &["run", "--chaos", "0.5", "--", "touch", "marker"],
        &["run", "--chaos", "1/2,", "--", "touch", "marker"],
        &["run", "--log", "everything", "--", "touch", "marker"],
        &["run", "--skip-pass", "no-such-pass", "--", "touch", "marker"],
        &["run", "--only-trace", "9-3", "--", "touch", "marker"],
        &["run", "--race", "0", "--", "touch", "marker"],
        &["run", "--race", "often", "--", "touch", "marker"],
        &["run", "--compile-threads", "2", "--", "touch", "marker"],
        &["run", "--iterations", "0", "--", "touch", "marker"],
        &["run", "--tier", "copy", "--iterations", "2", "--", "touch", "marker"],
        &["run", "--tier", "copy", "--compile-threads", "1", "--", "touch", "marker"],
        &["run", "--stats=yes", "--", "touch", "marker"],
        &["run", "--tier"],
        &["run", "--tier", "direct", "--returns", "stack", "--", "touch", "marker"],
        &["run", "--tier", "direct", "--entry-check", "loop", "--", "touch", "marker"],
        &["run", "--tier", "direct", "--sample", "every=0", "--", "touch", "marker"],
        &["run", "--tier", "direct", "--sample-hz", "0", "--", "touch", "marker"],
        &[
            "run",
            "--tier",
            "direct",
            "--sample",
            "hz=9",
            "--sample-hz",
            "9",
            "--",
            "touch",
            "marker",
        ],
        &["run", "--tier", "copy", "--sample", "every=1", "--", "touch", "marker"],
        &["run", "--tier", "copy", "--sample-hz", "100", "--", "touch", "marker"],
        &["run", "--threshold", "50", "--sample-hz", "100", "--", "touch", "marker"],
        &["run", "--chaos", "1/3", "--sample", "every=1", "--", "touch", "marker"],
        &["run", "--no-traces", "--", "touch", "marker"],
    ];
    for words in bad {
        let outcome = dynasour(&here, words);
        let message = text(&outcome.stderr);
        assert_eq!(outcome.status, Status::Exited(2), "{words:?}: {message}");
        assert!(message.contains("error: ") || message.contains("Usage: "), "{words:?}: {message}");
        assert_eq!(text(&outcome.stdout), "", "{words:?}");
        assert!(!here.join("marker").exists(), "{words:?}");
    }
    // The message names the value.
    let outcome = dynasour(&here, &["run", "--tier", "fast", "--", "true"]);
    assert!(text(&outcome.stderr).contains("'fast'"), "{}", text(&outcome.stderr));
    for words in [&["--help"][..], &["run", "--help"], &["--version"]] {
        assert_eq!(dynasour(&here, words).status, Status::Exited(0), "{words:?}");
    }
}

/// A proof needs a solver. Without one nothing is run, and the message says what to do.
#[cfg(not(feature = "prove"))]
#[test]
fn proofs_without_a_solver() {
    let here = directory("solver");
    for words in [
        &["run", "--prove-traces", "--", "touch", "marker"][..],
        &["explain", "--prove-traces", "--", "touch", "marker"],
        &["guards", "--prove-traces", "--", "touch", "marker"],
    ] {
        let outcome = dynasour(&here, words);
        let message = text(&outcome.stderr);
        assert_eq!(outcome.status, Status::Exited(2), "{words:?}: {message}");
        assert!(message.contains("built without a solver"), "{words:?}: {message}");
        assert!(message.contains("--features prove"), "{words:?}: {message}");
        assert!(!here.join("marker").exists(), "{words:?}");
    }
}

#[test]
fn crashes_have_the_native_wait_status() {
    let here = directory("crashes");
    let program = guest("crash_null");
    let ways = [
        "null",
        "hot",
        "call",
        "data",
        "stack",
        "privileged",
        "abort",
        "divide",
        "ud2",
        "int3",
        "bus",
        "kill",
        "rt",
    ];
    for way in ways {
        let native = bounded(&program).arg(way).current_dir(&here).output().expect("a native run");
        assert!(native.status.signal().is_some(), "{way}: {}", native.status);
        for tier in TIERS {
            let mut command = bounded(DYNASOUR);
            command.args(["run", "--tier", tier, "--"]).arg(&program).arg(way).current_dir(&here);
            same(&native, &command.output().expect("a run"), way);
        }
    }
}

/// A shell sees the same wait status of its translated children whether the shell itself is
/// translated or not.
#[test]
fn shells_see_crashes() {
    let here = directory("shells");
    let program = guest("crash_null");
    let program = program.to_str().expect("a UTF-8 path");
    let script = r#"for way in divide abort ud2 null kill; do "$@" $way; echo $?; done"#;
    let shell = |prefix: &[&str], inner: &[&str]| {
        let words = [prefix, &["sh", "-c", script, "sh"], inner, &[program]].concat();
        let (first, rest) = words.split_first().expect("words");
        Invocation::new(*first, &here).args(rest.iter().copied()).run()
    };
    let sh = "/bin/sh";
    let native = Invocation::new(sh, &here).args(["-c", script, "sh", program]).run();
    assert!(text(&native.stdout).contains("136\n"), "{}", text(&native.stdout));
    for tier in TIERS {
        let outer = shell(&[DYNASOUR, "run", "--tier", tier, "--"], &[]);
        assert_eq!(text(&native.stdout), text(&outer.stdout), "{tier}");
        let inner = Invocation::new(sh, &here)
            .args(["-c", script, "sh", DYNASOUR, "run", "--tier", tier, "--", program]);
        assert_eq!(text(&native.stdout), text(&inner.run().stdout), "{tier}");
    }
}

/// Arguments are arbitrary bytes: empty, not UTF-8, looking like options. argv[0] may be anything
/// when a guest's execve sets it.
#[test]
fn arguments_of_any_bytes() {
    let here = directory("arguments");
    let program = guest("start_pie");
    let arguments: [&OsStr; 6] =
        ["", "--tier", "--", "-x"].map(OsStr::new).into_iter().collect::<Vec<_>>()[..]
            .iter()
            .copied()
            .chain([OsStr::from_bytes(b"\xff\xfe\x80"), OsStr::from_bytes(b"a\nb\x1b")])
            .collect::<Vec<_>>()
            .try_into()
            .expect("six");
    for argv0 in [&b"name"[..], b"", b"\xff\x01", b"-login", b"--", b"--tier"] {
        let argv0 = OsStr::from_bytes(argv0);
        let native = bounded(&program)
            .arg0(argv0)
            .args(arguments)
            .current_dir(&here)
            .output()
            .expect("a native run");
        assert_eq!(native.status.code(), Some(7), "{}", text(&native.stderr));
        for tier in TIERS {
            let mut option = OsString::from("--argv0=");
            option.push(argv0);
            let mut command = bounded(DYNASOUR);
            command
                .args(["run", "--tier", tier])
                .arg(option)
                .arg("--")
                .arg(&program)
                .args(arguments)
                .current_dir(&here);
            same(&native, &command.output().expect("a run"), &format!("{argv0:?}"));
        }
    }
}

/// A command with the tests' environment that is killed after a minute.
fn bounded(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("LC_ALL", "C")
        .stdin(std::process::Stdio::null());
    // SAFETY: alarm is async-signal-safe and survives execve.
    unsafe {
        command.pre_exec(|| {
            libc::alarm(60);
            Ok(())
        })
    };
    command
}

#[track_caller]
fn same(native: &Output, ours: &Output, what: &str) {
    assert_eq!(native.status.into_raw(), ours.status.into_raw(), "{what}: {}", text(&ours.stderr));
    assert_eq!(text(&native.stdout), text(&ours.stdout), "{what}");
    assert_eq!(text(&native.stderr), text(&ours.stderr), "{what}");
}

/// Runs a command with these bytes on its standard input.
fn piped(command: &mut Command, input: &[u8]) -> Output {
    use std::process::Stdio;
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("start a command");
    // A compiler that refuses its options stops reading; its status reports that.
    let _ = child.stdin.take().expect("a pipe").write_all(input);
    child.wait_with_output().expect("wait for a command")
}
