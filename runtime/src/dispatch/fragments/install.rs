//! Traces become fragments: what is to be compiled, compiling it, and publishing the fragment.
//!
//! [`Fragments::plan`] and [`Fragments::install`] take the lock of the fragments. Building and
//! optimising the version between them ([`Plan::version`]), and generating its code
//! ([`Plan::code`]), need none. A plan is stale when code
//! was touched, everything dropped, or a fragment made for its pc meanwhile (`generation`).
//!
//! Invariant: a fragment is known to invalidation (its [`Sources`](super::Sources) are noted)
//! before anything leads to it; after that nothing fails.
//!
//! Example: the path of a loop at 0x1000 was recorded. `plan` says that the region has no fragment
//! yet and what may be assumed; `version` builds and optimises; `code` generates code; `install`
//! places it, notes from which bytes it was made, and leads links there.

use super::links::exits::Event;
use super::{Fragments, Role, SideRequest};
use crate::config::{RunConfig, Stage};
use crate::memory;
use crate::observe::census::CompileTimes;
use crate::observe::ledger::Made;
use crate::observe::profile::{Phase, during};
use dynasour_emitter::codegen::{self, Allocator, CompiledCode, Request};
use dynasour_emitter::{EmitError, EntryState, ExitId};
use dynasour_ir::opt::OptOptions;
use dynasour_ir::{Context, Fact, Version};
use dynasour_tracer::{AbortReason, Path, SpeculationPolicy, TraceShape, build, worth};
use std::time::Instant;

/// What a trace is compiled for.
pub struct Plan {
    name: String,
    facts: Vec<Fact>,
    /// Whether its head has no fragment yet.
    first: bool,
    side: Option<ExitId>,
    /// What the emitter was when the plan was made.
    request: Request,
    generation: u64,
    start: Instant,
    /// How long its parts have taken.
    pub times: CompileTimes,
    /// The version as built, if the book of a counting run wants it.
    built: Option<String>,
}

/// Why a trace came to nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failure {
    /// The cache is full.
    Full,
    /// What it was made from or for is gone, or somebody else was faster.
    Stale,
    /// Something about the trace.
    Refused(AbortReason),
}

impl Fragments {
    /// What a recorded path is to be compiled for; `side` is the exit for which it was recorded.
    /// Whether the path is still good, the caller finds out after this.
    ///
    /// # Errors
    /// Nothing is to be compiled.
    pub fn plan(
        &mut self,
        path: &Path,
        side: Option<SideRequest>,
        config: &RunConfig,
        policy: &dyn SpeculationPolicy,
    ) -> Result<Plan, Failure> {
        if self.retired {
            return Err(Failure::Stale);
        }
        // Loops of an interpreted program are counted by the recorder.
        if path.guest.is_none() && self.is_full(path.head, policy) {
            return Err(Failure::Refused(AbortReason::TooManyVersions));
        }
        let side = side.filter(|s| {
            s.pc == path.head && s.generation == self.generation && self.wants_own_trace(s.pc)
        });
        self.traces += 1;
        let number = self.traces;
        if config.only_traces.as_ref().is_some_and(|only| !only.contains(&number)) {
            return Err(Failure::Refused(AbortReason::NotSelected));
        }
        // An exit that no code can be made for has no trace of its own; the path may still be one
        // of the region.
        let own = side.and_then(|s| {
            Some((s.exit, self.emitter.request(s.pc, EntryState::FromExit(s.exit)).ok()?))
        });
        let (side, request) = match own {
            Some((exit, request)) => (Some(exit), request),
            None => (
                None,
                self.emitter
                    .request(path.head, EntryState::Canonical)
                    .map_err(|_| Failure::Stale)?,
            ),
        };
        Ok(Plan {
            name: format!("t{number}"),
            facts: if self.private_memory { vec![Fact::PrivateMemory] } else { Vec::new() },
            first: !self.regions.contains_key(&path.head),
            side,
            request,
            generation: self.generation,
            start: Instant::now(),
            times: CompileTimes::default(),
            built: None,
        })
    }

