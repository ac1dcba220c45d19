//! Z3 as the solver of proofs (feature `prove`).
//!
//! Terms become bit-vectors, truth values booleans. Flags are six booleans, each with the formula of the
//! manual (Intel SDM vol. 1, 3.4.3.1) where the operation defines it; all others are free. Results of
//! natives are free. What else is free, [`Depth`] says: loads, unless they are what is selected from an array
//! of bytes; sums and products.
//!
//! **Data.** None between questions: each has its own solver, with a bound on Z3's work that does not
//! depend on the machine. **Callers.** One proof on one thread; Z3's context is the thread's.

use super::solver::{Answer, Depth, Solver, State};
use super::term::{Memory, MemoryNode, Node, Symbol, Term, Terms, mask};
use crate::op::{Cond, FlagOp, Op};
use crate::semantics::{AF, CF, OF, PF, SF, ZF};
use crate::types::Ty;
use rustc_hash::{FxHashMap, FxHashSet};
use z3::ast::{Array, BV, Bool};
use z3::{Params, SatResult, Sort};

/// Z3, with this much work for each question (its resource units; 300,000 take about a tenth of a second).
#[derive(Clone, Copy, Debug)]
pub struct Z3 {
    /// The most units.
    pub work: u32,
}

impl Default for Z3 {
    /// Enough for nearly all that is decided at all (measured on 3,288 traces).
    fn default() -> Z3 {
        Z3 { work: 300_000 }
    }
}

impl Solver for Z3 {
    fn follows(&mut self, terms: &Terms, hold: &[Term], goal: Term, depth: Depth) -> Answer {
        let mut encoder = Encoder { depth, ..Encoder::new(terms) };
        let logic = if depth == Depth::Arrays { "QF_ABV" } else { "QF_BV" };
        let solver = z3::Solver::new_for_logic(logic).unwrap_or_default();
        let mut params = Params::new();
        params.set_u32("rlimit", self.work);
        solver.set_params(&params);
        encoder.all(hold.iter().copied().chain([goal]));
        for fact in hold {
            solver.assert(encoder.truth(*fact));
        }
        solver.assert(encoder.truth(goal).not());
        match solver.check() {
            SatResult::Unsat => Answer::Follows,
            SatResult::Unknown => Answer::Unknown,
            SatResult::Sat => match solver.get_model() {
                Some(model) => Answer::Refuted(encoder.state(&model)),
                None => Answer::Unknown,
            },
        }
    }
}

struct Encoder<'a> {
    terms: &'a Terms,
    depth: Depth,
    vectors: FxHashMap<Term, BV>,
    truths: FxHashMap<Term, Bool>,
    flags: FxHashMap<(Term, u64), Bool>,
    memories: FxHashMap<Memory, Array>,
}

