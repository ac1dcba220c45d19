//! Damaged ELF files: `check` never panics, and a file that it accepts either loads or fails with
//! an error.
//!
//! Each case takes a real program, changes a few fields of its headers or truncates it, and checks
//! it. An accepted file is loaded in a child process. The child must not crash, must leave nothing
//! mapped after a failure, and must find its own mappings unchanged. `DYNASOUR_SEED=N` replays a
//! run or makes a new one; `DYNASOUR_SOAK=1` runs ten times as many cases and loads every accepted
//! file instead of a quarter of them.

use std::fs;
use std::path::Path;

use dynasour_guest::image::{LoadOptions, Loaded, check};
use dynasour_guest::space::{MapEntry, maps};
use nix::sys::mman::ProtFlags;

use crate::support::*;

const CASES: usize = 24_000;

const HEADER: usize = 64;
const TABLE_ENTRY: usize = 56;

/// Offsets and widths of the fields of the file header and of a program header.
const HEADER_FIELDS: [(usize, usize); 13] = [
    (16, 2),
    (18, 2),
    (20, 4),
    (24, 8),
    (32, 8),
    (40, 8),
    (48, 4),
    (52, 2),
    (54, 2),
    (56, 2),
    (58, 2),
    (60, 2),
    (62, 2),
];
const TABLE_FIELDS: [(usize, usize); 8] =
    [(0, 4), (4, 4), (8, 8), (16, 8), (24, 8), (32, 8), (40, 8), (48, 8)];

/// A value near `old`, or at an edge, that is likely to break a check.
fn nasty(random: &mut Random, old: u64, file_size: u64) -> u64 {
    let base = match random.below(12) {
        0 => 0,
        1 => u64::MAX,
        2 => i64::MAX as u64,
        3 => 1 << random.below(64),
        4 => file_size,
        5 => 1 << 47,
        6 => 0x2000_0000,
        7 => random.next(),
        8 => random.next() & 0xf_ffff,
        9 => old ^ (1 << random.below(64)),
        _ => old,
    };
    match random.below(6) {
        0 => base.wrapping_add(1),
        1 => base.wrapping_sub(1),
        2 => base.wrapping_add(4096),
        3 => base.wrapping_sub(4096),
        _ => base,
    }
}

/// Damages a file; returns a description for the failure message.
fn spoil(random: &mut Random, bytes: &mut Vec<u8>) -> String {
    let mut done = String::new();
    let table_len = usize::from(u16::from_le_bytes([bytes[56], bytes[57]])) * TABLE_ENTRY;
    let file_size = bytes.len() as u64;
    for _ in 0..1 + random.below(3) {
        let (at, width) = match random.below(8) {
            0 => (random.below(HEADER), 1),
            1 => {
                let (at, width) = HEADER_FIELDS[random.below(HEADER_FIELDS.len())];
                (at, width)
            }
            2 => (HEADER + random.below(table_len), 1),
            _ => {
                let (at, width) = TABLE_FIELDS[random.below(TABLE_FIELDS.len())];
                (HEADER + random.below(table_len / TABLE_ENTRY) * TABLE_ENTRY + at, width)
            }
        };
        let mut old = [0; 8];
        old[..width].copy_from_slice(&bytes[at..at + width]);
        let new = nasty(random, u64::from_le_bytes(old), file_size);
        bytes[at..at + width].copy_from_slice(&new.to_le_bytes()[..width]);
        done += &format!("[{at}; {width}] := {new:#x}, ");
    }
    match random.below(10) {
        0 => {
            let len = if random.below(2) == 0 {
                random.below(HEADER + table_len)
            } else {
                random.below(bytes.len())
            };
            bytes.truncate(len);
            done += &format!("cut to {len}");
        }
        1 => {
            let (one, other) =
                (random.below(table_len / TABLE_ENTRY), random.below(table_len / TABLE_ENTRY));
            for i in 0..TABLE_ENTRY {
                bytes.swap(HEADER + one * TABLE_ENTRY + i, HEADER + other * TABLE_ENTRY + i);
            }
            done += &format!("swap {one} and {other}");
        }
        _ => {}
    }
    done
}

/// The mappings, with neighbouring anonymous ones merged: meanwhile malloc's heap grows, and its
/// arenas change permissions within their ranges.
fn settled_maps() -> Vec<MapEntry> {
    let mut settled: Vec<MapEntry> = Vec::new();
    for mut entry in maps().expect("maps") {
        let anonymous = entry.inode == 0 && entry.path.is_none();
        if anonymous {
            entry.prot = ProtFlags::PROT_NONE;
        }
        match settled.last_mut() {
            Some(last)
                if anonymous
                    && last.inode == 0
                    && last.path.is_none()
                    && last.range.end == entry.range.start =>
            {
                last.range.end = entry.range.end;
            }
            _ if entry.path.as_deref() == Some("[heap]".as_ref()) => {}
            _ => settled.push(entry),
        }
    }
    settled
}

