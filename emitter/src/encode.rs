//! From allocated machine instructions to bytes: hot code, cold code, and the places that refer to each other.
//!
//! Code is encoded position-independently: every relative jump is a [`Relocation`] that is resolved when the fragment
//! has its place in the cache. Jumps that may be patched later have their rel32 field within eight aligned bytes.

use crate::codegen::{CodegenError, Host};
use crate::counting::{self, What};
use crate::encoded::{Encoded, EncodedEnd, EncodedGuard, EncodedRecord, EncodedTail, Homes, Relocation, Target};
use crate::exits::Exits;
use crate::indirect::Piece;
use crate::instruction::{build, context, location, r64, rebuild, restore, save, slot};
use crate::mach::{End, EndRsp, Kind, MFunc, MInst, Site};
use crate::placement;
use crate::record::Place;
use crate::section::{FIELD, Section};
use crate::x86::{Size, register};
use dynasour_guest::context::offset;
use iced_x86::{Code, IcedError, Instruction, MemoryOperand, Register};
use regalloc2::{Allocation, Block, Edit, Function, InstOrEdit, Output};
use std::ops::Range;

/// Fragments without loops are packed closer than those whose loop has its place in a line of the instruction cache.
const ENTRY_ALIGNMENT: usize = 16;
/// Stands where nobody goes.
const INT3: u8 = 0xcc;

/// What a fragment's code refers to beside itself.
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
    /// What happens on the way from a site to its record.
    pub exits: &'a Exits,
}

/// Where something stands: before the entry is so much padding, and the loop's head has this offset in a field's eight bytes.
#[derive(Clone, Copy, Default)]
struct Position {
    padding: usize,
    head: Option<usize>,
}

/// Encodes an allocated function. Padding before the entry puts the loop, if there is one, where [`placement`] wants it.
pub fn encode(f: &MFunc, out: &Output, around: Surroundings<'_>) -> Result<Encoded, IcedError> {
    let mut encoded = encode_at(Position::default(), f, out, around)?;
    if let Some(&(field, head)) = encoded.back_edges.first() {
        let start = encoded.blocks[head].1 as usize;
        let offset = placement::offset(&encoded.hot[start..field as usize + 4]);
        let missing = |start: usize| (placement::LINE + offset - start % placement::LINE) % placement::LINE;
        if missing(start) > 0 {
            // What is padded before the head depends on where the entry is, but not by multiples of a field's alignment.
            let position = Position { padding: 0, head: Some(offset % FIELD) };
            encoded = encode_at(position, f, out, around)?;
            let padding = missing(encoded.blocks[head].1 as usize);
            if padding > 0 {
                encoded = encode_at(Position { padding, ..position }, f, out, around)?;
            }
            debug_assert_eq!(encoded.blocks[head].1 as usize % placement::LINE, offset);
        }
        encoded.alignment = placement::LINE;
    }
    Ok(encoded)
}

/// Encodes with its entry and its loop's head there.
fn encode_at(position: Position, f: &MFunc, out: &Output, around: Surroundings<'_>) -> Result<Encoded, IcedError> {
    let Surroundings { first_slot, host, checked, homes, exits } = around;
    let mut e = Emit {
        f,
        out,
        hot: Section::new(),
        cold: Section::new(),
        in_cold: false,
        r: Encoded::default(),
        first_slot,
        host,
        homes,
        exits,
        skipped: None,
        loops: loop_blocks(f),
        head: position.head,
        last: None,
    };
    e.r.blocks = vec![(false, 0); f.num_blocks()];
    e.r.alignment = ENTRY_ALIGNMENT;
    let checked_len = checked.map_or(0, |piece| piece.bytes.len());
    let padding = position.padding + checked_len.next_multiple_of(ENTRY_ALIGNMENT) - checked_len;
    e.hot.bytes(&vec![INT3; padding]);
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
    e.unlinked_stubs()?;
    e.r.hot = e.hot.finish();
    e.r.cold = e.cold.finish();
    Ok(e.r)
}

