//! What a session is to do: [`SessionBuilder`] collects it, and checks it at the end.
//!
//! Data: a [`Plan`], which becomes part of the [`Session`], and errors of single options, which
//! [`SessionBuilder::build`] returns, so that options can be chained. No lock.
//!
//! Example: `Session::builder("gzip").arg("-c").tier(Tier::Direct).run()`.

use super::checks::{self, Chosen};
use super::outcome::{Outcome, SessionError};
use super::{Session, Subscriber};
use dynasour_ir::opt::{OwnPass, Registry};
use dynasour_runtime::config::{Chaos, CompileThreads, RaceMode, Sampling, Speculation, Tier};
use dynasour_runtime::observe::counters::Counters;
use dynasour_runtime::observe::events::Event;
use dynasour_tracer::placement::Placement;
use dynasour_tracer::{DefaultPolicy, SpeculationPolicy};
use std::ffi::{OsStr, OsString};
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::NamedTempFile;

/// Bytes of code cache unless the user gives another size, as for `dynasour run`.
const DEFAULT_CACHE: usize = 64 << 20;
/// The sizes of a code cache, as for `dynasour run --cache-size`.
const CACHE_SIZES: RangeInclusive<usize> = 16 << 10..=512 << 20;

/// A session that is complete.
pub(super) struct Plan {
    pub program: OsString,
    pub args: Vec<OsString>,
    /// Whether the environment of the host is left out.
    pub is_env_clear: bool,
    /// Changes of the environment, in order.
    pub env: Vec<(OsString, Option<OsString>)>,
    pub directory: Option<PathBuf>,
    /// What becomes descriptors 0 to 2.
    pub stdio: [Option<OwnedFd>; 3],
    pub tier: Tier,
    pub threshold: Option<u32>,
    pub cache_size: usize,
    pub placement: Chosen,
    pub speculation: Option<Speculation>,
    pub registry: Arc<Registry>,
    pub passes: Option<Vec<String>>,
    pub skip_passes: Vec<String>,
    pub chaos: Option<Chaos>,
    pub sampling: Sampling,
    pub race: RaceMode,
    pub compile_threads: Option<CompileThreads>,
    pub iterations: Option<u32>,
    pub only_traces: Option<RangeInclusive<u32>>,
    pub makes_traces: bool,
    pub verify_traces: bool,
    /// Does it count; and if so, with the text of traces?
    pub count: Option<bool>,
    pub translator: Option<PathBuf>,
}

impl Plan {
    /// The file to which the guest's process writes its census, if it counts.
    pub(super) fn census_file(&self) -> Result<Option<NamedTempFile>, SessionError> {
        self.count.map(|_| NamedTempFile::new()).transpose().map_err(SessionError::Memory)
    }
}

/// What a [`Session`] is to do. Each method changes one thing; the last one of a kind counts.
pub struct SessionBuilder<'s> {
    plan: Plan,
    policy: Option<String>,
    own_placements: Vec<Arc<dyn Placement>>,
    own_passes: Vec<OwnPass>,
    subscriber: Option<Subscriber<'s>>,
    counters: Option<Counters>,
}

