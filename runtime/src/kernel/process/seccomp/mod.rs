//! Filters of the guest's system calls: `seccomp(2)`, and system calls that become signals
//! (`PR_SET_SYSCALL_USER_DISPATCH`).
//!
//! The kernel gets neither, because it would apply them to the translator's calls. Instead
//! [`System::screen`] checks each call of the guest's before it is performed. A program that the
//! guest executes under the translator gets the filters in a file ([`Seccomp::to_file`]).
//!
//! Data: [`Seccomp`] and [`Dispatch`] in each thread's [`System`], which only that thread uses.
//! [`Shared`] in the `Process`: filters that one thread has installed for all (`TSYNC`); its list
//! has a lock.
//!
//! Invariants: a thread's filters are only added to. The order of a list is the order of
//! installation. A thread takes over the shared filters at its next system call, if they begin with
//! its own.
//!
//! Example: a filter returns ERRNO with 13 for `openat`. The guest calls `openat`: `screen` runs
//! the filter and returns -EACCES, and the kernel is not called.

mod bpf;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use dynasour_guest::ThreadContext;

use super::guest_access::guest_read;
use super::{Done, Outcome, System};
use crate::kernel::entry::{self, Call};
use crate::kernel::signal::SigInfo;
use crate::sync::lock;
use bpf::{Data, INSTRUCTION_SIZE, LONGEST, Program};

/// Bytes of a `struct seccomp_data`: number, architecture, address, six arguments.
const DATA_SIZE: usize = 64;
/// `AUDIT_ARCH_X86_64` (linux/audit.h): the call has a number of the x86-64 table.
pub(crate) const ARCHITECTURE: u32 = 0xc000_003e;
/// `AUDIT_ARCH_I386`: the call has a number of the i386 table.
pub(crate) const ARCHITECTURE_32: u32 = 0x4000_0003;
/// Instructions of all filters of a thread together; each filter counts for four more (seccomp(2)).
const MOST_INSTRUCTIONS: usize = 1 << 15;

/// The upper 16 bits of a filter's result. Compared as signed numbers, the least is the most
/// important (seccomp(2)).
mod action {
    pub const KILL_PROCESS: i32 = 0x8000_0000_u32 as i32;
    pub const KILL_THREAD: i32 = 0;
    pub const TRAP: i32 = 0x0003_0000;
    pub const ERRNO: i32 = 0x0005_0000;
    pub const USER_NOTIF: i32 = 0x7fc0_0000;
    pub const TRACE: i32 = 0x7ff0_0000;
    pub const LOG: i32 = 0x7ffc_0000;
    pub const ALLOW: i32 = 0x7fff_0000;
    /// The bits of a result that contain the action.
    pub const MASK: u32 = 0xffff_0000;
}

/// The filters of one thread.
#[derive(Clone, Default)]
pub(crate) struct Seccomp {
    /// Whether only read, write, exit and sigreturn are allowed (`SECCOMP_SET_MODE_STRICT`).
    strict: bool,
    /// Oldest first.
    filters: Vec<Arc<Program>>,
    /// The [`Shared::revision`] that the thread has taken over.
    seen: u64,
}

/// The filters that a thread has installed for all threads of its process.
#[derive(Default)]
pub(crate) struct Shared {
    /// How often filters were installed for all threads.
    revision: AtomicU64,
    filters: Mutex<Vec<Arc<Program>>>,
    /// Whether the installing thread has `no_new_privs` set: then the other threads set it, too.
    no_new_privileges: AtomicBool,
}

/// Which system calls of a thread become signals (`PR_SET_SYSCALL_USER_DISPATCH`).
#[derive(Clone, Copy)]
pub(crate) struct Dispatch {
    /// Start and length of the code whose calls are always performed.
    spared: (u64, u64),
    /// The address of the byte that decides about other calls. 0 for none: then all of them become
    /// signals.
    selector: u64,
}

