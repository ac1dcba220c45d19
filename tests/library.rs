//! The library as a program uses it: sessions, events, passes, policies, counters, and the three examples.
//!
//! The host is this test: an ordinary dynamic program at addresses of the kernel's choice, with several threads. Guests
//! run natively and in sessions, and must print the same and end in the same way.

use dynasour::events::Reason;
use dynasour::ir::opt::{OptOptions, OptStats, PIPELINE};
use dynasour::ir::{Op, Version};
use dynasour::{
    Chaos, Counters, DefaultPolicy, Event, Gpr, Outcome, OwnPass, Placement, Position, RegisterUse,
    Session, SessionBuilder, SessionError, SpeculationPolicy, Tier,
};
use dynasour_testkit::scratch;
use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

const TIERS: [Tier; 5] = [Tier::Interp, Tier::Dynamo, Tier::Copy, Tier::Full, Tier::Direct];

/// A loop of the shell with some hundred traces.
const COUNTING: &str = "i=0; while [ $i -lt 3000 ]; do i=$((i+1)); done; echo $i; exit 3";

fn directory(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("library").join(name);
    scratch::fresh(&directory).expect("a scratch directory");
    directory
}

/// Compiles a source of the tests.
fn compiled(directory: &Path, source: &str, options: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(source);
    let program = directory.join(source.file_stem().expect("a name"));
    let mut command = Command::new("cc");
    command.args(["-O2", "-w", "-pthread"]).args(options).arg("-o").arg(&program).arg(&source);
    let output = command.args(["-lm", "-ldl"]).output().expect("cc");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// The loop of 1,000,000 iterations, linked to the addresses of old programs.
fn thousand(directory: &Path) -> PathBuf {
    compiled(directory, "explain/thousand.c", &["-no-pie", "-static"])
}

fn sh<'s>(script: &str) -> SessionBuilder<'s> {
    Session::builder("/bin/sh").args(["-c", script])
}

fn eager(builder: SessionBuilder<'_>) -> SessionBuilder<'_> {
    builder.tier(Tier::Dynamo).threshold(50)
}

/// Runs a session whose standard output goes to a file; returns the outcome and the text.
fn printed(
    directory: &Path,
    session: SessionBuilder<'_>,
) -> (Result<Outcome, SessionError>, String) {
    let file = directory.join("stdout");
    let ran = session.stdout(File::create(&file).expect("a file")).run();
    (ran, fs::read_to_string(&file).expect("text"))
}

fn count(outcome: &Outcome, name: &str) -> u64 {
    outcome.statistics.as_ref().expect("statistics").count(name)
}

fn all(outcome: &Outcome, group: &str) -> u64 {
    let group = &outcome.statistics.as_ref().expect("statistics").json()[group];
    group.as_object().expect("a group").values().map(|n| n.as_u64().expect("a number")).sum()
}

#[test]
fn a_program_ends_as_it_would_natively() {
    for tier in TIERS {
        for status in [0, 7, 255] {
            let outcome = sh(&format!("exit {status}")).tier(tier).run().expect("it runs");
            assert_eq!(outcome.status.code(), Some(status), "{tier}");
        }
        for signal in [libc::SIGTERM, libc::SIGKILL, libc::SIGSEGV, libc::SIGPIPE] {
            let session = sh(&format!("ulimit -c 0; kill -{signal} $$; exit 1")).tier(tier);
            assert_eq!(session.run().expect("it runs").status.signal(), Some(signal), "{tier}");
        }
    }
}

#[test]
fn a_program_that_cannot_be_started_is_an_error() {
    let not_started = |session: SessionBuilder<'_>| match session.run() {
        Err(SessionError::NotStarted { status, why }) => (status, why),
        other => panic!("{other:?}"),
    };
    let (status, why) = not_started(Session::builder("/no/such/program"));
    assert!(status == 127 && why.contains("/no/such/program"), "{why}");
    let (status, why) = not_started(Session::builder("no-such-command"));
    assert!(status == 127 && why.contains("no-such-command"), "{why}");
    let (status, why) = not_started(Session::builder("/etc/passwd"));
    assert!(status == 126 && why.contains("/etc/passwd"), "{why}");
    let (status, why) = not_started(sh("true").current_dir("/no/such/directory"));
    assert!(status == 126 && why.contains("directory"), "{why}");
    let (status, _) = not_started(Session::builder("sh").env("PATH", "/nowhere"));
    assert_eq!(status, 127);
}

/// The message of a session that is refused before anything runs.
fn refused(session: SessionBuilder<'_>) -> String {
    match session.build() {
        Ok(_) => panic!("it was to be refused"),
        Err(error) => error.to_string(),
    }
}

fn idle(name: &'static str, position: Position) -> OwnPass {
    OwnPass::new(name, "does nothing", position, |_, _| 0)
}

#[test]
fn what_cannot_be_done_is_refused_before_anything_runs() {
    let contains = |message: String, words: &[&str]| {
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    };
    let program = || Session::builder("true");
    contains(refused(program().policy("hosted")), &["`hosted`", "`hoisted`?", "combined"]);
    contains(refused(program().skip_pass("foward")), &["`foward`", "`forward`?", "licm"]);
    contains(refused(program().passes(["simplify", "mine"])), &["`mine`", "licm"]);
    contains(refused(program().passes(["monitor"])), &["monitor", "evaluator"]);
    contains(refused(program().pass(idle("dce", Position::End))), &["`dce`", "another name"]);
    contains(refused(program().pass(idle("a,b", Position::End))), &["`a,b`"]);
    let two = program().pass(idle("mine", Position::End)).pass(idle("mine", Position::Named));
    contains(refused(two), &["`mine`", "another name"]);
    contains(refused(program().pass(idle("p", Position::After("dec")))), &["`dec`", "`dce`?"]);
    let absent = program().policy("eager").pass(idle("p", Position::Before("peel")));
    contains(refused(absent), &["`p`", "`peel`", "`eager`"]);
    contains(refused(program().placement(Own("eager"))), &["`eager`", "another name"]);
    let two = program().placement(Own("mine")).placement(Own("mine"));
    contains(refused(two), &["`mine`", "another name"]);
    contains(refused(program().placement(Own("mine")).policy("mime")), &["`mime`", "`mine`?"]);
    contains(refused(program().cache_size(1)), &["1 bytes", "16384"]);
    contains(refused(program().threshold(0)), &["at least 1"]);
    let run = |session: SessionBuilder<'_>| session.run().expect_err("refused").to_string();
    contains(run(program().arg("a\0b")), &["zero byte"]);
    contains(run(program().env("A=B", "c")), &["A=B"]);
}

/// A placement of the tests' own.
struct Own(&'static str);

impl Placement for Own {
    fn name(&self) -> &'static str {
        self.0
    }

    fn about(&self) -> &'static str {
        "no register is assumed to hold a value"
    }

    fn speculate_register(&self, _: Gpr, _: u64, _: RegisterUse) -> bool {
        false
    }

    fn passes(&self) -> &'static [&'static str] {
        PIPELINE
    }

    fn optimise(&self, version: &mut Version, options: &OptOptions) -> OptStats {
        match self.0 {
            "panics" => panic!("no idea"),
            "destroys" => version.blocks.clear(),
            _ => {}
        }
        dynasour::ir::opt::run_pipeline(version, PIPELINE, options)
    }
}

