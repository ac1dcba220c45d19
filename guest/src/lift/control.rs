//! Stack and control transfer: push, pop, call, ret, jumps, loops, leave, syscall.
//!
//! The write of the stack pointer comes after everything that can fault.

use super::host;
use super::operand::{Emit, ZERO};
use dynasour_ir::{Cond, Gpr, GuestTerm, Loc, Mem, Op, Operand, Ty};
use iced_x86::{Code, Mnemonic as M, OpKind, Register};

/// Where control goes after a stack or control instruction.
pub(super) enum Flow {
    /// The next instruction.
    Next,
    /// The end of the block.
    End(GuestTerm),
}

impl Emit<'_, '_> {
    /// Emits the instruction if it belongs to this file; `None` if it does not.
    pub fn control(&mut self) -> Option<Flow> {
        let next = self.inst.next_ip();
        let flow = match self.inst.mnemonic() {
            M::Push => {
                let ty = self.stack_ty();
                let v = self.read(0, ty);
                self.push(ty, v);
                Flow::Next
            }
            M::Pop => {
                self.pop();
                Flow::Next
            }
            M::Leave => {
                let rbp = self.b.get_gpr(Gpr::RBP);
                let v = self.b.load(Ty::I64, Mem::disp(0), rbp, ZERO);
                let rsp = self.b.binary(Op::Add, Ty::I64, rbp, Operand::Const(8));
                self.b.put(Loc::Gpr(Gpr::RSP), rsp);
                self.b.put(Loc::Gpr(Gpr::RBP), v);
                Flow::Next
            }
            M::Call => {
                let target = self.target();
                self.push(Ty::I64, Operand::Const(next));
                Flow::End(GuestTerm::Call { target, ret: next })
            }
            M::Ret => {
                let rsp = self.b.get_gpr(Gpr::RSP);
                let target = self.b.load(Ty::I64, Mem::disp(0), rsp, ZERO);
                let extra = if self.inst.op_count() == 1 { self.inst.immediate(0) } else { 0 };
                let above = self.b.binary(Op::Add, Ty::I64, rsp, Operand::Const(8 + extra));
                self.b.put(Loc::Gpr(Gpr::RSP), above);
                Flow::End(GuestTerm::Ret(target))
            }
            M::Jmp => {
                let target = self.target();
                Flow::End(GuestTerm::Goto(target))
            }
            M::Jrcxz | M::Jecxz => {
                let (reg, ty) = self.counter();
                let count = self.read_reg(reg);
                let cond = self.b.binary(Op::Eq, ty, count, ZERO);
                self.branch(cond)
            }
            M::Loop | M::Loope | M::Loopne => {
                let (reg, ty) = self.counter();
                let count = self.read_reg(reg);
                let count = self.b.binary(Op::Sub, ty, count, Operand::Const(1));
                let mut cond = self.b.binary(Op::Ne, ty, count, ZERO);
                let chosen = host::loop_prefix_chooses_condition();
                let wanted = match self.inst.mnemonic() {
                    M::Loop => None,
                    _ if chosen && self.inst.has_rep_prefix() => Some(Cond::E),
                    _ if chosen && self.inst.has_repne_prefix() => Some(Cond::Ne),
                    M::Loope => Some(Cond::E),
                    _ => Some(Cond::Ne),
                };
                if let Some(wanted) = wanted {
                    let flags = self.flags();
                    let holds = self.b.cond(wanted, flags);
                    cond = self.b.binary(Op::And, Ty::I1, cond, holds);
                }
                self.write_reg(reg, count);
                self.branch(cond)
            }
            M::Syscall => Flow::End(GuestTerm::Syscall { next }),
            _ if self.inst.is_jcc_short_or_near() => {
                let cond = self.condition()?;
                let flags = self.flags();
                let cond = self.b.cond(cond, flags);
                self.branch(cond)
            }
            _ => return None,
        };
        Some(flow)
    }

    /// A conditional branch to the target that the instruction encodes.
    fn branch(&mut self, cond: Operand) -> Flow {
        Flow::End(GuestTerm::Branch {
            cond,
            taken: self.inst.near_branch_target(),
            fall: self.inst.next_ip(),
        })
    }

    /// Target of a near jump or call: constant, register or memory.
    fn target(&mut self) -> Operand {
        match self.inst.op_kind(0) {
            OpKind::Register | OpKind::Memory => self.read(0, Ty::I64),
            _ => Operand::Const(self.inst.near_branch_target()),
        }
    }

    /// rcx or, with an address-size prefix, ecx.
    fn counter(&self) -> (Register, Ty) {
        match self.inst.code() {
            Code::Jecxz_rel8_64
            | Code::Loop_rel8_64_ECX
            | Code::Loope_rel8_64_ECX
            | Code::Loopne_rel8_64_ECX => (Register::ECX, Ty::I32),
            _ => (Register::RCX, Ty::I64),
        }
    }

    /// The width of a push or pop.
    fn stack_ty(&self) -> Ty {
        if self.inst.stack_pointer_increment().unsigned_abs() == 2 { Ty::I16 } else { Ty::I64 }
    }

    fn push(&mut self, ty: Ty, v: Operand) {
        let size = i64::from(ty.bytes());
        let rsp = self.b.get_gpr(Gpr::RSP);
        self.b.store(ty, Mem::disp(-size), rsp, ZERO, v);
        let below = self.b.binary(Op::Sub, Ty::I64, rsp, Operand::Const(size as u64));
        self.b.put(Loc::Gpr(Gpr::RSP), below);
    }

    /// `pop`: a memory destination is addressed with the incremented rsp; `pop rsp` leaves the
    /// popped value.
    fn pop(&mut self) {
        let ty = self.stack_ty();
        let size = u64::from(ty.bytes());
        let rsp = self.b.get_gpr(Gpr::RSP);
        let v = self.b.load(ty, Mem::disp(0), rsp, ZERO);
        let above = self.b.binary(Op::Add, Ty::I64, rsp, Operand::Const(size));
        if self.is_memory(0) {
            let address = self.address_with_rsp(size as i64);
            self.store(ty, address, v);
            self.b.put(Loc::Gpr(Gpr::RSP), above);
        } else {
            self.b.put(Loc::Gpr(Gpr::RSP), above);
            self.write_reg(self.inst.op0_register(), v);
        }
    }
}
