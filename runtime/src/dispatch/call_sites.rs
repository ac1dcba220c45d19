//! Sites of system calls in guest code that runs in place: which are hot, and which are rewritten
//! to jump to a stub (`crate::kernel::entry::call_stubs`).
//!
//! ```text
//!   trapped n times ──► patched ──► taken back: its code is about to change
//!                          └──────► all taken back, for good: calls must come to the runtime
//! ```
//!
//! Data: [`CallSites`], one for the process, behind a lock of its own (number 8 in the order of
//! `crate::sync`, beside the footprint). Invariants: a patched site is `mov eax, NR; syscall` in
//! code that only system calls can change, and NR is a call that the runtime passes on unchanged
//! ([`System::passes_on`]). It is patched with the exclusive right to change code, and taken back
//! before the code changes, so no change meets a patch (modelled in `crate::changes::model`). Only
//! the five bytes of the `mov` change, which are one instruction, so no jump leads between them.
//! Other threads may execute there meanwhile: the first byte is an `int3` while the others change,
//! and all processors are serialised before and after. A thread that comes upon the `int3` tries
//! again ([`CallSites::was_rewritten`]).
//!
//! Called by threads outside guest code.
//!
//! Example: a loop calls `getppid`. At its 16th trap from 0x401005, the `mov eax, 110` at 0x401000
//! becomes `jmp 0x2f001000`.

use crate::changes::{CodePages, host};
use crate::kernel::entry::{Call, call_stubs, raw};
use crate::kernel::process::System;
use crate::memory;
use crate::sync::lock;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Traps of a site at which it is rewritten (guess: rewriting takes about as long as this many
/// traps; too high loses time at each new site, too low rewrites sites that run a few times).
const HOT: u32 = 16;
/// The instruction `int3`.
const INT3: u8 = 0xcc;
/// The most sites that are counted (guess; each takes some 16 bytes).
const MOST_COUNTED: usize = 1 << 16;

/// See the module.
#[derive(Default)]
pub struct CallSites {
    sites: Mutex<Sites>,
    /// Are sites rewritten no more?
    closed: AtomicBool,
}

#[derive(Default)]
struct Sites {
    /// How often each site has trapped, by the address of its `syscall`.
    traps: FxHashMap<u64, u32>,
    /// The patches, by the addresses of their sites.
    patched: BTreeMap<u64, Patch>,
    /// All sites that have ever been patched.
    rewritten: FxHashSet<u64>,
    /// Stubs made so far.
    stubs: u64,
}

impl CallSites {
    /// The guest's `syscall` at `pc` has trapped, with `nr` in rax. Rewrites the site if it is hot
    /// and can be rewritten.
    pub fn trapped(&self, pc: u64, nr: u64, system: &System, pages: &CodePages) {
        if self.is_closed() || !System::passes_on(nr as i64) {
            return;
        }
        if self.is_hot(pc) && !system.watches_calls() {
            // No other thread is about to change this code.
            let _exclusive = pages.exclusive();
            let mut sites = lock(&self.sites);
            if !self.is_closed() {
                sites.patch(pc.wrapping_sub(call_stubs::MOV), nr as u32, pages);
            }
        }
    }

    /// Counts a trap at `pc`. Is the site hot since this one?
    fn is_hot(&self, pc: u64) -> bool {
        let mut sites = lock(&self.sites);
        if sites.traps.len() >= MOST_COUNTED {
            sites.traps.clear();
        }
        let traps = sites.traps.entry(pc).or_default();
        *traps = traps.saturating_add(1);
        *traps == HOT
    }

    /// Did a thread that came upon an `int3` at `site` find it because the site was just being
    /// rewritten?
    pub fn was_rewritten(&self, site: u64) -> bool {
        let mut byte = [INT3];
        let sites = lock(&self.sites);
        sites.rewritten.contains(&site)
            && memory::fetch_code(site, &mut byte) == byte.len()
            && byte[0] != INT3
    }

    /// Takes the patches in `range` back: its code is about to change.
    pub fn take_back(&self, range: &Range<u64>) {
        let mut sites = lock(&self.sites);
        // A patch has five bytes, and may begin before the range.
        let start = range.start.saturating_sub(call_stubs::MOV - 1);
        if start >= range.end {
            return;
        }
        while let Some((&site, patch)) = sites.patched.range(start..range.end).next() {
            patch.take_back(site);
            sites.patched.remove(&site);
            sites.traps.remove(&(site + call_stubs::MOV));
        }
    }

    /// Takes all patches back for good, if the calls of this thread must come to the runtime.
    pub fn close_if_watched(&self, system: &System) {
        if !self.closed.load(Ordering::Relaxed) && system.watches_calls() {
            self.close();
        }
    }

    /// Takes all patches back for good.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        call_stubs::close();
        self.take_back(&(0..u64::MAX));
    }

    /// Do all calls come to the runtime, for good?
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Calls `f` with the lock held, for a fork.
    pub fn while_locked(&self, f: impl FnOnce()) {
        let _sites = lock(&self.sites);
        f();
    }
}

