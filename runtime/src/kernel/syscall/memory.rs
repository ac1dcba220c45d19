//! The guest's calls about its address space, which it shares with the host.
//!
//! Data: none here. The list of *protected* ranges, the program break and the guest's stack are in
//! the process's `Memory` ([`crate::kernel::process`]), behind a lock that these functions take.
//!
//! Invariants:
//! * The ranges of the host are protected: to the guest they are unmapped addresses that cannot be
//!   mapped. The code cache and its tables lie where some programs map at fixed addresses; they
//!   move away instead ([`Engine::make_room`]).
//! * Every call that may change the contents, protection or existence of a range is a transaction
//!   of the [code pages](crate::changes), which must agree with the kernel about which pages are
//!   guarded.
//! * A shared mapping ends the assumption `private_memory` (docs/design.md, "The IR") if its
//!   contents may change; see [`is_plain`]. Other ends are in `shmat`, in the start of the first
//!   thread ([`crate::kernel::process`]), and in `io_setup`, whose ring the kernel writes.
//! * A private mapping of a file's code without an address goes low, near the code cache
//!   ([`dynasour_guest::space`]).
//!
//! [`System::memory_call`] runs on the guest's thread, and the caller holds no lock.
//!
//! Example: `munmap(0x10000, 0x2000)`. The range is announced, code that was translated from it is
//! dropped, the threads that execute this code are waited for, the kernel unmaps the range, and the
//! code pages forget what they knew of it.

use std::ops::Range;
use std::os::fd::BorrowedFd;

use dynasour_guest::space::{self, MapEntry, Mapping, PAGE, USER_END, page_down, page_up};
use nix::sys::mman::{MapFlags, ProtFlags};

use super::segments::segment_size;
use crate::changes::News;
use crate::kernel::entry::{self, Call};
use crate::kernel::process::{Done, Engine, Moved, System};

/// Bytes above the host's heap that stay the host's (guess). Everything that the host allocates
/// comes from there (see [`crate::start`]). If it is too small, the guest can map where the heap
/// must grow, and an allocation of the host fails.
const HEAP_ROOM: u64 = 4 << 30;

/// Bytes below the host's stack that stay the host's, because the stack grows (guess: twice the
/// usual limit of 8 MiB). If it is too small, the guest can map where the stack must grow.
const STACK_ROOM: u64 = 16 << 20;

/// The pages of `len` bytes at `address`, rounded as the kernel rounds them. Empty if the end
/// overflows.
pub(super) fn pages(address: u64, len: u64) -> Range<u64> {
    let start = page_down(address);
    let end = address.checked_add(len).and_then(page_up).unwrap_or(start);
    start..end
}

impl System {
    /// Keeps the guest from mapping over `range`, and from changing the mappings there.
    pub fn protect(&self, range: Range<u64>) {
        self.process.memory().protect(range);
    }

    /// The guest may map where host memory was, and may not touch where it is.
    pub fn host_moved(&self, moved: Moved) {
        let mut memory = self.process.memory();
        moved.from.iter().for_each(|left| memory.unprotect(left));
        moved.to.into_iter().for_each(|taken| memory.protect(taken));
    }

    /// Protects everything that is mapped, by the list `maps`, except the ranges `guest`. To be called when
    /// all memory of the host is set up.
    pub fn protect_host(&self, maps: &[MapEntry], guest: &[Range<u64>]) {
        for map in maps {
            let Range { start, end } = map.range;
            if guest.iter().any(|range| range.start <= start && end <= range.end) {
                continue;
            }
            let is = |name: &str| map.path.as_ref().is_some_and(|path| path.as_os_str() == name);
            let above = if is("[heap]") { HEAP_ROOM } else { 0 };
            let below = if is("[stack]") { STACK_ROOM } else { 0 };
            self.protect(start.saturating_sub(below)..end.saturating_add(above));
        }
    }

    /// Whether the guest, which is about to map `range`, may have it. Memory of the host in `range`
    /// that can be elsewhere is moved away first.
    pub(super) fn is_free(&mut self, engine: &mut dyn Engine, range: &Range<u64>) -> bool {
        if !self.process.memory().is_protected(range) {
            return true;
        }
        engine.make_room(range).into_iter().for_each(|moved| self.host_moved(moved));
        !self.process.memory().is_protected(range)
    }

