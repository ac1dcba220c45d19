//! The verifier of links: does what generated code leads to agree with what is known about it, and
//! with the rules?
//!
//! [`Emitter::verify_links`] reads the jumps and the tables as they stand in memory and checks each
//! [`Rule`]. It changes nothing. It owns no data; what it derives (which blocks are live, which
//! jump is in which list) lives for one call.
//!
//! The caller holds the emitter, so that no signal handler and no other thread changes links
//! meanwhile. Debug builds call it after changes of links (the runtime decides how often) and at
//! the end of each guest. It takes some 50 ns for each link (measured on the matrix's guests), so
//! release builds never call it.
//!
//! **Progress.** A cycle of links without a guest instruction would be an endless loop that no
//! signal could end soon. The verifier looks for one among the links over which control may pass
//! without an instruction having been executed: from a trace by a guard's exit that leads to the
//! trace's own pc and may have failed at once ([`Exit::progress`](crate::Exit::progress)), through
//! resolved stubs, passages, checked entries and the tables. A copied block executes at least one
//! instruction, so no such cycle goes through one. A side trace first performs stores that its
//! parent has deferred; these are no progress of its own, so its exits are never believed to have
//! made any.
//!
//! Example: the traces A and B both start at pc 0x1000. A's first guard fails, and its resolved
//! stub leads to B; B's leads to A. Neither has executed an instruction: `Progress: fragments 0, 2,
//! 1, 3 lead to each other`.

use crate::blocks::Counted;
use crate::blocks::places::{ANYWHERE, BODY, FOREIGN, Link, NONE, PLACE, Patched};
use crate::cache::writer;
use crate::codegen::mach::SiteKind;
use crate::emitter::Emitter;
use crate::fragment::{
    ExitId, Fragment, FragmentId, FragmentRole, GuardJump, Link as FragmentLink, LinkKind,
};
use crate::transfers::indirect::{Via, WAY_OUT};
use rustc_hash::FxHashMap;
use std::fmt;

#[cfg(test)]
mod tests;

/// The rules that links obey.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rule {
    /// A jump in memory leads where its link's state says: to its target, or out while its owner is
    /// unlinked.
    Memory,
    /// A link leads out, to an entry of a fragment, to the body of a block, or to a counter; to the
    /// pc that it is for.
    Destination,
    /// Nothing leads to a fragment that rests, nor to its passages.
    Resting,
    /// Nothing leads to a block, a counter or a checked entry that was removed.
    Doomed,
    /// The list of the links that lead to a place holds exactly these.
    Lists,
    /// Each word of a table leads to a checked entry for the pc that it belongs to, or out.
    Tables,
    /// Each cycle of links executes a guest instruction.
    Progress,
    /// After [`Emitter::retire_all`] all links lead out and no table holds anything.
    Retired,
}

/// A rule that does not hold.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// The rule.
    pub rule: Rule,
    /// The place of the violation, and the code or word found there.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.rule, self.what)
    }
}

impl std::error::Error for Violation {}

/// Whether a rule holds.
type Verified = Result<(), Violation>;

/// `Err` unless the rule holds.
fn require(rule: Rule, holds: bool, what: impl FnOnce() -> String) -> Verified {
    if holds { Ok(()) } else { Err(Violation { rule, what: what() }) }
}

impl Emitter {
    /// Checks every rule of links.
    ///
    /// # Errors
    /// The first rule that was found not to hold.
    pub fn verify_links(&self) -> Verified {
        let mut verifier = Verifier::new(self);
        verifier.lists()?;
        verifier.places()?;
        verifier.blocks()?;
        verifier.checks()?;
        verifier.fragments()?;
        verifier.tables()?;
        verifier.retired()?;
        verifier.progress()
    }

    /// As [`Emitter::verify_links`]; and looks through all words of the tables for those that
    /// belong to no pc, which takes some 100 µs for each table in use.
    ///
    /// # Errors
    /// The first rule that was found not to hold.
    pub fn verify_links_and_tables(&self) -> Verified {
        self.verify_links()?;
        let unowned = self.indirect.unowned();
        require(Rule::Tables, unowned.is_none(), || format!("{unowned:#x?} belongs to no pc"))
    }

    /// The number of links and places, to which the time of [`Emitter::verify_links`] is
    /// proportional.
    pub fn links_to_verify(&self) -> usize {
        self.exits.len() + self.blocks.links.len() + self.blocks.places.len()
    }
}

