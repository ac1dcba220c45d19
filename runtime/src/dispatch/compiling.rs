//! Compiling what was planned: on the thread itself, or on the helper thread
//! ([`crate::kernel::process::helper`]) while the guest goes on.
//!
//! ```text
//!   thread                                   helper
//!   plan ── Compilation ──► submit ────────► optimise, generate code
//!     │                       the guest          │
//!     │ refused               goes on            ▼
//!     ▼                          ▼           Inbox, `Peer::notify`
//!   optimise, generate code ► install ◄──────────┘
//! ```
//!
//! While a head's trace is compiled, the head is not recorded again by the same thread, and an exit that
//! gets a side trace asks for none. What the thread or the guest does meanwhile may make the plan stale;
//! `install` finds that out.
//!
//! While a race is measured on the thread, a trace of another head is *held back* until the race is over: it would
//! change what is measured.
//!
//! Data: [`Compilations`], part of the thread's [`Dispatcher`]; an [`Inbox`] that it shares with the
//! helper, behind a lock that nobody holds while taking another; the helper's working memory. A path and
//! a version belong to whoever compiles them. If the thread ends meanwhile, the next thread that uses its
//! dispatcher installs the trace.
//!
//! Example: the loop at 0x1000 was recorded in 50 µs. The helper compiles it in 4 ms, during which its
//! blocks run; then a signal brings the thread out of them, which installs the trace.

use super::Dispatcher;
use super::footprint::NotedCode;
use super::fragments::{Draft, Failure, Plan, SideRequest};
use super::machine::Machine;
use super::peers::Peer;
use crate::config::{CompileThreads, RunConfig};
use crate::kernel::process::helper::{self, Job};
use crate::memory;
use crate::observe::profile::{Phase, during};
use crate::sync::lock;
use dynasour_emitter::codegen::{Allocator, CompiledCode};
use dynasour_ir::Version;
use dynasour_tracer::Path;
use rustc_hash::FxHashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long a slow helper thread waits before it delivers ([`CompileThreads::Slow`]).
const SLOW: Duration = Duration::from_millis(10);

/// The helper's working memory for generating code, kept from thread to thread.
static ALLOCATOR: Mutex<Option<Allocator>> = Mutex::new(None);

/// A recorded path that is to be compiled.
pub struct Compilation {
    pub plan: Plan,
    pub path: Path,
    pub draft: Draft,
    /// The exit for which it was recorded.
    pub side: Option<SideRequest>,
}

/// A path that was compiled, or that could not be.
pub struct Compiled {
    pub plan: Plan,
    pub path: Path,
    pub code: Result<(Version, CompiledCode), Failure>,
    pub side: Option<SideRequest>,
}

impl Compilation {
    fn compile(
        self,
        config: &RunConfig,
        code: &NotedCode,
        read: fn(u64, u32) -> Option<u64>,
        allocator: &mut Allocator,
    ) -> Compiled {
        let Compilation { mut plan, path, draft, side } = self;
        let code = plan.optimise(draft, &path, config, code, read).and_then(|version| {
            let code = during(Phase::Emit, || plan.code(&version, allocator, config))?;
            plan.verify_code(&version, &code, &path, config, read);
            Ok((version, code))
        });
        Compiled { plan, path, code, side }
    }

    /// There was no time to compile it.
    fn given_up(self) -> Compiled {
        let Compilation { plan, path, side, .. } = self;
        Compiled { plan, path, code: Err(Failure::Stale), side }
    }
}

/// What the helper has compiled for a thread.
#[derive(Default)]
struct Inbox {
    /// Is there anything in `compiled`?
    is_ready: AtomicBool,
    compiled: Mutex<Vec<Compiled>>,
}

/// The paths of a thread that the helper compiles.
#[derive(Default)]
pub(super) struct Compilations {
    heads: FxHashSet<u64>,
    exits: FxHashSet<SideRequest>,
    inbox: Arc<Inbox>,
    /// What was compiled, and is installed when the race under way is over.
    held_back: Vec<Compiled>,
}

impl Compilations {
    /// Is nothing compiled?
    fn is_empty(&self) -> bool {
        self.heads.is_empty() && self.exits.is_empty()
    }

    /// Is no path compiled, or held back, that becomes a version of a region?
    pub fn has_no_head(&self) -> bool {
        self.heads.is_empty() && self.held_back.is_empty()
    }

    /// Is a path from `head` compiled, or held back, that becomes a version of its region?
    pub fn has_head(&self, head: u64) -> bool {
        self.heads.contains(&head) || self.held_back.iter().any(|held| held.path.head == head)
    }