/// The blocks from the first loop's head to its back edge.
fn loop_blocks(f: &MFunc) -> Range<usize> {
    let back = |b: usize| {
        let last = f.block_insns(Block::new(b)).last();
        match f.insts[last.index()].kind {
            Kind::Jump(to) => Some(f.block_of[to]).filter(|head| *head <= b).map(|head| head..b + 1),
            _ => None,
        }
    };
    (0..f.hot_blocks).find_map(back).unwrap_or(0..0)
}

struct Emit<'a> {
    f: &'a MFunc,
    out: &'a Output,
    hot: Section,
    cold: Section,
    in_cold: bool,
    r: Encoded,
    first_slot: u16,
    host: &'a Host,
    homes: &'a Homes,
    exits: &'a Exits,
    /// A block whose jump the guard before it does.
    skipped: Option<usize>,
    /// The blocks of loops.
    loops: Range<usize>,
    /// The offset of the loop's head in eight aligned bytes, if it matters.
    head: Option<usize>,
    /// In the hot code: the start of the last instruction, if it may set flags for the next.
    last: Option<u32>,
}

impl Emit<'_> {
    fn section(&mut self) -> &mut Section {
        if self.in_cold { &mut self.cold } else { &mut self.hot }
    }

    fn at(&self) -> u32 {
        (if self.in_cold { self.cold.len } else { self.hot.len }) as u32
    }

    fn put(&mut self, inst: &Instruction) -> Result<(), IcedError> {
        self.section().put(inst)
    }

    /// An opcode followed by a rel32 field; with `aligned`, the field can be patched. Returns the field's offset.
    fn jump(&mut self, opcode: &[u8], target: Target, aligned: bool) -> u32 {
        if aligned {
            self.section().align_field(opcode.len());
        }
        self.section().bytes(opcode);
        let at = self.at();
        self.r.relocations.push(Relocation { cold: self.in_cold, at, target });
        self.section().bytes(&[0; 4]);
        at
    }

    fn block(&mut self, b: usize) -> Result<(), IcedError> {
        if self.loops.start == b
            && let Some(head) = self.head
        {
            let missing = (FIELD + head - self.hot.len % FIELD) % FIELD;
            self.hot.pad(missing);
        }
        self.r.blocks[b] = (self.in_cold, self.at());
        if self.host.counts && self.is_loop_head(b) {
            self.count(What::Iterations);
        }
        let still = self.exits.leaves_out(self.f.block_insns(Block::new(b)).last());
        for item in self.out.block_insts_and_edits(self.f, Block::new(b)) {
            match item {
                InstOrEdit::Edit(Edit::Move { .. }) if still => {}
                InstOrEdit::Edit(Edit::Move { from, to }) => self.mov(*from, *to)?,
                InstOrEdit::Inst(i) => self.inst(b, &self.f.insts[i.index()], self.out.inst_allocs(i))?,
            }
        }
        Ok(())
    }

    /// Puts no-operations before the last instruction, if a guard's jump follows at once, such that a rel32 field `lead`
    /// bytes behind it can be patched: the two are to stay together.
    fn align_guard(&mut self, lead: usize) {
        let at = (self.hot.len + lead) % FIELD;
        if at <= FIELD - 4 {
            return;
        }
        let Some(last) = self.last else { return self.hot.pad(FIELD - at) };
        let missing = FIELD - at;
        self.hot.pad_before(last as usize, missing);
        let moved = |at: &mut u32| *at += missing as u32;
        self.r.faults.iter_mut().map(|f| &mut f.0).filter(|f| **f >= last).for_each(moved);
        self.r.relocations.iter_mut().filter(|f| !f.cold).map(|f| &mut f.at).filter(|at| **at >= last).for_each(moved);
        let starts = self.r.blocks.iter_mut().filter(|b| !b.0).map(|b| &mut b.1);
        starts.filter(|at| **at > last).for_each(moved);
    }

    /// Can a guard's jump with this rel32 field in the hot code lead to what its exit is linked to?
    fn way_out(&self, site: Site, field: u32) -> Option<u32> {
        let split = self.f.split_of[site.0 as usize]?;
        let record = self.f.block_succs(Block::new(split)).first()?.index();
        let direct = !self.host.counts && self.exits.is_moveless(split) && self.exits.is_moveless(record);
        (direct && field as usize % FIELD <= FIELD - 4).then_some(field)
    }

    fn mov(&mut self, from: Allocation, to: Allocation) -> Result<(), IcedError> {
        self.last = None;
        let inst = match (location(from, self.first_slot), location(to, self.first_slot)) {
            (Place::Reg(a), Place::Reg(b)) => Instruction::with2(Code::Mov_r64_rm64, r64(b), r64(a))?,
            (Place::Slot(s), Place::Reg(b)) => Instruction::with2(Code::Mov_r64_rm64, r64(b), slot(s))?,
            (Place::Reg(a), Place::Slot(s)) => Instruction::with2(Code::Mov_rm64_r64, slot(s), r64(a))?,
            // The allocator resolves slot-to-slot moves through a register.
            _ => return Ok(()),
        };
        self.put(&inst)
    }

    fn inst(&mut self, block: usize, m: &MInst, allocs: &[Allocation]) -> Result<(), IcedError> {
        let last = std::mem::take(&mut self.last);
        match &m.kind {
            Kind::Entry => {
                for &(r, s) in &self.homes.save {
                    self.put(&save(r, s)?)?;
                }
                self.r.inside.0 = self.at();
                if let Some(components) = self.homes.extended {
                    self.load_extended(components)?;
                }
                self.r.inside.1 = self.at();
                self.count(What::Entered);
            }
            Kind::Poll => {}
            Kind::X86(code, operands) => {
                let inst = build(*code, operands, allocs, self.first_slot)?;
                self.fault_here(m);
                self.last = (!self.in_cold).then(|| self.at());
                self.put(&inst)?;
            }
            Kind::Native(original, address) => {
                let inst = rebuild(original, address.as_ref(), allocs);
                self.fault_here(m);
                self.put(&inst)?;
            }
            Kind::Const(c) => self.constant(allocs[0], *c)?,
            Kind::CaptureFlags => self.section().bytes(&[0x9f, 0x0f, 0x90, 0xc0]),
            Kind::RestoreFlags => self.section().bytes(&[0x04, 0x7f, 0x9e]),
            Kind::Jcc(cc) => {
                self.count_site(m.site, What::Executed);
                if let Some((site, cold)) = m.site.and_then(|s| Some((s, self.f.split_of[s.0 as usize]?))) {
                    if let Some(head) = self.back_edge_after(block) {
                        // The loop goes on by the guard itself, and falls out of it.
                        let at = self.jump(&[0x0f, 0x80 | cc ^ 1], Target::Block(head), true);
                        self.r.back_edges.push((at, head));
                        let out = self.jump(&[0xe9], Target::Block(cold), true);
                        let way_out = self.way_out(site, out);
                        self.r.guards.push(EncodedGuard { at: at - 2, site, back_edge: true, way_out });
                        self.skipped = Some(block + 1);
                    } else {
                        // In a loop, which stands as it is delivered best, those that can be patched as it happens are.
                        if !self.loops.contains(&block) && !self.host.counts {
                            self.last = last;
                            self.align_guard(2);
                            self.last = None;
                        }
                        let field = self.jump(&[0x0f, 0x80 | cc], Target::Block(cold), false);
                        let way_out = self.way_out(site, field);
                        self.r.guards.push(EncodedGuard { at: field - 2, site, back_edge: false, way_out });
                    }
                }
            }
            Kind::Always => {
                self.count_site(m.site, What::Executed);
                if let Some(cold) = m.site.and_then(|s| self.f.split_of[s.0 as usize]) {
                    self.jump(&[0xe9], Target::Block(cold), false);
                }
            }
            Kind::Jump(_) if self.skipped == Some(block) => {}
            Kind::Jump(to) => {
                let target = self.f.block_of[*to];
                if target <= block {
                    let at = self.jump(&[0xe9], Target::Block(target), true);
                    self.r.back_edges.push((at, target));
                } else if target != block + 1 {
                    self.jump(&[0xe9], Target::Block(target), false);
                }
            }
            Kind::End(end) => self.end(end, allocs)?,
            Kind::Split(site) => {
                self.count(What::Left(site.0));
                self.split(block, *site)?;
            }
            Kind::Record(record) if self.exits.stands_in_split(*record) => {}
            Kind::Record(record) => {
                let at = self.jump(&[0xe9], Target::LeaveRaw, true);
                self.r.records.push(EncodedRecord { record: *record, at, out: None });
            }
        }
        Ok(())
    }

    /// The way from a site to its record. If no other leads there, its link comes before what only the runtime wants to know.
    fn split(&mut self, block: usize, site: Site) -> Result<(), IcedError> {
        let next = self.f.block_succs(Block::new(block))[0];
        if let Kind::Record(record) = self.f.insts[self.f.block_insns(next).first().index()].kind
            && self.exits.is_only_split(record, block)
        {
            let at = self.jump(&[0xe9], Target::Cold(0), true);
            let out = self.at();
            if let Some(fixup) = self.r.relocations.last_mut() {
                fixup.target = Target::Cold(out);
            }
            self.r.records.push(EncodedRecord { record, at, out: Some(out) });
            self.store_site(site.0)?;
            self.jump(&[0xe9], Target::LeaveRaw, false);
            return Ok(());
        }
        self.store_site(site.0)?;
        if next.index() != block + 1 {
            self.jump(&[0xe9], Target::Block(next.index()), false);
        }
        Ok(())
    }

    /// The head that the code after this block jumps back to at once.
    fn back_edge_after(&self, block: usize) -> Option<usize> {
        let next = block + 1;
        let mut items = self.out.block_insts_and_edits(self.f, Block::new(next));
        let (Some(InstOrEdit::Inst(i)), None) = (items.next().filter(|_| next < self.f.hot_blocks), items.next())
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
            matches!(self.f.insts[last.index()].kind, Kind::Jump(to) if self.f.block_of[to] == block)
        };
        (block..self.f.hot_blocks).any(jumps_here)
    }

    /// Adds one to a word, if this code counts. No register and no flag changes.
    fn count(&mut self, what: What) {
        if !self.host.counts {
            return;
        }
        let (code, fields) = counting::code();
        let start = self.at();
        self.section().bytes(&code);
        let target = Target::Word(what);
        self.r.relocations.extend(fields.map(|field| Relocation {
            cold: self.in_cold,
            at: start + field as u32,
            target,
        }));
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

    fn constant(&mut self, to: Allocation, c: u64) -> Result<(), IcedError> {
        let Place::Reg(r) = location(to, self.first_slot) else { return Ok(()) };
        self.constant_register(r, c)
    }

    /// `mov r, c` in its shortest form; leaves flags alone.
    fn constant_register(&mut self, r: u8, c: u64) -> Result<(), IcedError> {
        let inst = if u32::try_from(c).is_ok() {
            Instruction::with2(Code::Mov_r32_imm32, register(usize::from(r), Size::B4), c as u32)?
        } else if i32::try_from(c as i64).is_ok() {
            Instruction::with2(Code::Mov_rm64_imm32, r64(r), c as i64 as i32)?
        } else {
            Instruction::with2(Code::Mov_r64_imm64, r64(r), c)?
        };
        self.put(&inst)
    }

    /// Stores the number of the site's exit.
    fn store_site(&mut self, site: u32) -> Result<(), IcedError> {
        let inst = Instruction::with2(Code::Mov_rm64_imm32, context(offset::EXIT_SITE), 0)?;
        self.put(&inst)?;
        let at = self.at() - 4;
        self.r.relocations.push(Relocation { cold: self.in_cold, at, target: Target::Exit(site) });
        Ok(())
    }

    fn end(&mut self, end: &End, allocs: &[Allocation]) -> Result<(), IcedError> {
        self.count(What::Executed(end.site));
        match end.rsp {
            EndRsp::Same => {}
            EndRsp::Plus(c) => {
                let memory =
                    MemoryOperand::new(Register::RSP, Register::None, 1, i64::from(c), 1, false, Register::None);
                let lea = Instruction::with2(Code::Lea_r64_m, Register::RSP, memory)?;
                self.put(&lea)?;
            }
            EndRsp::Const(c) => self.constant_register(4, c)?,
            EndRsp::Op(i) => {
                let inst = match location(allocs[usize::from(i)], self.first_slot) {
                    Place::Slot(s) => Instruction::with2(Code::Mov_r64_rm64, Register::RSP, slot(s))?,
                    Place::Reg(r) => Instruction::with2(Code::Mov_r64_rm64, Register::RSP, r64(r))?,
                    Place::Operand(_) | Place::Flags => return Ok(()),
                };
                self.put(&inst)?;
            }
        }
        for (r, c) in &end.consts {
            self.constant_register(*r, *c)?;
        }
        if end.indirect {
            if self.host.names_transfers {
                let mut name = Piece::default();
                name.store_word(offset::TRANSFER, end.after);
                self.section().bytes(&name.bytes);
            }
            self.homes.restore.iter().try_for_each(|&(r, s)| self.put(&restore(r, s)?))?;
        } else if !self.homes.restore.is_empty() {
            let at = self.jump(&[0xe9], Target::Restored(end.site), true);
            self.r.ends.push(EncodedEnd {
                site: end.site,
                borrowed: Some((at, 0)),
                cold: true,
                ..EncodedEnd::default()
            });
            return Ok(());
        }
        let at = self.jump(&[0xe9], Target::Unlinked(end.site), true);
        let tail = if end.indirect {
            let jump = self.r.relocations.len() - 1;
            let tail = self.indirect_tail(end.site);
            self.r.relocations[jump].target = Target::Hot(tail);
            Some(tail)
        } else {
            None
        };
        self.r.ends.push(EncodedEnd { site: end.site, at, tail, ..EncodedEnd::default() });
        Ok(())
    }

    /// Makes the extended state live in the processor, without touching flags. All of it is in the fragment itself, so
    /// that a signal that arrives meanwhile finds the fragment to leave.
    fn load_extended(&mut self, components: u64) -> Result<(), IcedError> {
        use Code::{Mov_r32_imm32, Mov_r64_rm64, Mov_rm64_imm32, Mov_rm64_r64, Xrstor64_mem};
        use Register::{EAX, EDX, RAX, RCX, RDX};
        let save = |n: usize| context(offset::STUB_SAVE + 8 * n);
        self.put(&Instruction::with2(Mov_rm64_r64, save(1), RCX)?)?;
        // rcx = 0 if the state is live: then over what loads it.
        self.put(&Instruction::with2(Mov_r64_rm64, RCX, context(offset::EXTENDED_AWAY))?)?;
        self.section().bytes(&[0xe3, 0]);
        let load = self.at();
        let area = MemoryOperand::new(RCX, Register::None, 1, offset::XSTATE as i64, 8, false, Register::None);
        for inst in [
            Instruction::with2(Mov_rm64_r64, save(2), RAX)?,
            Instruction::with2(Mov_rm64_r64, save(3), RDX)?,
            Instruction::with2(Mov_r32_imm32, EAX, components as u32)?,
            Instruction::with2(Mov_r32_imm32, EDX, (components >> 32) as u32)?,
            Instruction::with2(Mov_r64_rm64, RCX, context(offset::THIS))?,
            Instruction::with1(Xrstor64_mem, area)?,
            Instruction::with2(Mov_rm64_imm32, context(offset::EXTENDED_AWAY), 0)?,
            Instruction::with2(Mov_r64_rm64, RAX, save(2))?,
            Instruction::with2(Mov_r64_rm64, RDX, save(3))?,
        ] {
            self.put(&inst)?;
        }
        let skip = (self.at() - load) as u8;
        self.section().short_jumps.push((load as usize - 1, skip));
        self.put(&Instruction::with2(Mov_r64_rm64, RCX, save(1))?)
    }

    fn piece(&mut self, piece: &Piece) {
        let start = self.at();
        self.section().bytes(&piece.bytes);
        if let Some(field) = piece.jump {
            let target = Target::Address(piece.leads);
            self.r.relocations.push(Relocation { cold: self.in_cold, at: start + field as u32, target });
        }
    }

    /// Goes where `next_pc` says. Returns the tail's offset.
    fn indirect_tail(&mut self, site: u32) -> u32 {
        let piece = &self.host.tail;
        let start = self.at();
        self.piece(piece);
        let (displaced, end) = (start + piece.displaced as u32, self.at());
        self.r.tails.push(EncodedTail { site, start, displaced, end });
        start
    }

    /// For each poll: once more what precedes it in its block, then its split block. The retargeted back edge of a loop
    /// leads here, in the very state in which it would have entered the block.
    fn poll_landings(&mut self) -> Result<(), IcedError> {
        let f = self.f;
        for b in 0..f.hot_blocks {
            let poll = f.block_insns(Block::new(b)).last();
            let (Kind::Poll, Some(site)) = (&f.insts[poll.index()].kind, f.insts[poll.index()].site) else {
                continue;
            };
            // Nothing leads back to the poll of a loop that turned out not to be one, which may be in the entry block.
            let is_head = self.r.back_edges.iter().any(|(_, head)| *head == b);
            let Some(split) = f.split_of[site.0 as usize].filter(|_| is_head) else { continue };
            let landing = self.at();
            self.r.polls.push((site, landing, b));
            for item in self.out.block_insts_and_edits(f, Block::new(b)) {
                match item {
                    InstOrEdit::Edit(Edit::Move { from, to }) => self.mov(*from, *to)?,
                    InstOrEdit::Inst(i) if i == poll => break,
                    InstOrEdit::Inst(i) => self.inst(b, &f.insts[i.index()], self.out.inst_allocs(i))?,
                }
            }
            self.jump(&[0xe9], Target::Block(split), false);
        }
        Ok(())
    }

    /// The way out to the runtime of each trace end, and before it what gives borrowed registers back.
    fn unlinked_stubs(&mut self) -> Result<(), IcedError> {
        for n in 0..self.r.ends.len() {
            let site = self.r.ends[n].site;
            if let Some((_, restored)) = &mut self.r.ends[n].borrowed {
                *restored = self.cold.len as u32;
                self.homes.restore.iter().try_for_each(|&(r, s)| self.put(&restore(r, s)?))?;
                self.r.ends[n].at = self.jump(&[0xe9], Target::Unlinked(site), true);
            }
            let at = self.at();
            self.r.unlinked.push((site, at));
            self.store_site(site)?;
            self.jump(&[0xe9], Target::LeaveCanonical, false);
        }
        Ok(())
    }
}

