//! What happens in the new process before the guest starts: the state that execve would have given it.
//!
//! Data: a [`Start`], made before the fork, so that the new process need not ask anything that another thread of the
//! host may hold locked. Invariants: a program sees what it would see natively, as if the host had executed it:
//! * no handler is installed, the signals that the host ignores are ignored, but SIGPIPE is not (Rust's start-up
//!   ignores it); no signal is blocked; there is no alternate stack;
//! * the descriptors are those that execve keeps;
//! * the environment is the session's.
//!
//! No lock. The process is a copy of the host with one thread. Locks that other threads of the host held are held for
//! ever here; the C library's own are freed by fork(2)'s handlers.
//!
//! Example: a Rust host has SIGPIPE ignored and handlers for SIGSEGV and SIGBUS. In the guest all three have their
//! default actions.

use super::builder::Plan;
use super::checks::Chosen;
use super::outcome::SessionError;
use dynasour_runtime::RunError;
use dynasour_runtime::config::{Count, RaceMode, RunConfig, Sampling, Tier};
use dynasour_runtime::observe::channel::Sender;
use dynasour_runtime::observe::events::{self, Message};
use dynasour_tracer::placement::Placement;
use std::convert::Infallible;
use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};

/// The highest number of a signal (signal(7)).
const MAX_SIGNAL: i32 = 64;
/// Exit status of a process that could not become the guest's.
pub(super) const NOT_RUNNABLE: i32 = 126;
/// Descriptors that are looked at where there is no `/proc` (guess).
const DESCRIPTORS: i32 = 1024;

/// Is this process one that a session has made?
static IS_GUEST: AtomicBool = AtomicBool::new(false);

unsafe extern "C" {
    static mut environ: *const *const libc::c_char;
}

/// All that the new process needs.
pub(super) struct Start<'p> {
    plan: &'p Plan,
    config: RunConfig,
    directory: Option<CString>,
    /// The strings of the environment, and their addresses with the final null.
    environment: (Vec<CString>, Vec<*const libc::c_char>),
}

fn c_string(text: &OsStr) -> Result<CString, SessionError> {
    CString::new(text.as_bytes()).map_err(|_| SessionError::ZeroByte(text.to_owned()))
}

