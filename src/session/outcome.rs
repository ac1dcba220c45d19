//! How a run has ended: [`Outcome`], or why there is none: [`SessionError`].
//!
//! Data: plain values, which belong to the caller. No lock. Example: `sh -c 'exit 7'` gives an [`Outcome`] with the
//! status 7; `/no/such/program` gives [`SessionError::NotStarted`].

use dynasour_ir::opt::RegistryError;
use dynasour_runtime::observe::census::Census;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io;
use std::process::ExitStatus;
use thiserror::Error;

/// How a program has ended, and what was counted meanwhile.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct Outcome {
    /// The exit status, or the signal that has ended the program: as of a program that was run natively.
    pub status: ExitStatus,
    /// The session's counters, by name ([`SessionBuilder::counters`](super::SessionBuilder::counters)).
    pub counters: BTreeMap<String, u64>,
    /// What `dynasour run --stats-json` writes. There are none if the process was killed from outside, or has become
    /// another program that does not run under dynasour.
    pub statistics: Option<Statistics>,
    /// How often each part of each trace was executed, if the session counts
    /// ([`SessionBuilder::count`](super::SessionBuilder::count)). None as for statistics.
    pub census: Option<Census>,
}

/// The counts of a run, of its first process.
#[derive(Clone, PartialEq, Debug)]
pub struct Statistics(Value);

impl Statistics {
    pub(super) fn new(counts: Value) -> Statistics {
        Statistics(counts)
    }

    /// The count of this name, such as `fragments` or `links`. A point leads into a group: `deopts.guard`. A count
    /// that there is not is 0: a group has only what has happened.
    pub fn count(&self, name: &str) -> u64 {
        let found = name.split('.').try_fold(&self.0, |value, part| value.get(part));
        found.and_then(Value::as_u64).unwrap_or(0)
    }

    /// Everything, as JSON.
    pub fn json(&self) -> &Value {
        &self.0
    }
}

/// Why a session has not run, or is not to be relied on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The program was not started; nothing of it has been executed.
    #[error("{why}")]
    NotStarted {
        /// The exit status that a shell would give: 127 if the program was not found, 126 if it cannot be run.
        status: i32,
        /// What is wrong.
        why: String,
    },
    /// A pass or a placement of the session has left an invalid version of a trace. That trace was not made, so the
    /// program has done what it should.
    #[error(
        "`{pass}` leaves {version} invalid, so that no trace is made of it (and perhaps of others): {why}"
    )]
    BrokenPass {
        /// The first pass or placement that did so.
        pass: String,
        /// The version.
        version: String,
        /// What is wrong with it, one line for each rule that is broken.
        why: String,
        /// How the run has ended all the same.
        outcome: Box<Outcome>,
    },
    /// A pass has no name, or another one has it.
    #[error(transparent)]
    Pass(#[from] RegistryError),
    /// There is no such pass.
    #[error("there is no pass `{name}`{near}; there are {known}")]
    UnknownPass {
        /// The name.
        name: String,
        /// One that may be meant.
        near: String,
        /// All names.
        known: String,
    },
    /// The pass makes traces that only the evaluator runs.
    #[error("`{0}` makes traces that only the evaluator runs: see `dynasour ir opt`")]
    EvaluatorOnly(String),
    /// A pass is to stand beside one that the pipeline does not have.
    #[error(
        "the pass `{pass}` is to stand beside `{beside}`, which the policy `{policy}` does not run"
    )]
    NoPlace {
        /// The session's pass.
        pass: &'static str,
        /// The pass that is missing.
        beside: &'static str,
        /// The policy whose pipeline it is.
        policy: &'static str,
    },
    /// There is no such policy.
    #[error("there is no policy `{name}`{near}; there are {known}")]
    UnknownPolicy {
        /// The name.
        name: String,
        /// One that may be meant.
        near: String,
        /// All names.
        known: String,
    },
    /// Another policy has this name.
    #[error("there is a policy `{0}` already; give yours another name")]
    PolicyTaken(&'static str),
    /// The number is not one that the runtime can do with.
    #[error("{0}")]
    Option(String),
    /// A string for the program has a zero byte in it.
    #[error("{0:?} has a zero byte in it, which no program can be given")]
    ZeroByte(std::ffi::OsString),
    /// There is no memory, or no file, for what the processes share.
    #[error("cannot make what host and guest share: {0}")]
    Memory(#[source] io::Error),
    /// No process could be made.
    #[error("cannot make a process for the guest: {0}")]
    Fork(#[source] io::Error),
    /// How the guest has ended is not known, because the host ignores SIGCHLD or has waited for all its children.
    #[error("the guest's exit status is lost: {0} (does the host ignore SIGCHLD?)")]
    Wait(#[source] io::Error),
}
