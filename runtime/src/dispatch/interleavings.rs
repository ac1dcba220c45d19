//! Tests of the real code under the interleavings that the model of [`crate::changes`] explores:
//! dispatchers with real interpreters, copied blocks and fragments, real pages and real system
//! calls. A scheduler runs their threads one at a time and tries every schedule with few
//! preemptions.
//!
//! One page holds the code `again: mov eax, N; loop again; ud2`. Each operation that changes the page writes an N of
//! its own. The property: what a call of the code returns must be what the page held at some time
//! since the last operation on it that had completed when the call began.
//!
//! Data: [`World`], what the threads of one schedule share; [`Guest`], one thread of it. The worker
//! threads are kept from schedule to schedule, as making a dispatcher takes long.
//!
//! Example: thread 1 makes the page writable (`Protect(RWX)`) and then calls it; thread 2 calls it,
//! stores a new N, and calls it again. In every schedule the last call of thread 2 returns that N.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use dynasour_guest::ThreadContext;
use dynasour_guest::space::{Brk, PAGE};
use dynasour_ir::Trap;

use super::{Dispatcher, Machine, Stop};
use crate::changes::scheduler::{Scheduler, explore, when_performing};
use crate::changes::{Code, CodePages};
use crate::config::{RaceMode, RunConfig, Sampling, Tier};
use crate::interp;
use crate::kernel::process::{Config, Inherited, Outcome, System};
use crate::kernel::signal::{self, FaultHooks};
use crate::memory;
use crate::sync::lock;
use crate::testing::{AFTER_SYSCALL, in_child, start_with};

const RWX: i32 = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
const RX: i32 = libc::PROT_READ | libc::PROT_EXEC;
const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
const ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
/// The opcode of `mov eax, N`.
const MOV_EAX: u8 = 0xb8;
/// The offset of N in the page.
const VALUE: u64 = 1;
/// The page's code with an N of 0; `loop` is two bytes.
const CODE: [u8; 9] = [MOV_EAX, 0, 0, 0, 0, 0xe2, 0xf9, 0x0f, 0x0b];
/// How often a call goes round the loop. Enough for a fragment to be made and entered.
const ROUNDS: u64 = 40;

const HOOKS: FaultHooks = FaultHooks {
    thunk: interp::thunk_fixup,
    fragment: super::fragment_fault,
    cache_end: super::cache_end,
    accepted: super::signal_accepted,
};

/// An operation of a thread on the page; see the operations of `changes/model/state.rs`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Op {
    Store,
    Call,
    Protect(i32),
    Refused,
    Unmap,
    Map(i32),
    Remap,
    Output,
    HostStore,
}

use Op::{Call, HostStore, Map, Output, Protect, Refused, Remap, Store, Unmap};

impl Op {
    /// May a store to the page, or a call of it, fault because of this operation?
    fn may_forbid(self) -> bool {
        matches!(self, Unmap | Map(_)) || matches!(self, Protect(prot) if prot != RWX)
    }
}

/// What all threads of one schedule share.
struct World {
    /// The page's address.
    page: u64,
    /// A file of 32-bit numbers, the n-th of which is n, for system calls that write to memory.
    numbers: i32,
    /// The N of the next operation.
    next: AtomicU32,
    /// What the page held at each time when all threads stood still.
    held: Mutex<Vec<Option<u32>>>,
    /// The index into `held` from which on the effect of the last completed operation is seen.
    completed: Mutex<usize>,
    /// The first violation of the property.
    wrong: Mutex<Option<String>>,
    /// Does some operation make stores and calls fault, or does the page's first protection?
    may_fault: bool,
}

/// The result of a call of a page without code: it was mapped anew, holds zeros, and its first
/// instruction faults.
const BLANK: u32 = u32::MAX;

