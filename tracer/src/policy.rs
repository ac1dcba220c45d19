//! The thresholds and limits of trace selection, behind one trait so that a study can exchange
//! them.
//!
//! **Data.** [`DefaultPolicy`] has the threshold of heads, which rises when the code cache
//! overflows, and the placement. **Invariant.** A policy decides how fast a program runs, never
//! what it computes. **Callers.** Each [`crate::TraceSelector`] owns a policy, and only its thread
//! calls it; no lock.
//!
//! ```text
//! DefaultPolicy::default()  thresholds 1000 and 500, 400 instructions, 5 versions
//! ```

use crate::placement::{self, Placement};

/// Thresholds, limits, and what to speculate on.
pub trait SpeculationPolicy: Send {
    /// Executions of a trace head before it is recorded (Dynamo: about 50; see [`HEAD_THRESHOLD`]).
    fn head_threshold(&self) -> u32;
    /// Times an exit is taken before a side trace is recorded from it.
    fn exit_threshold(&self) -> u32;
    /// Most guest instructions in one trace, except loops of interpreted programs.
    fn max_instructions(&self) -> usize;
    /// Failed recordings or compilations of one head after which it is given up. Each failure
    /// before that doubles the threshold of the head (TraceMonkey's blacklisting).
    fn max_failures(&self) -> u32;
    /// Most versions of one region, so that chains of exits stay short (deoptless: 5
    /// continuations).
    fn max_versions(&self) -> usize;
    /// Notes that the code cache overflowed and was flushed. A cache that is too small for the
    /// program's hot code must not make the program spend its time on compiling, so the thresholds
    /// rise.
    fn cache_overflowed(&mut self);
    /// The placement: what is assumed, and where the guards stand.
    fn placement(&self) -> &'static dyn Placement;
}

/// How a trace uses a register that it reads before it writes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RegisterUse {
    /// The trace writes the register too, so it is not an invariant of the loop.
    pub written: bool,
    /// Some variable shift, multiplication or other expensive operation reads it.
    pub expensive: bool,
}

/// Executions of a trace head before it is recorded (measured: compiling a fragment costs about 0.3
/// ms, as much as interpreting it a thousand times; a lower threshold compiles code that is not
/// hot).
pub const HEAD_THRESHOLD: u32 = 1000;

/// Dynamo's recipe with conservative value speculation.
#[derive(Clone, Copy, Debug)]
pub struct DefaultPolicy {
    /// See [`SpeculationPolicy::head_threshold`].
    pub head_threshold: u32,
    /// See [`SpeculationPolicy::placement`].
    pub placement: &'static dyn Placement,
}

impl Default for DefaultPolicy {
    fn default() -> DefaultPolicy {
        DefaultPolicy { head_threshold: HEAD_THRESHOLD, placement: placement::DEFAULT }
    }
}

impl SpeculationPolicy for DefaultPolicy {
    fn head_threshold(&self) -> u32 {
        self.head_threshold
    }

    fn exit_threshold(&self) -> u32 {
        // Half the head's threshold (guess). A side trace is worth less than the trace until its
        // exit proves hot; too low compiles rare exits. At least 1, for the tests that make
        // everything hot.
        (self.head_threshold() / 2).max(1)
    }

    fn max_instructions(&self) -> usize {
        // Guess: a longer trace takes longer to compile and is left before its end more often.
        400
    }

    fn max_failures(&self) -> u32 {
        // Guess: more waste recordings on heads that cannot be traced.
        3
    }

    fn max_versions(&self) -> usize {
        5
    }

    fn cache_overflowed(&mut self) {
        // A quarter more at each overflow (guess).
        self.head_threshold =
            self.head_threshold.saturating_add(self.head_threshold / 4).saturating_add(1);
    }

    fn placement(&self) -> &'static dyn Placement {
        self.placement
    }
}

/// The most guest instructions in one trace that a policy may ask for (guess: five times those of [`DefaultPolicy`];
/// compiling a longer path takes seconds).
const MOST_INSTRUCTIONS: usize = 2000;

/// A policy whose answers are within what the runtime can do, whatever the policy says.
pub struct Bounded(Box<dyn SpeculationPolicy>);

impl Bounded {
    /// That of `policy`.
    pub fn new(policy: Box<dyn SpeculationPolicy>) -> Bounded {
        Bounded(policy)
    }
}

impl SpeculationPolicy for Bounded {
    fn head_threshold(&self) -> u32 {
        self.0.head_threshold().max(1)
    }

    fn exit_threshold(&self) -> u32 {
        self.0.exit_threshold().max(1)
    }

    fn max_instructions(&self) -> usize {
        self.0.max_instructions().clamp(1, MOST_INSTRUCTIONS)
    }

    fn max_failures(&self) -> u32 {
        self.0.max_failures().max(1)
    }

    fn max_versions(&self) -> usize {
        self.0.max_versions().max(1)
    }

    fn cache_overflowed(&mut self) {
        self.0.cache_overflowed();
    }

    fn placement(&self) -> &'static dyn Placement {
        self.0.placement()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overflows_raise_the_thresholds_geometrically() {
        let mut policy = DefaultPolicy { head_threshold: 1, ..DefaultPolicy::default() };
        for _ in 0..30 {
            policy.cache_overflowed();
        }
        assert!((1_000..10_000).contains(&policy.head_threshold()), "{}", policy.head_threshold());
        assert!(policy.exit_threshold() > 500);
    }

    #[test]
    fn a_policy_that_asks_for_nothing_or_for_all_is_bounded() {
        struct Odd(usize);
        impl SpeculationPolicy for Odd {
            fn head_threshold(&self) -> u32 {
                self.0 as u32
            }
            fn exit_threshold(&self) -> u32 {
                self.0 as u32
            }
            fn max_instructions(&self) -> usize {
                self.0
            }
            fn max_failures(&self) -> u32 {
                self.0 as u32
            }
            fn max_versions(&self) -> usize {
                self.0
            }
            fn cache_overflowed(&mut self) {
                self.0 += 1;
            }
            fn placement(&self) -> &'static dyn Placement {
                placement::DEFAULT
            }
        }
        let mut none = Bounded::new(Box::new(Odd(0)));
        assert_eq!((none.head_threshold(), none.exit_threshold()), (1, 1));
        assert_eq!((none.max_instructions(), none.max_failures(), none.max_versions()), (1, 1, 1));
        none.cache_overflowed();
        none.cache_overflowed();
        assert_eq!(none.head_threshold(), 2);
        assert_eq!(Bounded::new(Box::new(Odd(1 << 30))).max_instructions(), MOST_INSTRUCTIONS);
    }
}
