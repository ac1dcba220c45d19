//! A plain evaluator of one lifted block without natives, over registers and a piece of memory.

use dynasour_guest::lift::LiftedBlock;
use dynasour_ir::{GuestTerm, Inst, Loc, Op, Operand, Segment, Term, Ty, semantics};

/// Guest state for the evaluator.
pub struct Machine<'m> {
    pub gpr: [u64; 16],
    pub flags: u64,
    pub fs_base: u64,
    pub gs_base: u64,
    /// Memory at `memory_start`; everything else is unmapped.
    pub memory: &'m mut [u8],
    pub memory_start: u64,
    /// Stores fault if this is false.
    pub writable: bool,
}

/// An access outside the memory, or a store to read-only memory.
#[derive(Debug)]
pub struct Fault;

impl Machine<'_> {
    fn bytes(&mut self, address: u64, len: usize) -> Result<&mut [u8], Fault> {
        let offset = address.wrapping_sub(self.memory_start) as usize;
        let end = offset.checked_add(len).ok_or(Fault)?;
        self.memory.get_mut(offset..end).ok_or(Fault)
    }

    fn address(&self, inst: &Inst, arg: impl Fn(usize) -> u64) -> u64 {
        let mem = inst.mem.expect("a memory access has an address shape");
        let segment = match mem.seg {
            Some(Segment::Fs) => self.fs_base,
            Some(Segment::Gs) => panic!("GS is folded into the base"),
            None => 0,
        };
        segment
            .wrapping_add(arg(0))
            .wrapping_add(arg(1).wrapping_mul(u64::from(mem.scale)))
            .wrapping_add(mem.disp as u64)
    }

    /// Evaluates the block and returns the next pc (`None`: special, trap or syscall).
    pub fn run(
        &mut self,
        block: &LiftedBlock,
        values: &mut Vec<u64>,
    ) -> Result<Option<u64>, Fault> {
        values.clear();
        values.resize(block.version.types.len(), 0);
        let body = &block.version.blocks[0];
        for inst in &body.insts {
            let value = |values: &[u64], o: Operand| match o {
                Operand::Value(v) => values[v.index()],
                Operand::Const(c) => c,
            };
            let arg = |i: usize| value(values, inst.args[i]);
            let result = match inst.op {
                Op::Get(Loc::Gpr(g)) => self.gpr[g.number()],
                Op::Get(Loc::Flags) => self.flags,
                Op::Get(Loc::GsBase) => self.gs_base,
                Op::Put(Loc::Gpr(g)) => {
                    self.gpr[g.number()] = arg(0);
                    continue;
                }
                Op::Put(Loc::Flags) => {
                    self.flags = arg(0);
                    continue;
                }
                Op::Load => {
                    let address = self.address(inst, arg);
                    let bytes = self.bytes(address, inst.ty.bytes() as usize)?;
                    let mut word = [0; 8];
                    word[..bytes.len()].copy_from_slice(bytes);
                    u64::from_le_bytes(word)
                }
                Op::Store => {
                    let address = self.address(inst, arg);
                    let word = arg(2).to_le_bytes();
                    if !self.writable {
                        return Err(Fault);
                    }
                    let bytes = self.bytes(address, inst.ty.bytes() as usize)?;
                    bytes.copy_from_slice(&word[..bytes.len()]);
                    continue;
                }
                Op::At => continue,
                op if op.is_pure() => {
                    let args: [u64; 3] =
                        std::array::from_fn(|i| inst.args.get(i).map_or(0, |o| value(values, *o)));
                    semantics::eval(op, inst.ty, &args[..inst.args.len()])
                }
                op => panic!("{op} in a modelled block"),
            };
            let def = inst.def().expect("it has a result");
            let ty = block.version.ty(def);
            assert!(
                ty == Ty::Flags || result & !ty.mask() == 0,
                "{} leaves bits above {ty}",
                inst.op
            );
            values[def.index()] = result;
        }
        let value = |o: Operand| match o {
            Operand::Value(v) => values[v.index()],
            Operand::Const(c) => c,
        };
        let Term::Guest(term) = &body.term else { panic!("a base block ends in the guest") };
        Ok(match term {
            GuestTerm::Goto(target) | GuestTerm::Call { target, .. } | GuestTerm::Ret(target) => {
                Some(value(*target))
            }
            GuestTerm::Branch { cond, taken, fall } => {
                Some(if value(*cond) != 0 { *taken } else { *fall })
            }
            GuestTerm::Syscall { .. } | GuestTerm::Special { .. } | GuestTerm::Trap { .. } => None,
        })
    }
}
