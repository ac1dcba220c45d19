//! Compiled code lifted back into IR, so that it can be compared with what was recorded
//! ([`dynasour_ir::validate`]): by the lifter that lifts guest code, as if the code stood at an address.
//!
//! This checks selection, allocation, encoding and the records of exits together, and shares none of
//! their code but [`Record::apply`], which the runtime uses, too.
//!
//! The code begins behind the instructions that load the extended state, because the model has no
//! extended state apart from its place. It ends where it goes to the runtime, or to another fragment: at
//! an unlinked end, a record, or the tail of an indirect end.
//!
//! A side trace begins in the state of an exit. The host's registers and slots are chosen such that the
//! exit's record gives the guest state that is asked for, as far as it can. A resolved stub begins there,
//! too, and must end in that guest state.
//!
//! **Data.** [`LiftedCode`] borrows the code and owns what was lifted. **Invariant.** What the code reads
//! and writes beside guest memory lies in [`CONTEXT`]. One thread uses it; no lock.
//!
//! ```text
//! HOT + entry     add rax, rbx; …; jne COLD + 8        COLD + 8   gs:[exit_site] = 0; jmp LEAVE_RAW
//! ```

mod passages;
mod vectors;

use crate::codegen::compiled::{At, CompiledCode};
use crate::codegen::encoded::{Encoded, EncodedGuard, Target};
use crate::codegen::{FragmentEntry, Request};
use crate::record::{Location, Node, Record, pack_flags, unpack_flags};
use dynasour_guest::context::{SCRATCH_WORDS, ThreadContext, offset};
use dynasour_guest::decode::Fetch;
use dynasour_guest::lift::{LiftedBlock, MAX_BLOCK, lift_block};
use dynasour_ir::eval::State;
use dynasour_ir::eval::check::Code;
use dynasour_ir::prove::{Provable, Word};
use dynasour_ir::semantics::ARITH_FLAGS;
use dynasour_ir::validate::{Entered, HostNative, Left, Lowered, Tables};
use dynasour_ir::{
    Anchor, Block, BlockId, Fact, Gpr, Loc, Op, Operand, Segment, Term, Ty, Version,
};
use rustc_hash::FxHashMap;
use std::cell::RefCell;
use std::ops::Range;

/// Where the hot code stands. All these addresses are near each other, and none is canonical, so no guest
/// has memory there.
const HOT: u64 = 0x7a00_0000_8000_0000;
/// Where the cold code stands.
const COLD: u64 = HOT + 0x1000_0000;
/// Where code leaves with raw registers.
const LEAVE_RAW: u64 = HOT + 0x2000_0000;
/// Where it leaves with canonical registers.
const LEAVE_CANONICAL: u64 = LEAVE_RAW + 0x100;
/// The thread's context, and a page behind it for words that code counts in.
const CONTEXT: Range<u64> = HOT + 0x3000_0000
    ..HOT + 0x3000_0000 + (size_of::<ThreadContext>() as u64).next_multiple_of(4096) + 4096;
/// The words that code counts in.
const WORDS: u64 = CONTEXT.end - 4096;

/// Bytes of a `jcc` with a field of four bytes.
const JCC: usize = 6;

/// The bytes of code at its address.
struct Image {
    hot: Vec<u8>,
    cold: Vec<u8>,
}

impl Image {
    fn of(code: &Encoded) -> Image {
        let mut image = Image { hot: code.hot.clone(), cold: code.cold.clone() };
        for relocation in &code.relocations {
            let (bytes, base) = match relocation.cold {
                true => (&mut image.cold, COLD),
                false => (&mut image.hot, HOT),
            };
            let at = relocation.at as usize;
            let end = base + u64::from(relocation.at) + 4;
            let value = match relocation.target {
                Target::Exit(site) => site,
                target => address(target, code).wrapping_sub(end) as u32,
            };
            if let Some(field) = bytes.get_mut(at..at + 4) {
                field.copy_from_slice(&value.to_le_bytes());
            }
        }
        image
    }