impl Sites {
    fn patch(&mut self, site: u64, nr: u32, pages: &CodePages) {
        let mut bytes = [0; 7];
        if memory::fetch_code(site, &mut bytes) != bytes.len()
            || bytes[0] != 0xb8
            || bytes[1..5] != nr.to_le_bytes()
            || bytes[5..] != [0x0f, 0x05]
            || !pages.is_constant(site, site..site + bytes.len() as u64)
        {
            return;
        }
        let Ok(low) = u32::try_from(site) else { return };
        let Some(stub) = call_stubs::make(self.stubs, low, nr) else { return };
        self.stubs += 1;
        let distance = (stub as i64 - (site + call_stubs::MOV) as i64) as i32;
        let mut jump = [0xe9, 0, 0, 0, 0];
        jump[1..].copy_from_slice(&distance.to_le_bytes());
        let own = [bytes[0], bytes[1], bytes[2], bytes[3], bytes[4]];
        let patch = Patch { own, jump };
        self.rewritten.insert(site);
        if rewrite(site, jump) {
            self.patched.insert(site, patch);
        } else {
            patch.take_back(site);
        }
    }
}

/// The bytes of a site.
struct Patch {
    /// The guest's own.
    own: [u8; call_stubs::MOV as usize],
    /// Those that are there while the site is patched.
    jump: [u8; call_stubs::MOV as usize],
}

impl Patch {
    /// Gives the guest its own bytes back. What another writer (the guest, by `/proc/self/mem`) has
    /// put over the patch stays.
    fn take_back(&self, site: u64) {
        let mut bytes = [0; call_stubs::MOV as usize];
        if memory::fetch_code(site, &mut bytes) != bytes.len() {
            return;
        }
        for (n, byte) in bytes.iter_mut().enumerate() {
            if *byte == self.jump[n] || n == 0 && *byte == INT3 {
                *byte = self.own[n];
            }
        }
        rewrite(site, bytes);
    }
}

/// Replaces the instruction of five bytes at `site` by another, while other threads may execute it
/// (Intel SDM vol. 3, "Handling Self- and Cross-Modifying Code"). False if memory cannot be
/// written.
fn rewrite(site: u64, bytes: [u8; call_stubs::MOV as usize]) -> bool {
    let steps: [(u64, &[u8]); 3] = [(site, &[INT3]), (site + 1, &bytes[1..]), (site, &bytes[..1])];
    steps.into_iter().all(|(at, bytes)| {
        let written = host::write_past_protection(at, bytes);
        serialise();
        written
    })
}

/// Makes all processors that run threads of this process fetch their code anew (manual:
/// membarrier(2)).
fn serialise() {
    const SYNC_CORE: u64 = 1 << 5;
    const REGISTER_SYNC_CORE: u64 = 1 << 6;
    let command = |command: u64| {
        // SAFETY: a barrier has no other effect.
        unsafe { raw(&Call::new(libc::SYS_membarrier, &[command, 0, 0])) }
    };
    if command(SYNC_CORE) == -i64::from(libc::EPERM) {
        command(REGISTER_SYNC_CORE);
        command(SYNC_CORE);
    }
    // This processor, too.
    std::arch::x86_64::__cpuid(0);
}
