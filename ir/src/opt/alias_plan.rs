//! What the pass `alias` guards: the spans and groups of a loop, and the bytes that a span has to
//! miss.
//!
//! ```text
//! addresses with the key v3 (rsp):      [v3 - 40, v3 - 8)   [v3 + 0, v3 + 16)     a group: two slots
//! addresses with the key v17:                    [v17 + 8, v17 + 16)              a span
//!
//! predicted:   ....|v3 - 40 … v3 + 16|..................|v17 + 8 …|..............
//! forbidden for the span:  from v3 - 40 to v3 + 16, everything but the gap in which it lies
//! ```
//!
//! A *span* is a range of bytes that the loop accesses through one key ([`crate::alias`]), where no
//! access through another key is predicted to touch anything in between. A *group* is all slots of a
//! key that does not change in the loop, if the loop loads through it.
//!
//! A span must miss the slots of a group that matter to it. If the span is written, these are all;
//! else those that are written. Those that it is predicted to touch do not count. If the state at
//! entry is known ([`crate::predict`]), the span lies in a gap between them, and one guard says that
//! it stays there. If it is far from all of them, that guard has a margin and speaks of the key, so it
//! serves all spans of the key. If the state is not known, it takes one guard for each.
//!
//! What pays: a guard whose addresses do not change in the loop is only executed before the loop.
//! Any other takes three or four instructions in each iteration. So a group gets guards if the loads
//! that it saves outnumber the guards ([`Plan::new`]).
//!
//! **Data.** A [`Plan`] belongs to one run of the pass. **Invariant.** Any choice is right; a bad one
//! costs time.

use super::shape::{BODY, ENTRY};
use crate::alias::{Access, Addresses, Location, Values, access};
use crate::defs::Defs;
use crate::op::Op;
use crate::predict::{Prediction, value_of};
use crate::version::Version;
use rustc_hash::FxHashMap;

/// Accesses this far apart, in bytes, belong to different spans if nothing is predicted (guess: a
/// larger gap may hold an array, whose stores would then fail the guard).
const MAX_GAP: u64 = 16;
/// Longest span in bytes if nothing is predicted (guess: a longer one fails its guard more often).
const MAX_SPAN: u64 = 64;
/// Longest span in bytes of a pointer that changes in the loop (guess: a longer one reaches from one
/// object into another).
const MAX_VARYING_SPAN: u64 = 4096;
/// Longest span in bytes: its size has 32 bits.
const MAX_STEADY_SPAN: u64 = 1 << 31;
/// Most groups of a loop that get guards (guess: each group costs guards at each span).
const MAX_GROUPS: usize = 8;
/// Most guards for one span and group if nothing is predicted (guess: one of many fails sooner).
const MOST_UNPREDICTED: usize = 3;
/// A span that is predicted to be this far from a group, in bytes, is guarded with a margin (guess: the
/// heap's distance from the stack is much larger).
const FAR: u64 = 1 << 20;
/// That margin, in bytes (guess: most objects are smaller).
const MARGIN: u64 = 1 << 13;
/// The longest group with such guards, in bytes, so that the guard's constants have 32 bits.
const MAX_WIDE: u64 = 1 << 30;
/// A gap reaches at most this far in bytes beyond a span, so that the guard's constant has 32 bits.
const REACH: u64 = 1 << 30;

/// An access with a known extent.
struct Accessed {
    block: usize,
    /// Index of the instruction in the block.
    at: usize,
    location: Location,
    write: bool,
    load: bool,
}

/// Accesses through one key, close to each other.
pub(super) struct Span {
    pub range: Location,
    write: bool,
    /// Does the address not change in the loop?
    steady: bool,
    /// Is it only accessed in the entry block?
    only_at_entry: bool,
}

/// All that is accessed through one key that does not change in the loop.
pub(super) struct Group {
    key: u32,
    slots: Vec<Slot>,
    loads: usize,
}

/// Bytes of a group.
struct Slot {
    location: Location,
    write: bool,
}

/// Bytes from a group's addresses that a span must miss: `size` of them from `start`, modulo 2^64.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Forbidden {
    /// Where it starts; its size is not used.
    pub start: Location,
    pub size: u64,
}

/// What to guard.
pub(super) struct Plan {
    pub spans: Vec<Span>,
    pub groups: Vec<Group>,
    /// By block and index of an instruction, the span that it accesses.
    span_of: FxHashMap<(usize, usize), usize>,
    /// By key, the predicted address of offset 0.
    bases: FxHashMap<u32, u64>,
}