    /// The address of a guard's jump, and where control goes when the guard fails.
    fn way_out(&self, guard: &EncodedGuard) -> (u64, u64) {
        let behind = guard.at as usize + JCC;
        let field = self.hot.get(behind - 4..behind).and_then(|field| field.try_into().ok());
        let distance =
            if guard.back_edge { 0 } else { i32::from_le_bytes(field.unwrap_or_default()) };
        let out = (HOT + behind as u64).wrapping_add_signed(distance.into());
        (HOT + u64::from(guard.at), out)
    }
}

/// The address of what a relocation refers to.
fn address(target: Target, code: &Encoded) -> u64 {
    match target {
        Target::Block(b) => At::of_block(code, b).address((HOT, COLD)),
        Target::Unlinked(site) => COLD + u64::from(code.unlinked_stub(site)),
        Target::Hot(at) => HOT + u64::from(at),
        Target::Cold(at) => COLD + u64::from(at),
        Target::Restored(site) => {
            let end = code.ends.iter().find(|end| end.site == site);
            COLD + end.and_then(|end| end.borrowed).map_or(0, |(_, restored)| u64::from(restored))
        }
        Target::LeaveRaw => LEAVE_RAW,
        Target::LeaveCanonical => LEAVE_CANONICAL,
        Target::Address(_) | Target::Word(_) => WORDS,
        Target::Exit(_) => 0,
    }
}

impl Fetch for Image {
    fn fetch(&self, addr: u64, buf: &mut [u8]) -> usize {
        let (bytes, start) = if addr < COLD { (&self.hot, HOT) } else { (&self.cold, COLD) };
        let offset = usize::try_from(addr.wrapping_sub(start)).unwrap_or(usize::MAX);
        let rest = bytes.get(offset..).unwrap_or(&[]);
        let n = rest.len().min(buf.len());
        buf[..n].copy_from_slice(&rest[..n]);
        n
    }
}

/// Compiled code, lifted as far as it was executed.
pub struct LiftedCode<'c> {
    code: &'c CompiledCode,
    image: Image,
    blocks: FxHashMap<u64, LiftedBlock>,
    tables: Tables,
    /// The record of the exit in whose state it is entered.
    from: Option<&'c Record>,
    /// It executes no guest instruction, and is for any pc that the record gives.
    is_stub: bool,
    /// What records are applied to.
    applied: RefCell<Box<ThreadContext>>,
}

