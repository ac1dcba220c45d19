//! From allocated machine instructions to bytes: hot code, cold code, and the places that refer to
//! each other.
//!
//! **Data.** The result is an [`Encoded`]: bytes, and offsets of everything that will be looked
//! for. It is position-independent: each field that depends on where the code will stand is a
//! [`Relocation`](crate::codegen::encoded::Relocation).
//!
//! **Invariants.** (1) A jump that may be patched has its rel32 field within eight aligned bytes.
//! (2) A loop stands where [`loop_alignment`] wants it. To reach that, code may be encoded up to
//! three times: first to see the loop, then with its head at an offset that keeps (1), then with
//! padding before the entry. (3) No instruction stands between a comparison and its jump if the two
//! can be executed as one: padding for (1) goes before the comparison.

use crate::asm::{Asm, Assembler, FIELD, Mem, RAX, RCX, RDX, RSP};
use crate::codegen::Host;
use crate::codegen::count::{self, RaceWord, What};
use crate::codegen::encoded::{
    Encoded, EncodedEnd, EncodedGuard, EncodedRecord, EncodedTail, Homes, Target,
};
use crate::codegen::exit_moves::Exits;
use crate::codegen::instruction::{build, location, rebuild, restore, save, slot};
use crate::codegen::loop_alignment;
use crate::codegen::mach::{End, EndRsp, Kind, MFunc, MInst, Site};
use crate::codegen::piece::Piece;
use crate::codegen::vectors;
use crate::record::Location;
use dynasour_guest::context::offset;
use dynasour_guest::lift::class::sets_x87_pointer;
use iced_x86::IcedError;
use regalloc2::{Allocation, Block, Edit, Function, InstOrEdit, Output};
use std::ops::Range;

/// Bytes that the entry of a fragment without a loop is aligned to. (With a loop: a line of the
/// instruction cache.) A guess, from the fetch width of common processors.
pub const ENTRY_ALIGNMENT: usize = 16;
/// What encoding needs beside the function and its allocation.
#[derive(Clone, Copy)]
pub struct Surroundings<'a> {
    /// Its spill slots are numbered from here.
    pub first_slot: u16,
    /// What all fragments have in common.
    pub host: &'a Host,
    /// It begins with this checked entry.
    pub checked: Option<&'a Piece>,
    /// Where guest state is.
    pub homes: &'a Homes,
    /// The ways from sites to their records.
    pub exits: &'a Exits,
    /// For each record: the XMM registers whose values it finds in slots.
    pub leaving: &'a [u16],
    /// For each of the version's blocks: what is counted at its start and at its end, for a race
    /// ([`super::passes`]).
    pub passes: &'a [(u32, u32)],
}

/// Bytes of padding before the entry, and the offset of the loop's head within eight aligned bytes,
/// if there is a loop.
#[derive(Clone, Copy, Default)]
struct Position {
    padding: usize,
    head: Option<usize>,
}

/// Encodes an allocated function. Padding before the entry puts the loop, if there is one, where
/// [`loop_alignment`] wants it.
pub fn encode(f: &MFunc, out: &Output, around: Surroundings<'_>) -> Result<Encoded, IcedError> {
    let mut encoded = encode_at(Position::default(), f, out, around)?;
    if let Some(&(field, head)) = encoded.back_edges.first() {
        let start = encoded.blocks[head].1 as usize;
        let offset = loop_alignment::offset(&encoded.hot[start..field as usize + 4]);
        let missing = |start: usize| {
            (loop_alignment::LINE + offset - start % loop_alignment::LINE) % loop_alignment::LINE
        };
        if missing(start) > 0 {
            // The padding before the head does not depend on multiples of eight before the entry.
            let position = Position { padding: 0, head: Some(offset % FIELD) };
            encoded = encode_at(position, f, out, around)?;
            let padding = missing(encoded.blocks[head].1 as usize);
            if padding > 0 {
                encoded = encode_at(Position { padding, ..position }, f, out, around)?;
            }
            debug_assert_eq!(encoded.blocks[head].1 as usize % loop_alignment::LINE, offset);
        }
        encoded.alignment = loop_alignment::LINE;
    }
    Ok(encoded)
}

