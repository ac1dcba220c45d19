//! Tools that are told of native code when it is made: the file of `run --jitdump`, read by a parser of this
//! test and by `perf inject --jit`; `run --gdb`, with a real GDB.
//!
//! A tool that is not installed is skipped with a message; with `DYNASOUR_REQUIRE_PROGRAMS=1` a missing GDB fails.
//! `perf` is never required: many kernels and containers do not allow it.

use dynasour_testkit::scratch;
use iced_x86::{Decoder, DecoderOptions, Formatter as _, NasmFormatter};
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// Calls `work` in a loop, says whether it sees the dump, waits for a line, and does the rest that its
/// argument names.
const GUEST: &str = r#"
#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
__attribute__((noinline)) long work(long n) {
    long sum = 0;
    for (long i = 1; i <= n; i++)
        sum += i ^ (sum >> 3);
    return sum;
}
static int sees_dump(void) {
    char line[4096];
    int seen = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps)) seen += strstr(line, "jit-") != 0;
    fclose(maps);
    DIR *open = opendir("/proc/self/fd");
    for (struct dirent *entry; (entry = readdir(open));) {
        ssize_t n = readlinkat(dirfd(open), entry->d_name, line, sizeof line - 1);
        if (n > 0) seen += (line[n] = 0, strstr(line, "jit-") != 0);
    }
    closedir(open);
    return seen;
}
int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "fork")) {
        if (fork()) wait(NULL);
    }
    if (argc > 1 && !strcmp(argv[1], "exec")) execl(argv[0], argv[0], (char *)0);
    printf("%ld %d\n", work(1000000), sees_dump());
    fflush(stdout);
    getchar();
    return 0;
}
"#;

fn directory(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("watchers").join(name);
    scratch::fresh(&directory).expect("a scratch directory");
    directory
}

/// The guest, with debug information.
fn guest(directory: &Path) -> PathBuf {
    let (source, program) = (directory.join("guest.c"), directory.join("guest"));
    fs::write(&source, GUEST).expect("room");
    let status = Command::new("cc").args(["-g", "-O1", "-o"]).args([&program, &source]).status();
    assert!(status.expect("a C compiler").success());
    program
}

fn run(options: &[&str], command: &[&Path]) -> Command {
    let mut run = Command::new("timeout");
    run.args(["120", env!("CARGO_BIN_EXE_dynasour"), "run"]).args(options).arg("--").args(command);
    run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    run
}

/// A record of the file.
#[derive(Debug)]
enum Record {
    /// Code: address, name, bytes.
    Load { time: u64, index: u64, address: u64, name: String, code: Vec<u8> },
    /// Source lines: the code's address; address, line and file of each.
    Lines { time: u64, address: u64, lines: Vec<(u64, u32, String)> },
    /// The end.
    Close { time: u64 },
}

impl Record {
    fn time(&self) -> u64 {
        match self {
            Record::Load { time, .. } | Record::Lines { time, .. } | Record::Close { time } => {
                *time
            }
        }
    }
}

/// Takes values from bytes.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn u32(&mut self) -> u32 {
        let (word, rest) = self.0.split_first_chunk().expect("a word");
        self.0 = rest;
        u32::from_le_bytes(*word)
    }

    fn u64(&mut self) -> u64 {
        let (word, rest) = self.0.split_first_chunk().expect("a word");
        self.0 = rest;
        u64::from_le_bytes(*word)
    }

    fn text(&mut self) -> String {
        let end = self.0.iter().position(|byte| *byte == 0).expect("a string ends");
        let text = String::from_utf8(self.0[..end].to_vec()).expect("text");
        self.0 = &self.0[end + 1..];
        text
    }
}

