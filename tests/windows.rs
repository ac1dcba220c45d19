//! A signal at every host instruction near a change of control: the ways into fragments and out of
//! them, lookups, the fragments themselves, and the instructions around a system call.
//!
//! A debugger places each signal exactly. The guest reports whether the signal came, when it came,
//! and whether its computation was disturbed.
//!
//! The guest computes between two *markers* (a system call that the debugger recognises). One
//! stretch between markers is single-stepped to collect its host instructions. Then, one stretch
//! for each of them, a hardware breakpoint stops before the instruction and the signal is delivered
//! there. At the following marker the guest must have handled the signal before its loop ended, and
//! its sum must be right.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

use iced_x86::{Code, Decoder, DecoderOptions};
use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;

/// The first argument of the `sched_yield` call that is a marker. The other arguments: signals
/// handled, signals that came late, wrong sums.
const MARK: u64 = 0x6d61_726b;
/// Markers that pass before the stretches are examined, so that the guest's code has been compiled
/// (guess).
const WARM: usize = 30;
/// Stretches in which an instruction may come (guess; one is too few if a race changes sides in it).
const STRETCHES: u32 = 3;
/// The most host instructions of a stretch that are single-stepped (guess; a step by TF takes 28
/// µs, measured).
const STEPS: usize = 40_000;

const GUEST: &str = r#"
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
static volatile uint64_t handled, late, wrong;
static volatile int phase;
static void on_signal(int signo) { (void)signo; handled++; late += phase == 2; }
#define NOINLINE __attribute__((noinline))
static NOINLINE uint64_t add(uint64_t x) { return x + 77; }
static NOINLINE uint64_t shift(uint64_t x) { return x >> 3 ^ x; }
static NOINLINE uint64_t multiply(uint64_t x) { return x * 0x9e3779b97f4a7c15; }
static NOINLINE uint64_t negate(uint64_t x) { return -x; }
static uint64_t (*volatile table[4])(uint64_t) = {add, shift, multiply, negate};
/* Jumps whose targets are in registers: the same one, and three others. The last target has another
 * way in, so it is known before; and rcx is used behind it. In one piece, because a compiler may have
 * code of its own on the way to a label. */
static NOINLINE uint64_t thread(uint64_t which, uint64_t sum) {
    __asm__("mov %1, %%rcx\n"
            "lea 3f(%%rip), %%r9; lea 2f(%%rip), %%rdx; lea 1f(%%rip), %%rax\n"
            "test $3, %%ecx; cmovnp %%rdx, %%rax; jmp *%%rax\n"
            "1: add $5, %0; mov %%rcx, %%r8; mov %%rdx, %%rcx; test $1, %%r8b; cmovne %%r9, %%rcx\n"
            "xor %%r8, %0; jmp *%%rcx\n"
            "2: lea (%0, %1, 2), %0; jmp *%%r9\n"
            "3: mov %1, %%rcx; lea 4f(%%rip), %%rdx; test $1, %%cl; jne 4f\n"
            "lea (%%rcx, %0, 2), %0; jmp *%%rdx\n"
            "4: add %%rcx, %0"
            : "+r"(sum) : "r"(which) : "rax", "rcx", "rdx", "r8", "r9", "cc");
    return sum;
}
static long calls;
/* getppid, which is passed on to the kernel, and rt_sigprocmask, which is not. Behind a `nop`, `mov`
 * is no end of a longer instruction, so the site need not be observed. */
static NOINLINE uint64_t call(void) {
    uint64_t parent, failed, old;
    __asm__ volatile("mov $110, %%eax; syscall" : "=a"(parent) : : "rcx", "r11", "memory");
    register uint64_t r10 __asm__("r10") = 8;
    __asm__ volatile("nop; mov $14, %%eax; syscall" : "=a"(failed)
                     : "D"(0), "S"(0), "d"(&old), "r"(r10) : "rcx", "r11", "memory");
    return parent + failed + old;
}
static NOINLINE uint64_t work(long rounds) {
    uint64_t a = 1, b = 2, sum = 0;
    double x = 1;
    phase = 1;
    for (long i = 0; i < calls; i++) sum += call();
    for (long i = 0; i < rounds; i++) {
        a = a * 6364136223846793005 + 1442695040888963407;
        b ^= b << 13, b ^= b >> 7, b ^= b << 17;
        sum += table[a >> 62](b);
        x = x * 0.75 + (double)(sum >> 40);
        if ((a >> 50 & 31) == 3) sum ^= (uint64_t)x;
        sum = thread(a >> 40, sum);
    }
    phase = 2;
    return sum ^ (uint64_t)x;
}
int main(int argc, char **argv) {
    long rounds = argc > 1 ? atol(argv[1]) : 1;
    calls = argc > 2 ? atol(argv[2]) : 0;
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGUSR1, &action, 0);
    thread(1, 0);
    uint64_t expected = work(rounds);
    for (;;) {
        wrong += work(rounds) != expected;
        phase = 0;
        syscall(SYS_sched_yield, 0x6d61726b, handled, late, wrong);
    }
}
"#;

