//! Counts the iterations of a loop without an instruction that counts: by words of the guest's that
//! *advance* with them, such as the loop's own counter, or the pointer that it moves.
//!
//! Nobody has to say which words these are. In some windows of a race iterations are counted, and there one or two words
//! are looked for whose changes, each times a factor, add up to their number. In other windows, where nothing
//! counts, their changes tell it. Two are needed where the loop is inside another: its own counter begins anew
//! whenever it is entered, and the counter around it counts that. Which words of the guest's they are does not
//! matter, as long as they are the same ones in all windows; a thread may be stopped anywhere in the loop, and in
//! what it calls, so that a register has another meaning there.
//!
//! **Data.** [`Advances`]: what was counted; [`Fit`]: the words, and their factors. **Invariant.** As of races:
//! nothing here decides what the guest computes, and all arithmetic is in whole numbers. No lock.
//!
//! ```text
//! window            counted    [rsp + 8]     [rsp + 12]
//! trace               9,000         + 9            + 0
//! floor, counted      6,200         + 6          + 200
//! trace               9,100        + 10          - 900      starts = 1000 × [rsp + 8] + [rsp + 12]
//! floor               ?             + 7          + 300      → 7,300
//! ```

/// Windows in which fewer starts were counted say nothing (guess; in those words agree by chance).
const LEAST_STARTS: u64 = 1000;
/// A fit needs at least so many windows: some more than it has factors.
const LEAST_WINDOWS: usize = 6;
/// A fit may miss what was counted in a window by one part in this many (guess; by more, words agree by
/// chance, and by less none does where the lengths of runs vary).
const TOLERANCE: u128 = 64;
/// A word alone that misses no more than this many times as much is preferred to a pair, of which one may agree
/// by chance (guess).
const BY_PAIR: u128 = 4;
/// So many words at most are tried in pairs.
const MOST_WORDS: usize = 48;
/// Numbers of this many bits are precise enough, and leave room for products of several.
const BITS: u32 = 20;

/// Windows in which starts were counted.
#[derive(Debug, Default)]
pub struct Advances {
    /// The starts of each.
    starts: Vec<u64>,
    /// The changes of the words in each.
    changes: Vec<Vec<u32>>,
}

impl Advances {
    /// In a window these starts were counted, and the words changed by this.
    pub fn learn(&mut self, changes: Vec<u32>, starts: u64) {
        if starts >= LEAST_STARTS {
            self.starts.push(starts);
            self.changes.push(changes);
        }
    }

    /// The words that tell the starts in all these windows, if there are such.
    pub fn fit(&self) -> Option<Fit> {
        if self.starts.len() < LEAST_WINDOWS {
            return None;
        }
        let starts = Scaled::of(self.starts.iter().map(|n| i128::from(*n)));
        let width = self.changes.iter().map(Vec::len).min()?;
        let changing = (0..width).filter_map(|word| {
            let scaled = Scaled::of(self.changes.iter().map(|changes| signed(changes[word])));
            let still = scaled.numbers.iter().filter(|change| **change == 0).count();
            (2 * still < self.starts.len()).then_some((word, scaled))
        });
        let words: Vec<(usize, Scaled)> = changing.take(MOST_WORDS).collect();
        let single = words.iter().map(|x| [x, x]);
        let pairs =
            words.iter().enumerate().flat_map(|(n, x)| words[..n].iter().map(move |y| [x, y]));
        let fits = single.chain(pairs).filter_map(|words| Fit::new(&starts, words));
        fits.min_by_key(|fit| fit.misses)
    }
}

/// The change of a word, which may have gone backwards.
fn signed(change: u32) -> i128 {
    i128::from(change.cast_signed())
}

/// Numbers without the lowest bits that are too many.
#[derive(Debug)]
struct Scaled {
    numbers: Vec<i128>,
    shift: u32,
}

impl Scaled {
    fn of(numbers: impl Iterator<Item = i128> + Clone) -> Scaled {
        let largest = numbers.clone().map(i128::unsigned_abs).max().unwrap_or(0);
        let shift = (u128::BITS - largest.leading_zeros()).saturating_sub(BITS);
        Scaled { numbers: numbers.map(|number| number >> shift).collect(), shift }
    }
}

/// Two words whose changes tell the starts; one, if they are the same.
#[derive(Clone, Copy, Debug)]
pub struct Fit {
    /// Their numbers, how far their changes are scaled, and the numerators of their factors.
    words: [(usize, u32, i128); 2],
    denominator: i128,
    /// How far the starts are scaled.
    shift: u32,
    /// By how many starts, scaled, it misses what was counted in all windows, times [`BY_PAIR`] if it is a pair.
    misses: u128,
}

