//! Jumps that are written into guest code where it stands, for code that runs in place.
//!
//! ```text
//!   guest's bytes ──write──► patched ──take_back──► guest's bytes
//!                               ▲
//!                  a jump to an instruction inside traps
//! ```
//!
//! A *patch* replaces [`LEN`] bytes at its *site* by a jump. These bytes may belong to several
//! guest instructions. The *inner boundaries* are the offsets at which all but the first of them
//! begin; the byte of the jump at each of them is an instruction that traps (`int3`, or an opcode
//! that is undefined in 64-bit mode), so a guest that jumps there is noticed, whatever its control
//! flow is. The thread then executes the guest's own instructions elsewhere.
//!
//! Other threads may execute the code while it is written: the first byte is an `int3` until the
//! rest is complete, and all processors are serialised between the steps (Intel SDM vol. 3,
//! "Handling Self- and Cross-Modifying Code"; manual: membarrier(2)). A thread that comes upon such
//! an `int3` tries again ([`Trapped::Passing`]). As long as there is one thread, it writes the jump
//! at once: the steps take 100 µs, as long as some 40 trapped calls.
//!
//! Where a loop's *back edge* is a jump with a 32-bit displacement, the patch may be there: the jump
//! stays, and leads elsewhere. Only its first byte and its displacement are ever written.
//!
//! The *displaced* bytes of a patch are those that its target stands for: all bytes of the
//! instructions of which the jump overwrites some. If any of them is about to change, the patch is
//! taken back.
//!
//! The host reads the guest's own bytes, not the patches ([`memory::fetch_code`]).
//!
//! A patch in a page of a file gives this process a copy of the page, and the kernel would not show
//! it later changes of the file. So when the last patch of a page is taken back for good that was the
//! file's own before, the copy is given up.
//!
//! Where the processor has protection keys, the guest does not see patches either
//! ([`super::hiding`]).
//!
//! Data: [`PATCHES`], one for the process, behind its own lock (number 8 in the order of
//! `crate::sync`, beside the footprint). Invariant: patches stand only in code that system calls
//! alone can change. They are written with the exclusive right to change code and taken back before
//! the code changes (modelled in `super::model`).
//!
//! Example: `mov eax, 110; syscall` at 0x401000 becomes `jmp 0x2f001000; syscall`.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use dynasour_guest::space::{PAGE, page_down};
use rustc_hash::{FxHashMap, FxHashSet};

use super::hiding::{self, Hiding};
use super::host::CodeWriter;
use super::{CodePages, host};
use crate::host_call::{Call, raw};
use crate::memory;
use crate::protection_keys::with_all_rights;
use crate::sync::lock;

/// Bytes of a patch: `jmp rel32`.
pub const LEN: usize = 5;
/// The most displaced bytes of a patch (guess, checked: three of the longest instructions).
const MOST_DISPLACED: u64 = 45;
/// The opcode of `jmp rel32`.
const JMP: u8 = 0xe9;
/// The first byte of the opcode of `jcc rel32`.
const JCC: u8 = 0x0f;
/// The instruction `int3`.
const INT3: u8 = 0xcc;
/// Opcodes of one byte that are undefined in 64-bit mode.
const UNDEFINED: [u8; 11] = [0x06, 0x07, 0x0e, 0x16, 0x17, 0x1e, 0x1f, 0x27, 0x2f, 0x37, 0x3f];

/// What a patch is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// A system call goes to its stub.
    Call,
    /// The guest enters a trace.
    Trace,
    /// The guest's own jump to this head leads to the trace there.
    BackEdge(u64),
}

/// One patch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patch {
    purpose: Purpose,
    /// The guest's own bytes: those that the jump replaces.
    own: [u8; LEN],
    jump: [u8; LEN],
    /// Bytes between the first one and the displacement, which stay: the second one of a conditional
    /// jump.
    gap: u64,
    /// Bit n: a guest instruction begins at offset n. Bit 0 is clear.
    inner: u8,
    /// The displaced bytes: how many from the site on; at least [`LEN`].
    displaced: u64,
}

/// A patch that is to be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NewPatch {
    /// What it is for.
    pub purpose: Purpose,
    /// The end of the displaced bytes.
    pub end: u64,
    /// The guest's own bytes that the jump replaces; of a back edge its first byte and its
    /// displacement.
    pub own: [u8; LEN],
    /// Bit n: a guest instruction begins at offset n. Bit 0 is clear.
    pub inner: u8,
    /// Where the jump leads.
    pub to: u64,
}

