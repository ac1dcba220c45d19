//! How much of a thread's processor time may go into finding and making traces.
//!
//! An *attempt* is everything from the decision to record a head to its trace or its refusal. The
//! heads that are executed most are hot first. So if none of those was worth a trace, the other
//! heads hardly are: each refused attempt shrinks the budget, each trace that is made restores a
//! part of it. Attempts that make traces are paid from a budget of their own, which is larger: a
//! program that has got one trace needs others soon, where that trace is left.
//!
//! Data: [`Effort`]. Each thread has one and is the only one that uses it; no lock. Invariant: time
//! is spent only while an attempt is under way.
//!
//! ```text
//! attempt at 0x1000: refused     spent 2 ms of 8 ms + 1/25 of the thread's time
//! … 16 refusals in a row         the budget is half of that
//! attempt at 0x2000: a trace     4 of the 16 refusals count on: 4/5 of the budget
//! ```

/// How much processor time attempts may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Budget {
    /// Nanoseconds of processor time that may be spent before the guest has had any.
    pub free: u64,
    /// One part in this many of the thread's processor time may be spent on attempts that are
    /// refused.
    pub part: u64,
}

impl Budget {
    /// For guests whose other code runs as copied blocks (guess; too much slows programs whose
    /// heads are not worth a trace: judging cc1's heads takes at most 4 % of its time).
    pub const LATE: Budget = Budget { free: 8_000_000, part: 25 };
    /// For guests that are sampled (guess; too much slows programs that gain nothing, too little leaves
    /// interpreted programs that run for seconds without traces).
    pub const SAMPLED: Budget = Budget { free: 4_000_000, part: 100 };
    /// For guests whose code is interpreted until it is executed often, and whose traces are made
    /// early (guess; too little leaves hot code interpreted).
    pub const EARLY: Budget = Budget { free: 50_000_000, part: 5 };
}

/// After this many consecutive refused attempts the budget is halved (guess; fewer give a program
/// up whose first loops are not worth a trace).
const DISCOURAGING: u64 = 16;
/// More consecutive refusals do not count (guess): otherwise a later phase of the program would get
/// no trace.
const MOST_REFUSED: u64 = 64;

/// One part in this many of the thread's processor time may be spent on attempts that make traces
/// (measured on perl: compiling takes as much as the traces gain in some seconds if it is ten).
const MADE_PART: u64 = 20;
/// Half of that after each trace that has lost its race, this many times, until one is kept (guess: a program
/// whose first traces lose gains little by others).
const MOST_HALVINGS: u32 = 3;
/// Other traces have this many times the free budget (guess; too few delay the first trace of an interpreted
/// program by some tenths of a second).
const FREE_FIRST: u64 = 2;
/// Side traces have this many times the free budget (guess; too few let a trace lose its race because
/// it has none yet).
const FREE_SIDE: u64 = 4;
/// A loop that waits for time keeps side traces from being made unless it is longer, in guest instructions
/// (guess: side traces wait for half a second).
const MOST_WAITED_FOR: u64 = 1000;
/// Nanoseconds that compiling takes for each guest instruction of a path (measured: 4,000 to 15,000), as
/// long as the program itself has not measured it.
const PER_INSTRUCTION: u64 = 9_000;
/// The number above counts as much as if so many instructions had been compiled (guess: a few paths).
const SUPPOSED_INSTRUCTIONS: u64 = 1000;

/// What finding and making traces has cost one thread.
#[derive(Debug)]
pub struct Effort {
    /// Nanoseconds of processor time that refused attempts have taken.
    spent: u64,
    /// Nanoseconds of processor time that attempts have taken that made traces.
    spent_on_traces: u64,
    /// Guest instructions of the paths that were compiled, and the nanoseconds that it took.
    compiled: (u64, u64),
    /// Has the attempt under way made a trace?
    made: bool,
    /// Refused attempts since the last trace, and a quarter of those before it.
    refused: u64,
    /// Traces that have lost their races since one was kept.
    lost: u32,
    /// The processor time at which the attempt under way began.
    since: Option<u64>,
    /// None: everything is affordable.
    budget: Option<Budget>,
    /// The thread's processor time, in nanoseconds.
    clock: fn() -> u64,
}