/// A guest whose loop makes system calls, at sites of each form that is rewritten in place.
const CALLS: &str = r#"
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
static volatile uint64_t handled, late, wrong;
static volatile int phase;
static void on_signal(int signo) { (void)signo; handled++; late += phase == 2; }
#define SITE(name, before, after) \
    __asm__(".text\n" #name ":\nmov %rcx, %rax\n" before "\nsyscall\n" after "\nret\n"); \
    extern long name(long, const void *, long, long)
/* Four arguments: those of the call, and its number. */
SITE(zero, "xor %eax, %eax", "cmp $-4096, %rax");
SITE(two, "mov %edi, %edi", "lea (%rax, %rax), %rax");
SITE(two_short, "mov %edi, %edi", "nop");
SITE(three, "mov %rdx, %r9", "");
SITE(four, "lea 8(%rdx), %r9", "");
SITE(five, "mov 8(%rsp), %r9", "");
SITE(number, "mov $110, %eax", "");
static int zeros;
static long parent, user;
static __attribute__((noinline)) uint64_t work(long rounds) {
    uint64_t bad = 0;
    phase = 1;
    for (long i = 0; i < rounds; i++) {
        char byte = 1;
        bad += zero(zeros, &byte, 1, 9) != 1 || byte != 0;
        bad += zero(zeros, (void *)8, 1, 9) != -14;
        bad += two(zeros, 0, 0, SYS_getppid) != 2 * parent;
        bad += two_short(zeros, 0, 0, SYS_getppid) != parent;
        bad += three(zeros, 0, 0, SYS_getppid) != parent;
        bad += four(zeros, 0, 0, SYS_getppid) != parent;
        bad += five(zeros, 0, 0, i & 1 ? SYS_getppid : SYS_getuid) != (i & 1 ? parent : user);
        bad += number(zeros, 0, 0, 0) != parent;
    }
    phase = 2;
    return bad;
}
int main(int argc, char **argv) {
    long rounds = argc > 1 ? atol(argv[1]) : 1;
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigaction(SIGUSR1, &action, 0);
    zeros = open("/dev/zero", O_RDONLY), parent = getppid(), user = getuid();
    for (;;) {
        wrong += work(rounds);
        phase = 0;
        syscall(SYS_sched_yield, 0x6d61726b, handled, late, wrong);
    }
}
"#;

static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| build("guest", GUEST));
static CALLING: LazyLock<PathBuf> = LazyLock::new(|| build("calls", CALLS));

fn build(name: &str, text: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("windows");
    fs::create_dir_all(&directory).expect("the target directory is writable");
    let (source, program) = (directory.join(format!("{name}.c")), directory.join(name));
    fs::write(&source, text).expect("the target directory is writable");
    let built = Command::new("cc")
        .args(["-O1", "-o"])
        .arg(&program)
        .arg(&source)
        .status()
        .expect("cc runs");
    assert!(built.success(), "the guest does not build");
    program
}

/// The numbers that the guest reports at a marker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Said {
    handled: u64,
    late: u64,
    wrong: u64,
}

/// Why the traced process stopped.
#[derive(Debug, PartialEq, Eq)]
enum Event {
    Marker(Said),
    /// At a breakpoint or after a step.
    Trap,
    Signal(Signal),
}

/// A dynasour process under a debugger.
struct Traced {
    child: Child,
    pid: Pid,
    in_call: bool,
    breakpoint: Option<u64>,
}