impl NewPatch {
    /// A patch of the back edge at `site` with this code, which still leads to `head`; none if it is not
    /// a jump there with a displacement of 32 bits.
    pub fn of_back_edge(site: u64, code: &[u8], head: u64) -> Option<NewPatch> {
        let (first, displacement) = match *code {
            [JMP, a, b, c, d] => (JMP, [a, b, c, d]),
            [JCC, 0x80..=0x8f, a, b, c, d] => (JCC, [a, b, c, d]),
            _ => return None,
        };
        let end = site.wrapping_add(code.len() as u64);
        let [a, b, c, d] = displacement;
        let leads_to = end.wrapping_add_signed(i64::from(i32::from_le_bytes(displacement)));
        let own = [first, a, b, c, d];
        (leads_to == head).then_some(NewPatch {
            purpose: Purpose::BackEdge(head),
            end,
            own,
            inner: 0,
            to: head,
        })
    }
}

/// All patches.
#[derive(Debug)]
pub(super) struct Patches {
    /// By their sites.
    all: BTreeMap<u64, Patch>,
    /// The sites of patched back edges, by the heads to which they lead.
    back_edges: FxHashMap<u64, u64>,
    /// The pages with patches, by their addresses.
    pages: FxHashMap<u64, PatchedPage>,
    /// The addresses where a trapping byte has ever been written.
    trapping: FxHashSet<u64>,
    /// Which of the pages the guest cannot read.
    pub(super) hiding: Hiding,
}

/// A page with patches, or one whose patches are out for a while.
#[derive(Debug)]
struct PatchedPage {
    patches: u32,
    /// Its bytes before the first patch, if they were a file's, and not in a copy.
    of_file: Option<Box<[u8]>>,
}

pub(super) static PATCHES: Mutex<Patches> = Mutex::new(Patches {
    all: BTreeMap::new(),
    back_edges: FxHashMap::with_hasher(rustc_hash::FxBuildHasher),
    pages: FxHashMap::with_hasher(rustc_hash::FxBuildHasher),
    trapping: FxHashSet::with_hasher(rustc_hash::FxBuildHasher),
    hiding: Hiding::new(),
});
/// Do several threads or processes execute this memory, or have they?
static SHARED: AtomicBool = AtomicBool::new(false);
/// Is there a patch, or has there been one?
static ANY: AtomicBool = AtomicBool::new(false);

/// What a trap at an address of guest code in place means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trapped {
    /// It is the guest's own.
    Guest,
    /// A patch was just being written or taken back there: the thread tries again.
    Passing,
    /// It is an inner boundary of a patch.
    Inside {
        /// Where the patch stands.
        start: u64,
    },
}

impl Patch {
    /// The displaced bytes, if the patch stands at `site`.
    fn range(&self, site: u64) -> Range<u64> {
        site..site + self.displaced
    }

    /// Where byte `n` of the jump stands, from the site on.
    fn offset(&self, n: usize) -> u64 {
        if n == 0 { 0 } else { n as u64 + self.gap }
    }

    /// Bytes of the jump.
    fn len(&self) -> u64 {
        LEN as u64 + self.gap
    }

    /// The pages of the patch, if it stands at `site`.
    fn pages(&self, site: u64) -> impl Iterator<Item = u64> + use<> {
        (page_down(site)..site + self.len()).step_by(PAGE as usize)
    }

    /// Where the jump leads, if the patch stands at `site`.
    fn leads_to(&self, site: u64) -> u64 {
        let [_, a, b, c, d] = self.jump;
        let distance = i64::from(i32::from_le_bytes([a, b, c, d]));
        site.wrapping_add(self.len()).wrapping_add_signed(distance)
    }

    fn inner(&self) -> impl Iterator<Item = usize> + use<> {
        let inner = self.inner;
        (1..LEN).filter(move |n| inner >> n & 1 != 0)
    }

    fn outer(&self) -> impl Iterator<Item = usize> + use<> {
        let inner = self.inner;
        (1..LEN).filter(move |n| inner >> n & 1 == 0)
    }

