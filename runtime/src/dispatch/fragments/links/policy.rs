//! Which exit may lead where: one pure function, [`allowed`].
//!
//! **Progress.** An exit whose target is its own fragment's pc may leave without a guest
//! instruction having been executed: a guard at the head that failed at once. If control came back
//! to the same fragment from there, through whatever links, the guest would stand still for ever.
//! So such an exit leads
//! * to the runtime, which has an instruction interpreted or a block executed;
//! * to the body of the block at its target, which executes an instruction;
//! * to a *later version* of its region. The versions of a region are in a strict order ([`Rank`]),
//!   and none may lead to an earlier one without progress, so a chain of such exits ends.
//!
//! It leads neither to a place nor through the tables: those enter the region's first version. A
//! side trace is no version of a region. Its exits may lead to any version, since no version leads
//! to a side trace without progress: an exit gets a trace of its own only while there is no region
//! at its target.
//!
//! An exit that has made progress may lead to anything at its target. One with a computed target
//! has: the transfer that computed it was executed. Only such an exit may use the tables.
//!
//! **Scope.** What there is to lead to depends on how the program is run: [`Scope`].
//!
//! The module owns no data and takes no lock; its callers in `links/` hold that of the fragments.
//! What they make of its answers is checked by the verifier ([`dynasour_emitter::links::verify`]),
//! which knows nothing of this table.
//!
//! Example: version A of the region 0x1000 has a guard that leaves to 0x1000 without progress, and
//! version B is later than A. `allowed(Scope::Blocks, exit of A, Fragment(0x1000, rank of B))`
//! holds; `Place(0x1000)` does not: links to that place lead to A.

/// What links may lead to in a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// Guards are forced (`--chaos`): fragments are only entered from the runtime, which forces
    /// their guards then.
    Forced,
    /// Fragments beside the interpreter: there are no blocks.
    Fragments,
    /// Fragments among copied blocks.
    Blocks,
}

/// The order in which a region's versions are tried: traces of loops of an interpreted program
/// first, for their entries test where in that program it is, the newest first; then the others,
/// the oldest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Rank {
    is_other: bool,
    order: i64,
}

impl Rank {
    /// Of the fragment that was made as number `age`.
    pub fn new(is_guest_loop: bool, age: u32) -> Rank {
        let age = i64::from(age);
        Rank { is_other: !is_guest_loop, order: if is_guest_loop { -age } else { age } }
    }
}

/// An exit of a fragment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExitOrigin {
    /// The pc of its fragment.
    pub pc: u64,
    /// Which version of the region there its fragment is; none if it is a side trace.
    pub version: Option<Rank>,
    /// Where it leads; none if that is computed.
    pub target: Option<u64>,
    /// Has the guest certainly executed an instruction since the fragment was entered?
    pub progress: bool,
}

/// What leads somewhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// An exit of a fragment, or the stub that was made for it.
    Exit(ExitOrigin),
    /// The links of blocks to this pc.
    Place(u64),
    /// The tables' words for this pc.
    Tables(u64),
}

/// Where it leads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Destination {
    /// The runtime.
    Runtime,
    /// The block at this pc, past its counter and past fragments.
    Body(u64),
    /// Where links to this pc lead: to a fragment, a counter or a block, now and later.
    Place(u64),
    /// A version of the region at this pc.
    Fragment(u64, Rank),
    /// Wherever the tables lead for a computed target.
    Tables,
}

/// May `origin` lead to `destination`?
pub fn allowed(scope: Scope, origin: Origin, destination: Destination) -> bool {
    let exists = match (scope, destination) {
        (_, Destination::Runtime) => return true,
        (Scope::Forced, Destination::Fragment(..)) => false,
        // What a forced guard leaves by comes to the runtime.
        (Scope::Forced, _) => !matches!(origin, Origin::Exit(_)),
        (Scope::Fragments, Destination::Body(_) | Destination::Place(_)) => false,
        (Scope::Fragments | Scope::Blocks, _) => true,
    };
    exists
        && match origin {
            Origin::Exit(exit) => exit.may_lead_to(destination),
            Origin::Place(pc) => {
                matches!(destination, Destination::Body(to) | Destination::Fragment(to, _) if to == pc)
            }
            Origin::Tables(pc) => {
                matches!(destination, Destination::Place(to) | Destination::Fragment(to, _) if to == pc)
            }
        }
}

impl ExitOrigin {
    fn may_lead_to(&self, destination: Destination) -> bool {
        let (Destination::Body(to) | Destination::Place(to) | Destination::Fragment(to, _)) =
            destination
        else {
            return destination == Destination::Runtime || self.target.is_none();
        };
        let is_there = self.target.is_none_or(|target| target == to);
        is_there && (self.has_moved(to) || Self::is_later(self.version, destination))
    }

