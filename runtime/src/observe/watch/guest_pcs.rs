//! For which guest instruction the native code of a fragment is.
//!
//! Data: [`GuestPcs`]. What its version is for, [`crate::observe::guest_code`] knows. No lock.
//!
//! Example: `v21 = add.i64 v18, v19` is for the `add` at 0x111cb, and its machine code begins at offset 0x30:
//! [`GuestPcs`] has the pair (0x30, 0x111cb).

/// Offsets in the code of a fragment, ascending, each with the address of the guest instruction that the
/// code from there on is for.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct GuestPcs(Vec<(u32, u64)>);

impl GuestPcs {
    /// By the positions of instructions of the version in its code, and their guest addresses.
    pub fn of(positions: &[(u32, (u32, u32))], pcs: &[Vec<Option<u64>>]) -> GuestPcs {
        let mut all: Vec<(u32, u64)> = Vec::new();
        for &(offset, (block, inst)) in positions {
            let pc = pcs.get(block as usize).and_then(|block| *block.get(inst as usize)?);
            if let Some(pc) = pc.filter(|pc| all.last().is_none_or(|last| last.1 != *pc)) {
                all.push((offset, pc));
            }
        }
        GuestPcs(all)
    }

    /// The pairs of offset and address.
    pub fn iter(&self) -> impl Iterator<Item = &(u32, u64)> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_without_an_address_belongs_to_what_is_before() {
        let pcs = [vec![Some(0x10), Some(0x14), None, Some(0x14), Some(0x10)]];
        let positions =
            [(0, (0, 0)), (4, (0, 0)), (8, (0, 1)), (9, (0, 2)), (12, (0, 3)), (16, (7, 7))];
        assert_eq!(GuestPcs::of(&positions, &pcs), GuestPcs(vec![(0, 0x10), (8, 0x14)]));
    }
}
