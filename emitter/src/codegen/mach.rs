//! Machine instructions before and after register allocation, and the control-flow graph that
//! regalloc2 sees.
//!
//! A *site* is an instruction that may leave the fragment: a guard, a poll, an instruction that may
//! fault. Every site ends a block. The block's first successor is the code that follows. Its second
//! is a cold *split* block, which stores the site's number and goes on to the *record* block of its
//! exit. The record block carries the varmap's uses, which may be in any location, and no code of
//! its own, so varmaps never constrain hot code (docs/design.md, "Code generation").
//!
//! An instruction that may fault is itself the branch. The allocator's moves for its operands stand
//! before it, those for its successors behind it, so the split block begins in exactly the state
//! that a fault leaves.

use crate::codegen::x86::{self, Size};
use dynasour_ir::{AnchorId, Native};
use iced_x86::{Code, Register};
use regalloc2::{Block, Inst, InstRange, Operand as RaOperand, PReg, PRegSet, RegClass, VReg};
use smallvec::SmallVec;

/// The number of a site within its fragment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord)]
pub struct Site(pub u32);

/// Allocator operands of one machine instruction.
pub type Ops = SmallVec<[RaOperand; 5]>;

/// A general-purpose register as the allocator names it.
pub fn preg(number: usize) -> PReg {
    PReg::new(number, RegClass::Int)
}

/// A virtual register.
pub fn vreg(number: usize) -> VReg {
    VReg::new(number, RegClass::Int)
}

/// An XMM register as the allocator names it.
pub fn vector_preg(number: usize) -> PReg {
    PReg::new(number, RegClass::Float)
}

/// A virtual XMM register.
pub fn vector_vreg(number: usize) -> VReg {
    VReg::new(number, RegClass::Float)
}

/// Base or index of an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AddrReg {
    /// Absent.
    None,
    /// An allocator operand.
    Op(u8),
    /// The stack pointer, which holds the guest's rsp of the fragment's entry throughout.
    Rsp,
}

/// A memory operand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Addr {
    /// Base register.
    pub base: AddrReg,
    /// Index register.
    pub index: AddrReg,
    /// 1, 2, 4 or 8.
    pub scale: u8,
    /// Sign-extended 32 bits.
    pub disp: i32,
    /// `FS`, `GS` or none.
    pub seg: Register,
}

impl Addr {
    /// A field of the thread context.
    pub fn context(offset: usize) -> Addr {
        Addr {
            base: AddrReg::None,
            index: AddrReg::None,
            scale: 1,
            disp: offset as i32,
            seg: Register::GS,
        }
    }
}

/// One operand of an encoded instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Opnd {
    /// An allocator operand: a register, or its spill slot. An XMM register has no size.
    Op(u8, Size),
    /// An immediate.
    Imm(i64),
    /// Memory.
    Mem(Addr),
    /// This very register.
    Phys(Register),
}

/// What stands for the explicit memory operand of an original instruction.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    /// It has none.
    Nothing,
    /// Memory.
    Memory(Addr),
    /// An allocator operand that is an XMM register, or its spill slot.
    Vector(u8),
    /// An allocator operand that is a general register, or its spill slot.
    General(u8),
    /// An allocator operand that is an XMM register, which the instruction sets instead of memory. Are the upper
    /// bytes of the register that it stores zero?
    Result(u8, bool),
}

/// How a trace ends: constants and the stack pointer are set here, all else by fixed uses.
#[derive(Clone, Debug, Default)]
pub struct End {
    /// Registers to load with constants, without touching flags.
    pub consts: SmallVec<[(u8, u64); 4]>,
    /// The new stack pointer.
    pub rsp: EndRsp,
    /// The site of this exit.
    pub site: u32,
    /// Its target is in `next_pc`.
    pub indirect: bool,
    /// The guest pc of the transfer that computed the target, 0 if there is none.
    pub after: u64,
}

/// What the stack pointer becomes at a trace's end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EndRsp {
    /// In place.
    #[default]
    Same,
    /// rsp + constant
    Plus(i32),
    /// A constant.
    Const(u64),
    /// An allocator operand in any location.
    Op(u8),
}

/// What a machine instruction is.
#[derive(Clone, Debug)]
pub enum Kind {
    /// Defines the registers that hold guest state at entry.
    FragmentEntry,
    /// One instruction built from parts.
    X86(Code, SmallVec<[Opnd; 3]>),
    /// Operand 0 := constant, flags untouched.
    Const(u64),
    /// `lahf; seto al`: flags to their packed form in rax.
    CaptureFlags,
    /// `add al, 0x7f; sahf`: the packed form in rax to flags.
    RestoreFlags,
    /// An original instruction, its memory operand replaced.
    Native(Box<Native>, Place),
    /// To the site's exit if the condition (encoding number) holds.
    Jcc(u8),
    /// To the site's exit always.
    Always,
    /// The safe point at a loop's head: no code.
    Poll,
    /// To the IR block with this index, with block arguments.
    Jump(usize),
    /// To the IR block with this index if the condition (encoding number) holds, else to the next one.
    Branch(u8, usize),
    /// The end of the trace.
    End(Box<End>),
    /// Cold: the way from a site to its record.
    Split(Site),
    /// Cold: an exit's record (index into the drafts).
    Record(usize),
}