#[test]
fn guests_find_what_they_would_find_natively() {
    let directory = directory("guests");
    // The addresses that such a program wants are free in an ordinary host.
    let host = fs::read("/proc/self/exe").expect("this program");
    assert_eq!(host[16], 3, "ET_DYN");
    let guests = [
        ("guests/inherited.c", &[][..]),
        ("guests/threads.c", &[]),
        ("guests/fork_tree.c", &[]),
        ("guests/signals_threads.c", &[]),
        ("guests/fixed_mappings.c", &[]),
        ("guests/crash.c", &[]),
        ("explain/thousand.c", &["-no-pie"]),
        ("explain/thousand.c", &["-no-pie", "-static"]),
        ("explain/thousand.c", &["-static-pie"]),
    ];
    for (source, options) in guests {
        let program = compiled(&directory, source, options);
        let native = Command::new(&program).current_dir(&directory).output().expect("it runs");
        for tier in [Tier::Dynamo, Tier::Full, Tier::Direct] {
            let null = || File::open("/dev/null").expect("a file");
            let session = Session::builder(&program).current_dir(&directory).tier(tier);
            let session = session.stdin(null()).stderr(File::create("/dev/null").expect("a file"));
            let session = session.subscriber(|_| ());
            let (ran, text) = printed(&directory, session);
            let outcome = ran.unwrap_or_else(|error| panic!("{source} {tier}: {error}"));
            assert_eq!(outcome.status, native.status, "{source} {options:?} {tier}");
            // `inherited` prints its descriptors, of which 0 to 2 are other files here.
            if source != "guests/inherited.c" {
                assert_eq!(text, String::from_utf8_lossy(&native.stdout), "{source} {tier}");
            }
        }
    }
}