impl Effort {
    /// Nothing has been spent. `clock` returns the calling thread's processor time in nanoseconds.
    pub fn new(budget: Option<Budget>, clock: fn() -> u64) -> Effort {
        let compiled = (SUPPOSED_INSTRUCTIONS, SUPPOSED_INSTRUCTIONS * PER_INSTRUCTION);
        let (made, since) = (false, None);
        let (spent, spent_on_traces, refused, lost) = (0, 0, 0, 0);
        Effort { spent, spent_on_traces, compiled, made, refused, lost, since, budget, clock }
    }

    /// The calling thread is that of a forked child: its processor time begins anew, so what has been
    /// spent does, too. What was learned of the program stays.
    pub fn restart(&mut self) {
        (self.spent, self.spent_on_traces) = (0, 0);
        (self.made, self.since) = (false, None);
    }

    /// May another attempt be made?
    pub fn is_affordable(&self) -> bool {
        self.budget.is_none_or(|Budget { free, part }| {
            let all = free + (self.clock)() / part;
            self.spent < all * DISCOURAGING / (DISCOURAGING + self.refused)
                && self.may_spend(0, FREE_SIDE)
        })
    }

    /// May a path of this many guest instructions be compiled now?
    pub fn may_compile(&self, instructions: u64) -> bool {
        self.may_spend(self.nanoseconds(instructions), FREE_FIRST)
    }

    /// May a path of this many guest instructions be compiled now that begins where a trace is left? If a loop
    /// of so many instructions is `waiting` for time, enough must be left for it.
    pub fn may_compile_side(&self, instructions: u64, waiting: Option<u64>) -> bool {
        let with = |waiting| self.may_compile(instructions.saturating_add(waiting));
        self.may_spend(self.nanoseconds(instructions), FREE_SIDE)
            && waiting.filter(|loops| *loops <= MOST_WAITED_FOR).is_none_or(with)
    }

    /// The nanoseconds that it takes to compile a path of so many guest instructions.
    fn nanoseconds(&self, instructions: u64) -> u64 {
        let (all, nanoseconds) = self.compiled;
        instructions.saturating_mul(nanoseconds / all)
    }

    /// The guest instructions of the longest path, of those that begin where no trace is left, that may be
    /// compiled now.
    pub fn longest_path(&self) -> u64 {
        let (all, nanoseconds) = self.compiled;
        self.budget.map_or(u64::MAX, |budget| {
            let left = self.allowed(budget, FREE_FIRST).saturating_sub(self.spent_on_traces);
            left / (nanoseconds / all).max(1)
        })
    }

    /// The nanoseconds that may be spent on traces, with so many times the free budget.
    fn allowed(&self, Budget { free, part }: Budget, times_free: u64) -> u64 {
        let part = part.min(MADE_PART << self.lost.min(MOST_HALVINGS));
        free * times_free + (self.clock)() / part
    }

    /// May this many more nanoseconds be spent on a trace, with so many times the free budget?
    fn may_spend(&self, more: u64, times_free: u64) -> bool {
        self.budget.is_none_or(|budget| {
            self.spent_on_traces.saturating_add(more) < self.allowed(budget, times_free)
        })
    }

    /// Notes the result of an attempt: with `trace`, a trace was made; otherwise it was refused.
    pub fn note_result(&mut self, trace: bool) {
        self.made |= trace;
        self.refused = if trace { self.refused / 4 } else { MOST_REFUSED.min(self.refused + 1) };
    }

    /// A trace was kept after its race, or has lost it.
    pub fn note_race(&mut self, kept: bool) {
        self.lost = if kept { 0 } else { self.lost + 1 };
    }

