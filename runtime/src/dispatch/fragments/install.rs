//! A recorded path becomes a fragment: plans what is to be compiled, compiles it, and publishes the
//! fragment.
//!
//! Data: [`Plan`], which belongs to the thread that compiles. The caller holds the lock of the
//! fragments in [`Fragments::plan`] and [`Fragments::install`]. Between them it holds no lock:
//! [`Plan::build`] builds the version, [`Plan::optimise`] optimises it, and [`Plan::code`] generates its
//! code. The latter two may run on another thread ([`crate::dispatch::compiling`]).
//!
//! Invariants: a plan is *stale* if meanwhile code was touched or everything was dropped
//! (`generation` has changed), or another thread has made the region's first fragment; a stale plan
//! is not installed. A fragment has its record in [`super::lives`], so that invalidation finds it,
//! before anything leads to it. After that nothing fails.
//!
//! Example: the path of a loop at 0x1000 was recorded. `plan` notes that the region has no fragment
//! yet, and what may be assumed. `build`, `optimise` and `code` make the code. `install`
//! places the code, notes from which bytes it was made, and makes links lead there.

use super::links::exits::Event;
use super::race::Starts;
use super::{Fragments, Role, SideRequest, telling};
use crate::config::{RunConfig, Stage};
use crate::dispatch::footprint::NotedCode;
use crate::dispatch::validation;
use crate::observe::attempts::Outcome;
use crate::observe::census::CompileTimes;
use crate::observe::certificate::{Certificate, Proof};
use crate::observe::events;
use crate::observe::guest_code::Origins;
use crate::observe::ledger::{BuiltText, Made};
use crate::observe::linker;
use crate::observe::profile::{Phase, during};
use crate::observe::watch::GuestPcs;
use dynasour_emitter::codegen::{self, Allocator, CompiledCode, Request};
use dynasour_emitter::{EmitError, EntryState, ExitId};
use dynasour_ir::opt::{self, OptOptions, OptStats, Shape};
use dynasour_ir::predict::NativeResults;
use dynasour_ir::validate::Start;
use dynasour_ir::{Context, Fact, Term, Version};
use dynasour_tracer::worth;
use dynasour_tracer::{AbortReason, Assumption, Built, Path, SpeculationPolicy, TraceShape, build};
use std::cell::RefCell;
use std::time::Instant;

/// Loops of interpreted programs with more IR instructions than this are not peeled (guess: the copy
/// doubles the time to compile them; without it nothing that does not change leaves the loop).
const MOST_PEELED_OF_GUEST_LOOPS: usize = 6000;

/// What a trace is compiled for, and under which assumptions.
pub struct Plan {
    name: String,
    facts: Vec<Fact>,
    /// The region of its head had no fragment when the plan was made.
    is_first_version: bool,
    /// It is to race, and so the starts of its iterations are counted.
    race: Option<Starts>,
    /// The exit whose side trace it becomes; none if it becomes a version of the region.
    side_exit: Option<ExitId>,
    /// The facts that code generation needs from the emitter, as they were when the plan was made.
    request: Request,
    /// [`Fragments::generation`] when the plan was made.
    generation: u64,
    /// The time that each part of the compilation has taken.
    pub times: CompileTimes,
    /// What its version assumes beyond the path.
    assumptions: Vec<Assumption>,
    /// The version as built, if the ledger of a counting run wants it.
    built: Option<BuiltText>,
    /// What was compared, with `--verify-traces`: of the version, and of its code.
    certificates: [Option<Certificate>; 2],
    /// What was proven, with `--prove-traces`: of the version, and of its code.
    proofs: [Option<Proof>; 2],
    /// What the code is to be compared with.
    original: Option<Original>,
    /// For which guest instructions its version was built, if its source lines are wanted.
    origins: Option<Origins>,
}

/// A version before the passes, and what they were told.
struct Original {
    built: Version,
    constants: Vec<(u64, u32)>,
    results: NativeResults,
    start: Start,
}

impl Original {
    fn recording<'a>(
        &'a self,
        path: &'a Path,
        read: fn(u64, u32) -> Option<u64>,
    ) -> validation::Recording<'a> {
        let Original { built, constants, results, start } = self;
        validation::Recording { path, built, results, constants, read, start }
    }
}

/// A version as it was built.
pub struct Draft {
    version: Version,
    /// What natives were observed to compute.
    native_results: NativeResults,
}