#[test]
fn signals_and_descriptors_are_as_after_an_execve() {
    let directory = directory("inherited");
    let program = compiled(&directory, "guests/inherited.c", &[]);
    let secret = File::open("/etc/passwd").expect("a file that execve closes");
    let to = |name: &str| File::create(directory.join(name)).expect("a file");
    let null = || File::open("/dev/null").expect("a file");
    let command = |to: File| Command::new(&program).stdin(null()).stdout(to).status();
    command(to("native")).expect("it runs");
    for tier in TIERS {
        let session = Session::builder(&program).stdin(null()).stdout(to("session")).tier(tier);
        assert!(session.run().expect("it runs").status.success());
        let [native, own] = ["native", "session"].map(|name| {
            let text = fs::read_to_string(directory.join(name)).expect("text");
            text.replace(name, "NAME")
        });
        assert_eq!(own, native, "{tier}");
    }
    drop(secret);
}

#[test]
fn the_host_and_what_it_shares_are_hidden() {
    let directory = directory("hidden");
    let own = std::env::current_exe().expect("this program");
    let counters = Counters::new().expect("memory");
    for tier in TIERS {
        let session = Session::builder("cat").arg("/proc/self/maps").tier(tier);
        let session = session.counters(&counters).subscriber(|_| ());
        let (ran, maps) = printed(&directory, session);
        assert!(ran.expect("it runs").status.success());
        assert!(maps.contains("[heap]") && maps.contains("/cat"), "{tier}:\n{maps}");
        let hidden = [own.to_str().expect("UTF-8"), "/dev/zero"];
        assert!(!hidden.iter().any(|name| maps.contains(name)), "{tier}:\n{maps}");
        // One C library, not that of the host as well.
        let libraries = maps.lines().filter(|line| line.ends_with("libc.so.6"));
        let offsets: Vec<_> = libraries.filter_map(|l| l.split_whitespace().nth(2)).collect();
        assert_eq!(offsets.iter().filter(|offset| **offset == "00000000").count(), 1, "{maps}");
    }
}

#[test]
fn the_environment_is_the_sessions() {
    let directory = directory("environment");
    let session = sh("echo $A-$B-$HOME; pwd").env("A", "1").env("B", "2").env_remove("B");
    let (ran, text) = printed(&directory, session.current_dir("/usr").env("HOME", "h"));
    assert!(ran.expect("it runs").status.success());
    assert_eq!(text, "1--h\n/usr\n");
    let clear = Session::builder("/usr/bin/env").env("X", "1").env_clear().env("Y", "2");
    assert_eq!(printed(&directory, clear).1, "Y=2\n");
}