/// One run of the verifier.
struct Verifier<'e> {
    emitter: &'e Emitter,
    /// By a block's index: is it live, so that it may be led to?
    live: Vec<bool>,
    /// By a link's number: is it in the list of its place?
    listed: Vec<bool>,
    /// Links of fragments in lists: the address of the field, and the number of the link.
    foreign: FxHashMap<u64, u32>,
}

impl<'e> Verifier<'e> {
    fn new(emitter: &'e Emitter) -> Verifier<'e> {
        let blocks = &emitter.blocks;
        let is_live = |(index, block): (usize, &crate::blocks::Block)| {
            let is_exits =
                || matches!(blocks.heads.counts_of(block.counter), Some(Counted::Exit(..)));
            block.len != 0
                && (blocks.places[block.place as usize].made.contains(&(index as u32))
                    || is_exits())
        };
        Verifier {
            emitter,
            live: blocks.blocks.iter().enumerate().map(is_live).collect(),
            listed: vec![false; blocks.links.len()],
            foreign: FxHashMap::default(),
        }
    }

    fn address(&self, offset: u32) -> u64 {
        self.emitter.blocks.base + u64::from(offset)
    }

    fn led(&self, field: u64) -> u64 {
        writer::led(&self.emitter.cache, field)
    }

    /// Where block `index` is entered: behind its checked entry.
    fn body(&self, index: u32) -> u64 {
        let block = &self.emitter.blocks.blocks[index as usize];
        self.address(block.start) + u64::from(block.prefix)
    }

    /// The lists of places are well-formed, and their members are links to these places.
    fn lists(&mut self) -> Verified {
        let blocks = &self.emitter.blocks;
        for &place in blocks.by_pc.values() {
            let (mut number, mut before) = (blocks.places[place as usize].links, NONE);
            while let Some(link) = blocks.links.get(number as usize) {
                let what = || {
                    format!("link {number} in the list of {:#x}", blocks.places[place as usize].pc)
                };
                require(Rule::Lists, link.place != ANYWHERE && link.place & PLACE == place, what)?;
                let is_new = !std::mem::replace(&mut self.listed[number as usize], true);
                require(Rule::Lists, is_new && link.before == before, what)?;
                if link.place & FOREIGN != 0 {
                    let known = self.foreign.insert(self.address(link.field), number);
                    require(Rule::Lists, known.is_none(), || format!("{} twice", what()))?;
                }
                (before, number) = (number, link.next);
            }
            require(Rule::Lists, number == NONE, || format!("a list that ends at link {number}"))?;
        }
        Ok(())
    }

    /// The block, counter and entry of each place belong to its pc and are live.
    fn places(&self) -> Verified {
        let blocks = &self.emitter.blocks;
        for (&pc, &number) in &blocks.by_pc {
            let place = &blocks.places[number as usize];
            let [body, counter, gate] = place.made;
            let own = |rule, index: u32, offset: u32| {
                let block = blocks.blocks.get(index as usize).filter(|b| b.len != 0 && b.pc == pc);
                require(rule, block.is_some() && self.body(index) == self.address(offset), || {
                    format!("{pc:#x} leads to {:#x}", self.address(offset))
                })
            };
            require(Rule::Lists, place.pc == pc, || {
                format!("the place of {pc:#x} is that of {:#x}", place.pc)
            })?;
            if place.block != 0 {
                own(Rule::Doomed, body, place.block)?;
            }
            match self.emitter.fragment_at(self.address(place.entry)) {
                _ if place.entry == 0 || place.entry == place.block => {}
                Some(id) => self.fragment_entry(self.address(place.entry), id, Some(pc))?,
                None if blocks.gate_of(number) == Some(place.entry) => {
                    own(Rule::Doomed, gate, place.entry)?;
                }
                None => own(Rule::Doomed, counter, place.entry)?,
            }
        }
        Ok(())
    }

    /// The links of blocks and of counters.
    fn blocks(&self) -> Verified {
        let blocks = &self.emitter.blocks;
        for (index, block) in blocks.blocks.iter().enumerate().filter(|(_, b)| b.len != 0) {
            let (live, unlinked) = (self.live[index], block.is_unlinked());
            for number in blocks.links_of(index as u32) {
                let link = &blocks.links[number];
                let what = || format!("link {number} of the block at {:#x}", block.pc);
                if link.place == ANYWHERE {
                    let holds = !live || self.holds(link, blocks.patched(link, unlinked));
                    require(Rule::Memory, holds, || format!("{}, an indirect one", what()))?;
                    continue;
                }
                require(Rule::Lists, self.listed[number] || !live, || {
                    format!("{} is in no list", what())
                })?;
                let (led, out, target) =
                    (self.led(self.address(link.field)), blocks.out(link), blocks.target(link));
                // No thread executes a removed block once every thread has been outside, so its
                // links may lead anywhere.
                let expected = if unlinked { out } else { target };
                let holds = led == expected || !live && led == out;
                require(Rule::Memory, holds, || {
                    format!("{} leads to {led:#x}, not to {expected:#x}", what())
                })?;
                let past = block.counter == NONE || link.place & BODY != 0;
                require(Rule::Progress, past, || {
                    format!("{}, a counter, does not lead to the block", what())
                })?;
            }
            let open = if live { None } else { blocks.landing_branch(index as u32) };
            let open = open.filter(|branch| !writer::is_always_taken(&self.emitter.cache, *branch));
            require(Rule::Doomed, open.is_none(), || {
                format!("{:#x} is gone and still returned to", block.pc)
            })?;
        }
        Ok(())
    }

    /// Does a jump in memory hold this?
    fn holds(&self, link: &Link, expected: Patched) -> bool {
        let (field, cache) = (self.address(link.field), &self.emitter.cache);
        match expected {
            Patched::Field(value) => cache.read(field, 4) == value.to_le_bytes(),
            Patched::Instruction(bytes) => cache.read(field - 4, 8) == bytes,
        }
    }

    /// The links of checked entries that belong to no block.
    fn checks(&self) -> Verified {
        let blocks = &self.emitter.blocks;
        for (&(place, via), &offset) in &blocks.apart {
            let what = || format!("a checked entry of {:#x}", blocks.places[place as usize].pc);
            let check = blocks.check_at(offset).map(|index| &blocks.checks[index as usize]);
            let check = check.filter(|check| check.start() == offset && check.via == via);
            let number = check.map_or(NONE, |check| check.link);
            let link = blocks.links.get(number as usize).filter(|link| link.place == place);
            require(Rule::Lists, link.is_some() && self.listed[number as usize], what)?;
            let leads =
                link.is_some_and(|link| self.led(self.address(link.field)) == blocks.target(link));
            require(Rule::Memory, leads, what)?;
        }
        Ok(())
    }

    /// The links of fragments.
    fn fragments(&self) -> Verified {
        for (n, fragment) in self.emitter.fragments.iter().enumerate() {
            for link in &fragment.links {
                let what = || format!("{:?} of fragment {n} at {:#x}", link.kind, fragment.pc);
                let (led, target) = (self.led(link.field), link.target());
                let expected = if fragment.is_unlinked() { link.out } else { target };
                let holds = led == expected || self.is_forced(fragment, link, led);
                require(Rule::Memory, holds, || {
                    format!("{} leads to {led:#x}, not to {expected:#x}", what())
                })?;
                self.destination(fragment, link, target)
                    .map_err(|v| Violation { what: format!("{}: {}", what(), v.what), ..v })?;
            }
        }
        for field in self.foreign.keys() {
            let owner = self.emitter.fragment_at(*field).and_then(|id| self.emitter.fragment(id));
            let is_there =
                owner.is_some_and(|owner| owner.links.iter().any(|link| link.field == *field));
            require(Rule::Lists, is_there, || {
                format!("{field:#x} is in a list and no fragment's link")
            })?;
        }
        Ok(())
    }

    /// Is this the back edge of a guard that chaos makes fail?
    fn is_forced(&self, fragment: &Fragment, link: &FragmentLink, led: u64) -> bool {
        let guards = fragment.exits.clone().filter_map(|exit| self.emitter.exit(ExitId(exit))?.jcc);
        let mut forced = guards.filter_map(|guard| match guard {
            GuardJump::BackEdge(field, _, out) => Some((field, out)),
            GuardJump::Leaves(..) => None,
        });
        link.kind == LinkKind::BackEdge && forced.any(|guard| guard == (link.field, led))
    }

    /// A fragment's link may lead to `target`.
    fn destination(&self, fragment: &Fragment, link: &FragmentLink, target: u64) -> Verified {
        let inside = fragment.hot.contains(&target) || fragment.cold.contains(&target);
        let listed = self
            .foreign
            .get(&link.field)
            .map(|number| &self.emitter.blocks.links[*number as usize]);
        if let Some(listed) = listed {
            let known = self.emitter.blocks.target(listed);
            let says = || format!("the list says {known:#x}, the link {target:#x}");
            require(Rule::Lists, known == target, says)?;
        }
        let exit = match link.kind {
            LinkKind::BackEdge => {
                return require(Rule::Destination, inside, || "a back edge out".to_string());
            }
            LinkKind::End(exit) | LinkKind::Borrowed(exit) => self.emitter.exit(exit),
            LinkKind::Record(_) | LinkKind::Guard(_) => None,
        };
        if target == link.out
            || exit.is_some_and(|exit| exit.kind == SiteKind::EndIndirect && inside)
        {
            return Ok(());
        }
        let pc = exit.and_then(|exit| exit.target);
        if let Some(id) = self.emitter.fragment_at(target) {
            return self.fragment_entry(target, id, pc);
        }
        let Some(index) = self.emitter.blocks.at(target) else {
            return require(Rule::Destination, false, || format!("{target:#x} is no code"));
        };
        let block = &self.emitter.blocks.blocks[index as usize];
        let at = || format!("{target:#x}, of the block at {:#x}", block.pc);
        require(Rule::Doomed, self.live[index as usize], at)?;
        require(Rule::Destination, target == self.body(index) && pc == Some(block.pc), at)?;
        // The counter of an exit lives until everything is dropped.
        let found = listed.is_some() || block.counter != NONE;
        require(Rule::Lists, found, || format!("{} is led to by a link in no list", at()))
    }

    /// An address is an entry of fragment `id`, which is for `pc` and does not rest.
    fn fragment_entry(&self, address: u64, id: FragmentId, pc: Option<u64>) -> Verified {
        let fragment = &self.emitter.fragments[id.0 as usize];
        let at = || format!("{address:#x}, of fragment {} at {:#x}", id.0, fragment.pc);
        let entries = [fragment.entry, fragment.inside.0, fragment.inside.1];
        require(Rule::Destination, entries.contains(&address), at)?;
        require(Rule::Destination, pc.is_none_or(|pc| pc == fragment.pc), at)?;
        let resting =
            fragment.is_resting || self.passage_of(fragment).is_some_and(|to| to.is_resting);
        require(Rule::Resting, !resting, at)
    }

    /// The fragment that a passage leads to.
    fn passage_of(&self, fragment: &Fragment) -> Option<&'e Fragment> {
        match fragment.role {
            FragmentRole::Passage(to) => self.emitter.fragment(to),
            FragmentRole::Trace | FragmentRole::Stub => None,
        }
    }