/// Why a recorded path did not become a fragment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failure {
    /// The code cache is full.
    Full,
    /// Its guest code may have changed, its exit is gone, or another thread has made a fragment
    /// first.
    Stale,
    /// The trace cannot be compiled or is not worth it.
    Refused(AbortReason),
}

impl Fragments {
    /// Plans the compilation of a recorded path; `side` is the exit for which it was recorded.
    /// After this the caller checks that no changed code was posted to it: earlier changes do not
    /// make the plan stale.
    ///
    /// # Errors
    /// The path is not to be compiled.
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
        if self.in_place && path.sets_x87_pointer() {
            return Err(Failure::Refused(AbortReason::X87InPlace));
        }
        // The recorder limits the number of loops of an interpreted program.
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
        // If no code can be made for the exit's state, the exit gets no side trace of its own. The
        // path may still become a version of the region.
        let own = side.and_then(|s| {
            Some((s.exit, self.emitter.request(s.pc, EntryState::FromExit(s.exit)).ok()?))
        });
        let (side_exit, mut request) = match own {
            Some((exit, request)) => (Some(exit), request),
            None => (
                None,
                self.emitter
                    .request(path.head, EntryState::Canonical)
                    .map_err(|_| Failure::Stale)?,
            ),
        };
        let mut facts = request.known().facts;
        facts.extend(self.private_memory.then_some(Fact::PrivateMemory));
        facts.sort_unstable();
        let is_first_version = !self.regions.contains_key(&path.head);
        let race = match side_exit {
            None if is_first_version => self.enter_race(path, &mut request, config),
            _ => None,
        };
        Ok(Plan {
            name: format!("t{number}"),
            facts,
            is_first_version,
            race,
            side_exit,
            request,
            generation: self.generation,
            times: CompileTimes::default(),
            assumptions: Vec::new(),
            built: None,
            certificates: [None; 2],
            proofs: [None, None],
            original: None,
            origins: None,
        })
    }

    /// Places the code of a recorded path's optimised version, and publishes the fragment.
    ///
    /// # Errors
    /// The plan is stale, the code is not worth having, or the cache is full.
    pub fn install(
        &mut self,
        mut plan: Plan,
        version: &Version,
        code: CompiledCode,
        path: &Path,
        config: &RunConfig,
    ) -> Result<(), Failure> {
        let is_first_version = !self.regions.contains_key(&path.head);
        if plan.generation != self.generation || plan.is_first_version != is_first_version {
            return Err(Failure::Stale);
        }
        if plan.side_exit.is_none() && self.would_precede_racer(path) {
            return Err(Failure::Stale);
        }
        let cost = code.cost();
        if !self.pays(cost, path, &plan) {
            return Err(Failure::Refused(AbortReason::NoGain));
        }
        let pcs = plan.origins.take().map_or_else(GuestPcs::default, |mut origins| {
            origins.after(version);
            GuestPcs::of(code.positions(), &origins.of_last())
        });
        let guards = telling::guards(version, &code);
        let placing = Instant::now();
        let id = self.emitter.place(&plan.request, code).map_err(|error| match error {
            e if e.is_full() => Failure::Full,
            EmitError::Stale => Failure::Stale,
            e => refused(config, version, &e),
        })?;
        plan.times.emit += nanoseconds(placing);
        let side_exit = plan.side_exit;
        let (from, alias_guards) = (side_exit, plan.is_first_version || path.guest.is_some());
        self.note_made(
            id,
            Made {
                version,
                path,
                from,
                times: plan.times,
                built: plan.built,
                certificates: plan.certificates,
                proofs: plan.proofs.clone(),
                alias_guards,
            },
            &pcs,
        );
        log(config, Stage::Code, || self.emitter.listing(id).unwrap_or_default());
        // Invalidation knows the fragment before anything leads to it.
        let size = self
            .emitter
            .fragment(id)
            .map_or(0, |f| (f.hot.end - f.hot.start) + (f.cold.end - f.cold.start));
        let role = side_exit.map_or(Role::Region(path.head), Role::SideTrace);
        let assumptions = std::mem::take(&mut plan.assumptions);
        self.lives.add(id, role, path, &version.context, assumptions, size);
        match side_exit {
            None => {
                self.stats.attempts.tried(path.head, Outcome::Made);
                self.add_version(path.head, id);
                self.note_version(path.head);
                if let Some(starts) = plan.race {
                    let promised = |judge: worth::Judge| judge.pays(path, cost, false, false);
                    self.note_racer(path.head, id, starts, self.judge.is_none_or(promised));
                }
            }
            Some(exit) => {
                self.exits.change(exit, Event::Attach);
                self.emitter.attach(exit, id).expect("the fragment was compiled for this exit");
                *self.side_traces.entry(path.head).or_default() += 1;
                self.note_side_trace(id);
            }
        }
        if self.chaos.is_none()
            && path.shape == TraceShape::Linear
            && let Some(last) = path.steps.last()
        {
            // The end of the trace leads to its last target, which is a head from now on.
            self.emitter.make_head(last.next);
        }
        if path.guest.is_some() {
            self.dispatching.insert(path.head);
        }
        let branches = version.blocks.iter().any(|b| matches!(b.term, Term::Branch { .. }));
        match path.shape {
            TraceShape::Loop => {
                self.stats.loop_fragments += 1;
                self.stats.branching_loops += u64::from(branches);
            }
            TraceShape::Linear => self.stats.branching_functions += u64::from(branches),
        }
        self.tell_made(id, version, path, side_exit, plan.times, guards);
        if let Some(exit) = side_exit {
            self.tell_linked(exit, id);
        }
        self.stats.fragments += 1;
        self.stats.linker_fragments += u64::from(linker::has(path.head));
        self.stats.trace_instructions += path.instructions();
        self.stats.code_bytes += size;
        self.stats.compile_nanoseconds += plan.times.compiling();
        let [version, code] = plan.certificates;
        version.iter().for_each(|certificate| self.stats.verified.add(certificate));
        code.iter().for_each(|certificate| self.stats.verified_code.add(certificate));
        let [version, code] = &plan.proofs;
        version.iter().for_each(|proof| self.stats.proofs.add(proof));
        code.iter().for_each(|proof| self.stats.code_proofs.add(proof));
        self.links_changed();
        Ok(())
    }

    /// Is code of this cost, compiled from `path`, worth having?
    fn pays(&self, cost: u32, path: &Path, plan: &Plan) -> bool {
        // A path to a dispatching head leads from one loop of an interpreted program to the next.
        // It is not judged.
        let between = path.steps.last().is_some_and(|last| self.dispatching.contains(&last.next));
        let Some(judge) = self.judge.filter(|_| !between) else { return true };
        let pays = judge.pays(path, cost, plan.side_exit.is_some(), plan.race.is_some());
        if self.logs.worth {
            eprintln!(
                "dynasour: {:#x}, {:?} {}: {pays}",
                path.head,
                path.shape,
                judge.figures(path, cost)
            );
        }
        pays
    }
}