    pub(super) fn memory_call(&mut self, engine: &mut dyn Engine, nr: i64, call: &Call) -> Done {
        let [address, len, ..] = call.args;
        let range = pages(address, len);
        let refused =
            self.process.memory().is_protected(&(range.start..range.end.max(range.start + 1)));
        if !self.is_within_limit(nr, call, &range) {
            return match nr {
                libc::SYS_brk => Done::Value(self.process.memory().brk.current() as i64),
                _ => Done::error(libc::ENOMEM),
            };
        }
        match nr {
            libc::SYS_brk => self.brk(engine, address),
            libc::SYS_mmap => self.mmap(engine, call),
            libc::SYS_munmap => self.munmap(engine, call, range),
            libc::SYS_mremap => self.mremap(engine, call),
            libc::SYS_mprotect | libc::SYS_pkey_mprotect | libc::SYS_madvise if refused => {
                self.pass_nowhere(call)
            }
            libc::SYS_mprotect | libc::SYS_pkey_mprotect => {
                let grown = self.process.memory().growing_down(call, &range);
                match grown {
                    Some(call) => self.mprotect(engine, &call, pages(call.args[0], call.args[1])),
                    None => self.mprotect(engine, call, range),
                }
            }
            libc::SYS_remap_file_pages if refused => Done::error(libc::EINVAL),
            libc::SYS_remap_file_pages => {
                self.disown(engine, &range);
                self.pass_and_forget(engine, call, range)
            }
            libc::SYS_madvise if !changes_contents(call.args[2] as i32) => self.pass(call),
            libc::SYS_shmat => self.shmat(engine, call),
            // Where a segment ends only the kernel knows.
            libc::SYS_shmdt => self.pass_and_forget(engine, call, 0..USER_END),
            _ => self.pass_and_forget(engine, call, range),
        }
    }

    /// Whether the address space stays within the guest's limit (RLIMIT_AS) after the call.
    fn is_within_limit(&self, nr: i64, call: &Call, range: &Range<u64>) -> bool {
        let [_, len, new_len, flags, ..] = call.args;
        match nr {
            libc::SYS_brk => {
                let current = self.process.memory().brk.current();
                self.may_map(range.start.saturating_sub(current), 0..0)
            }
            libc::SYS_mmap if flags as i32 & libc::MAP_FIXED != 0 => {
                self.may_map(len, range.clone())
            }
            libc::SYS_mmap => self.may_map(len, 0..0),
            libc::SYS_mremap if flags as i32 & libc::MREMAP_DONTUNMAP != 0 => {
                self.may_map(new_len, 0..0)
            }
            libc::SYS_mremap => self.may_map(new_len.saturating_sub(len), 0..0),
            // The kernel names what is wrong with the segment.
            libc::SYS_shmat => {
                segment_size(call.args[0]).map_or(true, |size| self.may_map(size, 0..0))
            }
            _ => true,
        }
    }

    /// Performs a call that may change anything in `range`, and forgets what is known of `range`:
    /// a call that fails may have changed a part, too.
    fn pass_and_forget(&self, engine: &mut dyn Engine, call: &Call, range: Range<u64>) -> Done {
        let change = self.process.pages().announce([range.clone()]).quiesce(engine);
        let (performed, done) = change.perform(|| self.pass(call));
        if done != Done::Restart {
            let is_unmapped = call.nr == libc::SYS_munmap as u64 && done == Done::Value(0);
            let news = if is_unmapped { News::Unmapped(range) } else { News::Unknown(range) };
            performed.publish(engine, [news]);
        }
        done
    }

    /// Makes a call about a range of the host's fail as if nothing were mapped there. The kernel
    /// gets an address at which nothing can be mapped, and so checks the other arguments itself.
    fn pass_nowhere(&self, call: &Call) -> Done {
        let mut call = *call;
        let [address, len, ..] = call.args;
        call.args[0] = USER_END | (address - page_down(address));
        if address.checked_add(len).and_then(page_up).is_some() {
            call.args[1] = len.min(PAGE);
        }
        self.pass(&call)
    }