/// A machine instruction with its allocator operands.
#[derive(Clone, Debug)]
pub struct MInst {
    /// What it is.
    pub kind: Kind,
    /// What the allocator sees.
    pub ops: Ops,
    /// Registers it destroys.
    pub clobbers: PRegSet,
    /// The site it is, if it may leave the fragment.
    pub site: Option<Site>,
    /// Block and index of the IR instruction that it is for; none if it is for no single one.
    pub position: Option<(u32, u32)>,
}

impl MInst {
    /// May it leave other flags behind than it found?
    pub fn destroys_flags(&self) -> bool {
        use iced_x86::Mnemonic as M;
        match &self.kind {
            Kind::X86(code, _) => {
                let spares = matches!(
                    code.mnemonic(),
                    M::Mov
                        | M::Movzx
                        | M::Movsx
                        | M::Movsxd
                        | M::Lea
                        | M::Not
                        | M::Bswap
                        | M::Shlx
                        | M::Shrx
                        | M::Sarx
                        | M::Movd
                        | M::Movq
                        | M::Movss
                        | M::Movsd
                );
                !spares
                    && !x86::SETCC.contains(code)
                    && !x86::CMOVCC.iter().flatten().any(|c| c == code)
            }
            Kind::Native(original, _) => {
                original.inst.rflags_modified() != iced_x86::RflagsBits::NONE
            }
            Kind::RestoreFlags => true,
            Kind::FragmentEntry
            | Kind::Const(_)
            | Kind::CaptureFlags
            | Kind::Jcc(_)
            | Kind::Always
            | Kind::Poll => false,
            Kind::Jump(_) | Kind::Branch(..) | Kind::End(_) | Kind::Split(_) | Kind::Record(_) => {
                false
            }
        }
    }
}

/// What kind of place a site is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum SiteKind {
    /// A failed guard.
    Guard,
    /// A loop's safe point.
    Poll,
    /// A memory fault or trap in the fragment.
    Fault,
    /// The trace's end.
    End,
    /// The trace's end, to a computed pc.
    EndIndirect,
}

/// A site as selection makes it.
#[derive(Clone, Debug)]
pub struct SiteDraft {
    /// What it is.
    pub kind: SiteKind,
    /// The anchor it leaves through.
    pub anchor: AnchorId,
    /// The record block (index into the drafts), none at trace ends.
    pub record: Option<usize>,
    /// See [`crate::Exit::progress`].
    pub progress: bool,
    /// The IR instruction: block and index; for a trace's end, the number of instructions.
    pub position: (u32, u32),
}

/// A block of the machine-level graph.
#[derive(Debug, Default)]
struct MBlock {
    first: u32,
    last: u32,
    succs: SmallVec<[Block; 2]>,
    preds: SmallVec<[Block; 2]>,
    params: SmallVec<[VReg; 8]>,
    args: SmallVec<[VReg; 8]>,
}

/// The function that regalloc2 allocates.
pub struct MFunc {
    /// All instructions, block after block.
    pub insts: Vec<MInst>,
    blocks: Vec<MBlock>,
    /// How many virtual registers there are.
    pub num_vregs: usize,
    /// Blocks below this index are hot, in layout order.
    pub hot_blocks: usize,
    /// For each IR block, its first machine block.
    pub block_of: Vec<usize>,
    /// For each site, its split block.
    pub split_of: Vec<Option<usize>>,
    /// For each record draft, its block.
    pub record_block: Vec<Option<usize>>,
}

/// One IR block after selection.
pub struct SelectedBlock {
    /// Parameters (none for the entry).
    pub params: SmallVec<[VReg; 8]>,
    /// Instructions in order; the last is a terminator.
    pub insts: Vec<MInst>,
    /// Arguments of the final jump.
    pub args: SmallVec<[VReg; 8]>,
}