#[test]
fn events_agree_with_statistics() {
    let (mut made, mut deopts, mut revived, mut names) = (0, 0, 0, Vec::new());
    let session = eager(sh(COUNTING)).subscriber(|event| match event {
        Event::Made(trace) => {
            made += 1;
            assert!(trace.guest_instructions > 0 && trace.code_bytes > 0);
            assert!(
                trace.compile_nanoseconds > 0 && trace.guards.len() as u64 <= trace.ir_instructions
            );
            if let Some((of, _)) = &trace.side_of {
                assert!(names.contains(of), "{of} was made before {}", trace.version);
            }
            names.push(trace.version.clone());
        }
        Event::Deopt { version, guard, reason, .. } => {
            deopts += 1;
            assert!(names.contains(version));
            assert_eq!(guard.is_some(), *reason == Reason::Guard, "{event:?}");
        }
        Event::Linked { from, .. } => assert!(names.contains(from)),
        Event::Revived { .. } => revived += 1,
        _ => {}
    });
    let outcome = session.run().expect("it runs");
    assert_eq!(outcome.status.code(), Some(3));
    assert!(made > 50, "{made}");
    assert_eq!(made, count(&outcome, "fragments"));
    assert_eq!(deopts, all(&outcome, "deopts"));
    assert_eq!(revived, count(&outcome, "woken"));
}

#[test]
fn a_small_cache_is_flushed_and_says_so() {
    let mut flushes = 0;
    let session = eager(sh(COUNTING)).cache_size(16 << 10);
    let session = session.subscriber(|event| flushes += u64::from(*event == Event::Flush));
    let outcome = session.run().expect("it runs");
    assert!(flushes > 0);
    assert_eq!(flushes, count(&outcome, "flushes"));
}

#[test]
fn changed_code_is_told() {
    let directory = directory("changed");
    let program = compiled(&directory, "guests/code_versions.c", &[]);
    let native = Command::new(&program).output().expect("it runs");
    let mut invalidated = 0;
    let session = eager(Session::builder(&program)).subscriber(|event| {
        invalidated += u64::from(matches!(event, Event::Invalidated { .. }));
    });
    let (ran, text) = printed(&directory, session);
    let outcome = ran.expect("it runs");
    assert_eq!((outcome.status, text.as_bytes()), (native.status, &native.stdout[..]));
    assert!(invalidated > 0 && invalidated >= count(&outcome, "rested"), "{invalidated}");
}

#[test]
fn a_slow_subscriber_loses_nothing() {
    let (mut deopts, mut first) = (0, true);
    let session = eager(sh(COUNTING)).chaos(Chaos { one_in: 20, seed: 1 });
    let session = session.subscriber(|event| {
        if std::mem::take(&mut first) {
            std::thread::sleep(Duration::from_millis(300));
        }
        deopts += u64::from(matches!(event, Event::Deopt { .. }));
    });
    let outcome = session.run().expect("it runs");
    // More than the ring holds.
    assert!(deopts > 5_000, "{deopts}");
    assert_eq!(deopts, all(&outcome, "deopts"));
}

/// A thread that panics holds a lock of the standard library's, perhaps while another one forks.
#[test]
fn threads_of_the_host_may_panic_meanwhile() {
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                assert!(std::panic::catch_unwind(|| panic!("in the host")).is_err());
            }
        });
        let runs = || Session::builder("true").run().is_ok_and(|ran| ran.status.success());
        let all = (0..20).all(|_| runs());
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(all);
    });
}

#[test]
fn a_subscriber_that_panics_ends_the_guest() {
    let directory = directory("panics");
    let file = directory.join("stdout");
    let script = "echo $$; while :; do i=$((i+1)); done";
    let session = eager(sh(script)).stdout(File::create(&file).expect("a file"));
    let mut session = session.subscriber(|_| panic!("enough")).build().expect("valid");
    let run = std::panic::AssertUnwindSafe(|| session.run());
    assert!(std::panic::catch_unwind(run).is_err());
    let pid = fs::read_to_string(&file).expect("text");
    // It may have been killed before it wrote.
    if let Ok(pid) = pid.trim().parse::<i32>() {
        assert!(!Path::new("/proc").join(pid.to_string()).exists(), "{pid}");
    }
}

