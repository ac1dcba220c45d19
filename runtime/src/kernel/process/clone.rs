//! `fork`, `vfork`, `clone`, `clone3`.
//!
//! * A child with memory of its own (fork) returns from the very same system call on a copy of
//!   everything.
//! * A child that borrows its parent's memory while the parent sleeps (vfork, posix_spawn) runs on
//!   a host stack and a context of its own, with copies of what the kernel copies for it. It
//!   allocates from the common heap, frees nothing that the parent allocated, and ends without
//!   destructors. The parent frees the child's memory when it wakes.
//! * A thread ([`super::thread`]) shares everything. It performs itself what the kernel would do
//!   for a new thread: it writes its id, and notes the word to clear at its end.
//! * A process that shares memory and runs at the same time ([`super::companion`]) has a host
//!   stack, thread-local storage, a dispatcher and a context of its own.
//!
//! The guest's calling thread executes all of this, outside native code. Locks: those of
//! [`Process`](super::Process) where a fork must find them free.
//!
//! Example: `posix_spawn` calls `clone(CLONE_VM | CLONE_VFORK)`. The child gets a host stack and a
//! context, is interpreted, and calls execve; the parent wakes, unmaps the stack and goes on.

use std::sync::atomic::Ordering;

use dynasour_guest::ThreadContext;

use crate::kernel::entry::{self, Call, SpawnStart};
use crate::kernel::process::guest_access::guest_write;
use crate::kernel::process::report::Report;
use crate::kernel::process::{Done, Engine, System};
use crate::kernel::signal::{self, FIVE};

use super::shared::InCommon;
use super::thread::Identity;

/// Bytes of a vfork child's host stack.
const CHILD_STACK: usize = 1 << 20;
/// Bytes of the inaccessible page below that stack.
const GUARD: usize = 4096;

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
/// The flags of `unshare` that a new thread may set.
const UNSHARABLE: u64 = (libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SYSVSEM) as u64;
/// Flags that the kernel refuses for threads, or that are refused here: a pidfd, namespaces.
const NOT_FOR_THREADS: u64 = (libc::CLONE_PIDFD
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u32 as u64
    | CLONE_CLEAR_SIGHAND;
/// Flags that the C library's fork sets, or that are emulated here after it.
const PLAIN_FORK: u64 = CLONE_PARENT_SETTID
    | CLONE_CHILD_SETTID
    | CLONE_CHILD_CLEARTID
    | CLONE_SETTLS
    | libc::SIGCHLD as u64;

/// `struct clone_args`, words in order.
const ARGS_WORDS: usize = 11;
/// The size of its first published version.
const ARGS_SMALLEST: u64 = 64;
/// Its words in that version.
mod word {
    pub const FLAGS: usize = 0;
    pub const CHILD_TID: usize = 2;
    pub const PARENT_TID: usize = 3;
    pub const EXIT_SIGNAL: usize = 4;
    pub const STACK: usize = 5;
    pub const STACK_SIZE: usize = 6;
    pub const TLS: usize = 7;
}

/// The guest's request, of any of the four calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Request {
    flags: u64,
    /// The child's stack pointer, if not the parent's.
    stack: Option<u64>,
    tls: u64,
    form: Form,
}

/// The call by which the kernel is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    /// `clone` with these addresses for the parent's and the child's thread id.
    Clone { parent_tid: u64, child_tid: u64 },
    /// `clone3` with the guest's arguments and their size.
    Clone3 { args: [u64; ARGS_WORDS], size: u64 },
}

impl Request {
    /// Understands the guest's call; the error is an errno.
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

    /// Can the C library's fork perform this request?
    fn is_plain_fork(&self) -> bool {
        self.flags & !PLAIN_FORK == 0 && self.flags & 0xff == libc::SIGCHLD as u64
    }

