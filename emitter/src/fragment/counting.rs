//! Counting: fragments that count how often each part of them runs, so that `explain` can say what
//! guards cost and how often they fail.
//!
//! Under [`Config::count`](crate::Config::count) fragments contain code that adds one to a word of
//! data memory and changes no register and no flag:
//!
//! ```text
//! mov gs:[save], rcx
//! mov rcx, [word]
//! lea rcx, [rcx + 1]
//! mov [word], rcx
//! mov rcx, gs:[save]
//! ```
//!
//! It stands behind the entry (*entered*), at the head of a loop (*iterations*: arrivals there,
//! from the entry and by the back edge), before the jump of each guard and at each trace end
//! (*executed*), and in the cold code of each site before its record (*left*), which every failure
//! passes, wherever the exit leads. Without that setting no byte of the code is different.
//!
//! Data: [`Counting`], the words of an emitter, and a [`Tally`] in each fragment, which says what
//! its words mean. Invariant: a word is given to one fragment only, so counts outlive flushes. The
//! caller holds the emitter; generated code adds to the words without a lock, so threads that run
//! one fragment at once lose counts.
//!
//! Example: a fragment with two guards takes six words: entered, iterations, and executed and left
//! for each guard. A guard that was executed 1,000 times and left 3 times fails in 0.3 %.

use super::{ExitId, FragmentId};
use crate::cache::words::Words;
use crate::codegen::compiled::CompiledSite;
use crate::codegen::count::What;
use crate::codegen::mach::{Site, SiteKind};
use dynasour_ir::AnchorId;
use std::ops::Range;

pub use crate::codegen::count::length_at;

/// Words of 8 bytes, two for each guard (guess; if it is too low, later fragments are not counted).
/// The last word is shared by the code of all fragments that came when the others were in use; it
/// is never read.
const WORDS: usize = 1 << 22;

/// The number of a word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Word(u32);

/// The words of one fragment, which are consecutive: the number of the first one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Run(u32);

impl Run {
    pub fn word(self, what: What) -> Word {
        Word(self.0 + what.index())
    }
}

/// A guard, safe point, possible fault or end of a fragment that counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CountedSite {
    /// The exit it leaves by.
    pub exit: ExitId,
    /// What kind of place it is.
    pub kind: SiteKind,
    /// The anchor it leaves through.
    pub anchor: AnchorId,
    /// Its IR instruction in the version that was given to the emitter: block and index; for an
    /// end, the number of instructions. None if the emitter has added the instruction before the
    /// version, to perform a store that an exit had deferred.
    pub position: Option<(u32, u32)>,
    /// Where the host's jump or faulting instruction is; 0 if there is none.
    pub host: u64,
    /// Where its cold code starts; 0 if there is none.
    pub cold: u64,
    /// Times that it was reached, of guards and ends.
    pub executed: Word,
    /// Times that control left there, except at ends.
    pub left: Word,
}

/// What a fragment counts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tally {
    /// Times that it was entered.
    pub entered: Word,
    /// Times that its loop's head was reached, if it has a loop.
    pub iterations: Word,
    /// Its sites, in the order of their exits.
    pub sites: Vec<CountedSite>,
    /// Host addresses in the hot code, ascending, each with block and index of the IR instruction whose
    /// code begins there.
    pub positions: Box<[(u64, (u32, u32))]>,
}

impl Tally {
    /// What the words of a fragment mean.
    pub(crate) fn new(
        run: Run,
        first_site: u32,
        sites: &[CompiledSite],
        positions: Box<[(u64, (u32, u32))]>,
        host: impl Fn(Site) -> (u64, u64),
    ) -> Tally {
        let site = |(n, site): (u32, &CompiledSite)| {
            let (host, cold) = host(Site(n));
            CountedSite {
                exit: ExitId(first_site + n),
                kind: site.kind,
                anchor: site.anchor,
                position: site.position,
                host,
                cold,
                executed: run.word(What::Executed(n)),
                left: run.word(What::Left(n)),
            }
        };
        Tally {
            entered: run.word(What::Entered),
            iterations: run.word(What::Iterations),
            sites: (0..).zip(sites).map(site).collect(),
            positions,
        }
    }
}

/// Where a link or an exit leads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Destination {
    /// To the runtime.
    Runtime,
    /// To a fragment.
    Fragment(FragmentId),
    /// To a copied block, perhaps by way of a counter.
    Block,
}

/// The words of an emitter that counts.
pub(crate) struct Counting {
    words: Words,
    used: usize,
}

impl Counting {
    /// None if there is no room for the words.
    pub fn new(cache: &Range<u64>) -> Option<Counting> {
        Some(Counting { words: Words::new(cache, WORDS)?, used: 0 })
    }

    /// Takes over the counts of an emitter that this one replaces: its words keep their numbers. To be called
    /// before any word is given out.
    pub fn continue_from(&mut self, before: &Counting) {
        (0..before.used).for_each(|n| self.words.set(n, before.words.get(n)));
        self.used = before.used;
    }

    /// The addresses of the words.
    pub fn memory(&self) -> Range<u64> {
        self.words.range()
    }

    /// Words for a fragment with this number of sites; none if too few words are left.
    pub fn run(&mut self, sites: usize) -> Option<Run> {
        let first = self.used;
        let end = first + 2 + 2 * sites;
        (end < self.words.len()).then(|| {
            self.used = end;
            Run(first as u32)
        })
    }

    /// The count in a word.
    pub fn get(&self, word: Word) -> u64 {
        self.words.get(word.0 as usize)
    }

    /// The address of the word in which a fragment with these words counts `what`.
    pub fn address(&self, run: Option<Run>, what: What) -> u64 {
        self.words.address(run.map_or(self.words.len() - 1, |run| run.word(what).0 as usize))
    }
}
