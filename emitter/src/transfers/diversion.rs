//! Diversions: how a signal handler sends a thread to the runtime from a point that no link
//! reaches.
//!
//! The module owns no data. Any thread may use these types, also in a signal handler.
//!
//! Example: a signal interrupts the miss stub. [`Displaced::Four`] says that rcx, rax, rdx and rsi
//! are in `stub_save`; the handler puts them back and continues at the diversion's `rip`.

use crate::transfers::indirect::{SAVE_RAX, SAVE_RCX, SAVE_RDX, SAVE_RSI};

/// Registers whose guest values are in `stub_save`, and not in the registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Displaced {
    /// None.
    None,
    /// Only rcx.
    Rcx,
    /// rcx, rax and rdx.
    Three,
    /// rcx, rax, rdx and rsi: the registers of the miss stub.
    Four,
}

/// The way to the runtime of a thread that a signal has interrupted at a point from which no link
/// leads there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Diversion {
    /// Where it continues.
    pub rip: u64,
    /// These registers first get their values back.
    pub displaced: Displaced,
}

impl Displaced {
    /// Pairs of a register's number and the index into `stub_save` where its value is.
    pub fn places(self) -> &'static [(usize, usize)] {
        const ALL: [(usize, usize); 4] =
            [(1, SAVE_RCX), (0, SAVE_RAX), (2, SAVE_RDX), (6, SAVE_RSI)];
        match self {
            Displaced::None => &[],
            Displaced::Rcx => &ALL[..1],
            Displaced::Three => &ALL[..3],
            Displaced::Four => &ALL,
        }
    }
}