#[test]
fn sessions_run_one_after_another_and_at_once() {
    let mut session = eager(sh(COUNTING)).stdout(File::create("/dev/null").expect("a file"));
    let counters = Counters::new().expect("memory");
    let versions = counters.counter("versions").expect("room");
    session =
        session.counters(&counters).pass(OwnPass::new("c", "", Position::End, move |_, _| {
            versions.add(1);
            0
        }));
    let mut session = session.build().expect("valid");
    for _ in 0..2 {
        let outcome = session.run().expect("it runs");
        assert_eq!(outcome.status.code(), Some(3));
        let made = count(&outcome, "fragments");
        let counted = outcome.counters["versions"];
        // Some versions are not worth their code.
        assert!(made > 0 && (made..2 * made).contains(&counted), "{counted} of {made}");
    }
    let threads = [3, 4].map(|status| {
        std::thread::spawn(move || {
            let outcome = sh(&format!("sleep 0.1; exit {status}")).run().expect("it runs");
            assert_eq!(outcome.status.code(), Some(status));
        })
    });
    threads.into_iter().for_each(|thread| thread.join().expect("it ran"));
}

#[test]
fn children_add_to_counters_and_send_no_events() {
    let directory = directory("children");
    let counters = Counters::new().expect("memory");
    let versions = counters.counter("versions").expect("room");
    let pass = OwnPass::new("c", "", Position::Before("simplify"), move |_, _| {
        versions.add(1);
        0
    });
    let mut made = 0;
    let session = eager(sh(&format!("({COUNTING}); ({COUNTING}); exit 0"))).pass(pass);
    let session = session.counters(&counters).subscriber(|event| {
        made += u64::from(matches!(event, Event::Made(_)));
    });
    let (ran, text) = printed(&directory, session);
    let outcome = ran.expect("it runs");
    assert_eq!((outcome.status.code(), text.as_str()), (Some(0), "3000\n3000\n"));
    assert_eq!(made, count(&outcome, "fragments"));
    assert!(outcome.counters["versions"] > made, "{:?} {made}", outcome.counters);
}

#[test]
fn a_pass_that_breaks_a_trace_is_refused() {
    let directory = directory("broken");
    let native = "3000\n";
    let broken = |session: SessionBuilder<'_>| {
        let (ran, text) = printed(&directory, session);
        assert_eq!(text, native, "the guest goes on");
        match ran {
            Err(SessionError::BrokenPass { pass, why, outcome, .. }) => {
                assert_eq!(outcome.status.code(), Some(3));
                assert_eq!(count(&outcome, "fragments"), 0);
                assert!(count(&outcome, "aborts.BrokenPass") > 0);
                (pass, why)
            }
            other => panic!("{other:?}"),
        }
    };
    let bad = |run: fn(&mut Version)| {
        let pass = OwnPass::new("bad", "breaks", Position::After("peel"), move |version, _| {
            run(version);
            1
        });
        broken(eager(sh(COUNTING)).pass(pass))
    };
    let (pass, why) = bad(|version| version.anchors.clear());
    assert!(pass == "bad" && !why.is_empty());
    let (pass, why) = bad(|_| panic!("at a loss"));
    assert_eq!((pass.as_str(), why.as_str()), ("bad", "it panicked: at a loss"));
    let (pass, why) = broken(eager(sh(COUNTING)).placement(Own("panics")));
    assert_eq!((pass.as_str(), why.as_str()), ("panics", "it panicked: no idea"));
    let (pass, _) = broken(eager(sh(COUNTING)).placement(Own("destroys")));
    assert_eq!(pass, "destroys");
}

#[test]
fn a_pass_that_lies_is_found_by_comparing() {
    // It removes guards: the version is valid, and wrong.
    let pass = OwnPass::new("bold", "removes guards", Position::Before("dce"), |version, _| {
        let guards = |block: &mut dynasour::ir::Block| {
            block.insts.retain(|inst| inst.op != Op::Assume);
        };
        version.blocks.iter_mut().for_each(guards);
        1
    });
    let null = File::create("/dev/null").expect("a file");
    let session = eager(sh(COUNTING)).pass(pass).verify_traces().stderr(null);
    let outcome = session.run().expect("it runs");
    assert!(!outcome.status.success() && outcome.status.code() != Some(3), "{:?}", outcome.status);
}