impl Plan {
    /// Chooses the groups of a loop for which guards pay.
    pub fn new(
        version: &Version,
        defs: &Defs,
        addresses: &mut Addresses,
        predicted: &Prediction,
    ) -> Plan {
        let mut varies = vec![false; version.types.len()];
        for body in &version.blocks[BODY..] {
            let defined = body.insts.iter().flat_map(|i| &i.defs);
            body.params.iter().chain(defined).for_each(|v| varies[v.index()] = true);
        }
        let mut list = Vec::new();
        for block in 0..version.blocks.len() {
            list.extend(accesses(version, block, defs, addresses));
        }
        let bases = bases(&list, addresses, predicted);
        let is_steady = |l: &Location| addresses.terms(l).iter().all(|(v, _)| !varies[v.index()]);
        let (spans, span_of) = spans(&mut list, &bases, is_steady);
        let mut plan = Plan { spans, groups: Vec::new(), span_of, bases };
        let mut groups = plan.all_groups(&list);
        groups.retain(|group| plan.pays(group, addresses));
        // Addresses without terms first: the guards against them say where the others lie, which often
        // makes guards against those unnecessary.
        groups.sort_by_key(|g| {
            let has_terms = !addresses.terms(&g.slots[0].location).is_empty();
            (has_terms, std::cmp::Reverse(g.loads))
        });
        groups.truncate(MAX_GROUPS);
        plan.groups = groups;
        plan
    }

    /// The keys that do not change in the loop and through which it loads.
    fn all_groups(&self, list: &[Accessed]) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::new();
        let is_steady = |a: &&Accessed| self.spans[self.span_of[&(a.block, a.at)]].steady;
        for Accessed { block, location, write, load, .. } in list.iter().filter(is_steady) {
            if groups.last().is_none_or(|g| g.key != location.key) {
                groups.push(Group { key: location.key, slots: Vec::new(), loads: 0 });
            }
            let Some(group) = groups.last_mut() else { continue };
            group.loads += usize::from(*block != ENTRY && *load);
            match group.slots.last_mut().filter(|s| s.location == *location) {
                Some(slot) => slot.write |= write,
                None => group.slots.push(Slot { location: *location, write: *write }),
            }
        }
        groups.retain(|g| g.loads > 0);
        groups
    }

    /// Do the guards for a group cost less than the loads that they save?
    fn pays(&self, group: &Group, addresses: &Addresses) -> bool {
        let (mut steady, mut varying) = (0, 0);
        for (i, span) in self.spans.iter().enumerate() {
            let guards = if span.write { self.forbidden(i, group, addresses).len() } else { 0 };
            if span.steady { steady += guards } else { varying += guards }
        }
        // Some guards are needed, those in the loop at most one for each load, and those before it
        // at most four (guess: they are executed once for each entry).
        steady + varying > 0 && varying <= group.loads && steady <= 4 * group.loads
    }

    /// The span that an instruction accesses.
    pub fn span(&self, block: usize, at: usize) -> Option<usize> {
        self.span_of.get(&(block, at)).copied()
    }

    /// Is a guard for the span wanted? Not for one that is only read, if the guard would be executed
    /// in each iteration: it lets no load survive, only stores sink.
    pub fn wants(&self, span: usize) -> bool {
        let span = &self.spans[span];
        span.write || span.steady && !span.only_at_entry
    }

    /// What a span must miss so that the group's loads and its own survive each other's stores.
    /// Nothing if that is known already or cannot be guarded.
    pub fn forbidden(&self, span: usize, group: &Group, addresses: &Addresses) -> Vec<Forbidden> {
        let span = &self.spans[span];
        if span.range.key == group.key {
            return Vec::new();
        }
        let others = group.slots.iter().filter(|o| span.write || o.write);
        let others: Vec<&Location> = others.map(|o| &o.location).collect();
        let open = |o: &&Location| {
            !addresses.disjoint(&span.range, o)
                && addresses.difference(&span.range, o).is_some_and(|d| !d.terms.is_empty())
        };
        if !others.iter().any(open) {
            return Vec::new();
        }
        let (Some(base), Some(other)) =
            (self.bases.get(&span.range.key), self.bases.get(&group.key))
        else {
            let each = joined(others.into_iter().filter(open));
            return if each.len() > MOST_UNPREDICTED { Vec::new() } else { each };
        };
        let start = base.wrapping_add(span.range.offset).wrapping_sub(*other);
        let all: Vec<&Location> = group.slots.iter().map(|slot| &slot.location).collect();
        let wide = around(&span.range, start, &all);
        wide.or_else(|| all_but_gap(start, span.range.size.into(), &others)).into_iter().collect()
    }
}

/// Locations of one key, sorted by offset, those joined that are close to each other.
fn joined<'l>(locations: impl Iterator<Item = &'l Location>) -> Vec<Forbidden> {
    let mut list: Vec<Forbidden> = Vec::new();
    for location in locations {
        if let Some(last) = list.last_mut() {
            let start = location.offset.wrapping_sub(last.start.offset);
            if start <= last.size + MAX_GAP {
                last.size = last.size.max(start + u64::from(location.size));
                continue;
            }
        }
        list.push(Forbidden { start: *location, size: location.size.into() });
    }
    list
}

