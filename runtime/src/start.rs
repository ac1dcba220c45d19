//! Starts a guest: finds and loads the program, makes the machine, and runs the guest.
//!
//! Data: none that outlives [`run`]. A local variable of [`run`] holds the guest's [`System`]; its
//! address is known to signal handlers, so [`run`] ends with the process.
//!
//! Invariant: if [`run`] returns, nothing of the guest has been executed.
//!
//! No lock: [`run`] is called once, by the only thread of the process.
//!
//! Example: `dynasour run ls` finds `/usr/bin/ls` in PATH, loads it and its interpreter, and then
//! reserves the code cache, because the images may require certain addresses and the cache does
//! not. At last it protects the host's memory and enters the dispatcher at the entry point.

use crate::changes::{CodePages, host};
use crate::config::{RunConfig, Tier};
use crate::dispatch::{self, Dispatcher, Machine};
use crate::interp;
use crate::kernel::entry::{call_stubs, in_place};
use crate::kernel::process::translator::Translator;
use crate::kernel::process::{self, exec::Follow};
use crate::kernel::process::{Config, Inherited, Reports, System};
use crate::kernel::signal::FaultHooks;
use crate::observe::{linker, profile};
use dynasour_guest::ThreadContext;
use dynasour_guest::image::{self, LoadError, LoadOptions};
use dynasour_guest::space;
use std::convert::Infallible;
use std::ffi::{CStr, CString, OsStr, OsString};
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::sync::{Arc, LazyLock};
use thiserror::Error;

/// Why a guest did not start. Nothing of it has been executed.
#[derive(Debug, Error)]
pub enum RunError {
    /// The program cannot be run.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The machine that would run it cannot be set up.
    #[error("cannot set up the translator: {0}")]
    Setup(String),
}

impl RunError {
    /// The exit status that a shell would give: 127 if the program was not found, 126 if it cannot
    /// be run.
    pub fn exit_status(&self) -> i32 {
        match self {
            RunError::Load(error) => error.exit_status(),
            RunError::Setup(_) => 126,
        }
    }
}

fn setup(error: impl std::fmt::Display) -> RunError {
    RunError::Setup(error.to_string())
}

/// Runs the program that `config` describes in this process. Returns only if it could not be
/// started; the process then is as it was.
///
/// # Errors
/// See [`RunError`].
pub fn run(config: &RunConfig) -> Result<Infallible, RunError> {
    let inherited = Inherited::record();
    let config = &with_possible_tier(config);
    dynasour_emitter::silence_allocator();
    let plan = if config.argv0.is_some() {
        // An execve of a guest: its path is used as it is, and was checked before.
        image::check_again(Path::new(&config.program))?
    } else {
        let path = std::env::var_os("PATH");
        image::check(&image::resolve_command(&config.program, path.as_deref())?)?
    };
    keep_heap_together();
    let argv0 = config.argv0.as_ref().unwrap_or(&config.program);
    let argv: Vec<CString> =
        std::iter::once(argv0).chain(&config.args).map(|s| c_string(s)).collect();
    let loaded = plan.load(&argv, &environment(), &LoadOptions::default())?;
    // The program is the first image.
    linker::set(loaded.images.get(1).map_or(0..0, |linker| linker.range.clone()));
    // The guest's images are loaded before, because they may require certain addresses. The code
    // cache does not.
    let pages = Arc::new(CodePages::default());
    host::install(&pages);
    if config.tier == Tier::Direct {
        call_stubs::map();
    }
    let machine = Machine::new(config, vdso_range, pages.clone()).map_err(setup)?;
    if config.stats || config.stats_json.is_some() {
        profile::enable(config.timeline);
    }
    let mut dispatcher = Dispatcher::new(machine).map_err(setup)?;

    let mut system = System::new(
        inherited,
        Config {
            executable: c_string(loaded.path.as_os_str()),
            follow: config.follow.then(|| follow(config)),
            brk: loaded.brk.clone(),
            stack: loaded.stack.clone(),
            reports: reports(config),
            seccomp: config.seccomp,
            address_space: config.address_space,
            pages,
        },
    );
    let context = ThreadContext::first();
    context.rip = loaded.entry_pc;
    context.gpr[dynasour_ir::Gpr::RSP.number()] = loaded.places.stack_pointer;
    let hooks = FaultHooks {
        thunk: interp::thunk_fixup,
        fragment: dispatch::fragment_fault,
        cache_end: dispatch::cache_end,
        accepted: dispatch::signal_accepted,
    };
    // SAFETY: `context` is static and `system` is not moved. The process ends before this frame
    // does.
    unsafe { system.start(context, hooks) }.map_err(setup)?;
    let images = loaded.images.iter().map(|image| image.range.clone());
    let maps = space::maps().map_err(setup)?;
    system.protect_host(&maps, &images.chain([loaded.stack.range.clone()]).collect::<Vec<_>>());
    system.set_files(c_string(loaded.exe_path(&maps).as_os_str()), &maps);
    process::assume_identity(&loaded);
    let ending = dispatcher.run(context, &mut system);
    system.leave();
    ending.finish()
}

