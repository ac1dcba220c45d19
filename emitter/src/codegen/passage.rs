//! Passages: code between two linked fragments, if the first has borrowed other registers than the
//! second saves.
//!
//! A passage restores the registers that only the first fragment has borrowed, saves those that
//! only the second borrows, and jumps into the second, behind its own saves:
//!
//! ```text
//! mov rbx, gs:[slot of rbx]      given back
//! mov gs:[slot of r9], r9        saved for the second
//! jmp <the second fragment, behind what saves registers>
//! ```

use crate::asm::{Asm, Assembler};
use crate::codegen::encode::ENTRY_ALIGNMENT;
use crate::codegen::encoded::{Encoded, EncodedEnd, Target};
use crate::codegen::instruction::{restore, save};
use dynasour_guest::context::offset;

/// The code of a passage. Its only exit is site 0, where a thread leaves that is to come out; all
/// of `saved` is given back before that.
pub fn passage(give_back: &[(u8, u16)], borrow: &[(u8, u16)], saved: &[(u8, u16)]) -> Encoded {
    let (mut hot, mut cold) = (Asm::new(), Asm::new());
    give_back.iter().for_each(|&(r, s)| restore(&mut hot, r, s));
    borrow.iter().for_each(|&(r, s)| save(&mut hot, r, s));
    hot.align_field(1);
    hot.jmp();
    let field = hot.relocate(Target::Restored(0));
    saved.iter().for_each(|&(r, s)| restore(&mut cold, r, s));
    cold.align_field(1);
    cold.jmp();
    let at = cold.relocate(Target::Unlinked(0));
    let out = cold.here() as u32;
    cold.store_constant(offset::EXIT_SITE, 0);
    cold.relocate(Target::Exit(0));
    cold.jmp();
    cold.relocate(Target::LeaveCanonical);
    let mut code = Encoded {
        alignment: ENTRY_ALIGNMENT,
        ends: vec![EncodedEnd { site: 0, borrowed: Some((field, 0)), cold: true, at, tail: None }],
        unlinked: vec![(0, out)],
        ..Encoded::default()
    };
    code.finish(hot, cold);
    code
}