/// What a call of the page would return now; none if the page cannot be read.
fn number(page: u64) -> Option<u32> {
    let before = memory::last_fault();
    // SAFETY: the test's own page.
    let (first, number) = unsafe { (memory::load::<u8>(page), memory::load::<u32>(page + VALUE)) };
    memory::note_fault(before);
    match first {
        Ok(MOV_EAX) => number.ok(),
        Ok(_) => Some(BLANK),
        Err(_) => None,
    }
}

impl World {
    fn record_page(&self) {
        lock(&self.held).push(number(self.page));
    }

    fn now(&self) -> usize {
        lock(&self.held).len()
    }

    fn report(&self, what: String) {
        lock(&self.wrong).get_or_insert(what);
    }

    /// An operation whose effect is seen from `since` on has completed.
    fn complete(&self, since: usize) {
        let mut completed = lock(&self.completed);
        *completed = (*completed).max(since);
    }
}

/// One guest thread.
struct Guest {
    world: Arc<World>,
    dispatcher: Dispatcher,
    context: Box<ThreadContext>,
    system: System,
    performed: Arc<AtomicU32>,
}

impl Guest {
    /// The result in rax of a system call that no signal interrupts.
    fn call(&mut self, nr: i64, args: &[u64]) -> i64 {
        loop {
            self.context.pending.store(0, Ordering::SeqCst);
            self.context.rip = AFTER_SYSCALL;
            self.context.gpr[0] = nr as u64;
            for (&arg, register) in args.iter().chain(&[0; 6]).zip([7, 6, 2, 10, 8, 9]) {
                self.context.gpr[register] = arg;
            }
            assert_eq!(
                self.system.syscall(&mut self.context, &mut self.dispatcher),
                Outcome::Continue
            );
            if self.context.rip == AFTER_SYSCALL {
                self.dispatcher.drop_written();
                return self.context.gpr[0] as i64;
            }
        }
    }

    /// Stores `value` to N; false if that faults.
    fn store(&mut self, value: u32) -> bool {
        loop {
            // SAFETY: the test's own page.
            if unsafe { memory::store(self.world.page + VALUE, value) }.is_ok() {
                return true;
            }
            let fault = memory::last_fault();
            if !self.dispatcher.opened_by_fault(&fault) {
                return false;
            }
        }
    }

    /// Calls the code; none if it cannot be fetched.
    fn execute(&mut self) -> Option<u32> {
        self.context.rip = self.world.page;
        self.context.gpr[0] = 0;
        self.context.gpr[1] = ROUNDS;
        loop {
            if !self.dispatcher.peer.enter(&mut self.context) {
                self.dispatcher.forget_posted();
                continue;
            }
            match self.dispatcher.stretch_to_stop(&mut self.context) {
                None => {}
                Some(Stop::Pending) => self.context.pending.store(0, Ordering::SeqCst),
                Some(Stop::Trap { trap: Trap::Undefined, .. }) => {
                    return Some(self.context.gpr[0] as u32);
                }
                Some(Stop::Trap { trap: Trap::Fetch, .. }) => return None,
                Some(Stop::Fault { .. }) => return Some(BLANK),
                Some(_) => panic!("the code does nothing else"),
            }
        }
    }

