//! The functions that are active on a path, and how deep a path follows recursion.
//!
//! A recursive function spends its time on its deepest calls. A path that follows some levels of it holds all
//! of these, without their calls and returns; a path that followed all levels would hold one execution that hardly
//! ever comes again.
//!
//! Data: [`Calls`], part of a recording or of an observation. Invariant: it has seen every call and return of the path.
//! Callers: the recording thread; no lock.
//!
//! ```text
//! a path from f:   f calls g        may_follow(g), call(g): [f, g]
//!                  g returns        ret(): false, [f]
//!                  f returns        ret(): true, the execution is complete
//! ```

/// A path holds at most so many executions of a recursive function within each other (guess; measured on the
/// kernel `fib` at -O2, whose loop is in such a function: 1.4 of the native time if one is followed, .72 with four).
const MOST_LEVELS: usize = 4;
/// The same for the function that the path begins with, whose executions become one trace (guess; measured on `fib`
/// at -O0: .87 of the native time with four, .59 with seven, which take 1 ms longer to compile).
const MOST_OWN_LEVELS: usize = 7;

/// The functions that a path has called and not returned from.
#[derive(Debug)]
pub(crate) struct Calls {
    /// The head of the path; not to be called again, unless it is the function that the path begins with.
    head: u64,
    /// The head of the region that the path has left; not to be called.
    region: Option<u64>,
    /// Does the path begin with a call of its head?
    is_function: bool,
    active: Vec<u64>,
}

impl Calls {
    /// At the head of a path, which is that of a function or not.
    pub fn new(head: u64, is_function: bool) -> Calls {
        let active = if is_function { vec![head] } else { Vec::new() };
        Calls { head, region: None, is_function, active }
    }

    /// The path leaves the traces that begin at this head, and ends where they are called.
    pub fn leave_region(&mut self, head: u64) {
        self.region = Some(head);
    }

    /// Is a call of this function followed?
    pub fn may_follow(&self, function: u64) -> bool {
        let active = self.active.iter().filter(|callee| **callee == function).count();
        match function == self.head {
            true => self.is_function && active < MOST_OWN_LEVELS,
            false => active < MOST_LEVELS && self.region != Some(function),
        }
    }

    /// The path calls a function.
    pub fn call(&mut self, function: u64) {
        self.active.push(function);
    }

    /// The path returns. Does the function return that it began with?
    pub fn ret(&mut self) -> bool {
        self.active.pop();
        self.is_function && self.active.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recursion_is_followed_some_levels() {
        let mut calls = Calls::new(0x1000, false);
        for _ in 0..MOST_LEVELS {
            assert!(calls.may_follow(0x2000) && !calls.may_follow(0x1000));
            calls.call(0x2000);
        }
        assert!(!calls.may_follow(0x2000) && calls.may_follow(0x3000));
        assert!(!calls.ret() && calls.may_follow(0x2000));
        calls.leave_region(0x3000);
        assert!(!calls.may_follow(0x3000), "its traces begin there");
    }

    #[test]
    fn a_function_calls_itself_until_it_returns() {
        let mut calls = Calls::new(0x1000, true);
        for _ in 1..MOST_OWN_LEVELS {
            assert!(calls.may_follow(0x1000));
            calls.call(0x1000);
        }
        assert!(!calls.may_follow(0x1000));
        assert!((1..MOST_OWN_LEVELS).all(|_| !calls.ret()) && calls.ret());
        let mut other = Calls::new(0x1000, false);
        assert!(!other.ret(), "it has begun in a function that it did not call");
    }
}
