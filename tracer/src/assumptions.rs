//! What a trace assumes beyond its path, as data, so that one assumption can be undone (sourir 7.4).
//!
//! Code that was optimised under an assumption does not say which of its parts depend on it. So the
//! assumption is not taken out of the code: the trace is dropped, and the head is recorded again. The
//! next trace assumes all but that, there and from then on: it is sourir's version under the other
//! assumptions. The guest goes on in `base` meanwhile.
//!
//! Data: [`Assumption`], plain. Invariant: an assumption decides how fast a trace is, never what it
//! computes: a guard checks each. [`crate::build`] lists them; [`crate::heads`] and [`crate::guests`]
//! know which were undone. No lock.
//!
//! ```text
//! rcx = 3 at the head; the byte at 0x5012, an operand of the interpreted program, is 7
//!     the guard fails, and 0x5012 holds 9: the next trace assumes only rcx = 3
//! ```

use dynasour_ir::{Gpr, Ty};

/// Where an assumed value is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// In a register, at the trace's head.
    Register(Gpr),
    /// In memory: an operand of the program that the guest interprets.
    Memory {
        /// The address.
        address: u64,
        /// Its type.
        ty: Ty,
    },
}

/// A trace is only fast while this place has this value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Assumption {
    /// Where the value is.
    pub place: Place,
    /// The value, with zeros above the type's bits.
    pub value: u64,
}

impl Assumption {
    /// Does it hold, with these registers at the head (none: they are not known) and this memory? What
    /// is not known or cannot be read holds.
    pub fn holds(&self, gpr: Option<&[u64; 16]>, read: impl Fn(u64, u32) -> Option<u64>) -> bool {
        let now = match self.place {
            Place::Register(g) => gpr.map(|gpr| gpr[g.number()]),
            Place::Memory { address, ty } => read(address, ty.bytes()).map(|v| v & ty.mask()),
        };
        now.is_none_or(|now| now == self.value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_known_to_differ_does_not_hold() {
        let rcx = Gpr::all().nth(1).expect("sixteen registers");
        let register = Assumption { place: Place::Register(rcx), value: 3 };
        let memory = Assumption { place: Place::Memory { address: 0x5012, ty: Ty::I8 }, value: 7 };
        let read = |address, _| (address == 0x5012).then_some(0x1207);
        let mut gpr = [3; 16];
        assert!(register.holds(Some(&gpr), read) && register.holds(None, read));
        gpr[1] = 4;
        assert!(!register.holds(Some(&gpr), read));
        assert!(memory.holds(None, read), "one byte is compared");
        assert!(!memory.holds(None, |_, _| Some(9)));
        assert!(memory.holds(None, |_, _| None));
    }
}