    /// The code behind the checked entry to which a word of a table leads.
    fn checked(&self, via: Via, pc: u64, entry: u64) -> Result<Node, Violation> {
        let blocks = &self.emitter.blocks;
        let start = entry.wrapping_sub(WAY_OUT);
        let at = || format!("{entry:#x} for {pc:#x} by {via:?}");
        if let Some(id) = self.emitter.fragment_at(start) {
            let fragment = &self.emitter.fragments[id.0 as usize];
            let is_entry =
                fragment.checked == Some(start) && fragment.pc == pc && via == Via::Memory;
            require(Rule::Tables, is_entry, at)?;
            require(Rule::Resting, !fragment.is_resting, at)?;
            return Ok(Node::Fragment(id.0));
        }
        if let Some(index) = blocks.at(start) {
            let block = &blocks.blocks[index as usize];
            let is_entry =
                self.address(block.start) == start && block.prefix != 0 && block.pc == pc;
            require(Rule::Tables, is_entry && usize::from(block.via) == via.index(), at)?;
            require(Rule::Doomed, self.live[index as usize], at)?;
            return Ok(Node::Progress);
        }
        let place = blocks.by_pc.get(&pc).copied();
        let apart = place.and_then(|place| blocks.apart.get(&(place, via)));
        require(Rule::Tables, apart.is_some_and(|offset| self.address(*offset) == start), at)?;
        let place = &blocks.places[place.unwrap_or_default() as usize];
        Ok(match self.emitter.fragment_at(self.address(place.entry)) {
            Some(id) => Node::Fragment(id.0),
            None => Node::Progress,
        })
    }

