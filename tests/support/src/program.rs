//! Real programs of a Debian system, run in scratch directories. The outcome of each step and the
//! files left at the end are compared.

use std::fs;
use std::path::{Path, PathBuf};

use crate::mode::Mode;
use crate::run::{Invocation, Outcome};
use crate::scratch::{self, Tree};
use crate::{Lab, run_native};

/// One command of a program test.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// The words of the command; the first is a name to look up in `/usr/bin` and `/bin`, or a path
    /// that contains a `/`.
    pub words: &'static [&'static str],
    /// File of the scratch directory that is standard input; empty for none.
    pub input: &'static str,
    /// The step prepares the others' input and always runs natively.
    pub prepares: bool,
}

/// A command without input.
pub const fn run(words: &'static [&'static str]) -> Step {
    Step { words, input: "", prepares: false }
}

impl Step {
    /// Takes standard input from a file of the scratch directory.
    pub const fn input(self, input: &'static str) -> Step {
        Step { input, ..self }
    }

    /// Runs natively in every mode: the other steps work on its result.
    pub const fn prepares(self) -> Step {
        Step { prepares: true, ..self }
    }
}

/// How long a program runs; the modes in which it is tested depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Speed {
    /// All tiers and random deoptimisation.
    Quick,
    /// All tiers.
    Slow,
    /// Only tiers that do not interpret code on its first executions; see [`Mode::native_tiers`].
    Large,
}

impl Speed {
    /// The modes in which a program of this speed is tested.
    pub fn modes(self) -> Vec<Mode> {
        match self {
            Speed::Quick => Mode::tiers_and_chaos(),
            Speed::Slow => Mode::tiers(),
            Speed::Large => Mode::native_tiers(),
        }
    }
}

/// A test of real programs: steps in one scratch directory.
#[derive(Debug, Clone, Copy)]
pub struct Program {
    /// Name of the test.
    pub name: &'static str,
    /// The Debian packages that it needs.
    pub packages: &'static str,
    /// Commands in their order.
    pub steps: &'static [Step],
    /// How long the program runs.
    pub speed: Speed,
    /// Beginnings of relative paths that are not compared, because they record times or inode
    /// numbers.
    pub ignored: &'static [&'static str],
}

impl Program {
    /// A test that runs in all tiers and under random deoptimisation.
    pub const fn quick(
        name: &'static str,
        packages: &'static str,
        steps: &'static [Step],
    ) -> Program {
        Program { name, packages, steps, speed: Speed::Quick, ignored: &[] }
    }

    /// A test that runs in all tiers only.
    pub const fn slow(
        name: &'static str,
        packages: &'static str,
        steps: &'static [Step],
    ) -> Program {
        Program { speed: Speed::Slow, ..Program::quick(name, packages, steps) }
    }

    /// A test that runs only in tiers that do not interpret code on its first executions; see
    /// [`Mode::native_tiers`].
    pub const fn large(
        name: &'static str,
        packages: &'static str,
        steps: &'static [Step],
    ) -> Program {
        Program { speed: Speed::Large, ..Program::quick(name, packages, steps) }
    }

    /// Leaves paths with these beginnings out of the comparison.
    pub const fn ignore(self, ignored: &'static [&'static str]) -> Program {
        Program { ignored, ..self }
    }
}

/// The result of a program test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// All modes agreed with native.
    Same,
    /// A program is not installed; the text names it and its package.
    Skipped(String),
}

