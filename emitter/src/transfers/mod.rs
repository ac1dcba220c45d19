//! Indirect jumps, calls and returns between pieces of generated code.
//!
//! | file | what it is |
//! | --- | --- |
//! | [`indirect`] | the code at each site: a jump through the first table |
//! | [`entry_check`] | the beginning of a destination, which compares the target |
//! | [`lookup`] | the two tables |
//! | [`miss_stubs`] | shared code for a target that the first table does not have |
//! | [`stack_returns`] | returns through the processor's return stack |
//! | [`hit_rates`] | counters of how targets were found |

pub(crate) mod entry_check;
pub(crate) mod hit_rates;
pub mod indirect;
pub(crate) mod lookup;
pub(crate) mod miss_stubs;
pub(crate) mod stack_returns;