/// Asks for nothing but one trace of a head.
struct Odd(DefaultPolicy, u32);

impl SpeculationPolicy for Odd {
    fn head_threshold(&self) -> u32 {
        self.1
    }
    fn exit_threshold(&self) -> u32 {
        self.1
    }
    fn max_instructions(&self) -> usize {
        self.1 as usize
    }
    fn max_failures(&self) -> u32 {
        self.1
    }
    fn max_versions(&self) -> usize {
        self.1 as usize
    }
    fn cache_overflowed(&mut self) {}
    fn placement(&self) -> &'static dyn Placement {
        self.0.placement()
    }
}

#[test]
fn policies_change_how_fast_and_never_what() {
    let directory = directory("policies");
    for tier in [Tier::Dynamo, Tier::Full, Tier::Direct] {
        for n in [0, 1, 3, u32::MAX] {
            let session = sh(COUNTING).tier(tier).threshold(50).placement(Own("mine"));
            let session = session.speculation(move |default| {
                assert_eq!(default.placement.name(), "mine");
                Box::new(Odd(default, n))
            });
            let (ran, text) = printed(&directory, session);
            let outcome = ran.expect("it runs");
            assert_eq!((outcome.status.code(), text.as_str()), (Some(3), "3000\n"), "{tier} {n}");
            if tier == Tier::Dynamo {
                assert_eq!(count(&outcome, "fragments") == 0, n == u32::MAX, "{n}");
            }
        }
    }
}

#[test]
fn executed_programs_run_natively_or_under_the_named_command() {
    let directory = directory("follow");
    let own = fs::canonicalize("/proc/self/exe").expect("this program");
    let dynasour = fs::canonicalize(env!("CARGO_BIN_EXE_dynasour")).expect("the command");
    for follows in [false, true] {
        let file = directory.join("stdout");
        let mut session = sh("sleep 60 & echo $!; wait $!; exit 5");
        if follows {
            session = session.follow(&dynasour);
        }
        let session = session.stdout(File::create(&file).expect("a file"));
        let watching = std::thread::spawn({
            let (file, own) = (file.clone(), own.clone());
            move || {
                let until = Instant::now() + Duration::from_secs(30);
                loop {
                    assert!(Instant::now() < until, "no program was executed");
                    std::thread::sleep(Duration::from_millis(10));
                    let pid = fs::read_to_string(&file).unwrap_or_default();
                    let Ok(pid) = pid.trim().parse::<i32>() else { continue };
                    match fs::read_link(format!("/proc/{pid}/exe")) {
                        Ok(program) if program != own => {
                            // SAFETY: a signal to the guest's child.
                            unsafe { libc::kill(pid, libc::SIGKILL) };
                            return program;
                        }
                        _ => {}
                    }
                }
            }
        });
        assert_eq!(session.run().expect("it runs").status.code(), Some(5));
        assert_eq!(watching.join().expect("found") == dynasour, follows);
    }
}

/// Runs an example, which is built if it is not.
fn example(name: &str, command: &[&str]) -> Output {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let directory = BUILT.get_or_init(|| {
        // The tests are in `deps`, the examples in `examples` beside it.
        let tests = std::env::current_exe().expect("this program");
        let profile = tests.parent().and_then(Path::parent).expect("a directory");
        if !profile.join("examples").join("event_log").exists() {
            let mut cargo = Command::new(env!("CARGO"));
            cargo.args(["build", "--examples", "--manifest-path"]);
            cargo.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
            if profile.ends_with("release") {
                cargo.arg("--release");
            }
            assert!(cargo.status().expect("cargo").success());
        }
        profile.join("examples")
    });
    Command::new(directory.join(name)).args(command).output().expect("it runs")
}

fn lines(output: &Output) -> Vec<String> {
    String::from_utf8_lossy(&output.stderr).lines().map(str::to_string).collect()
}

