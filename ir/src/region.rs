//! Regions: a guest entry point and all its versions (sourir 3.1, 3.3).
//!
//! **Data.** [`Region`] owns its versions in the order of dispatch: the first one whose context
//! holds is entered. A more specific context comes before those that it implies, a newer version
//! before an older one with the same context, and `base` last. A version that dispatch cannot
//! choose may still be the target of another version's anchors ([`crate::Via`]).
//! [`Region::remove_unreferenced`] removes a version when no anchor leads to it any more.
//!
//! ```text
//! copy t1 as t2        t2 { anchor a0 = base.0x1000 [rax = v5] via t1.a0 [v2 = v2, v5 = v5]; … }
//! insert               t2, t1, base           t2 is active: it has t1's context and is newer
//! bypass t1            t2 { anchor a0 = base.0x1000 [rax = v5] }         as t1's own anchor (4.6)
//! remove_unreferenced  t2, base
//! ```
//!
//! **Invariants.** A version to which a label leads is *frozen*: labels name values of its text, so
//! passes may change only versions to which no label leads. [`verify_region`] finds labels that no
//! longer fit. **Callers.** `dynasour ir`, the evaluator and tests, on regions that they own; no
//! lock.

use crate::live::Live;
use crate::reach::{Cfg, Reach};
use crate::types::{AnchorId, Operand, Value};
use crate::verify::{VerifyError, verify};
use crate::version::{Anchor, Context, Version, Via};
use rustc_hash::{FxHashMap, FxHashSet};

/// A region and its versions.
#[derive(Clone, PartialEq, Debug)]
pub struct Region {
    /// The guest pc.
    pub pc: u64,
    /// Its symbol, if one is known.
    pub symbol: Option<String>,
    /// In the order of dispatch.
    pub versions: Vec<Version>,
}

/// Why an operation on a region is refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RegionError {
    /// There is no version of that name.
    #[error("there is no version {0}")]
    NoVersion(String),
    /// The name is taken.
    #[error("there is a version {0} already")]
    Exists(String),
    /// `base` is not SSA and has no anchors.
    #[error("{0} is a base version, which has no labels to map")]
    IsBase(String),
}

/// A broken rule of a region.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RegionRule {
    /// A version does not verify.
    #[error("{version}: {error}")]
    Version {
        /// Which.
        version: String,
        /// What is wrong.
        error: VerifyError,
    },
    /// Two versions have one name, or a version belongs to another region.
    #[error("{version}: {what}")]
    Listing {
        /// Which.
        version: String,
        /// What is wrong.
        what: &'static str,
    },
    /// A label of an anchor does not fit the version it names.
    #[error("{version}, {anchor}: {what}")]
    Label {
        /// The version that has the anchor.
        version: String,
        /// The anchor.
        anchor: AnchorId,
        /// What is wrong.
        what: String,
    },
}

impl Region {
    /// A region without versions.
    pub fn new(pc: u64) -> Region {
        Region { pc, symbol: None, versions: Vec::new() }
    }

    /// The version of this name.
    pub fn version(&self, name: &str) -> Option<&Version> {
        self.versions.iter().find(|v| v.name == name)
    }

    /// The version of this name, to be changed.
    pub fn version_mut(&mut self, name: &str) -> Option<&mut Version> {
        self.versions.iter_mut().find(|v| v.name == name)
    }

    /// The first version whose context holds, which dispatch enters.
    pub fn dispatch(&self, mut holds: impl FnMut(&Context) -> bool) -> Option<&Version> {
        self.versions.iter().find(|v| holds(&v.context))
    }

    /// The version that a region without contexts enters: the first one.
    pub fn active(&self) -> Option<&Version> {
        self.versions.first()
    }

    /// Inserts a version in the order of dispatch: before every version whose context it implies.
    pub fn insert(&mut self, version: Version) -> Result<(), RegionError> {
        if self.version(&version.name).is_some() {
            return Err(RegionError::Exists(version.name));
        }
        let at = match version.is_base() {
            true => self.versions.len(),
            false => {
                let first = |v: &Version| v.is_base() || version.context.implies(&v.context);
                self.versions.iter().position(first).unwrap_or(self.versions.len())
            }
        };
        self.versions.insert(at, version);
        Ok(())
    }