    /// Makes the call with the guest's flags but without its stack and TLS, which are the context's
    /// business; `stack` and `tls` are the host's. `buffer` holds clone3's arguments and must live
    /// until the call is over.
    fn host_call(
        &self,
        stack: Option<(u64, u64)>,
        tls: Option<u64>,
        buffer: &mut [u64; ARGS_WORDS],
    ) -> Call {
        // The child itself clears the word at its end. A child that sleeps its parent cannot: there
        // the kernel does.
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

    /// Where the parent and the child want the child's id, and what is to be cleared at its end; 0
    /// where not.
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

    /// Is a thread with these flags refused, by the kernel or here?
    fn is_impossible_thread(&self) -> bool {
        let signal = match self.form {
            Form::Clone { .. } => false,
            Form::Clone3 { args, .. } => args[word::EXIT_SIGNAL] != 0,
        };
        let needed = CLONE_VM | CLONE_SIGHAND;
        signal || self.flags & needed != needed || self.flags & NOT_FOR_THREADS != 0
    }

    /// Sets the registers in which the child differs from its parent.
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

/// Memory for a child's host stack.
struct ChildStack {
    mapping: u64,
}

impl ChildStack {
    fn new() -> Option<ChildStack> {
        // SAFETY: a fresh mapping, of which the lowest page is made inaccessible.
        unsafe {
            let mapping = libc::mmap(
                std::ptr::null_mut(),
                GUARD + CHILD_STACK,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            );
            if mapping == libc::MAP_FAILED {
                return None;
            }
            libc::mprotect(mapping, GUARD, libc::PROT_NONE);
            Some(ChildStack { mapping: mapping as u64 })
        }
    }

    fn base_and_size(&self) -> (u64, u64) {
        (self.mapping + GUARD as u64, CHILD_STACK as u64)
    }
}

impl Drop for ChildStack {
    fn drop(&mut self) {
        // SAFETY: this type made the mapping, and the child that ran on it has ended.
        unsafe { libc::munmap(self.mapping as *mut libc::c_void, GUARD + CHILD_STACK) };
    }
}

/// The data that a vfork child starts with. The parent owns it.
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
/// `start` is the first field of a [`Child`] that no other thread uses while the child runs.
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
        // The child forgets the signals that its parent has accepted. Signals sent to the child
        // must not be among them.
        signal::set_kernel_mask(!0);
        if context.pending.load(Ordering::Relaxed) != 0 {
            // Everything stays blocked; delivering sets the mask.
            return Done::Restart;
        }
        let threaded = self.process.threads().ever();
        let alone = threaded && request.is_plain_fork();
        let done = if threaded { self.fork_alone(engine, request) } else { self.fork_raw(request) };
        // The C library's fork does not do this.
        let [parent_tid, child_tid] = if alone { request.identity().write_to } else { [0; 2] };
        let write = |place: u64, tid: i64| {
            if place != 0 {
                // The kernel, too, ignores a bad address here.
                let _ = guest_write(place, &(tid as i32).to_le_bytes());
            }
        };
        if done != Done::Value(0) {
            signal::set_kernel_mask(signal::host_mask(self.mask));
            if let Done::Value(pid @ 1..) = done {
                write(parent_tid, pid);
            }
            return done;
        }
        self.clear_at_end = request.identity().clear_at_end;
        self.place = None;
        self.forget_accepted(context);
        self.forget_dispatch();
        signal::set_kernel_mask(!FIVE);
        write(child_tid, i64::from(std::process::id()));
        self.forget_report();
        if request.flags & CLONE_CLEAR_SIGHAND != 0 {
            self.clear_handlers();
        }
        engine.after_fork_child();
        request.enter_child(context);
        signal::set_kernel_mask(signal::host_mask(self.mask));
        Done::Registers
    }

    fn fork_raw(&self, request: &Request) -> Done {
        let mut buffer = [0; ARGS_WORDS];
        self.pass(&request.host_call(None, None, &mut buffer))
    }