/// If `span`, from `start` on, is far from all `others`: what its key's offset 0 must miss, so that
/// all spans near that do. So one guard serves them all, and its constants are those of the guards of
/// other keys. `start` is an offset of the key of `others`.
fn around(span: &Location, start: u64, others: &[&Location]) -> Option<Forbidden> {
    // The group's bytes, as offsets from its first slot: the gap that wraps around is the rest.
    let first = others.iter().min_by_key(|o| o.offset as i64)?;
    let end_of = |o: &Location| o.offset.wrapping_sub(first.offset).wrapping_add(o.size.into());
    let size = others.iter().map(|o| end_of(o)).max()?;
    let w = u64::from(span.size) - 1;
    let is_near = |offset: u64| offset.wrapping_add(MARGIN) < 2 * MARGIN;
    let after = start.wrapping_sub(first.offset).wrapping_sub(size);
    let before = first.offset.wrapping_sub(start).wrapping_sub(w + 1);
    let is_far = after >= FAR && before >= FAR;
    let fits = w < MARGIN && is_near(span.offset) && is_near(span.offset.wrapping_add(w));
    if !is_far || !fits || size > MAX_WIDE {
        return None;
    }
    let low = first.offset.wrapping_sub(MARGIN);
    let start = Location { offset: low.wrapping_add(span.offset).wrapping_add(w), ..**first };
    Some(Forbidden { start, size: (size + 2 * MARGIN).checked_sub(w)? })
}

/// All but the gap between `others` in which `size` bytes from `start` lie; both are offsets of one
/// key. Others that touch these bytes do not count.
fn all_but_gap(start: u64, size: u64, others: &[&Location]) -> Option<Forbidden> {
    let end = start.wrapping_add(size);
    let missed = others.iter().filter(|o| {
        start.wrapping_sub(o.offset) >= o.size.into() && o.offset.wrapping_sub(start) >= size
    });
    let after = missed.clone().min_by_key(|o| o.offset.wrapping_sub(end))?;
    let before = missed
        .map(|o| o.offset.wrapping_add(o.size.into()))
        .min_by_key(|e| start.wrapping_sub(*e))?;
    let (mut from, mut to) = (after.offset, before);
    if to.wrapping_sub(from) >= 1 << 31 {
        // The bytes from `to` to `from` are the gap; a part of it will do.
        if from.wrapping_sub(end) > REACH {
            from = end.wrapping_add(REACH);
        }
        if start.wrapping_sub(to) > REACH {
            to = start.wrapping_sub(REACH);
        }
    }
    let start = Location { offset: from, ..**after };
    Some(Forbidden { start, size: to.wrapping_sub(from) })
}

/// The accesses of a block with a known extent, in order.
fn accesses(
    version: &Version,
    block: usize,
    defs: &Defs,
    addresses: &mut Addresses,
) -> Vec<Accessed> {
    let values = Values { defs, replaced: &[] };
    let mut list = Vec::new();
    for (at, inst) in version.blocks[block].insts.iter().enumerate() {
        let (size, write) = match access(version, inst) {
            Access::None | Access::ReadUnknown | Access::Barrier => continue,
            Access::Read(size) => (size, false),
            Access::Write(size) => (size, true),
        };
        if let Some(location) = addresses.locate(&values, inst, size) {
            list.push(Accessed { block, at, location, write, load: inst.op == Op::Load });
        }
    }
    list
}

/// For each key without a segment the predicted address of offset 0, if it is known.
fn bases(list: &[Accessed], addresses: &Addresses, predicted: &Prediction) -> FxHashMap<u32, u64> {
    let mut bases = FxHashMap::default();
    for Accessed { location, .. } in list {
        let base = || {
            let mut terms = addresses.terms(location).iter();
            terms.try_fold(0u64, |sum, (v, factor)| {
                Some(sum.wrapping_add(value_of(predicted, (*v).into())?.wrapping_mul(*factor)))
            })
        };
        if !predicted.is_empty()
            && !addresses.has_segment(location)
            && !bases.contains_key(&location.key)
            && let Some(base) = base()
        {
            bases.insert(location.key, base);
        }
    }
    bases
}

