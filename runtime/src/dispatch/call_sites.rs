//! Sites of system calls in guest code that runs in place: which are hot, and which are rewritten
//! to jump to a stub (`crate::kernel::entry::call_stubs`).
//!
//! ```text
//!   trapped n times ──► patched ──► taken back: its code is about to change
//!                          └──────► all taken back, for good: calls must come to the runtime
//! ```
//!
//! Data: [`CallSites`], one for the process, behind a lock of its own (number 8 in the order of
//! `crate::sync`, before the patches). Invariants: a patched site is `mov eax, NR; syscall`, and its stub
//! makes the call only if the runtime passes it on unchanged ([`System::passes_on`]); else the stub
//! brings it to the runtime, without the signal. The rest is said in [`crate::changes::patches`]. Only the five bytes of the `mov` change, which are one instruction,
//! so no jump leads between them.
//!
//! Called by threads outside guest code.
//!
//! Example: a loop calls `getppid`. At its 16th trap from 0x401005, the `mov eax, 110` at 0x401000
//! becomes `jmp 0x2f001000`.

use crate::changes::CodePages;
use crate::changes::patches::{self, Purpose};
use crate::kernel::entry::call_stubs::{self, Kind};
use crate::kernel::process::System;
use crate::memory;
use crate::sync::lock;
use rustc_hash::FxHashMap;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Traps of a site at which it is rewritten (guess: rewriting takes about as long as this many
/// traps; too high loses time at each new site, too low rewrites sites that run a few times).
const HOT: u32 = 16;
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
    /// Stubs made so far.
    stubs: u64,
}

impl CallSites {
    /// The guest's `syscall` at `pc` has trapped, with `nr` in rax. Rewrites the site if it is hot
    /// and can be rewritten.
    pub fn trapped(&self, pc: u64, nr: u64, system: &System, pages: &CodePages) {
        if self.is_closed() {
            return;
        }
        if self.is_hot(pc) && !system.watches_calls() {
            // No other thread is about to change this code.
            let _exclusive = pages.exclusive();
            let mut sites = lock(&self.sites);
            if !self.is_closed() {
                let kind = if System::passes_on(nr as i64) { Kind::Makes } else { Kind::Brings };
                sites.patch(pc.wrapping_sub(call_stubs::MOV), nr as u32, kind, pages);
            }
        }
    }

    /// Counts a trap at `pc`. Is the site to be rewritten now?
    fn is_hot(&self, pc: u64) -> bool {
        let mut sites = lock(&self.sites);
        if sites.traps.len() >= MOST_COUNTED {
            sites.traps.clear();
        }
        let traps = sites.traps.entry(pc).or_default();
        *traps = traps.saturating_add(1);
        // Later again: its patch may have been taken back because its page was read.
        *traps >= HOT && traps.is_power_of_two()
    }

    /// Takes the patches in `range` back: its code is about to change. Those of calls may be made
    /// again.
    pub fn take_back(&self, range: &Range<u64>) {
        let sites = patches::take_back(range);
        if !sites.is_empty() {
            let traps = &mut lock(&self.sites).traps;
            for site in sites {
                traps.remove(&(site + call_stubs::MOV));
            }
        }
    }

    /// Takes all patches of calls back for good, if the calls of this thread must come to the
    /// runtime.
    pub fn close_if_watched(&self, system: &System) {
        if !self.closed.load(Ordering::Relaxed) && system.watches_calls() {
            self.close();
        }
    }

    /// Takes all patches of calls back for good.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        call_stubs::close();
        // A site that is being patched is patched before this.
        let _sites = lock(&self.sites);
        patches::take_back_all(Purpose::Call);
    }

    /// Do all calls come to the runtime, for good?
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Calls `f` with the lock held, for a fork.
    pub fn while_locked(&self, f: impl FnOnce()) {
        let _sites = lock(&self.sites);
        patches::while_locked(f);
    }
}

impl Sites {
    fn patch(&mut self, site: u64, nr: u32, kind: Kind, pages: &CodePages) {
        let mut bytes = [0; 7];
        if memory::fetch_code(site, &mut bytes) != bytes.len()
            || bytes[0] != 0xb8
            || bytes[1..5] != nr.to_le_bytes()
            || bytes[5..] != [0x0f, 0x05]
            || !patches::may_stand(pages, &(site..site + bytes.len() as u64))
        {
            return;
        }
        let Ok(low) = u32::try_from(site) else { return };
        let Some(stub) = call_stubs::make(self.stubs, low, nr, kind) else { return };
        self.stubs += 1;
        let own = [bytes[0], bytes[1], bytes[2], bytes[3], bytes[4]];
        patches::write(site, own, 0, stub, Purpose::Call);
    }
}