/// The records of the file of process `pid`; checks everything that the format says of them.
fn records(file: &Path, pid: u32) -> Vec<Record> {
    let bytes = fs::read(file).expect("the file");
    let mut reader = Reader(&bytes);
    let header: [u32; 6] = std::array::from_fn(|_| reader.u32());
    assert_eq!(header, [0x4a69_5444, 1, 40, 62, 0, pid]);
    let (start, flags) = (reader.u64(), reader.u64());
    assert!(start > 0 && flags == 0);
    let mut records: Vec<Record> = Vec::new();
    while !reader.0.is_empty() {
        let (id, size, time) = (reader.u32(), reader.u32() as usize, reader.u64());
        let (body, rest) = reader.0.split_at(size - 16);
        let mut body = Reader(body);
        let record = match id {
            0 => {
                assert!(body.u32() == pid && body.u32() > 0);
                let (address, again, length) = (body.u64(), body.u64(), body.u64());
                assert_eq!(address, again);
                let (index, name) = (body.u64(), body.text());
                let code = std::mem::take(&mut body.0).to_vec();
                assert!(code.len() as u64 == length && length > 0, "{name}");
                Record::Load { time, index, address, name, code }
            }
            2 => {
                let (address, count) = (body.u64(), body.u64());
                let line = |_| {
                    let (at, line, _) = (body.u64(), body.u32(), body.u32());
                    (at, line, body.text())
                };
                Record::Lines { time, address, lines: (0..count).map(line).collect() }
            }
            3 => Record::Close { time },
            other => panic!("a record of kind {other}"),
        };
        assert!(body.0.is_empty() && time >= start, "{record:?}");
        reader.0 = rest;
        records.push(record);
    }
    records
}

/// The lines by which `--log code` shows code, from an address on.
fn listing(code: &[u8], address: u64, from: u64) -> Vec<String> {
    let mut formatter = NasmFormatter::new();
    formatter.options_mut().set_first_operand_char_index(8);
    let bytes = &code[(from - address) as usize..];
    let line = |inst: iced_x86::Instruction| {
        let mut text = format!("{:8x}  ", inst.ip());
        formatter.format(&inst, &mut text);
        text
    };
    Decoder::with_ip(64, bytes, from, DecoderOptions::NONE).into_iter().map(line).collect()
}

/// The pieces of code in what `--log code` has printed: its lines.
fn logged(log: &str) -> Vec<Vec<&str>> {
    let mut pieces: Vec<Vec<&str>> = Vec::new();
    for line in log.lines() {
        let is_code = line.split_once("  ").is_some_and(|(at, _)| at.len() == 8);
        match (line.contains("; hot, ") || line.contains("; cold, "), is_code) {
            (true, _) => pieces.push(Vec::new()),
            (_, true) => pieces.last_mut().expect("a heading").push(line),
            _ => {}
        }
    }
    pieces
}

/// The process that `timeout` has started.
fn child_of(timeout: &Child) -> u32 {
    let path = format!("/proc/{0}/task/{0}/children", timeout.id());
    let children = fs::read_to_string(path).expect("/proc");
    children.trim().parse().expect("one child")
}

fn ended(mut child: Child) -> Output {
    child.stdin.take().expect("a pipe").write_all(b"\n").expect("it reads");
    child.wait_with_output().expect("it ends")
}

