//! Judges a trace by measurement: it and what it replaces, its *floor*, run by turns.
//!
//! A model of what a trace saves is often wrong, so a trace that the model accepts has to win a race
//! before it is kept. The race consists of *rounds*. In each round the trace, the floor, and the
//! floor that is counted twice have a *window* each, in random order, so that whatever changes
//! slowly disturbs all of them alike. In a window the runtime counts *starts*, which mean the same
//! on each side (docs/design.md, "Recording and speculation"), and the thread's processor time.
//!
//! Counting takes time, and on the floor it is done by a detour. The difference between the two
//! windows of the floor is what a second count takes. The first takes no more than that, and may take
//! nothing, because the processor counts while it waits for something else. So it is subtracted from the
//! first window, but only half of it if the model of costs says that the trace is faster. The trace's
//! counting is not subtracted. In a short loop it takes nothing that matters
//! (`emitter/src/codegen/loop_starts.rs`).
//!
//! The detour may take longer than that: the branches behind it are predicted worse, in some runs of a program and not
//! in others. So a verdict is *doubtful* if the trace is faster by less than a detour may take. Then, if words of the
//! guest's tell the number of iterations ([`crate::advances`]), rounds of two windows follow: the trace,
//! and the floor on which nothing counts.
//!
//! What disturbs all windows of a round disturbs no difference of their times, so the error is that of the
//! differences.
//!
//! The guest may have *phases*: for some time it goes elsewhere. A window begins when it comes to the head; if it
//! does not for long, the round begins again. Other windows fall into the end of a phase, and have few starts for
//! their time. On the floor they are told by that; as many of the slowest windows are left out on each side, so that
//! neither gains by it.
//!
//! The trace wins if with some certainty it is faster by more than one percent, and loses if with
//! the same certainty it is not, after fewer rounds if that is obvious. After [`MOST_ROUNDS`] undecided
//! rounds it loses, too.
//!
//! **Data.** [`Race`] has the times of all windows. **Invariant.** A verdict decides how fast the
//! guest runs, never what it computes. All arithmetic is in whole numbers, because inexact results
//! would show in the guest's MXCSR. **Callers.** The runtime, on the thread whose trace it is; no
//! lock.
//!
//! ```text
//! round   trace   floor   floor, counted twice       ns for a start
//!   1       82     131     133
//!   2       84     129     132
//!   …                                 → 83 against 127: the trace wins
//! ```

use crate::advances::{Advances, Fit};

