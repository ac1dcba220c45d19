//! Regions: a guest entry point and all its versions.

use crate::version::Version;

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