impl<'s> SessionBuilder<'s> {
    pub(super) fn new(program: &OsStr) -> SessionBuilder<'s> {
        let plan = Plan {
            program: program.to_owned(),
            args: Vec::new(),
            is_env_clear: false,
            env: Vec::new(),
            directory: None,
            stdio: [None, None, None],
            tier: Tier::default(),
            threshold: None,
            cache_size: DEFAULT_CACHE,
            placement: Chosen::BuiltIn(dynasour_tracer::placement::DEFAULT),
            speculation: None,
            registry: Arc::default(),
            passes: None,
            skip_passes: Vec::new(),
            chaos: None,
            sampling: Sampling::default(),
            race: RaceMode::default(),
            compile_threads: None,
            iterations: None,
            only_traces: None,
            makes_traces: true,
            verify_traces: false,
            count: None,
            translator: None,
        };
        SessionBuilder {
            plan,
            policy: None,
            own_placements: Vec::new(),
            own_passes: Vec::new(),
            subscriber: None,
            counters: None,
        }
    }

    /// Adds an argument of the program.
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.plan.args.push(arg.as_ref().to_owned());
        self
    }

    /// Adds arguments of the program.
    pub fn args(mut self, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.plan.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Sets a variable of the program's environment, which else is that of the host. With `PATH` the program is
    /// searched for there, too.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        let (name, value) = (name.as_ref().to_owned(), value.as_ref().to_owned());
        self.plan.env.push((name, Some(value)));
        self
    }

    /// Removes a variable from the program's environment.
    pub fn env_remove(mut self, name: impl AsRef<OsStr>) -> Self {
        self.plan.env.push((name.as_ref().to_owned(), None));
        self
    }

    /// Leaves all variables of the host, and those set before, out of the program's environment.
    pub fn env_clear(mut self) -> Self {
        self.plan.is_env_clear = true;
        self.plan.env.clear();
        self
    }

    /// The directory in which the program starts, if not that of the host.
    pub fn current_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.plan.directory = Some(directory.into());
        self
    }

    /// Standard input: a file, the end of a pipe. It is used again if the session runs again.
    pub fn stdin(mut self, from: impl Into<OwnedFd>) -> Self {
        self.plan.stdio[0] = Some(from.into());
        self
    }

    /// Standard output. To read it while the program runs, give it the end of a pipe that another thread reads:
    /// [`Session::run`] returns when the program has ended.
    pub fn stdout(mut self, to: impl Into<OwnedFd>) -> Self {
        self.plan.stdio[1] = Some(to.into());
        self
    }

    /// Standard error. Messages of dynasour go there, too.
    pub fn stderr(mut self, to: impl Into<OwnedFd>) -> Self {
        self.plan.stdio[2] = Some(to.into());
        self
    }

    /// Which executable forms of guest code are used; [`Tier::Full`] if nothing is said.
    pub fn tier(mut self, tier: Tier) -> Self {
        self.plan.tier = tier;
        self
    }

    /// Executions of a trace head before it is recorded; the tier's own number if nothing is said. Small numbers make
    /// many traces, without asking whether they pay.
    pub fn threshold(mut self, executions: u32) -> Self {
        self.plan.threshold = Some(executions);
        self
    }

    /// The size of the code cache in bytes: from 16 KiB to 512 MiB.
    pub fn cache_size(mut self, bytes: usize) -> Self {
        self.plan.cache_size = bytes;
        self
    }

    /// The policy of guard placement with this name, built in or added by [`SessionBuilder::placement`].
    pub fn policy(mut self, name: impl Into<String>) -> Self {
        self.policy = Some(name.into());
        self
    }

    /// Adds a policy of guard placement, and uses it unless [`SessionBuilder::policy`] names another one.
    pub fn placement(mut self, placement: impl Placement + 'static) -> Self {
        self.own_placements.push(Arc::new(placement));
        self
    }

    /// Says what is hot. `make` is called once in each guest thread, with the policy that would be used otherwise.
    pub fn speculation(
        mut self,
        make: impl Fn(DefaultPolicy) -> Box<dyn SpeculationPolicy> + Send + Sync + 'static,
    ) -> Self {
        self.plan.speculation = Some(Speculation::new(make));
        self
    }

    /// Adds a pass over the IR of each trace.
    pub fn pass(mut self, pass: OwnPass) -> Self {
        self.own_passes.push(pass);
        self
    }

    /// The passes that traces go through, in order, instead of those of the policy. Own passes that are not among
    /// them still run where they say.
    pub fn passes(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.plan.passes = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Leaves a pass out.
    pub fn skip_pass(mut self, name: impl Into<String>) -> Self {
        self.plan.skip_passes.push(name.into());
        self
    }

    /// Makes guards fail at random: the program must do the same.
    pub fn chaos(mut self, chaos: Chaos) -> Self {
        self.plan.chaos = Some(chaos);
        self
    }

    /// How threads are sampled.
    pub fn sampling(mut self, sampling: Sampling) -> Self {
        self.plan.sampling = sampling;
        self
    }

    /// How traces race with what they replace.
    pub fn race(mut self, race: RaceMode) -> Self {
        self.plan.race = race;
        self
    }

    /// Who compiles traces.
    pub fn compile_threads(mut self, threads: CompileThreads) -> Self {
        self.plan.compile_threads = Some(threads);
        self
    }

    /// The most iterations of a loop that one trace holds.
    pub fn iterations(mut self, most: u32) -> Self {
        self.plan.iterations = Some(most);
        self
    }

    /// Only the traces with these numbers are compiled, counted from 1 in the order in which they are recorded.
    pub fn only_traces(mut self, numbers: RangeInclusive<u32>) -> Self {
        self.plan.only_traces = Some(numbers);
        self
    }

    /// Under [`Tier::Direct`]: makes no traces of code in place.
    pub fn no_traces(mut self) -> Self {
        self.plan.makes_traces = false;
        self
    }

    /// Compares each trace, and its code, with what was recorded, before it is used. A trace that differs ends the
    /// guest with a report on standard error. This finds passes that change what a program does.
    pub fn verify_traces(mut self) -> Self {
        self.plan.verify_traces = true;
        self
    }

    /// Counts how often each part of each trace is executed: [`Outcome::census`]. With `detail` the census has the
    /// text and the code of traces, too.
    pub fn count(mut self, detail: bool) -> Self {
        self.plan.count = Some(detail);
        self
    }

    /// Lets programs that the guest executes run under dynasour, too: by this command, the file of `dynasour`. They
    /// get the session's options, but not its own passes and policies, and send no events. Without this they run
    /// natively.
    pub fn follow(mut self, dynasour: impl Into<PathBuf>) -> Self {
        self.plan.translator = Some(dynasour.into());
        self
    }

    /// Calls `subscriber` with each event, on the thread that runs the session, in the order in which the events
    /// happen. The guest waits if the subscriber is too slow; so the subscriber must not wait for the guest.
    pub fn subscriber(mut self, subscriber: impl FnMut(&Event) + 's) -> Self {
        self.subscriber = Some(Box::new(subscriber));
        self
    }

    /// Reads these counters at the end: [`Outcome::counters`]. They are set to 0 when the program starts.
    pub fn counters(mut self, counters: &Counters) -> Self {
        self.counters = Some(counters.clone());
        self
    }

    /// The session.
    ///
    /// # Errors
    /// Something that was asked for cannot be done; nothing has been run.
    pub fn build(self) -> Result<Session<'s>, SessionError> {
        let SessionBuilder { mut plan, policy, own_placements, own_passes, .. } = self;
        let mut registry = Registry::default();
        own_passes.into_iter().try_for_each(|pass| registry.add(pass))?;
        plan.placement = checks::placement(policy.as_deref(), &own_placements)?;
        let named = plan.passes.iter().flatten().chain(&plan.skip_passes);
        named.into_iter().try_for_each(|name| checks::pass(name, &registry))?;
        checks::positions(&registry, plan.passes.as_deref(), plan.placement.get())?;
        plan.registry = Arc::new(registry);
        if !CACHE_SIZES.contains(&plan.cache_size) {
            let (bytes, least, most) = (plan.cache_size, CACHE_SIZES.start(), CACHE_SIZES.end());
            let text = format!("a code cache of {bytes} bytes: expected from {least} to {most}");
            return Err(SessionError::Option(text));
        }
        if plan.threshold == Some(0) || plan.iterations == Some(0) {
            let text = "a threshold, and a number of iterations, is at least 1";
            return Err(SessionError::Option(text.to_string()));
        }
        Ok(Session { plan, subscriber: self.subscriber, counters: self.counters })
    }

    /// Runs the session once.
    ///
    /// # Errors
    /// As [`SessionBuilder::build`] and [`Session::run`].
    pub fn run(self) -> Result<Outcome, SessionError> {
        self.build()?.run()
    }
}