/// Rounds before a verdict (guess; fewer decide by chance, more cost what the slower side loses).
const LEAST_ROUNDS: usize = 6;
/// Rounds before a verdict that is obvious (guess, as above).
const FEWEST_ROUNDS: usize = 3;
/// Rounds after which the floor wins, because the difference is small (guess, as above).
pub const MOST_ROUNDS: usize = 20;
/// The same if the trace seems to be much faster, and the guest is irregular.
const MOST_PROMISING_ROUNDS: usize = 60;
/// Much faster: by more than the floor's time divided by this.
const PROMISING: i64 = 5;
/// A window has at least this many starts (guess; fewer make its time a matter of chance).
const LEAST_STARTS: u64 = 100;
/// The guest misses the trace if there are too few starts where the floor would have this many times as
/// many (guess; fewer take a change of the guest for that).
const MISSED: u64 = 20;
/// A window without a start begins again this many times at most (guess: then the guest is in a long phase
/// elsewhere, or does not come to this side).
const MOST_BEGINNINGS: u32 = 10;
/// A window that has too few starts is extended this many times at most (guess: then an iteration takes so long
/// that neither side matters).
const MOST_EXTENSIONS: u32 = 50;
/// The region is no longer hot after this many windows without enough starts (guess).
const MOST_EMPTY: u32 = 10;
/// The guest does not come to the trace if this many of its windows more than of the floor's have too few starts,
/// and this many times as many (guess; fewer take a phase of the guest for that).
const MISSED_WINDOWS: u32 = 3;
/// A window of the floor is at the end of a phase if a start takes more than this many times as long as in
/// the fastest quarter of them (guess; fewer leave out what is irregular, and it takes more rounds).
const SPARSE: u128 = 2;
/// Picoseconds that the way by a gate takes at most, with what it does to predictions (measured on an EPYC: 0 to 6 ns in
/// the same loop of a hash table).
const MOST_WAY: i64 = 8_000;
/// So many more windows than rounds, at most, in which words do not tell the starts (guess: as often as that a thread
/// may be stopped where registers have another meaning, or in another phase).
const MOST_UNTOLD: usize = 4;
/// On the floor without counting there are at least this many fifths of the starts that there are with it in the same
/// time, and at most [`MOST_DETOUR`] times as many.
const LEAST_FIFTHS: i64 = 4;
/// The race begins anew at most this many times, when the trace has got side traces (guess).
const MOST_RESTARTS: u32 = 4;
/// A difference is obvious if it is more than this many times its error, and than so many twentieths of
/// the floor's time (guess: of three rounds the error is known badly).
const OBVIOUS: i64 = 4;
/// Picoseconds that the way by a gate and one count take at least, if the model does not say that the trace is
/// faster (measured on an EPYC: a return to a patch, its gate and back, 2.1 ns; the dispatch of perl, whose
/// indirect calls are then predicted worse, 4.5 ns; a second count there 0).
const LEAST_DETOUR: i64 = 5_000;
/// The way takes at most the time of a start less one part in this many of it.
const MOST_DETOUR: i64 = 4;
/// The trace must be faster by more than the floor's time divided by this.
const MARGIN: i64 = 100;

/// Which code runs in a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// The trace.
    Trace,
    /// What the trace replaces.
    Floor,
    /// The same, counted twice.
    FloorTwice,
    /// The same, not counted.
    FloorUncounted,
}

/// The number of sides.
const SIDES: usize = 4;
/// The sides while the floor is counted.
const COUNTED: [Side; 3] = [Side::Trace, Side::Floor, Side::FloorTwice];
/// The sides while words of the guest's tell the starts on the floor.
const TOLD: [Side; 2] = [Side::Trace, Side::FloorUncounted];

/// How a race has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The trace is faster.
    Trace,
    /// It is not, or not certainly.
    Floor,
    /// The guest has gone elsewhere, so there is no verdict.
    Cold,
}

/// A verdict and what was measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Judgement {
    /// The verdict.
    pub verdict: Verdict,
    /// Picoseconds for a start: trace, and floor without the time of counting.
    pub times: [i64; 2],
    /// The same for the floor as it was measured: counted once, and twice.
    pub counted: [i64; 2],
    /// The floor's time is that of windows that were not counted.
    pub is_told: bool,
    /// Half of the interval in which the difference of the two lies with some 95 % certainty.
    pub error: i64,
    /// Rounds.
    pub rounds: usize,
}

/// What comes after a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// The window goes on: it has too few starts.
    Extend,
    /// A window of this side.
    Window(Side),
    /// The race is over.
    Ended(Judgement),
}

/// A race under way.
#[derive(Debug)]
pub struct Race {
    /// The order of the sides in this round, and the number of its windows so far.
    order: Vec<Side>,
    done: usize,
    /// The windows of each round, by [`Side`].
    rounds: Vec<[Window; SIDES]>,
    /// Those of this round.
    round: [Window; SIDES],
    /// The window so far, how the guest's words have changed in it, and how often it was extended.
    window: Window,
    changes: Vec<u32>,
    extensions: u32,
    /// Windows that had too few starts in the end, by [`Side`].
    empty: [u32; SIDES],
    telling: Telling,
    restarts: u32,
    random: u64,
    /// The number of rounds, if it is fixed.
    fixed: Option<usize>,
    /// The model says that the trace is faster.
    is_promised: bool,
}