/// Encodes with the entry and the loop's head at this position.
fn encode_at(
    position: Position,
    f: &MFunc,
    out: &Output,
    around: Surroundings<'_>,
) -> Result<Encoded, IcedError> {
    let Surroundings { first_slot, host, checked, homes, exits, leaving, passes } = around;
    let mut e = Emit {
        f,
        out,
        hot: Asm::new(),
        cold: Asm::new(),
        in_cold: false,
        r: Encoded::default(),
        first_slot,
        host,
        homes,
        exits,
        leaving,
        passes,
        skipped: None,
        loops: loop_blocks(f),
        head: position.head,
        last: None,
    };
    e.r.blocks = vec![(false, 0); f.num_blocks()];
    e.r.alignment = ENTRY_ALIGNMENT;
    let checked_len = checked.map_or(0, |piece| piece.bytes.len());
    let padding = position.padding + checked_len.next_multiple_of(ENTRY_ALIGNMENT) - checked_len;
    e.hot.int3(padding);
    if let Some(piece) = checked {
        e.piece(piece);
    }
    e.r.entry = (padding as u32, e.at());
    for b in 0..f.hot_blocks {
        e.block(b)?;
    }
    e.in_cold = true;
    for b in f.hot_blocks..f.num_blocks() {
        e.block(b)?;
    }
    e.poll_landings()?;
    e.unlinked_stubs();
    e.r.finish(e.hot, e.cold);
    Ok(e.r)
}

/// The blocks from the first loop's head to its back edge.
fn loop_blocks(f: &MFunc) -> Range<usize> {
    let back = |b: usize| {
        let last = f.block_insns(Block::new(b)).last();
        match f.insts[last.index()].kind {
            Kind::Jump(to) => {
                Some(f.block_of[to]).filter(|head| *head <= b).map(|head| head..b + 1)
            }
            _ => None,
        }
    };
    (0..f.hot_blocks).find_map(back).unwrap_or(0..0)
}

struct Emit<'a> {
    f: &'a MFunc,
    out: &'a Output,
    hot: Asm<Target>,
    cold: Asm<Target>,
    in_cold: bool,
    r: Encoded,
    first_slot: u16,
    host: &'a Host,
    homes: &'a Homes,
    exits: &'a Exits,
    leaving: &'a [u16],
    passes: &'a [(u32, u32)],
    /// A block whose jump is left out: the guard before it is the loop's back edge.
    skipped: Option<usize>,
    /// The blocks of loops.
    loops: Range<usize>,
    /// The offset of the loop's head in eight aligned bytes, if it matters.
    head: Option<usize>,
    /// In the hot code: the start of the last instruction, if it may set flags for the next.
    last: Option<u32>,
}

