//! The words of the guest's among which a race looks for one or two that tell the iterations of the racer's loop
//! ([`dynasour_tracer::race`]): the registers, and what stands on the stack near the stack
//! pointer and the frame pointer.
//!
//! **Data.** [`Words`]: where on the stack they are; it stays the same during the race, as the frame of the function does
//! whose loop it is. **Invariant.** They are only read. What cannot be read is 0. The thread is outside, and handles
//! faults; it holds no lock.
//!
//! Example: at -O0 a loop of `main` counts in `[rbp - 20]`. That is one of the words below the frame
//! pointer, wherever the thread is stopped.

use crate::memory;
use dynasour_guest::ThreadContext;

const RSP: usize = 4;
const RBP: usize = 5;
const WORD: usize = size_of::<u32>();

/// Bytes below the stack pointer: the red zone.
const BELOW: u64 = 128;
/// Bytes from there on (guess: the frame of the function that is being executed, and those of some callers).
const AT_STACK_POINTER: usize = 1024;
/// Bytes below the frame pointer (guess: variables that are not arrays).
const AT_FRAME_POINTER: usize = 384;
/// rbp is the frame pointer if it is not further above the stack pointer (guess; elsewhere a read may touch what
/// the guest has never touched).
const LARGEST_FRAME: u64 = 1 << 20;

/// Where on the stack the words are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words {
    /// The lowest address near the stack pointer, and near the frame pointer, if there is one.
    from: [Option<u64>; 2],
}

impl Words {
    /// Those that may tell iterations of a loop in which the thread is now.
    pub fn of(context: &ThreadContext) -> Words {
        let (rsp, rbp) = (context.gpr[RSP], context.gpr[RBP]);
        let below = |addr: u64, bytes| addr.wrapping_sub(bytes) & !(WORD as u64 - 1);
        let is_frame = rbp.wrapping_sub(rsp) <= LARGEST_FRAME;
        let frame = is_frame.then(|| below(rbp, AT_FRAME_POINTER as u64));
        Words { from: [Some(below(rsp, BELOW)), frame] }
    }

    /// What is in them.
    pub fn read(&self, context: &ThreadContext) -> Vec<u32> {
        let registers = context.gpr.iter().map(|value| *value as u32);
        let mut stack = [0; AT_STACK_POINTER + AT_FRAME_POINTER];
        let (near, beside) = stack.split_at_mut(AT_STACK_POINTER);
        for (from, bytes) in self.from.iter().zip([near, beside]) {
            from.map(|from| memory::copy_in(from, bytes));
        }
        let words = stack.as_chunks::<WORD>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
        registers.chain(words).collect()
    }

    /// By what they have changed since they were `before`.
    pub fn changes(&self, context: &ThreadContext, before: &[u32]) -> Vec<u32> {
        let now = self.read(context);
        now.iter().zip(before).map(|(now, before)| now.wrapping_sub(*before)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_on_the_stack_is_among_them() {
        let mut frame = [0u32; 2000];
        let mut context = ThreadContext::new();
        context.gpr[RBP] = frame.as_ptr_range().end as u64;
        context.gpr[RSP] = frame.as_ptr_range().start as u64;
        context.gpr[3] = u64::from(u32::MAX) + 8;
        let words = Words::of(&context);
        let before = words.read(&context);
        (frame[1995], context.gpr[3]) = (4711, 20);
        std::hint::black_box(&mut frame);
        let changes = words.changes(&context, &before);
        assert_eq!(changes.iter().filter(|change| **change == 4711).count(), 1);
        assert_eq!((changes[3], changes[RBP]), (13, 0));
        context.gpr[RBP] = 64;
        let without = Words::of(&context).read(&context);
        assert_eq!(
            without.iter().filter(|word| **word == 4711).count(),
            0,
            "64 is no frame pointer"
        );
    }
}
