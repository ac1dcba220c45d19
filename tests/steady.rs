//! A guest that stays in a hot loop must stay in native code: the number of entries into native
//! code must not grow with the number of iterations, whatever the shape of the loop.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The most additional entries that a run with more iterations may have (guess; late side traces,
/// and addresses that differ between runs). Too low makes the test fail at random, too high hides a
/// loop that leaves its fragment.
const SLACK: u64 = 200;

const PRELUDE: &str = "
#include <stdio.h>
#include <stdlib.h>
#include <stdint.h>
#define NOINLINE __attribute__((noinline))
static uint64_t run(uint64_t n);
int main(int argc, char **argv) { printf(\"%lu\\n\", run(strtoull(argv[1], 0, 10))); return argc \
- 2; }
";

fn build(name: &str, body: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("steady");
    std::fs::create_dir_all(&directory).expect("the target directory is writable");
    let (source, program) = (directory.join(format!("{name}.c")), directory.join(name));
    std::fs::write(&source, format!("{PRELUDE}{body}")).expect("the target directory is writable");
    let built = Command::new("cc")
        .arg("-O1")
        .arg("-o")
        .arg(&program)
        .arg(&source)
        .status()
        .expect("cc runs");
    assert!(built.success(), "{name} does not build");
    program
}

/// The most entries where samples and races bring the thread out (guess: to copy what is executed takes
/// some 2,500, a second of samples or races some hundred, a counter of an exit some thousand).
const MOST: u64 = 10_000;

/// The output of the program, and the statistics of its run.
fn measured(program: &Path, options: &[&str], arguments: &[&str]) -> (Vec<u8>, serde_json::Value) {
    let json = program.with_extension("json");
    let out = Command::new(env!("CARGO_BIN_EXE_dynasour"))
        .arg("run")
        .args(options)
        .arg("--stats-json")
        .arg(&json)
        .arg("--")
        .arg(program)
        .args(arguments)
        .output()
        .expect("dynasour runs");
    assert!(out.status.success(), "{out:?}");
    let stats = std::fs::read_to_string(&json).expect("statistics were written");
    (out.stdout, serde_json::from_str(&stats).expect("statistics are JSON"))
}

/// The output of the program, and the number of its entries into native code.
fn traced(program: &Path, options: &[&str], arguments: &[&str]) -> (Vec<u8>, u64) {
    let (output, stats) = measured(program, options, arguments);
    (output, stats["native_entries"].as_u64().expect("a counter"))
}

fn check(name: &str, [few, many]: [u64; 2], body: &str) {
    let program = build(name, body);
    let native =
        Command::new(&program).arg(many.to_string()).output().expect("the guest runs natively");
    let [few_text, many_text] = [few, many].map(|n| n.to_string());
    // Traces beside the interpreter, and traces among copied blocks.
    for options in [&["--tier", "dynamo", "--threshold", "1000"][..], &["--tier", "dynamo"]] {
        let (_, before) = traced(&program, options, &[&few_text]);
        let (output, entries) = traced(&program, options, &[&many_text]);
        assert_eq!(output, native.stdout, "{name} {options:?}");
        println!("{name} {options:?}: {before} entries for {few} iterations, {entries} for {many}");
        assert!(
            entries < before + SLACK,
            "{name} {options:?}: {before} entries for {few}, {entries} for {many}"
        );
    }
    check_entries(&program, &[&many_text], &native.stdout);
}

/// Where traces race, the thread comes out for samples and at the ends of windows only.
fn check_entries(program: &Path, arguments: &[&str], expected: &[u8]) {
    for tier in ["full", "direct"] {
        let (output, entries) = traced(program, &["--tier", tier], arguments);
        assert_eq!(output, expected, "{program:?} {arguments:?} {tier}");
        assert!(entries < MOST, "{program:?} {arguments:?} {tier}: {entries} entries");
    }
}

/// Programs of `benches/suites/interpreters/machine.h`, and rounds of some tenths of a second.
const PROGRAMS: [(&str, &str); 4] =
    [("nested", "20000"), ("sieve", "900"), ("collatz", "180000"), ("fib", "2000")];

/// Interpreters have many traces that lead to each other, and their dispatch to all of them.
#[test]
fn interpreters() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/suites/interpreters");
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("steady");
    std::fs::create_dir_all(&directory).expect("the target directory is writable");
    for name in ["switch", "goto", "threaded"] {
        let (source, program) = (root.join(format!("{name}.c")), directory.join(name));
        let built = Command::new("cc").arg("-O2").arg("-o").arg(&program).arg(&source).status();
        assert!(built.expect("cc runs").success(), "{name} does not build");
        for (what, rounds) in PROGRAMS {
            let native = Command::new(&program).args([what, rounds]).output().expect("it runs");
            check_entries(&program, &[what, rounds], &native.stdout);
        }
    }
}

#[test]
fn one_loop() {
    let body = "uint64_t run(uint64_t n) { uint64_t s = 0; for (uint64_t i = 0; i < n; i++) s += \
        i ^ (s >> 3); return s; }";
    check("one_loop", [10_000_000, 100_000_000], body);
}

#[test]
fn nested_loops() {
    let body = "uint64_t run(uint64_t n) { uint64_t s = 0; for (uint64_t i = 0; i < n / 10; i++) {
        for (int j = 0; j < 10; j++) s = s * 31 + (i ^ j); s ^= s >> 7; } return s; }";
    check("nested_loops", [10_000_000, 100_000_000], body);
}