impl Shared {
    /// Calls `f` while no thread can install filters for all.
    pub(crate) fn while_locked<R>(&self, f: impl FnOnce() -> R) -> R {
        let _filters = lock(&self.filters);
        f()
    }
}

impl Seccomp {
    pub(crate) fn is_off(&self) -> bool {
        !self.strict && self.filters.is_empty()
    }

    /// The most important result of the filters for a call.
    fn verdict(&self, data: &Data) -> u32 {
        let importance = |&said: &u32| (said & action::MASK) as i32;
        // Of equally important results that of the newest filter counts (seccomp(2)).
        self.filters
            .iter()
            .rev()
            .map(|filter| filter.run(data))
            .min_by_key(importance)
            .unwrap_or(action::ALLOW as u32)
    }

    fn has_prefix(&self, filters: &[Arc<Program>]) -> bool {
        self.filters.len() <= filters.len()
            && self.filters.iter().zip(filters).all(|(a, b)| Arc::ptr_eq(a, b))
    }

    /// Writes the filters to a new file, for [`Seccomp::from_file`]. Its descriptor stays open
    /// across execve. `None` if there are no filters.
    ///
    /// # Errors
    /// An errno.
    pub(crate) fn to_file(&self) -> Result<Option<i32>, i32> {
        if self.filters.is_empty() {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        for filter in &self.filters {
            bytes.extend_from_slice(&(filter.len() as u32).to_le_bytes());
            bytes.extend_from_slice(filter.bytes());
        }
        // SAFETY: a new file; the buffer is as long as said.
        unsafe {
            let fd = libc::memfd_create(c"seccomp".as_ptr(), 0);
            if fd < 0 {
                return Err(libc::EMFILE);
            }
            if libc::pwrite(fd, bytes.as_ptr().cast(), bytes.len(), 0) != bytes.len() as isize {
                libc::close(fd);
                return Err(libc::ENOMEM);
            }
            Ok(Some(fd))
        }
    }

    /// Reads the filters that [`Seccomp::to_file`] has written, and closes the descriptor.
    pub(crate) fn from_file(fd: i32) -> Seccomp {
        use std::io::Read;
        let mut bytes = Vec::new();
        // SAFETY: the translator that executed this one has opened the descriptor for this use.
        let mut file = unsafe { <std::fs::File as std::os::fd::FromRawFd>::from_raw_fd(fd) };
        let mut filters = Vec::new();
        if file.read_to_end(&mut bytes).is_ok() {
            let mut unread = &bytes[..];
            while let Some((length, behind)) = unread.split_first_chunk() {
                let size = INSTRUCTION_SIZE * u32::from_le_bytes(*length) as usize;
                let Some((program, behind)) = behind.split_at_checked(size) else { break };
                filters.extend(Program::new(program.to_vec()).map(Arc::new));
                unread = behind;
            }
        }
        Seccomp { filters, ..Seccomp::default() }
    }
}

impl System {
    /// Checks a call that the guest is about to make. `None` if the call is allowed, else its
    /// result.
    pub(crate) fn screen(
        &mut self,
        context: &mut ThreadContext,
        call: &Call,
        architecture: u32,
    ) -> Option<Done> {
        let shared = self.process.seccomp();
        let revision = shared.revision.load(Ordering::Acquire);
        if self.seccomp.seen != revision {
            let filters = lock(&shared.filters);
            if self.seccomp.has_prefix(&filters) {
                self.seccomp.filters.clone_from(&filters);
            }
            self.seccomp.seen = revision;
            if shared.no_new_privileges.load(Ordering::Relaxed) {
                // SAFETY: sets a switch of this thread that cannot be cleared again.
                unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            }
        }
        if let Some(dispatch) = self.dispatch
            && let Some(done) = self.screen_dispatched(context, call, architecture, dispatch)
        {
            return Some(done);
        }
        if self.seccomp.is_off() { None } else { self.screen_filtered(context, call, architecture) }
    }

