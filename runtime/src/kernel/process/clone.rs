//! `fork`, `vfork`, `clone`, `clone3`: one [`Request`] is parsed from any of them, and one of four
//! kinds of child is made.
//!
//! | flags | child | host side |
//! | --- | --- | --- |
//! | no `CLONE_VM` | has memory of its own (fork) | returns from the same call, on copies |
//! | `CLONE_VM`, `CLONE_VFORK` | borrows memory while its parent sleeps | new host stack, context |
//! | `CLONE_VM` alone | shares memory, runs at the same time | a companion ([`super::companion`]) |
//! | `CLONE_THREAD` | a thread | a host thread ([`super::thread`]) |
//!
//! Data: none that outlives a call. Invariants:
//! * While a vfork child runs, its parent's thread sleeps in the kernel. The child allocates from
//!   the common heap, never frees the parent's data, and ends without destructors. The parent frees
//!   the child's data when it wakes.
//! * A child of fork must find every lock free. So a process that has had several threads forks
//!   while the forking thread holds all locks, and by the C library's `fork`, which takes the
//!   library's own.
//! * A signal that was accepted before the call is delivered in the parent, never in the child:
//!   asynchronous signals are blocked first, and the call restarts if one is pending.
//!
//! Called on the guest's own thread, outside native code, with no lock held.
//!
//! Example: `vfork()`: the parent copies its registers into a new context with rax = 0, maps a host
//! stack, and spawns the child with `CLONE_VM | CLONE_VFORK`. The child runs `child_main` until it
//! exits or executes a program; then the parent's call returns the child's id.

use dynasour_guest::ThreadContext;

use crate::kernel::entry::{self, Call, SpawnStart};
use crate::kernel::process::guest_access::guest_write;
use crate::kernel::process::report::Report;
use crate::kernel::process::{Done, Engine, System};
use crate::kernel::signal::gate::{Closed, Extent};
use crate::kernel::signal::{self, SYNCHRONOUS};

use super::helper;
use super::shared::InCommon;
use super::thread::{GUARD, Identity, map_above_guard};

/// Bytes of a vfork child's host stack (guess; if the host needs more, the child dies by SIGSEGV).
const CHILD_STACK: usize = 1 << 20;

const CLONE_VM: u64 = libc::CLONE_VM as u64;
const CLONE_VFORK: u64 = libc::CLONE_VFORK as u64;
const CLONE_NEWPID: u64 = libc::CLONE_NEWPID as u64;
const CLONE_THREAD: u64 = libc::CLONE_THREAD as u64;
const CLONE_SETTLS: u64 = libc::CLONE_SETTLS as u64;
const CLONE_FILES: u64 = libc::CLONE_FILES as u64;
const CLONE_SIGHAND: u64 = libc::CLONE_SIGHAND as u64;
const CLONE_CLEAR_SIGHAND: u64 = 1 << 32;
const CLONE_PARENT_SETTID: u64 = libc::CLONE_PARENT_SETTID as u64;
const CLONE_CHILD_SETTID: u64 = libc::CLONE_CHILD_SETTID as u64;
const CLONE_CHILD_CLEARTID: u64 = libc::CLONE_CHILD_CLEARTID as u64;
/// Flags without which a thread has something of its own. The new host thread calls `unshare` with
/// those that the guest has not set.
const UNSHARABLE: u64 = (libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SYSVSEM) as u64;
/// Flags with which no thread is made, because the kernel refuses them or they are not implemented:
/// a descriptor of the thread, namespaces.
const NOT_FOR_THREADS: u64 = (libc::CLONE_PIDFD
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u32 as u64
    | CLONE_CLEAR_SIGHAND;
/// Flags of a fork that the C library's `fork` can perform, together with `System::fork`.
const PLAIN_FORK: u64 = CLONE_PARENT_SETTID
    | CLONE_CHILD_SETTID
    | CLONE_CHILD_CLEARTID
    | CLONE_SETTLS
    | libc::SIGCHLD as u64;

/// Words of `struct clone_args`, 8 bytes each (clone(2)).
const ARGS_WORDS: usize = 11;
/// Bytes of the first published version of `struct clone_args` (kernel: `CLONE_ARGS_SIZE_VER0`).
const ARGS_SMALLEST: u64 = 64;
/// Indices of words in `struct clone_args`.
mod word {
    pub const FLAGS: usize = 0;
    pub const CHILD_TID: usize = 2;
    pub const PARENT_TID: usize = 3;
    pub const EXIT_SIGNAL: usize = 4;
    pub const STACK: usize = 5;
    pub const STACK_SIZE: usize = 6;
    pub const TLS: usize = 7;
}

/// The guest's request in a form that is the same for all four calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Request {
    flags: u64,
    /// The child's stack pointer; `None` if it is the parent's.
    stack: Option<u64>,
    tls: u64,
    form: Form,
}