#[test]
fn the_jitdump_has_the_code_that_was_made() {
    let directory = directory("dump");
    let guest = guest(&directory);
    let to = directory.to_str().expect("text");
    for (tier, has_copies) in [("dynamo", false), ("full", true)] {
        let mut child = run(
            &["--tier", tier, "--threshold", "500", "--log", "code", "--jitdump", to],
            &[&guest],
        )
        .spawn()
        .expect("it starts");
        let mut first = String::new();
        let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
        out.read_line(&mut first).expect("it prints");
        assert!(first.ends_with(" 0\n"), "the guest sees the dump: {first}");
        let pid = child_of(&child);
        let file = directory.join(format!("jit-{pid}.dump"));
        let name = file.to_str().expect("text");
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("maps");
        let marker = maps.lines().find(|line| line.ends_with(name)).expect("the marker is mapped");
        assert!(marker.contains(" r-xp 00000000 "), "{marker}");
        // What was made so far is in the file while the guest runs.
        let early = records(&file, pid).len();
        assert!(early > 0);
        let output = ended(child);
        assert!(output.status.success());
        let records = records(&file, pid);
        assert!(records.len() >= early);

        assert!(matches!(records.last(), Some(Record::Close { .. })));
        let mut loads = 0;
        let mut codes: Vec<(&str, u64, &[u8])> = Vec::new();
        let mut described = Vec::new();
        for record in &records {
            match record {
                Record::Load { index, name, address, code, .. } => {
                    assert_eq!(*index, loads);
                    loads += 1;
                    assert!(name.starts_with("dynasour:"), "{name}");
                    codes.push((name, *address, code));
                }
                Record::Lines { address, lines, .. } => described.push((*address, lines)),
                Record::Close { .. } => {}
            }
        }
        let is_copy = |name: &str| name.starts_with("dynasour:copy:");
        assert_eq!(codes.iter().any(|(name, ..)| is_copy(name)), has_copies);
        let times: Vec<u64> = records.iter().map(Record::time).collect();
        assert!(times.is_sorted(), "{times:?}");

        // Every piece that was logged when it was made is in the file, byte by byte.
        let log = String::from_utf8_lossy(&output.stderr);
        let pieces = logged(&log);
        assert!(pieces.len() >= 2, "{log}");
        for piece in pieces.iter().filter(|piece| !piece.is_empty()) {
            let at = piece[0].split(' ').next().and_then(|at| u64::from_str_radix(at, 16).ok());
            let at = at.expect("an address");
            let same = |(_, address, code): &&(&str, u64, &[u8])| {
                (*address..address + code.len() as u64).contains(&at)
                    && listing(code, *address, at) == *piece
            };
            assert!(codes.iter().any(|code| same(&code)), "{tier}: no record of {piece:#?}");
        }

        // The trace of the loop has source lines: those of `work`, within its code.
        let (_, address, code) = codes
            .iter()
            .find(|(name, ..)| name.contains(":work+0x") && name.starts_with("dynasour:t"))
            .expect("the loop has a trace");
        let code: Range<u64> = *address..address + code.len() as u64;
        let (_, lines) = described.iter().find(|(at, _)| at == address).expect("lines");
        assert!(lines.iter().map(|(at, ..)| at).is_sorted());
        assert!(lines.iter().all(|(at, _, file)| code.contains(at) && file.ends_with("/guest.c")));
        let line_of =
            |text: &str| GUEST.lines().position(|line| line.contains(text)).map(|n| n as u32 + 1);
        let body = line_of("sum += i ^").expect("in the source");
        let found: Vec<u32> = lines.iter().map(|(_, line, _)| *line).collect();
        assert!(
            found.contains(&body) && found.iter().all(|n| (body - 3..=body + 2).contains(n)),
            "{found:?}"
        );
        // The lines of the body are those of more than one place: the loop is more than one instruction.
        assert!(found.len() > 1, "{found:?}");
        fs::remove_file(file).expect("it is ours");
    }
}

/// The files of dumps in a directory.
fn dumps(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).expect("a directory");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths.filter(|path| path.extension().is_some_and(|end| end == "dump")).collect()
}

#[test]
fn one_file_for_the_process_and_its_last_program() {
    let directory = directory("processes");
    let guest = guest(&directory);
    let to = directory.to_str().expect("text");
    for how in ["fork", "exec"] {
        let options = ["--tier", "dynamo", "--threshold", "500", "--jitdump", to];
        let child = run(&options, &[&guest, Path::new(how)]).spawn().expect("it starts");
        let output = ended(child);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        let files = dumps(&directory);
        assert_eq!(files.len(), 1, "{how}: {files:?}");
        let pid =
            files[0].file_stem().and_then(|name| name.to_str()?.strip_prefix("jit-")?.parse().ok());
        let records = records(&files[0], pid.expect("a number"));
        let closes = records.iter().filter(|record| matches!(record, Record::Close { .. })).count();
        assert_eq!(closes, 1, "{how}");
        let works = |record: &&Record| matches!(record, Record::Load { name, .. } if name.contains(":work+"));
        assert!(records.iter().filter(works).count() >= 2, "{how}: {records:?}");
        fs::remove_file(&files[0]).expect("it is ours");
    }
}

#[test]
fn a_dump_that_cannot_be_written_is_refused_before_the_guest_starts() {
    let directory = directory("refused");
    let started = directory.join("started");
    for to in ["/nonexistent/directory", "/proc", "/etc/passwd"] {
        let mut touch = run(&["--jitdump", to], &[Path::new("/usr/bin/touch"), &started]);
        let output = touch.output().expect("it runs");
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.starts_with(&format!("dynasour: cannot write {to}/jit-")), "{message}");
        assert!(!started.exists());
    }
}

/// Does the program exist? If not, says so.
fn is_there(program: &str, is_required: bool) -> bool {
    let there = Command::new(program).arg("--version").output().is_ok();
    if !there {
        assert!(
            !is_required || std::env::var_os("DYNASOUR_REQUIRE_PROGRAMS").is_none(),
            "{program}"
        );
        eprintln!("skipped: {program} is not installed");
    }
    there
}