    /// The words of all tables.
    fn tables(&self) -> Verified {
        for (via, pc, entry) in self.emitter.indirect.entries() {
            self.checked(via, pc, entry)?;
        }
        Ok(())
    }

    /// Between retiring everything and dropping it, all links lead out and all tables are empty.
    fn retired(&self) -> Verified {
        if !self.emitter.retired {
            return Ok(());
        }
        let linked = self.emitter.fragments.iter().find(|fragment| !fragment.is_unlinked());
        require(Rule::Retired, linked.is_none(), || {
            format!("{:#x} is linked", linked.map_or(0, |f| f.pc))
        })?;
        let mut live = self.emitter.blocks.blocks.iter().zip(&self.live).filter(|(_, live)| **live);
        let linked = live.find(|(block, _)| !block.is_unlinked());
        require(Rule::Retired, linked.is_none(), || {
            format!("{:#x} is linked", linked.map_or(0, |(b, _)| b.pc))
        })?;
        let found = self.emitter.indirect.entries().next();
        require(Rule::Retired, found.is_none(), || format!("a table holds {found:#x?}"))
    }
}

/// A point at which control may arrive without having executed a guest instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Node {
    /// A fragment's entry.
    Fragment(u32),
    /// The tables of indirect transfers.
    Tables,
    /// A copied block, whose first instruction is executed.
    Progress,
}

