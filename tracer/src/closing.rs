//! Where a loop of an interpreted program is entered: at the handler that closes it.
//!
//! Every instruction of the interpreted program passes the head of a dispatch loop. If a trace began
//! there, all of them would look whether it is theirs, also those of other loops and between loops. The handler
//! of the jump that closes the loop is passed once in an iteration, and seldom by anything else. So a
//! recording that has found a loop at a dispatch head goes on until the loop comes round at its closing
//! handler, and the trace begins there.
//!
//! The closing handler is told by the position in the interpreted program: the register which has the most
//! different values at the dispatches of an iteration. From the closing handler to the next one it goes back
//! farthest.
//!
//! ```text
//! dispatch to     load   add    load   less   jump-back   load
//! rbx (position)  0x14   0x18   0x1c   0x20   0x24        0x14
//!                                             └── back by 0x10: the closing handler
//! ```
//!
//! Data: [`Dispatched`], part of a search. Invariant: a wrong choice costs time, never a wrong result. The
//! recorder is the only caller; no lock.

use crate::build::Step;
use crate::guests::Green;
use dynasour_ir::Gpr;
use rustc_hash::FxHashSet;

/// A loop that dispatches less often is entered where it was found (guess: then its head is no dispatch that all
/// handlers share).
const LEAST_DISPATCHES: usize = 3;

/// The state after a dispatch.
#[derive(Debug)]
pub(crate) struct Dispatched {
    /// The number of steps until then.
    pub steps: usize,
    /// The general registers.
    pub gpr: [u64; 16],
}

/// The pc of the handler that closes the loop whose iteration is the last of `steps`, from the step `first` on.
/// `greens` are those of the head where it was found. None if it cannot be told.
pub(crate) fn closing_handler(
    steps: &[Step],
    first: usize,
    dispatched: &[Dispatched],
    greens: &[Green],
) -> Option<u64> {
    let before = dispatched.partition_point(|at| at.steps <= first);
    let iteration = &dispatched[before..];
    if iteration.len() < LEAST_DISPATCHES {
        return None;
    }
    let position = position(iteration, greens)?;
    let next = iteration.iter().cycle().skip(1);
    let (closing, _) = iteration
        .iter()
        .zip(next)
        .map(|(at, next)| (at, next.gpr[position].wrapping_sub(at.gpr[position]) as i64))
        .min_by_key(|(_, distance)| *distance)?;
    let handler = |at: &Dispatched| steps[at.steps - 1].next;
    let closing = handler(closing);
    // If many instructions go through it, nothing is gained.
    let passages = iteration.iter().filter(|at| handler(at) == closing).count();
    (2 * passages <= iteration.len()).then_some(closing)
}

/// The number of the register that tells the position in the interpreted program: of the greens, or of all
/// registers if no green is one.
fn position(iteration: &[Dispatched], greens: &[Green]) -> Option<usize> {
    let values = |g: usize| iteration.iter().map(|at| at.gpr[g]).collect::<FxHashSet<_>>().len();
    let green = |green: &Green| match green {
        Green::Register(g) => Some(g.number()),
        Green::Slot(..) => None,
    };
    let mut candidates: Vec<usize> = greens.iter().filter_map(green).collect();
    if candidates.is_empty() {
        candidates = (0..16).filter(|g| *g != Gpr::RSP.number()).collect();
    }
    candidates.into_iter().max_by_key(|g| values(*g)).filter(|g| values(*g) >= LEAST_DISPATCHES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dynasour_guest::lift::{Bytes, MAX_BLOCK, lift_block};
    use std::sync::Arc;

    /// An iteration of dispatches to these handlers, where rbx holds these positions.
    fn closing(handlers: &[(u64, u64)], greens: &[Green]) -> Option<u64> {
        let code = Bytes { start: 0x1000, bytes: &[0xff, 0xe0] };
        let block = Arc::new(lift_block(0x1000, &code, MAX_BLOCK));
        let step = |next| Step { block: block.clone(), next, observed: None };
        // One step before the iteration.
        let nexts = [0x1000].into_iter().chain(handlers.iter().map(|(handler, _)| *handler));
        let steps: Vec<Step> = nexts.map(step).collect();
        let at = |(n, (_, rbx)): (usize, &(u64, u64))| {
            let mut gpr = [7; 16];
            gpr[Gpr::RBX.number()] = *rbx;
            Dispatched { steps: n + 2, gpr }
        };
        let mut dispatched = vec![Dispatched { steps: 1, gpr: [0; 16] }];
        dispatched.extend(handlers.iter().enumerate().map(at));
        closing_handler(&steps, 1, &dispatched, greens)
    }

    #[test]
    fn the_handler_after_which_the_position_goes_back_closes_the_loop() {
        let handlers = [(0x100, 0x1c), (0x200, 0x20), (0x300, 0x14), (0x100, 0x18)];
        let rbx = [Green::Register(Gpr::RBX)];
        assert_eq!(closing(&handlers, &rbx), Some(0x200));
        assert_eq!(
            closing(&handlers, &[Green::Slot(Gpr::RBX, 8, dynasour_ir::Ty::I64)]),
            Some(0x200)
        );
        assert_eq!(closing(&handlers, &[Green::Register(Gpr::RBP)]), None, "it does not change");
    }

    #[test]
    fn a_handler_that_many_instructions_pass_is_no_better_than_the_head() {
        let rbx = [Green::Register(Gpr::RBX)];
        let handlers = [(0x100, 0x1c), (0x100, 0x20), (0x100, 0x14), (0x200, 0x18)];
        assert_eq!(closing(&handlers, &rbx), None);
        assert_eq!(closing(&handlers[1..3], &rbx), None, "two dispatches");
    }
}
