//! Pipelines of the user's own, which `guards --pipeline` compares with the policies.
//!
//! A pipeline is a policy whose passes are replaced, as `run --policy POLICY --passes PASS,…` does. What
//! traces assume, and to which anchors the guards of branches fall back, stay those of the policy.
//!
//! Data: [`Pipeline`]. Invariant: its name is no policy's, and all its passes exist. No lock.
//!
//! Example: `mine=eager:simplify,licm,dce` is called `mine`, assumes what `eager` assumes, and has three
//! passes. Without `eager:` the policy is the default one.

use dynasour_runtime::config::{Placement, parse_trace_pass, placement};
use std::str::FromStr;

/// A named list of passes.
#[derive(Clone, Debug)]
pub struct Pipeline {
    /// What tables call it.
    pub name: String,
    /// The policy of which the passes are replaced.
    policy: &'static dyn Placement,
    passes: Vec<String>,
}

impl Pipeline {
    /// The options of `run` that select it.
    pub fn options(&self) -> [String; 4] {
        let policy = self.policy.name().to_string();
        ["--policy".to_string(), policy, "--passes".to_string(), self.passes.join(",")]
    }

    /// One line of description.
    pub fn about(&self) -> String {
        format!("as {}, with the passes {}", self.policy.name(), self.passes.join(", "))
    }
}

impl FromStr for Pipeline {
    type Err = String;

    fn from_str(text: &str) -> Result<Pipeline, String> {
        let form = "expected NAME=PASS,… or NAME=POLICY:PASS,…";
        let (name, rest) = text.split_once('=').ok_or(form)?;
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if name.is_empty() || !name.chars().all(is_word) {
            return Err(format!("{form}, where NAME has letters, digits, `-` and `_`"));
        }
        if placement::placement(name).is_ok() {
            return Err(format!("{name} is the name of a policy; choose another one"));
        }
        let (policy, passes) = match rest.split_once(':') {
            Some((policy, passes)) => (placement::placement(policy)?, passes),
            None => (placement::DEFAULT, rest),
        };
        let passes: Result<Vec<String>, String> = passes
            .split(',')
            .map(|pass| parse_trace_pass(pass).map_err(|error| format!("{pass:?}: {error}")))
            .collect();
        Ok(Pipeline { name: name.to_string(), policy, passes: passes? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipeline_has_a_name_a_policy_and_passes() {
        let mine: Pipeline = "mine=simplify,dce".parse().expect("right");
        assert_eq!(mine.options().join(" "), "--policy default --passes simplify,dce");
        let mine: Pipeline = "my-2=eager:licm".parse().expect("right");
        assert_eq!(
            (mine.name.as_str(), mine.about().as_str()),
            ("my-2", "as eager, with the passes licm")
        );
        for (wrong, part) in [
            ("simplify", "expected NAME=PASS"),
            ("=dce", "letters, digits"),
            ("a b=dce", "letters, digits"),
            ("eager=dce", "name of a policy"),
            ("x=", "\"\": unknown pass"),
            ("x=dce,,licm", "\"\": unknown pass"),
            ("x=eagre:dce", "unknown policy"),
            ("x=monitor", "only the evaluator"),
        ] {
            let error = wrong.parse::<Pipeline>().expect_err(wrong);
            assert!(error.contains(part), "{wrong}: {error}");
        }
    }
}
