//! XMM registers that hold a fragment's own values, in code that was lifted back: each is a word of the context,
//! so that the model, whose vectors stay in place, sees their moves as loads and stores.
//!
//! A native that was split ([`dynasour_ir::split`]) gets its operand from such a word, from memory or from a general
//! register, or leaves its result there, whatever its code looks like.
//!
//! What the guest has in a borrowed register is a number here, of which the code must leave the low half as it was.
//!
//! No data of its own; the caller owns what was lifted. No lock.
//!
//! ```text
//! movq xmm7, xmm0           v1 = native n0; store.i64 [word 7], v1
//! mulsd xmm1, xmm7          v2 = load.i64 [word 7]; native n1 v2
//! movq gs:[slot 3], xmm7    v3 = load.i64 [word 7]; store.i64 gs:[slot 3], v3
//! ```

use super::WORDS;
use dynasour_ir::split::Form;
use dynasour_ir::validate::HostNative;
use dynasour_ir::{Inst, Mem, Native, NativeId, Op, Operand, Split, Ty, Value, Version};
use iced_x86::{Code, Register};
use rustc_hash::FxHashMap;

/// The word that an XMM register is.
pub(super) fn word(r: u8) -> u64 {
    WORDS + 2048 + 8 * u64::from(r)
}

/// What the guest has in a borrowed register.
pub(super) fn guests(r: u8) -> u64 {
    0x5ec0_de00_1a7e_4000 | u64::from(r)
}

/// The number of an XMM register.
fn number(register: Register) -> Option<u8> {
    register.is_xmm().then(|| register.number() as u8).filter(|n| *n < 16)
}

/// Has the guest's move between a general and an XMM register become one between XMM registers, or from a slot?
pub(super) fn is_move(guest: &Native, host: &Native) -> bool {
    guest.register_move().is_some() && host.gpr_in.is_empty() && host.gpr_out.is_empty()
}

/// Puts words of the context in the place of `borrowed` registers (bit n is register n) in a block that was lifted.
pub(super) fn modelled(version: &mut Version, natives: &FxHashMap<u64, HostNative>, borrowed: u16) {
    for b in 0..version.blocks.len() {
        let insts = std::mem::take(&mut version.blocks[b].insts);
        let mut made = Model { version, insts: Vec::with_capacity(insts.len()) };
        for inst in insts {
            let native = inst.native.map(|n| made.version.natives[n.index()].clone());
            let is_done = native.is_some_and(|host| match natives.get(&host.inst.ip()) {
                Some(of) if of.guest.split != Split::No => {
                    made.split(&inst, &host, &of.guest).is_some()
                }
                Some(of) if is_move(&of.guest, &host) => {
                    made.between(&inst, &host, &of.guest).is_some()
                }
                Some(_) => false,
                None => made.moved(&inst, &host, borrowed).is_some(),
            });
            if !is_done {
                made.insts.push(inst);
            }
        }
        let insts = made.insts;
        version.blocks[b].insts = insts;
    }
}

/// A block under construction.
struct Model<'v> {
    version: &'v mut Version,
    insts: Vec<Inst>,
}