impl Lab {
    /// Runs `program` natively and in each of `modes`, every time in a fresh directory at the same
    /// path with the files of [`prepare`].
    ///
    /// # Errors
    /// A report of the modes that differ, or of what could not be prepared.
    pub fn compare_program(&self, program: &Program, modes: &[Mode]) -> Result<Verdict, String> {
        for step in program.steps {
            if !step.words[0].contains('/') && find(step.words[0]).is_none() {
                let message = format!(
                    "{}: `{}` is not installed (Debian packages: {})",
                    program.name, step.words[0], program.packages
                );
                // CI installs every program and sets the variable: a skipped test is a failure
                // there.
                return match std::env::var_os("DYNASOUR_REQUIRE_PROGRAMS") {
                    Some(_) => Err(message),
                    None => Ok(Verdict::Skipped(message)),
                };
            }
        }
        let directory = self.tmp.join("programs").join(program.name);
        let (native, native_tree) =
            session(program, &directory, &|invocation| run_native(&invocation))?;
        for (step, outcome) in program.steps.iter().zip(&native) {
            if outcome.status == crate::run::Status::TimedOut {
                return Err(format!("{:?} does not end natively", step.words));
            }
        }
        println!("{:<12} {:>9.1} ms", "native", total(&native));
        let mut failures = Vec::new();
        for mode in modes {
            let wrap = |invocation| self.launcher.wrap(mode, &invocation);
            let (outcomes, tree) =
                session(program, &directory, &|invocation| wrap(invocation).run())?;
            println!("{:<12} {:>9.1} ms", mode.name, total(&outcomes));
            let mut here = Vec::new();
            for ((step, native), outcome) in program.steps.iter().zip(&native).zip(&outcomes) {
                if let Some(difference) = native.difference(outcome) {
                    let replay = wrap(invocation(step, &directory));
                    here.push(format!("{:?}: {difference}\n  replay: {replay}", step.words));
                }
            }
            here.extend(scratch::difference(&native_tree, &tree));
            if !here.is_empty() {
                failures.push(format!(
                    "program `{}` under `{}` differs from native: {}",
                    program.name,
                    mode.name,
                    here.join("\n  ")
                ));
            }
        }
        if failures.is_empty() { Ok(Verdict::Same) } else { Err(failures.join("\n\n")) }
    }
}

fn total(outcomes: &[Outcome]) -> f64 {
    outcomes.iter().map(|outcome| outcome.elapsed.as_secs_f64() * 1e3).sum()
}