    /// Writes the jump. False if memory cannot be written.
    fn write(&self, site: u64) -> bool {
        let code = CodeWriter::open();
        if !is_shared() {
            return self.write_alone(&code, site, self.jump);
        }
        let byte = |n: usize, byte: u8| code.write(site + self.offset(n), &[byte]);
        let mut written = byte(0, INT3) && self.inner().all(|n| byte(n, self.jump[n]));
        serialise();
        // No thread is inside now: whoever comes there traps.
        written &= self.outer().all(|n| byte(n, self.jump[n]));
        serialise();
        written &= byte(0, self.jump[0]);
        serialise();
        written
    }

    /// The only thread writes these bytes where the jump's stand. The first byte of a conditional jump
    /// stays the same.
    fn write_alone(&self, code: &CodeWriter, site: u64, bytes: [u8; LEN]) -> bool {
        let first = usize::from(self.gap > 0);
        let written = code.write(site + self.offset(first), &bytes[first..]);
        serialise_this();
        written
    }

    /// Gives the guest its own bytes back. What another writer (the guest, by `/proc/self/mem`) has
    /// put over the patch stays.
    fn take_back(&self, site: u64) {
        let mut there = [0; LEN + 1];
        let there = &mut there[..self.len() as usize];
        if memory::copy_code(site, there) != there.len() {
            return;
        }
        let code = CodeWriter::open();
        let is_ours = |n: usize| {
            let there = there[self.offset(n) as usize];
            there == self.jump[n] || n == 0 && there == INT3
        };
        if !is_shared() {
            let bytes = std::array::from_fn(|n| match is_ours(n) {
                true => self.own[n],
                false => there[self.offset(n) as usize],
            });
            self.write_alone(&code, site, bytes);
            return;
        }
        let give_back = |n: usize| {
            if is_ours(n) {
                code.write(site + self.offset(n), &[self.own[n]]);
            }
        };
        if is_ours(0) {
            code.write(site, &[INT3]);
        }
        serialise();
        self.outer().for_each(give_back);
        serialise();
        self.inner().for_each(give_back);
        serialise();
        give_back(0);
        serialise();
    }
}

/// Where a jump at `site` may lead, if instructions begin at the offsets of `inner` (bit n: offset
/// n): each inner boundary fixes one byte of the displacement. Calls `f` with the fixed bits and
/// their values, as masks of the 32-bit displacement, for each choice of the trapping bytes, until
/// it returns something.
pub fn displacements<R>(inner: u8, mut f: impl FnMut(u32, u32) -> Option<R>) -> Option<R> {
    let (mut mask, mut value) = (0, 0);
    for offset in (1..4).filter(|n| inner >> n & 1 != 0) {
        mask |= 0xff << (8 * (offset - 1));
        value |= u32::from(INT3) << (8 * (offset - 1));
    }
    if inner >> 4 & 1 == 0 {
        return f(mask, value);
    }
    // `int3` as the top byte would lead too far back.
    UNDEFINED.iter().find_map(|byte| f(mask | 0xff << 24, value | u32::from(*byte) << 24))
}

/// Writes a patch at `site`. The caller has the exclusive right to change code and has found the
/// displaced bytes to be constant. False if another patch displaces some of them, if a jump cannot
/// lead there, or if memory cannot be written.
pub fn write(site: u64, new: NewPatch) -> bool {
    let NewPatch { purpose, end, own, inner, to } = new;
    let displaced = end.wrapping_sub(site);
    if !(LEN as u64..=MOST_DISPLACED).contains(&displaced) {
        return false;
    }
    let (opcode, gap) = match purpose {
        Purpose::BackEdge(_) => (own[0], displaced - LEN as u64),
        Purpose::Call | Purpose::Trace => (JMP, 0),
    };
    let behind = site.wrapping_add(LEN as u64 + gap);
    let Ok(distance) = i32::try_from(to.wrapping_sub(behind) as i64) else { return false };
    let mut jump = [opcode; LEN];
    jump[1..].copy_from_slice(&distance.to_le_bytes());
    let patch = Patch { purpose, own, jump, gap, inner, displaced };
    if patch.inner().any(|n| jump[n] != INT3 && !UNDEFINED.contains(&jump[n])) {
        return false;
    }
    let mut patches = lock(&PATCHES);
    let range = patch.range(site);
    if patches.meets(&range) || patches.hiding.is_exposed(&range) {
        return false;
    }
    // Whether a page is a file's, and so to be hidden, is read from `/proc`.
    if patches.hiding.is_possible()
        && patch.pages(site).any(|page| !patches.pages.contains_key(&page))
        && File::open(PAGEMAP).is_err()
    {
        return false;
    }
    memory::read_code_by(read);
    ANY.store(true, Ordering::SeqCst);
    patches.trapping.extend(std::iter::once(0).chain(patch.inner()).map(|n| site + n as u64));
    // Host code that reads the site from now on gets the guest's own bytes.
    patches.insert(site, patch);
    let written = patch.write(site);
    if !written {
        patches.remove(site);
    }
    written
}