/// How far the search for cycles is with a node.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Visit {
    New,
    /// On the path to the node that is being visited.
    Open,
    Done,
}

impl Verifier<'_> {
    /// No cycle of links goes without a guest instruction: a depth-first search finds no node on
    /// its own path.
    fn progress(&self) -> Verified {
        let tables = self.emitter.fragments.len();
        let index = |node: Node| match node {
            Node::Fragment(n) => Some(n as usize),
            Node::Tables => Some(tables),
            Node::Progress => None,
        };
        let mut visits = vec![Visit::New; tables + 1];
        for start in 0..tables {
            if visits[start] != Visit::New {
                continue;
            }
            visits[start] = Visit::Open;
            let mut path = vec![(start, self.without_progress(Node::Fragment(start as u32))?)];
            while let Some((node, left)) = path.last_mut() {
                let Some(next) = left.pop() else {
                    visits[*node] = Visit::Done;
                    path.pop();
                    continue;
                };
                let Some(at) = index(next) else { continue };
                let cycle = || {
                    let from = path.iter().position(|(node, _)| *node == at).unwrap_or(0);
                    let nodes: Vec<usize> = path[from..].iter().map(|(node, _)| *node).collect();
                    format!("fragments {nodes:?} lead to each other ({tables} is the tables)")
                };
                require(Rule::Progress, visits[at] != Visit::Open, cycle)?;
                if visits[at] == Visit::New {
                    visits[at] = Visit::Open;
                    path.push((at, self.without_progress(next)?));
                }
            }
        }
        Ok(())
    }

    /// Where control may come from a node without a guest instruction having been executed.
    fn without_progress(&self, node: Node) -> Result<Vec<Node>, Violation> {
        let fragment = match node {
            Node::Fragment(n) => &self.emitter.fragments[n as usize],
            Node::Tables => {
                let entries = self.emitter.indirect.entries();
                return entries.map(|(via, pc, entry)| self.checked(via, pc, entry)).collect();
            }
            Node::Progress => return Ok(Vec::new()),
        };
        let mut nodes = Vec::new();
        let records = self.records_at_head(fragment);
        for link in
            fragment.links.iter().filter(|link| Self::may_go_without(fragment, &records, link))
        {
            match (link.kind, self.emitter.fragment_at(link.target())) {
                _ if link.target() == link.out => {}
                (LinkKind::End(exit), _) if self.is_indirect(exit) => nodes.push(Node::Tables),
                (_, Some(id)) => nodes.push(Node::Fragment(id.0)),
                (_, None) => {}
            }
        }
        Ok(nodes)
    }

    fn is_indirect(&self, exit: ExitId) -> bool {
        self.emitter.exit(exit).is_some_and(|exit| exit.kind == SiteKind::EndIndirect)
    }

    /// May control come from the entry of a fragment to this link of its without having executed an
    /// instruction? `records` are those of [`Self::records_at_head`].
    fn may_go_without(fragment: &Fragment, records: &[u32], link: &FragmentLink) -> bool {
        let record = match (fragment.role, link.kind) {
            (_, LinkKind::BackEdge) => return false,
            (FragmentRole::Stub | FragmentRole::Passage(_), _) => return true,
            (FragmentRole::Trace, LinkKind::End(_) | LinkKind::Borrowed(_)) => return false,
            (FragmentRole::Trace, LinkKind::Record(record) | LinkKind::Guard(record)) => record,
        };
        records.contains(&record)
    }

    /// The records of a trace by which its guards may leave to its own pc without having executed
    /// an instruction.
    fn records_at_head(&self, fragment: &Fragment) -> Vec<u32> {
        if fragment.role != FragmentRole::Trace {
            return Vec::new();
        }
        let is_side_trace = fragment.checked.is_none();
        let exits = fragment.exits.clone().filter_map(|exit| self.emitter.exit(ExitId(exit)));
        let at_head = exits.filter(|exit| {
            let leads_back = exit.kind == SiteKind::Guard && exit.target == Some(fragment.pc);
            leads_back && (is_side_trace || !exit.progress)
        });
        let mut records: Vec<u32> = at_head.filter_map(|exit| exit.record).collect();
        records.dedup();
        records
    }
}