    /// A path of this many guest instructions was compiled in this time.
    pub fn note_compiled(&mut self, instructions: u64, nanoseconds: u64) {
        self.compiled.0 += instructions;
        self.compiled.1 += nanoseconds;
    }

    /// The attempt under way goes on elsewhere, and will probably make a trace.
    pub fn note_submitted(&mut self) {
        self.made = true;
    }

    /// Another thread has spent this many nanoseconds of processor time on an attempt of this one's.
    pub fn note_elsewhere(&mut self, nanoseconds: u64, trace: bool) {
        let spent = if trace { &mut self.spent_on_traces } else { &mut self.spent };
        *spent += nanoseconds;
    }

    /// Notes that an attempt begins, unless one is under way.
    pub fn begin(&mut self) {
        self.since.get_or_insert_with(self.clock);
    }

    /// Notes that no attempt is under way any more, and adds the time of the last one.
    pub fn end(&mut self) {
        if let Some(since) = self.since.take() {
            let made = std::mem::take(&mut self.made);
            let spent = if made { &mut self.spent_on_traces } else { &mut self.spent };
            *spent += (self.clock)().saturating_sub(since);
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
        (0..2 * DISCOURAGING).for_each(|_| effort.note_result(false));
        assert!(!effort.is_affordable(), "only refusals so far");
        effort.note_result(true);
        effort.note_result(true);
        assert!(effort.is_affordable());
        effort.spent = u64::MAX / 2;
        assert!(!effort.is_affordable());
        effort.end();
        assert_eq!(effort.spent, u64::MAX / 2, "nothing had begun");
        effort.restart();
        assert!(effort.is_affordable(), "a forked child has its own time");
    }

    #[test]
    fn what_an_attempt_takes_is_spent() {
        let mut effort = Effort::new(Some(Budget::LATE), || 1000);
        effort.since = Some(400);
        effort.begin();
        effort.end();
        assert_eq!(effort.spent, 600, "from when the attempt under way began");
        effort.since = Some(400);
        effort.note_result(true);
        effort.end();
        assert_eq!((effort.spent, effort.spent_on_traces), (600, 600));
        effort.spent = u64::MAX;
        assert!(effort.may_compile_side(0, None) && !effort.is_affordable());
        let most = FREE_FIRST * Budget::LATE.free / PER_INSTRUCTION;
        assert!(effort.may_compile(most) && !effort.may_compile(most + 1));
        assert_eq!(effort.longest_path(), most);
        let may_compile_side = |n, waiting| effort.may_compile_side(n, waiting);
        assert!(may_compile_side(3 * most / 2, None) && !may_compile_side(5 * most / 2, None));
        assert!(may_compile_side(most / 2, Some(most / 2)), "there is time for both");
        assert!(!may_compile_side(most / 2 + 2, Some(most / 2)) && most / 2 < MOST_WAITED_FOR);
        assert!(may_compile_side(3 * most / 2, Some(MOST_WAITED_FOR + 1)), "it waits for too much");
        effort.note_compiled(3 * SUPPOSED_INSTRUCTIONS, 3 * SUPPOSED_INSTRUCTIONS * 1000);
        assert!(effort.may_compile(3 * most) && !effort.may_compile(4 * most));
        effort.note_elsewhere(7, true);
        effort.note_submitted();
        effort.since = Some(400);
        effort.end();
        assert_eq!(
            effort.spent_on_traces, 1207,
            "what a helper has taken, and the time until then"
        );
        effort.spent_on_traces = u64::MAX;
        assert!(!effort.may_compile_side(0, None));
        let mut effort = Effort::new(Some(Budget::SAMPLED), || 1_000_000_000);
        let before = effort.longest_path();
        effort.note_race(false);
        assert!(effort.longest_path() < before, "a trace has lost");
        effort.note_race(true);
        assert_eq!(effort.longest_path(), before);
    }
}
