//! Which exit may lead where: one pure function, [`allowed`].
//!
//! **Progress.** An exit whose target is its own fragment's pc may leave before a guest instruction
//! was executed: a guard at the head that failed at once. If links then led back to the same
//! fragment, the guest would loop forever without progress. So such an exit leads
//! * to the runtime, which has an instruction interpreted or a block executed;
//! * to the block at its target, which executes an instruction;
//! * to a *later version* of its region. The versions of a region are in a strict order ([`Rank`]),
//!   and none may lead to an earlier one without progress, so a chain of such exits ends.
//!
//! Such an exit leads neither to a place nor through the tables, since both enter the region's
//! first version. A side trace is no version of a region. Its exits may lead to any version, since
//! no version leads to a side trace without progress: an exit gets a side trace of its own only
//! while there is no region at its target.
//!
//! An exit that has made progress may lead to anything at its target. An exit with a computed
//! target has made progress, since the transfer that computed the target was executed. Only such an
//! exit may use the tables.
//!
//! **Scope.** Which destinations there are depends on how the program is run: [`Scope`].
//!
//! No data and no lock. The callers in `links/` hold the lock of the fragments. The verifier
//! ([`dynasour_emitter::links::verify`]) checks the links that they make, and shares no code with
//! this table.
//!
//! Example: version A of the region 0x1000 has a guard that leaves to 0x1000 without progress, and
//! version B is later than A. `allowed(Scope::Blocks, exit of A, Fragment(0x1000, rank of B))`
//! holds. `Place(0x1000)` is not allowed: links to that place lead to A.

/// How the program is run, which decides what links may lead to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// Guards are forced (`--chaos`): fragments are only entered from the runtime, which forces
    /// their guards at each entry.
    Forced,
    /// Fragments without copied blocks.
    Fragments,
    /// Fragments among copied blocks.
    Blocks,
}

/// The position of a version in its region. Versions are tried in this order. First come loops of a
/// program that the guest interprets: their entry guards test where the guest is in that program. Then come
/// the other versions. Of each kind, the oldest comes first: of what is executed by turns, the more frequent is
/// found earlier. A loop that is not executed any more is set back ([`super::super::order`]).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Rank {
    is_other: bool,
    group: u32,
    age: u32,
}

impl Rank {
    /// The rank of the fragment with the number `age`; later fragments have higher numbers. Setting back begins
    /// new groups: those with higher numbers come later.
    pub fn new(is_guest_loop: bool, group: u32, age: u32) -> Rank {
        Rank { is_other: !is_guest_loop, group, age }
    }

    /// Is the fragment a loop of a program that the guest interprets?
    pub fn is_guest_loop(self) -> bool {
        !self.is_other
    }
}

/// What [`allowed`] needs to know of an exit of a fragment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExitOrigin {
    /// The pc of its fragment.
    pub pc: u64,
    /// The rank of its fragment in the region there; none if its fragment is a side trace.
    pub version: Option<Rank>,
    /// The pc that it leaves to; none if that is computed.
    pub target: Option<u64>,
    /// Has the guest certainly executed an instruction since the fragment was entered?
    pub progress: bool,
}

/// The beginning of a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// An exit of a fragment, or the stub that was made for it.
    Exit(ExitOrigin),
    /// The links of blocks to this pc.
    Place(u64),
    /// The words of the tables of indirect jumps for this pc.
    Tables(u64),
}

/// The destination of a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Destination {
    /// The runtime.
    Runtime,
    /// The block at this pc itself, never a counter or a fragment there.
    Body(u64),
    /// The place of this pc: the fragment, counter or block to which links to this pc lead at a
    /// time.
    Place(u64),
    /// A version of the region at this pc.
    Fragment(u64, Rank),
    /// The tables of indirect jumps, which are searched for a computed target.
    Tables,
}

/// May `origin` lead to `destination`?
pub fn allowed(scope: Scope, origin: Origin, destination: Destination) -> bool {
    let exists = match (scope, destination) {
        (_, Destination::Runtime) => return true,
        (Scope::Forced, Destination::Fragment(..)) => false,
        // Exits of fragments with forced guards lead to the runtime.
        (Scope::Forced, _) => !matches!(origin, Origin::Exit(_)),
        (Scope::Fragments, Destination::Body(_) | Destination::Place(_)) => false,
        (Scope::Fragments | Scope::Blocks, _) => true,
    };
    exists
        && match origin {
            Origin::Exit(exit) => exit.may_lead_to(destination),
            Origin::Place(pc) => match destination {
                Destination::Body(to) | Destination::Fragment(to, _) => to == pc,
                Destination::Runtime | Destination::Place(_) | Destination::Tables => false,
            },
            Origin::Tables(pc) => match destination {
                Destination::Place(to) | Destination::Fragment(to, _) => to == pc,
                Destination::Runtime | Destination::Body(_) | Destination::Tables => false,
            },
        }
}

impl ExitOrigin {
    /// Does the rule of progress let this exit lead to `destination`, and is that at its target?
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

    /// May an exit without progress of the version `own` lead there?
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
        [Rank::new(true, 0, 9), Rank::new(true, 1, 3), Rank::new(false, 0, 5)]
    }

    #[test]
    fn versions_are_in_a_strict_order() {
        let [first, second, third] = ranks();
        assert!(first < second && second < third);
        for is_guest_loop in [true, false] {
            let rank = |group, age| Rank::new(is_guest_loop, group, age);
            assert!(rank(0, 4) < rank(0, 9), "the oldest first");
            assert!(rank(0, 9) < rank(1, 4), "unless it was set back");
        }
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
        // The letters of a row: runtime, body, place, the three versions, tables. The rows: guards
        // forced, without copied blocks, with copied blocks.
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
        // If one version may lead to another without progress, that one may not lead back.
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