    fn mprotect(&mut self, engine: &mut dyn Engine, call: &Call, range: Range<u64>) -> Done {
        let prot = ProtFlags::from_bits_retain(call.args[2] as i32);
        let is_keyed = call.nr == libc::SYS_pkey_mprotect as u64 && call.args[3] as i32 > 0;
        if is_keyed {
            self.process.pages().set_keyed();
        }
        let announced = self.process.pages().announce([range.clone()]);
        // Translated code stays valid if the range becomes readable and executable only: its bytes
        // do not change, and the guest may still execute them.
        let keeps_code = prot == ProtFlags::PROT_READ | ProtFlags::PROT_EXEC
            && !is_keyed
            && self.process.pages().knows(range.clone());
        let change = if keeps_code { announced.keep_code() } else { announced.quiesce(engine) };
        let (performed, done) = change.perform(|| self.pass(call));
        let known = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE | ProtFlags::PROT_EXEC;
        if done == Done::Restart || range.is_empty() {
            return done;
        }
        if done == Done::Value(0) && known.contains(prot) {
            performed.publish(engine, [News::Protected(range, prot)]);
        } else if keeps_code {
            // The failed call may have changed a part of the range. Its code is dropped, and then
            // the guards, on which nothing relies any more, go.
            let (performed, ()) = performed.again().quiesce(engine).perform(|| ());
            performed.publish(engine, [News::Unknown(range)]);
        } else {
            performed.publish(engine, [News::Unknown(range)]);
        }
        done
    }

    fn brk(&mut self, engine: &mut dyn Engine, wanted: u64) -> Done {
        // The lock is held while `quiesce` waits for other threads. They need no lock of this rank
        // to leave guest code, so the wait ends.
        let mut memory = self.process.memory();
        let before = memory.brk.current();
        if !(memory.brk.start()..before).contains(&wanted) {
            return Done::Value(memory.brk.set(wanted) as i64);
        }
        let left = page_down(wanted)..page_up(before).unwrap_or(before);
        let change = self.process.pages().announce([left.clone()]).quiesce(engine);
        let (performed, now) = change.perform(|| memory.brk.set(wanted));
        let unmapped = page_up(now).unwrap_or(now)..left.end;
        performed.publish(engine, [News::Unmapped(unmapped)]);
        Done::Value(now as i64)
    }

