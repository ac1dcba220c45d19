//! How far is each policy from the best placement of its guards? (`guards --counterfactual`)
//!
//! Two questions are answered from counting runs, without running anything else:
//! * What is the fewest number of executions of guards with which the predicates of a policy could be
//!   checked? [`chain`] makes of each trace a chain of points with measured frequencies and of each guard a
//!   predicate that may be checked at some of them; [`cut`] finds the cheapest points: for each predicate by itself
//!   (*separate*), and where predicates that are checked at one point become one guard (*joined*).
//! * Is the model right? [`predict`] computes the executions of the guards of each policy from the outcomes
//!   of one run, that of [`BASE`], where each predicate is checked where its branch was. The result is compared with
//!   what was counted.
//!
//! *Units.* Executions of guards. A predicate is supposed to fail as often wherever it is checked. What is
//! interpreted again after an earlier failure is not counted. So the figures are those of a model, in which no policy is below
//! its best placement.
//!
//! *What is not modelled:* traces that branch inside; traces of the other run that the base run has not
//! made; predicates that are not needed because others imply them, unless the policy has removed them.
//! The results say how many of the executed guards they cover.
//!
//! Data: [`Placed`] for each policy. No lock.

mod chain;
mod cut;
mod predict;

use chain::Chain;
use dynasour_runtime::observe::census::{Census, Kind};
use predict::Outcomes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The policy of the base run: its guards stand where the branches were, and nothing moves between
/// iterations, so each predicate has its outcomes recorded at its own place.
pub const BASE: &str = "eager";

/// A policy's placement beside the best one. All figures are executions of guards.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Placed {
    /// In all traces.
    pub executed: u64,
    /// In the traces that are chains, for which there are the next two figures.
    pub modelled: u64,
    /// The fewest with which each predicate of these traces can be checked, each by itself.
    pub separate: u64,
    /// The same if predicates that are checked at one point become one guard.
    pub joined: u64,
    /// In the traces that the base run has made, too.
    pub compared: u64,
    /// What the outcomes of the base run predict for these.
    pub predicted: u64,
}

impl Placed {
    /// How many more guards are executed than in the best placement, as a share of that. `best` is
    /// [`Placed::separate`] or [`Placed::joined`]. None if the best has none.
    pub fn above(&self, best: u64) -> Option<f64> {
        (best > 0).then(|| self.modelled as f64 / best as f64 - 1.0)
    }

    /// The error of the prediction, as a share of what was counted.
    pub fn error(&self) -> Option<f64> {
        (self.compared > 0).then(|| self.predicted as f64 / self.compared as f64 - 1.0)
    }

    /// The share of the executed guards that are in modelled traces.
    pub fn covered(&self) -> Option<f64> {
        (self.executed > 0).then(|| self.modelled as f64 / self.executed as f64)
    }
}

/// The base run.
pub struct Base(Outcomes);

impl Base {
    /// The outcomes of a counting run of [`BASE`].
    pub fn of(census: &Census) -> Base {
        Base(Outcomes::of(&census.fragments))
    }

    /// Compares the placement of a counting run, whose census has the text of its traces.
    pub fn placed(&self, census: &Census) -> Placed {
        let prediction = self.0.predict(&census.fragments);
        let mut placed = Placed {
            compared: prediction.measured,
            predicted: prediction.predicted,
            ..Placed::default()
        };
        for fragment in census.fragments.iter().filter(|f| f.kind != Kind::Stub) {
            let executed: u64 = fragment.guards.iter().map(|guard| guard.executed).sum();
            placed.executed += executed;
            let Some(chain) = Chain::of(fragment) else { continue };
            placed.modelled += executed;
            placed.separate += chain.separate();
            placed.joined += chain.joined();
        }
        placed
    }
}