    fn perform(&mut self, op: Op) {
        let world = self.world.clone();
        let (page, n) = (world.page, world.next.fetch_add(1, Ordering::SeqCst));
        let mut since = None;
        match op {
            Store => match self.store(n) {
                true => since = Some(world.now()),
                false if !world.may_fault => world.report("a store faults".into()),
                false => {}
            },
            HostStore => {
                // SAFETY: the test's own page.
                let done =
                    unsafe { crate::changes::host::copy_out(page + VALUE, &n.to_le_bytes()) };
                if done == 4 {
                    since = Some(world.now());
                } else if !world.may_fault {
                    world.report("a store of the host's fails".into());
                }
                self.dispatcher.drop_written();
            }
            Call => {
                let needed = *lock(&world.completed);
                let seen = self.execute();
                world.record_page();
                let held = lock(&world.held);
                if seen.is_none() && !world.may_fault {
                    world.report("code cannot be fetched".into());
                } else if seen.is_some() && !held[needed.min(held.len() - 1)..].contains(&seen) {
                    world.report(format!(
                        "code returns {seen:?}, the page held {held:?}, {needed} is completed"
                    ));
                }
            }
            Protect(prot) => drop(self.call(libc::SYS_mprotect, &[page, PAGE, prot as u64])),
            Refused => drop(self.call(libc::SYS_mprotect, &[page, PAGE, 0x100])),
            Remap => drop(self.call(libc::SYS_mremap, &[page, PAGE, PAGE, 0])),
            Unmap => {
                self.call(libc::SYS_munmap, &[page, PAGE]);
                since = Some(self.performed.load(Ordering::SeqCst) as usize);
            }
            Map(prot) => {
                let args = [page, PAGE, prot as u64, ANONYMOUS as u64, u64::MAX, 0];
                if self.call(libc::SYS_mmap, &args) == page as i64 {
                    since = Some(self.performed.load(Ordering::SeqCst) as usize);
                }
            }
            Output => {
                let offset = u64::from(n) * 4;
                let read =
                    self.call(libc::SYS_pread64, &[world.numbers as u64, page + VALUE, 4, offset]);
                match read {
                    4 => since = Some(world.now()),
                    _ if !world.may_fault => {
                        world.report(format!("a system call cannot write: {read}"))
                    }
                    _ => {}
                }
            }
        }
        if let Some(since) = since {
            world.complete(since);
        }
    }
}

/// A host thread that performs the operations it is sent.
struct Worker {
    jobs: Sender<(Arc<World>, Arc<Scheduler>, Vec<Op>)>,
    done: Receiver<()>,
}

fn worker(number: usize, machine: &'static Machine, system: System) -> Worker {
    let (jobs, receiver) = channel::<(Arc<World>, Arc<Scheduler>, Vec<Op>)>();
    let (ended, done) = channel();
    std::thread::spawn(move || {
        let mut context = ThreadContext::new();
        // SAFETY: the context outlives the thread's last access to guest memory.
        unsafe { crate::kernel::entry::set_gs_base(&*context) };
        signal::install(HOOKS, &context).expect("memory");
        system.attach(&mut context);
        let dispatcher = Dispatcher::new(machine).expect("memory");
        let performed = Arc::new(AtomicU32::new(0));
        let mut state = Some((dispatcher, context, system));
        while let Ok((world, scheduler, ops)) = receiver.recv() {
            let (dispatcher, context, system) = state.take().expect("it came back");
            let mut guest =
                Guest { world, dispatcher, context, system, performed: performed.clone() };
            // A thread of the last schedule may have interrupted this one when it was done.
            guest.context.pending.store(0, Ordering::SeqCst);
            let (seen, at) = (guest.world.clone(), performed.clone());
            when_performing(move || at.store(seen.now() as u32, Ordering::SeqCst));
            scheduler.run(number, || ops.iter().for_each(|op| guest.perform(*op)));
            state = Some((guest.dispatcher, guest.context, guest.system));
            if ended.send(()).is_err() {
                break;
            }
        }
    });
    Worker { jobs, done }
}

/// The configuration of a test under `tier`.
pub(super) fn config(tier: Tier) -> RunConfig {
    RunConfig {
        tier,
        threshold: Some(1),
        cache_size: 1 << 20,
        returns: Default::default(),
        entry_check: None,
        placement: crate::config::placement::DEFAULT,
        speculation: None,
        registry: Default::default(),
        chaos: None,
        sampling: Sampling::default(),
        race: RaceMode::Off,
        compile_threads: None,
        iterations: None,
        traces_in_place: false,
        log: Default::default(),
        passes: None,
        skip_passes: Vec::new(),
        verify_traces: false,
        prove_traces: false,
        only_traces: None,
        stats: false,
        stats_json: None,
        timeline: false,
        perf_map: false,
        jitdump: None,
        gdb: false,
        count: None,
        follow: false,
        translator: None,
        argv0: None,
        seccomp: None,
        address_space: None,
        program: "guest".into(),
        args: Vec::new(),
        child_options: Vec::new(),
        own_options: Vec::new(),
    }
}

