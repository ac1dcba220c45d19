//! Policies compared guard by guard (`guards --by-site`).
//!
//! A *site* is what one assumption is about: a trace, a kind, a guest instruction and a step of the
//! recorded path. Passes keep that ([`dynasour_runtime::observe::census::GuardOrigin`]), so a site is the same under
//! all policies, wherever its guard stands. The executions of a merged guard count for each of its sites, and those of a
//! predicate that is checked at several places of a trace are added. A policy that does not check a site has none.
//!
//! Data: [`Sites`] collects the counts of each policy; [`Site`] is a line of the result. No lock.
//!
//! ```text
//! branch@1117e.0   work+0x28   eager 30,000,000 / 1   hoisted 1 / 0      its predicate does not vary
//! ```

use dynasour_guest::symbols::Symbols;
use dynasour_runtime::observe::census::{Census, GuardOrigin, Kind};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A site with its counts under each policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Site {
    /// Kind, guest instruction and step: `branch@401136.3`.
    pub site: String,
    /// The head of its trace.
    pub trace: u64,
    /// The guest instruction.
    pub pc: u64,
    /// The instruction by symbol and offset.
    pub symbol: String,
    /// One for each policy that was counted.
    pub counts: Vec<SiteCounts>,
}

/// A site under one policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SiteCounts {
    /// The policy.
    pub policy: String,
    /// Executions of guards that check it.
    pub executed: u64,
    /// Failures of these.
    pub failed: u64,
}

impl Site {
    /// The policies with the fewest and the most executions; of equal ones those whose failures differ.
    pub fn extremes(&self) -> Option<(&SiteCounts, &SiteCounts)> {
        let order = |counts: &&SiteCounts| (counts.executed, counts.failed);
        Some((self.counts.iter().min_by_key(order)?, self.counts.iter().max_by_key(order)?))
    }

    /// How much the policies differ: in executions and in failures.
    fn difference(&self) -> u64 {
        let span = |count: &dyn Fn(&SiteCounts) -> u64| {
            let (least, most) =
                (self.counts.iter().map(count).min(), self.counts.iter().map(count).max());
            most.unwrap_or(0) - least.unwrap_or(0)
        };
        span(&|counts| counts.executed) + span(&|counts| counts.failed)
    }
}

/// The sites of all policies so far.
#[derive(Default)]
pub struct Sites {
    symbols: Option<Symbols>,
    policies: Vec<String>,
    /// By head and origin: executions and failures by the number of the policy.
    counts: BTreeMap<(u64, GuardOrigin), BTreeMap<usize, (u64, u64)>>,
}

impl Sites {
    /// Adds the counting run of a policy.
    pub fn add(&mut self, policy: &str, census: &Census) {
        let images = || census.images.iter().cloned().map(Into::into);
        self.symbols.get_or_insert_with(|| Symbols::read(images()));
        let policy_number = self.policies.len();
        self.policies.push(policy.to_string());
        for fragment in census.fragments.iter().filter(|f| f.kind != Kind::Stub) {
            for guard in &fragment.guards {
                for origin in &guard.origins {
                    let site = self.counts.entry((fragment.pc, *origin)).or_default();
                    let (executed, failed) = site.entry(policy_number).or_default();
                    *executed += guard.executed;
                    *failed += guard.failed;
                }
            }
        }
    }

    /// The sites in which the policies differ most, at most `most` of them.
    pub fn differing(self, most: usize) -> Vec<Site> {
        let Sites { symbols, policies, counts } = self;
        let site =
            |((trace, origin), counts): ((u64, GuardOrigin), BTreeMap<usize, (u64, u64)>)| {
                let kind = serde_json::to_value(origin.kind).ok();
                let kind = kind.as_ref().and_then(|kind| kind.as_str()).unwrap_or_default();
                let step = origin.step.map_or(String::new(), |step| format!(".{step}"));
                let counts = policies.iter().enumerate().map(|(number, policy)| {
                    let (executed, failed) = counts.get(&number).copied().unwrap_or_default();
                    SiteCounts { policy: policy.clone(), executed, failed }
                });
                Site {
                    site: format!("{kind}@{:x}{step}", origin.pc),
                    trace,
                    pc: origin.pc,
                    symbol: symbols
                        .as_ref()
                        .map_or(String::new(), |symbols| symbols.name(origin.pc)),
                    counts: counts.collect(),
                }
            };
        let mut sites: Vec<Site> = counts.into_iter().map(site).collect();
        sites.retain(|site| site.difference() > 0);
        sites.sort_by_key(|site| std::cmp::Reverse(site.difference()));
        sites.truncate(most);
        sites
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_extremes_are_the_policies_that_differ_most() {
        let counts = [("eager", 100, 3), ("hoisted", 1, 1), ("merged", 100, 5)];
        let counts = counts.map(|(policy, executed, failed)| SiteCounts {
            policy: policy.to_string(),
            executed,
            failed,
        });
        let site = Site {
            site: "branch@40.1".to_string(),
            trace: 0x40,
            pc: 0x40,
            symbol: String::new(),
            counts: counts.to_vec(),
        };
        let (least, most) = site.extremes().expect("policies");
        assert_eq!((least.policy.as_str(), most.policy.as_str()), ("hoisted", "merged"));
        assert_eq!(site.difference(), 99 + 4);
        assert_eq!(Site { counts: Vec::new(), ..site }.extremes(), None);
    }
}
