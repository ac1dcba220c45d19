//! Run programs under a speculative trace JIT, from a program of your own.
//!
//! dynasour runs unmodified x86-64 Linux programs, *guests*, under a translator that records hot paths, optimises them
//! in an IR whose every speculation is an explicit `assume`, and runs the result as native code. This crate is the
//! translator as a library: start a guest, watch what becomes of its hot code, and put your own passes and policies
//! into the pipeline.
//!
//! ```
//! # fn main() -> Result<(), dynasour::SessionError> {
//! use dynasour::{Session, Tier};
//!
//! let outcome = Session::builder("sh").args(["-c", "exit 7"]).tier(Tier::Full).run()?;
//! assert_eq!(outcome.status.code(), Some(7));
//! # Ok(())
//! # }
//! ```
//!
//! # 1. Running
//!
//! [`Session::builder`] names a program: a path, or a command that is searched for in `PATH`. [`SessionBuilder::run`]
//! runs it and returns an [`Outcome`] when it has ended. That a program fails, or is killed by a signal, is a
//! [`status`](Outcome::status), not an error; a program that cannot be started is a [`SessionError::NotStarted`] with
//! the status that a shell would give.
//!
//! A guest owns its process: its addresses, its signals, its descriptors. So a session makes a new process by fork(2),
//! and takes back there what the host has changed since it was executed itself: handlers of signals, the ignored
//! SIGPIPE of Rust programs, the alternate stack, descriptors that are closed by execve. The guest finds what it would
//! find if the host had executed it.
//!
//! ```
//! # fn main() -> Result<(), dynasour::SessionError> {
//! use dynasour::{Session, SessionError};
//!
//! let killed = Session::builder("sh").args(["-c", "kill -TERM $$"]).run()?;
//! assert_eq!(std::os::unix::process::ExitStatusExt::signal(&killed.status), Some(15));
//!
//! match Session::builder("/no/such/program").run() {
//!     Err(SessionError::NotStarted { status: 127, why }) => println!("{why}"),
//!     other => panic!("{other:?}"),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # 2. Options
//!
//! What `dynasour run` takes on its command line are methods of [`SessionBuilder`]: the [`Tier`], the
//! [`threshold`](SessionBuilder::threshold) of trace heads, [`chaos`](SessionBuilder::chaos),
//! [`verify_traces`](SessionBuilder::verify_traces) and so on. `docs/design.md` says what they mean.
//! Everything is checked before anything runs; a name that is mistyped is refused with the one that may be meant:
//!
//! ```
//! # use dynasour::Session;
//! let error = Session::builder("true").policy("hosted").run().unwrap_err();
//! assert!(error.to_string().starts_with("there is no policy `hosted` (did you mean `hoisted`?)"));
//! ```
//!
//! # 3. Events
//!
//! A [`subscriber`](SessionBuilder::subscriber) is called with each [`Event`]: a trace was [made](Event::Made),
//! [linked](Event::Linked), [invalidated](Event::Invalidated), [left](Event::Deopt) before its end; none could be
//! made ([`Event::Failed`]); everything was dropped ([`Event::Flush`]). It runs in the host, on the thread that runs
//! the session, so it may use whatever the host has:
//!
//! ```
//! # fn main() -> Result<(), dynasour::SessionError> {
//! use dynasour::{Event, Session, Tier};
//!
//! let mut traces = Vec::new();
//! let count = "i=0; while [ $i -lt 3000 ]; do i=$((i+1)); done";
//! let session = Session::builder("sh").args(["-c", count]).tier(Tier::Dynamo).threshold(100);
//! let outcome = session
//!     .subscriber(|event| {
//!         if let Event::Made(made) = event {
//!             traces.push((made.pc, made.guest_instructions));
//!         }
//!     })
//!     .run()?;
//! assert!(outcome.status.success() && !traces.is_empty());
//! # Ok(())
//! # }
//! ```
//!
//! No event is lost: the guest waits if the subscriber is slow. Without a subscriber nothing is sent. Example:
//! `examples/event_log.rs`.
//!
//! # 4. Passes
//!
//! A pass is a function over the IR of one trace, a [`Version`](ir::Version). An [`OwnPass`] stands before or behind a
//! built-in pass, or at the end ([`Position`]). It runs in the guest's process, perhaps on several threads:
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use dynasour::{Counters, OwnPass, Position, Session, Tier};
//!
//! let counters = Counters::new()?;
//! let guards = counters.counter("guards")?;
//! let pass = OwnPass::new("count-guards", "counts guards", Position::End, move |version, _| {
//!     let all = version.blocks.iter().flat_map(|block| &block.insts);
//!     guards.add(all.filter(|inst| inst.op == dynasour::ir::Op::Assume).count() as u64);
//!     0 // It has changed nothing.
//! });
//! let count = "i=0; while [ $i -lt 3000 ]; do i=$((i+1)); done";
//! let outcome = Session::builder("sh")
//!     .args(["-c", count])
//!     .tier(Tier::Dynamo)
//!     .threshold(100)
//!     .pass(pass)
//!     .counters(&counters)
//!     .run()?;
//! assert!(outcome.counters["guards"] > 0);
//! # Ok(())
//! # }
//! ```
//!
//! A pass may change the version as it likes, as long as the result is a valid version that does the same. The first is
//! checked, always: if a pass leaves a version that the verifier refuses, or panics, no trace is made of that version;
//! the guest goes on without it, and the run ends with [`SessionError::BrokenPass`]. The second is checked if you ask
//! for it: [`SessionBuilder::verify_traces`] compares each trace with what was recorded. `ir/README.md` explains the
//! IR, `docs/adding-a-pass.md` how a pass is written and tested. Example: `examples/instruction_mix.rs`.
//!
//! # 5. Policies
//!
//! A [`Placement`] decides which values a trace assumes, to which anchors its guards fall back, and which passes it
//! goes through. A [`SpeculationPolicy`] decides what is hot, and how long and how many traces may be. Give a session
//! your own by [`SessionBuilder::placement`] and [`SessionBuilder::speculation`]; the built-in placements have names
//! for [`SessionBuilder::policy`]. Whatever a policy answers, the program does the same.
//!
//! ```
//! # fn main() -> Result<(), dynasour::SessionError> {
//! use dynasour::{Gpr, Placement, RegisterUse, Session, Tier};
//!
//! /// As the default, but nothing is assumed about registers.
//! struct NoRegisters;
//!
//! impl Placement for NoRegisters {
//!     fn name(&self) -> &'static str {
//!         "no-registers"
//!     }
//!     fn about(&self) -> &'static str {
//!         "nothing is assumed about registers"
//!     }
//!     fn speculate_register(&self, _: Gpr, _: u64, _: RegisterUse) -> bool {
//!         false
//!     }
//!     fn passes(&self) -> &'static [&'static str] {
//!         dynasour::ir::opt::PIPELINE
//!     }
//! }
//!
//! let outcome = Session::builder("true").placement(NoRegisters).tier(Tier::Dynamo).run()?;
//! assert!(outcome.status.success());
//! # Ok(())
//! # }
//! ```
//!
//! Example: `examples/policy.rs`.
//!
//! # 6. Counters
//!
//! Passes and policies run in the guest's process, so they cannot change the host's variables. They can add to
//! [`Counters`], which lie in memory that both processes have; [`Outcome::counters`] has their values at the end.
//! [`events::note`] sends text to the subscriber. [`Outcome::statistics`] has the counts of `--stats-json`, and with
//! [`SessionBuilder::count`] [`Outcome::census`] says how often each part of each trace was executed.
//!
//! # 7. Limits
//!
//! * x86-64 Linux, and what `docs/limits.md` says of guests.
//! * *Hosts with several threads.* The new process has one thread, the one that ran the session. A lock that another
//!   thread held at the fork is never released there. The C library's allocator is safe; passes and policies must not
//!   take locks that other threads of the host take (nor print to standard output through Rust's lock).
//! * *Panics.* The first session puts a hook before the host's: a panic in a guest's process is reported without a lock,
//!   one in the host goes to the host's hook.
//! * *Descriptors.* Those of the host that execve would close are closed before the guest starts, so passes and
//!   policies cannot write to the host's files. Those that are not closed on execve are the guest's, too.
//! * *Memory.* What the host has mapped at the fork stays mapped, and is hidden from the guest. In a host thread other
//!   than the main one the translator allocates from that thread's arena, of which 64 MiB are hidden from the guest
//!   (glibc's `HEAP_MAX_SIZE`); a translator that grows larger is visible in `/proc/self/maps`, and a guest that maps
//!   at a fixed address could hit it. Run large guests from the main thread.
//! * *Stack.* The translator's code for the guest's first thread runs on the stack of the thread that runs the session.
//!   Other guest threads get 4 MiB; a thread of Rust's has 2 MiB unless `Builder::stack_size` says otherwise.
//! * *Addresses.* A guest with fixed addresses needs them free. Those of ordinary hosts, which can lie anywhere, are
//!   far from those of ordinary guests; a host that is linked to a fixed low address cannot run a guest linked to the
//!   same one.
//! * *Children.* Processes that the guest forks run under dynasour, and send no events; they add to the same counters.
//!   A program that the guest executes runs natively, unless [`SessionBuilder::follow`] names a `dynasour` command.
//! * *A policy that panics* ends the guest by SIGABRT, except in [`Placement::optimise`], which is treated as a pass.
//! * *A host that is killed* does not kill the guest, whose events are dropped then.

mod session;

pub use dynasour_ir as ir;
pub use dynasour_ir::Gpr;
pub use dynasour_ir::opt::{OwnPass, Position};
pub use dynasour_runtime::config::{Chaos, CompileThreads, RaceMode, Sampling, Tier};
pub use dynasour_runtime::observe::census;
pub use dynasour_runtime::observe::counters::{Counter, Counters};
pub use dynasour_runtime::observe::events::{self, Event};
pub use dynasour_tracer::placement::{BranchAnchor, Placement};
pub use dynasour_tracer::{DefaultPolicy, RegisterUse, SpeculationPolicy};
pub use session::{Outcome, Session, SessionBuilder, SessionError, Statistics};