/// Do words of the guest's tell the starts of windows that are not counted?
#[derive(Debug)]
enum Telling {
    /// It may be; the floor is counted.
    Learning(Advances),
    /// They do.
    Told {
        fit: Fit,
        /// The verdict that is doubtful.
        doubtful: Judgement,
        /// Windows in which they did not.
        untold: usize,
    },
    /// They need not: the floor is counted.
    Nothing,
}

impl Race {
    /// A race that has not begun. The order of the sides follows from `seed`. It ends after `fixed`
    /// rounds, or when the verdict is certain. If the model says that the trace is faster, `is_promised`. If
    /// words of the guest's may tell starts, `may_tell`.
    pub fn new(seed: u64, fixed: Option<usize>, is_promised: bool, may_tell: bool) -> Race {
        let telling = match may_tell {
            true => Telling::Learning(Advances::default()),
            false => Telling::Nothing,
        };
        let mut race = Race {
            order: COUNTED.to_vec(),
            done: 0,
            rounds: Vec::with_capacity(MOST_ROUNDS),
            round: Default::default(),
            window: Window::default(),
            changes: Vec::new(),
            extensions: 0,
            empty: [0; SIDES],
            telling,
            restarts: 0,
            random: seed | 1,
            fixed,
            is_promised,
        };
        race.begin_round();
        race
    }

    /// The side of the window under way.
    pub fn side(&self) -> Side {
        self.order[self.done]
    }

    /// Begins anew, because the trace has changed.
    pub fn restart(&mut self) {
        if self.restarts < MOST_RESTARTS {
            self.restarts += 1;
            self.rounds.clear();
            if self.is_told() {
                // The trace was another when they were learned, not the floor.
                (self.order, self.telling) =
                    (COUNTED.to_vec(), Telling::Learning(Advances::default()));
            }
            self.begin_round();
        }
        self.spoil();
    }

    /// Forgets the window under way, in which something else took time. It begins again.
    pub fn spoil(&mut self) {
        self.window = Window::default();
        self.changes.clear();
    }

    /// The window under way has seen this many starts in this many nanoseconds of processor time, and words of the
    /// guest's have changed by `changes`, since it began or was extended last.
    pub fn measured(&mut self, starts: u64, nanoseconds: u64, changes: &[u32]) -> Next {
        self.window.starts += starts;
        self.window.nanoseconds += nanoseconds;
        self.changes.resize(changes.len(), 0);
        for (sum, change) in self.changes.iter_mut().zip(changes) {
            *sum = sum.wrapping_add(*change);
        }
        if self.side() == Side::FloorUncounted
            && let Some(next) = self.untold()
        {
            return next;
        }
        if self.window.starts < LEAST_STARTS {
            self.extensions += 1;
            let is_empty = self.window.starts == 0;
            if self.extensions <= if is_empty { MOST_BEGINNINGS } else { MOST_EXTENSIONS } {
                if is_empty {
                    self.spoil();
                }
                return Next::Extend;
            }
            self.empty[self.side() as usize] += 1;
            if let Some(judgement) = self.missed() {
                return Next::Ended(judgement);
            }
            if self.empty.iter().sum::<u32>() > MOST_EMPTY {
                return Next::Ended(self.judgement(Verdict::Cold));
            }
            self.extensions = 0;
            self.spoil();
            self.begin_round();
            return Next::Window(self.side());
        }
        self.extensions = 0;
        let window = std::mem::take(&mut self.window);
        let changes = std::mem::take(&mut self.changes);
        if let Telling::Learning(advances) = &mut self.telling {
            advances.learn(changes, window.starts);
        }
        self.round[self.side() as usize] = window;
        self.done += 1;
        if self.done == self.order.len() {
            self.rounds.push(self.round);
            if let Some(verdict) = self.verdict() {
                let judgement = self.judgement(verdict);
                if !self.doubts(judgement) {
                    return Next::Ended(judgement);
                }
            }
            self.begin_round();
        }
        Next::Window(self.side())
    }