impl Plan {
    /// Builds the path's version. It needs no lock.
    ///
    /// # Errors
    /// The path cannot be built.
    pub fn build(
        &mut self,
        path: &Path,
        config: &RunConfig,
        policy: &dyn SpeculationPolicy,
    ) -> Result<Draft, Failure> {
        let context = Context { facts: self.facts.clone() };
        let building = Instant::now();
        let built = during(Phase::Record, || build::build(path, &self.name, context, policy));
        let Built { version, assumptions, native_results, pcs } =
            built.map_err(|e| Failure::Refused(e.0))?;
        self.assumptions = assumptions;
        self.times.build = nanoseconds(building);
        self.origins = config.jitdump.as_ref().map(|_| Origins::built(&version, &pcs));
        self.built = config
            .count
            .as_ref()
            .filter(|count| count.detail)
            .map(|_| BuiltText { text: version.to_string(), pcs });
        log(config, Stage::Trace, || version.to_string());
        Ok(Draft { version, native_results })
    }

    /// Optimises the version that [`Plan::build`] has made of the path. It needs no lock, and may run on
    /// another thread; `read` reads a word of guest memory there, and `code` knows what is constant.
    ///
    /// # Errors
    /// The version contradicts itself.
    pub fn optimise(
        &mut self,
        draft: Draft,
        path: &Path,
        config: &RunConfig,
        code: &NotedCode,
        read: fn(u64, u32) -> Option<u64>,
    ) -> Result<Version, Failure> {
        let Draft { mut version, native_results } = draft;
        let alias_guards = self.is_first_version || path.guest.is_some();
        let (passes, skip) = (config.passes.clone(), config.skip_passes.clone());
        let entry = Some(path.entry.with(&read));
        let constants = RefCell::new(Vec::new());
        let constant = |address, size| {
            let value = code.constant_by(path.head, (address, size), read);
            constants.borrow_mut().extend(value.map(|_| (address, size)));
            value
        };
        let built = (config.verify_traces || config.prove_traces).then(|| version.clone());
        let mut options = OptOptions {
            passes,
            skip,
            alias_guards,
            registry: Some(&config.registry),
            entry,
            native_results,
            constant_memory: Some(&constant),
            ..OptOptions::default()
        };
        if path.guest.is_some() {
            options.peel_limit = MOST_PEELED_OF_GUEST_LOOPS;
        }
        let optimising = Instant::now();
        let ran = during(Phase::Optimise, || passed(config, &mut version, &options));
        self.times.optimise = nanoseconds(optimising);
        log(config, Stage::Opt, || version.to_string());
        if let Some(broken) = &ran.broken {
            events::broken(broken);
            return Err(Failure::Refused(AbortReason::BrokenPass));
        }
        if path.guest.is_some() && opt::normalise(&mut version) == Some(Shape::Linear) {
            // What it assumes does not hold in its own second iteration.
            return Err(Failure::Refused(AbortReason::Inconsistent));
        }
        if let Some(built) = built {
            let passes: Vec<&str> = ran.passes.iter().map(|pass| pass.name).collect();
            let constants = constants.borrow().clone();
            let (results, start) = (options.native_results.clone(), Start::default());
            let original = Original { built, constants, results, start };
            let recording = original.recording(path, read);
            if config.verify_traces {
                let compared = recording.certify(&version, &passes, &options);
                self.certificates[0] = Some(validation::or_end(compared));
            }
            if config.prove_traces {
                let proof = recording.prove(&version);
                self.proofs[0] = Some(proof.map_err(|()| Failure::Refused(AbortReason::Refuted))?);
            }
            self.original = config.verify_traces.then_some(original);
        }
        Ok(version)
    }