#[test]
fn perf_names_traces_by_the_jitdump() {
    let directory = directory("perf");
    if !is_there("perf", false) {
        return;
    }
    let perf = |words: &[&str]| {
        let output = Command::new("perf").args(words).current_dir(&directory).output();
        output.expect("perf is there")
    };
    if !perf(&["record", "-k", "mono", "-o", "try.data", "true"]).status.success() {
        eprintln!("skipped: perf may not record here");
        return;
    }
    let thousand = directory.join("thousand");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/explain/thousand.c");
    let status = Command::new("cc").args(["-O1", "-o"]).arg(&thousand).arg(source).status();
    assert!(status.expect("a C compiler").success());
    let record = ["record", "-k", "mono", "-o", "a.data", env!("CARGO_BIN_EXE_dynasour"), "run"];
    let options = ["--tier", "dynamo", "--threshold", "500", "--jitdump", ".", "--", "./thousand"];
    let words = [&record[..], &options, &["300000000"]].concat();
    let output = perf(&words);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = perf(&["inject", "--jit", "-i", "a.data", "-o", "b.data"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = perf(&["report", "--stdio", "-i", "b.data", "--sort", "symbol"]);
    let text = String::from_utf8_lossy(&output.stdout);
    let hottest = text.lines().find(|line| line.contains('%')).expect("a line");
    assert!(hottest.contains("dynasour:t") && hottest.contains(":work+0x"), "{text}");
}

#[test]
fn gdb_names_the_guests_function_in_a_trace() {
    /// Interrupts the run until it is in the trace of the loop, and stops at a breakpoint there.
    const SCRIPT: &str = r#"
set pagination off
set debuginfod enabled off
handle SIGSEGV SIGSYS SIGBUS nostop noprint pass
python
import os, signal, threading
def interrupted():
    pid = gdb.selected_inferior().pid
    if not pid:
        pid = None
    threading.Timer(1, lambda: os.kill(pid or gdb.selected_inferior().pid, signal.SIGINT)).start()
    gdb.execute("continue" if pid else "run", to_string=True)
    return gdb.execute("info symbol $pc", to_string=True)
for _ in range(40):
    symbol = interrupted()
    if "dynasour:t" in symbol and ":work+0x" in symbol:
        break
print("in", symbol)
print("frame", gdb.execute("bt 1", to_string=True))
try:
    gdb.execute("hbreak *%d" % gdb.selected_frame().pc())
    gdb.execute("continue", to_string=True)
except gdb.error as error:
    print("no hardware breakpoint:", error)
print("list", gdb.execute("info functions dynasour:t", to_string=True))
gdb.execute("kill")
end
"#;
    let directory = directory("gdb");
    if !is_there("gdb", true) {
        return;
    }
    let thousand = directory.join("thousand");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/explain/thousand.c");
    let status = Command::new("cc").args(["-O1", "-o"]).arg(&thousand).arg(source).status();
    assert!(status.expect("a C compiler").success());
    let script = directory.join("script");
    fs::write(&script, SCRIPT).expect("room");
    let output = Command::new("timeout")
        .args(["200", "gdb", "-q", "-batch", "-nx", "-x"])
        .arg(&script)
        .args(["--args", env!("CARGO_BIN_EXE_dynasour"), "run", "--gdb", "--tier", "dynamo"])
        .args(["--threshold", "500", "--"])
        .args([&thousand, Path::new("1000000000000")])
        .output()
        .expect("GDB runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    let part = |name: &str| {
        let found = text.split_once(&format!("\n{name} ")).map(|(_, rest)| rest);
        found.unwrap_or_else(|| panic!("no {name}: {text}\n{errors}"))
    };
    let first_line = |name: &str| part(name).lines().next().unwrap_or_default();
    let named = |text: &str| text.contains("dynasour:t") && text.contains(":work+0x");
    assert!(
        named(first_line("in")) && first_line("in").contains(" in section .text0 of"),
        "{text}"
    );
    assert!(named(first_line("frame")) && first_line("frame").starts_with("#0 "), "{text}");
    // Some virtual machines have no debug registers.
    if let Some(why) = text.lines().find(|line| line.starts_with("no hardware breakpoint")) {
        eprintln!("skipped: {why}");
    } else {
        let stop = text.lines().find(|line| line.starts_with("Breakpoint 1, "));
        assert!(stop.is_some_and(named), "{text}");
    }
    assert!(part("list").lines().any(|line| named(line) && line.ends_with(":exits")), "{text}");
}
