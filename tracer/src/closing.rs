//! Where a loop of an interpreted program is entered: at the handler that closes it.
//!
//! Every instruction of the interpreted program passes the head of a dispatch loop. If a trace began
//! there, all of them would look whether it is theirs, also those of other loops and between loops. The handler
//! of the jump that closes the loop is passed once in an iteration, and seldom by anything else. So a
//! recording that has found a loop at a dispatch head goes on until the loop comes round at its closing
//! handler, and the trace begins there.
//!
//! The closing handler is told by the position in the interpreted program: of the greens at the head, or of the
//! registers if the head is passed too seldom, the one that has the most different values in an iteration.
//! From the closing handler to the next one it changes most. (Back; but perl allocates its instructions
//! downwards.) Handlers that the iteration passes more often come later.
//!
//! ```text
//! dispatch to     load   add    load   less   jump-back   load
//! position        0x14   0x18   0x1c   0x20   0x24        0x14
//!                                             └── back by 0x10: the closing handler
//! ```
//!
//! Data: [`Dispatched`], part of a search. Invariant: a wrong choice costs time, never a wrong result. The
//! recorder is the only caller; no lock.

use crate::build::Step;
use crate::guests::Key;
use rustc_hash::FxHashSet;
use std::cmp::Reverse;

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
/// In it the head was passed after so many steps, where the greens had these values. None if it cannot be told.
pub(crate) fn closing_handler<'a>(
    steps: &[Step],
    first: usize,
    dispatched: &'a [Dispatched],
    passages: &[(usize, &'a Key)],
) -> Option<u64> {
    let before = dispatched.partition_point(|at| at.steps <= first);
    let iteration = &dispatched[before..];
    if iteration.len() < LEAST_DISPATCHES {
        return None;
    }
    let handler = |at: &Dispatched| steps[at.steps - 1].next;
    // What is dispatched at each place, and the position there.
    let (handlers, values): (Vec<u64>, Vec<&[u64]>) = if passages.len() >= LEAST_DISPATCHES {
        let place = |(at, key): &(usize, &'a Key)| {
            let dispatched = iteration.iter().find(|dispatched| dispatched.steps > *at)?;
            Some((handler(dispatched), key.as_slice()))
        };
        passages.iter().filter_map(place).unzip()
    } else {
        iteration.iter().map(|at| (handler(at), at.gpr.as_slice())).unzip()
    };
    let distances = distances(&values)?;
    let times = |pc: u64| iteration.iter().filter(|at| handler(at) == pc).count();
    let places = handlers.into_iter().zip(distances);
    let (closing, _) = places.min_by_key(|(pc, distance)| (times(*pc), Reverse(*distance)))?;
    // If many instructions go through it, nothing is gained.
    (2 * times(closing) <= iteration.len()).then_some(closing)
}

/// How far the position goes from each place to the next one, the first one after the last: of the values at each
/// place, the one that has the most different ones. None if it has few.
fn distances(places: &[&[u64]]) -> Option<Vec<u64>> {
    let different = |n: usize| places.iter().map(|at| at[n]).collect::<FxHashSet<_>>().len();
    let position = (0..places.first()?.len()).max_by_key(|n| different(*n))?;
    if different(position) < LEAST_DISPATCHES {
        return None;
    }
    let next = places.iter().cycle().skip(1);
    Some(places.iter().zip(next).map(|(at, next)| at[position].abs_diff(next[position])).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use dynasour_guest::lift::{Bytes, MAX_BLOCK, lift_block};
    use std::sync::Arc;

    /// An iteration of dispatches to these handlers, at these positions: in the key if the head is passed before
    /// each of them, else in a register.
    fn closing(handlers: &[(u64, u64)], passes_head: bool) -> Option<u64> {
        let code = Bytes { start: 0x1000, bytes: &[0xff, 0xe0] };
        let block = Arc::new(lift_block(0x1000, &code, MAX_BLOCK));
        let step = |next| Step { block: block.clone(), next, observed: None };
        // One step before the iteration.
        let nexts = [0x1000].into_iter().chain(handlers.iter().map(|(handler, _)| *handler));
        let steps: Vec<Step> = nexts.map(step).collect();
        let at = |(n, (_, position)): (usize, &(u64, u64))| {
            let mut gpr = [7; 16];
            gpr[3] = if passes_head { 7 } else { *position };
            Dispatched { steps: n + 2, gpr }
        };
        let mut dispatched = vec![Dispatched { steps: 1, gpr: [0; 16] }];
        dispatched.extend(handlers.iter().enumerate().map(at));
        let keys: Vec<Key> = handlers.iter().map(|(_, position)| vec![5, *position]).collect();
        let passages: Vec<(usize, &Key)> =
            keys.iter().enumerate().map(|(n, key)| (n + 1, key)).collect();
        closing_handler(&steps, 1, &dispatched, if passes_head { &passages } else { &[] })
    }

    #[test]
    fn the_handler_after_which_the_position_goes_back_closes_the_loop() {
        let handlers = [(0x100, 0x1c), (0x200, 0x24), (0x300, 0x14), (0x100, 0x18)];
        assert_eq!([true, false].map(|head| closing(&handlers, head)), [Some(0x200); 2]);
        let downwards = handlers.map(|(handler, position)| (handler, 0x100 - position));
        assert_eq!([true, false].map(|head| closing(&downwards, head)), [Some(0x200); 2]);
        let same = handlers.map(|(handler, _)| (handler, 0x14));
        assert_eq!([true, false].map(|head| closing(&same, head)), [None; 2], "no position");
    }

    #[test]
    fn a_handler_that_is_passed_once_comes_first() {
        let handlers = [(0x100, 0x1c), (0x200, 0x34), (0x300, 0x14), (0x200, 0x18), (0x400, 0x1a)];
        assert_eq!([true, false].map(|head| closing(&handlers, head)), [Some(0x100); 2]);
    }

    #[test]
    fn a_handler_that_many_instructions_pass_is_no_better_than_the_head() {
        let handlers = [(0x100, 0x1c), (0x100, 0x20), (0x100, 0x14)];
        assert_eq!([true, false].map(|head| closing(&handlers, head)), [None; 2]);
        let handlers = [(0x100, 0x1c), (0x200, 0x20)];
        assert_eq!(closing(&handlers, true), None, "two dispatches");
    }
}