    /// Compares the code that [`Plan::code`] has made with the recorded path, with `--verify-traces`, and tries to
    /// prove that it does what the version does, with `--prove-traces`. Does not return if they disagree.
    pub fn verify_code(
        &mut self,
        version: &Version,
        code: &CompiledCode,
        path: &Path,
        config: &RunConfig,
        read: fn(u64, u32) -> Option<u64>,
    ) {
        if config.prove_traces {
            self.proofs[1] = Some(validation::prove_code(version, (code, &self.request)));
        }
        let Some(original) = self.original.take() else { return };
        let compared = original.recording(path, read).certify_code(version, (code, &self.request));
        self.certificates[1] = Some(validation::or_end(compared));
    }

    /// Generates the version's code for the state of the plan's exit. If that cannot be done, or if
    /// there is no such exit, generates it for a version of the region. It needs no lock.
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
        let knows_registers = self.facts.iter().any(|fact| fact.register().is_some());
        if compiled.is_err() && !knows_registers && self.side_exit.take().is_some() {
            // Perhaps too many values were live at once. A version of the region does not hold the
            // exit's values besides its own. It must not rely on them either.
            self.request = self.request.canonical();
            compiled = codegen::compile(version, &self.request, allocator);
        }
        self.times.emit = nanoseconds(emitting);
        compiled.map_err(|error| refused(config, version, &error))
    }
}

/// Runs the passes of the configuration's placement. If it is the user's, or has passes of his, the result is verified
/// once more, since a placement may do anything to a version.
fn passed(config: &RunConfig, version: &mut Version, options: &OptOptions) -> OptStats {
    if !config.has_own_code() {
        return config.placement.optimise(version, options);
    }
    let mut stats = OptStats::default();
    let placed = opt::guarded(config.placement.name(), version, |version| {
        stats = config.placement.optimise(version, options);
        0
    });
    stats.broken = stats.broken.take().or(placed.err());
    stats
}

/// The failure of a version that the emitter refuses.
fn refused(config: &RunConfig, version: &Version, error: &dyn std::error::Error) -> Failure {
    log(config, Stage::Record, || format!("{}: {error}", version.name));
    Failure::Refused(AbortReason::Emitter)
}

/// Nanoseconds since then.
fn nanoseconds(since: Instant) -> u64 {
    since.elapsed().as_nanos() as u64
}

/// Writes a line about a stage that the user wants to see.
fn log(config: &RunConfig, stage: Stage, text: impl FnOnce() -> String) {
    if config.log.contains(&stage) {
        eprintln!("dynasour: {}", text());
    }
}
