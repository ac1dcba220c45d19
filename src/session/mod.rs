//! Guests as a library: a [`Session`] runs a program in a process of its own, and says how it ended.
//!
//! | file | |
//! | --- | --- |
//! | [`builder`] | what a session is to do |
//! | [`checks`] | names of passes and policies are looked up before anything runs |
//! | [`guest`] | what happens in the new process before the guest starts |
//! | [`outcome`] | how a run has ended |
//!
//! Data: a [`Session`], which is not changed by a run; what one run needs is in the functions here and in the new
//! process. Invariants: whatever happens, the new process has been waited for when [`Session::run`] returns or
//! panics; nothing of the guest's runs in the calling process.
//!
//! ```text
//!   run ── fork ──► guest::start: undo what the host has changed, connect, dynasour_runtime::run
//!    │                │ events, statistics: a ring in shared memory (`observe::channel`)
//!    ▼                ▼
//!   receive ◄─────── …                  the subscriber is called here, by the calling thread
//!    │
//!   waitpid ──► Outcome
//! ```
//!
//! No lock. Example: `Session::builder("ls").run()` runs `ls` as `dynasour run -- ls` would.

mod builder;
mod checks;
mod guest;
mod outcome;

pub use builder::SessionBuilder;
pub use outcome::{Outcome, SessionError, Statistics};

use builder::Plan;
use dynasour_runtime::observe::census::Census;
use dynasour_runtime::observe::channel::{Receiver, channel};
use dynasour_runtime::observe::counters::Counters;
use dynasour_runtime::observe::events::{Event, Message};
use guest::Start;
use std::ffi::OsStr;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

/// Called with each event, by the thread that runs the session.
type Subscriber<'s> = Box<dyn FnMut(&Event) + 's>;

/// How long [`Session::run`] waits for news before it looks whether the guest has ended (guess).
const LONGEST_WAIT: Duration = Duration::from_millis(20);
/// The same when the guest has said that it is about to end.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

/// A program that is to run under dynasour, and how. The [crate] says more.
pub struct Session<'s> {
    plan: Plan,
    subscriber: Option<Subscriber<'s>>,
    counters: Option<Counters>,
}

/// What the guest's process has said so far.
#[derive(Default)]
struct Said {
    statistics: Option<Statistics>,
    broken: Option<(String, String, String)>,
    not_started: Option<(i32, String)>,
}

impl<'s> Session<'s> {
    /// A session that will run `program`: a path, or the name of a command that is searched for in `PATH`.
    pub fn builder(program: impl AsRef<OsStr>) -> SessionBuilder<'s> {
        SessionBuilder::new(program.as_ref())
    }

    /// Runs the program, and waits until its process has ended. Children that the program leaves behind go on.
    ///
    /// # Errors
    /// The program was not started, or one of the session's passes has broken a trace; see [`SessionError`]. That the
    /// program has failed is no error, but its [`Outcome::status`].
    ///
    /// # Panics
    /// If the subscriber panics. The guest is killed then.
    pub fn run(&mut self) -> Result<Outcome, SessionError> {
        let (sender, receiver) = channel().map_err(SessionError::Memory)?;
        let census = self.plan.census_file()?;
        let start = Start::new(&self.plan, census.as_ref().map(|file| file.path()))?;
        if let Some(counters) = &self.counters {
            counters.reset();
        }
        guest::hook_panics();
        let guest = Guest::fork(|| start.run(sender, self.subscriber.is_some()))?;
        let (status, said) = self.follow(guest, receiver)?;
        if let Some((status, why)) = said.not_started {
            return Err(SessionError::NotStarted { status, why });
        }
        let outcome = Outcome {
            status,
            counters: self.counters.as_ref().map(Counters::read).unwrap_or_default(),
            statistics: said.statistics,
            census: census.and_then(|file| read_census(file.path())),
        };
        match said.broken {
            None => Ok(outcome),
            Some((pass, version, why)) => {
                Err(SessionError::BrokenPass { pass, version, why, outcome: Box::new(outcome) })
            }
        }
    }

    /// Receives what the guest's process says until it has ended.
    fn follow(
        &mut self,
        mut guest: Guest,
        mut receiver: Receiver,
    ) -> Result<(ExitStatus, Said), SessionError> {
        let mut said = Said::default();
        let mut patience = LONGEST_WAIT;
        loop {
            let ended = guest.ended()?;
            let messages =
                receiver.receive(if ended.is_some() { Duration::ZERO } else { patience });
            patience = (2 * patience).min(LONGEST_WAIT);
            if let Some(status) = ended.filter(|_| messages.is_empty()) {
                return Ok((status, said));
            }
            for message in &messages {
                if self.hear(message, &mut said) {
                    patience = SHORTEST_WAIT;
                }
            }
        }
    }

    /// Takes note of a message. Is it the last one of a process, unless it is forced to go on?
    fn hear(&mut self, message: &[u8], said: &mut Said) -> bool {
        // A process that has come to harm may say anything.
        let Ok(message) = serde_json::from_slice(message) else { return false };
        match message {
            Message::Event(event) => {
                if let Some(subscriber) = &mut self.subscriber {
                    subscriber(&event);
                }
                return false;
            }
            Message::Statistics(counts) => said.statistics = Some(Statistics::new(counts)),
            Message::Broken { pass, version, why } => {
                said.broken.get_or_insert((pass, version, why));
                return false;
            }
            Message::NotStarted { status, why } => said.not_started = Some((status, why)),
        }
        true
    }
}

/// The census that a counting run has written, if it has come to its end.
fn read_census(file: &std::path::Path) -> Option<Census> {
    serde_json::from_slice(&std::fs::read(file).ok()?).ok()
}

/// A process that this one has started. It is killed if it is forgotten.
struct Guest {
    pid: libc::pid_t,
    ended: Option<ExitStatus>,
}

impl Guest {
    /// Starts a process that does `run`. No signal handler of this process runs there.
    fn fork(run: impl FnOnce()) -> Result<Guest, SessionError> {
        // SAFETY: the sets are filled by the calls. The child runs `run` and nothing else.
        let pid = unsafe {
            let (mut all, mut before): (libc::sigset_t, libc::sigset_t) =
                (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            let pid = libc::fork();
            if pid == 0 {
                run();
                libc::_exit(guest::NOT_RUNNABLE);
            }
            let error = io::Error::last_os_error();
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
            if pid < 0 {
                return Err(SessionError::Fork(error));
            }
            pid
        };
        Ok(Guest { pid, ended: None })
    }

    /// How it has ended; none if it is running.
    fn ended(&mut self) -> Result<Option<ExitStatus>, SessionError> {
        self.wait(libc::WNOHANG)?;
        Ok(self.ended)
    }

    fn wait(&mut self, options: i32) -> Result<(), SessionError> {
        let mut status = 0;
        while self.ended.is_none() {
            // SAFETY: waits for a child of this process; `status` is written.
            match unsafe { libc::waitpid(self.pid, &raw mut status, options) } {
                0 => break,
                -1 => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        // Someone else has waited for it, or the host ignores SIGCHLD.
                        self.ended = Some(ExitStatus::from_raw(0));
                        return Err(SessionError::Wait(error));
                    }
                }
                _ => self.ended = Some(ExitStatus::from_raw(status)),
            }
        }
        Ok(())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if self.ended.is_none() {
            // SAFETY: a child that has not been waited for, so the number is still its own.
            unsafe { libc::kill(self.pid, libc::SIGKILL) };
            let _ = self.wait(0);
        }
    }
}
