//! What `--verify-traces` has compared and `--prove-traces` has proven ([`crate::dispatch::validation`]): for
//! one trace, and for all traces of a run.
//!
//! Plain data, no lock. Invariants: a certificate exists only for a trace in which no difference was found; a
//! trace that was refuted is not used.
//!
//! ```text
//! verified: 61 entry states, 900 states compared; of 3 guards 3 held in some and 2 failed in some
//! ```

use dynasour_ir::prove::{Outcome, Verdict};
use dynasour_ir::validate::Report;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// What was compared for a trace without finding a difference.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct Certificate {
    /// Entry states.
    pub cases: u64,
    /// States at its anchors and ends.
    pub states: u64,
    /// The guards of a version, those of them that held in some case, and those that failed in some.
    pub guards: [u64; 3],
    /// The instructions at which machine code may leave, and those at which it has left.
    pub exits: [u64; 2],
    /// Did a case execute the whole path?
    pub whole: bool,
    /// Nanoseconds that the comparison took.
    pub nanoseconds: u64,
}

impl Certificate {
    /// From the report of a validation.
    pub fn new(report: Report, time: Duration) -> Certificate {
        let Report { cases, states, outcomes: [held, failed], guards, exits, whole, .. } = report;
        let nanoseconds = time.as_nanos() as u64;
        let guards = [guards, held, failed];
        Certificate { cases, states, guards, exits, whole, nanoseconds }
    }
}

impl fmt::Display for Certificate {
    /// `verified: 61 entry states, 900 states compared; of 3 guards 3 held in some and 2 failed in some`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Certificate { cases, states, guards, exits, whole, .. } = self;
        write!(f, "verified: {cases} entry states, {states} states compared")?;
        match (guards, exits) {
            ([0, ..], [0, _]) => {}
            ([0, ..], [exits, taken]) => write!(f, "; of {exits} exits {taken} were taken")?,
            ([guards, held, failed], _) => {
                write!(f, "; of {guards} guards {held} held in some and {failed} failed in some")?;
            }
        }
        if !whole {
            f.write_str("; no entry state was found from which the whole path is executed")?;
        }
        Ok(())
    }
}

/// Traces that were compared with the recorded code before they were published.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Verified {
    /// Traces.
    pub traces: u64,
    /// Of these, those whose whole path a case has executed.
    pub whole: u64,
    /// Entry states.
    pub cases: u64,
    /// States at anchors and ends.
    pub states: u64,
    /// Guards, those of them that held in some case, and those that failed in some.
    pub guards: [u64; 3],
    /// Exits of machine code, and those that were taken.
    pub exits: [u64; 2],
    /// Nanoseconds that it took.
    pub nanoseconds: u64,
}

impl Verified {
    /// Another trace was compared.
    pub fn add(&mut self, certificate: &Certificate) {
        self.traces += 1;
        self.whole += u64::from(certificate.whole);
        self.cases += certificate.cases;
        self.states += certificate.states;
        self.guards = std::array::from_fn(|i| self.guards[i] + certificate.guards[i]);
        self.exits = std::array::from_fn(|i| self.exits[i] + certificate.exits[i]);
        self.nanoseconds += certificate.nanoseconds;
    }
}

/// An attempt to prove that a trace does what was recorded, from every state.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct Proof {
    /// Was it proven?
    pub proven: bool,
    /// If not: what could not be shown.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub why: Option<String>,
    /// States at its anchors and ends that were shown to be right.
    pub states: u64,
    /// Questions to the solver.
    pub questions: u64,
    /// Nanoseconds that it took.
    pub nanoseconds: u64,
}

impl Proof {
    /// From an outcome that is no refutation.
    pub fn new(outcome: &Outcome) -> Proof {
        let why = match &outcome.verdict {
            Verdict::Proven => None,
            Verdict::Unknown { why } | Verdict::Refuted { what: why, .. } => Some(why.clone()),
        };
        Proof {
            proven: outcome.verdict == Verdict::Proven,
            why,
            states: outcome.states,
            questions: outcome.questions,
            nanoseconds: outcome.time.as_nanos() as u64,
        }
    }
}

impl fmt::Display for Proof {
    /// `proven from every state: 14 states, 3 questions to the solver`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.why {
            None => f.write_str("proven from every state")?,
            Some(why) => write!(f, "not proven: {why}")?,
        }
        write!(f, ": {} states, {} questions to the solver", self.states, self.questions)
    }
}

/// Traces that were to be proven before they were published.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Proofs {
    /// Proven traces.
    pub proven: u64,
    /// Traces that were shown to be wrong, and are not used.
    pub refuted: u64,
    /// The other traces.
    pub unknown: u64,
    /// States at anchors and ends that were shown to be right.
    pub states: u64,
    /// Questions to the solver.
    pub questions: u64,
    /// Nanoseconds that it took.
    pub nanoseconds: u64,
}

impl Proofs {
    /// Another trace was tried and is used.
    pub fn add(&mut self, proof: &Proof) {
        *(if proof.proven { &mut self.proven } else { &mut self.unknown }) += 1;
        self.states += proof.states;
        self.questions += proof.questions;
        self.nanoseconds += proof.nanoseconds;
    }
}