    /// Makes a fragment of the code of a recorded path's optimised version.
    ///
    /// # Errors
    /// It came to nothing.
    pub fn install(
        &mut self,
        mut plan: Plan,
        version: &Version,
        code: CompiledCode,
        path: &Path,
        config: &RunConfig,
    ) -> Result<(), Failure> {
        let first = !self.regions.contains_key(&path.head);
        if plan.generation != self.generation || plan.first != first {
            return Err(Failure::Stale);
        }
        if !self.pays(code.cost(), path, plan.side.is_some()) {
            return Err(Failure::Refused(AbortReason::NoGain));
        }
        let placing = Instant::now();
        let id = self.emitter.place(&plan.request, code).map_err(|error| match error {
            e if e.is_full() => Failure::Full,
            EmitError::Stale => Failure::Stale,
            e => refused(config, version, &e),
        })?;
        plan.times.emit += nanoseconds(placing);
        let side = plan.side;
        let (from, alias_guards) = (side, plan.first || path.guest.is_some());
        self.note_made(
            id,
            Made { version, path, from, times: plan.times, built: plan.built, alias_guards },
        );
        log(config, Stage::Code, || self.emitter.listing(id).unwrap_or_default());
        // Invalidation knows the fragment before anything leads to it.
        let size = self
            .emitter
            .fragment(id)
            .map_or(0, |f| (f.hot.end - f.hot.start) + (f.cold.end - f.cold.start));
        self.lives.add(id, side.map_or(Role::Region(path.head), Role::SideTrace), path, size);
        match side {
            None => self.add_version(path.head, id),
            Some(exit) => {
                self.exits.change(exit, Event::Attach);
                self.emitter.attach(exit, id).expect("the fragment was compiled for this exit");
                *self.side_traces.entry(path.head).or_default() += 1;
            }
        }
        if self.chaos.is_none()
            && path.shape == TraceShape::Linear
            && let Some(last) = path.steps.last()
        {
            // Where it came to is where it goes on.
            self.emitter.make_head(last.next);
        }
        if path.shape == TraceShape::Loop {
            self.stats.loop_fragments += 1;
        }
        self.stats.fragments += 1;
        self.stats.trace_instructions +=
            path.steps.iter().map(|s| u64::from(s.block.count)).sum::<u64>();
        self.stats.code_bytes += size;
        self.stats.compile_nanoseconds += plan.start.elapsed().as_nanos() as u64;
        self.links_changed();
        Ok(())
    }

    /// Is code of a path at this cost worth having?
    fn pays(&self, cost: u32, path: &Path, side: bool) -> bool {
        // What is between loops of an interpreted program goes with them.
        let between = path.steps.last().is_some_and(|last| self.dispatching.contains(&last.next));
        if !self.weighs || path.guest.is_some() || between {
            return true;
        }
        let pays = worth::pays(path, cost, side, memory::fetch_code);
        if self.logs.worth {
            eprintln!(
                "dynasour: {:#x}, {:?} {}: {pays}",
                path.head,
                path.shape,
                worth::figures(path, cost, memory::fetch_code)
            );
        }
        pays
    }
}

impl Plan {
    /// Builds the path's version and optimises it: what takes time and needs no lock.
    ///
    /// # Errors
    /// Why that cannot be done.
    pub fn version(
        &mut self,
        path: &Path,
        config: &RunConfig,
        policy: &dyn SpeculationPolicy,
    ) -> Result<Version, Failure> {
        let context = Context { facts: self.facts.clone() };
        let building = Instant::now();
        let built = during(Phase::Record, || build::build(path, &self.name, context, policy));
        let mut version = built.map_err(|e| Failure::Refused(e.0))?;
        self.times.build = nanoseconds(building);
        self.built =
            config.count.as_ref().filter(|count| count.detail).map(|_| version.to_string());
        log(config, Stage::Trace, || version.to_string());
        let alias_guards = self.first || path.guest.is_some();
        let (passes, skip) = (config.passes.clone(), config.skip_passes.clone());
        let options = OptOptions { passes, skip, alias_guards, ..OptOptions::default() };
        let optimising = Instant::now();
        during(Phase::Optimise, || policy.placement().optimise(&mut version, &options));
        self.times.optimise = nanoseconds(optimising);
        log(config, Stage::Opt, || version.to_string());
        Ok(version)
    }

    /// Generates the version's code: for the state of the plan's exit, or, if that cannot be done,
    /// for a fragment of the region. It needs no lock.
    ///
    /// # Errors
    /// The version cannot be compiled.
    pub fn code(
        &mut self,
        version: &Version,
        allocator: &mut Allocator,
        config: &RunConfig,
    ) -> Result<CompiledCode, Failure> {
        let emitting = Instant::now();
        let mut compiled = codegen::compile(version, &self.request, allocator);
        if compiled.is_err() && self.side.take().is_some() {
            // Perhaps too many values were live at once. A fragment of the region does not hold
            // the exit's.
            self.request = self.request.canonical();
            compiled = codegen::compile(version, &self.request, allocator);
        }
        self.times.emit = nanoseconds(emitting);
        compiled.map_err(|error| refused(config, version, &error))
    }
}

/// The emitter refuses the version.
fn refused(config: &RunConfig, version: &Version, error: &dyn std::error::Error) -> Failure {
    log(config, Stage::Record, || format!("{}: {error}", version.name));
    Failure::Refused(AbortReason::Emitter)
}

fn nanoseconds(since: Instant) -> u64 {
    since.elapsed().as_nanos() as u64
}

fn log(config: &RunConfig, stage: Stage, text: impl FnOnce() -> String) {
    if config.log.contains(&stage) {
        eprintln!("dynasour: {}", text());
    }
}