impl<'a> Encoder<'a> {
    fn new(terms: &'a Terms) -> Encoder<'a> {
        Encoder {
            terms,
            depth: Depth::Terms,
            vectors: FxHashMap::default(),
            truths: FxHashMap::default(),
            flags: FxHashMap::default(),
            memories: FxHashMap::default(),
        }
    }

    /// Encodes the roots and what they are made of, operands first, so that nothing nests deeply.
    fn all(&mut self, roots: impl Iterator<Item = Term>) {
        let mut work: Vec<Term> = roots.collect();
        let mut found = FxHashSet::default();
        while let Some(term) = work.pop() {
            if !found.insert(term) {
                continue;
            }
            match self.terms.node(term) {
                Node::Const(_) | Node::Symbol(_) | Node::Output(..) => {}
                Node::Pure(_, _, args) => work.extend(args),
                Node::Sum(parts, _) => work.extend(parts.iter().map(|(t, _)| *t)),
                Node::Slice(of, _) => work.push(*of),
                Node::Bytes(parts) => work.extend(parts),
                Node::Load(memory, address) => {
                    work.push(*address);
                    let mut at = *memory;
                    while self.depth == Depth::Arrays
                        && let MemoryNode::Store { below, address, value, .. } =
                            self.terms.memory_node(at)
                    {
                        work.extend([*address, *value]);
                        at = *below;
                    }
                }
            }
        }
        let mut order: Vec<Term> = found.into_iter().collect();
        order.sort();
        for term in order {
            match self.is_flags(term) {
                true => {
                    for bit in [CF, PF, AF, ZF, SF, OF] {
                        self.flag(term, bit);
                    }
                }
                false if self.terms.bits(term) == 1 => {
                    self.truth(term);
                }
                false => {
                    self.vector(term);
                }
            }
        }
    }

    fn is_flags(&self, term: Term) -> bool {
        matches!(self.terms.node(term), Node::Pure(Op::Flags(_), ..))
    }

    fn truth(&mut self, term: Term) -> Bool {
        if let Some(done) = self.truths.get(&term) {
            return done.clone();
        }
        let value = self.truth_of(term);
        self.truths.insert(term, value.clone());
        value
    }

    fn truth_of(&mut self, term: Term) -> Bool {
        match self.terms.node(term).clone() {
            Node::Const(c) => Bool::from_bool(c != 0),
            Node::Pure(op, ty, args) => match (op, ty) {
                (Op::Not, _) => self.truth(args[0]).not(),
                (Op::And, _) => Bool::and(&[self.truth(args[0]), self.truth(args[1])]),
                (Op::Or, _) => Bool::or(&[self.truth(args[0]), self.truth(args[1])]),
                (Op::Xor, _) => self.truth(args[0]).xor(self.truth(args[1])),
                (Op::Eq, Ty::I1) => self.truth(args[0]).iff(self.truth(args[1])),
                (Op::Eq, Ty::Flags) => {
                    let same: Vec<Bool> = [CF, PF, AF, ZF, SF, OF]
                        .map(|bit| self.flag(args[0], bit).iff(self.flag(args[1], bit)))
                        .to_vec();
                    Bool::and(&same)
                }
                (Op::Eq, _) => self.vector(args[0]).eq(self.vector(args[1])),
                (Op::Ne, Ty::I1) => self.truth(args[0]).xor(self.truth(args[1])),
                (Op::Ne, _) => self.vector(args[0]).eq(self.vector(args[1])).not(),
                (Op::LeU, _) => self.vector(args[0]).bvule(self.vector(args[1])),
                (Op::LeS, _) => self.vector(args[0]).bvsle(self.vector(args[1])),
                (Op::LtU, _) => self.vector(args[0]).bvult(self.vector(args[1])),
                (Op::LtS, _) => self.vector(args[0]).bvslt(self.vector(args[1])),
                (Op::Select, _) => {
                    self.truth(args[0]).ite(&self.truth(args[1]), &self.truth(args[2]))
                }
                (Op::Cond(cond), _) => self.condition(cond, args[0]),
                _ => self.free(term).eq(BV::from_u64(1, 1)),
            },
            Node::Slice(of, low) => self.vector(of).extract(low, low).eq(BV::from_u64(1, 1)),
            _ => self.free(term).eq(BV::from_u64(1, 1)),
        }
    }

    /// A term of which nothing is said.
    fn free(&self, term: Term) -> BV {
        BV::new_const(format!("{term:?}"), self.terms.bits(term))
    }

    fn vector(&mut self, term: Term) -> BV {
        if let Some(done) = self.vectors.get(&term) {
            return done.clone();
        }
        let value = self.vector_of(term);
        self.vectors.insert(term, value.clone());
        value
    }

    fn vector_of(&mut self, term: Term) -> BV {
        let bits = self.terms.bits(term);
        if bits == 1 {
            return self.truth(term).ite(&BV::from_u64(1, 1), &BV::from_u64(0, 1));
        }
        match self.terms.node(term).clone() {
            Node::Const(c) => BV::from_u64(c, bits),
            Node::Symbol(_) | Node::Output(..) => self.free(term),
            Node::Sum(parts, offset)
                if self.depth == Depth::Atoms && !matches!(parts[..], [(_, 1)]) =>
            {
                BV::new_const(format!("{parts:?}"), bits).bvadd(BV::from_u64(offset, bits))
            }
            Node::Pure(Op::Mul | Op::MulHighU | Op::MulHighS, ..) if self.depth == Depth::Atoms => {
                self.free(term)
            }
            Node::Sum(parts, offset) => {
                let mut sum = BV::from_u64(offset, bits);
                for (part, factor) in parts {
                    let part = self.vector(part);
                    sum = match factor {
                        1 => sum.bvadd(&part),
                        f if f == mask(bits) => sum.bvsub(&part),
                        f => sum.bvadd(part.bvmul(BV::from_u64(f, bits))),
                    };
                }
                sum
            }
            Node::Slice(of, low) => self.vector(of).extract(low + bits - 1, low),
            Node::Bytes(parts) => {
                let mut whole: Option<BV> = None;
                for part in parts {
                    let part = self.vector(part);
                    whole = Some(whole.map_or(part.clone(), |low| part.concat(&low)));
                }
                whole.unwrap_or_else(|| self.free(term))
            }
            Node::Load(memory, address) if self.depth == Depth::Arrays => {
                let array = self.array(memory);
                let address = self.vector(address);
                let byte = |i: u32| {
                    let at = address.bvadd(BV::from_u64(u64::from(i), 64));
                    array.select(&at).as_bv()
                };
                let mut whole: Option<BV> = None;
                for i in 0..bits / 8 {
                    let Some(part) = byte(i) else { return self.free(term) };
                    whole = Some(whole.map_or(part.clone(), |low| part.concat(&low)));
                }
                whole.unwrap_or_else(|| self.free(term))
            }
            Node::Load(memory, address) => {
                // Each byte is anything, but the same in all loads at this distance.
                let (linear, offset) = self.terms.linear(address);
                let byte = |i: u32| {
                    let at = offset.wrapping_add(u64::from(i));
                    BV::new_const(format!("{memory:?}{linear:?}{at}"), 8)
                };
                let bytes = (0..bits / 8).rev().map(byte);
                bytes.reduce(|high, low| high.concat(&low)).unwrap_or_else(|| self.free(term))
            }
            Node::Pure(op, ty, args) => self.operation(term, op, ty, &args),
        }
    }

    fn operation(&mut self, term: Term, op: Op, ty: Ty, args: &[Term]) -> BV {
        let bits = self.terms.bits(term);
        let number = |value: u64| BV::from_u64(value, bits);
        match op {
            Op::Add => self.vector(args[0]).bvadd(self.vector(args[1])),
            Op::Sub => self.vector(args[0]).bvsub(self.vector(args[1])),
            Op::Neg => self.vector(args[0]).bvneg(),
            Op::Not => self.vector(args[0]).bvnot(),
            Op::Trunc => self.vector(args[0]).extract(bits - 1, 0),
            Op::And => self.vector(args[0]).bvand(self.vector(args[1])),
            Op::Or => self.vector(args[0]).bvor(self.vector(args[1])),
            Op::Xor => self.vector(args[0]).bvxor(self.vector(args[1])),
            Op::Mul => self.vector(args[0]).bvmul(self.vector(args[1])),
            Op::MulHighU | Op::MulHighS => {
                let wide = |v: BV| match op {
                    Op::MulHighU => v.zero_ext(bits),
                    _ => v.sign_ext(bits),
                };
                let product = wide(self.vector(args[0])).bvmul(wide(self.vector(args[1])));
                product.extract(2 * bits - 1, bits)
            }
            Op::Shl | Op::Shr | Op::Sar => self.shift(op, bits, args),
            Op::Rol | Op::Ror => {
                let count = self.vector(args[1]);
                let count = if bits > 8 { count.zero_ext(bits - 8) } else { count };
                let value = self.vector(args[0]);
                if op == Op::Rol { value.bvrotl(&count) } else { value.bvrotr(&count) }
            }
            Op::Bswap => {
                let value = self.vector(args[0]);
                let bytes = (0..bits / 8).map(|i| value.extract(8 * i + 7, 8 * i));
                bytes.reduce(|high, low| high.concat(&low)).unwrap_or(value)
            }
            Op::Popcnt => {
                let value = self.vector(args[0]);
                let ones = (0..bits).map(|i| value.extract(i, i).zero_ext(bits - 1));
                ones.reduce(|a, b| a.bvadd(&b)).unwrap_or(value)
            }
            Op::Clz | Op::Ctz => {
                let value = self.vector(args[0]);
                let one = BV::from_u64(1, 1);
                // The bit that decides last is asked first.
                let order: Vec<u32> = match op {
                    Op::Clz => (0..bits).collect(),
                    _ => (0..bits).rev().collect(),
                };
                order.into_iter().fold(number(u64::from(bits)), |count, i| {
                    let zeros = if op == Op::Clz { bits - 1 - i } else { i };
                    value.extract(i, i).eq(&one).ite(&number(u64::from(zeros)), &count)
                })
            }
            Op::Zext(_) | Op::Sext(_) => {
                let value = self.vector(args[0]);
                let more = bits - self.terms.bits(args[0]);
                if matches!(op, Op::Zext(_)) { value.zero_ext(more) } else { value.sign_ext(more) }
            }
            Op::Insert8Low => self.vector(args[0]).extract(63, 8).concat(self.vector(args[1])),
            Op::Insert8High => {
                let old = self.vector(args[0]);
                old.extract(63, 16).concat(self.vector(args[1])).concat(old.extract(7, 0))
            }
            Op::Insert16 => self.vector(args[0]).extract(63, 16).concat(self.vector(args[1])),
            Op::Select if ty == Ty::Flags => self.free(term),
            Op::Select => self.truth(args[0]).ite(&self.vector(args[1]), &self.vector(args[2])),
            Op::FlagBits => self.flag_bits(args[0]),
            Op::Flags(_) => self.flag_bits(term),
            _ => self.free(term),
        }
    }

    /// A shift.
    fn shift(&mut self, op: Op, bits: u32, args: &[Term]) -> BV {
        let counted = if bits == 64 { 63 } else { 31 };
        let count = self.vector(args[1]).bvand(BV::from_u64(counted, 8));
        let count = if bits > 8 { count.zero_ext(bits - 8) } else { count };
        let value = self.vector(args[0]);
        match op {
            Op::Shl => value.bvshl(&count),
            Op::Shr => value.bvlshr(&count),
            _ => value.bvashr(&count),
        }
    }

    fn flag_bits(&mut self, flags: Term) -> BV {
        let none = BV::from_u64(0, 64);
        [CF, PF, AF, ZF, SF, OF].into_iter().fold(none.clone(), |image, bit| {
            let set = self.flag(flags, bit).ite(&BV::from_u64(bit, 64), &none);
            image.bvor(set)
        })
    }

    fn condition(&mut self, cond: Cond, flags: Term) -> Bool {
        let less = |e: &mut Self| e.flag(flags, SF).xor(e.flag(flags, OF));
        let value = match cond {
            Cond::O | Cond::No => self.flag(flags, OF),
            Cond::B | Cond::Ae => self.flag(flags, CF),
            Cond::E | Cond::Ne => self.flag(flags, ZF),
            Cond::Be | Cond::A => Bool::or(&[self.flag(flags, CF), self.flag(flags, ZF)]),
            Cond::S | Cond::Ns => self.flag(flags, SF),
            Cond::P | Cond::Np => self.flag(flags, PF),
            Cond::L | Cond::Ge => less(self),
            Cond::Le | Cond::G => Bool::or(&[less(self), self.flag(flags, ZF)]),
        };
        if cond as u8 % 2 == 1 { value.not() } else { value }
    }

    /// One flag.
    fn flag(&mut self, flags: Term, bit: u64) -> Bool {
        if let Some(done) = self.flags.get(&(flags, bit)) {
            return done.clone();
        }
        let value = self.flag_of(flags, bit);
        self.flags.insert((flags, bit), value.clone());
        value
    }

    fn flag_of(&mut self, flags: Term, bit: u64) -> Bool {
        let position = bit.trailing_zeros();
        let free = || Bool::new_const(format!("{flags:?}.{position}"));
        match self.terms.node(flags).clone() {
            Node::Const(c) => Bool::from_bool(c & bit != 0),
            Node::Symbol(_) | Node::Output(..) => {
                self.free(flags).extract(position, position).eq(BV::from_u64(1, 1))
            }
            Node::Pure(Op::Select, Ty::Flags, args) => {
                self.truth(args[0]).ite(&self.flag(args[1], bit), &self.flag(args[2], bit))
            }
            Node::Pure(Op::Flags(op), ty, args) => {
                self.defined_flag(op, ty, &args, bit).unwrap_or_else(free)
            }
            _ => free(),
        }
    }

    /// The formula of a flag, where the operation defines it and it is short.
    fn defined_flag(&mut self, op: FlagOp, ty: Ty, args: &[Term], bit: u64) -> Option<Bool> {
        match op {
            FlagOp::FromBits => {
                let image = self.vector(args[0]);
                let position = bit.trailing_zeros();
                return Some(image.extract(position, position).eq(BV::from_u64(1, 1)));
            }
            FlagOp::SetCf if bit == CF => return Some(self.truth(args[1])),
            FlagOp::SetCf => return Some(self.flag(args[0], bit)),
            FlagOp::Inc | FlagOp::Dec if bit == CF => return Some(self.flag(args[1], bit)),
            // A scan of zero sets ZF, or CF; bt changes CF only.
            FlagOp::Bsf | FlagOp::Bsr | FlagOp::Popcnt if bit == ZF => {
                return Some(self.vector(args[0]).eq(BV::from_u64(0, ty.bits())));
            }
            FlagOp::Tzcnt | FlagOp::Lzcnt if bit == CF => {
                return Some(self.vector(args[0]).eq(BV::from_u64(0, ty.bits())));
            }
            FlagOp::Bt if bit == ZF => return Some(self.flag(args[2], bit)),
            FlagOp::Shl | FlagOp::Shr | FlagOp::Sar => {
                return Some(self.shifted(op, ty, args, bit));
            }
            _ => {}
        }
        let bits = ty.bits();
        let top = |v: &BV| v.extract(bits - 1, bits - 1).eq(BV::from_u64(1, 1));
        let fifth = |v: &BV| v.extract(4, 4).eq(BV::from_u64(1, 1));
        let a = self.vector(args[0]);
        let one = BV::from_u64(1, bits);
        let carried = |v: Bool| v.ite(&one, &BV::from_u64(0, bits));
        let adds = matches!(op, FlagOp::Add | FlagOp::Adc | FlagOp::Inc);
        let (b, carry) = match op {
            FlagOp::Inc | FlagOp::Dec => (one.clone(), None),
            FlagOp::Adc | FlagOp::Sbb => (self.vector(args[1]), Some(carried(self.truth(args[2])))),
            FlagOp::Add | FlagOp::Sub | FlagOp::And | FlagOp::Or | FlagOp::Xor => {
                (self.vector(args[1]), None)
            }
            _ => return None,
        };
        let combined = match op {
            FlagOp::Add | FlagOp::Adc | FlagOp::Inc => a.bvadd(&b),
            FlagOp::Sub | FlagOp::Sbb | FlagOp::Dec => a.bvsub(&b),
            FlagOp::And => a.bvand(&b),
            FlagOp::Or => a.bvor(&b),
            _ => a.bvxor(&b),
        };
        let result = match &carry {
            Some(carry) if adds => combined.bvadd(carry),
            Some(carry) => combined.bvsub(carry),
            None => combined,
        };
        let logic = matches!(op, FlagOp::And | FlagOp::Or | FlagOp::Xor);
        Some(match bit {
            ZF => result.eq(BV::from_u64(0, bits)),
            SF => top(&result),
            PF => {
                let parity = (0..8).map(|i| result.extract(i, i)).reduce(|a, b| a.bvxor(&b));
                parity?.eq(BV::from_u64(0, 1))
            }
            CF | OF if logic => Bool::from_bool(false),
            AF if logic => return None,
            AF => fifth(&a.bvxor(&b).bvxor(&result)),
            CF => {
                let wide = |v: &BV| v.zero_ext(1);
                let carry = carry.map_or(BV::from_u64(0, bits + 1), |c| wide(&c));
                let sum = match adds {
                    true => wide(&a).bvadd(wide(&b)).bvadd(&carry),
                    false => wide(&a).bvsub(wide(&b)).bvsub(&carry),
                };
                sum.extract(bits, bits).eq(BV::from_u64(1, 1))
            }
            _ if adds => top(&a.bvxor(&result).bvand(b.bvxor(&result))),
            _ => top(&a.bvxor(&b).bvand(a.bvxor(&result))),
        })
    }

    /// A flag after a shift: that of before, if the count is zero.
    fn shifted(&mut self, op: FlagOp, ty: Ty, args: &[Term], bit: u64) -> Bool {
        let shift = match op {
            FlagOp::Shl => Op::Shl,
            FlagOp::Shr => Op::Shr,
            _ => Op::Sar,
        };
        let bits = ty.bits();
        let result = self.shift(shift, bits, &args[..2]);
        let counted = if bits == 64 { 63 } else { 31 };
        let none = self.vector(args[1]).bvand(BV::from_u64(counted, 8)).eq(BV::from_u64(0, 8));
        let after = match bit {
            ZF => result.eq(BV::from_u64(0, bits)),
            SF => result.extract(bits - 1, bits - 1).eq(BV::from_u64(1, 1)),
            // What the manual leaves undefined may depend on all operands, the flags before among them.
            _ => Bool::new_const(format!("{op:?}{ty}{args:?}.{bit}")),
        };
        none.ite(&self.flag(args[2], bit), &after)
    }

    /// A memory as an array from addresses to bytes.
    fn array(&mut self, memory: Memory) -> Array {
        let mut chain = Vec::new();
        let mut at = memory;
        let mut array = loop {
            if let Some(done) = self.memories.get(&at) {
                break done.clone();
            }
            match *self.terms.memory_node(at) {
                MemoryNode::Store { below, .. } => {
                    chain.push(at);
                    at = below;
                }
                _ => {
                    let (domain, range) = (Sort::bitvector(64), Sort::bitvector(8));
                    break Array::new_const(format!("{at:?}"), &domain, &range);
                }
            }
        };
        for at in chain.into_iter().rev() {
            let MemoryNode::Store { address, bytes, value, .. } =
                self.terms.memory_node(at).clone()
            else {
                continue;
            };
            let (address, value) = (self.vector(address), self.vector(value));
            for i in 0..bytes {
                let place = address.bvadd(BV::from_u64(u64::from(i), 64));
                array = array.store(&place, &value.extract(8 * i + 7, 8 * i));
            }
            self.memories.insert(at, array.clone());
        }
        array
    }

    /// The entry state of a model: registers, and what the terms load from the entry's memory.
    fn state(&mut self, model: &z3::Model) -> State {
        let mut state = State::default();
        let found: Vec<Term> = self.vectors.keys().copied().collect();
        let value = |bv: &BV| model.eval(bv, true).and_then(|v| v.as_u64());
        for term in found {
            let bits = self.terms.bits(term);
            if bits > 64 {
                continue;
            }
            let Some(content) = value(&self.vectors[&term]) else { continue };
            match self.terms.node(term) {
                Node::Symbol(Symbol::Entry(loc)) => state.locs.push((*loc, content)),
                Node::Load(memory, address)
                    if *self.terms.memory_node(*memory) == MemoryNode::Initial(0) =>
                {
                    let address = self.vector(*address);
                    if let Some(address) = value(&address) {
                        state.words.push((address, bits / 8, content));
                    }
                }
                _ => {}
            }
        }
        state.locs.sort();
        state.words.sort();
        state
    }
}