/// Checks that a load has changed no mapping outside the ranges that it reports.
fn check_loaded(loaded: &Loaded, before: &[MapEntry]) {
    let mut new: Vec<_> = loaded.images.iter().map(|image| image.range.clone()).collect();
    new.push(loaded.stack.range.clone());
    for (i, range) in new.iter().enumerate() {
        assert!(range.start < range.end);
        assert!(
            new[..i].iter().all(|other| other.end <= range.start || range.end <= other.start),
            "{new:x?}"
        );
    }
    let after = settled_maps();
    for old in before {
        let same = |entry: &&MapEntry| {
            entry.range.start <= old.range.start && old.range.end <= entry.range.end
        };
        let now = after.iter().find(same).expect("still mapped");
        assert_eq!(
            (now.inode, now.prot, now.shared),
            (old.inode, old.prot, old.shared),
            "{old:x?}"
        );
    }
    assert!(loaded.images[0].range.contains(&loaded.program_entry));
    assert!(loaded.images.iter().any(|image| image.range.contains(&loaded.entry_pc)));
    assert!(
        loaded.stack.range.contains(&loaded.places.stack_pointer)
            && loaded.places.stack_pointer.is_multiple_of(16)
    );
}

/// Loads an accepted file in a child: 0 for loaded, 1 for a proper refusal.
fn load_in_child(path: &Path) -> Outcome {
    in_child(|| {
        let Ok(plan) = check(path) else { return 1 };
        let arguments = c_strings(&["fuzz", "argument"]);
        let before = settled_maps();
        match plan.load(
            &arguments,
            &arguments,
            &LoadOptions { stack_size: Some(1 << 20), ..Default::default() },
        ) {
            Ok(loaded) => {
                check_loaded(&loaded, &before);
                0
            }
            Err(error) => {
                assert!(!error.to_string().contains('\n'));
                assert_eq!(settled_maps(), before, "left behind after {error}");
                1
            }
        }
    })
}

#[test]
fn spoilt_files() {
    let _alone = alone();
    let directory = scratch();
    let path = directory.path().join("program");
    let mut originals: Vec<Vec<u8>> = vec![fs::read("/bin/true").expect("/bin/true")];
    let mut no_libc = Vec::new();
    for (kind, options) in KINDS {
        originals.push(exit_42(kind));
        let source = "void _start(void) { __builtin_trap(); } char bss[9999]; int data[3] = {1};";
        let mut options = options.to_vec();
        options.push("-nostdlib");
        no_libc.push(fs::read(compile(directory.path(), kind, source, &options)).expect("built"));
    }
    // Most cases use small files, which are written faster.
    let mut random = Random::new("spoilt_files");
    let soak = std::env::var_os("DYNASOUR_SOAK").is_some();
    let (cases, loads_every) = if soak { (10 * CASES, 1) } else { (CASES, 4) };
    let (mut accepted, mut loaded) = (0, 0);
    for case in 0..cases {
        let family = if case % 8 == 0 { &originals } else { &no_libc };
        let mut bytes = family[random.below(family.len())].clone();
        let done = spoil(&mut random, &mut bytes);
        file(&path, &bytes, 0o755);
        let answer = std::panic::catch_unwind(|| check(&path).map(drop))
            .unwrap_or_else(|_| panic!("case {case}: {done}"));
        match answer {
            Err(error) => {
                assert!(
                    error.exit_status() == 126
                        && error.to_string().starts_with(&*path.to_string_lossy())
                )
            }
            Ok(()) => {
                accepted += 1;
                if accepted % loads_every != 0 {
                    continue;
                }
                let outcome = load_in_child(&path);
                let said = String::from_utf8_lossy(&outcome.stdout);
                let status = outcome.status;
                assert!(matches!(status, Ok(0 | 1)), "case {case}: {done}: {status:?}, {said}");
                loaded += usize::from(outcome.status == Ok(0));
            }
        }
    }
    println!("{cases} cases, {accepted} accepted, {loaded} loaded");
    assert!(accepted > cases / 50 && loaded > CASES / 100, "the mix is useful");
}

/// The dynamic linker has room between the segments of this program, but is placed elsewhere.
#[test]
fn a_hole_of_the_program_stays_free() {
    let _alone = alone();
    let directory = scratch();
    let source = "int data[3] = {1}; int main(void) { return data[1]; }";
    let options = ["-no-pie", "-Wl,-Ttext-segment=0x10000", "-Wl,-Tdata=0x10000000"];
    let path = compile(directory.path(), "hole", source, &options);
    let outcome = load_in_child(&path);
    assert_eq!(outcome.status, Ok(0), "{}", String::from_utf8_lossy(&outcome.stdout));
}

/// Bytes that form no ELF file, with and without the magic number.
#[test]
fn arbitrary_bytes() {
    let _alone = alone();
    let directory = scratch();
    let path = directory.path().join("program");
    let mut random = Random::new("arbitrary_bytes");
    for case in 0..2000 {
        let mut bytes: Vec<u8> = (0..random.below(300)).map(|_| random.next() as u8).collect();
        let start: &[u8] =
            [b"".as_slice(), b"\x7fELF", b"\x7fELF\x02\x01\x01", b"#!"][random.below(4)];
        let len = start.len().min(bytes.len());
        bytes[..len].copy_from_slice(&start[..len]);
        file(&path, &bytes, 0o755);
        let answer = std::panic::catch_unwind(|| check(&path).map(drop))
            .unwrap_or_else(|_| panic!("case {case}"));
        assert!(answer.is_err(), "case {case}: {bytes:x?}");
    }
}