    /// Is a side trace compiled for this exit?
    pub fn has_exit(&self, side: &SideRequest) -> bool {
        self.exits.contains(side)
    }

    fn begin(&mut self, head: u64, side: Option<SideRequest>) {
        match side {
            Some(side) => drop(self.exits.insert(side)),
            None => drop(self.heads.insert(head)),
        }
    }

    fn end(&mut self, head: u64, side: Option<SideRequest>) {
        match side {
            Some(side) => drop(self.exits.remove(&side)),
            None => drop(self.heads.remove(&head)),
        }
    }
}

/// A compilation for the helper.
struct HelperJob {
    compilation: Compilation,
    machine: &'static Machine,
    threads: CompileThreads,
    inbox: Arc<Inbox>,
    peer: Arc<Peer>,
}

impl Job for HelperJob {
    fn run(self: Box<Self>) {
        let HelperJob { compilation, machine, threads, inbox, peer } = *self;
        let mut allocator = lock(&ALLOCATOR).take().unwrap_or_default();
        let code = NotedCode::new(&machine.footprint, machine.pages.clone());
        let read = memory::read_word_by_kernel;
        let compiled = compilation.compile(&machine.config, &code, read, &mut allocator);
        *lock(&ALLOCATOR) = Some(allocator);
        if threads == CompileThreads::Slow {
            std::thread::sleep(SLOW);
        }
        deliver(&inbox, compiled);
        if machine.peers.serves_faults() {
            // It may wait in one, and comes out by itself some time.
            peer.leave_note();
        } else {
            peer.notify();
        }
    }

    fn drop_it(self: Box<Self>) {
        deliver(&self.inbox, self.compilation.given_up());
        self.peer.leave_note();
    }
}

fn deliver(inbox: &Inbox, compiled: Compiled) {
    lock(&inbox.compiled).push(compiled);
    inbox.is_ready.store(true, Ordering::Release);
}

impl Dispatcher {
    /// Compiles what was planned, now or on the helper thread.
    pub(super) fn compile(&mut self, compilation: Compilation) {
        let machine = self.machine;
        let threads = machine.config.compile_threads();
        if threads == CompileThreads::None {
            return self.compile_now(compilation);
        }
        let (head, side) = (compilation.path.head, compilation.side);
        let (inbox, peer) = (self.compilations.inbox.clone(), self.peer.clone());
        let job = HelperJob { compilation, machine, threads, inbox, peer };
        match helper::submit(job) {
            Ok(()) => {
                self.effort.note_submitted();
                self.compilations.begin(head, side);
            }
            Err(job) => self.compile_now(job.compilation),
        }
        while threads == CompileThreads::Wait && !self.compilations.is_empty() {
            std::thread::yield_now();
            self.take_compiled();
        }
    }

    fn compile_now(&mut self, compilation: Compilation) {
        let machine = self.machine;
        let code = NotedCode::new(&machine.footprint, machine.pages.clone());
        let read = memory::read_word;
        let compiled = compilation.compile(&machine.config, &code, read, &mut self.allocator);
        self.install(compiled);
    }

    /// Installs what the helper has compiled. The thread is outside, and drops afterwards what was posted
    /// to it.
    pub(super) fn take_compiled(&mut self) {
        self.peer.accept_note();
        if !self.compilations.inbox.is_ready.swap(false, Ordering::Acquire) {
            return;
        }
        let all = std::mem::take(&mut *lock(&self.compilations.inbox.compiled));
        for compiled in all {
            self.compilations.end(compiled.path.head, compiled.side);
            let nanoseconds = compiled.plan.times.optimise + compiled.plan.times.emit;
            self.effort.note_elsewhere(nanoseconds, compiled.code.is_ok());
            if let Some(mut fragments) = self.machine.fragments() {
                fragments.stats.helped += 1;
                fragments.stats.helper_nanoseconds += nanoseconds;
            }
            let is_new = compiled.code.is_ok() && compiled.side.is_none();
            match is_new && self.race_excludes(compiled.path.head) {
                true => self.compilations.held_back.push(compiled),
                false => self.install(compiled),
            }
        }
    }

    /// Installs what was held back for a race, if that is over. The thread is outside.
    pub(super) fn install_held_back(&mut self) {
        let held_back = &mut self.compilations.held_back;
        let may_install = |compiled: &mut Compiled| !self.racing.excludes(compiled.path.head);
        let now: Vec<Compiled> = held_back.extract_if(.., may_install).collect();
        now.into_iter().for_each(|compiled| self.install(compiled));
    }
}
