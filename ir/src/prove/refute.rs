//! From a state in which a proof failed to a counterexample, if it is one.
//!
//! A solver's state says what some registers and some words of memory hold. It is a counterexample only if
//! the evaluator shows it: loads were arbitrary for the solver, and in a loop it spoke of some iteration.
//!
//! **Callers.** [`super::prove`]. No data, no lock.
//!
//! ```text
//! rcx = 60, 8 bytes at 0x1000 = 7      check: version leaves to 0x1420a with rax = 7, base with rax = 8
//! ```

use super::solver::State;
use super::spec::Reference;
use crate::eval::check::{Limits, check};
use crate::eval::{Fault, Leave, ModelMachine, NoHooks, Reason, run};
use crate::setup::{Setting, Setup};
use crate::types::Ty;
use crate::version::Version;

/// Pages that are given to a state whose version reads where the solver has said nothing (guess).
const MOST_PAGES: u32 = 64;
/// IR instructions of one evaluation (guess).
const STEPS: u64 = 100_000;
/// Opportunities that are taken (guess).
const FORCED: u64 = 256;

/// The first of these states that is a counterexample, the latest first, and what is wrong from there.
pub fn refute(
    reference: &mut Reference<'_>,
    version: &Version,
    constants: &[(u64, u32, u64)],
    suspects: &[State],
) -> Option<(Setup, String)> {
    // What lies behind the exits of a trace is not known: a version that leaves elsewhere may be right.
    let Reference::Program { code, .. } = reference else { return None };
    suspects.iter().rev().find_map(|suspect| {
        let setup = setup(version, constants, suspect)?;
        let (state, machine) = setup.build();
        let limits = Limits { steps: STEPS, forced: FORCED };
        let wrong = check(*code, version, &state, &machine, limits).err()?;
        Some((setup, wrong.what))
    })
}

/// The state with pages wherever the version reads or writes.
fn setup(version: &Version, constants: &[(u64, u32, u64)], suspect: &State) -> Option<Setup> {
    let word = |(address, bytes, value): &(u64, u32, u64)| Setting::Data {
        address: *address,
        ty: Ty::I8,
        values: value.to_le_bytes()[..*bytes as usize].iter().map(|b| u64::from(*b)).collect(),
    };
    let words = suspect.words.iter().chain(constants).filter(|(_, bytes, _)| *bytes <= 8);
    let locs = suspect.locs.iter().map(|(loc, value)| Setting::Loc(*loc, *value));
    let settings: Vec<Setting> = locs.chain(words.map(word)).collect();
    let mut setup = Setup { name: Some("counterexample".to_string()), settings };
    for _ in 0..MOST_PAGES {
        let (mut state, mut machine): (_, ModelMachine) = setup.build();
        match run(version, &mut state, &mut machine, &mut NoHooks, &mut { STEPS }).ok()? {
            Leave::Anchor {
                reason: Reason::Fault(Fault::Load(address) | Fault::Store(address)),
                ..
            } => {
                setup.settings.insert(0, Setting::Zero { address: address & !0xfff, size: 0x1000 })
            }
            _ => break,
        }
    }
    Some(setup)
}