impl Emit<'_> {
    /// Where code is added now.
    fn code(&mut self) -> &mut Asm<Target> {
        if self.in_cold { &mut self.cold } else { &mut self.hot }
    }

    fn at(&self) -> u32 {
        (if self.in_cold { self.cold.here() } else { self.hot.here() }) as u32
    }

    /// `jmp`; returns the offset of its field.
    fn jump(&mut self, target: Target) -> u32 {
        self.code().jmp();
        self.code().relocate(target)
    }

    /// `jmp` whose field can be patched; returns the field's offset.
    fn link(&mut self, target: Target) -> u32 {
        self.code().align_field(1);
        self.jump(target)
    }

    /// `jcc`; returns the offset of its field.
    fn branch(&mut self, condition: u8, target: Target) -> u32 {
        self.code().jcc(condition);
        self.code().relocate(target)
    }

    fn block(&mut self, b: usize) -> Result<(), IcedError> {
        if self.loops.start == b
            && let Some(head) = self.head
        {
            let missing = (FIELD + head - self.hot.here() % FIELD) % FIELD;
            self.hot.nop(missing);
        }
        self.r.blocks[b] = (self.in_cold, self.at());
        if self.host.counts && self.is_loop_head(b) {
            self.count(What::Iterations);
        }
        if let Some(starts) = self.host.starts
            && starts.own.is_none()
            && self.is_loop_head(b)
        {
            self.count_start(&count::starts(starts.each, RaceWord::Looped));
        }
        if let Ok(ir_block) = self.f.block_of.binary_search(&b) {
            self.count_passes(self.passes.get(ir_block).map_or(0, |counts| counts.0));
        }
        let still = self.exits.leaves_out(self.f.block_insns(Block::new(b)).last());
        for item in self.out.block_insts_and_edits(self.f, Block::new(b)) {
            match item {
                InstOrEdit::Edit(Edit::Move { .. }) if still => {}
                InstOrEdit::Edit(Edit::Move { from, to }) => self.mov(*from, *to),
                InstOrEdit::Inst(i) => {
                    self.inst(b, &self.f.insts[i.index()], self.out.inst_allocs(i))?
                }
            }
        }
        Ok(())
    }

    /// Puts no-operations before the last instruction, if a guard's jump follows at once, such that
    /// a rel32 field `lead` bytes behind it can be patched: the two are to stay together.
    fn align_guard(&mut self, lead: usize) {
        let at = (self.hot.here() + lead) % FIELD;
        if at <= FIELD - 4 {
            return;
        }
        let Some(last) = self.last else { return self.hot.nop(FIELD - at) };
        let missing = FIELD - at;
        self.hot.pad_before(last as usize, missing);
        let moved = |at: &mut u32| *at += missing as u32;
        self.r.faults.iter_mut().map(|f| &mut f.0).filter(|f| **f >= last).for_each(moved);
        let positions = self.r.positions.iter_mut().map(|p| &mut p.0);
        positions.filter(|at| **at >= last).for_each(moved);
        let starts = self.r.blocks.iter_mut().filter(|b| !b.0).map(|b| &mut b.1);
        starts.filter(|at| **at > last).for_each(moved);
    }

    /// Can a guard's jump with this rel32 field in the hot code lead to what its exit is linked to?
    fn way_out(&self, site: Site, field: u32) -> Option<u32> {
        let split = self.f.split_of[site.0 as usize]?;
        let record = self.f.block_succs(Block::new(split)).first()?.index();
        let direct =
            !self.host.counts && self.exits.is_moveless(split) && self.exits.is_moveless(record);
        let direct = direct && self.homes.vectors.is_empty();
        (direct && field as usize % FIELD <= FIELD - 4).then_some(field)
    }

    fn mov(&mut self, from: Allocation, to: Allocation) {
        self.last = None;
        match (location(from, self.first_slot), location(to, self.first_slot)) {
            (Location::Reg(a), Location::Reg(b)) => self.code().mov(b, a),
            (Location::Slot(s), Location::Reg(b)) => self.code().load(b, slot(s)),
            (Location::Reg(a), Location::Slot(s)) => self.code().store(a, slot(s)),
            (Location::Vector(a), Location::Vector(b)) => vectors::copy(self.code(), b, a),
            (Location::Slot(s), Location::Vector(b)) => vectors::load(self.code(), b, slot(s)),
            (Location::Vector(a), Location::Slot(s)) => vectors::store(self.code(), a, slot(s)),
            // The allocator resolves slot-to-slot moves through a register.
            _ => {}
        }
    }

    fn inst(&mut self, block: usize, m: &MInst, allocs: &[Allocation]) -> Result<(), IcedError> {
        let last = std::mem::take(&mut self.last);
        if let Some(position) =
            m.position.filter(|_| (self.host.counts || self.host.is_watched) && !self.in_cold)
        {
            let at = self.at();
            self.r.positions.push((at, position));
        }
        match &m.kind {
            Kind::FragmentEntry => {
                if let Some(starts) = self.host.starts {
                    self.count_start(&count::starts_if(starts.key, RaceWord::Entered));
                }
                for &(r, s) in &self.homes.save {
                    save(self.code(), r, s);
                }
                self.r.inside.0 = self.at();
                if let Some(components) = self.homes.extended {
                    self.load_extended(components);
                }
                self.r.inside.1 = self.at();
                let homes = self.homes;
                homes.vectors.iter().for_each(|&(r, s)| vectors::save(self.code(), r, slot(s)));
                self.count(What::Entered);
            }
            Kind::Poll => {}
            Kind::X86(code, operands) => {
                let inst = build(*code, operands, allocs, self.first_slot)?;
                self.fault_here(m);
                self.last = (!self.in_cold).then(|| self.at());
                self.code().instruction(&inst)?;
            }
            Kind::Native(original, place) => {
                let inst = rebuild(original, *place, allocs, self.first_slot)?;
                let ip = original.inst.ip();
                self.fault_here(m);
                if !self.in_cold {
                    self.r.natives.push((self.hot.here() as u32, ip));
                }
                self.code().instruction(&inst)?;
                if sets_x87_pointer(original.inst.code()) {
                    self.code().store_word(offset::X87_PC, ip);
                }
            }
            Kind::Const(c) => {
                if let Location::Reg(r) = location(allocs[0], self.first_slot) {
                    self.code().constant(r, *c);
                }
            }
            Kind::CaptureFlags => self.code().pack_flags(),
            Kind::RestoreFlags => self.code().unpack_flags(),
            Kind::Jcc(cc) => {
                self.count_site(m.site, What::Executed);
                if let Some(site) = m.site {
                    self.guard(block, *cc, site, last);
                }
            }
            Kind::Always => {
                self.count_site(m.site, What::Executed);
                if let Some(cold) = m.site.and_then(|s| self.f.split_of[s.0 as usize]) {
                    self.jump(Target::Block(cold));
                }
            }
            Kind::Jump(_) if self.skipped == Some(block) => {}
            Kind::Jump(to) => {
                let target = self.f.block_of[*to];
                if target <= block {
                    let at = self.link(Target::Block(target));
                    self.r.back_edges.push((at, target));
                } else if target != block + 1 {
                    self.jump(Target::Block(target));
                }
            }
            Kind::Branch(cc, to) => {
                let target = Target::Block(self.f.block_of[*to]);
                self.branch(*cc, target);
            }
            Kind::End(end) => {
                let ir_block = self.f.block_of.partition_point(|first| *first <= block) - 1;
                self.count_passes(self.passes.get(ir_block).map_or(0, |counts| counts.1));
                self.end(end, allocs)
            }
            Kind::Split(site) => {
                self.count(What::Left(site.0));
                self.split(block, *site);
            }
            Kind::Record(record) if self.exits.stands_in_split(*record) => {}
            Kind::Record(record) => {
                self.leave_vectors(self.leaving[*record]);
                let at = self.link(Target::LeaveRaw);
                self.r.records.push(EncodedRecord { record: *record, at, out: None });
            }
        }
        Ok(())
    }

    /// The jump of a guard to its exit, at the end of `block`. `last` is where the instruction
    /// before it begins, if that may be padded.
    fn guard(&mut self, block: usize, cc: u8, site: Site, last: Option<u32>) {
        let Some(cold) = self.f.split_of[site.0 as usize] else { return };
        let (at, back_edge, out) = if let Some(head) = self.back_edge_after(block) {
            // The guard itself is the back edge: it jumps if it holds.
            self.code().align_field(2);
            let at = self.branch(cc ^ 1, Target::Block(head));
            self.r.back_edges.push((at, head));
            self.skipped = Some(block + 1);
            (at, true, self.link(Target::Block(cold)))
        } else {
            // No padding inside a loop, whose place is chosen by all its bytes: there a guard can
            // be patched only if its field happens to lie within eight aligned bytes.
            if !self.loops.contains(&block) && !self.host.counts {
                self.last = last;
                self.align_guard(2);
                self.last = None;
            }
            let field = self.branch(cc, Target::Block(cold));
            (field, false, field)
        };
        let way_out = self.way_out(site, out);
        self.r.guards.push(EncodedGuard { at: at - 2, site, back_edge, way_out });
    }

    /// The way from a site to its record. If no other site has the record, the link comes first,
    /// and behind it the number of the exit, which only the runtime reads.
    fn split(&mut self, block: usize, site: Site) {
        let next = self.f.block_succs(Block::new(block))[0];
        if let Kind::Record(record) = self.f.insts[self.f.block_insns(next).first().index()].kind
            && self.exits.is_only_split(record, block)
        {
            self.leave_vectors(self.leaving[record]);
            let at = self.link(Target::Cold(0));
            let out = self.at();
            if let Some(target) = self.code().last_target() {
                *target = Target::Cold(out);
            }
            self.r.records.push(EncodedRecord { record, at, out: Some(out) });
            self.store_site(site.0);
            self.jump(Target::LeaveRaw);
            return;
        }
        self.store_site(site.0);
        if next.index() != block + 1 {
            self.jump(Target::Block(next.index()));
        }
    }

    /// The head that the code after this block jumps back to at once.
    fn back_edge_after(&self, block: usize) -> Option<usize> {
        let next = block + 1;
        let mut items = self.out.block_insts_and_edits(self.f, Block::new(next));
        let (Some(InstOrEdit::Inst(i)), None) =
            (items.next().filter(|_| next < self.f.hot_blocks), items.next())
        else {
            return None;
        };
        match self.f.insts[i.index()].kind {
            Kind::Jump(to) => Some(self.f.block_of[to]).filter(|head| *head <= next),
            _ => None,
        }
    }

    fn is_loop_head(&self, block: usize) -> bool {
        let jumps_here = |b: usize| {
            let last = self.f.block_insns(Block::new(b)).last();
            let last = &self.f.insts[last.index()];
            matches!(last.kind, Kind::Jump(to) if self.f.block_of[to] == block)
        };
        (block..self.f.hot_blocks).any(jumps_here)
    }

    /// Adds one to a word, if fragments count. Changes no register and no flag.
    fn count(&mut self, what: What) {
        if !self.host.counts {
            return;
        }
        let start = self.at();
        let (code, fields) = count::code();
        self.code().put(&code);
        for field in fields {
            self.code().relocate_at(start + field as u32, Target::Word(what));
        }
    }

    /// Counts starts by this code, behind a jump that can lead over it.
    fn count_start(&mut self, counting: &[u8]) {
        let start = self.at();
        self.code().jmp_over(0);
        self.code().put(counting);
        let len = self.at() - start;
        self.r.starts.push((start, len));
        self.last = None;
    }

    /// Counts so many starts more, which the trace's own way has come to.
    fn count_passes(&mut self, passes: u32) {
        if passes > 0 && self.host.starts.is_some() && !self.in_cold {
            self.count_start(&count::starts(passes as i32, RaceWord::Looped));
        }
    }

    fn count_site(&mut self, site: Option<Site>, what: fn(u32) -> What) {
        if let Some(site) = site {
            self.count(what(site.0));
        }
    }

    fn fault_here(&mut self, m: &MInst) {
        if let Some(site) = m.site {
            let at = self.at();
            self.r.faults.push((at, site));
        }
    }

    /// Stores the number of the site's exit.
    fn store_site(&mut self, site: u32) {
        self.code().store_constant(offset::EXIT_SITE, 0);
        self.code().relocate(Target::Exit(site));
    }

    /// Gives the guest the XMM registers that were borrowed, after these values in them were stored.
    fn leave_vectors(&mut self, values: u16) {
        let homes = self.homes;
        vectors::leave(self.code(), values, &homes.vectors);
    }

    fn end(&mut self, end: &End, allocs: &[Allocation]) {
        self.count(What::Executed(end.site));
        self.leave_vectors(0);
        match end.rsp {
            EndRsp::Same => {}
            EndRsp::Plus(c) => self.code().lea(RSP, Mem::at(RSP).plus(c)),
            EndRsp::Const(c) => self.code().constant(RSP, c),
            EndRsp::Op(i) => match location(allocs[usize::from(i)], self.first_slot) {
                Location::Slot(s) => self.code().load(RSP, slot(s)),
                Location::Reg(r) => self.code().mov(RSP, r),
                Location::Operand(_) | Location::Vector(_) | Location::Flags => return,
            },
        }
        for (r, c) in &end.consts {
            self.code().constant(*r, *c);
        }
        if end.indirect {
            if self.host.names_transfers {
                self.code().store_word(offset::TRANSFER, end.after);
            }
            let homes = self.homes;
            homes.restore.iter().for_each(|&(r, s)| restore(self.code(), r, s));
        } else if !self.homes.restore.is_empty() {
            let at = self.link(Target::Restored(end.site));
            self.r.ends.push(EncodedEnd {
                site: end.site,
                borrowed: Some((at, 0)),
                cold: true,
                ..EncodedEnd::default()
            });
            return;
        }
        let at = self.link(Target::Unlinked(end.site));
        let tail = if end.indirect {
            let tail = self.at();
            if let Some(target) = self.code().last_target() {
                *target = Target::Hot(tail);
            }
            self.indirect_tail(end.site);
            Some(tail)
        } else {
            None
        };
        self.r.ends.push(EncodedEnd { site: end.site, at, tail, ..EncodedEnd::default() });
    }

    /// Loads the extended state into the processor unless it is there. Flags stay. This is code of
    /// the fragment and no stub, so that a signal handler finds the fragment to unlink.
    fn load_extended(&mut self, components: u64) {
        let save = |n: usize| offset::STUB_SAVE + 8 * n;
        let code = self.code();
        let is_live = code.label();
        code.store(RCX, save(1));
        // rcx is 0 if the state is in the processor.
        code.load(RCX, offset::EXTENDED_AWAY);
        code.jrcxz(is_live);
        code.store(RAX, save(2));
        code.store(RDX, save(3));
        code.store_constant(offset::X87_IS_INITIAL, 0);
        code.mov_imm_32(RAX, components as u32);
        code.mov_imm_32(RDX, (components >> 32) as u32);
        code.load(RCX, offset::THIS);
        code.xrstor64(Mem::at(RCX).plus(offset::XSTATE as i32));
        code.store_constant(offset::EXTENDED_AWAY, 0);
        code.load(RAX, save(2));
        code.load(RDX, save(3));
        code.bind(is_live);
        code.load(RCX, save(1));
    }

    fn piece(&mut self, piece: &Piece) {
        let start = self.at();
        self.code().put(&piece.bytes);
        if let Some(field) = piece.jump {
            self.code().relocate_at(start + field as u32, Target::Address(piece.leads));
        }
    }

    /// Goes where `next_pc` says.
    fn indirect_tail(&mut self, site: u32) {
        let piece = &self.host.tail;
        let start = self.at();
        self.piece(piece);
        let (displaced, end) = (start + piece.displaced as u32, self.at());
        self.r.tails.push(EncodedTail { site, start, displaced, end });
    }

    /// For each poll: the instructions before it in its block once more, then a jump to its cold
    /// code. The back edge of a loop that is to be left leads here; the state is the one in which
    /// the back edge would have entered the block.
    fn poll_landings(&mut self) -> Result<(), IcedError> {
        let f = self.f;
        for b in 0..f.hot_blocks {
            let poll = f.block_insns(Block::new(b)).last();
            let (Kind::Poll, Some(site)) =
                (&f.insts[poll.index()].kind, f.insts[poll.index()].site)
            else {
                continue;
            };
            // A loop may have lost its back edge. Nothing leads back to its poll then.
            let is_head = self.r.back_edges.iter().any(|(_, head)| *head == b);
            let Some(split) = f.split_of[site.0 as usize].filter(|_| is_head) else { continue };
            let landing = self.at();
            self.r.polls.push((site, landing, b));
            for item in self.out.block_insts_and_edits(f, Block::new(b)) {
                match item {
                    InstOrEdit::Edit(Edit::Move { from, to }) => self.mov(*from, *to),
                    InstOrEdit::Inst(i) if i == poll => break,
                    InstOrEdit::Inst(i) => {
                        self.inst(b, &f.insts[i.index()], self.out.inst_allocs(i))?
                    }
                }
            }
            self.jump(Target::Block(split));
        }
        Ok(())
    }

    /// The way out to the runtime of each trace end. It restores borrowed registers first.
    fn unlinked_stubs(&mut self) {
        let homes = self.homes;
        for n in 0..self.r.ends.len() {
            let site = self.r.ends[n].site;
            if let Some((_, restored)) = &mut self.r.ends[n].borrowed {
                *restored = self.cold.here() as u32;
                homes.restore.iter().for_each(|&(r, s)| restore(self.code(), r, s));
                self.r.ends[n].at = self.link(Target::Unlinked(site));
            }
            let at = self.at();
            self.r.unlinked.push((site, at));
            self.store_site(site);
            self.jump(Target::LeaveCanonical);
        }
    }
}