    fn screen_filtered(
        &mut self,
        context: &mut ThreadContext,
        call: &Call,
        architecture: u32,
    ) -> Option<Done> {
        /// The calls of strict mode: read, write, exit, sigreturn.
        const FOUR: [i64; 4] =
            [libc::SYS_read, libc::SYS_write, libc::SYS_exit, libc::SYS_rt_sigreturn];
        const FOUR_32: [i64; 4] = [3, 4, 1, 119];
        if self.seccomp.strict {
            let allowed = if architecture == ARCHITECTURE { FOUR } else { FOUR_32 };
            let is_allowed = allowed.contains(&i64::from(call.nr as u32));
            return (!is_allowed).then(|| self.kill_thread(context, libc::SIGKILL));
        }
        let said = self.seccomp.verdict(&data(context, call, architecture));
        let detail = (said & !action::MASK) as i32;
        match (said & action::MASK) as i32 {
            action::ALLOW | action::LOG => None,
            action::ERRNO => Some(Done::error(detail.min(4095))),
            action::TRAP => Some(self.trap(context, call, architecture, 1, detail)),
            // No tracer and no listener is supported, so the kernel would say ENOSYS, too.
            action::TRACE | action::USER_NOTIF => Some(Done::error(libc::ENOSYS)),
            action::KILL_THREAD => Some(self.kill_thread(context, libc::SIGSYS)),
            _ => Some(Done::Outcome(Outcome::Killed(libc::SIGSYS))),
        }
    }

    fn screen_dispatched(
        &mut self,
        context: &mut ThreadContext,
        call: &Call,
        architecture: u32,
        dispatch: Dispatch,
    ) -> Option<Done> {
        const ALLOW: u8 = 0;
        const BLOCK: u8 = 1;
        const SYS_USER_DISPATCH: i32 = 2;
        let (start, length) = dispatch.spared;
        if context.rip.wrapping_sub(start) < length {
            return None;
        }
        if dispatch.selector != 0 {
            match guest_read::<1>(dispatch.selector) {
                Ok([ALLOW]) => return None,
                Ok([BLOCK]) => {}
                Ok(_) => return Some(Done::Outcome(Outcome::Killed(libc::SIGSYS))),
                Err(_) => return Some(Done::Outcome(Outcome::Killed(libc::SIGSEGV))),
            }
        }
        Some(self.trap(context, call, architecture, SYS_USER_DISPATCH, 0))
    }

    /// Delivers SIGSYS instead of performing the call. A handler finds the registers as they were
    /// before the call, except for rcx and r11, which any call changes.
    fn trap(
        &mut self,
        context: &mut ThreadContext,
        call: &Call,
        architecture: u32,
        code: i32,
        detail: i32,
    ) -> Done {
        let mut info = SigInfo::of_fault(libc::SIGSYS, code, context.rip);
        info.0[4..8].copy_from_slice(&detail.to_le_bytes());
        info.0[24..28].copy_from_slice(&(call.nr as u32).to_le_bytes());
        info.0[28..32].copy_from_slice(&architecture.to_le_bytes());
        if architecture == ARCHITECTURE {
            context.gpr[1] = context.rip;
            context.gpr[11] = context.rflags;
        }
        Done::Outcome(self.force(context, libc::SIGSYS, &info, context.rflags))
    }

    /// Ends the thread. If it is the only one, the signal kills the process.
    fn kill_thread(&self, context: &ThreadContext, signo: i32) -> Done {
        if self.process.is_borrower() || self.process.threads().is_alone() {
            Done::Outcome(Outcome::Killed(signo))
        } else {
            self.exit_thread(context, signo)
        }
    }

