//! Tests of fork, vfork, threads and execve with a guest that has no code: the test itself makes
//! the guest's system calls. Each test runs in a process of its own, because it changes signal
//! dispositions, memory and threads.

use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

use dynasour_guest::ThreadContext;

use super::exec::Follow;
use super::translator::Translator;
use super::{Ending, Process};
use crate::kernel::entry::Call;
use crate::kernel::process::{Outcome, System};
use crate::kernel::signal::{self, set_of};
use crate::testing::{AFTER_SYSCALL, HANDLER, Machine, Notes, in_child};

const CLONE_VM_VFORK: u64 = (libc::CLONE_VM | libc::CLONE_VFORK) as u64;
const ENOENT: i64 = -(libc::ENOENT as i64);

fn with_machine(body: impl FnOnce(&mut Machine)) {
    let status = in_child(|| {
        body(&mut Machine::start());
        0
    });
    assert_eq!(status, 0);
}

fn exit_status_of(pid: i64) -> i32 {
    let mut status = 0;
    // SAFETY: writes the status.
    assert_eq!(i64::from(unsafe { libc::waitpid(pid as i32, &mut status, 0) }), pid);
    if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 1000 + libc::WTERMSIG(status) }
}

#[test]
fn fork_gives_a_child_of_its_own() {
    with_machine(|m| {
        let mut child_tid = 0u32;
        let flags =
            libc::CLONE_CHILD_SETTID as u64 | libc::CLONE_SETTLS as u64 | libc::SIGCHLD as u64;
        let args = [flags, 0x8000, 0, &raw mut child_tid as u64, 0x7777];
        assert_eq!(m.call(libc::SYS_clone, &args), Outcome::Continue);
        if m.context.gpr[0] == 0 {
            let c = &m.context;
            let right = m.engine.forked
                && (c.gpr[4], c.fs_base, c.rip) == (0x8000, 0x7777, AFTER_SYSCALL)
                && child_tid != 0
                && crate::kernel::entry::gs_base() == c.this;
            super::exit(if right { 7 } else { 1 });
        }
        let pid = m.context.gpr[0] as i64;
        assert_eq!(exit_status_of(pid), 7);
        assert!(!m.engine.forked);
        assert_eq!((child_tid, m.context.fs_base), (0, 0));
    });
}

static SEEN: AtomicI64 = AtomicI64::new(0);

/// Does what posix_spawn's child does: changes dispositions, fails to execute, reports through
/// shared memory, exits.
fn spawned(context: &mut ThreadContext, system: &mut System) -> i32 {
    let mut engine = Notes::default();
    let mut call = |context: &mut ThreadContext, nr: i64, args: &[u64]| {
        context.gpr[0] = nr as u64;
        for (&arg, register) in args.iter().zip([7, 6, 2, 10]) {
            context.gpr[register] = arg;
        }
        let outcome = system.syscall(context, &mut engine);
        assert_eq!(outcome, Outcome::Continue);
        context.gpr[0] as i64
    };
    let started_right = (context.gpr[0], context.gpr[4]) == (0, 0x9000)
        && crate::kernel::entry::gs_base() == context.this;
    let default = [0u64; 4];
    call(context, libc::SYS_rt_sigaction, &[libc::SIGUSR1 as u64, default.as_ptr() as u64, 0, 8]);
    let mask = set_of(libc::SIGUSR2);
    call(context, libc::SYS_rt_sigprocmask, &[2, &raw const mask as u64, 0, 8]);
    let brk = call(context, libc::SYS_brk, &[0]) as u64;
    call(context, libc::SYS_brk, &[brk + 4096]);
    let argv = [c"gone".as_ptr() as u64, 0];
    let result = call(
        context,
        libc::SYS_execve,
        &[c"/no/such/file".as_ptr() as u64, argv.as_ptr() as u64, 0],
    );
    SEEN.store(result, Ordering::Relaxed);
    if started_right { 5 } else { 6 }
}

