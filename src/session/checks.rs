//! Names of passes and policies are looked up before anything runs.
//!
//! Data: none. Invariant: what has passed here means something in the guest's process, where nobody could be told any
//! more. No lock.
//!
//! Example: `.skip_pass("foward")` is refused: "there is no pass `foward` (did you mean `forward`?); there are …".

use super::outcome::SessionError;
use dynasour_ir::opt::{self, Position, Registry};
use dynasour_tracer::placement::{DEFAULT, PLACEMENTS, Placement};
use std::sync::Arc;

/// A placement that a session may use.
#[derive(Clone)]
pub(super) enum Chosen {
    BuiltIn(&'static dyn Placement),
    Own(Arc<dyn Placement>),
}

impl Chosen {
    pub(super) fn get(&self) -> &dyn Placement {
        match self {
            Chosen::BuiltIn(placement) => *placement,
            Chosen::Own(placement) => &**placement,
        }
    }
}

/// The name that may be meant, as part of an error.
fn near<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> String {
    let distance = |other: &&str| strsim::damerau_levenshtein(other, name);
    let near = known.min_by_key(distance).filter(|other| distance(other) <= 2);
    near.map_or(String::new(), |near| format!(" (did you mean `{near}`?)"))
}

/// The placement that is to be used, out of the built-in ones and `own`.
pub(super) fn placement(
    name: Option<&str>,
    own: &[Arc<dyn Placement>],
) -> Result<Chosen, SessionError> {
    for (i, placement) in own.iter().enumerate() {
        let before = own[..i].iter().map(|other| other.name());
        if PLACEMENTS.iter().map(|other| other.name()).chain(before).any(|n| n == placement.name())
        {
            return Err(SessionError::PolicyTaken(placement.name()));
        }
    }
    let Some(name) = name else {
        return Ok(own.last().cloned().map_or(Chosen::BuiltIn(DEFAULT), Chosen::Own));
    };
    let built_in = PLACEMENTS.iter().find(|p| p.name() == name).map(|p| Chosen::BuiltIn(*p));
    let found =
        built_in.or_else(|| own.iter().find(|p| p.name() == name).cloned().map(Chosen::Own));
    found.ok_or_else(|| {
        let all = || PLACEMENTS.iter().map(|p| p.name()).chain(own.iter().map(|p| p.name()));
        SessionError::UnknownPolicy {
            name: name.to_string(),
            near: near(name, all()),
            known: all().collect::<Vec<_>>().join(", "),
        }
    })
}

/// Is there a pass of this name that traces can go through?
pub(super) fn pass(name: &str, registry: &Registry) -> Result<(), SessionError> {
    if !registry.has(name) {
        return Err(SessionError::UnknownPass {
            name: name.to_string(),
            near: near(name, registry.names()),
            known: registry.names().collect::<Vec<_>>().join(", "),
        });
    }
    match opt::pass(name) {
        Some(pass) if pass.evaluator_only => Err(SessionError::EvaluatorOnly(name.to_string())),
        _ => Ok(()),
    }
}

/// Does each own pass that is to stand beside another have its place in the pipeline?
pub(super) fn positions(
    registry: &Registry,
    passes: Option<&[String]>,
    placement: &dyn Placement,
) -> Result<(), SessionError> {
    let pipeline: Vec<&str> = match passes {
        Some(passes) => passes.iter().map(String::as_str).collect(),
        None => placement.passes().to_vec(),
    };
    pipeline.iter().try_for_each(|name| pass(name, registry))?;
    let arranged = registry.arranged(&pipeline);
    for own in registry.own() {
        if let Position::Before(beside) | Position::After(beside) = own.position() {
            pass(beside, registry)?;
            if !arranged.contains(&own.name()) {
                let (pass, policy) = (own.name(), placement.name());
                return Err(SessionError::NoPlace { pass, beside, policy });
            }
        }
    }
    Ok(())
}