/// Runs every schedule of the programs in a child process, which prints the first violation to
/// stdout and fails. A program is the page's first protection, and the operations of each thread.
fn check_programs(tier: Tier, programs: &[(i32, &[&[Op]])], preemptions: usize) {
    let status = in_child(|| {
        // The alarm that `in_child` has set is for short tests.
        // SAFETY: alarm has no effect on memory.
        unsafe { libc::alarm(600) };
        let pages = Arc::new(CodePages::default());
        let machine = Machine::new(&config(tier), || 0..0, pages.clone()).expect("memory");
        crate::changes::host::install(&pages);
        pages.set_threaded();
        let brk = Brk::new(0).expect("room for a break");
        let mut context = ThreadContext::new();
        let config = Config { pages, ..Config::alone(c"/bin/guest".to_owned(), brk) };
        let mut system = System::new(Inherited::record(), config);
        start_with(&mut system, &mut context, HOOKS);
        let workers: Vec<Worker> =
            (0..3).map(|n| worker(n, machine, system.for_thread(0))).collect();
        let mut schedules = 0;
        for &(prot, threads) in programs {
            match explore_program(machine, &workers, prot, threads, preemptions) {
                Ok(n) => schedules += n,
                Err(what) => {
                    println!("{threads:?}: {what}");
                    return 1;
                }
            }
        }
        println!(
            "{tier}: {} programs, {schedules} schedules of at most {preemptions} preemptions",
            programs.len()
        );
        let stats = machine.stats();
        // Native code must have run, or its tests show nothing.
        assert_eq!(stats.copied_blocks > 0, tier == Tier::Copy || tier == Tier::Full);
        let left: u64 = stats.deopts.values().sum();
        println!(
            "{} blocks, {} fragments, left {left} times",
            stats.copied_blocks, stats.fragments
        );
        assert_eq!(left > 0, tier == Tier::Full);
        0
    });
    assert_eq!(status, 0);
}

fn explore_program(
    machine: &'static Machine,
    workers: &[Worker],
    prot: i32,
    threads: &[&[Op]],
    preemptions: usize,
) -> Result<usize, String> {
    let page = fresh_page();
    let numbers = numbers();
    let world = std::cell::RefCell::new(None::<Arc<World>>);
    let may_fault =
        prot != RWX || threads.iter().flat_map(|ops| ops.iter()).any(|op| op.may_forbid());
    let begin = || {
        reset(machine, page, prot);
        let new = Arc::new(World {
            page,
            numbers,
            next: AtomicU32::new(1),
            held: Mutex::default(),
            completed: Mutex::new(0),
            wrong: Mutex::default(),
            may_fault,
        });
        *world.borrow_mut() = Some(new.clone());
        let scheduler = Scheduler::new(threads.len());
        for (worker, ops) in workers.iter().zip(threads) {
            worker
                .jobs
                .send((new.clone(), scheduler.clone(), ops.to_vec()))
                .expect("the worker waits");
        }
        (scheduler, Box::new(move || new.record_page()) as Box<dyn FnMut()>)
    };
    let end = || {
        workers
            .iter()
            .zip(threads)
            .for_each(|(worker, _)| worker.done.recv().expect("the worker has ended its job"));
        let world = world.borrow().clone().expect("it was made");
        let wrong = lock(&world.wrong).take();
        wrong.map_or(Ok(()), Err)
    };
    explore(preemptions, begin, end)
}

