//! Trace ends, and the records of all other exits.
//!
//! A trace end leaves in canonical state. Deferred stores are performed first, then the new flags
//! are set, and each touched register gets its value by a fixed use; only moves of the allocator
//! follow.
//!
//! A record, in contrast, only *names* where values are. It is built after selection, when it is
//! known which values have registers.

use crate::codegen::lower::{LeftRaw, Lower, LowerError};
use crate::codegen::mach::{Addr, End, EndRsp, Kind, Opnd, Ops, SiteDraft, SiteKind, preg};
use crate::codegen::x86::Size;
use crate::record::{Location, Node, Record, RecordStore};
use dynasour_guest::context::offset;
use dynasour_ir::semantics::ARITH_FLAGS;
use dynasour_ir::{AnchorId, Gpr, Loc, Op, Operand, Ty, Value};
use iced_x86::Code;
use regalloc2::{Operand as RaOperand, OperandConstraint, VReg};
use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

impl Lower<'_> {
    /// `Term::Exit`: materialises the anchor's state and leaves.
    pub fn trace_end(&mut self, anchor: AnchorId) -> Result<(), LowerError> {
        let a = self.v.anchors.get(anchor.index());
        let a = a.ok_or_else(|| LowerError::Malformed(format!("no anchor {anchor}")))?;
        for store in &a.stores {
            self.store_parts(store.ty, store.mem, store.args, Some(anchor))?;
        }
        let indirect = self.survey.resolve(a.target).as_const().is_none();
        if indirect {
            let target = self.reg(a.target)?;
            let field = Opnd::Mem(Addr::context(offset::NEXT_PC));
            self.x86(
                Code::Mov_rm64_r64,
                &[field, Opnd::Op(0, Size::B8)],
                smallvec![RaOperand::reg_use(target)],
            );
        }
        let mut end = End { indirect, after: a.after.unwrap_or_default(), ..End::default() };
        let mut ops = Ops::new();
        let mut placed = 0u16;
        let mut flags = None;
        for &(loc, value) in &a.varmap {
            let Loc::Gpr(g) = loc else {
                flags = Some(value);
                continue;
            };
            placed |= 1 << g.number();
            if g == Gpr::RSP {
                end.rsp = self.new_stack_pointer(value, &mut ops)?;
                continue;
            }
            match self.survey.resolve(value) {
                Operand::Const(c) => end.consts.push((g.number() as u8, c)),
                value => {
                    let r = self.reg(value)?;
                    ops.push(RaOperand::reg_fixed_use(r, preg(g.number())));
                }
            }
        }
        for g in Gpr::all().filter(|g| *g != Gpr::RSP && placed & 1 << g.number() == 0) {
            // What is touched but not named by the varmap still holds its entry value.
            if self.survey.touched & 1 << g.number() != 0 {
                let r = self.entry_register(g);
                ops.push(RaOperand::reg_fixed_use(r, preg(g.number())));
            }
        }
        match flags {
            Some(f) => {
                self.may_place = true;
                let executed = self.host_flags(f, ARITH_FLAGS);
                self.may_place = false;
                executed?;
            }
            None if self.survey.keep_flags => {
                let packed = self.entry_packed_flags();
                self.restore_flags(packed);
            }
            None => {}
        }
        let kind = if indirect { SiteKind::EndIndirect } else { SiteKind::End };
        self.sites.push(SiteDraft {
            kind,
            anchor,
            record: None,
            progress: true,
            position: self.position(),
        });
        end.site = (self.sites.len() - 1) as u32;
        self.emit(Kind::End(Box::new(end)), ops, None);
        Ok(())
    }

    fn new_stack_pointer(&mut self, value: Operand, ops: &mut Ops) -> Result<EndRsp, LowerError> {
        let v = match self.survey.resolve(value) {
            Operand::Const(c) => return Ok(EndRsp::Const(c)),
            Operand::Value(v) => v,
        };
        if self.survey.is_pinned(v) {
            return Ok(EndRsp::Same);
        }
        if self.vregs[v.index()].is_none()
            && let Some(inst) = self.survey.inst_of(v)
            && inst.op == Op::Add
            && inst.ty == Ty::I64
            && self
                .survey
                .resolve(inst.args[0])
                .as_value()
                .is_some_and(|p| self.survey.is_pinned(p))
            && let Some(c) = self.imm(inst.args[1], Ty::I64)
        {
            return Ok(EndRsp::Plus(c as i32));
        }
        let r = self.demand(v)?;
        ops.push(RaOperand::any_use(r));
        Ok(EndRsp::Op((ops.len() - 1) as u8))
    }

    /// The value a register had at entry, if the version has a parameter for it.
    fn entry_param(&self, loc: Loc) -> Option<Value> {
        let n = (0..self.v.entry_locs.len()).find(|n| self.survey.entry_loc(*n) == Some(loc))?;
        Some(self.v.blocks[0].params[n])
    }

    /// The register with a guest register's value at entry.
    fn entry_register(&mut self, g: Gpr) -> VReg {
        if let Some(p) = self.entry_param(Loc::Gpr(g)) {
            return match self.vregs[p.index()] {
                Some(r) => r,
                None => {
                    let r = self.fresh();
                    self.vregs[p.index()] = Some(r);
                    r
                }
            };
        }
        match self.entry_gpr[g.number()] {
            Some(r) => r,
            None => {
                let r = self.fresh();
                self.entry_gpr[g.number()] = Some(r);
                r
            }
        }
    }

    /// The flags at entry in packed form.
    fn entry_packed_flags(&mut self) -> VReg {
        if let Some(p) = self.survey.flags_param() {
            let r = self.vregs[p.index()].unwrap_or_else(|| self.fresh());
            self.vregs[p.index()] = Some(r);
            return r;
        }
        let r = self.entry_flags.unwrap_or_else(|| self.fresh());
        self.entry_flags = Some(r);
        r
    }

    /// Fills all records.
    pub fn build_records(&mut self) -> Result<(), LowerError> {
        for index in 0..self.records.len() {
            let anchor = self.records[index].0;
            let mut builder = RecordBuilder::default();
            let LeftRaw { registers, flags } = self.left_raw.remove(&index).unwrap_or_default();
            let raw = fixed_registers(&registers);
            builder.flags_in_place = self.before_flags[index];
            self.build_record(anchor, raw, flags, &mut builder)?;
            // Behind the others, which the record knows by their position.
            builder.ops.extend(registers);
            self.records[index].1 = builder.record;
            self.record_ops.push(builder.ops);
        }
        Ok(())
    }

    /// Where the varmap names `d = a + c`, `a` is `d - c`: a register less that must survive for
    /// the sake of the flags of the addition.
    fn find_inverses(&self, anchor: AnchorId, b: &mut RecordBuilder) {
        let varmap = &self.v.anchors[anchor.index()].varmap;
        for d in varmap.iter().filter_map(|(_, o)| self.survey.resolve(*o).as_value()) {
            let Some(inst) = self.survey.inst_of(d).filter(|_| self.vregs[d.index()].is_some())
            else {
                continue;
            };
            let op = match inst.op {
                Op::Add => Op::Sub,
                Op::Sub => Op::Add,
                Op::Xor => Op::Xor,
                _ => continue,
            };
            if let (Operand::Value(a), Operand::Const(c)) = (inst.args[0], inst.args[1])
                && !self.survey.is_pinned(a)
                && !varmap
                    .iter()
                    .any(|(_, o)| self.survey.resolve(*o) == self.survey.resolve(inst.args[0]))
            {
                b.inverse.entry(a).or_insert((op, inst.ty, d, c));
            }
        }
    }

    fn build_record(
        &mut self,
        anchor: AnchorId,
        raw: u16,
        raw_flags: bool,
        b: &mut RecordBuilder,
    ) -> Result<(), LowerError> {
        let a = &self.v.anchors[anchor.index()];
        b.record.target = self.node(a.target, Ty::I64, b)?;
        b.record.after = a.after;
        let mut named = raw;
        let mut flags_named = raw_flags;
        self.find_inverses(anchor, b);
        for &(loc, value) in &a.varmap {
            if let Loc::Gpr(g) = loc {
                if raw & 1 << g.number() != 0 {
                    continue;
                }
                named |= 1 << g.number();
            }
            if loc == Loc::Flags && raw_flags {
                continue;
            }
            flags_named |= loc == Loc::Flags;
            let node = self.node(value, loc.ty(), b)?;
            b.record.locations.push((loc, node));
        }
        for &(register, slot) in &self.entry_locations.saved {
            let node = b.push(Node::Leaf(Location::Slot(slot), Ty::I64));
            b.record.locations.push((Loc::Gpr(Gpr::new(register)), node));
        }
        for g in Gpr::all().filter(|g| *g != Gpr::RSP) {
            if self.survey.touched & !named & 1 << g.number() != 0 {
                let r = self.entry_register(g);
                let node = b.leaf(r, Ty::I64);
                b.record.locations.push((Loc::Gpr(g), node));
            }
        }
        if self.survey.keep_flags && !flags_named && !b.flags_in_place {
            let r = self.entry_packed_flags();
            let node = b.leaf(r, Ty::Flags);
            b.record.locations.push((Loc::Flags, node));
        }
        for store in &a.stores {
            let args = [
                self.node(store.args[0], Ty::I64, b)?,
                self.node(store.args[1], Ty::I64, b)?,
                self.node(store.args[2], store.ty, b)?,
            ];
            b.record.stores.push(RecordStore { ty: store.ty, mem: store.mem, args });
        }
        if b.record.nodes.len() > usize::from(u16::MAX) {
            return Err(LowerError::Unsupported("a varmap of this size".into()));
        }
        Ok(())
    }

    /// The node of an operand: a register where it has one, else the operation on its operands'
    /// nodes.
    fn node(&mut self, o: Operand, ty: Ty, b: &mut RecordBuilder) -> Result<u16, LowerError> {
        let v = match o {
            Operand::Const(c) => return Ok(b.push(Node::Const(c & ty.mask()))),
            Operand::Value(v) => v,
        };
        if let Some(n) = b.known.get(&v) {
            return Ok(*n);
        }
        let (ty, known) = (self.v.ty(v), v);
        let v = self.survey.same_param[v.index()].unwrap_or(v);
        let inverse = b.inverse.get(&v).copied();
        let n = if let Some((op, ty, d, c)) = inverse
            && let Some(r) = self.vregs[d.index()]
        {
            let args = smallvec![b.leaf(r, ty), b.push(Node::Const(c))];
            b.push(Node::Op(op, ty, args))
        } else if self.survey.is_pinned(v) {
            b.push(Node::Leaf(Location::Reg(Gpr::RSP.number() as u8), Ty::I64))
        } else if let Some(r) = self.vregs[v.index()] {
            b.leaf(r, ty)
        } else if b.flags_in_place && self.survey.flags_param() == Some(v) {
            b.push(Node::Leaf(Location::Flags, Ty::Flags))
        } else {
            match self.survey.inst_of(v) {
                _ if self.survey.in_vector[v.index()] => {
                    let r = self.vector_home(v);
                    b.leaf(r, ty)
                }
                Some(inst) if inst.op.is_pure() => {
                    let (op, inst_ty, operands) = (inst.op, inst.ty, inst.args.clone());
                    let (signature, _) = op.signature();
                    let mut args: SmallVec<[u16; 3]> = SmallVec::new();
                    for (i, a) in operands.iter().enumerate() {
                        let arg_ty = match signature.get(i) {
                            Some(dynasour_ir::op::ArgTy::Is(t)) => *t,
                            _ => inst_ty,
                        };
                        args.push(self.node(*a, arg_ty, b)?);
                    }
                    b.push(Node::Op(op, inst_ty, args))
                }
                _ => {
                    let r = self.demand(v)?;
                    b.leaf(r, ty)
                }
            }
        };
        b.known.insert(known, n);
        Ok(n)
    }
}