/// Sorts the accesses by key and offset, and joins those of one key to spans.
fn spans(
    list: &mut [Accessed],
    bases: &FxHashMap<u32, u64>,
    is_steady: impl Fn(&Location) -> bool,
) -> (Vec<Span>, FxHashMap<(usize, usize), usize>) {
    let position = |l: &Location| bases.get(&l.key).map(|b| b.wrapping_add(l.offset));
    let mut positions: Vec<(u64, u32)> =
        list.iter().filter_map(|a| Some((position(&a.location)?, a.location.key))).collect();
    positions.sort_unstable();
    // Is another key predicted to access something from `from` to `to`?
    let foreign = |from: u64, to: u64, key: u32| {
        let first = positions.partition_point(|(p, _)| *p < from);
        positions[first..].iter().take_while(|(p, _)| *p < to).any(|(_, k)| *k != key)
    };
    list.sort_by_key(|a| (a.location.key, a.location.offset as i64));
    let mut spans: Vec<Span> = Vec::new();
    let mut span_of = FxHashMap::default();
    for Accessed { block, at, location, write, .. } in list.iter() {
        let steady = is_steady(location);
        let most = if steady { MAX_STEADY_SPAN } else { MAX_VARYING_SPAN };
        let joined = spans.last().filter(|s| s.range.key == location.key).and_then(|last| {
            let start = location.offset.wrapping_sub(last.range.offset);
            let size = start.saturating_add(location.size.into()).max(last.range.size.into());
            let joins = match (position(&last.range), position(location)) {
                (Some(from), Some(to)) => size <= most && !foreign(from, to, location.key),
                _ => {
                    let gap = start.saturating_sub(last.range.size.into());
                    gap <= MAX_GAP && (steady || size <= MAX_SPAN)
                }
            };
            joins.then_some(size as u32)
        });
        match (joined, spans.last_mut()) {
            (Some(size), Some(last)) => {
                last.range.size = size;
                last.write |= write;
                last.only_at_entry &= *block == ENTRY;
            }
            _ => spans.push(Span {
                range: *location,
                write: *write,
                steady,
                only_at_entry: *block == ENTRY,
            }),
        }
        span_of.insert((*block, *at), spans.len() - 1);
    }
    (spans, span_of)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(offset: u64, size: u32) -> Location {
        Location { key: 0, offset, size }
    }

    #[test]
    fn the_gap_is_between_the_nearest() {
        let others = [at(0, 8), at(100, 8), at(40, 4)];
        let others: Vec<&Location> = others.iter().collect();
        let gap = |start, size| all_but_gap(start, size, &others).map(|f| (f.start.offset, f.size));
        assert_eq!(gap(20, 8), Some((40, 0u64.wrapping_sub(32))));
        assert_eq!(gap(50, 8), Some((100, 0u64.wrapping_sub(56))));
        // Beyond the last: all others are forbidden.
        assert_eq!(gap(200, 8), Some((0, 108)));
        // One that is touched does not count.
        assert_eq!(gap(42, 8), Some((100, 0u64.wrapping_sub(92))));
        assert_eq!(all_but_gap(2, 2, &others[..1]), None);
    }

    /// The guard of a far span is the same for all spans near offset 0 of its key, and what it forbids keeps
    /// each of them off the group.
    #[test]
    fn far_spans_of_a_key_share_a_guard() {
        let others = [at(0u64.wrapping_sub(40), 8), at(0, 16)];
        let others: Vec<&Location> = others.iter().collect();
        let guard = |start: u64, span: &Location| {
            let forbidden = around(span, start, &others)?;
            // `least <= D + k` of the pass, where D is the distance of the keys' offsets 0.
            let w = u64::from(span.size) - 1;
            let k = span.offset.wrapping_sub(forbidden.start.offset).wrapping_add(w);
            Some((k, forbidden.size + w))
        };
        let far = 1 << 30;
        let first = guard(far, &at(0, 8)).expect("it is far");
        for (offset, size) in [(8, 8), (24, 4), (0u64.wrapping_sub(16), 8), (4096, 64)] {
            assert_eq!(guard(far.wrapping_add(offset), &at(offset, size)), Some(first));
            // At the least distances that pass, on both sides.
            let (k, least) = first;
            let above = least.wrapping_sub(k).wrapping_add(offset) as i64;
            let below = 0u64.wrapping_sub(k + 1).wrapping_add(offset + u64::from(size)) as i64;
            assert!(above >= 16 && below <= -40, "{above} {below}");
        }
        assert_eq!(guard(FAR / 2, &at(0, 8)), None, "near");
        assert_eq!(guard(far, &at(MARGIN, 8)), None, "its offset is large");
        assert_eq!(guard(0u64.wrapping_sub(far), &at(0, 8)), Some(first), "below");
    }

    #[test]
    fn a_wide_gap_is_cut() {
        let others = [at(0, 8), at(1 << 40, 8)];
        let others: Vec<&Location> = others.iter().collect();
        let start = 1 << 39;
        let forbidden = all_but_gap(start, 8, &others).expect("there is a gap");
        assert_eq!(forbidden.start.offset, start + 8 + REACH);
        assert_eq!(forbidden.size, (start - REACH).wrapping_sub(start + 8 + REACH));
    }
}
