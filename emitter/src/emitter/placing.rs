//! Placing: compiled code gets memory in the cache, its relocations are resolved, and it becomes a
//! fragment.
//!
//! This is done under the lock, after [`codegen::compile`](crate::codegen::compile) has made the
//! code without it. Nothing leads to the fragment yet when [`Emitter::place`] returns: links, exits
//! and lookup tables are made to lead there by calls of their own.
//!
//! Data: none of its own. **Invariants.** (1) Hot code of fragments ascends with their ids, cold
//! code descends: [`fragment_at`](crate::fragment) relies on that. (2) Code that does not fit
//! leaves the cache as it was.
//!
//! Example: the code of a trace has a jump to its third exit's stub, which is a relocation to
//! `Unlinked(2)`. The cold part gets the address 0x21ff_0000, the stub is at offset 40, so the
//! jump's field becomes the distance to 0x21ff_0028.

use crate::codegen::compiled::CompiledSite;
use crate::codegen::encoded::{Encoded, EncodedGuard, Target};
use crate::codegen::mach::Site;
use crate::codegen::{CompiledCode, Request};
use crate::emitter::{EmitError, Emitter};
use crate::fragment::counting::{Run, Tally};
use crate::fragment::{Exit, Fragment, FragmentId, FragmentRole, GuardJump, Tail};
use std::ops::Range;
use std::sync::atomic::AtomicU32;

impl Emitter {
    /// Makes a fragment of compiled code. [`EmitError::is_full`] asks the caller to
    /// [`Emitter::flush_all`].
    ///
    /// # Errors
    /// There is no room, or everything was dropped since the request was made.
    pub fn place(
        &mut self,
        request: &Request,
        code: CompiledCode,
    ) -> Result<FragmentId, EmitError> {
        if request.epoch != self.epoch {
            return Err(EmitError::Stale);
        }
        self.publish(code)
    }

    /// As [`Emitter::place`], for code that was compiled under the same lock.
    pub(crate) fn publish(&mut self, compiled: CompiledCode) -> Result<FragmentId, EmitError> {
        let code = &compiled.encoded;
        let first_site = self.exits.len() as u32;
        let words = self.counting.as_mut().and_then(|c| c.run(compiled.sites.len()));
        let mark = self.cache.mark();
        let placed =
            self.put_code(code, first_site, words).inspect_err(|_| self.cache.rewind(mark))?;
        let (hot, cold) = placed;
        let cold_of =
            |site: Site| compiled.sites[site.0 as usize].cold.map(|at| at.address(placed));
        let mut faults: Vec<(u64, u64)> = code
            .faults
            .iter()
            .filter_map(|(at, site)| Some((hot + u64::from(*at), cold_of(*site)?)))
            .collect();
        faults.sort_unstable();
        let links = self.links(code, placed, first_site, |site| {
            Some((compiled.sites[site.0 as usize].record?, cold_of(site)?))
        });
        let id = FragmentId(self.fragments.len() as u32);
        let end = first_site + compiled.sites.len() as u32;
        self.exits.extend(compiled.sites.iter().map(|site| exit(id, site)));
        for guard in &code.guards {
            self.exits[(first_site + guard.site.0) as usize].jcc =
                guard_jump(guard, code, placed, cold_of(guard.site));
        }
        let tally = words.map(|run| Box::new(tally(run, &compiled, first_site, placed)));
        let tails = code.tails.iter().map(|t| Tail {
            range: hot + u64::from(t.start)..hot + u64::from(t.end),
            displaced: hot + u64::from(t.displaced),
            out: cold + u64::from(code.unlinked_stub(t.site)),
        });
        let registers = compiled.registers;
        self.fragments.push(Fragment {
            pc: compiled.region,
            version: compiled.name,
            entry: hot + u64::from(code.entry.1),
            checked: compiled.has_checked_entry.then_some(hot + u64::from(code.entry.0)),
            hot: range(hot, &code.hot),
            cold: range(cold, &code.cold),
            exits: first_site..end,
            spill_slots: registers.spill_slots,
            end_of_slots: registers.end_of_slots,
            hot_moves: registers.hot_moves,
            uses_vector: compiled.uses_vector,
            touched: registers.touched,
            saves: registers.saves,
            restores: registers.restores,
            inside: (hot + u64::from(code.inside.0), hot + u64::from(code.inside.1)),
            role: FragmentRole::Trace,
            is_resting: false,
            extended_live: compiled.extended_live,
            contexts: compiled.contexts,
            records: compiled.records,
            faults: faults.into(),
            links,
            tails: tails.collect(),
            tally,
            starts: self.start_counts(code, hot, compiled.own_word),
            unlinked: AtomicU32::new(0),
        });
        Ok(id)
    }