impl Patches {
    /// The patches with displaced bytes in `range`, by their sites.
    fn within(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, Patch)> {
        let start = range.start.saturating_sub(MOST_DISPLACED - 1);
        let wanted = range.start;
        self.all
            .range(start..range.end.max(start))
            .map(|(site, patch)| (*site, *patch))
            .filter(move |(site, patch)| patch.range(*site).end > wanted)
    }

    /// The site of a patch with displaced bytes in `range`, the first if there are several.
    fn first(&self, range: &Range<u64>) -> Option<u64> {
        self.within(range).next().map(|(site, _)| site)
    }

    fn meets(&self, range: &Range<u64>) -> bool {
        self.first(range).is_some()
    }

    /// Notes a patch that is about to be written.
    fn insert(&mut self, site: u64, patch: Patch) {
        for page in patch.pages(site) {
            let patched = self.pages.entry(page).or_insert_with(|| {
                let of_file = of_file(page);
                if of_file.is_some() && self.hiding.is_possible() && become_copy(page) {
                    self.hiding.hide(page);
                }
                PatchedPage { patches: 0, of_file }
            });
            patched.patches += 1;
        }
        if let Purpose::BackEdge(head) = patch.purpose {
            self.back_edges.insert(head, site);
        }
        self.all.insert(site, patch);
    }

    /// Where the patch stands by which the guest enters the trace at `head`.
    fn entering(&self, head: u64) -> Option<u64> {
        let at_head = self.all.get(&head).is_some_and(|patch| patch.purpose == Purpose::Trace);
        if at_head { Some(head) } else { self.back_edges.get(&head).copied() }
    }

    /// Takes a patch back, for good.
    fn remove(&mut self, site: u64) {
        if let Some(patch) = self.take_out(site) {
            self.close_pages(page_down(site)..site + patch.len());
        }
    }

    /// Takes a patch back. Its pages stay as they are, though they may have no patches any more.
    fn take_out(&mut self, site: u64) -> Option<Patch> {
        let patch = self.all.get(&site).copied()?;
        patch.take_back(site);
        self.all.remove(&site);
        if let Purpose::BackEdge(head) = patch.purpose {
            self.back_edges.remove(&head);
        }
        for page in patch.pages(site) {
            self.pages.entry(page).and_modify(|patched| patched.patches -= 1);
        }
        Some(patch)
    }

    /// The pages in `range` without patches become what they were before their first ones.
    fn close_pages(&mut self, range: Range<u64>) {
        let hiding = &mut self.hiding;
        self.pages.retain(|page, patched| {
            if patched.patches > 0 || !range.contains(page) {
                return true;
            }
            if let Some(of_file) = &patched.of_file {
                give_up_copy(*page, of_file);
            }
            hiding.unhide(*page);
            false
        });
    }

    /// Takes the patches with displaced bytes in `range` back that are wanted. Returns the sites of
    /// those that were for calls.
    pub(super) fn take_back_in(
        &mut self,
        range: &Range<u64>,
        wanted: impl Fn(&Patch) -> bool,
    ) -> Vec<u64> {
        let found: Vec<(u64, Patch)> =
            self.within(range).filter(|(_, patch)| wanted(patch)).collect();
        found.iter().for_each(|(site, _)| self.remove(*site));
        // Those whose patches are out, too: they are about to change.
        self.close_pages(page_down(range.start)..range.end);
        let of_calls = found.into_iter().filter(|(_, patch)| patch.purpose == Purpose::Call);
        of_calls.map(|(site, _)| site).collect()
    }
}

/// What the kernel says about pages.
const PAGEMAP: &str = "/proc/self/pagemap";