/// The guards that a counting run of the command has executed, and how often they failed.
fn guards_of_the_command(directory: &Path, program: &str) -> (u64, u64) {
    let file = directory.join("census");
    let mut command = Command::new(env!("CARGO_BIN_EXE_dynasour"));
    command.args(["run", "--tier", "dynamo", "--threshold", "100", "--count"]).arg(&file);
    assert!(command.args(["--", program]).output().expect("it runs").status.success());
    let text = fs::read(&file).expect("a census");
    let census: dynasour::census::Census = serde_json::from_slice(&text).expect("a census");
    let guards = census.fragments.iter().flat_map(|fragment| &fragment.guards);
    guards.fold((0, 0), |(all, failed), guard| (all + guard.executed, failed + guard.failed))
}

#[test]
fn example_instruction_mix() {
    let directory = directory("mix");
    let program = thousand(&directory);
    let program = program.to_str().expect("UTF-8");
    let output = example("instruction_mix", &[program]);
    assert_eq!(output.stdout, Command::new(program).output().expect("it runs").stdout);
    let lines = lines(&output);
    let number = |operation: &str| {
        let line = lines.iter().find(|line| line.ends_with(&format!("  {operation}")));
        let number = line.and_then(|line| line.split_whitespace().next());
        number.expect("a line").parse::<u64>().expect("a number")
    };
    // Every guard is an `assume`: those of the command are as many. Each of the million iterations multiplies once,
    // nearly all of them in a trace.
    assert_eq!(number("assume"), guards_of_the_command(&directory, program).0);
    assert!((990_000..=1_000_000).contains(&number("mul")), "{lines:?}");
    let total = lines[0].rsplit(' ').next().and_then(|n| n.parse::<u64>().ok());
    let sum = lines[1..].iter().map(|line| line.split_whitespace().next().expect("a number"));
    assert_eq!(total, Some(sum.map(|n| n.parse::<u64>().expect("a number")).sum()));
}

#[test]
fn example_policy() {
    let directory = directory("policy");
    let program = thousand(&directory);
    let program = program.to_str().expect("UTF-8");
    let output = example("policy", &[program]);
    let native = Command::new(program).output().expect("it runs").stdout;
    assert_eq!(output.stdout, native.repeat(3));
    let lines = lines(&output);
    let row = |policy: &str| -> Vec<u64> {
        let line = lines.iter().find(|line| line.starts_with(policy)).expect("a row");
        line.split_whitespace().skip(1).map(|n| n.parse().expect("a number")).collect()
    };
    let (executed, failed) = guards_of_the_command(&directory, program);
    assert_eq!(row("default")[1..3], [executed, failed]);
    assert!(row("merged")[1] < row("default")[1], "one guard of two: {lines:?}");
    // Its exits get their side traces after 200 executions, not after 50.
    assert!(row("careful")[3] > row("default")[3], "{lines:?}");
}

#[test]
fn example_event_log() {
    let output = example("event_log", &["sh", "-c", COUNTING]);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(3), &b"3000\n"[..]));
    let lines = lines(&output);
    let count = |what: &str| lines.iter().filter(|line| line.starts_with(what)).count();
    assert!(count("made t1 ") == 1 && count("made ") > 50 && count("linked ") > 50);
    assert!(count("deopt ") > 500);
    let known = ["made", "failed", "linked", "invalidated", "revived", "deopt", "flush"];
    let other = lines.iter().find(|line| !known.contains(&line.split(' ').next().unwrap_or("")));
    assert_eq!(other, None);
    let missing = example("event_log", &["/no/such/program"]);
    assert_eq!(missing.status.code(), Some(127));
    for name in ["event_log", "policy", "instruction_mix"] {
        let usage = example(name, &[]);
        assert_eq!(usage.status.code(), Some(2));
        assert!(lines_of_usage(&usage, name));
    }
}

fn lines_of_usage(output: &Output, name: &str) -> bool {
    lines(output) == [format!("usage: {name} PROGRAM [ARG]…")]
}