impl MFunc {
    /// Lays the selected blocks out, splits them at sites and appends the cold blocks.
    pub fn new(
        selected: Vec<SelectedBlock>,
        sites: &[SiteDraft],
        records: Vec<Ops>,
        num_vregs: usize,
    ) -> MFunc {
        let mut f = MFunc {
            insts: Vec::with_capacity(
                selected.iter().map(|b| b.insts.len()).sum::<usize>() + 2 * sites.len(),
            ),
            blocks: Vec::new(),
            num_vregs,
            hot_blocks: 0,
            block_of: Vec::new(),
            split_of: vec![None; sites.len()],
            record_block: vec![None; records.len()],
        };
        let mut sites_at = Vec::new();
        let mut jumps = Vec::new();
        for block in selected {
            f.block_of.push(f.blocks.len());
            let mut current =
                MBlock { first: f.insts.len() as u32, params: block.params, ..MBlock::default() };
            let count = block.insts.len();
            for (i, inst) in block.insts.into_iter().enumerate() {
                let site = inst.site;
                match inst.kind {
                    Kind::Jump(to) => jumps.push((f.blocks.len(), to)),
                    Kind::Branch(_, to) => {
                        jumps.extend([f.block_of.len(), to].map(|to| (f.blocks.len(), to)));
                    }
                    _ => {}
                }
                f.insts.push(inst);
                if i + 1 == count || site.is_some() {
                    current.last = f.insts.len() as u32;
                    let index = f.blocks.len();
                    if let Some(site) = site {
                        current.succs.push(Block::new(index + 1));
                        sites_at.push((index, site));
                    }
                    if i + 1 == count {
                        current.args = block.args.clone();
                    }
                    f.blocks.push(std::mem::take(&mut current));
                    current.first = f.insts.len() as u32;
                    if site.is_some() {
                        current.preds.push(Block::new(index));
                    }
                }
            }
        }
        f.hot_blocks = f.blocks.len();
        for (from, to) in jumps {
            let target = f.block_of[to];
            f.blocks[from].succs.push(Block::new(target));
            f.blocks[target].preds.push(Block::new(from));
        }
        for &(from, site) in &sites_at {
            let split = f.cold_block(Kind::Split(site), Ops::new(), from);
            f.blocks[from].succs.push(Block::new(split));
            f.split_of[site.0 as usize] = Some(split);
        }
        let mut records: Vec<Option<Ops>> = records.into_iter().map(Some).collect();
        for &(_, site) in &sites_at {
            let (Some(record), Some(split)) =
                (sites[site.0 as usize].record, f.split_of[site.0 as usize])
            else {
                continue;
            };
            let block = match f.record_block[record] {
                Some(block) => {
                    f.blocks[block].preds.push(Block::new(split));
                    block
                }
                None => {
                    let block = f.cold_block(
                        Kind::Record(record),
                        records[record].take().unwrap_or_default(),
                        split,
                    );
                    f.record_block[record] = Some(block);
                    block
                }
            };
            f.blocks[split].succs.push(Block::new(block));
        }
        f
    }

    fn cold_block(&mut self, kind: Kind, ops: Ops, pred: usize) -> usize {
        let first = self.insts.len() as u32;
        let clobbers = PRegSet::empty();
        self.insts.push(MInst { kind, ops, clobbers, site: None, position: None });
        let mut block = MBlock { first, last: first + 1, ..MBlock::default() };
        block.preds.push(Block::new(pred));
        self.blocks.push(block);
        self.blocks.len() - 1
    }
}

impl regalloc2::Function for MFunc {
    fn num_insts(&self) -> usize {
        self.insts.len()
    }

    fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    fn entry_block(&self) -> Block {
        Block::new(0)
    }

    fn block_insns(&self, block: Block) -> InstRange {
        let b = &self.blocks[block.index()];
        InstRange::new(Inst::new(b.first as usize), Inst::new(b.last as usize))
    }

    fn block_succs(&self, block: Block) -> &[Block] {
        &self.blocks[block.index()].succs
    }

    fn block_preds(&self, block: Block) -> &[Block] {
        &self.blocks[block.index()].preds
    }

    fn block_params(&self, block: Block) -> &[VReg] {
        &self.blocks[block.index()].params
    }

    fn is_ret(&self, inst: Inst) -> bool {
        matches!(self.insts[inst.index()].kind, Kind::End(_) | Kind::Record(_))
    }

    fn is_branch(&self, inst: Inst) -> bool {
        let inst = &self.insts[inst.index()];
        inst.site.is_some()
            || matches!(inst.kind, Kind::Jump(_) | Kind::Branch(..) | Kind::Split(_))
    }

    fn branch_blockparams(&self, block: Block, inst: Inst, _succ: usize) -> &[VReg] {
        match self.insts[inst.index()].kind {
            Kind::Jump(_) => &self.blocks[block.index()].args,
            _ => &[],
        }
    }

    fn inst_operands(&self, inst: Inst) -> &[RaOperand] {
        &self.insts[inst.index()].ops
    }

    fn inst_clobbers(&self, inst: Inst) -> PRegSet {
        self.insts[inst.index()].clobbers
    }

    fn num_vregs(&self) -> usize {
        self.num_vregs
    }

    fn spillslot_size(&self, _class: RegClass) -> usize {
        1
    }
}