    /// Forks while other threads may be anywhere in the host: with every lock held, the C library's
    /// by its own fork, so that the child finds all of them free.
    fn fork_alone(&self, engine: &mut dyn Engine, request: &Request) -> Done {
        let is_plain = request.is_plain_fork();
        let mut done = Done::Value(0);
        self.process.with_locks(|| {
            engine.with_locks(&mut || {
                // With other flags than fork's the allocator's lock may be held by another thread,
                // and the child would wait for ever (no known program does this with threads).
                done = if is_plain { Done::Value(library_fork()) } else { self.fork_raw(request) };
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
        // The host thread begins with the mask that is set here.
        signal::set_kernel_mask(!FIVE);
        if context.pending.load(Ordering::Relaxed) != 0 {
            // Delivering sets the mask.
            return Done::Restart;
        }
        engine.private_memory_lost();
        let made = match engine.new_thread(&|range| self.protect(range)) {
            Some(body) => self.make_thread(context, body, request.identity(), |context| {
                request.enter_child(context)
            }),
            None => Err(libc::EAGAIN),
        };
        signal::set_kernel_mask(signal::host_mask(self.mask));
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
            // Threads signal each other by their ids, which differ between PID namespaces.
            return Done::error(libc::EINVAL);
        }
        signal::set_kernel_mask(!FIVE);
        if context.pending.load(Ordering::Relaxed) != 0 {
            // Delivering sets the mask.
            return Done::Restart;
        }
        engine.private_memory_lost();
        self.share_memory();
        let body = engine.new_thread(&|range| self.protect(range));
        // Until the child has its own context in GS no signal may come.
        signal::set_kernel_mask(!0);
        let place = body.and_then(|body| {
            Some((body, self.process.places().take(|range| self.protect(range))?))
        });
        // Making a place creates a thread by the C library, which replaces dispositions.
        self.take_back_library_signals();
        let done = place.map_or(Done::error(libc::EAGAIN), |(body, place)| {
            let is_set = |flag: u64| request.flags & flag != 0;
            let in_common =
                InCommon { actions: is_set(CLONE_SIGHAND), descriptors: is_set(CLONE_FILES) };
            let system = self.for_companion(in_common, request.identity().clear_at_end);
            // It stays where it is until the child has its copy.
            let report = self.process.report();
            let unwanted =
                report.as_ref().map(Report::descriptor).filter(|_| !in_common.descriptors);
            let start =
                system.settle_in(&place, body, is_set(CLONE_CLEAR_SIGHAND), unwanted, |child| {
                    copy_registers(context, child);
                    request.enter_child(child);
                });
            let mut buffer = [0; ARGS_WORDS];
            let call =
                request.host_call(Some(place.base_and_size()), Some(place.fs_base()), &mut buffer);
            // SAFETY: stack and thread-local storage belong to the place, which the child owns now,
            // like its start data.
            let result = unsafe { entry::spawn(&call, start) };
            if result < 0 {
                place.release();
            }
            Done::Value(result)
        });
        signal::set_kernel_mask(signal::host_mask(self.mask));
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
        // Until the child has its own context in GS no signal may come; and none may have been
        // accepted.
        signal::set_kernel_mask(!0);
        if context.pending.load(Ordering::Relaxed) != 0 {
            // Everything stays blocked; delivering sets the mask.
            return Done::Restart;
        }
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
        signal::set_kernel_mask(signal::host_mask(self.mask));
        Done::Value(result)
    }
}

/// The C library's fork: as the system call returns.
fn library_fork() -> i64 {
    // SAFETY: the child continues with copies of everything, and this thread holds every lock of
    // the host.
    match unsafe { libc::fork() } {
        -1 => -i64::from(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EAGAIN)),
        pid => i64::from(pid),
    }
}

/// A copy of the registers.
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
    // The new thread inherits the other rights in the processor's register.
    copy.withheld_rights = context.withheld_rights;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_understood() {
        let fork = Request::parse(&Call::new(libc::SYS_fork, &[])).expect("valid");
        assert_eq!((fork.flags, fork.stack), (libc::SIGCHLD as u64, None));
        let vfork = Request::parse(&Call::new(libc::SYS_vfork, &[])).expect("valid");
        assert_eq!(vfork.flags, CLONE_VM | CLONE_VFORK | libc::SIGCHLD as u64);
        let clone = Call::new(libc::SYS_clone, &[CLONE_SETTLS | 17, 0x8000, 1, 2, 3]);
        let clone = Request::parse(&clone).expect("valid");
        assert_eq!((clone.stack, clone.tls), (Some(0x8000), 3));
        let mut buffer = [0; ARGS_WORDS];
        assert_eq!(
            clone.host_call(None, None, &mut buffer),
            Call::new(libc::SYS_clone, &[17, 0, 1, 2])
        );
        assert_eq!(
            clone.host_call(Some((0x1000, 0x100)), Some(5), &mut buffer),
            Call::new(libc::SYS_clone, &[CLONE_SETTLS | 17, 0x1100, 1, 2, 5])
        );
    }

    #[test]
    fn clone3_is_checked_as_the_kernel_does() {
        let mut args = [CLONE_VM | CLONE_VFORK, 0, 0, 0, 17, 0x8000, 0x100, 7, 0, 0, 0, 0];
        let parse = |args: &[u64; 12], size: u64| {
            Request::parse(&Call::new(libc::SYS_clone3, &[args.as_ptr() as u64, size]))
        };
        let request = parse(&args, 88).expect("valid");
        assert_eq!((request.stack, request.tls), (Some(0x8100), 7));
        let mut buffer = [0; ARGS_WORDS];
        request.host_call(Some((0x1000, 0x200)), None, &mut buffer);
        assert_eq!(buffer, [CLONE_VM | CLONE_VFORK, 0, 0, 0, 17, 0x1000, 0x200, 0, 0, 0, 0]);
        assert_eq!(parse(&args, 96), Ok(request));
        assert_eq!(parse(&args, 63), Err(libc::EINVAL));
        assert_eq!(parse(&args, 5000), Err(libc::E2BIG));
        args[11] = 1;
        assert_eq!(parse(&args, 96), Err(libc::E2BIG));
        args[word::STACK_SIZE] = 0;
        assert_eq!(parse(&args, 88), Err(libc::EINVAL));
    }

    #[test]
    fn the_child_returns_zero_on_its_own_stack() {
        let mut context = ThreadContext::new();
        (context.rip, context.gpr[4], context.fs_base) = (0x1000, 0x2000, 0x3000);
        let request = Request::parse(&Call::new(libc::SYS_clone, &[CLONE_SETTLS, 0x8000, 0, 0, 9]))
            .expect("valid");
        request.enter_child(&mut context);
        assert_eq!((context.gpr[0], context.gpr[4], context.fs_base), (0, 0x8000, 9));
        assert_eq!((context.gpr[1], context.gpr[11]), (0x1000, context.rflags));
    }
}