    fn mmap(&mut self, engine: &mut dyn Engine, call: &Call) -> Done {
        let [address, len, prot, flags, fd, offset] = call.args;
        let (prot, flags, fd) = (prot as i32, flags as i32, fd as i32);
        let fixed = flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE);
        let anonymous = flags & libc::MAP_ANONYMOUS != 0;
        let private = flags & libc::MAP_TYPE == libc::MAP_PRIVATE;
        let range = pages(address, len);
        let refused = match fixed {
            0 => self.process.memory().is_protected(&range),
            _ => page_down(address) == address && !self.is_free(engine, &range),
        };
        if refused && fixed != 0 {
            return self.refuse_fixed(call);
        }
        let is_code = flags & libc::MAP_DENYWRITE != 0 || prot & libc::PROT_EXEC != 0;
        let replaced = if fixed & libc::MAP_FIXED != 0 { range } else { 0..0 };
        let goes_low = fixed == 0 && address == 0 && private && !anonymous && is_code && fd >= 0;
        let change = self.process.pages().announce([replaced.clone()]).quiesce(engine);
        let (performed, done) = change.perform(|| match (goes_low, refused) {
            (true, _) => map_low(call),
            // The address is only a hint, and the range is not free: the kernel chooses.
            (false, true) => self.pass(&Call {
                args: [0, len, call.args[2], call.args[3], call.args[4], offset],
                ..*call
            }),
            (false, false) => self.pass(call),
        });
        let Done::Value(start) = done else { return done };
        if is_error(start) {
            // With MAP_FIXED the kernel may unmap the old mappings and then fail.
            performed.publish(engine, [News::Unknown(replaced)]);
            return done;
        }
        let range = pages(start as u64, len);
        let executable = prot & libc::PROT_EXEC != 0;
        let mapping = Mapping::anonymous(ProtFlags::from_bits_truncate(prot));
        let mapping = (private && anonymous).then_some(mapping);
        if executable && replaced.is_empty() {
            performed.publish_fresh(engine, [], range, mapping);
        } else {
            performed.publish(engine, [News::Mapped(range, mapping)]);
        }
        let changes =
            anonymous || prot & libc::PROT_WRITE != 0 || is_open_for_writing(fd) || !is_plain(fd);
        if !private && changes {
            engine.private_memory_lost();
        }
        if !private && anonymous {
            self.process.pages().own_shared(start as u64);
        }
        let may_be_unseen = executable || !private;
        if !anonymous
            && (may_be_unseen || self.process.pages().owns_shared())
            && let Some(inode) = inode_of(fd)
            && (self.process.pages().owns_file(inode)
                || may_be_unseen && is_open_for_writing(fd)
                || executable && is_written_elsewhere(inode))
        {
            // Code of this file, in this mapping or an earlier one, may change without a fault of
            // a guarded page.
            self.file_may_change(engine, inode);
        }
        done
    }

    /// `mmap` at a fixed address where the host has a mapping. If the same call would fail at any
    /// address, the result is that error. Else it is EEXIST with MAP_FIXED_NOREPLACE (within the
    /// user's addresses), and ENOMEM otherwise.
    fn refuse_fixed(&self, call: &Call) -> Done {
        let mut elsewhere = *call;
        elsewhere.args[0] = 0;
        elsewhere.args[3] &= !((libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) as u64);
        let done = self.pass(&elsewhere);
        if let Done::Value(start) = done
            && !is_error(start)
        {
            // SAFETY: this range has just been mapped, where nothing was, and nothing refers to it.
            unsafe { entry::raw(&Call::new(libc::SYS_munmap, &[start as u64, call.args[1]])) };
        } else if done != Done::error(libc::ENOMEM) {
            return done;
        }
        let within = pages(call.args[0], call.args[1]).end <= USER_END;
        let spares = within && call.args[3] & libc::MAP_FIXED_NOREPLACE as u64 != 0;
        Done::error(if spares { libc::EEXIST } else { libc::ENOMEM })
    }

    fn munmap(&mut self, engine: &mut dyn Engine, call: &Call, range: Range<u64>) -> Done {
        let [address, len, ..] = call.args;
        if !self.process.memory().is_protected(&range)
            || page_down(address) != address
            || len == 0
            || range.end > USER_END
        {
            return self.pass_and_forget(engine, call, range);
        }
        // The host's mappings do not exist for the guest, and `munmap` of an unmapped range
        // succeeds: so only the guest's parts are unmapped.
        let parts = self.process.memory().guest_parts(range);
        for part in parts {
            let own = Call::new(libc::SYS_munmap, &[part.start, part.end - part.start]);
            let change = self.process.pages().announce([part.clone()]).quiesce(engine);
            // SAFETY: none of the range is the host's.
            let (performed, result) = change.perform(|| unsafe { entry::raw(&own) });
            performed.publish(engine, [News::Unknown(part)]);
            if result < 0 {
                return Done::Value(result);
            }
        }
        Done::Value(0)
    }

    fn mremap(&mut self, engine: &mut dyn Engine, call: &Call) -> Done {
        let [old, old_len, new_len, flags, new, _] = call.args;
        let fixed = flags as i32 & libc::MREMAP_FIXED != 0;
        let from = pages(old, old_len.max(1));
        // If the range ends above the user's addresses, the kernel finds nothing to move or to
        // unmap, and returns the right error itself.
        let outside = from.end <= USER_END && self.process.memory().is_protected(&from);
        let to = pages(new, new_len);
        let may_move = flags as i32 & libc::MREMAP_MAYMOVE != 0;
        if fixed && (!may_move || page_down(new) != new || to.is_empty() || to.end > USER_END) {
            // The kernel refuses such arguments whatever is mapped.
            return self.pass(call);
        }
        let blocked = fixed && !self.is_free(engine, &to);
        if outside || blocked {
            let mut call = *call;
            call.args[0] = USER_END | (old - page_down(old));
            // With MREMAP_FIXED the kernel may unmap the new range before it checks the old one.
            call.args[3] &= !(libc::MREMAP_FIXED as u64);
            let done = self.pass(&call);
            return if !outside && done == Done::error(libc::EFAULT) {
                Done::error(libc::ENOMEM)
            } else {
                done
            };
        }
        // The old place may go on to show the same memory.
        self.disown(engine, &from);
        let replaced = if fixed { to } else { 0..0 };
        let left = pages(old, old_len);
        let change =
            self.process.pages().announce([left.clone(), replaced.clone()]).quiesce(engine);
        let (performed, done) = change.perform(|| self.pass(call));
        let Done::Value(start) = done else { return done };
        let unknown = [News::Unknown(left), News::Unknown(replaced)];
        if is_error(start) || fixed {
            performed.publish(engine, unknown);
        } else {
            performed.publish_fresh(engine, unknown, pages(start as u64, new_len), None);
        }
        done
    }
}

/// `mmap` of a file's code without an address. The mapping goes low ([`space::map_low`]).
fn map_low(call: &Call) -> Done {
    let [_, len, prot, flags, fd, offset] = call.args;
    // SAFETY: the descriptor is borrowed for the call only. If it is not open, the call fails with
    // EBADF.
    let file = unsafe { BorrowedFd::borrow_raw(fd as i32) };
    let (prot, flags) =
        (ProtFlags::from_bits_retain(prot as i32), MapFlags::from_bits_retain(flags as i32));
    match space::map_low(len, prot, flags, file, offset) {
        Ok(start) => Done::Value(start as i64),
        Err(errno) => Done::error(errno as i32),
    }
}

