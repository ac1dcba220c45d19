//! The moves between a site and its exit's record, and when they can be left out.
//!
//! The allocator brings the values of a record to places of its choice by moves on the way from the
//! site. If only one site has a record, the record says where the values are *at the site*
//! instead. The moves are then left out, and the registers that only they needed are free. If no
//! instruction remains between them, the guard's own jump leads to the exit's destination.

use crate::codegen::mach::MFunc;
use regalloc2::{
    Allocation, Block, Edit, Function, Inst, InstOrEdit, OperandConstraint, Output, RegClass,
};
use rustc_hash::FxHashMap;

/// The ways from the sites of a function to their records.
pub struct Exits {
    /// By instruction: it is on a way whose moves are left out.
    still: Vec<bool>,
    /// For each record that only one site has: places that the moves would fill, and what is at the
    /// site where that is.
    origins: Vec<Option<FxHashMap<Allocation, Allocation>>>,
    /// For each record: the machine block of its only site's split.
    only_split: Vec<Option<usize>>,
    /// For each machine block: no moves are in it.
    moveless: Vec<bool>,
}

impl Exits {
    /// Looks at an allocated function.
    pub fn of(f: &MFunc, out: &Output) -> Exits {
        let mut exits = Exits {
            still: vec![false; f.insts.len()],
            origins: vec![None; f.record_block.len()],
            only_split: vec![None; f.record_block.len()],
            moveless: vec![false; f.num_blocks()],
        };
        for (record, block) in f.record_block.iter().enumerate() {
            let Some(block) = *block else { continue };
            // What an interrupted instruction leaves in its own registers stays there.
            let uses = &f.insts[only_inst(f, Block::new(block)).index()].ops;
            let anywhere = uses.iter().all(|o| matches!(o.constraint(), OperandConstraint::Any));
            if let ([split], true) = (f.block_preds(Block::new(block)), anywhere) {
                let split = *split;
                let mut origins = FxHashMap::default();
                for b in [split, Block::new(block)] {
                    for (from, to) in moves(f, out, b) {
                        let origin = origins.get(&from).copied().unwrap_or(from);
                        origins.insert(to, origin);
                    }
                    exits.still[only_inst(f, b).index()] = true;
                    exits.moveless[b.index()] = true;
                }
                exits.origins[record] = Some(origins);
                exits.only_split[record] = Some(split.index());
            } else {
                for b in f.block_preds(Block::new(block)).iter().copied().chain([Block::new(block)])
                {
                    exits.moveless[b.index()] = moves(f, out, b).next().is_none();
                }
            }
        }
        exits
    }

    /// Where the value of a record's operand is when the record is reached, by where the allocator
    /// has it.
    pub fn place(&self, record: usize, allocated: Allocation) -> Allocation {
        let origin = self.origins[record].as_ref().and_then(|origins| origins.get(&allocated));
        origin.copied().unwrap_or(allocated)
    }

    /// Are the moves at this instruction left out?
    pub fn leaves_out(&self, inst: Inst) -> bool {
        self.still[inst.index()]
    }

    /// Does a record stand with the split of its only site, in this machine block?
    pub fn is_only_split(&self, record: usize, block: usize) -> bool {
        self.only_split[record] == Some(block)
    }

    /// Does this record stand in its only site's split?
    pub fn stands_in_split(&self, record: usize) -> bool {
        self.only_split[record].is_some()
    }

    /// Is nothing moved in this block of the way from a site to its record?
    pub fn is_moveless(&self, block: usize) -> bool {
        self.moveless[block]
    }

    /// The registers of a class that the code uses: bit n is register n.
    pub fn used_registers(&self, f: &MFunc, out: &Output, class: RegClass) -> u16 {
        let here = |i: &usize| !self.still[*i];
        let allocs = (0..f.insts.len())
            .filter(here)
            .flat_map(|i| out.inst_allocs(Inst::new(i)).iter().copied());
        let edits = out.edits.iter().filter(|(point, _)| here(&point.inst().index()));
        let moved = edits.flat_map(|(_, Edit::Move { from, to })| [*from, *to]);
        let registers = allocs.chain(moved).filter_map(|a| a.as_reg());
        registers.filter(|r| r.class() == class).fold(0, |set, r| set | 1 << r.hw_enc())
    }
}

/// The instruction of a cold block.
fn only_inst(f: &MFunc, block: Block) -> Inst {
    f.block_insns(block).first()
}

/// The moves of a cold block, in order.
fn moves<'a>(
    f: &'a MFunc,
    out: &'a Output,
    block: Block,
) -> impl Iterator<Item = (Allocation, Allocation)> + 'a {
    out.block_insts_and_edits(f, block).filter_map(|item| match item {
        InstOrEdit::Edit(Edit::Move { from, to }) => Some((*from, *to)),
        InstOrEdit::Inst(_) => None,
    })
}