#[test]
fn calls() {
    let body = "NOINLINE uint64_t g(uint64_t a, uint64_t b) { return a * 3 + b; }
        NOINLINE uint64_t h(uint64_t a, uint64_t b) { return g(a, b) ^ b; }
        uint64_t run(uint64_t n) { uint64_t s = 0; for (uint64_t i = 0; i < n; i++) s = h(s, i) + \
        g(s, 1); return s; }";
    check("calls", [2_000_000, 20_000_000], body);
}

#[test]
fn two_paths() {
    let body = "uint64_t run(uint64_t n) { uint64_t s = 1; for (uint64_t i = 0; i < n; i++) {
        if (s & 4) { s = s * 5 + i; asm volatile(\"\"); } else { s += i * 3 + 1; asm \
        volatile(\"\"); } } return s; }";
    check("two_paths", [2_000_000, 20_000_000], body);
}

#[test]
fn recursion() {
    let body = "NOINLINE uint64_t fib(uint64_t n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
        uint64_t run(uint64_t n) { return fib(n); }";
    check("recursion", [28, 34], body);
}

#[test]
fn a_table_of_functions() {
    let body = "typedef uint64_t (*F)(uint64_t);
        NOINLINE uint64_t f0(uint64_t a) { return a + 1; } NOINLINE uint64_t f1(uint64_t a) { \
        return a * 3; }
        NOINLINE uint64_t f2(uint64_t a) { return a ^ 0x55; } NOINLINE uint64_t f3(uint64_t a) { \
        return a - 7; }
        static F table[4] = {f0, f1, f2, f3};
        uint64_t run(uint64_t n) { uint64_t s = 1; uint32_t x = 1; for (uint64_t i = 0; i < n; \
        i++) {
            x = x * 1664525u + 1013904223u; s = table[x >> 30](s); } return s; }";
    check("a_table_of_functions", [1_000_000, 10_000_000], body);
}

#[test]
fn pointers_that_alias() {
    let body = "NOINLINE uint64_t add(uint32_t *a, uint32_t *b, uint32_t *n) {
            uint64_t s = 0; for (uint32_t i = 0; i < *n; i++) { a[i & 15] += b[i & 7] + 1; s += \
            *b; } return s; }
        uint64_t run(uint64_t n) { static uint32_t v[64]; static uint32_t count = 100; uint64_t s \
        = 0;
            for (uint64_t i = 0; i < n / 100; i++) s += add(v, v + (i & 3), &count); return s; }";
    check("pointers_that_alias", [1_000_000, 10_000_000], body);
}

#[test]
fn only_what_is_warm_is_copied() {
    let body = "uint64_t run(uint64_t n) { uint64_t s = 1; for (uint64_t i = 0; i < n; i++) s = s \
        * 31 + i; return s; }";
    let program = build("warm", body);
    let figures = |options: &[&str]| {
        let (_, stats) = measured(&program, options, &["1000000"]);
        ["copied_blocks", "fragments"].map(|figure| stats[figure].as_u64().expect("a counter"))
    };
    let [all, _] = figures(&["--tier", "copy"]);
    let [warm, _] = figures(&["--tier", "dynamo"]);
    assert!(warm > 0 && warm < all / 2, "{warm} of {all} blocks were copied");
    let [none, traces] = figures(&["--tier", "dynamo", "--threshold", "100"]);
    assert!(none == 0 && traces > 0, "traces only: {none} blocks, {traces} traces");
}

/// A just-in-time compiler's code is in memory that can be written, so its pages are guarded from its first sample on.
#[test]
fn calls_do_not_come_to_the_runtime_because_pages_are_guarded() {
    let body = "
        #include <string.h>
        #include <sys/mman.h>
        #include <unistd.h>
        uint64_t run(uint64_t n) {
            /* again: add rax, rdi; dec rdi; jnz again; ret */
            const unsigned char code[] = {0x48, 0x31, 0xc0, 0x48, 0x01, 0xf8, 0x48, 0xff, 0xcf, 0x75, 0xf8, 0xc3};
            unsigned char *at = mmap(0, 4096, 7, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            memcpy(at, code, sizeof code);
            uint64_t s = 0;
            for (int i = 0; i < 1000; i++) s += ((uint64_t (*)(uint64_t))at)(1000000);
            for (uint64_t i = 0; i < n; i++) s += getppid() > 0;
            return s;
        }";
    let program = build("guarded_pages", body);
    let (output, stats) = measured(&program, &["--tier", "direct"], &["300000"]);
    assert_eq!(output, b"500000500300000\n");
    let calls = stats["syscalls"].as_u64().expect("a counter");
    assert!(calls < 30_000, "{calls} calls");
}
