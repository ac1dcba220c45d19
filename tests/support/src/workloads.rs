//! Programs of a Debian system, with what they do for a second or two: the workloads of the tests that compare
//! or prove every trace.
//!
//! No data but constants; no lock. Example: `gzip -c lines`, in a directory whose file `lines` has [`lines`].

use std::fmt::Write as _;
use std::path::PathBuf;

/// Text of some 60,000 lines, which depends on nothing.
pub fn lines() -> String {
    let mut state = 1u64;
    let mut out = String::new();
    for _ in 0..60_000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let _ = writeln!(out, "{:x} {} of {}", state >> 20, state >> 50, state >> 57);
    }
    out
}

/// Programs that CI installs, with what they do for a second or two.
pub const PROGRAMS: [&[&str]; 15] = [
    &["python3", "-c", "print(sum(i * i % 7 for i in range(200000)), sorted('a b c'.split()))"],
    &["perl", "-e", "my %h; $h{$_ % 997} .= 'x' for 0 .. 200000; print length(join '', values %h)"],
    &[
        "lua5.4",
        "-e",
        "local t = {} for i = 1, 300000 do t[i % 99] = (t[i % 99] or 0) + i end print(t[5])",
    ],
    &["gawk", "BEGIN { for (i = 0; i < 200000; i++) { s += i % 7; t[i % 50] = s } print s }"],
    &["mawk", "BEGIN { for (i = 0; i < 300000; i++) { s += i % 7; t[i % 50] = s } print s }"],
    &[
        "sqlite3",
        ":memory:",
        "with recursive c(x) as (select 1 union all select x + 1 from c where x < 30000) \
         select count(*), sum(x * 7 % 1000) from c where x % 3 > 0;",
    ],
    &["jq", "-n", "[range(30000)] | map(. * 3) | add"],
    &["bash", "-c", "for i in {1..3000}; do x=$((x + i)); y=$y.; done; echo $x ${#y}"],
    &["gzip", "-c", "lines"],
    &["bzip2", "-c", "lines"],
    &["xz", "-1", "-c", "lines"],
    &["sha256sum", "lines"],
    &["sort", "lines"],
    &["grep", "-c", "a[b-e]*f", "lines"],
    &["sed", "-e", "s/[aeiou]/X/g", "lines"],
];

/// Where a program is, if it is installed: in a directory of `PATH`.
pub fn installed(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|p| p.join(program)).find(|file| file.is_file())
}