    /// Finds room for encoded code, resolves its relocations and copies it into the cache. Its
    /// exits are numbered from `first_site`; it counts in `words`.
    pub(crate) fn put_code(
        &mut self,
        code: &Encoded,
        first_site: u32,
        words: Option<Run>,
    ) -> Result<(u64, u64), EmitError> {
        let hot = self.cache.alloc_hot(code.hot.len(), code.alignment)?;
        let cold = self.cache.alloc_cold(code.cold.len())?;
        let (mut hot_bytes, mut cold_bytes) = (code.hot.clone(), code.cold.clone());
        for relocation in &code.relocations {
            let (bytes, base) =
                if relocation.cold { (&mut cold_bytes, cold) } else { (&mut hot_bytes, hot) };
            let at = relocation.at as usize;
            let end = base + u64::from(relocation.at) + 4;
            let value = match relocation.target {
                Target::Exit(site) => first_site + site,
                target => self.address(target, code, (hot, cold), words).wrapping_sub(end) as u32,
            };
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        self.cache.write(hot, &hot_bytes);
        self.cache.write(cold, &cold_bytes);
        Ok((hot, cold))
    }

    /// The address that a relocation refers to. The number of an exit is no address; 0 stands for
    /// it.
    fn address(
        &self,
        target: Target,
        code: &Encoded,
        (hot, cold): (u64, u64),
        words: Option<Run>,
    ) -> u64 {
        match target {
            Target::Block(b) => {
                let (in_cold, at) = code.blocks[b];
                (if in_cold { cold } else { hot }) + u64::from(at)
            }
            Target::Unlinked(site) => cold + u64::from(code.unlinked_stub(site)),
            Target::Hot(at) => hot + u64::from(at),
            Target::Cold(at) => cold + u64::from(at),
            Target::Restored(site) => {
                let end = code.ends.iter().find(|e| e.site == site).and_then(|e| e.borrowed);
                cold + end.map_or(0, |(_, at)| u64::from(at))
            }
            Target::LeaveRaw => self.stubs.leave_raw,
            Target::LeaveCanonical => self.stubs.leave_canonical,
            Target::Address(address) => address,
            Target::Word(what) => self.counting.as_ref().map_or(0, |c| c.address(words, what)),
            Target::Exit(_) => 0,
        }
    }
}

fn range(start: u64, code: &[u8]) -> Range<u64> {
    start..start + code.len() as u64
}

fn exit(fragment: FragmentId, site: &CompiledSite) -> Exit {
    Exit {
        fragment,
        kind: site.kind,
        anchor: site.anchor,
        target: site.target,
        after: site.after,
        progress: site.progress,
        record: site.record,
        jcc: None,
    }
}

/// How a guard tests, and how it is made to fail; `out` is its cold code.
fn guard_jump(
    guard: &EncodedGuard,
    code: &Encoded,
    (hot, cold): (u64, u64),
    out: Option<u64>,
) -> Option<GuardJump> {
    let at = hot + u64::from(guard.at);
    if !guard.back_edge {
        return Some(GuardJump::Leaves(at, code.hot[guard.at as usize + 1] & 15));
    }
    let (_, head) = code.back_edges.iter().find(|(field, _)| *field == guard.at + 2)?;
    let (in_cold, offset) = code.blocks[*head];
    let head = (if in_cold { cold } else { hot }) + u64::from(offset);
    Some(GuardJump::BackEdge(at + 2, head, out?))
}

/// The meaning of the words of a fragment that counts.
fn tally(run: Run, compiled: &CompiledCode, first_site: u32, placed: (u64, u64)) -> Tally {
    let code = &compiled.encoded;
    let positions = code.positions.iter().map(|(at, of)| (placed.0 + u64::from(*at), *of));
    let positions = positions.collect();
    Tally::new(run, first_site, &compiled.sites, positions, |site| {
        let guard = code.guards.iter().find(|g| g.site == site).map(|g| g.at);
        let at = guard.or_else(|| code.faults.iter().find(|f| f.1 == site).map(|f| f.0));
        let cold = compiled.sites[site.0 as usize].cold;
        (at.map_or(0, |at| placed.0 + u64::from(at)), cold.map_or(0, |at| at.address(placed)))
    })
}