impl Fit {
    /// The best fit with these two words, by least squares, if it is good in each window.
    fn new(starts: &Scaled, [(x, xs), (y, ys)]: [&(usize, Scaled); 2]) -> Option<Fit> {
        let dot = |a: &Scaled, b: &Scaled| -> i128 {
            a.numbers.iter().zip(&b.numbers).map(|(a, b)| a * b).sum()
        };
        let (xn, yn) = (dot(xs, starts), dot(ys, starts));
        let (xx, xy, yy) = (dot(xs, xs), dot(xs, ys), dot(ys, ys));
        let (denominator, a, b) = match x == y {
            true => (xx, xn, 0),
            false => (xx * yy - xy * xy, xn * yy - yn * xy, yn * xx - xn * xy),
        };
        let words = [(*x, xs.shift, a), (*y, ys.shift, b)];
        let mut fit = Fit { words, denominator, shift: starts.shift, misses: 0 };
        for ((x, y), starts) in xs.numbers.iter().zip(&ys.numbers).zip(&starts.numbers) {
            let missed = fit.told(*x, *y)?.abs_diff(*starts);
            fit.misses += missed;
            if missed > starts.unsigned_abs() / TOLERANCE {
                return None;
            }
        }
        if x != y {
            fit.misses *= BY_PAIR;
        }
        Some(fit)
    }

    fn told(&self, x: i128, y: i128) -> Option<i128> {
        let [(.., a), (.., b)] = self.words;
        (a * x + b * y).checked_div(self.denominator)
    }

    /// The number of starts in a window in which the words changed by this.
    pub fn starts(&self, changes: &[u32]) -> Option<u64> {
        let [x, y] = self.words.map(|(word, shift, _)| Some(signed(*changes.get(word)?) >> shift));
        let (x, y) = (x?, y?);
        let is_large = |change: i128| change.unsigned_abs() >> (BITS + 1) != 0;
        if is_large(x) || is_large(y) {
            return None;
        }
        u64::try_from(self.told(x, y)?).ok()?.checked_mul(1 << self.shift)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest with a loop of `length` iterations in another: what its words are after so many starts.
    fn words(length: u64, starts: u64) -> [u32; 4] {
        let inner = starts % length;
        [
            4711,
            (starts / length) as u32,
            (8 * inner).wrapping_neg() as u32,
            (starts * starts / 7919) as u32,
        ]
    }

    /// Learns windows of these lengths, and what is told then about windows of some others.
    fn told(length: u64, windows: impl Iterator<Item = u64>) -> Option<Vec<(u64, u64)>> {
        let mut at = 0;
        let mut window = |starts: u64| {
            let before = words(length, at);
            at += starts;
            let after = words(length, at);
            after.iter().zip(before).map(|(after, before)| after.wrapping_sub(before)).collect()
        };
        let mut advances = Advances::default();
        for starts in windows {
            let changes: Vec<u32> = window(starts);
            advances.learn(changes, starts);
        }
        let fit = advances.fit()?;
        let others = [77_000, 100_001, 45_678];
        Some(others.map(|starts| (starts, fit.starts(&window(starts)).unwrap_or(0))).into())
    }

    #[test]
    fn a_counter_tells_the_starts() {
        for told in told(u64::MAX, (0..6).map(|n| 60_000 + 7_001 * n)).expect("a fit") {
            assert!(told.0.abs_diff(told.1) <= told.0 / 1000, "{told:?}");
        }
    }

    #[test]
    fn the_counters_of_a_loop_and_of_the_one_around_it_tell_the_starts() {
        for length in [50, 1_000, 49_152, 70_000] {
            let told = told(length, (0..6).map(|n| 60_000 + 7_001 * n)).expect("a fit");
            for told in told {
                assert!(told.0.abs_diff(told.1) <= told.0 / 500, "{length}: {told:?}");
            }
        }
    }

    #[test]
    fn without_enough_windows_nothing_is_told() {
        assert_eq!(told(1000, (0..5).map(|n| 60_000 + 7_001 * n)), None);
        assert_eq!(told(1000, (0..20).map(|n| 900 + n)), None, "too few starts");
        assert_eq!(Advances::default().fit().map(|_| ()), None);
    }

    #[test]
    fn words_that_advance_by_chance_tell_nothing() {
        let mut random = 1u32;
        let mut next = || {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            random
        };
        let mut advances = Advances::default();
        for _ in 0..8 {
            let starts = 50_000 + u64::from(next() >> 16);
            let changes: Vec<u32> = (0..300).map(|word| next() >> (word % 30)).collect();
            advances.learn(changes, starts);
        }
        assert_eq!(advances.fit().map(|_| ()), None);
    }

    #[test]
    fn any_change_can_be_learned() {
        let all = [0, 1, u32::MAX, 1 << 31, (1 << 31) - 1];
        for starts in [0, 1000, u64::from(u32::MAX), u64::MAX / 4, u64::MAX] {
            let mut advances = Advances::default();
            for n in 0..8 {
                advances.learn(
                    all.map(|change: u32| change.rotate_left(n)).to_vec(),
                    starts.saturating_sub(u64::from(n) / 4),
                );
            }
            if let Some(fit) = advances.fit() {
                fit.starts(&all);
            }
            advances.learn(all.to_vec(), starts / 2);
            assert_eq!(advances.fit().map(|_| ()), None);
        }
    }
}