/// Whether a result in rax is an errno.
pub(super) fn is_error(value: i64) -> bool {
    (-4095..0).contains(&value)
}

/// Whether a `madvise` with this advice may change the contents that a load reads.
fn changes_contents(advice: i32) -> bool {
    const MADV_DONTNEED_LOCKED: i32 = 24;
    const MADV_GUARD_INSTALL: i32 = 102;
    const MADV_GUARD_REMOVE: i32 = 103;
    matches!(
        advice,
        libc::MADV_DONTNEED
            | libc::MADV_FREE
            | libc::MADV_REMOVE
            | MADV_DONTNEED_LOCKED
            | MADV_GUARD_INSTALL
            | MADV_GUARD_REMOVE
    )
}

/// Whether a shared mapping of this descriptor could be made writable later.
fn is_open_for_writing(fd: i32) -> bool {
    // SAFETY: reads flags of a descriptor.
    let flags =
        unsafe { entry::raw(&Call::new(libc::SYS_fcntl, &[fd as u64, libc::F_GETFL as u64])) };
    is_error(flags) || flags as i32 & libc::O_ACCMODE != libc::O_RDONLY
}

/// Whether one of the first [`DESCRIPTORS`] descriptors has this file open for writing.
fn is_written_elsewhere(inode: u64) -> bool {
    let is_open = |fd: i32| {
        // SAFETY: reads flags of a descriptor.
        let flags =
            unsafe { entry::raw(&Call::new(libc::SYS_fcntl, &[fd as u64, libc::F_GETFL as u64])) };
        !is_error(flags) && flags as i32 & libc::O_ACCMODE != libc::O_RDONLY
    };
    let polled = descriptors();
    let exist = polled.iter().filter(|polled| polled.revents & libc::POLLNVAL == 0);
    exist.map(|polled| polled.fd).any(|fd| is_open(fd) && inode_of(fd) == Some(inode))
}

/// The number of descriptors that are examined, from 0 (guess). A higher descriptor that is open
/// for writing is missed; then a change of mapped code through it is not detected.
const DESCRIPTORS: usize = 128;

/// The first [`DESCRIPTORS`] descriptors; those that do not exist have POLLNVAL. (To ask for each takes 13 µs, at each
/// `mmap` of a library.) All seem to exist if the guest may not have that many.
fn descriptors() -> [libc::pollfd; DESCRIPTORS] {
    let mut polled =
        std::array::from_fn(|fd| libc::pollfd { fd: fd as i32, events: 0, revents: 0 });
    // SAFETY: fills `revents` in, or fails; it does not wait.
    unsafe {
        entry::raw(&Call::new(libc::SYS_poll, &[polled.as_mut_ptr() as u64, DESCRIPTORS as u64, 0]))
    };
    polled
}

/// Whether this is a regular file on a disk.
///
/// A shared mapping of such a file is assumed to be constant if mapping and descriptor are for
/// reading only. Most programs map tables of the C library in this way. Files in memory are not
/// plain, because other processes write them; devices are not plain either.
fn is_plain(fd: i32) -> bool {
    const IN_MEMORY: [i64; 3] =
        [libc::TMPFS_MAGIC, libc::HUGETLBFS_MAGIC, 0x8584_58f6 /* RAMFS_MAGIC */];
    let mut system = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: fills `system` in, or fails.
    let on_disk = unsafe {
        let failed =
            entry::raw(&Call::new(libc::SYS_fstatfs, &[fd as u64, system.as_mut_ptr() as u64]));
        failed == 0 && !IN_MEMORY.contains(&system.assume_init().f_type)
    };
    on_disk && status_of(fd).is_some_and(|status| status.st_mode & libc::S_IFMT == libc::S_IFREG)
}

/// The inode of an open file.
pub(super) fn inode_of(fd: i32) -> Option<u64> {
    status_of(fd).map(|status| status.st_ino)
}

fn status_of(fd: i32) -> Option<libc::stat> {
    let mut status = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: fills `status` in, or fails.
    unsafe {
        let failed =
            entry::raw(&Call::new(libc::SYS_fstat, &[fd as u64, status.as_mut_ptr() as u64]));
        (failed == 0).then(|| status.assume_init())
    }
}

#[cfg(test)]
mod tests;