impl Traced {
    /// `rounds` and `calls` are the loops of a stretch.
    fn start(options: &[&str], guest: &Path, rounds: u32, calls: u32) -> Traced {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dynasour"));
        command
            .arg("run")
            .args(options)
            .arg("--")
            .arg(guest)
            .args([rounds.to_string(), calls.to_string()])
            .stdout(Stdio::null());
        // SAFETY: one system call.
        unsafe { command.pre_exec(|| ptrace::traceme().map_err(io::Error::from)) };
        let child = command.spawn().expect("dynasour starts");
        let pid = Pid::from_raw(child.id() as i32);
        assert!(
            matches!(waitpid(pid, None), Ok(WaitStatus::Stopped(_, Signal::SIGTRAP))),
            "ptrace is allowed here"
        );
        let options = ptrace::Options::PTRACE_O_EXITKILL | ptrace::Options::PTRACE_O_TRACESYSGOOD;
        ptrace::setoptions(pid, options).expect("options of ptrace");
        Traced { child, pid, in_call: false, breakpoint: None }
    }

    fn rip(&self) -> u64 {
        ptrace::getregs(self.pid).expect("registers").rip
    }

    /// Continues until an event that is not one of the runtime's own system calls.
    fn run(&mut self, mut signal: Option<Signal>) -> Event {
        loop {
            ptrace::syscall(self.pid, signal.take()).expect("the process goes on");
            match waitpid(self.pid, None).expect("the process stops") {
                WaitStatus::PtraceSyscall(_) => {
                    self.in_call = !self.in_call;
                    if let Some(said) = self.marker() {
                        return Event::Marker(said);
                    }
                }
                // After single steps the kernel may report the end of a system call as the end of a
                // step.
                WaitStatus::Stopped(_, Signal::SIGTRAP) if self.is_behind_a_call() => {}
                WaitStatus::Stopped(_, other) if self.is_of_patch(other) => signal = Some(other),
                WaitStatus::Stopped(_, Signal::SIGTRAP) => return Event::Trap,
                WaitStatus::Stopped(_, signal) => return Event::Signal(signal),
                other => panic!("the guest ended: {other:?}"),
            }
        }
    }

    fn is_behind_a_call(&self) -> bool {
        const SYSCALL: u16 = 0x050f;
        let rip = self.rip();
        self.breakpoint != Some(rip)
            && self.word(rip - 2).is_some_and(|code| code as u16 == SYSCALL)
    }

    /// Executes one instruction. (The kernel lets a stepped `pushfq` push the trap flag; nothing
    /// here repairs that.)
    fn step(&mut self) -> Event {
        let mut signal = None;
        loop {
            ptrace::step(self.pid, signal.take()).expect("the process goes on");
            match waitpid(self.pid, None).expect("the process stops") {
                WaitStatus::Stopped(_, other) if self.is_of_patch(other) => signal = Some(other),
                WaitStatus::Stopped(_, Signal::SIGTRAP) => return Event::Trap,
                WaitStatus::Stopped(_, signal) => return Event::Signal(signal),
                other => panic!("the guest ended: {other:?}"),
            }
        }
    }

    /// Lets the process run on for this time, and stops it.
    fn run_for(&mut self, time: Duration) {
        ptrace::cont(self.pid, None).expect("the process goes on");
        std::thread::sleep(time);
        kill(self.pid, Signal::SIGSTOP).expect("the signal is sent");
        loop {
            match waitpid(self.pid, None).expect("the process stops") {
                WaitStatus::Stopped(_, Signal::SIGSTOP) => break,
                WaitStatus::Stopped(_, other) => {
                    ptrace::cont(self.pid, other).expect("the process goes on")
                }
                other => panic!("the guest ended: {other:?}"),
            }
        }
        self.in_call = false;
    }

    /// Is the signal one that guest code in place raises, for the runtime: by a system call, by
    /// jumping into a patch, or by a read of a page that is hidden because it has patches?
    fn is_of_patch(&self, signal: Signal) -> bool {
        /// The `si_code` of `int3` (`SI_KERNEL`), unlike that of breakpoints and steps.
        const INT3: i32 = 0x80;
        /// The `si_code` of protection keys (`SEGV_PKUERR`).
        const HIDDEN: i32 = 4;
        match signal {
            Signal::SIGSYS | Signal::SIGILL => true,
            Signal::SIGTRAP => ptrace::getsiginfo(self.pid).is_ok_and(|info| info.si_code == INT3),
            Signal::SIGSEGV => {
                ptrace::getsiginfo(self.pid).is_ok_and(|info| info.si_code == HIDDEN)
            }
            _ => false,
        }
    }

    /// Eight bytes of memory at `address`, if they can be read.
    fn word(&self, address: u64) -> Option<i64> {
        ptrace::read(self.pid, address as ptrace::AddressType).ok()
    }

