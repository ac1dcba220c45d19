//! Fragments linked to one another: the dispatcher's treatment of exits, chosen at random.
//!
//! Starting with a program's first fragment, every exit that is taken is treated in one of three
//! ways. It is linked to the fragment of its target; or it looks its target up; or it gets a side
//! trace, compiled for the exit's own state or for the region. After each step the whole is run
//! again and compared.
//!
//! The dispatcher's rule holds here, too: an exit that may have made no progress never leads back
//! to its own fragment.

use std::collections::BTreeMap;

use dynasour_emitter::{EntryState, ExitId, FragmentId, SiteKind, StubTarget};
use dynasour_ir::opt::PIPELINE;
use dynasour_testkit::code::Random;

use super::program::{CODE, Program};
use super::world::{Exit, State, World};
use super::{Tally, optimised, record};

const STEPS: usize = 14;

/// Grows fragments from `first`, which was compiled for `start`'s pc.
pub fn grow(
    world: &mut World,
    program: &Program,
    first: FragmentId,
    start: &State,
    random: &mut Random,
    tally: &mut Tally,
) -> Result<(), String> {
    let mut grown = Grown { world, program, regions: BTreeMap::new(), log: Vec::new() };
    let result = grown.run(first, start, random, tally);
    // The next program has other code at these addresses.
    for pc in grown.regions.keys() {
        grown.world.emitter.forget_entry(*pc);
    }
    result.map_err(|report| format!("linked fragments\n  {}\n{report}", grown.log.join("\n  ")))
}

struct Grown<'a> {
    world: &'a mut World,
    program: &'a Program,
    /// The fragment that is entered for a pc in canonical state.
    regions: BTreeMap<u64, FragmentId>,
    /// A log of the steps, for the report.
    log: Vec<String>,
}

impl Grown<'_> {
    fn run(
        &mut self,
        first: FragmentId,
        start: &State,
        random: &mut Random,
        tally: &mut Tally,
    ) -> Result<(), String> {
        let head = start.context.rip;
        self.world.emitter.register_entry(head, first).map_err(|e| e.to_string())?;
        self.regions.insert(head, first);
        let mut from = State::new();
        for _ in 0..STEPS {
            from.copy_from(start);
            if random.one_in(2) {
                from.disturb(random);
            }
            if !self.world.ends(&from) {
                return Ok(());
            }
            let interrupted = random.one_in(4).then(|| self.any_fragment(random));
            if let Some(fragment) = interrupted {
                self.world.emitter.unlink_for_signal(fragment);
                self.log.push(format!("{fragment:?} unlinked for this run"));
            }
            let exit = self.world.run_native(first, &from);
            if let Some(fragment) = interrupted {
                self.world.emitter.relink(fragment);
            }
            tally.linked_runs += 1;
            self.world.search(&from).map_err(|differences| {
                let left = exit.id.and_then(|id| self.world.emitter.exit(id)).cloned();
                let start = crate::state::Registers::interpreted(&from.context);
                let fragments = self.world.emitter.fragments().len() as u32;
                let code: Vec<_> = (first.0..fragments)
                    .filter_map(|f| self.world.emitter.listing(FragmentId(f)))
                    .collect();
                let shown = differences.len().min(16);
                format!(
                    "left by {left:?}\n  {}\nregisters at the \
                        start\n{start}\nprogram\n{}\ncode\n{}",
                    differences[..shown].join("\n  "),
                    self.program.listing(),
                    code.join("\n")
                )
            })?;
            self.connect(exit, random, tally)?;
        }
        Ok(())
    }

    fn any_fragment(&self, random: &mut Random) -> FragmentId {
        let regions: Vec<_> = self.regions.values().copied().collect();
        regions[random.below(regions.len() as u64) as usize]
    }

    /// Treats `exit`, through which the guest has just left to the pc in `world.native`.
    fn connect(
        &mut self,
        exit: Exit,
        random: &mut Random,
        tally: &mut Tally,
    ) -> Result<(), String> {
        let pc = self.world.native.context.rip;
        let inside = pc.wrapping_sub(CODE) < self.program.bytes.len() as u64;
        if !inside {
            return Ok(());
        }
        let Some(id) = exit.id else {
            if !self.regions.contains_key(&pc) {
                let what = self.side_trace(None, random, tally)?;
                self.log.push(what);
            }
            return Ok(());
        };
        let Some(e) = self.world.emitter.exit(id).cloned() else { return Ok(()) };
        let target = self.regions.get(&pc).copied().filter(|f| e.progress || *f != e.fragment);
        let what = match (exit.kind, target) {
            (SiteKind::Poll | SiteKind::Fault, _) => return Ok(()),
            (SiteKind::End, Some(next)) => {
                self.world.emitter.link(id, next).map_err(|e| e.to_string())?;
                tally.links += 1;
                format!("end {id:?} linked to {next:?}")
            }
            (SiteKind::Guard, _) if e.target.is_none() => {
                let linked = self.world.emitter.resolve_exit(id, StubTarget::Tables);
                tally.links += u32::from(linked.is_ok());
                format!("{id:?} looks up: {linked:?}")
            }
            (SiteKind::Guard, Some(next)) => {
                let linked = self.world.emitter.resolve_exit(id, StubTarget::Fragment(next));
                tally.links += u32::from(linked.is_ok());
                format!("{id:?} linked to {next:?}: {linked:?}")
            }
            (SiteKind::End | SiteKind::EndIndirect | SiteKind::Guard, _)
                if !self.regions.contains_key(&pc) =>
            {
                let own = exit.kind == SiteKind::Guard && random.one_in(2);
                self.side_trace(own.then_some(id), random, tally)?
            }
            _ => return Ok(()),
        };
        self.log.push(what);
        Ok(())
    }

    /// Makes a trace from the state in `world.native`: for the state of the exit `own`, or for the
    /// region.
    fn side_trace(
        &mut self,
        own: Option<ExitId>,
        random: &mut Random,
        tally: &mut Tally,
    ) -> Result<String, String> {
        let state = State::new_from(&self.world.native);
        let pc = state.context.rip;
        let nothing = || Ok(format!("no trace from {pc:#x}"));
        let Some(path) = record(self.world, &state, random) else { return nothing() };
        let Some((_, version)) = optimised(&path, PIPELINE, random, tally) else {
            return nothing();
        };
        let entry = own.map_or(EntryState::Canonical, EntryState::FromExit);
        let emitter = &mut self.world.emitter;
        let fragment = match emitter.compile(&version, entry) {
            Ok(fragment) => fragment,
            Err(error) => return Ok(format!("no fragment for {pc:#x}: {error}")),
        };
        let done = match own {
            Some(exit) => emitter.attach(exit, fragment),
            None => {
                self.regions.insert(pc, fragment);
                emitter.register_entry(pc, fragment)
            }
        };
        done.map_err(|e| e.to_string())?;
        tally.side_traces += 1;
        Ok(format!("{fragment:?} made for {pc:#x}, entered {entry:?}\n{version}"))
    }
}