/// The address of a new page.
fn fresh_page() -> u64 {
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            PAGE as usize,
            RWX,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    assert_ne!(page, libc::MAP_FAILED);
    page as u64
}

fn numbers() -> i32 {
    let bytes: Vec<u8> = (0..256u32).flat_map(u32::to_le_bytes).collect();
    // SAFETY: a new file, into which `bytes` are written as they are.
    unsafe {
        let file = libc::memfd_create(c"numbers".as_ptr(), 0);
        assert_eq!(libc::write(file, bytes.as_ptr().cast(), bytes.len()), bytes.len() as isize);
        file
    }
}

/// The [`Code`] of a change that no guest thread makes: all threads drop their code.
struct NoThread(&'static Machine);

impl Code for NoThread {
    fn drop_code(&mut self, range: std::ops::Range<u64>) {
        self.0.footprint.forget(&range);
        // No thread has this peer, so the range is posted to all of them.
        self.0.invalidate(&super::peers::Peer::default(), &range);
    }
}

/// Makes the page what it is before each schedule.
fn reset(machine: &'static Machine, page: u64, prot: i32) {
    let mut no_thread = NoThread(machine);
    let range = page..page + PAGE;
    let change = machine.pages.announce([range.clone()]).quiesce(&mut no_thread);
    let (performed, ()) = change.perform(|| {
        // SAFETY: the test's own page.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            assert_eq!(
                libc::mmap(page as *mut libc::c_void, PAGE as usize, RWX, flags, -1, 0) as u64,
                page
            );
            (page as *mut [u8; 9]).write(CODE);
            assert_eq!(libc::mprotect(page as *mut libc::c_void, PAGE as usize, prot), 0);
        }
    });
    performed.publish(&mut no_thread, [crate::changes::News::Mapped(range, None)]);
    // What earlier schedules left in the cache does not decide what happens in the next one.
    machine.drop_all(&super::peers::Peer::default());
}

/// Each operation against calls and stores of another thread.
fn check(tier: Tier, preemptions: usize) {
    let others = [
        Protect(RWX),
        Protect(RX),
        Protect(RW),
        Refused,
        Unmap,
        Map(RWX),
        Remap,
        Store,
        Call,
        Output,
        HostStore,
    ];
    let first: Vec<[Op; 2]> = others.iter().map(|op| [*op, Call]).collect();
    let second: [&[Op]; 2] = [&[Call, Store, Call], &[Call, HostStore, Call]];
    let threads: Vec<Vec<&[Op]>> = first
        .iter()
        .flat_map(|first| second.iter().map(move |second| vec![&first[..], *second]))
        .collect();
    let programs: Vec<(i32, &[&[Op]])> =
        threads.iter().flat_map(|threads| [(RWX, &threads[..]), (RX, &threads[..])]).collect();
    check_programs(tier, &programs, preemptions);
}

#[test]
fn interpreters_keep_the_invariant() {
    check(Tier::Interp, 2);
}

#[test]
fn copied_blocks_keep_the_invariant() {
    check(Tier::Copy, 2);
}

#[test]
fn fragments_keep_the_invariant() {
    check(Tier::Full, 1);
}

fn check_three_threads(tier: Tier) {
    let programs: &[(i32, &[&[Op]])] = &[
        (RWX, &[&[Protect(RWX)], &[Remap], &[Call, Store, Call]]),
        (RWX, &[&[Unmap, Map(RWX)], &[Call], &[Call, Store, Call]]),
        (RWX, &[&[Unmap], &[Map(RW), Protect(RX), Call], &[Call]]),
        (RWX, &[&[Output], &[Store], &[Call, Store, Call]]),
    ];
    check_programs(tier, programs, 1);
}

#[test]
fn three_interpreters_keep_the_invariant() {
    check_three_threads(Tier::Interp);
}

#[test]
fn three_threads_with_copied_blocks_keep_the_invariant() {
    check_three_threads(Tier::Copy);
}