    /// The numbers of the marker, if the process stands at the entry of a marker's system call.
    fn marker(&self) -> Option<Said> {
        let regs = ptrace::getregs(self.pid).expect("registers");
        let is_marker =
            self.in_call && regs.orig_rax == libc::SYS_sched_yield as u64 && regs.rdi == MARK;
        is_marker.then_some(Said { handled: regs.rsi, late: regs.rdx, wrong: regs.r10 })
    }

    fn next_marker(&mut self) -> Said {
        let mut signal = None;
        loop {
            match self.run(signal.take()) {
                Event::Marker(said) => return said,
                Event::Signal(other) => signal = Some(other),
                Event::Trap => {}
            }
        }
    }

    /// The addresses around the system call at which the process stands.
    fn call(&self) -> Range<u64> {
        let rip = self.rip();
        rip - 48..rip + 16
    }

    /// The mappings in the low 2 GiB with these rights whose lines `wanted` accepts.
    fn mappings(&self, rights: &str, wanted: impl Fn(&str) -> bool) -> Vec<Range<u64>> {
        const LOW: u64 = 0x8000_0000;
        let maps =
            fs::read_to_string(format!("/proc/{}/maps", self.pid)).expect("the list of mappings");
        let lines =
            maps.lines().filter(|line| line.split(' ').nth(1) == Some(rights) && wanted(line));
        let ranges = lines.filter_map(|line| {
            let (start, end) = line.split(' ').next()?.split_once('-')?;
            Some(u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
        });
        ranges.filter(|range| range.end <= LOW).collect()
    }

    /// The address range of the code cache.
    fn cache(&self) -> Range<u64> {
        self.mappings("r-xs", |_| true).first().expect("a code cache").clone()
    }

    /// The guest's own code, and the runtime's code between that and the code cache: stubs, ways
    /// out, trampolines.
    fn in_place(&self) -> Vec<Range<u64>> {
        let guest = self.mappings("r-xp", |line| {
            line.ends_with("/windows/guest") || line.ends_with("/windows/calls")
        });
        let between = self.mappings("r-xp", |line| line.trim_end().ends_with(" 0"));
        assert!(!guest.is_empty() && !between.is_empty());
        guest.into_iter().chain(between).collect()
    }

    /// The address of the first function of the guest `CALLS` whose call is patched.
    fn first_patched(&self) -> u64 {
        let code = self.in_place()[0].clone();
        // `mov rax, rcx` and a jump.
        let is_site = |at: &u64| self.word(*at).is_some_and(|code| code as u32 == 0xe9c8_8948);
        code.clone().find(is_site).expect("a patched site")
    }

    /// Sets the breakpoint before the instruction at `address`; `None` removes it.
    fn set_breakpoint(&mut self, address: Option<u64>) {
        self.breakpoint = address;
        let register = |n: usize| {
            (std::mem::offset_of!(libc::user, u_debugreg) + 8 * n) as ptrace::AddressType
        };
        let set = |n: usize, value: u64| {
            ptrace::write_user(self.pid, register(n), value as i64).expect("a debug register")
        };
        set(7, 0);
        if let Some(address) = address {
            set(0, address);
            set(7, 1);
        }
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The host instructions of one stretch that lie in the code cache or around the marker's call.
fn instructions(process: &mut Traced) -> Vec<u64> {
    let places = [process.cache(), process.call()];
    instructions_in(process, &places)
}

/// As [`instructions`], of several stretches, while a race that never ends changes sides: of four, and
/// of more if each of these executes both sides, since stepping takes long on a busy machine.
fn instructions_of_sides(process: &mut Traced) -> Vec<u64> {
    const STRETCHES: Range<usize> = 4..40;
    let mut found = BTreeSet::from_iter(instructions(process));
    let mut shortest = found.len();
    let mut stretches = 1;
    while stretches < STRETCHES.start || shortest == found.len() && stretches < STRETCHES.end {
        process.next_marker();
        let one = BTreeSet::from_iter(instructions(process));
        shortest = shortest.min(one.len());
        found.extend(one);
        stretches += 1;
    }
    println!("{shortest} instructions in a stretch, {} in {stretches}", found.len());
    assert!(found.len() > shortest, "the sides are different code");
    found.into_iter().collect()
}

/// As [`instructions`], with those of the guest in place, and of the way between the two.
fn instructions_in_place(process: &mut Traced) -> Vec<u64> {
    let mut places = process.in_place();
    // Behind the sample at the beginning of the stretch: the flags of stepped code that the
    // interpreter executes have TF. And not in the host: the steps would pass the `popfq` by which
    // guest code in place is entered, and the kernel would take their TF for the program's. On a busy
    // machine the process may not have come so far in a millisecond.
    loop {
        process.run_for(Duration::from_millis(1));
        if places.iter().any(|place| place.contains(&process.rip())) {
            break;
        }
    }
    let between = places.len();
    places.push(process.cache());
    let found = instructions_in(process, &places);
    for (n, place) in places.iter().enumerate() {
        let there = found.iter().filter(|rip| place.contains(rip)).count();
        println!("{place:x?}: {there} instructions");
        assert!(n != 0 && n != between || there > 0, "nothing in {place:x?}");
    }
    found
}

/// The host instructions of one stretch of guest code in place that makes system calls: in the
/// guest's code, in stubs and in trampolines. All sites but the marker's are patched.
fn instructions_of_calls(process: &mut Traced) -> Vec<u64> {
    let places = process.in_place();
    // The stretch is stepped from its first call on, and not as far as the marker: a call that
    // traps while it is stepped leaves TF in the guest's flags.
    let first = process.first_patched();
    process.set_breakpoint(Some(first));
    assert_eq!((process.run(None), process.rip()), (Event::Trap, first));
    process.set_breakpoint(None);
    let found = instructions_in(process, &places);
    let within = |place: &Range<u64>| found.iter().filter(|rip| place.contains(rip)).count();
    let there: Vec<usize> = places.iter().map(within).collect();
    println!("{places:x?}: {there:?} instructions");
    assert!(within(&stubs_of(&places)) >= 50, "the stubs are executed");
    found
}

/// Where the stubs of system calls and the ways out are, among the places of
/// [`Traced::in_place`]: behind one page of data at the beginning of 16 MiB.
fn stubs_of(places: &[Range<u64>]) -> Range<u64> {
    let stubs = places.iter().find(|place| place.start % 0x0100_0000 == 0x1000);
    stubs.expect("stubs").clone()
}

/// The host instructions of one stretch that lie in `places`.
fn instructions_in(process: &mut Traced, places: &[Range<u64>]) -> Vec<u64> {
    let (mut seen, mut found) = (HashSet::new(), Vec::new());
    for _ in 0..STEPS {
        match process.step() {
            Event::Trap => {}
            other => panic!("a step ended with {other:?}"),
        }
        let rip = process.rip();
        if places.iter().any(|place| place.contains(&rip)) && seen.insert(rip) {
            found.push(rip);
        }
    }
    // The single steps have reached the end of the marker's call, or gone further.
    process.in_call = false;
    found
}

/// Sends a signal at each of the host instructions that `found` returns. An address at which no
/// instruction starts is never reached.
fn every_place(
    options: &[&str],
    loops: (u32, u32),
    found: fn(&mut Traced) -> Vec<u64>,
    at_least: usize,
) {
    every_place_of(&PROGRAM, options, loops, found, at_least);
}

/// As [`every_place`], for this guest.
fn every_place_of(
    guest: &Path,
    options: &[&str],
    (rounds, calls): (u32, u32),
    found: fn(&mut Traced) -> Vec<u64>,
    at_least: usize,
) {
    let mut process = Traced::start(options, guest, rounds, calls);
    for _ in 0..WARM {
        process.next_marker();
    }
    let found = found(&mut process);
    let mut said = process.next_marker();
    let (mut tried, mut missed) = (0, 0);
    // What one stretch does not execute may come in another: a race changes sides.
    let mut places: VecDeque<(u64, u32)> = found.iter().map(|rip| (*rip, STRETCHES)).collect();
    while let Some((rip, stretches)) = places.pop_front() {
        process.set_breakpoint(Some(rip));
        match process.run(None) {
            Event::Trap => {}
            Event::Marker(now) => {
                // This stretch did not execute the instruction.
                process.set_breakpoint(None);
                said = now;
                match stretches {
                    1 => missed += 1,
                    _ => places.push_back((rip, stretches - 1)),
                }
                continue;
            }
            Event::Signal(signal) => panic!("{signal} on the way to {rip:#x}"),
        }
        process.set_breakpoint(None);
        assert_eq!(process.rip(), rip);
        kill(process.pid, Signal::SIGUSR1).expect("the signal is sent");
        assert_eq!(process.run(None), Event::Signal(Signal::SIGUSR1), "it arrives at {rip:#x}");
        assert_eq!(process.rip(), rip, "nothing has been executed meanwhile");
        let now = match process.run(Some(Signal::SIGUSR1)) {
            Event::Marker(now) => now,
            other => panic!("{other:?} at {:#x} after a signal at {rip:#x}", process.rip()),
        };
        let want = Said { handled: said.handled + 1, ..said };
        // At the marker's own call the signal comes first, and the marker is repeated with its old
        // numbers.
        let now = if now == said { process.next_marker() } else { now };
        assert_eq!(now, want, "after a signal at {rip:#x}");
        said = now;
        tried += 1;
    }
    println!("{options:?}: {tried} instructions, {missed} missed");
    assert!(tried >= at_least, "only {tried} instructions, {missed} missed");
    assert_eq!((said.late, said.wrong), (0, 0));
}

#[test]
fn a_signal_at_every_instruction_in_the_cache() {
    every_place(&["--tier", "dynamo"], (1500, 0), instructions, 100);
}

#[test]
fn a_signal_at_every_instruction_of_copies() {
    every_place(&["--tier", "copy"], (1500, 0), instructions, 100);
}

#[test]
fn a_signal_at_every_instruction_among_copies() {
    every_place(&["--tier", "full", "--threshold", "20"], (1500, 0), instructions, 100);
}

#[test]
fn a_signal_at_every_instruction_of_several_iterations() {
    let options = ["--tier", "full", "--threshold", "20", "--iterations", "8"];
    every_place(&options, (1500, 0), instructions, 100);
}

#[test]
fn a_signal_at_every_instruction_of_a_race() {
    // What is executed once in a stretch gets no trace, so the racer is in the loop. It is the trace that
    // was made last: with this threshold, one that each stretch executes.
    let options = ["--tier", "full", "--threshold", "3000", "--race", "swap"];
    every_place(&options, (400, 0), instructions_of_sides, 100);
}

#[test]
fn a_signal_at_every_instruction_of_returns_by_the_stack() {
    every_place(&["--tier", "copy", "--returns", "stack"], (1500, 0), instructions, 100);
}

#[test]
fn a_signal_at_every_instruction_of_a_call() {
    every_place(&["--tier", "interp"], (2, 0), |process| process.call().collect(), 8);
}

#[test]
fn a_signal_at_every_instruction_in_place() {
    let options = ["--tier", "direct", "--sample", "every=1", "--threshold", "3"];
    every_place(&options, (300_000, 0), instructions_in_place, 100);
}

#[test]
fn a_signal_at_every_instruction_of_a_race_in_place() {
    let options = ["--tier", "direct", "--sample", "every=7", "--threshold", "3", "--race", "swap"];
    every_place(&options, (300_000, 0), instructions_in_place, 100);
}

/// The instructions of the stubs of system calls, by what lies in their slots. (Stepping there is not
/// possible: the steps would pass the `popfq` by which guest code in place is entered, and the kernel
/// takes the trap flag for the program's from there on.)
fn instructions_of_stubs(process: &mut Traced) -> Vec<u64> {
    /// The size of a stub, and the offset of its record in it.
    const SLOT: u64 = 128;
    const RECORD: u64 = 117;
    let ranges = process.in_place();
    let stubs = stubs_of(&ranges);
    let mut found = Vec::new();
    for stub in stubs.step_by(SLOT as usize) {
        let words = (stub..stub + RECORD).step_by(8).map_while(|at| process.word(at));
        let bytes: Vec<u8> = words.flat_map(i64::to_le_bytes).collect();
        if bytes[..8] == [0; 8] {
            break;
        }
        let code = &bytes[..RECORD as usize];
        let decoder = Decoder::with_ip(64, code, stub, DecoderOptions::NONE);
        found.extend(
            decoder.into_iter().take_while(|inst| inst.code() != Code::Int3).map(|i| i.ip()),
        );
    }
    found
}

#[test]
fn a_signal_at_every_instruction_of_stubs() {
    let options = ["--tier", "direct", "--no-traces"];
    // One stub makes a call; four of its ten instructions are executed only after EFAULT. Another
    // brings a call to the runtime by six.
    every_place(&options, (1000, 10), instructions_of_stubs, 12);
}

#[test]
fn a_signal_at_every_instruction_of_calls_in_place() {
    // No samples: their timers would end stretches.
    let options = ["--tier", "direct", "--sample", "every=1000000"];
    every_place_of(&CALLING, &options, (400, 0), instructions_of_calls, 150);
}