    /// Has the guest certainly executed an instruction between the fragment's entry and its leaving
    /// to `to`?
    pub fn has_moved(&self, to: u64) -> bool {
        self.progress || self.target.is_none() || to != self.pc
    }

    /// May an exit without progress of this version lead there?
    fn is_later(own: Option<Rank>, destination: Destination) -> bool {
        match destination {
            Destination::Fragment(_, version) => own.is_none_or(|own| version > own),
            Destination::Runtime | Destination::Body(_) => true,
            Destination::Place(_) | Destination::Tables => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Destination::*;
    use super::*;

    const OWN: u64 = 0x1000;
    const ELSEWHERE: u64 = 0x2000;
    const SCOPES: [Scope; 3] = [Scope::Forced, Scope::Fragments, Scope::Blocks];

    fn exit(version: Option<Rank>, target: Option<u64>, progress: bool) -> Origin {
        Origin::Exit(ExitOrigin { pc: OWN, version, target, progress })
    }

    /// Three versions in the order in which they are tried.
    fn ranks() -> [Rank; 3] {
        [Rank::new(true, 9), Rank::new(false, 3), Rank::new(false, 5)]
    }

    #[test]
    fn versions_are_in_a_strict_order() {
        let [first, second, third] = ranks();
        assert!(first < second && second < third);
        assert!(
            Rank::new(true, 9) < Rank::new(true, 4),
            "the newest loop of an interpreted program first"
        );
        assert!(Rank::new(false, 4) < Rank::new(false, 9), "the oldest of the others first");
    }

    /// All destinations at a pc, and those without one.
    fn destinations(pc: u64) -> Vec<Destination> {
        let [first, second, third] = ranks().map(|rank| Fragment(pc, rank));
        vec![Runtime, Body(pc), Place(pc), first, second, third, Tables]
    }

    /// Which of [`destinations`] are allowed, in order.
    fn row(scope: Scope, origin: Origin, pc: u64) -> String {
        let letter = |to: &Destination| if allowed(scope, origin, *to) { 'x' } else { '-' };
        destinations(pc).iter().map(letter).collect()
    }

    #[test]
    fn the_whole_table() {
        let second = Some(ranks()[1]);
        // Runtime, body, place, the three versions, tables; forced, beside the interpreter, among
        // blocks.
        let table: [(&str, Origin, u64, [&str; 3]); 12] = [
            (
                "progress, to elsewhere",
                exit(second, Some(ELSEWHERE), true),
                ELSEWHERE,
                ["x------", "x--xxx-", "xxxxxx-"],
            ),
            (
                "none known, to elsewhere",
                exit(second, Some(ELSEWHERE), false),
                ELSEWHERE,
                ["x------", "x--xxx-", "xxxxxx-"],
            ),
            (
                "progress, to its own pc",
                exit(second, Some(OWN), true),
                OWN,
                ["x------", "x--xxx-", "xxxxxx-"],
            ),
            (
                "none, to its own pc",
                exit(second, Some(OWN), false),
                OWN,
                ["x------", "x----x-", "xx---x-"],
            ),
            (
                "none, a side trace's",
                exit(None, Some(OWN), false),
                OWN,
                ["x------", "x--xxx-", "xx-xxx-"],
            ),
            (
                "to where it does not lead",
                exit(second, Some(OWN), true),
                ELSEWHERE,
                ["x------", "x------", "x------"],
            ),
            (
                "computed, to elsewhere",
                exit(second, None, false),
                ELSEWHERE,
                ["x------", "x--xxxx", "xxxxxxx"],
            ),
            (
                "computed, to its own pc",
                exit(second, None, false),
                OWN,
                ["x------", "x--xxxx", "xxxxxxx"],
            ),
            ("a place", Origin::Place(OWN), OWN, ["xx-----", "x--xxx-", "xx-xxx-"]),
            (
                "a place for another pc",
                Origin::Place(OWN),
                ELSEWHERE,
                ["x------", "x------", "x------"],
            ),
            ("the tables", Origin::Tables(OWN), OWN, ["x-x----", "x--xxx-", "x-xxxx-"]),
            (
                "the tables for another pc",
                Origin::Tables(OWN),
                ELSEWHERE,
                ["x------", "x------", "x------"],
            ),
        ];
        for (name, origin, pc, rows) in table {
            for (scope, expected) in SCOPES.into_iter().zip(rows) {
                assert_eq!(row(scope, origin, pc), expected, "{name}, {scope:?}");
            }
        }
    }

    #[test]
    fn chains_without_progress_end() {
        // Whatever versions lead to each other without progress, none leads back.
        let may = |from: Rank, to: Rank| {
            allowed(Scope::Blocks, exit(Some(from), Some(OWN), false), Fragment(OWN, to))
        };
        for a in ranks() {
            for b in ranks() {
                assert!(!(may(a, b) && may(b, a)), "{a:?} {b:?}");
            }
        }
    }
}