    /// Finds out how many starts there were in a window that is not counted. If nothing tells it, returns what
    /// comes next.
    fn untold(&mut self) -> Option<Next> {
        let Telling::Told { fit, doubtful, untold } = &mut self.telling else { return None };
        let [once, _] = doubtful.counted;
        let expected =
            i64::try_from(self.window.nanoseconds).ok()?.saturating_mul(1000) / once.max(1);
        let possible = expected * LEAST_FIFTHS / 5..=expected.saturating_mul(MOST_DETOUR);
        let told = fit.starts(&self.changes);
        match told.filter(|n| i64::try_from(*n).is_ok_and(|n| possible.contains(&n))) {
            Some(starts) => {
                self.window.starts = starts;
                None
            }
            None if *untold > self.rounds.len() + MOST_UNTOLD => Some(Next::Ended(*doubtful)),
            None => {
                *untold += 1;
                self.spoil();
                Some(Next::Extend)
            }
        }
    }

    /// If this verdict is doubtful, and words of the guest's tell starts, other rounds follow.
    fn doubts(&mut self, judgement: Judgement) -> bool {
        let Telling::Learning(advances) = &self.telling else { return false };
        let [once, _] = judgement.counted;
        let gain = once - judgement.times[0];
        let is_doubtful = (once / MARGIN..MOST_WAY).contains(&gain) && self.fixed.is_none();
        let Some(fit) = is_doubtful.then(|| advances.fit()).flatten() else { return false };
        self.telling = Telling::Told { fit, doubtful: judgement, untold: 0 };
        self.order = TOLD.to_vec();
        self.rounds.clear();
        true
    }

    /// Are the floor's times those of windows that were not counted?
    fn is_told(&self) -> bool {
        matches!(self.telling, Telling::Told { .. })
    }

    /// The verdict if the guest does not come to the trace, although it comes to its floor. Its head's
    /// patch may have been withdrawn.
    fn missed(&self) -> Option<Judgement> {
        let [trace, once, twice, _] = self.empty;
        if self.side() != Side::Trace || trace < MISSED_WINDOWS * (1 + once.max(twice)) {
            return None;
        }
        // That of an earlier round, perhaps.
        let (floor, trace) = (self.round[Side::Floor as usize], self.window);
        // An empty window is the last of several that were as long.
        let windows = if trace.starts == 0 { self.extensions } else { 1 };
        let expected =
            u128::from(floor.starts) * u128::from(trace.nanoseconds) * u128::from(windows)
                / u128::from(floor.nanoseconds.max(1));
        let time = |window| Rate::of(std::iter::once(window)).time;
        (expected > u128::from(MISSED * LEAST_STARTS)).then(|| Judgement {
            times: [time(trace), time(floor)],
            ..self.judgement(Verdict::Floor)
        })
    }

    /// Begins a round, and chooses the order of its windows.
    fn begin_round(&mut self) {
        self.done = 0;
        for last in (1..self.order.len()).rev() {
            // Xorshift.
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            self.order.swap(last, (self.random % (last as u64 + 1)) as usize);
        }
    }

    fn verdict(&self) -> Option<Verdict> {
        let all = self.rounds.len();
        let Judgement { times: [trace, floor], error, rounds, .. } = self.judgement(Verdict::Cold);
        let (gain, margin) = (floor - trace, floor / MARGIN);
        if let Some(fixed) = self.fixed {
            let wins = gain - error > margin;
            return (all >= fixed).then_some(if wins { Verdict::Trace } else { Verdict::Floor });
        }
        let is_obvious = gain.abs() > OBVIOUS * error.max(floor / 20);
        let is_last = all >= MOST_PROMISING_ROUNDS;
        if !is_last && (rounds < FEWEST_ROUNDS || rounds < LEAST_ROUNDS && !is_obvious) {
            return None;
        }
        // A start takes this long, and so much of it is not known.
        let is_known = error < floor.max(trace) / 2;
        let promises = gain > floor / PROMISING;
        if gain - error > margin {
            Some(Verdict::Trace)
        } else if gain + error < margin && is_known || rounds >= MOST_ROUNDS && !promises {
            Some(Verdict::Floor)
        } else if is_last {
            // One standard error.
            Some(if gain - error / 2 > margin { Verdict::Trace } else { Verdict::Floor })
        } else {
            None
        }
    }