impl<'p> Start<'p> {
    /// The start of this plan. A run that counts writes to `census`.
    pub(super) fn new(plan: &'p Plan, census: Option<&Path>) -> Result<Start<'p>, SessionError> {
        std::iter::once(&plan.program).chain(&plan.args).try_for_each(|s| c_string(s).map(drop))?;
        let strings = environment(plan)?;
        let mut pointers: Vec<_> = strings.iter().map(|string| string.as_ptr()).collect();
        pointers.push(std::ptr::null());
        Ok(Start {
            plan,
            config: config(plan, census),
            directory: plan.directory.as_ref().map(|d| c_string(d.as_os_str())).transpose()?,
            environment: (strings, pointers),
        })
    }

    /// In the new process: becomes the guest. Messages go to `sender`, with or without events.
    pub(super) fn run(mut self, sender: Sender, with_events: bool) -> ! {
        let status = catch_unwind(AssertUnwindSafe(|| {
            reset_signals();
            IS_GUEST.store(true, Ordering::Relaxed);
            events::connect(sender, with_events);
            let (status, why) = match self.become_guest() {
                Ok(never) => match never {},
                Err(Failed::Setup(what, error)) => {
                    (NOT_RUNNABLE, format!("cannot {what}: {error}"))
                }
                Err(Failed::Run(error)) => (error.exit_status(), error.to_string()),
            };
            events::send(&Message::NotStarted { status, why });
            status
        }));
        match status {
            // SAFETY: ends the process without the host's handlers for its end.
            Ok(status) => unsafe { libc::_exit(status) },
            // The panic has said why on standard error.
            Err(_) => std::process::abort(),
        }
    }

    fn become_guest(&mut self) -> Result<Infallible, Failed> {
        self.set_descriptors().map_err(|e| Failed::Setup("pass on descriptors", e))?;
        if let Some(directory) = &self.directory {
            // SAFETY: a C string.
            if unsafe { libc::chdir(directory.as_ptr()) } != 0 {
                return Err(Failed::Setup("go to its directory", io::Error::last_os_error()));
            }
        }
        // SAFETY: this is the only thread; the strings live as long as the process.
        unsafe { environ = self.environment.1.as_ptr() };
        if let Chosen::Own(placement) = &self.plan.placement {
            // The process ends before this does.
            let placement: &'static Arc<dyn Placement> = Box::leak(Box::new(placement.clone()));
            self.config.placement = &**placement;
        }
        dynasour_runtime::run(&self.config).map_err(Failed::Run)
    }

    /// Makes the session's files descriptors 0 to 2, and closes what execve would close.
    fn set_descriptors(&self) -> io::Result<()> {
        let checked = |result: i32| match result {
            -1 => Err(io::Error::last_os_error()),
            fd => Ok(fd),
        };
        let mut given = [None; 3];
        for (fd, file) in self.plan.stdio.iter().enumerate() {
            if let Some(file) = file {
                // Above the standard ones, which are about to be replaced.
                // SAFETY: a descriptor of this process.
                let copy = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 3) };
                given[fd] = Some(checked(copy)?);
            }
        }
        for (fd, copy) in (0..).zip(given) {
            if let Some(copy) = copy {
                // SAFETY: both are this process's.
                checked(unsafe { libc::dup2(copy, fd) })?;
            }
        }
        let listed: Option<Vec<i32>> = std::fs::read_dir("/proc/self/fd").ok().map(|entries| {
            entries.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect()
        });
        for fd in listed.unwrap_or_else(|| (0..DESCRIPTORS).collect()) {
            // SAFETY: nothing in this process uses a descriptor of the host's any more.
            unsafe {
                let flags = libc::fcntl(fd, libc::F_GETFD);
                if flags != -1 && flags & libc::FD_CLOEXEC != 0 {
                    libc::close(fd);
                }
            }
        }
        Ok(())
    }
}

/// Makes panics in the processes of sessions go to [`report_panic`], and those of the host where they went before. The
/// hook is set here, because a thread of the host that panics during the fork holds the lock of the hook for ever in the
/// new process.
pub(super) fn hook_panics() {
    static ONCE: Once = Once::new();
    // A thread that panics cannot take the hook.
    if std::thread::panicking() {
        return;
    }
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| match IS_GUEST.load(Ordering::Relaxed) {
            true => report_panic(panic),
            false => before(panic),
        }));
        // The start of a guest would set this hook.
        dynasour_runtime::silence_allocator();
    });
}

/// Reports a panic of a policy's or of dynasour's own, without a lock that a thread of the host may have held. A pass's is
/// reported by the session.
fn report_panic(panic: &PanicHookInfo<'_>) {
    if !dynasour_ir::opt::is_guarded() {
        let text = format!("dynasour: {panic}\n");
        // SAFETY: the text is as long as said.
        unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
    }
}

/// Why the guest was not started.
enum Failed {
    Setup(&'static str, io::Error),
    Run(RunError),
}

/// Gives signals the state that a program finds which was executed.
fn reset_signals() {
    // SAFETY: dispositions, the mask and the alternate stack of the only thread. Nothing runs on that stack.
    unsafe {
        for signo in 1..=MAX_SIGNAL {
            let mut action: libc::sigaction = std::mem::zeroed();
            let is_known = libc::sigaction(signo, std::ptr::null(), &raw mut action) == 0;
            if is_known && (action.sa_sigaction != libc::SIG_IGN || signo == libc::SIGPIPE) {
                let default: libc::sigaction = std::mem::zeroed();
                libc::sigaction(signo, &raw const default, std::ptr::null_mut());
            }
        }
        let mut none: libc::stack_t = std::mem::zeroed();
        none.ss_flags = libc::SS_DISABLE;
        libc::sigaltstack(&raw const none, std::ptr::null_mut());
        let mut empty: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut empty);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const empty, std::ptr::null_mut());
    }
}