/// The bytes of a page, if it is a file's, and not a copy (the kernel's
/// `Documentation/admin-guide/mm/pagemap.rst`).
fn of_file(page: u64) -> Option<Box<[u8]>> {
    const PRESENT: u64 = 1 << 63;
    const OF_FILE: u64 = 1 << 61;
    let mut entry = [0; 8];
    // The page is present then.
    memory::copy_code(page, &mut [0]);
    let read =
        File::open(PAGEMAP).and_then(|pagemap| pagemap.read_exact_at(&mut entry, page / PAGE * 8));
    let entry = u64::from_le_bytes(entry);
    if read.is_err() || entry & (PRESENT | OF_FILE) != PRESENT | OF_FILE {
        return None;
    }
    let mut bytes = vec![0; PAGE as usize];
    (memory::copy_code(page, &mut bytes) == bytes.len()).then(|| bytes.into())
}

/// Makes the page a copy of the file's, without a change. If a page became a copy after it was
/// hidden, the kernel would not join its mapping with the neighbours' again when it is shown, and
/// the guest could not move these by one `mremap`. False if it cannot be written.
fn become_copy(page: u64) -> bool {
    let mut byte = [0];
    memory::copy_code(page, &mut byte) == 1 && host::write_past_protection(page, &byte)
}

/// Gives up this process's copy of a page of a file, if nobody else has written to it.
fn give_up_copy(page: u64, of_file: &[u8]) {
    let mut bytes = vec![0; PAGE as usize];
    if memory::copy_code(page, &mut bytes) != bytes.len() || bytes[..] != *of_file {
        return;
    }
    // SAFETY: the next access finds the file's bytes.
    unsafe { raw(&Call::new(libc::SYS_madvise, &[page, PAGE, libc::MADV_DONTNEED as u64])) };
}

/// May several threads or processes execute this memory?
pub fn is_shared() -> bool {
    SHARED.load(Ordering::SeqCst)
}

/// From now on other threads may execute the code that is patched. Called before there is one.
pub fn set_shared() {
    SHARED.store(true, Ordering::SeqCst);
}

/// Takes the patches with displaced bytes in `range` back: the code is about to change. Returns the
/// sites of those that were for calls.
pub fn take_back(range: &Range<u64>) -> Vec<u64> {
    take_back_if(range, |_| true)
}

/// Takes the patches back that lead to the trace at `head`.
pub fn take_back_from(head: u64) {
    take_back_if(&(head..head + 1), |_| true);
    if ANY.load(Ordering::SeqCst) {
        let mut patches = lock(&PATCHES);
        if let Some(site) = patches.back_edges.get(&head).copied() {
            patches.remove(site);
        }
    }
}

/// Takes the patch back, for a while, by which the guest enters the trace at `head`. Returns where it stood, and
/// the patch for [`write()`], before which the caller finds out whether the guest's bytes are still the same. The
/// pages stay copies, and hidden, until the caller calls [`none_is_out`].
pub fn take_out(head: u64) -> Option<(u64, NewPatch)> {
    let mut patches = lock(&PATCHES);
    let site = patches.entering(head)?;
    let patch = *patches.all.get(&site)?;
    let new = NewPatch {
        purpose: patch.purpose,
        end: site + patch.displaced,
        own: patch.own,
        inner: patch.inner,
        to: patch.leads_to(site),
    };
    patches.take_out(site);
    Some((site, new))
}

/// Each patch that was taken out has been written again, or never will be.
pub fn none_is_out() {
    lock(&PATCHES).close_pages(0..u64::MAX);
}

/// Takes all patches of calls back.
pub fn take_back_calls() {
    take_back_if(&(0..u64::MAX), |patch| patch.purpose == Purpose::Call);
}

/// Takes all patches back that lead to traces.
pub fn take_back_traces() {
    take_back_if(&(0..u64::MAX), |patch| patch.purpose != Purpose::Call);
}

fn take_back_if(range: &Range<u64>, wanted: impl Fn(&Patch) -> bool) -> Vec<u64> {
    if !ANY.load(Ordering::SeqCst) || range.is_empty() {
        return Vec::new();
    }
    lock(&PATCHES).take_back_in(range, wanted)
}