impl<'c> LiftedCode<'c> {
    /// The code of a version, compiled for this request.
    pub fn new(code: &'c CompiledCode, version: &Version, request: &'c Request) -> LiftedCode<'c> {
        let from = match &request.entry {
            FragmentEntry::Canonical => None,
            FragmentEntry::FromExit(exit) => Some(&exit.record),
        };
        LiftedCode::entered(code, version, from)
    }

    /// A resolved stub of an exit with this record. `version` is [`untouched`].
    pub(crate) fn of_stub(
        code: &'c CompiledCode,
        version: &Version,
        record: &'c Record,
    ) -> LiftedCode<'c> {
        LiftedCode { is_stub: true, ..LiftedCode::entered(code, version, Some(record)) }
    }

    fn entered(
        code: &'c CompiledCode,
        version: &Version,
        from: Option<&'c Record>,
    ) -> LiftedCode<'c> {
        let encoded = &code.encoded;
        let heads = encoded.polls.iter().map(|(_, landing, block)| {
            (At::of_block(encoded, *block).address((HOT, COLD)), COLD + u64::from(*landing))
        });
        let image = Image::of(encoded);
        let faults = encoded.faults.iter().filter_map(|(at, site)| {
            let cold = code.sites.get(site.0 as usize)?.cold?;
            Some((HOT + u64::from(*at), cold.address((HOT, COLD))))
        });
        let ways = encoded.guards.iter().map(|guard| image.way_out(guard)).chain(faults);
        let tables = Tables {
            entry: HOT + u64::from(encoded.inside.1),
            context: CONTEXT,
            heads: heads.collect(),
            ways: ways.collect(),
            natives: natives(encoded, &image, version),
        };
        LiftedCode {
            code,
            image,
            blocks: FxHashMap::default(),
            tables,
            from,
            is_stub: false,
            applied: RefCell::new(ThreadContext::new()),
        }
    }

    /// The words of the context behind the entry, with the host's registers and these slots at entry.
    fn words(&self, host: &State, [fs, gs]: [u64; 2], slots: &[u64]) -> Vec<(u64, u64)> {
        let word = |at: usize, value: u64| (CONTEXT.start + at as u64, value);
        let slot = |slot: usize, value: u64| word(offset::SCRATCH + 8 * slot, value);
        let slots = slots.iter().enumerate().filter(|(_, value)| **value != 0);
        let saves = self.code.registers.saves.iter();
        let vectors = self.code.registers.vectors.iter();
        let others = [(offset::FS_BASE, fs), (offset::GS_BASE, gs), (offset::THIS, CONTEXT.start)];
        slots
            .map(|(i, value)| slot(i, *value))
            .chain(saves.map(|&(r, s)| slot(usize::from(s), host.gpr[usize::from(r)])))
            .chain(others.map(|(at, value)| word(at, value)))
            .chain(vectors.map(|&(r, _)| (vectors::word(r), vectors::guests(r))))
            .collect()
    }

    /// The guest must have its own in the XMM registers that were borrowed.
    fn check_vectors(&self, mut load: impl FnMut(u64) -> Option<u64>) -> Result<(), String> {
        let mut borrowed = self.code.registers.vectors.iter().map(|(r, _)| *r);
        match borrowed.find(|r| load(vectors::word(*r)) != Some(vectors::guests(*r))) {
            Some(r) => Err(format!("xmm{r} is not given back")),
            None => Ok(()),
        }
    }

    fn site(
        &self,
        load: &dyn Fn(u64) -> u64,
    ) -> Result<(usize, &super::compiled::CompiledSite), String> {
        self.numbered((load(CONTEXT.start + offset::EXIT_SITE as u64) & 0xffff_ffff) as usize)
    }

    fn numbered(&self, number: usize) -> Result<(usize, &super::compiled::CompiledSite), String> {
        let site = self.code.sites.get(number);
        site.map(|site| (number, site)).ok_or_else(|| format!("there is no exit {number}"))
    }
}

/// The natives of the version, by the addresses of their instructions in the code.
fn natives(code: &Encoded, image: &Image, version: &Version) -> FxHashMap<u64, HostNative> {
    let mut found = FxHashMap::default();
    for &(at, ip) in &code.natives {
        let at = HOT + u64::from(at);
        let block = lift_block(at, image, 1);
        let mut insts = block.version.blocks[BlockId(0).index()].insts.iter();
        let host = insts
            .find(|inst| inst.op == Op::Native)
            .and_then(|inst| block.version.natives.get(inst.native?.index()));
        let guest = version.natives.iter().find(|native| native.inst.ip() == ip);
        let Some((host, guest)) = host.zip(guest) else { continue };
        // A move between two XMM registers is modelled with the guest's general register.
        let (host_in, host_out) = match vectors::is_move(guest, host) {
            true => (&guest.gpr_in, &guest.gpr_out),
            false => (&host.gpr_in, &host.gpr_out),
        };
        let inputs = guest.gpr_in.iter().map(|g| host_in.iter().position(|h| h == g));
        let outputs = guest.gpr_out.iter().map(|g| host_out.iter().position(|h| h == g));
        if let (Some(inputs), Some(outputs)) = (inputs.collect(), outputs.collect()) {
            found.insert(at, HostNative { guest: guest.clone(), inputs, outputs });
        }
    }
    found
}

