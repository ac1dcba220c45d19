//! What copying a block costs: decoding, translation, linking, nothing executed.
//!
//! `cargo bench -p dynasour-emitter` copies this program's own code, from where its calls return to
//! and along all direct exits, and prints the fastest of several runs, in the thread's processor
//! time: others on the machine only cost it its caches. A block that is copied goes on behind
//! conditional branches and forward jumps; the budget, 0.6 µs, counts the guest's basic blocks, as
//! a translator without that would copy them one by one.

use dynasour_emitter::blocks::{CopyFigures, LinkId};
use dynasour_emitter::{Config, Emitter, Returns};
use dynasour_guest::lift::Fetch;
use iced_x86::{Decoder, DecoderOptions, FlowControl};
use std::ops::Range;
use std::time::Duration;

const RUNS: usize = 20;
const BLOCKS: u64 = 40_000;
const STARTS: usize = 20_000;
/// After so many exits in a row that are indirect or do not exist there are no more.
const MOST_IDLE: u32 = 1000;

/// This program's code.
struct Own(Range<u64>);

impl Fetch for Own {
    fn fetch(&self, address: u64, buffer: &mut [u8]) -> usize {
        if !self.0.contains(&address) {
            return 0;
        }
        let len = buffer.len().min((self.0.end - address) as usize);
        // SAFETY: the range is mapped readable for as long as the program runs.
        buffer[..len]
            .copy_from_slice(unsafe { std::slice::from_raw_parts(address as *const u8, len) });
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

/// Where calls return to, in the functions that stand behind `first`: calls are followed no further
/// than themselves.
fn returns(code: &Own, first: u64) -> Vec<u64> {
    let mut bytes = vec![0; (code.0.end - first) as usize];
    code.fetch(first, &mut bytes);
    let decoder = Decoder::with_ip(64, &bytes, first, DecoderOptions::NONE);
    let calls = decoder
        .into_iter()
        .filter(|i| matches!(i.flow_control(), FlowControl::Call | FlowControl::IndirectCall));
    calls.map(|call| call.next_ip()).take(STARTS).collect()
}

/// The processor time of this thread.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it only writes to `time`.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(failed, 0, "every Linux has this clock");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Time and figures of a run with an emitter of its own: blocks end earlier where much is flushed.
fn run(code: &Own, starts: &[u64]) -> (Duration, CopyFigures) {
    let mut emitter =
        Emitter::new(Config { cache_size: 32 << 20, returns: Returns::Table, ..Config::default() })
            .expect("a code cache");
    let start = processor_time();
    for start in starts {
        emitter.copy(*start, code).expect("room in the cache");
    }
    let (mut link, mut idle) = (0, 0);
    while idle < MOST_IDLE && emitter.copy_figures().blocks < BLOCKS {
        match emitter.copy_exit(LinkId(link)) {
            Some((pc, _)) => {
                emitter.copy(pc, code).expect("room in the cache");
                idle = 0;
            }
            None => idle += 1,
        }
        link += 1;
    }
    let time = processor_time() - start;
    (time, emitter.copy_figures())
}

fn main() {
    let code = own_code();
    let starts = returns(&code, run as *const () as u64);
    let runs = (0..RUNS).map(|_| run(&code, &starts));
    let (time, figures) = runs.min_by_key(|(time, _)| *time).expect("there are runs");
    let CopyFigures { blocks, basic_blocks, instructions, .. } = figures;
    let per = |n: u64| time.as_nanos() as f64 / n as f64;
    println!(
        "{blocks} blocks of {:.1} instructions: {:.0} ns a block",
        instructions as f64 / blocks as f64,
        per(blocks)
    );
    println!("{basic_blocks} basic blocks of the guest's: {:.0} ns each", per(basic_blocks));
}