/// A passage between two fragments: gives registers back that the first has borrowed, saves those that the second
/// borrows, and goes on. Its only exit is site 0, where a thread leaves that is to come out; it gives back all of `saved` first.
pub fn passage(give_back: &[(u8, u16)], borrow: &[(u8, u16)], saved: &[(u8, u16)]) -> Result<Encoded, CodegenError> {
    let (mut hot, mut cold) = (Section::new(), Section::new());
    give_back.iter().try_for_each(|&(r, s)| hot.put(&restore(r, s)?))?;
    borrow.iter().try_for_each(|&(r, s)| hot.put(&save(r, s)?))?;
    hot.align_field(1);
    hot.bytes(&[0xe9, 0, 0, 0, 0]);
    saved.iter().try_for_each(|&(r, s)| cold.put(&restore(r, s)?))?;
    cold.align_field(1);
    cold.bytes(&[0xe9, 0, 0, 0, 0]);
    let out = cold.len as u32;
    cold.put(&Instruction::with2(Code::Mov_rm64_imm32, context(offset::EXIT_SITE), 0)?)?;
    let number = (cold.len - 4) as u32;
    cold.bytes(&[0xe9, 0, 0, 0, 0]);
    let field = (hot.len - 4) as u32;
    Ok(Encoded {
        relocations: vec![
            Relocation { cold: false, at: field, target: Target::Restored(0) },
            Relocation { cold: true, at: out - 4, target: Target::Unlinked(0) },
            Relocation { cold: true, at: number, target: Target::Exit(0) },
            Relocation { cold: true, at: (cold.len - 4) as u32, target: Target::LeaveCanonical },
        ],
        hot: hot.finish(),
        cold: cold.finish(),
        alignment: ENTRY_ALIGNMENT,
        ends: vec![EncodedEnd { site: 0, borrowed: Some((field, 0)), cold: true, at: out - 4, tail: None }],
        unlinked: vec![(0, out)],
        ..Encoded::default()
    })
}