/// The version of a stub's region that leaves at once, in the state in which it is entered. It stands
/// for the stub where a validation makes cases of a version.
pub(crate) fn untouched(pc: u64) -> Version {
    let mut version = Version::new("stub", pc);
    // The stub performs the record's stores, in an order that nobody can see.
    version.context.facts.push(Fact::PrivateMemory);
    let locs = (0..Loc::SSA_COUNT).map(Loc::from_ssa_index);
    let params = locs.clone().map(|loc| version.value(loc.ty())).collect();
    version.entry_locs = locs.collect();
    let end = version.anchor(Anchor::new(Operand::Const(pc), Vec::new()));
    version.blocks.push(Block { params, insts: Vec::new(), term: Term::Exit(end) });
    version
}

/// The guest state that a record gives in this context.
fn left_by(record: &Record, context: &mut ThreadContext) -> Left {
    let stores = record.apply(context);
    let stores = stores.into_iter().map(|s| (s.address, s.size, s.value)).collect();
    let state = State { gpr: context.gpr, flags: context.rflags & ARITH_FLAGS };
    Left { pc: context.rip, state, stores }
}

impl Code for LiftedCode<'_> {
    fn block(&mut self, pc: u64) -> Option<&Version> {
        let is_tail = self.code.encoded.tails.iter().any(|t| HOT + u64::from(t.start) == pc);
        if is_tail || !(HOT..LEAVE_RAW).contains(&pc) {
            return None;
        }
        let image = &self.image;
        let (vectors, natives) = (&self.code.registers.vectors, &self.tables.natives);
        let block = self.blocks.entry(pc).or_insert_with(|| {
            let borrowed = vectors.iter().fold(0, |set, (r, _)| set | 1 << r);
            let mut block = lift_block(pc, image, MAX_BLOCK);
            vectors::modelled(&mut block.version, natives, borrowed);
            block
        });
        Some(&block.version)
    }
}

impl Lowered for LiftedCode<'_> {
    fn tables(&self) -> Tables {
        self.tables.clone()
    }

    fn enter(&self, state: &State, segments: [u64; 2]) -> Entered {
        let Some(record) = self.from else {
            let words = self.words(state, segments, &[]);
            let (host, guest) = (state.clone(), state.clone());
            return Entered { pc: None, words, host, guest, stores: Vec::new() };
        };
        // The record's leaves get what its locations are to hold, as far as they are leaves.
        let (mut host, mut slots) = (state.clone(), vec![0; SCRATCH_WORDS]);
        for (loc, node) in &record.locations {
            let wanted = state.get(*loc).unwrap_or(0);
            let packed = if *loc == Loc::Flags { pack_flags(wanted) } else { wanted };
            match record.nodes[usize::from(*node)] {
                Node::Leaf(Location::Reg(r), _) => host.gpr[usize::from(r)] = packed,
                Node::Leaf(Location::Slot(s), _) => slots[usize::from(s)] = packed,
                Node::Leaf(Location::Flags, _) => host.flags = wanted,
                _ => {}
            }
        }
        // In a register a bit is a whole byte, and flags have no bits besides them.
        for node in &record.nodes {
            let Node::Leaf(location, ty) = node else { continue };
            let place = match *location {
                Location::Reg(r) => &mut host.gpr[usize::from(r)],
                Location::Slot(s) => &mut slots[usize::from(s)],
                Location::Operand(_) | Location::Vector(_) | Location::Flags => continue,
            };
            match ty {
                Ty::I1 => *place &= !0xfe,
                Ty::Flags => *place = pack_flags(unpack_flags(*place)),
                _ => {}
            }
        }
        let mut context = self.applied.borrow_mut();
        (context.raw, context.raw_flags) = (host.gpr, host.flags);
        [context.fs_base, context.gs_base] = segments;
        context.scratch.copy_from_slice(&slots);
        let Left { pc, state: guest, stores } = left_by(record, &mut context);
        let pc = self.is_stub.then_some(pc);
        Entered { pc, words: self.words(&host, segments, &slots), host, guest, stores }
    }

    fn leave(&self, at: u64, state: &State, load: &dyn Fn(u64) -> u64) -> Result<Left, String> {
        let as_it_is = |pc| Left { pc, state: state.clone(), stores: Vec::new() };
        let next_pc = || load(CONTEXT.start + offset::NEXT_PC as u64);
        self.check_vectors(|address| Some(load(address)))?;
        match at {
            LEAVE_CANONICAL => {
                let (_, site) = self.site(load)?;
                Ok(as_it_is(site.target.unwrap_or_else(next_pc)))
            }
            LEAVE_RAW => {
                let (number, site) = self.site(load)?;
                let record = site.record.and_then(|r| self.code.records.get(r as usize));
                let record = record.ok_or_else(|| format!("exit {number} has no record"))?;
                let mut context = self.applied.borrow_mut();
                context.raw = state.gpr;
                context.raw_flags = state.flags;
                context.fs_base = load(CONTEXT.start + offset::FS_BASE as u64);
                context.gs_base = load(CONTEXT.start + offset::GS_BASE as u64);
                let slots = (self.code.registers.end_of_slots as usize).min(SCRATCH_WORDS);
                for (i, slot) in context.scratch.iter_mut().enumerate().take(slots) {
                    *slot = load(CONTEXT.start + (offset::SCRATCH + 8 * i) as u64);
                }
                Ok(left_by(record, &mut context))
            }
            at if self.code.encoded.tails.iter().any(|t| HOT + u64::from(t.start) == at) => {
                Ok(as_it_is(next_pc()))
            }
            at => {
                Err(format!("the code goes to {:#x}, where there is nothing", at.wrapping_sub(HOT)))
            }
        }
    }
}

