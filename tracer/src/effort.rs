//! How much of a thread's processor time may go into finding and making traces.
//!
//! The heads that are executed most are hot first. So if none of those was worth a trace, the other
//! heads hardly are: each refused attempt shrinks the budget, each trace that is made restores it.
//!
//! Data: [`Effort`], one for each thread, which alone uses it.
//!
//! ```text
//! attempt at 0x1000: refused     spent 2 ms of 8 ms + 1/25 of the thread's time
//! … 16 refusals in a row         the budget is half of that
//! attempt at 0x2000: a trace     a quarter of the refusals remain
//! ```

/// How much may be spent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Budget {
    /// Nanoseconds of processor time that may be spent before the guest has had any.
    pub free: u64,
    /// One part in this many of the thread's processor time may be spent.
    pub part: u64,
}

impl Budget {
    /// Where everything else runs as native code (guess; the judgement of cc1's heads, none of which
    /// pays, then takes 4 % of its time at most).
    pub const LATE: Budget = Budget { free: 8_000_000, part: 25 };
    /// Where cold code is interpreted and traces are made early (guess).
    pub const EARLY: Budget = Budget { free: 50_000_000, part: 5 };
}

/// After this many consecutive refused attempts the budget is halved (guess).
const DISCOURAGING: u64 = 16;
/// More consecutive refusals do not count: otherwise no later phase of the program would get a trace
/// (guess).
const MOST_REFUSED: u64 = 64;

/// What finding and making traces has cost one thread.
#[derive(Debug)]
pub struct Effort {
    /// Nanoseconds.
    spent: u64,
    /// Refused attempts, roughly in a row.
    refused: u64,
    /// When the attempt under way began.
    since: Option<u64>,
    /// None: everything is affordable.
    budget: Option<Budget>,
    /// The thread's processor time, in nanoseconds.
    clock: fn() -> u64,
}

impl Effort {
    /// Nothing has been spent. `clock` returns the calling thread's processor time in nanoseconds.
    pub fn new(budget: Option<Budget>, clock: fn() -> u64) -> Effort {
        Effort { spent: 0, refused: 0, since: None, budget, clock }
    }

    /// May another attempt be made?
    pub fn is_affordable(&self) -> bool {
        self.budget.is_none_or(|Budget { free, part }| {
            let all = free + (self.clock)() / part;
            self.spent < all * DISCOURAGING / (DISCOURAGING + self.refused)
        })
    }

    /// An attempt made a trace, or was refused.
    pub fn came_to(&mut self, trace: bool) {
        self.refused = if trace { self.refused / 4 } else { MOST_REFUSED.min(self.refused + 1) };
    }

    /// An attempt begins, unless one is under way.
    pub fn begin(&mut self) {
        self.since.get_or_insert_with(self.clock);
    }

    /// No attempt is under way any more.
    pub fn end(&mut self) {
        if let Some(since) = self.since.take() {
            self.spent += (self.clock)().saturating_sub(since);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effort_is_limited() {
        let mut effort = Effort::new(Some(Budget::LATE), || 0);
        assert!(effort.is_affordable());
        effort.spent = Budget::LATE.free / 2;
        (0..2 * DISCOURAGING).for_each(|_| effort.came_to(false));
        assert!(!effort.is_affordable(), "only refusals so far");
        effort.came_to(true);
        effort.came_to(true);
        assert!(effort.is_affordable());
        effort.spent = u64::MAX / 2;
        assert!(!effort.is_affordable());
        effort.end();
        assert_eq!(effort.spent, u64::MAX / 2, "nothing had begun");
    }

    #[test]
    fn what_an_attempt_takes_is_spent() {
        let mut effort = Effort::new(Some(Budget::LATE), || 1000);
        effort.since = Some(400);
        effort.begin();
        effort.end();
        assert_eq!(effort.spent, 600, "from when the attempt under way began");
    }
}