/// The system call by which the host passes the request to the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    /// `clone` with these addresses for the parent's and the child's thread id.
    Clone { parent_tid: u64, child_tid: u64 },
    /// `clone3` with the guest's arguments and their size.
    Clone3 { args: [u64; ARGS_WORDS], size: u64 },
}

impl Request {
    /// Parses the guest's call. The error is an errno.
    fn parse(call: &Call) -> Result<Request, i32> {
        let plain = Form::Clone { parent_tid: 0, child_tid: 0 };
        let exit_signal = libc::SIGCHLD as u64;
        Ok(match i64::from(call.nr as u32) {
            libc::SYS_fork => Request { flags: exit_signal, stack: None, tls: 0, form: plain },
            libc::SYS_vfork => Request {
                flags: CLONE_VM | CLONE_VFORK | exit_signal,
                stack: None,
                tls: 0,
                form: plain,
            },
            libc::SYS_clone => {
                let [flags, stack, parent_tid, child_tid, tls, _] = call.args;
                Request {
                    flags: u64::from(flags as u32),
                    stack: (stack != 0).then_some(stack),
                    tls,
                    form: Form::Clone { parent_tid, child_tid },
                }
            }
            _ => Request::parse_clone3(call.args[0], call.args[1])?,
        })
    }

    fn parse_clone3(address: u64, size: u64) -> Result<Request, i32> {
        const PAGE: u64 = 4096;
        const KNOWN: usize = 8 * ARGS_WORDS;
        if size > PAGE {
            return Err(libc::E2BIG);
        }
        if size < ARGS_SMALLEST {
            return Err(libc::EINVAL);
        }
        let mut bytes = vec![0; size as usize];
        if crate::memory::copy_in(address, &mut bytes) != bytes.len() {
            return Err(libc::EFAULT);
        }
        if bytes.iter().skip(KNOWN).any(|&byte| byte != 0) {
            return Err(libc::E2BIG);
        }
        bytes.resize(KNOWN, 0);
        let mut args = [0; ARGS_WORDS];
        for (word, bytes) in args.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        }
        let (stack, stack_size) = (args[word::STACK], args[word::STACK_SIZE]);
        if (stack == 0) != (stack_size == 0) {
            return Err(libc::EINVAL);
        }
        Ok(Request {
            flags: args[word::FLAGS],
            stack: (stack != 0).then(|| stack.wrapping_add(stack_size)),
            tls: args[word::TLS],
            form: Form::Clone3 { args, size: size.min(KNOWN as u64) },
        })
    }

    /// Whether the C library's `fork` can perform this request.
    fn is_plain_fork(&self) -> bool {
        self.flags & !PLAIN_FORK == 0 && self.flags & 0xff == libc::SIGCHLD as u64
    }

    /// The host's system call. It has the guest's flags, but not the guest's stack and TLS, which
    /// [`Request::enter_child`] writes into the child's context. `stack` (base and size) and `tls`
    /// are the host's. `buffer` gets clone3's arguments and must live until the call is over.
    fn host_call(
        &self,
        stack: Option<(u64, u64)>,
        tls: Option<u64>,
        buffer: &mut [u64; ARGS_WORDS],
    ) -> Call {
        // A child clears its word itself when it ends (`System::clear_tid`). Only for a vfork child
        // the kernel does it.
        let is_vfork = self.flags & (CLONE_VM | CLONE_VFORK) == CLONE_VM | CLONE_VFORK;
        let flags = self.flags & !CLONE_SETTLS & !if is_vfork { 0 } else { CLONE_CHILD_CLEARTID };
        let flags = flags | tls.map_or(0, |_| CLONE_SETTLS);
        let tls = tls.unwrap_or(0);
        let (base, size) = stack.unwrap_or((0, 0));
        match self.form {
            Form::Clone { parent_tid, child_tid } => {
                Call::new(libc::SYS_clone, &[flags, base + size, parent_tid, child_tid, tls])
            }
            Form::Clone3 { args, size: bytes } => {
                *buffer = args;
                buffer[word::FLAGS] = flags;
                buffer[word::STACK] = base;
                buffer[word::STACK_SIZE] = size;
                buffer[word::TLS] = tls;
                Call::new(libc::SYS_clone3, &[buffer.as_ptr() as u64, bytes])
            }
        }
    }

    /// The addresses at which the child's id is written and the word that is cleared at its end.
    fn identity(&self) -> Identity {
        let (parent, child) = match self.form {
            Form::Clone { parent_tid, child_tid } => (parent_tid, child_tid),
            Form::Clone3 { args, .. } => (args[word::PARENT_TID], args[word::CHILD_TID]),
        };
        let given = |flag: u64, address: u64| if self.flags & flag != 0 { address } else { 0 };
        Identity {
            write_to: [given(CLONE_PARENT_SETTID, parent), given(CLONE_CHILD_SETTID, child)],
            clear_at_end: given(CLONE_CHILD_CLEARTID, child),
            unshared: (!self.flags & UNSHARABLE) as i32,
        }
    }

    /// Whether a thread with these flags is refused, by the kernel or because it is not
    /// implemented.
    fn is_impossible_thread(&self) -> bool {
        let signal = match self.form {
            Form::Clone { .. } => false,
            Form::Clone3 { args, .. } => args[word::EXIT_SIGNAL] != 0,
        };
        let needed = CLONE_VM | CLONE_SIGHAND;
        signal || self.flags & needed != needed || self.flags & NOT_FOR_THREADS != 0
    }

    /// Changes `context`, a copy of the parent's registers, into the child's.
    fn enter_child(&self, context: &mut ThreadContext) {
        if let Some(stack) = self.stack {
            context.gpr[4] = stack;
        }
        if self.flags & CLONE_SETTLS != 0 {
            context.fs_base = self.tls;
        }
        context.gpr[0] = 0;
        context.gpr[1] = context.rip;
        context.gpr[11] = context.rflags;
    }
}