/// What the guest's process reports at its end.
fn reports(config: &RunConfig) -> Reports {
    let writes_files = config.stats_json.is_some()
        || config.count.is_some()
        || config.perf_map
        || config.jitdump.is_some();
    match config.stats {
        true => Reports::Text,
        false if writes_files => Reports::Files,
        false => Reports::Nothing,
    }
}

/// The configuration with a tier that this kernel allows.
fn with_possible_tier(config: &RunConfig) -> RunConfig {
    let mut config = config.clone();
    if config.tier == Tier::Direct && !in_place::is_available() {
        // A program that the guest executes gets the same options, and says nothing.
        if config.argv0.is_none() {
            process::complain(
                "this kernel has no syscall user dispatch (Linux 5.11), or denies it: \
                 --tier full is used instead of direct",
            );
        }
        config.tier = Tier::Full;
    }
    config
}

/// Makes the host's allocator take all memory from the program break, above which
/// [`System::protect_host`] keeps room free. A separate mapping would lie at an address that the
/// kernel chooses, where the guest may later map at a fixed address.
fn keep_heap_together() {
    // Bytes by which the break grows at a time (guess; fewer make more system calls, more make the
    // process larger).
    const GROWTH: libc::c_int = 1 << 20;
    // SAFETY: settings of the allocator; there is one thread.
    unsafe {
        libc::mallopt(libc::M_MMAP_MAX, 0);
        libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
        libc::mallopt(libc::M_TOP_PAD, GROWTH);
        // All threads share one heap.
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// `s` as a C string. Arguments and paths come from C strings and contain no NUL.
fn c_string(s: &OsStr) -> CString {
    CString::new(s.as_bytes()).unwrap_or_default()
}

fn c_strings(strings: impl Iterator<Item = OsString>) -> Vec<CString> {
    strings.map(|s| CString::new(s.into_vec()).unwrap_or_default()).collect()
}

/// The strings of the environment exactly as this process got them, even those without a `=`.
fn environment() -> Vec<CString> {
    unsafe extern "C" {
        static environ: *const *const libc::c_char;
    }
    let mut out = Vec::new();
    // SAFETY: the C library keeps `environ` a null-terminated array of strings; there is one thread
    // and it does not change it.
    unsafe {
        let mut p = environ;
        while !p.is_null() && !(*p).is_null() {
            out.push(CStr::from_ptr(*p).to_owned());
            p = p.add(1);
        }
    }
    out
}

/// The command by which a program that the guest executes is run: dynasour's own executable, or the
/// one that the configuration names, with the same options.
fn follow(config: &RunConfig) -> Follow {
    let options = config.child_options.iter().cloned();
    let prefix = [OsString::from("dynasour"), OsString::from("run")].into_iter().chain(options);
    let other = config.translator.as_ref().map(|path| Translator::at(c_string(path.as_os_str())));
    Follow {
        translator: other.unwrap_or_else(Translator::own),
        prefix: c_strings(prefix),
        own_options: c_strings(config.own_options.iter().cloned()),
    }
}

/// The pages of the vDSO and of the variables that it reads. Its code is not traced: it reads under
/// sequence locks, so none of its loads may be removed or moved.
fn vdso_range() -> Range<u64> {
    static RANGE: LazyLock<Range<u64>> = LazyLock::new(|| {
        let maps = space::maps().unwrap_or_default();
        let is_vdso = |path: &OsString| path == "[vdso]" || path.as_bytes().starts_with(b"[vvar");
        let ranges =
            maps.iter().filter(|m| m.path.as_ref().is_some_and(is_vdso)).map(|m| m.range.clone());
        ranges.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
    });
    RANGE.clone()
}
