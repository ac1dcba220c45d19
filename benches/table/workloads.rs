//! What is measured: the kernels of `benches/kernels` at two optimisation levels, and programs of the system.
//!
//! Every workload has a full size, for native and dynamo, and a small one, for the interpreter and native beside it.

use anyhow::{Context, Result, bail, ensure};
use dynasour_testkit::run::{Invocation, Status};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A kernel's name and its default rounds, which take about half a second at -O2.
const KERNELS: [(&str, u32); 14] = [
    ("bytecode", 200),
    ("crc32", 4000),
    ("fib", 800),
    ("hashtable", 1500),
    ("list", 1500),
    ("matmul", 1000),
    ("nbody", 2000),
    ("parser", 2500),
    ("quicksort", 500),
    ("search", 3500),
    ("sha256", 1000),
    ("sieve", 2000),
    ("stencil", 12),
    ("virtual", 300),
];
/// The interpreter runs this fraction of a kernel's rounds (at least one).
const INTERPRETED_FRACTION: u32 = 25;

const PERL: &str = r#"my ($n, %h, $s) = (shift, (), 0);
for my $i (1 .. $n) { my $k = "k" . ($i * 7919 % 1009); $h{$k} += $i; $s += length($k) if $k =~ /^k\d*3/; }
print join(",", $s, map { $h{$_} } (sort keys %h)[0 .. 9]), "\n";"#;

const PYTHON: &str = r#"import sys
def collatz(n):
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps
words = {}
for i in range(1, int(sys.argv[1])):
    words[str(i % 97)] = words.get(str(i % 97), 0) + collatz(i)
print(sorted(words.items())[:10])"#;

/// One line of the table.
pub struct Workload {
    /// `sieve-O2`, `gzip`.
    pub name: String,
    /// The full size.
    pub full: Invocation,
    /// The size for the interpreter.
    pub small: Invocation,
}

/// Builds and generates what the selected workloads need below `directory`, and lists them.
pub fn prepare(directory: &Path, only: &[String]) -> Result<Vec<Workload>> {
    fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let wanted = |name: &str| only.is_empty() || only.iter().any(|o| name.contains(o.as_str()));
    let mut workloads = Vec::new();
    for level in ["-O2", "-O0"] {
        for (kernel, rounds) in KERNELS {
            let name = format!("{kernel}{level}");
            if wanted(&name) {
                let program = build(directory, kernel, level)?;
                let sized = |n: u32| Invocation::new(&program, directory).args([n.to_string()]);
                workloads.push(Workload {
                    full: sized(rounds),
                    small: sized((rounds / INTERPRETED_FRACTION).max(1)),
                    name,
                });
            }
        }
    }
    for (name, make) in PROGRAMS {
        if wanted(name) {
            let [full, small] = make(directory)?;
            workloads.push(Workload { name: name.to_string(), full, small });
        }
    }
    ensure!(!workloads.is_empty(), "no workload's name contains one of {only:?}");
    Ok(workloads)
}

fn build(directory: &Path, kernel: &str, level: &str) -> Result<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/kernels").join(kernel).with_extension("c");
    let program = directory.join(format!("{kernel}{level}"));
    let output =
        Command::new("cc").arg(level).arg("-o").arg(&program).arg(&source).output().context("cannot run cc")?;
    ensure!(output.status.success(), "cc {level} {}:\n{}", source.display(), String::from_utf8_lossy(&output.stderr));
    Ok(program)
}

type Make = fn(&Path) -> Result<[Invocation; 2]>;

/// Programs of the system, single-threaded.
const PROGRAMS: [(&str, Make); 6] = [
    ("gzip", |d| on_files(d, "gzip", &["-c"], [12 << 20, 1 << 20])),
    ("sha256sum", |d| on_files(d, "sha256sum", &[], [128 << 20, 16 << 20])),
    ("sort", |d| on_files(d, "sort", &["--parallel=1"], [6 << 20, 1 << 19])),
    ("perl", |d| scripted(d, "perl", "-e", PERL, [600_000, 40_000])),
    ("python3", |d| scripted(d, "python3", "-c", PYTHON, [9_000, 900])),
    ("cc1", compiler),
];

fn on_files(directory: &Path, program: &str, options: &[&str], sizes: [usize; 2]) -> Result<[Invocation; 2]> {
    let program = find(program)?;
    let mut runs = Vec::new();
    for size in sizes {
        let input = directory.join(format!("text-{size}"));
        if !input.exists() {
            fs::write(&input, text(size)).with_context(|| format!("cannot write {}", input.display()))?;
        }
        runs.push(Invocation::new(&program, directory).args(options).args([input]));
    }
    Ok(runs.try_into().expect("two sizes"))
}

fn scripted(directory: &Path, program: &str, option: &str, script: &str, sizes: [u32; 2]) -> Result<[Invocation; 2]> {
    let program = find(program)?;
    Ok(sizes.map(|n| Invocation::new(&program, directory).args([option, script]).args([n.to_string()])))
}

/// The C compiler proper on the preprocessed kernels; the small size is one of them unoptimised.
fn compiler(directory: &Path) -> Result<[Invocation; 2]> {
    let output = Command::new("cc").arg("-print-prog-name=cc1").output().context("cannot run cc")?;
    let program = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/kernels");
    let input = directory.join("parser.i");
    let status = Command::new("cc").arg("-E").arg(sources.join("parser.c")).arg("-o").arg(&input).status()?;
    ensure!(status.success(), "cc -E failed");
    let run =
        |level: &str| Invocation::new(&program, directory).args(["-quiet", level]).args([&input]).args(["-o", "-"]);
    Ok([run("-O2"), run("-O0")])
}

fn find(program: &str) -> Result<PathBuf> {
    for directory in ["/usr/bin", "/bin"] {
        let path = Path::new(directory).join(program);
        if path.exists() {
            return Ok(path);
        }
    }
    bail!("{program} is not installed")
}

/// Lines of pseudo-random words, the same in every run.
fn text(size: usize) -> Vec<u8> {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut draw = move |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    let mut out = Vec::with_capacity(size + 16);
    while out.len() < size {
        for _ in 0..=draw(7) {
            let mut word = draw(4000) * draw(30);
            while word > 0 {
                out.push(b"etaoinshrdlucmfw"[(word % 16) as usize]);
                word /= 16;
            }
            out.push(b' ');
        }
        out.push(b'\n');
    }
    out.truncate(size);
    out
}

/// A run is worth timing only if it ended well.
pub fn ended_well(status: Status) -> bool {
    status == Status::Exited(0)
}