    /// The rounds without as many of the slowest windows of each side as are sparse on the floor. The others
    /// are put together in the order of time.
    fn dense_rounds(&self) -> Vec<[Window; SIDES]> {
        let windows = |side: usize| self.rounds.iter().map(move |round| round[side]);
        let sparse = |side: Side| {
            let mut windows: Vec<Window> = windows(side as usize).collect();
            windows.sort_by(Window::cmp_time);
            let fast = windows.get(windows.len() / 4).copied().unwrap_or_default();
            windows.iter().filter(|window| window.takes_more_than(SPARSE, fast)).count()
        };
        let floors = self.order.iter().filter(|side| **side != Side::Trace);
        let sparse = match self.fixed {
            Some(_) => 0,
            None => floors.map(|side| sparse(*side)).max().unwrap_or(0),
        };
        let dense = [0, 1, 2, 3].map(|side| {
            let mut numbered: Vec<(usize, Window)> = windows(side).enumerate().collect();
            numbered.sort_by(|a, b| a.1.cmp_time(&b.1));
            numbered.truncate(self.rounds.len() - sparse);
            numbered.sort_by_key(|(n, _)| *n);
            numbered
        });
        (0..dense[0].len()).map(|n| dense.each_ref().map(|side| side[n].1)).collect()
    }

    fn judgement(&self, verdict: Verdict) -> Judgement {
        let rounds = self.dense_rounds();
        let rates = [0, 1, 2, 3].map(|side| Rate::of(rounds.iter().map(|round| round[side])));
        let [trace, mut once, mut twice, uncounted] = rates.each_ref().map(|rate| rate.time);
        let detour = (twice - once).clamp(0, once);
        let floor = match self.is_promised {
            _ if self.is_told() => uncounted,
            true => once - detour / 2,
            false => once - detour.max(LEAST_DETOUR).min(once - once / MOST_DETOUR),
        };
        if let Telling::Told { doubtful, .. } = &self.telling {
            [once, twice] = doubtful.counted;
        }
        Judgement {
            verdict,
            times: [trace, floor],
            counted: [once, twice],
            is_told: self.is_told(),
            error: self.error_of(&rounds, &rates),
            rounds: rounds.len(),
        }
    }

    /// Half of the interval of some 95 % of the difference of the two times, which is the floor's, or 3/2 of once,
    /// less 1/2 of twice, or two of once, less one of twice, less the trace's: by the standard error of a sum of
    /// ratios, to first order, times Student's t, roughly, since of few rounds the standard error is known
    /// badly.
    fn error_of(&self, rounds: &[[Window; SIDES]], rates: &[Rate; SIDES]) -> i64 {
        const UNCOUNTED: [i128; SIDES] = [-2, 0, 0, 2];
        const PROMISED: [i128; SIDES] = [-2, 3, -1, 0];
        const OTHER: [i128; SIDES] = [-2, 4, -2, 0];
        let factors = match self.is_promised {
            _ if self.is_told() => UNCOUNTED,
            true => PROMISED,
            false => OTHER,
        };
        let n = rounds.len() as i128;
        let rest = |round: &[Window; SIDES]| {
            let sides = round.iter().zip(rates).zip(factors);
            sides.map(|((window, rate), halves)| halves * rate.rest(*window)).sum::<i128>() / 2
        };
        let squares = rounds.iter().map(|round| rest(round).saturating_pow(2));
        let sum = squares.fold(0i128, i128::saturating_add);
        // Of n rounds, their mean has this variance.
        let square = sum / (n * (n - 1)).max(1);
        let error = square.isqrt() * (2 * n + 6) / n.max(1);
        i64::try_from(error).unwrap_or(i64::MAX / 8)
    }
}