/// Runs all steps in a fresh directory; returns their outcomes and the files they leave.
fn session(
    program: &Program,
    directory: &Path,
    execute: &dyn Fn(Invocation) -> Outcome,
) -> Result<(Vec<Outcome>, Tree), String> {
    scratch::fresh(directory)?;
    prepare(directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    let run = |step: &Step| {
        let invocation = invocation(step, directory);
        if step.prepares { run_native(&invocation) } else { execute(invocation) }
    };
    let outcomes = program.steps.iter().map(run).collect();
    let ignored = |path: &Path| program.ignored.iter().any(|beginning| path.starts_with(beginning));
    Ok((outcomes, scratch::snapshot(directory, &ignored)?))
}

fn invocation(step: &Step, directory: &Path) -> Invocation {
    let name = step.words[0];
    let program = if name.contains('/') {
        directory.join(name)
    } else {
        find(name).unwrap_or_else(|| name.into())
    };
    let mut invocation = Invocation::new(program, directory).args(step.words[1..].iter().copied());
    // Programs would otherwise put random numbers, times or the user's settings into their results.
    for (key, value) in [
        ("PYTHONHASHSEED", "0"),
        ("PYTHONDONTWRITEBYTECODE", "1"),
        ("SOURCE_DATE_EPOCH", "1700000000"),
        ("GIT_AUTHOR_DATE", "2024-01-02T03:04:05Z"),
        ("GIT_COMMITTER_DATE", "2024-01-02T03:04:05Z"),
        ("GIT_CONFIG_NOSYSTEM", "1"),
    ] {
        invocation.environment.push((key.into(), value.into()));
    }
    if !step.input.is_empty() {
        invocation.stdin = Some(directory.join(step.input));
    }
    invocation
}

fn find(name: &str) -> Option<PathBuf> {
    ["/usr/bin", "/bin"]
        .iter()
        .map(|directory| Path::new(directory).join(name))
        .find(|path| path.exists())
}

/// Writes the input files that all programs work on.
///
/// # Errors
/// The system's message.
pub fn prepare(directory: &Path) -> std::io::Result<()> {
    let words: String = (0..240u32)
        .map(|i| {
            format!(
                "{}{}\n",
                ["alpha", "Beta", "gamma ray", "delta", "epsilon,x", "zeta"][i as usize % 6],
                i * 37 % 101
            )
        })
        .collect();
    fs::write(directory.join("words.txt"), &words)?;
    let numbers: String =
        (0..300u64).map(|i| format!("{}\t{}\n", i * 7919 % 1009, i * i % 83)).collect();
    fs::write(directory.join("numbers.tsv"), numbers)?;
    let bytes: Vec<u8> =
        (0..6000u32).map(|i| (i.wrapping_mul(2654435761) >> (i % 13 + 8)) as u8).collect();
    fs::write(directory.join("binary.bin"), bytes)?;
    fs::write(directory.join("poem.txt"), POEM)?;
    fs::write(
        directory.join("poem2.txt"),
        POEM.replace("river", "stream").replace("Nothing", "Something"),
    )?;
    fs::write(directory.join("data.json"), JSON)?;
    fs::write(directory.join("hello.c"), HELLO_C)?;
    fs::write(directory.join("part.c"), PART_C)?;
    fs::write(directory.join("Makefile"), MAKEFILE)?;
    fs::write(directory.join("script.sh"), SCRIPT)?;
    fs::write(directory.join("jit.lua"), JIT_LUA)?;
    fs::write(directory.join("jit.js"), JIT_JS)?;
    fs::write(directory.join("Jit.java"), JIT_JAVA)?;
    fs::write(
        directory.join("hello.bc"),
        "x = 0\nfor (i = 1; i <= 200; i++) x = (x * 31 + i) % 65537\nx\n2 ^ 100\nquit\n",
    )?;
    fs::create_dir_all(directory.join("tree/inner/leaf"))?;
    fs::write(directory.join("tree/one.c"), "int one;\n")?;
    fs::write(directory.join("tree/two.txt"), "two\n")?;
    fs::write(directory.join("tree/inner/three.c"), "int three = 3;\n")?;
    fs::write(directory.join("tree/inner/leaf/words"), words)?;
    std::os::unix::fs::symlink("two.txt", directory.join("tree/link"))
}

const POEM: &str = "\
The river runs from hill to sea,
and what it takes it does not keep.
Nothing is lost; it waits for me
where all the smaller waters sleep.

The stones remember what was said,
the reeds repeat it, word by word;
I read it in the river's bed
and wrote it down as it was heard.
";

const JSON: &str = r#"{"name": "dynasour", "versions": [1, 2, 3], "nested": {"pi": 3.14159, "none": null, "yes": true},
 "items": [{"k": "b", "v": 2}, {"k": "a", "v": 10}, {"k": "c", "v": -1}], "text": "tab\tquote\" \u00e9"}
"#;

const HELLO_C: &str = r#"#include <stdio.h>
#include <stdlib.h>
int part(int);
static int compare(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }
int main(int argc, char **argv) {
    int v[] = {5, 3, 9, 1, 7};
    qsort(v, 5, sizeof v[0], compare);
    for (int i = 0; i < 5; i++) printf("%d ", part(v[i]));
    printf("%s %d\n", argc > 1 ? argv[1] : "none", (int)sizeof(long));
    return 3;
}
"#;

const PART_C: &str = "int part(int x) {\n    int s = 0;\n    for (int i = 0; i < x; i++) s += i * \
    i;\n    return s;\n}\n";

const MAKEFILE: &str = "\
all: out/upper out/count
out:
\tmkdir -p out
out/upper: words.txt | out
\ttr a-z A-Z < $< > $@
out/count: out/upper
\twc -l < $< > $@; echo made $@
.PHONY: all
";

const SCRIPT: &str = r#"# Runs under bash and dash.
count=0
while read -r word rest; do
    count=$((count + 1))
    case $word in
        a*) kind=first ;;
        *[0-9]) kind=number ;;
        *) kind=other ;;
    esac
    [ $count -le 8 ] && echo "$count $word $kind"