    /// Performs `seccomp(2)`.
    pub(crate) fn seccomp_call(&mut self, call: &Call) -> Done {
        const SET_MODE_STRICT: u64 = 0;
        const SET_MODE_FILTER: u64 = 1;
        const GET_ACTION_AVAIL: u64 = 2;
        let [operation, flags, address, ..] = call.args;
        match (operation, flags) {
            (SET_MODE_STRICT, 0) if address == 0 => self.become_strict(),
            (SET_MODE_FILTER, _) => self.add_filter(flags, address),
            (GET_ACTION_AVAIL, 0) => match guest_read(address).map(i32::from_le_bytes) {
                Err(errno) => Done::error(errno),
                Ok(action::KILL_PROCESS | action::KILL_THREAD | action::TRAP | action::ERRNO) => {
                    Done::Value(0)
                }
                Ok(action::TRACE | action::LOG | action::ALLOW) => Done::Value(0),
                Ok(_) => Done::error(libc::EOPNOTSUPP),
            },
            _ => Done::error(libc::EINVAL),
        }
    }

    /// Performs the options of `prctl` about filters and calls that become signals; `None` for
    /// other options.
    pub(crate) fn seccomp_switch(&mut self, call: &Call) -> Option<Done> {
        const PR_SET_SYSCALL_USER_DISPATCH: i32 = 59;
        const STRICT: u64 = 1;
        const FILTER: u64 = 2;
        let [option, mode, address, ..] = call.args;
        Some(match option as i32 {
            libc::PR_GET_SECCOMP => {
                Done::Value(if self.seccomp.is_off() { 0 } else { FILTER as i64 })
            }
            libc::PR_SET_SECCOMP => match mode {
                STRICT => self.become_strict(),
                FILTER => self.add_filter(0, address),
                _ => Done::error(libc::EINVAL),
            },
            PR_SET_SYSCALL_USER_DISPATCH => self.set_dispatch(call),
            _ => return None,
        })
    }

    fn become_strict(&mut self) -> Done {
        if !self.seccomp.filters.is_empty() {
            return Done::error(libc::EINVAL);
        }
        self.seccomp.strict = true;
        Done::Value(0)
    }

    fn add_filter(&mut self, flags: u64, address: u64) -> Done {
        const ALL_THREADS: u64 = 1;
        /// Also `LOG`, `SPEC_ALLOW` and `TSYNC_ESRCH`, which change nothing here.
        const KNOWN: u64 = ALL_THREADS | 1 << 1 | 1 << 2 | 1 << 4;
        // `NEW_LISTENER` is refused: only the kernel could make the listener's descriptor.
        if flags & !KNOWN != 0 {
            return Done::error(libc::EINVAL);
        }
        let program = match read_program(address) {
            Ok(program) => Arc::new(program),
            Err(errno) => return Done::error(errno),
        };
        let cost = |filter: &Arc<Program>| filter.len() + 4;
        if program.len() + self.seccomp.filters.iter().map(cost).sum::<usize>() > MOST_INSTRUCTIONS
        {
            return Done::error(libc::ENOMEM);
        }
        self.seccomp.filters.push(program);
        if flags & ALL_THREADS != 0 {
            let shared = self.process.seccomp();
            let mut filters = lock(&shared.filters);
            filters.clone_from(&self.seccomp.filters);
            // SAFETY: asks about the thread.
            if unsafe { libc::prctl(libc::PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) } == 1 {
                shared.no_new_privileges.store(true, Ordering::Relaxed);
            }
            self.seccomp.seen = 1 + shared.revision.fetch_add(1, Ordering::Release);
        }
        Done::Value(0)
    }

    /// In a forked child: no call becomes a signal any more, as the kernel does it.
    pub(crate) fn forget_dispatch(&mut self) {
        self.dispatch = None;
    }