/// A thread that ran guest code in place has trapped at `pc`, by `int3` or by an undefined opcode.
pub fn trapped(pc: u64) -> Trapped {
    if !ANY.load(Ordering::SeqCst) {
        return Trapped::Guest;
    }
    let patches = lock(&PATCHES);
    if let Some(start) = patches.first(&(pc..pc + 1)).filter(|start| *start < pc) {
        let offset = pc - start;
        if offset < LEN as u64 && patches.all[&start].inner >> offset & 1 != 0 {
            return Trapped::Inside { start };
        }
    }
    let mut byte = [0];
    let is_over = patches.trapping.contains(&pc)
        && memory::copy_code(pc, &mut byte) == 1
        && byte[0] != INT3
        && !UNDEFINED.contains(&byte[0]);
    if is_over { Trapped::Passing } else { Trapped::Guest }
}

/// Does a trace's patch begin at `pc`?
pub fn leads_to_trace(pc: u64) -> bool {
    ANY.load(Ordering::Relaxed)
        && lock(&PATCHES).all.get(&pc).is_some_and(|patch| patch.purpose == Purpose::Trace)
}

/// Does a patch lead guest code in place to the trace at `head`?
pub fn enters_trace(head: u64) -> bool {
    if !ANY.load(Ordering::Relaxed) {
        return false;
    }
    lock(&PATCHES).entering(head).is_some()
}

/// Is the guest's instruction at `pc` not to be executed where it stands? A trace's patch begins
/// there, or a patch has an inner boundary there.
pub fn is_replaced(pc: u64) -> bool {
    if !ANY.load(Ordering::Relaxed) {
        return false;
    }
    let patches = lock(&PATCHES);
    patches.within(&(pc..pc + 1)).any(|(site, patch)| match pc - site {
        0 => patch.purpose == Purpose::Trace,
        offset => offset < patch.len(),
    })
}

/// Does a call's patch begin at `pc`?
pub fn leads_to_stub(pc: u64) -> bool {
    lock(&PATCHES).all.get(&pc).is_some_and(|patch| patch.purpose == Purpose::Call)
}

/// Is there a patch with displaced bytes in `range`?
pub fn are_in(range: &Range<u64>) -> bool {
    ANY.load(Ordering::Relaxed) && lock(&PATCHES).meets(range)
}

/// Reads guest code at `address`: the guest's own bytes, where there are patches. Returns the length
/// of the prefix that could be read.
fn read(address: u64, bytes: &mut [u8]) -> usize {
    // No patch is written or taken back meanwhile.
    let patches = lock(&PATCHES);
    let mut copy = || memory::copy_code(address, bytes);
    let len = if hiding::any() { with_all_rights(copy) } else { copy() };
    let range = address..address.saturating_add(len as u64);
    let start = range.start.saturating_sub(LEN as u64);
    for (site, patch) in patches.all.range(start..range.end.max(start)) {
        for (n, own) in patch.own.iter().enumerate() {
            let at = site + patch.offset(n);
            if range.contains(&at) && bytes[(at - address) as usize] == patch.jump[n] {
                bytes[(at - address) as usize] = *own;
            }
        }
    }
    len
}

/// Calls `f` with the lock held, for a fork.
pub fn while_locked(f: impl FnOnce()) {
    let _patches = lock(&PATCHES);
    f();
}

/// The offsets in [`LEN`] bytes at which instructions begin that have these lengths, as bits; none
/// if the lengths do not cover them.
pub fn inner_boundaries(lengths: impl IntoIterator<Item = usize>) -> Option<u8> {
    let (mut at, mut inner) = (0, 0u8);
    for length in lengths {
        at += length;
        if at >= LEN {
            return Some(inner);
        }
        inner |= 1 << at;
    }
    None
}

/// May the bytes of `range`, which the instruction at its start begins, be patched?
pub fn may_stand(pages: &CodePages, range: &Range<u64>) -> bool {
    pages.is_constant(range.start, range.clone()) && !pages.is_shared(range.clone())
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
    serialise_this();
}

/// Makes this processor fetch its code anew. `iretq` serialises as `cpuid` does (Intel SDM vol. 3,
/// "Serializing Instructions"), which takes 4 µs in a virtual machine.
fn serialise_this() {
    // SAFETY: returns to the instruction behind it, with the same stack and flags.
    unsafe {
        std::arch::asm!(
            "mov {selector:e}, ss",
            "mov {stack}, rsp",
            "push {selector}",
            "push {stack}",
            "pushfq",
            "mov {selector:e}, cs",
            "push {selector}",
            "lea {selector}, [rip + 2f]",
            "push {selector}",
            "iretq",
            "2:",
            selector = out(reg) _,
            stack = out(reg) _,
        );
    }
}

#[cfg(test)]
pub(super) mod tests;