#[test]
fn a_spawned_child_borrows_memory_and_nothing_else() {
    with_machine(|m| {
        let follow = Follow { translator: Translator::own(), prefix: vec![], own_options: vec![] };
        Process::set_follow(&mut m.system.process, follow);
        m.engine.child = Some(spawned);
        m.handle(libc::SIGUSR1, 0, 0);
        let brk = m.result(libc::SYS_brk, &[0]);
        for round in 0..3i64 {
            let pid = if round == 0 {
                m.result(libc::SYS_clone, &[CLONE_VM_VFORK | libc::SIGCHLD as u64, 0x9000])
            } else {
                let args = [CLONE_VM_VFORK, 0, 0, 0, libc::SIGCHLD as u64, 0x8000, 0x1000, 0];
                m.result(libc::SYS_clone3, &[args.as_ptr() as u64, 64])
            };
            assert!(pid > 0);
            assert_eq!(exit_status_of(pid), 5);
            assert_eq!(SEEN.swap(0, Ordering::Relaxed), ENOENT);
            // Dispositions and mask are the child's own; the break belongs to the memory.
            assert_eq!(
                m.system.process.action(libc::SIGUSR1).handler,
                HANDLER + libc::SIGUSR1 as u64
            );
            assert_eq!((m.system.mask, signal::kernel_mask()), (0, 0));
            assert_eq!(
                signal::kernel_action(libc::SIGUSR1).handler,
                signal::host_entry::signal_entry()
            );
            assert_eq!(m.result(libc::SYS_brk, &[0]), brk + 4096 * (round + 1));
            assert_eq!(crate::kernel::entry::gs_base(), m.context.this);
        }
        assert_eq!(m.kill(libc::SIGUSR1), Outcome::Continue);
        assert_eq!(m.in_handler(), Some(libc::SIGUSR1));
    });
}

#[test]
fn clear_sighand_keeps_the_six_ours() {
    with_machine(|m| {
        m.engine.child = Some(|_, system| {
            let cleared = !system.process.action(libc::SIGUSR1).is_caught();
            let ours =
                signal::kernel_action(libc::SIGSEGV).handler == signal::host_entry::signal_entry();
            // This access faults, and the handler must find its entry in the fix-up table.
            let fixed = crate::memory::copy_in(8, &mut [0; 4]) == 0;
            i32::from(!(cleared && ours && fixed))
        });
        m.handle(libc::SIGUSR1, 0, 0);
        let args = [CLONE_VM_VFORK | 1 << 32, 0, 0, 0, libc::SIGCHLD as u64, 0, 0, 0];
        let pid = m.result(libc::SYS_clone3, &[args.as_ptr() as u64, 64]);
        assert_eq!(exit_status_of(pid), 0);
        assert!(m.system.process.action(libc::SIGUSR1).is_caught());
    });
}

const THREAD_FLAGS: i32 = libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID;

/// The robust futex that each thread of the test owns when it ends.
static OWNED: AtomicU32 = AtomicU32::new(0);

fn thread(context: &mut ThreadContext, system: &mut System) -> Ending {
    // A robust list of one node. `head` has the distance from the node to its futex.
    let mut node = [0u64, 0];
    let mut head = [&raw const node as u64, 8, 0];
    node[0] = &raw const head as u64;
    // SAFETY: sets this thread's list, which the end of the thread makes the kernel forget.
    let tid = unsafe {
        crate::kernel::entry::raw(&Call::new(
            libc::SYS_set_robust_list,
            &[&raw const head as u64, 24],
        ));
        crate::kernel::entry::raw(&Call::new(libc::SYS_gettid, &[]))
    };
    head[1] = (&raw const OWNED as u64).wrapping_sub(&raw const node as u64);
    let right = (context.gpr[0], context.gpr[4], context.fs_base, context.rip)
        == (0, 0x9000, 0x7777, AFTER_SYSCALL)
        && crate::kernel::entry::gs_base() == context.this
        && system.mask == set_of(libc::SIGUSR2)
        && signal::kernel_mask() == set_of(libc::SIGUSR2);
    OWNED.store(if right { tid as u32 } else { 1 }, Ordering::SeqCst);
    signal::set_kernel_mask(!0);
    assert!(!system.end_thread());
    // From here on the thread uses nothing of its stack.
    std::hint::black_box((node, head));
    Ending::Thread(0)
}