/// The host stack of a vfork child.
struct ChildStack {
    mapping: u64,
}

impl ChildStack {
    fn new() -> Option<ChildStack> {
        Some(ChildStack { mapping: map_above_guard(CHILD_STACK)? })
    }

    fn base_and_size(&self) -> (u64, u64) {
        (self.mapping + GUARD as u64, CHILD_STACK as u64)
    }
}

impl Drop for ChildStack {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value, and the child that ran on it is gone.
        unsafe { libc::munmap(self.mapping as *mut libc::c_void, GUARD + CHILD_STACK) };
    }
}

/// The data with which a vfork child starts. It lies on the parent's stack.
#[repr(C)]
struct Child<'a> {
    start: SpawnStart,
    context: Box<ThreadContext>,
    system: Box<System>,
    engine: &'a mut dyn Engine,
    clear_handlers: bool,
}

/// The child's first function.
///
/// # Safety
/// `start` is the first field of a [`Child`] that no other thread accesses while the child runs.
unsafe extern "C" fn child_main(start: *mut SpawnStart) -> ! {
    // SAFETY: the caller's promise; the parent sleeps.
    let child = unsafe { &mut *start.cast::<Child<'_>>() };
    if child.clear_handlers {
        child.system.clear_handlers();
    }
    signal::set_kernel_mask(signal::host_mask(child.system.mask));
    child.engine.run_vfork_child(&mut child.context, &mut child.system)
}

impl System {
    pub(crate) fn clone_call(
        &mut self,
        context: &mut ThreadContext,
        engine: &mut dyn Engine,
        call: &Call,
    ) -> Done {
        let request = match Request::parse(call) {
            Ok(request) => request,
            Err(errno) => return Done::error(errno),
        };
        if request.flags & CLONE_THREAD != 0 {
            return self.thread(context, engine, &request);
        }
        // Also in the child, which begins with a copy of this.
        let _rest = (!self.process.is_borrower()).then(helper::rest);
        match request.flags & (CLONE_VM | CLONE_VFORK) {
            CLONE_VM => self.companion(context, engine, &request),
            flags if flags & CLONE_VM != 0 => self.vfork(context, engine, &request),
            _ => self.fork(context, engine, &request),
        }
    }

    fn fork(
        &mut self,
        context: &mut ThreadContext,
        engine: &mut dyn Engine,
        request: &Request,
    ) -> Done {
        self.disown_all(engine);
        // The child forgets accepted signals, since they are its parent's. A signal that was sent
        // to the child must not be accepted before that.
        let Some(closed) = Closed::close(context, Extent::All) else { return Done::Restart };
        let threaded = self.process.threads().ever();
        let alone = threaded && request.is_plain_fork();
        let done = if threaded { self.fork_alone(engine, request) } else { self.fork_raw(request) };
        // The C library's fork writes no ids; the raw call does.
        let [parent_tid, child_tid] = if alone { request.identity().write_to } else { [0; 2] };
        let write = |address: u64, tid: i64| {
            if address != 0 {
                // The kernel ignores a bad address, too.
                let _ = guest_write(address, &(tid as i32).to_le_bytes());
            }
        };
        if done != Done::Value(0) {
            closed.open(signal::host_mask(self.mask));
            if let Done::Value(pid @ 1..) = done {
                write(parent_tid, pid);
            }
            return done;
        }
        self.clear_at_end = request.identity().clear_at_end;
        self.companion_seat = None;
        self.forget_accepted(context);
        self.samples.forget();
        self.forget_dispatch();
        signal::set_kernel_mask(!SYNCHRONOUS);
        write(child_tid, i64::from(std::process::id()));
        self.forget_report();
        if request.flags & CLONE_CLEAR_SIGHAND != 0 {
            self.clear_handlers();
        }
        engine.after_fork_child(context);
        request.enter_child(context);
        closed.open(signal::host_mask(self.mask));
        Done::Registers
    }

    fn fork_raw(&self, request: &Request) -> Done {
        let mut buffer = [0; ARGS_WORDS];
        self.pass(&request.host_call(None, None, &mut buffer))
    }

    /// Forks while other threads may run in the host. The calling thread holds every lock, and the
    /// C library's fork takes the library's own. So the child finds all of them free.
    fn fork_alone(&self, engine: &mut dyn Engine, request: &Request) -> Done {
        let is_plain = request.is_plain_fork();
        let mut done = Done::Value(0);
        helper::while_locked(|| {
            self.process.with_locks(|| {
                engine.with_locks(&mut || {
                    // A fork with unusual flags does not take the C library's locks: if another
                    // thread is in the allocator, the child may hang. No known program makes such a
                    // fork while it has threads.
                    done =
                        if is_plain { Done::Value(library_fork()) } else { self.fork_raw(request) };
                });
            });
        });
        if done == Done::Value(0) {
            self.process.threads().after_fork_child();
        }
        done
    }

    fn thread(
        &mut self,
        context: &ThreadContext,
        engine: &mut dyn Engine,
        request: &Request,
    ) -> Done {
        if request.is_impossible_thread() {
            return Done::error(libc::EINVAL);
        }
        if self.process.is_borrower() {
            return Done::error(libc::EAGAIN);
        }
        // The new host thread inherits the mask that is set here.
        let Some(closed) = Closed::close(context, Extent::Asynchronous) else {
            return Done::Restart;
        };
        engine.private_memory_lost();
        let made = match engine.new_thread(&|range| self.protect(range)) {
            Some(body) => self.make_thread(context, body, request.identity(), |context| {
                request.enter_child(context)
            }),
            None => Err(libc::EAGAIN),
        };
        closed.open(signal::host_mask(self.mask));
        made.map_or_else(Done::error, |tid| Done::Value(i64::from(tid)))
    }

    /// Makes a process that shares this one's memory and runs at the same time.
    fn companion(
        &mut self,
        context: &mut ThreadContext,
        engine: &mut dyn Engine,
        request: &Request,
    ) -> Done {
        if request.flags & CLONE_NEWPID != 0 {
            // Threads signal each other by their ids, which differ between the namespaces.
            return Done::error(libc::EINVAL);
        }
        let Some(closed) = Closed::close(context, Extent::Asynchronous) else {
            return Done::Restart;
        };
        engine.private_memory_lost();
        helper::turn_off();
        self.share_memory();
        let body = engine.new_thread(&|range| self.protect(range));
        // No signal may come before the child has its own context in GS.
        signal::set_kernel_mask(!0);
        let seat = body.and_then(|body| {
            Some((body, self.process.companion_seats().take(|range| self.protect(range))?))
        });
        // Making the donor of a new seat has made the C library install handlers of its own.
        self.take_back_library_signals();
        let done = seat.map_or(Done::error(libc::EAGAIN), |(body, seat)| {
            let is_set = |flag: u64| request.flags & flag != 0;
            let in_common =
                InCommon { actions: is_set(CLONE_SIGHAND), descriptors: is_set(CLONE_FILES) };
            let system = self.for_companion(in_common, request.identity().clear_at_end);
            // The lock of the report is held until the child has been made: so the descriptor that
            // the child inherits still has this number.
            let report = self.process.report();
            let unwanted =
                report.as_ref().map(Report::descriptor).filter(|_| !in_common.descriptors);
            let start =
                system.settle_in(&seat, body, is_set(CLONE_CLEAR_SIGHAND), unwanted, |child| {
                    copy_registers(context, child);
                    request.enter_child(child);
                });
            let mut buffer = [0; ARGS_WORDS];
            let call =
                request.host_call(Some(seat.base_and_size()), Some(seat.fs_base()), &mut buffer);
            // SAFETY: stack and thread-local storage belong to the seat, which is the child's now,
            // and `start` stays until the child has gone.
            let result = unsafe { entry::spawn(&call, start) };
            if result < 0 {
                seat.release();
            }
            Done::Value(result)
        });
        closed.open(signal::host_mask(self.mask));
        done
    }

    fn vfork(
        &mut self,
        context: &mut ThreadContext,
        engine: &mut dyn Engine,
        request: &Request,
    ) -> Done {
        let Some(stack) = ChildStack::new() else { return Done::error(libc::ENOMEM) };
        let mut child = Child {
            start: SpawnStart { context: std::ptr::null_mut(), entry: child_main },
            context: copy_of(context),
            system: self.for_vfork_child(request.flags & CLONE_SIGHAND != 0),
            engine,
            clear_handlers: request.flags & CLONE_CLEAR_SIGHAND != 0,
        };
        request.enter_child(&mut child.context);
        child.system.attach(&mut child.context);
        child.start.context = &raw mut *child.context;
        // No signal may come before the child has its own context in GS. None may have been
        // accepted either, because the parent sleeps and could not deliver it.
        let Some(closed) = Closed::close(context, Extent::All) else { return Done::Restart };
        let mut buffer = [0; ARGS_WORDS];
        let call = request.host_call(Some(stack.base_and_size()), None, &mut buffer);
        let child_address = &raw mut child;
        // SAFETY: the stack is new, and this function's frame outlives the child: CLONE_VFORK makes
        // the call return when the child has exited or executed another program.
        let result = self
            .process
            .threads()
            .stand_still(|| unsafe { entry::spawn(&call, child_address.cast()) });
        child.engine.vfork_child_gone();
        closed.open(signal::host_mask(self.mask));
        Done::Value(result)
    }
}

/// The C library's fork, with the result of the raw system call: an id, 0, or a negative errno.
fn library_fork() -> i64 {
    // SAFETY: the child goes on with copies of everything; this thread holds every lock of the
    // translator's.
    match unsafe { libc::fork() } {
        -1 => -i64::from(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EAGAIN)),
        pid => i64::from(pid),
    }
}

/// A new context with a copy of the guest's registers.
fn copy_of(context: &ThreadContext) -> Box<ThreadContext> {
    let mut copy = ThreadContext::new();
    copy_registers(context, &mut copy);
    copy
}

/// Copies the guest's registers. The other fields of a context belong to the thread that runs on
/// it.
pub(super) fn copy_registers(context: &ThreadContext, copy: &mut ThreadContext) {
    copy.gpr = context.gpr;
    copy.rip = context.rip;
    copy.rflags = context.rflags;
    copy.fs_base = context.fs_base;
    copy.gs_base = context.gs_base;
    copy.xstate.0 = context.xstate.0;
    copy.x87_is_initial = 0;
    (copy.x87_pc, copy.x87_data) = (context.x87_pc, context.x87_data);
    copy.x87_data_after = context.x87_data_after;
    // The new thread inherits the other protection-key rights in the register PKRU.
    copy.withheld_rights = context.withheld_rights;
}

#[cfg(test)]
mod tests;