/// What a window has measured.
#[derive(Clone, Copy, Default, Debug)]
struct Window {
    starts: u64,
    nanoseconds: u64,
}

impl Window {
    /// Compares the times of a start.
    fn cmp_time(&self, other: &Window) -> std::cmp::Ordering {
        let [a, b] = self.times_of(other);
        a.cmp(&b)
    }

    /// Does a start take more than this many times as long as in another window?
    fn takes_more_than(&self, times: u128, other: Window) -> bool {
        let [this, that] = self.times_of(&other);
        this > times * that
    }

    /// The times of a start in two windows, in a unit of their own.
    fn times_of(&self, other: &Window) -> [u128; 2] {
        let by = |time: u64, starts: u64| u128::from(time) * u128::from(starts);
        [by(self.nanoseconds, other.starts), by(other.nanoseconds, self.starts)]
    }
}

/// The time of a start over several windows. If the guest has phases that are longer than a window, the
/// windows differ much in their starts; so the time is the sum of all times by the sum of all starts.
struct Rate {
    /// Picoseconds.
    time: i64,
    /// Starts of all windows, and the number of windows.
    starts: i128,
    windows: i128,
}

impl Rate {
    fn of(windows: impl Iterator<Item = Window> + Clone) -> Rate {
        let sum = |f: fn(Window) -> u64| windows.clone().map(|w| i128::from(f(w))).sum::<i128>();
        let (starts, picoseconds) = (sum(|w| w.starts).max(1), 1000 * sum(|w| w.nanoseconds));
        let time = i64::try_from(picoseconds / starts).unwrap_or(i64::MAX / 8);
        Rate { time, starts, windows: windows.count() as i128 }
    }

