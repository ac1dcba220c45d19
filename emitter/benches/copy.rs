//! What copying a block costs: decoding, translation, linking, nothing executed.
//!
//! `cargo bench -p dynasour-emitter` copies this program's own code, from a function of its along all direct exits, and prints the
//! fastest of several runs. The budget is 0.6 µs a block, of which entering and leaving take about 0.1.

use dynasour_emitter::copy::LinkId;
use dynasour_emitter::{Config, Emitter};
use dynasour_guest::lift::Fetch;
use std::ops::Range;
use std::time::{Duration, Instant};

const RUNS: usize = 20;
const BLOCKS: u64 = 40_000;

/// This program's code.
struct Own(Range<u64>);

impl Fetch for Own {
    fn fetch(&self, address: u64, buffer: &mut [u8]) -> usize {
        if !self.0.contains(&address) {
            return 0;
        }
        let len = buffer.len().min((self.0.end - address) as usize);
        // SAFETY: the range is mapped readable for as long as the program runs.
        buffer[..len].copy_from_slice(unsafe { std::slice::from_raw_parts(address as *const u8, len) });
        len
    }
}

fn own_code() -> Own {
    let here = main as *const () as u64;
    let maps = std::fs::read_to_string("/proc/self/maps").expect("the kernel's list of mappings");
    let ranges = maps.lines().filter_map(|line| {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        Some(u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
    });
    Own(ranges.into_iter().find(|range| range.contains(&here)).expect("this function is mapped"))
}

fn run(emitter: &mut Emitter, code: &Own, first: u64) -> (Duration, u64, u64) {
    emitter.flush_all();
    let before = emitter.copy_figures();
    let start = Instant::now();
    let mut pc = first;
    let mut link = 0;
    loop {
        emitter.copy(pc, code).expect("room in the cache");
        let done = emitter.copy_figures().blocks - before.blocks;
        let Some(next) = emitter.copy_exit(LinkId(link)).filter(|_| done < BLOCKS) else { break };
        pc = next;
        link += 1;
    }
    let time = start.elapsed();
    let after = emitter.copy_figures();
    (time, after.blocks - before.blocks, after.instructions - before.instructions)
}

fn main() {
    let code = own_code();
    // `main` itself has hardly a direct exit.
    let first = run as *const () as u64;
    let mut emitter = Emitter::new(Config { cache_size: 32 << 20, ..Config::default() }).expect("a code cache");
    let runs = (0..RUNS).map(|_| run(&mut emitter, &code, first));
    let (time, blocks, instructions) = runs.min().expect("there are runs");
    let per_block = time.as_nanos() as f64 / blocks as f64;
    println!("{blocks} blocks of {:.1} instructions: {per_block:.0} ns a block", instructions as f64 / blocks as f64);
}