    /// A fresh version with the parent's instructions. Each anchor has a label at the same anchor
    /// of the parent, with the identity as its map (sourir 3.3). The copy is not inserted, because
    /// assumptions are injected first (3.4).
    pub fn copy(&self, parent: &str, name: &str) -> Result<Version, RegionError> {
        let original =
            self.version(parent).ok_or_else(|| RegionError::NoVersion(parent.to_string()))?;
        if original.is_base() {
            return Err(RegionError::IsBase(parent.to_string()));
        }
        if self.version(name).is_some() {
            return Err(RegionError::Exists(name.to_string()));
        }
        let cfg = Cfg::new(original);
        let (reach, live) = (Reach::new(original, &cfg), Live::new(original, &cfg));
        let mut copy = original.clone();
        copy.name = name.to_string();
        for (i, anchor) in copy.anchors.iter_mut().enumerate() {
            anchor.via = reach.positions[i].map(|point| {
                let values = live.at(point).into_iter().map(|v| (v, Operand::Value(v))).collect();
                Box::new(Via { version: parent.to_string(), anchor: AnchorId(i as u32), values })
            });
        }
        Ok(copy)
    }

    /// Composes assumes (4.6): every anchor that leads to `middle` then leads where `middle`'s own
    /// anchor leads, so that nothing refers to `middle` any more. Returns the number of anchors
    /// changed; 0 if there is no such version.
    ///
    /// The predicate of `middle`'s assume need not be copied: by transparency its anchor may be
    /// taken whether it holds or not.
    pub fn bypass(&mut self, middle: &str) -> usize {
        let Some(target) = self.version(middle).cloned() else { return 0 };
        let mut changed = 0;
        for version in &mut self.versions {
            for anchor in &mut version.anchors {
                if anchor.via.as_ref().is_some_and(|via| via.version == middle)
                    && compose(anchor, &target)
                {
                    changed += 1;
                }
            }
        }
        changed
    }

    /// Composes all labels of all versions, transitively, so that every anchor leads straight to
    /// `base`. Returns the number of anchors changed.
    pub fn compose_all(&mut self) -> usize {
        let names: Vec<String> = self.versions.iter().map(|v| v.name.clone()).collect();
        names.iter().map(|name| self.bypass(name)).sum()
    }

    /// The versions that dispatch can choose: their context does not imply the context of an
    /// earlier version.
    pub fn dispatchable(&self) -> impl Iterator<Item = &Version> {
        let shadowed = |i: usize| {
            self.versions[..i].iter().any(|w| self.versions[i].context.implies(&w.context))
        };
        self.versions
            .iter()
            .enumerate()
            .filter(move |(i, v)| v.is_base() || !shadowed(*i))
            .map(|(_, v)| v)
    }

    /// Removes the versions that neither dispatch chooses nor an anchor of a remaining version
    /// leads to; returns their names. `base` remains.
    pub fn remove_unreferenced(&mut self) -> Vec<String> {
        let mut wanted: FxHashSet<String> = FxHashSet::default();
        let mut work: Vec<String> = self.dispatchable().map(|v| v.name.clone()).collect();
        while let Some(name) = work.pop() {
            if let Some(version) = self.version(&name)
                && wanted.insert(name)
            {
                work.extend(labels(version).map(|(_, via)| via.version.clone()));
            }
        }
        let gone = self
            .versions
            .iter()
            .filter(|v| !wanted.contains(&v.name))
            .map(|v| v.name.clone())
            .collect();
        self.versions.retain(|v| wanted.contains(&v.name));
        gone
    }

    /// Does an anchor of another version lead to this one?
    pub fn is_frozen(&self, name: &str) -> bool {
        self.versions.iter().any(|v| labels(v).any(|(_, via)| via.version == name))
    }
}

/// The anchors of a version that have a label, with it.
fn labels(version: &Version) -> impl Iterator<Item = (AnchorId, &Via)> {
    let anchors = version.anchors.iter().enumerate();
    anchors.filter_map(|(i, a)| Some((AnchorId(i as u32), a.via.as_deref()?)))
}

