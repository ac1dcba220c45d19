//! Indirect transfers between pieces of generated code: how their destinations check that they are
//! meant.

pub(crate) mod entry_check;
