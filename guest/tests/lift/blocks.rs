//! Whole blocks: their text form, where they end, and real code in bulk.
//!
//! `blocks.txt` holds guest bytes (`== hex`) and the IR they lift to; `DYNASOUR_BLESS=1` rewrites
//! it. `blocks_avx512.txt` is the same for instructions that not all processors have.

use crate::rng::Rng;
use dynasour_guest::lift::{Bytes, LiftedBlock, MAX_BLOCK, lift_block};
use dynasour_ir::{GuestTerm, Op, Operand, Term, Trap, verify};
use std::fmt::Write;
use std::path::PathBuf;
use std::time::Instant;

const PC: u64 = 0x40_1000;

fn lift_at_most(bytes: &[u8], max_insts: usize) -> LiftedBlock {
    let block = lift_block(PC, &Bytes { start: PC, bytes }, max_insts);
    verify::assert_valid(&block.version);
    block
}

fn lift(bytes: &[u8]) -> LiftedBlock {
    lift_at_most(bytes, MAX_BLOCK)
}

fn term(block: &LiftedBlock) -> &GuestTerm {
    match &block.version.blocks[0].term {
        Term::Guest(term) => term,
        other => panic!("{other:?}"),
    }
}

fn parse_hex(text: &str) -> Vec<u8> {
    text.split_whitespace()
        .map(|b| u8::from_str_radix(b, 16).unwrap_or_else(|e| panic!("{b}: {e}")))
        .collect()
}

#[test]
fn text_of_typical_blocks() {
    compare_with_file("blocks.txt");
}

/// What the processor lacks lifts to an undefined instruction.
#[test]
fn text_of_blocks_with_avx512() {
    if is_x86_feature_detected!("avx512f") {
        compare_with_file("blocks_avx512.txt");
    } else {
        eprintln!("skipped: this processor has no AVX-512");
    }
}

fn compare_with_file(name: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/lift").join(name);
    let old = std::fs::read_to_string(&path).expect("the file can be read");
    let mut new = String::new();
    for line in old.lines().filter(|l| l.starts_with("==")) {
        let bytes = parse_hex(line.trim_start_matches("==").split(';').next().unwrap_or_default());
        write!(new, "{line}\n{}\n", lift(&bytes).version.to_string().trim_end())
            .expect("a string takes it");
    }
    if std::env::var_os("DYNASOUR_BLESS").is_some() {
        std::fs::write(&path, &new).expect("the file can be written");
    } else {
        assert!(old == new, "{name} differs; it should be\n{new}");
    }
}

#[test]
fn blocks_end_where_they_should() {
    let goto = |pc: u64| GuestTerm::Goto(Operand::Const(pc));
    let trap = |pc, trap| GuestTerm::Trap { pc, trap };
    for (bytes, count, end, expected) in [
        ("90 eb 10", 2, 3, goto(PC + 0x13)),
        ("90 0f 05", 2, 3, GuestTerm::Syscall { next: PC + 3 }),
        ("cc", 1, 1, trap(PC, Trap::Breakpoint)),
        ("cd 80", 1, 2, GuestTerm::Special { pc: PC }),
        ("cd 81", 1, 2, GuestTerm::Special { pc: PC }),
        ("90 0f 0b", 2, 3, trap(PC + 1, Trap::Undefined)),
        ("06", 1, 1, trap(PC, Trap::Undefined)),
        ("f4 0f 05", 2, 3, GuestTerm::Syscall { next: PC + 3 }),
        ("90 48 8b", 2, 3, trap(PC + 1, Trap::Fetch)),
        ("", 1, 0, trap(PC, Trap::Fetch)),
        ("66 66 66 66 66 66 66 66 66 66 66 66 66 66 66 90", 1, 15, trap(PC, Trap::Protection)),
        ("f3 48 0f ae d0", 1, 5, GuestTerm::Special { pc: PC }),
        ("9d", 1, 1, GuestTerm::Special { pc: PC }),
        ("8e d8", 1, 2, GuestTerm::Special { pc: PC }),
        ("cb", 1, 1, GuestTerm::Special { pc: PC }),
    ] {
        let block = lift(&parse_hex(bytes));
        assert_eq!((block.count, block.end, term(&block)), (count, PC + end, &expected), "{bytes}");
    }
}

#[test]
fn blocks_are_bounded() {
    let nops = [0x90; 200];
    let block = lift(&nops);
    assert_eq!((block.count, block.end), (64, PC + 64));
    assert_eq!(term(&block), &GuestTerm::Goto(Operand::Const(PC + 64)));
    assert_eq!(lift_at_most(&nops, 3).count, 3);
    assert_eq!(lift_at_most(&nops, 0).count, 1, "a block makes progress");
}

#[test]
fn code_at_the_end_of_the_address_space() {
    let start = u64::MAX - 1;
    let block = lift_block(start, &Bytes { start, bytes: &[0x90, 0x90] }, MAX_BLOCK);
    assert_eq!(block.version.region, start);
    assert!(matches!(term(&block), GuestTerm::Trap { trap: Trap::Fetch, .. }));
}

#[test]
fn anything_lifts_and_verifies() {
    // Machine code, data and text alike, entered at any offset.
    let exe = std::fs::read(std::env::current_exe().expect("the test's own file"))
        .expect("it can be read");
    let code = Bytes { start: 0, bytes: &exe };
    let mut rng = Rng::new(7);
    let (mut insts, mut nanoseconds) = (0u64, 0u128);
    for i in 0..40_000 {
        let pc = rng.below(exe.len() as u64);
        let start = Instant::now();
        let block = lift_block(pc, &code, MAX_BLOCK);
        nanoseconds += start.elapsed().as_nanos();
        insts += u64::from(block.count);
        let ats = block.version.blocks[0].insts.iter().filter(|i| i.op == Op::At).count();
        assert_eq!(ats, block.count as usize);
        assert!(
            block.count as usize <= MAX_BLOCK
                && block.end.wrapping_sub(pc) <= 15 * MAX_BLOCK as u64
        );
        if i % 8 == 0 {
            verify::assert_valid(&block.version);
        }
    }
    println!("{insts} instructions lifted, {} ns each", nanoseconds / u128::from(insts));
}