impl Provable for LiftedCode<'_> {
    fn words(&self) -> Vec<(u64, Word)> {
        let word = |at: usize, word: Word| (CONTEXT.start + at as u64, word);
        let saves = self.code.registers.saves.iter();
        let vectors = self.code.registers.vectors.iter();
        saves
            .map(|&(r, slot)| (passages::slot(slot), Word::Register(Gpr::new(r))))
            .chain(vectors.map(|&(r, _)| (vectors::word(r), Word::Number(vectors::guests(r)))))
            .chain([
                word(offset::FS_BASE, Word::Base(Segment::Fs)),
                word(offset::GS_BASE, Word::Base(Segment::Gs)),
                word(offset::THIS, Word::Number(CONTEXT.start)),
            ])
            .collect()
    }

    fn slots(&self) -> Vec<u64> {
        (0..self.code.registers.end_of_slots.min(SCRATCH_WORDS as u32))
            .map(|slot| passages::slot(slot as u16))
            .collect()
    }

    fn entering(&self) -> Version {
        match self.from {
            Some(record) => passages::of_record(record, self.code.region, true),
            None => passages::canonical(self.code.region, Some(self.code.region)),
        }
    }

    fn leaving(
        &self,
        at: u64,
        load: &mut dyn FnMut(u64, u32) -> Option<u64>,
    ) -> Result<Version, String> {
        let region = self.code.region;
        self.check_vectors(|address| load(address, 8))?;
        if self.code.encoded.tails.iter().any(|t| HOT + u64::from(t.start) == at) {
            return Ok(passages::canonical(region, None));
        }
        if at != LEAVE_CANONICAL && at != LEAVE_RAW {
            return Err(format!("the code goes to {:#x}", at.wrapping_sub(HOT)));
        }
        let number = load(CONTEXT.start + offset::EXIT_SITE as u64, 4);
        let (number, site) =
            self.numbered(number.ok_or("it is not known by which exit")? as usize)?;
        if at == LEAVE_CANONICAL {
            return Ok(passages::canonical(region, site.target));
        }
        let record = site.record.and_then(|r| self.code.records.get(r as usize));
        let record = record.ok_or_else(|| format!("exit {number} has no record"))?;
        Ok(passages::of_record(record, region, false))
    }
}

#[cfg(test)]
mod tests;