/// The registers that are used where they are: bit n is register n.
fn fixed_registers(uses: &Ops) -> u16 {
    let fixed = uses.iter().filter_map(|o| match o.constraint() {
        OperandConstraint::FixedReg(r) => Some(r.hw_enc()),
        _ => None,
    });
    fixed.fold(0, |set, n| set | 1 << n)
}

/// A record under construction.
#[derive(Default)]
struct RecordBuilder {
    record: Record,
    ops: Ops,
    known: FxHashMap<Value, u16>,
    /// The entry's flags are still in the host's.
    flags_in_place: bool,
    /// Value -> what it is in terms of a value that has a register: operation, type, value,
    /// constant.
    inverse: FxHashMap<Value, (Op, Ty, Value, u64)>,
}

impl RecordBuilder {
    fn push(&mut self, node: Node) -> u16 {
        self.record.nodes.push(node);
        (self.record.nodes.len() - 1) as u16
    }

    fn leaf(&mut self, r: VReg, ty: Ty) -> u16 {
        let operand = match self.ops.iter().position(|o| o.vreg() == r) {
            Some(i) => i,
            None => {
                self.ops.push(RaOperand::any_use(r));
                self.ops.len() - 1
            }
        };
        self.push(Node::Leaf(Location::Operand(operand as u16), ty))
    }
}