done < words.txt
f() { local x=$1; [ "$x" -le 1 ] && echo 1 && return; echo $((x * $(f $((x - 1))))); }
echo "factorial $(f 6)"
( cd tree && pwd | sed 's/.*\///' ; exit 4 ); echo "subshell $?"
trap 'echo trapped USR1' USR1
kill -USR1 $$
trap 'echo leaving' EXIT
for i in 1 2 3; do echo $i; done | sort -r | tr '\n' ' '
echo
sleep 0.02 & wait $!; echo "background $?"
sh -c 'kill -TERM $$'; echo "killed $?"
cat <<END
here $count documents
END
set -- a b c; shift; echo "$# $*"
false || echo "or"; ! true || echo "not printed"
exit 5
"#;

const JIT_LUA: &str = r#"-- Loops that are compiled, guards that fail, tables that are collected, coroutines, strings.
local sum = 0
for i = 1, 300000 do sum = (sum * 31 + i % 7) % 1000003 end
print(sum)
local function kind(i) if i % 100 == 99 then return "rare" elseif i % 2 == 0 then return 2 else return 1.5 end end
local numbers, strings = 0, 0
for i = 1, 20000 do
    local k = kind(i)
    if type(k) == "number" then numbers = numbers + k else strings = strings + #k end
end
print(numbers, strings)
local parts = {}
for i = 1, 5000 do parts[#parts + 1] = ("%x"):format(i * 7919 % 10007) end
table.sort(parts)
print(#table.concat(parts), parts[1], parts[#parts])
local squares = coroutine.wrap(function() for i = 1, 1000 do coroutine.yield(i * i) end end)
local total = 0
for i = 1, 1000 do total = total + squares() end
print(total, pcall(error, "message"), pcall(string.rep))
os.exit(4)
"#;

const JIT_JS: &str = r#"// Functions that are compiled and deoptimised, garbage, exceptions, a worker, timers.
const { Worker, isMainThread, parentPort } = require('worker_threads');
function hot(o, n) { let s = 0; for (let i = 0; i < n; i++) s = (s * 31 + o.x + i) | 0; return s; }
if (!isMainThread) {
    parentPort.postMessage(hot({ x: 3 }, 30000));
} else {
    let s = hot({ x: 1 }, 100000);
    for (const o of [{ x: 2 }, { y: 1, x: 0.5 }, { x: '7' }, { x: 1n === 1 ? 0 : 4 }]) s ^= hot(o, 20000);
    console.log(s);
    let kept = [];
    for (let i = 0; i < 60000; i++) kept[i % 100] = { text: 'n' + i, list: [i, i * 2] };
    console.log(kept.reduce((t, k) => t + k.list[1] + k.text.length, 0));
    const thrown = n => { if (n === 0) throw new Error('deep'); return thrown(n - 1) + 1; };
    try { thrown(2000); } catch (e) { console.log(e.message); }
    console.log('a-b-c'.replace(/(\w)-(\w)/, '$2+$1'), JSON.stringify({ k: [1.5, null] }), Math.sin(1), 2n ** 70n);
    const worker = new Worker(__filename);
    worker.on('message', m => console.log('worker', m));
    worker.on('exit', c => setTimeout(() => { console.log('ended', c); process.exit(5); }, 1));
}
"#;

const JIT_JAVA: &str = r#"import java.util.concurrent.*;

class Jit {
    static int hot(int x) { int s = 0; for (int i = 0; i < 1000; i++) s = s * 31 + (i ^ x); return s; }

    public static void main(String[] arguments) throws Exception {
        int sum = 0;
        for (int i = 0; i < 2000; i++) sum += hot(i);
        System.out.println(sum);
        ExecutorService pool = Executors.newFixedThreadPool(2);
        Future<Integer> first = pool.submit(() -> hot(1)), second = pool.submit(() -> hot(2));
        System.out.println(first.get() + " " + second.get());
        pool.shutdown();
        // Found out by a fault.
        try { ((Object) null).toString(); } catch (NullPointerException e) { System.out.println("caught"); }
        System.exit(3);
    }
}
"#;