    /// By how many picoseconds for a start of an average window this window took longer.
    fn rest(&self, window: Window) -> i128 {
        let more = 1000 * i128::from(window.nanoseconds)
            - i128::from(self.time) * i128::from(window.starts);
        more * self.windows / self.starts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a race in which a start takes these picoseconds on each side, with noise of this many
    /// percent.
    fn race(times: [u64; 3], noise: u64) -> Judgement {
        race_of(Race::new(7, None, true, false), times, noise)
    }

    fn race_of(mut race: Race, times: [u64; 3], noise: u64) -> Judgement {
        let mut random = 12345u64;
        loop {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let time = times[race.side() as usize];
            let percent = 100 + (random >> 33) % (2 * noise + 1) - noise;
            let starts = 4_000_000_000 / time;
            match race.measured(starts, starts * time * percent / 100 / 1000, &[]) {
                Next::Ended(judgement) => return judgement,
                Next::Extend => panic!("{starts} starts are enough"),
                Next::Window(_) => {}
            }
        }
    }

    #[test]
    fn the_faster_side_wins() {
        let judged = race([80_000, 130_000, 133_000], 2);
        assert_eq!(judged.verdict, Verdict::Trace, "{judged:?}");
        assert!((79_000..81_000).contains(&judged.times[0]), "{judged:?}");
        assert!((122_000..132_000).contains(&judged.times[1]), "{judged:?}");
        assert_eq!(race([150_000, 130_000, 133_000], 2).verdict, Verdict::Floor);
    }

    #[test]
    fn the_detour_is_no_gain() {
        // The floor takes 1 to 3 ns, and counting up to another 2.
        let judged = race([2_200, 3_000, 5_000], 1);
        assert_eq!(judged.verdict, Verdict::Floor, "{judged:?}");
        assert!((1900..2100).contains(&judged.times[1]), "{judged:?}");
        assert_eq!(race([1_800, 3_000, 5_000], 1).verdict, Verdict::Trace);
        let judged = race_of(Race::new(7, None, false, false), [1_800, 3_000, 5_000], 1);
        assert_eq!(judged.verdict, Verdict::Floor, "nobody says that it is faster: {judged:?}");
        let judged = race_of(Race::new(7, None, false, false), [1_900, 3_500, 3_500], 1);
        assert_eq!(judged.verdict, Verdict::Floor, "the way to the gate: {judged:?}");
    }

    /// Runs a race in which a start takes these picoseconds on each side, and a loop of the guest's with this many
    /// iterations is in another.
    fn told_race(times: [u64; SIDES], length: u64) -> Judgement {
        let mut race = Race::new(7, None, true, true);
        let mut at = 0;
        loop {
            let side = race.side();
            let starts = 3_000_000_000 / times[side as usize];
            let words =
                |at: u64| [(at % length) as u32, (at / length) as u32, (at * at / 4711) as u32];
            let before = words(at);
            at += starts;
            let after = words(at);
            let changes = [0, 1, 2].map(|word: usize| after[word].wrapping_sub(before[word]));
            let counted = if side == Side::FloorUncounted { 0 } else { starts };
            let noise = 3_000 * (starts % 7 + at % 5);
            match race.measured(counted, 3_000_000 + noise, &changes) {
                Next::Ended(judgement) => return judgement,
                Next::Extend => panic!("{starts} starts are enough"),
                Next::Window(_) => {}
            }
        }
    }

    #[test]
    fn words_of_the_guest_tell_the_floor_without_a_detour() {
        for length in [u64::MAX, 3_000_000, 49_152, 1000] {
            let judged = told_race([13_000, 17_000, 17_100, 12_000], length);
            assert_eq!((judged.verdict, judged.is_told), (Verdict::Floor, true), "{judged:?}");
            assert!((11_900..12_100).contains(&judged.times[1]), "{judged:?}");
            let judged = told_race([10_000, 17_000, 17_100, 12_000], length);
            assert_eq!((judged.verdict, judged.is_told), (Verdict::Trace, true), "{judged:?}");
        }
    }

    #[test]
    fn what_disturbs_all_sides_alike_is_no_error() {
        let mut race = Race::new(7, None, true, false);
        let judged = loop {
            let time = [90, 100, 101][race.side() as usize];
            // Every other round takes twice as long.
            let factor = 1 + race.rounds.len() as u64 % 2;
            match race.measured(1000, 1000 * time * factor, &[]) {
                Next::Ended(judgement) => break judgement,
                Next::Extend => panic!("enough starts"),
                Next::Window(_) => {}
            }
        };
        assert_eq!(judged.verdict, Verdict::Trace, "{judged:?}");
        assert!(judged.error < judged.times[1] / 10, "{judged:?}");
    }

    #[test]
    fn an_obvious_race_is_short() {
        let judged = race([50_000, 130_000, 133_000], 2);
        assert_eq!((judged.verdict, judged.rounds), (Verdict::Trace, FEWEST_ROUNDS), "{judged:?}");
        let judged = race([125_000, 130_000, 133_000], 2);
        assert!(judged.rounds >= LEAST_ROUNDS, "{judged:?}");
    }

    #[test]
    fn a_trace_that_the_guest_does_not_come_to_loses() {
        for on_trace in [0, 1] {
            let mut race = Race::new(7, None, true, false);
            let judged = loop {
                let starts = if race.side() == Side::Trace { on_trace } else { 1000 };
                match race.measured(starts, 3_000_000, &[]) {
                    Next::Ended(judgement) => break judgement,
                    Next::Extend | Next::Window(_) => {}
                }
            };
            assert_eq!(judged.verdict, Verdict::Floor, "{judged:?}");
            assert!(judged.times[0] > 100 * judged.times[1], "{judged:?}");
        }
    }

    #[test]
    fn ties_go_to_the_floor() {
        let judged = race([100_000, 100_000, 100_000], 10);
        assert_eq!(judged.verdict, Verdict::Floor, "{judged:?}");
        assert!(judged.error > 0);
    }

    #[test]
    fn a_region_that_is_not_hot_any_more_is_not_judged() {
        let mut race = Race::new(1, None, true, false);
        let (mut extended, mut windows) = (0, 1);
        let judged = loop {
            match race.measured(0, 4_000_000, &[]) {
                Next::Extend => extended += 1,
                Next::Ended(judged) => break judged,
                Next::Window(_) => windows += 1,
            }
        };
        assert_eq!((judged.verdict, windows), (Verdict::Cold, MOST_EMPTY + 1));
        assert_eq!(extended, windows * MOST_BEGINNINGS);
    }

    /// A guest that comes to the head, as on both sides it takes these picoseconds, for `on` windows, and then
    /// goes elsewhere for `off`; a window between them has a part of each.
    fn race_in_phases(times: [u64; 3], on: u64, off: u64) -> Judgement {
        let mut race = Race::new(11, None, true, false);
        let mut random = 4711u64;
        let mut at = 0;
        loop {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            // In thousandths of a window.
            let phase = at % (1000 * (on + off));
            let there = (1000 * on).saturating_sub(phase).min(1000);
            let window = 900 + (random >> 33) % 200;
            at += window;
            let starts = 3_000_000_000 / times[race.side() as usize] * there * window / 1_000_000;
            match race.measured(starts, 3_000 * window, &[]) {
                Next::Ended(judgement) => return judgement,
                Next::Extend | Next::Window(_) => {}
            }
        }
    }

    #[test]
    fn phases_decide_nothing() {
        for (on, off) in [(10, 0), (20, 10), (7, 3), (3, 2)] {
            let judged = race_in_phases([50_000, 80_000, 81_000], on, off);
            assert_eq!(judged.verdict, Verdict::Trace, "{on} {off}: {judged:?}");
            let judged = race_in_phases([80_000, 60_000, 61_000], on, off);
            assert_eq!(judged.verdict, Verdict::Floor, "{on} {off}: {judged:?}");
        }
    }

    /// Where the floor is regular, the trace's slow windows are its own.
    #[test]
    fn what_is_slow_on_one_side_counts() {
        let mut race = Race::new(7, None, true, false);
        let mut n = 0;
        let judged = loop {
            n += 1;
            let time = match race.side() {
                Side::Trace if n % 2 == 0 => 400,
                Side::Trace => 50,
                Side::Floor | Side::FloorTwice | Side::FloorUncounted => 100 + n % 3,
            };
            match race.measured(1000, 1000 * time, &[]) {
                Next::Ended(judgement) => break judgement,
                Next::Extend | Next::Window(_) => {}
            }
        };
        assert_eq!(judged.verdict, Verdict::Floor, "{judged:?}");
    }

    #[test]
    fn a_fixed_number_of_rounds_is_kept() {
        for (time, verdict) in [(500, Verdict::Trace), (1000, Verdict::Floor)] {
            let mut race = Race::new(5, Some(2), true, false);
            let judged = loop {
                let side = race.side();
                let nanoseconds = if side == Side::Trace { 1000 * time } else { 1_000_000 };
                match race.measured(1000, nanoseconds, &[]) {
                    Next::Ended(judged) => break judged,
                    Next::Extend | Next::Window(_) => {}
                }
            };
            assert_eq!((judged.verdict, judged.rounds), (verdict, 2));
        }
    }

    #[test]
    fn every_round_has_every_side() {
        let mut race = Race::new(3, None, true, false);
        for _ in 0..LEAST_ROUNDS - 1 {
            let mut seen = [false; SIDES];
            for _ in 0..3 {
                seen[race.side() as usize] = true;
                assert!(matches!(race.measured(1000, 1000, &[]), Next::Window(_)));
            }
            assert_eq!(seen, [true, true, true, false]);
        }
        race.spoil();
        race.restart();
        assert_eq!(race.rounds.len(), 0);
    }
}