/// Makes an anchor lead where `middle`'s anchor leads: under the anchor's map, to the label of
/// `middle`'s anchor. Without such a label it leads to `base`, whose state the anchor describes in
/// any case. False if the label does not fit.
fn compose(anchor: &mut Anchor, middle: &Version) -> bool {
    let Some(via) = &anchor.via else { return false };
    let Some(next) = middle.anchors.get(via.anchor.index()) else { return false };
    let map: FxHashMap<Value, Operand> = via.values.iter().copied().collect();
    let ours = |o: Operand| match o {
        Operand::Value(v) => map.get(&v).copied(),
        Operand::Const(_) => Some(o),
    };
    let label = next.via.as_ref().map(|next| {
        let values: Option<Vec<(Value, Operand)>> =
            next.values.iter().map(|(v, o)| Some((*v, ours(*o)?))).collect();
        Some(Box::new(Via { version: next.version.clone(), anchor: next.anchor, values: values? }))
    });
    match label {
        None => anchor.via = None,
        Some(Some(label)) => anchor.via = Some(label),
        Some(None) => return false,
    }
    true
}

/// Verifies every version, and the labels between them. The named version and anchor exist and are
/// used; the values live there are mapped and typed; the context implies that of the target; no
/// chain of labels leads back.
pub fn verify_region(region: &Region) -> Result<(), Vec<RegionRule>> {
    let mut broken = Vec::new();
    for (i, version) in region.versions.iter().enumerate() {
        let name = || version.name.clone();
        if region.versions[..i].iter().any(|v| v.name == version.name) {
            broken.push(RegionRule::Listing { version: name(), what: "the name is taken" });
        }
        if version.region != region.pc {
            broken.push(RegionRule::Listing {
                version: name(),
                what: "it belongs to another region",
            });
        }
        if let Err(errors) = verify(version) {
            broken.extend(
                errors.into_iter().map(|error| RegionRule::Version { version: name(), error }),
            );
        }
    }
    if broken.is_empty() {
        for version in &region.versions {
            for (anchor, via) in labels(version) {
                if let Some(what) = label_fault(region, version, via) {
                    broken.push(RegionRule::Label { version: version.name.clone(), anchor, what });
                }
            }
        }
    }
    if broken.is_empty() { Ok(()) } else { Err(broken) }
}

fn label_fault(region: &Region, version: &Version, via: &Via) -> Option<String> {
    let Some(target) = region.version(&via.version) else {
        return Some(format!("there is no version {}", via.version));
    };
    if leads_to(region, target, &version.name) {
        return Some(format!("{} leads back to {}", target.name, version.name));
    }
    if !version.context.implies(&target.context) {
        return Some(format!("the context of {} need not hold", target.name));
    }
    let cfg = Cfg::new(target);
    let reach = Reach::new(target, &cfg);
    let Some(point) = reach.positions.get(via.anchor.index()).copied().flatten() else {
        return Some(format!("{} has no {} in use", target.name, via.anchor));
    };
    if via.values.windows(2).any(|pair| pair[0].0 >= pair[1].0) {
        return Some("its values are not sorted or repeat".to_string());
    }
    for (value, operand) in &via.values {
        let Some(ty) = target.types.get(value.index()) else {
            return Some(format!("{} has no {value}", target.name));
        };
        let fits = match operand {
            Operand::Value(v) => version.types.get(v.index()) == Some(ty),
            Operand::Const(c) => c & !ty.mask() == 0,
        };
        if !fits {
            return Some(format!("{operand} is not {ty}, as {value} is"));
        }
    }
    let live = Live::new(target, &cfg).at(point);
    let missing =
        live.iter().find(|v| via.values.binary_search_by_key(*v, |(value, _)| *value).is_err());
    missing.map(|v| format!("{v} is live there and not mapped"))
}

/// Does a chain of labels lead from `from` to the version of this name?
fn leads_to(region: &Region, from: &Version, name: &str) -> bool {
    let mut seen: FxHashSet<&str> = FxHashSet::default();
    let mut work = vec![from];
    while let Some(version) = work.pop() {
        if version.name == name {
            return true;
        }
        if seen.insert(&version.name) {
            work.extend(labels(version).filter_map(|(_, via)| region.version(&via.version)));
        }
    }
    false
}