    fn set_dispatch(&mut self, call: &Call) -> Done {
        const OFF: u64 = 0;
        const ON: u64 = 1;
        let [_, mode, start, length, selector, _] = call.args;
        self.dispatch = match mode {
            OFF if (start, length, selector) == (0, 0, 0) => None,
            // The range must not wrap around the end of the address space.
            ON if start == 0 || start.checked_add(length).is_some_and(|end| end > start) => {
                if selector != 0 && guest_read::<1>(selector).is_err() {
                    return Done::error(libc::EFAULT);
                }
                Some(Dispatch { spared: (start, length), selector })
            }
            _ => return Done::error(libc::EINVAL),
        };
        Done::Value(0)
    }
}

/// The `struct seccomp_data` of a call, which filters read.
fn data(context: &ThreadContext, call: &Call, architecture: u32) -> Data {
    let mut data = [0; DATA_SIZE];
    data[..4].copy_from_slice(&(call.nr as u32).to_le_bytes());
    data[4..8].copy_from_slice(&architecture.to_le_bytes());
    data[8..16].copy_from_slice(&context.rip.to_le_bytes());
    for (word, argument) in data[16..].chunks_exact_mut(8).zip(call.args) {
        word.copy_from_slice(&argument.to_le_bytes());
    }
    data
}

/// Reads the program that the `struct sock_fprog` at `address` describes, if the thread may install
/// one. The error is an errno.
fn read_program(address: u64) -> Result<Program, i32> {
    let head = guest_read::<16>(address)?;
    let length = usize::from(u16::from_le_bytes([head[0], head[1]]));
    let instructions = head[8..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
    if !(1..=LONGEST).contains(&length) {
        return Err(libc::EINVAL);
    }
    may_filter()?;
    if instructions == 0 {
        return Err(libc::EINVAL);
    }
    let mut bytes = vec![0; INSTRUCTION_SIZE * length];
    if crate::memory::copy_in(instructions, &mut bytes) != bytes.len() {
        return Err(libc::EFAULT);
    }
    Program::new(bytes).ok_or(libc::EINVAL)
}

/// Whether the kernel lets this thread install a filter: it checks that before it reads the filter,
/// so an unreadable one gives EFAULT. The error is an errno.
fn may_filter() -> Result<(), i32> {
    const SET_MODE_FILTER: u64 = 1;
    let unreadable = libc::sock_fprog { len: 1, filter: std::ptr::without_provenance_mut(1) };
    let call =
        Call::new(libc::SYS_seccomp, &[SET_MODE_FILTER, 0, std::ptr::from_ref(&unreadable) as u64]);
    // SAFETY: the filter at address 1 cannot be read, so none is installed.
    match unsafe { entry::raw(&call) } {
        error if error == -i64::from(libc::EFAULT) => Ok(()),
        error => Err(i32::try_from(-error).unwrap_or(libc::EINVAL)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(instructions: &[[u8; 8]]) -> Arc<Program> {
        Arc::new(Program::new(instructions.concat()).expect("a program"))
    }

    /// A filter that returns `said` for every call.
    fn saying(said: i32) -> Arc<Program> {
        let [a, b, c, d] = said.to_le_bytes();
        filter(&[[6, 0, 0, 0, a, b, c, d]])
    }

    #[test]
    fn the_most_important_verdict_counts() {
        let verdict = |said: &[i32]| {
            let filters = said.iter().map(|&said| saying(said)).collect();
            Seccomp { filters, ..Seccomp::default() }.verdict(&[0; DATA_SIZE]) as i32
        };
        assert_eq!(verdict(&[]), action::ALLOW);
        assert_eq!(verdict(&[action::ERRNO | 7, action::ALLOW]), action::ERRNO | 7);
        assert_eq!(verdict(&[action::ERRNO | 7, action::ERRNO | 8]), action::ERRNO | 8);
        assert_eq!(
            verdict(&[action::TRAP, action::KILL_PROCESS, action::KILL_THREAD]),
            action::KILL_PROCESS
        );
    }

    #[test]
    fn filters_survive_in_a_file() {
        assert_eq!(Seccomp::default().to_file(), Ok(None));
        let end = [6, 0, 0, 0, 0, 0, 0xff, 0x7f];
        let seccomp =
            Seccomp { filters: vec![saying(5), filter(&[end, end])], ..Seccomp::default() };
        let fd = seccomp.to_file().expect("a file").expect("filters");
        assert!(Seccomp::from_file(fd).filters == seccomp.filters);
    }
}