/// The strings of the guest's environment.
fn environment(plan: &Plan) -> Result<Vec<CString>, SessionError> {
    let mut all: Vec<(OsString, OsString)> =
        if plan.is_env_clear { Vec::new() } else { std::env::vars_os().collect() };
    for (name, value) in &plan.env {
        if name.is_empty() || name.as_bytes().contains(&b'=') {
            let text = format!("{name:?} is no name of a variable of the environment");
            return Err(SessionError::Option(text));
        }
        all.retain(|(known, _)| known != name);
        all.extend(value.iter().map(|value| (name.clone(), value.clone())));
    }
    let string = |(mut name, value): (OsString, OsString)| {
        name.push("=");
        name.push(value);
        CString::new(name.into_vec())
            .map_err(|error| SessionError::ZeroByte(OsString::from_vec(error.into_vec())))
    };
    all.into_iter().map(string).collect()
}

/// The configuration of the plan. The placement is set in the new process.
fn config(plan: &Plan, census: Option<&Path>) -> RunConfig {
    let (placement, policy) = match &plan.placement {
        Chosen::BuiltIn(placement) => (*placement, Some(placement.name())),
        Chosen::Own(_) => (dynasour_tracer::placement::DEFAULT, None),
    };
    RunConfig {
        tier: plan.tier,
        threshold: plan.threshold,
        cache_size: plan.cache_size,
        returns: Default::default(),
        entry_check: None,
        placement,
        speculation: plan.speculation.clone(),
        registry: plan.registry.clone(),
        chaos: plan.chaos,
        sampling: plan.sampling,
        race: plan.race,
        compile_threads: plan.compile_threads,
        iterations: plan.iterations,
        traces_in_place: plan.tier == Tier::Direct && plan.makes_traces,
        log: Default::default(),
        passes: plan.passes.clone(),
        skip_passes: plan.skip_passes.clone(),
        verify_traces: plan.verify_traces,
        prove_traces: false,
        only_traces: plan.only_traces.clone(),
        stats: false,
        stats_json: None,
        timeline: false,
        perf_map: false,
        jitdump: None,
        gdb: false,
        count: plan.count.zip(census).map(|(detail, file)| Count { file: file.into(), detail }),
        follow: plan.translator.is_some(),
        translator: plan.translator.clone(),
        argv0: None,
        seccomp: None,
        address_space: None,
        program: plan.program.clone(),
        args: plan.args.clone(),
        child_options: child_options(plan, policy),
        own_options: Vec::new(),
    }
}

/// The options for programs that the guest executes: all that the command line can say.
fn child_options(plan: &Plan, policy: Option<&str>) -> Vec<OsString> {
    let mut options: Vec<OsString> = Vec::new();
    let mut option = |name: &str, value: Option<String>| {
        options.extend(value.map(|value| format!("--{name}={value}").into()));
    };
    let is_known = |name: &&String| dynasour_ir::opt::pass(name).is_some();
    let list = |names: &[String]| {
        let known: Vec<&str> = names.iter().filter(is_known).map(String::as_str).collect();
        (!known.is_empty()).then(|| known.join(","))
    };
    option("tier", Some(plan.tier.to_string()));
    option("threshold", plan.threshold.map(|n| n.to_string()));
    option("cache-size", Some(plan.cache_size.to_string()));
    option("policy", policy.map(str::to_string));
    option("chaos", plan.chaos.map(|chaos| chaos.to_string()));
    option("sample", (plan.sampling != Sampling::default()).then(|| plan.sampling.to_string()));
    option("race", (plan.race != RaceMode::default()).then(|| plan.race.to_string()));
    option("compile-threads", plan.compile_threads.map(|threads| threads.to_string()));
    option("iterations", plan.iterations.map(|n| n.to_string()));
    option("passes", plan.passes.as_deref().and_then(list));
    option("skip-pass", list(&plan.skip_passes));
    if plan.verify_traces {
        options.push("--verify-traces".into());
    }
    if !plan.makes_traces && plan.tier == Tier::Direct {
        options.push("--no-traces".into());
    }
    options
}