#[test]
fn a_thread_has_an_identity_and_an_end() {
    with_machine(|m| {
        m.engine.thread = Some(thread);
        let mask = set_of(libc::SIGUSR2);
        m.result(libc::SYS_rt_sigprocmask, &[2, &raw const mask as u64, 0, 8]);
        let (parent_tid, child_tid) = (AtomicU32::new(0), AtomicU32::new(7));
        let [parent, child] = [&parent_tid, &child_tid].map(|word| std::ptr::from_ref(word) as u64);
        for round in 0..100 {
            child_tid.store(7, Ordering::SeqCst);
            let tid = if round % 2 == 0 {
                m.result(libc::SYS_clone, &[THREAD_FLAGS as u64, 0x9000, parent, child, 0x7777])
            } else {
                let args = [THREAD_FLAGS as u64, 0, child, parent, 0, 0x8000, 0x1000, 0x7777];
                m.result(libc::SYS_clone3, &[args.as_ptr() as u64, 64])
            };
            assert!(tid > 0 && tid != i64::from(std::process::id()), "{tid}");
            assert_eq!(i64::from(parent_tid.load(Ordering::SeqCst)), tid);
            while child_tid.load(Ordering::SeqCst) != 0 {
                std::thread::yield_now();
            }
            assert_eq!(OWNED.load(Ordering::SeqCst), libc::FUTEX_OWNER_DIED);
            assert_eq!(crate::kernel::entry::gs_base(), m.context.this);
        }
        assert!(m.engine.shared);
        // This thread is the last one to end.
        assert!(m.system.end_thread());
    });
}

#[test]
fn faults_are_served_once_there_is_a_descriptor_for_that() {
    with_machine(|m| {
        assert!(m.result(libc::SYS_userfaultfd, &[u64::MAX]) < 0, "no such flags");
        assert!(!m.engine.served);
        // It may not be allowed here.
        let descriptor = m.result(libc::SYS_userfaultfd, &[libc::O_CLOEXEC as u64]);
        assert_eq!((m.engine.served, m.engine.shared), (descriptor >= 0, descriptor >= 0));
    });
}

#[test]
fn impossible_threads_are_refused() {
    with_machine(|m| {
        let error = -i64::from(libc::EINVAL);
        for missing in [libc::CLONE_VM, libc::CLONE_SIGHAND] {
            assert_eq!(
                m.result(libc::SYS_clone, &[(THREAD_FLAGS & !missing) as u64, 0x8000]),
                error
            );
        }
        assert_eq!(
            m.result(libc::SYS_clone, &[(THREAD_FLAGS | libc::CLONE_NEWUSER) as u64, 0x8000]),
            error
        );
        let memory = -i64::from(libc::EAGAIN);
        assert_eq!(m.result(libc::SYS_clone, &[THREAD_FLAGS as u64, 0x8000]), memory);
        assert_eq!(m.result(libc::SYS_clone, &[libc::CLONE_VM as u64, 0x8000]), memory);
        assert_eq!(m.call(libc::SYS_exit_group, &[3]), Outcome::Exit(3));
        assert_eq!(m.call(libc::SYS_exit, &[4]), Outcome::ThreadExit(4));
    });
}

/// The process executes a shell natively, which checks its mask and dispositions.
#[test]
fn a_native_execve_passes_mask_and_dispositions_on() {
    let run = |body: fn(&mut Machine)| {
        in_child(|| {
            let mut m = Machine::start();
            body(&mut m);
            77
        })
    };
    // The new program must get the guest's mask and dispositions, not the host's.
    let status = run(|m| {
        let ignore = [1u64, 0, 0, 0];
        m.result(libc::SYS_rt_sigaction, &[libc::SIGSEGV as u64, ignore.as_ptr() as u64, 0, 8]);
        let mask = set_of(libc::SIGBUS);
        m.result(libc::SYS_rt_sigprocmask, &[2, &raw const mask as u64, 0, 8]);
        // The shell itself must check the signals. It blocks signals while it starts another
        // program, and that program might ignore some.
        let script = c"while read name value; do case $name:$value in \
            SigBlk::0000000000000040) blocked=yes ;; SigIgn::*[4567cdef]??) ignored=yes ;; \
            esac; done </proc/$$/status; \
            test $blocked$ignored = yesyes";
        let argv = [c"sh".as_ptr(), c"-c".as_ptr(), script.as_ptr(), std::ptr::null()];
        m.call(libc::SYS_execve, &[c"/bin/sh".as_ptr() as u64, argv.as_ptr() as u64, 0]);
    });
    assert_eq!(status, 0);
    // A failed execve changes nothing.
    with_machine(|m| {
        let mask = set_of(libc::SIGBUS);
        m.result(libc::SYS_rt_sigprocmask, &[2, &raw const mask as u64, 0, 8]);
        assert_eq!(m.result(libc::SYS_execve, &[c"/no/such".as_ptr() as u64, 0, 0]), ENOENT);
        assert_eq!(signal::kernel_mask(), 0);
        assert_eq!(m.result(libc::SYS_execve, &[8, 0, 0]), -(libc::EFAULT as i64));
    });
}