impl Model<'_> {
    fn push(&mut self, op: Op, ty: Ty, args: &[Operand]) -> Operand {
        let v = self.version.value(ty);
        self.insts.push(Inst::new(op, ty, Some(v), args));
        v.into()
    }

    fn access(&mut self, op: Op, ty: Ty, def: Option<Value>, mem: Mem, args: &[Operand]) {
        let inst = Inst::new(op, ty, def, args);
        self.insts.push(Inst { mem: Some(mem), ..inst });
    }

    fn load(&mut self, ty: Ty, mem: Mem, address: [Operand; 2]) -> Operand {
        let v = self.version.value(ty);
        self.access(Op::Load, ty, Some(v), mem, &address);
        v.into()
    }

    fn store(&mut self, ty: Ty, mem: Mem, [base, index]: [Operand; 2], value: Operand) {
        self.access(Op::Store, ty, None, mem, &[base, index, value]);
    }

    fn read(&mut self, r: u8) -> Operand {
        self.load(Ty::I64, Mem::disp(0), [Operand::Const(word(r)), Operand::Const(0)])
    }

    /// The register gets a value whose upper bytes are zero.
    fn write(&mut self, r: u8, value: Operand, ty: Ty) {
        let value = match ty {
            Ty::I64 => value,
            ty => self.push(Op::Zext(ty), Ty::I64, &[value]),
        };
        self.store(Ty::I64, Mem::disp(0), [Operand::Const(word(r)), Operand::Const(0)], value);
    }

    fn narrowed(&mut self, value: Operand, ty: Ty) -> Operand {
        if ty == Ty::I64 { value } else { self.push(Op::Trunc, ty, &[value]) }
    }

    fn native(&mut self, native: Native, args: &[Operand], defs: &[Value]) {
        self.version.natives.push(native);
        let mut made = Inst::new(Op::Native, Ty::I64, None, args);
        made.native = Some(NativeId((self.version.natives.len() - 1) as u32));
        made.defs.extend_from_slice(defs);
        self.insts.push(made);
    }

    /// A native of the version whose memory operand was split off, as the code has it. None if this cannot be.
    fn split(&mut self, inst: &Inst, host: &Native, guest: &Native) -> Option<()> {
        let ty = guest.split_ty()?;
        let native = Native {
            inst: host.inst,
            gpr_out: host.gpr_out.clone(),
            flags_out: host.flags_out,
            ..guest.clone()
        };
        let address = inst.mem.map(|mem| (mem, [inst.args[0], inst.args[1]]));
        let args: Vec<Operand> = match guest.split {
            Split::No => return None,
            Split::Stored => Vec::new(),
            Split::Loaded => vec![match (address, number(host.inst.op1_register())) {
                (Some((mem, address)), _) => self.load(ty, mem, address),
                (None, Some(r)) => {
                    let whole = self.read(r);
                    let value = self.narrowed(whole, ty);
                    match guest.form()? {
                        // All of the register is copied.
                        Form::Vector(Code::Movaps_xmm_xmmm128)
                        | Form::Either(Code::Movaps_xmm_xmmm128)
                            if ty == Ty::I32 =>
                        {
                            let upper = self.push(Op::Shr, Ty::I64, &[whole, Operand::Const(32)]);
                            let upper = self.narrowed(upper, ty);
                            self.push(Op::Xor, ty, &[value, upper])
                        }
                        _ => value,
                    }
                }
                (None, None) => {
                    let whole = *inst.args.first()?;
                    self.narrowed(whole, ty)
                }
            }],
        };
        if guest.split == Split::Loaded {
            self.native(native, &args, &inst.defs);
            return Some(());
        }
        let value = self.version.value(ty);
        self.native(native, &args, &[value]);
        match address {
            Some((mem, address)) => self.store(ty, mem, address, value.into()),
            None => self.write(number(host.inst.op0_register())?, value.into(), ty),
        }
        Some(())
    }

    /// A move between a general and an XMM register, as the code has it between XMM registers.
    fn between(&mut self, inst: &Inst, host: &Native, guest: &Native) -> Option<()> {
        let native = Native { inst: host.inst, ..guest.clone() };
        let loads = guest.register_move()? == Split::Loaded;
        let args = match inst.mem {
            _ if !loads => Vec::new(),
            Some(mem) => vec![self.load(Ty::I64, mem, [inst.args[0], inst.args[1]])],
            None => vec![self.read(number(host.inst.op1_register())?)],
        };
        let value = (!loads).then(|| self.version.value(Ty::I64));
        self.native(native, &args, value.as_slice());
        if let Some(value) = value {
            self.write(number(host.inst.op0_register())?, value.into(), Ty::I64);
        }
        Some(())
    }

    /// A move that belongs to no native of the version. None if it is none.
    fn moved(&mut self, inst: &Inst, host: &Native, borrowed: u16) -> Option<()> {
        use Code::*;
        let own = |register: Register| number(register).filter(|r| borrowed >> r & 1 != 0);
        let code = host.inst.code();
        let address = inst.mem.map(|mem| (mem, [inst.args[0], inst.args[1]]));
        let ty = match code {
            Movss_xmm_xmmm32 | Movss_xmmm32_xmm | Movd_xmm_rm32 | Movd_rm32_xmm => Ty::I32,
            Movaps_xmm_xmmm128 | Movups_xmm_xmmm128 | Movups_xmmm128_xmm | Movq_xmm_xmmm64
            | Movq_xmmm64_xmm | Movq_xmm_rm64 | Movq_rm64_xmm => Ty::I64,
            _ => return None,
        };
        let stores = matches!(
            code,
            Movss_xmmm32_xmm | Movups_xmmm128_xmm | Movq_xmmm64_xmm | Movd_rm32_xmm | Movq_rm64_xmm
        );
        if !stores {
            let to = own(host.inst.op0_register())?;
            let value = match address {
                Some((mem, address)) => self.load(ty, mem, address),
                None if host.inst.op1_register().is_xmm() => {
                    let from = own(host.inst.op1_register())?;
                    self.read(from)
                }
                None => {
                    let whole = *inst.args.first()?;
                    self.narrowed(whole, ty)
                }
            };
            self.write(to, value, ty);
            return Some(());
        }
        let from = own(host.inst.op1_register())?;
        let whole = self.read(from);
        let value = self.narrowed(whole, ty);
        match (address, inst.def()) {
            (Some((mem, address)), _) => self.store(ty, mem, address, value),
            (None, Some(def)) => {
                let (op, of) = match ty {
                    Ty::I64 => (Op::Or, vec![value, Operand::Const(0)]),
                    ty => (Op::Zext(ty), vec![value]),
                };
                self.insts.push(Inst::new(op, Ty::I64, Some(def), &of));
            }
            (None, None) => return None,
        }
        Some(())
    }
}
