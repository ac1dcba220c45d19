//! Parameters of a loop's head that together make another one: the pass `chain` passes the two operands of an
//! operation around a loop, beside its result.
//!
//! **Data.** [`Relation`]s, in the [`Cut`](super::cuts::Cut) of a head. They are read off the ways back to the head,
//! hold when control first comes to it, and are dropped when a way back does not keep them. **Callers.** The proof of
//! a version.
//!
//! ```text
//! b0: jump b1(v0, v0, 0)                     b1(v1, v6, v7): v1 is xor.i32 v6, v7
//! b1: … v5 = xor.i32 v3, v4
//!     jump b1(v5, v3, v4)
//! ```

use super::frame::Frame;
use super::term::{Term, Terms};
use crate::op::Op;
use crate::types::{BlockId, Operand, Ty, Value};
use crate::version::{Inst, Term as End, Version};

/// A parameter that is what an operation makes of two others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Relation {
    whole: Value,
    op: Op,
    ty: Ty,
    parts: [Value; 2],
}

impl Relation {
    /// The relations that the ways back to a head suggest, of which there may be several for a parameter.
    pub fn suggested(version: &Version, head: BlockId) -> Vec<Relation> {
        let params = &version.blocks[head.index()].params;
        let defining = |value: Value| {
            let mut insts = version.blocks.iter().flat_map(|block| &block.insts);
            insts.find(|inst| inst.def() == Some(value))
        };
        let ways = version.blocks.iter().filter_map(|block| match &block.term {
            End::Jump { to, args } if *to == head => Some(args),
            _ => None,
        });
        let mut found = Vec::new();
        for args in ways {
            for (whole, arg) in params.iter().zip(args) {
                if let Some(inst) = arg.as_value().and_then(defining) {
                    made_of(inst, params, args, *whole, &mut found);
                }
            }
        }
        found
    }

    /// Of relations that hold, at most one for each parameter, and none of a parameter that another is made of.
    pub fn independent(mut relations: Vec<Relation>) -> Vec<Relation> {
        let mut whole: Vec<Value> = Vec::new();
        let mut parts: Vec<Value> = Vec::new();
        relations.retain(|relation| {
            let is_free = !whole.contains(&relation.whole) && !parts.contains(&relation.whole);
            let is_kept = is_free && relation.parts.iter().all(|part| !whole.contains(part));
            if is_kept {
                whole.push(relation.whole);
                parts.extend(relation.parts);
            }
            is_kept
        });
        relations
    }

    /// The parameter and what it is to be, which are equal if the relation holds.
    pub fn sides(&self, terms: &mut Terms, frame: &Frame) -> Option<(Term, Term)> {
        Some((frame.values[self.whole.index()]?, self.made(terms, frame)?))
    }

    /// Gives the parameter its value.
    pub fn establish(&self, terms: &mut Terms, frame: &mut Frame) {
        frame.values[self.whole.index()] = self.made(terms, frame);
    }

    fn made(&self, terms: &mut Terms, frame: &Frame) -> Option<Term> {
        let [one, two] = self.parts.map(|part| frame.values[part.index()]);
        Some(terms.pure(self.op, self.ty, &[one?, two?]))
    }
}

/// The relations that an instruction shows that makes an argument of the head of two others.
fn made_of(
    inst: &Inst,
    params: &[Value],
    args: &[Operand],
    whole: Value,
    found: &mut Vec<Relation>,
) {
    if !matches!(inst.op, Op::Add | Op::Xor | Op::Or) {
        return;
    }
    let passing = |operand: Operand| {
        let places = params.iter().zip(args).filter(move |(_, arg)| **arg == operand);
        places.map(|(param, _)| *param).filter(move |param| *param != whole)
    };
    let [one, two] = inst.args[..] else { return };
    for one in passing(one) {
        let others = passing(two).filter(|other| *other != one);
        let relation = |other| Relation { whole, op: inst.op, ty: inst.ty, parts: [one, other] };
        found.extend(others.map(relation));
    }
}

#[cfg(test)]
mod tests {
    use crate::prove::{Claim, Limits, Nobody, Outcome, Right, Verdict, prove};
    use crate::text;

    /// A loop that hashes with `op`, and the same regrouped; the regrouped one passes `first` and `neutral` to its head,
    /// and is at `later` after an iteration.
    fn regrouped(op: &str, [first, neutral, later]: [&str; 3]) -> Outcome {
        let version = |name: &str, [args, params, joined, next]: [&str; 4]| {
            format!(
                "  version {name} {{
    anchor a0 = base.0x1000 [rax = v3, rcx = v4]
    anchor a1 = base.0x1010 [rax = v7, rcx = v8]
    b0(v0: i64 = rax, v1: i64 = rcx, v2: i64 = rdx):
      jump b1({args})
    b1({params}):
      poll else a0
{joined}
      v6 = mul.i64 v5, v2
      v9 = shr.i64 v5, 7
      v7 = {op}.i64 v6, v9
      v8 = sub.i64 v4, 1
      v10 = ne.i64 v8, 0
      assume v10 else a1
      jump b1({next})
  }}
"
            )
        };
        let params = "v3: i64, v4: i64, v11: i64, v12: i64";
        let joined = format!("      v13 = {op}.i64 v12, v4\n      v5 = {op}.i64 v11, v13");
        let (args, next) = (format!("v0, v1, {first}, {neutral}"), format!("v7, v8, v6, {later}"));
        let plain = format!("      v5 = {op}.i64 v3, v4");
        let one = version("t1", ["v0, v1", "v3: i64, v4: i64", &plain, "v7, v8"]);
        let two = version("t2", [&args, params, &joined, &next]);
        let text = format!("region 0x1000 {{\n{one}{two}}}\n");
        let file = text::file(&text).unwrap_or_else(|e| panic!("{e}"));
        let [one, two] = [0, 1].map(|i| &file.regions[0].versions[i]);
        let claim = Claim { right: Right::Trace(one), version: two, constants: &[] };
        prove(claim, &mut Nobody, Limits::default())
    }

    #[test]
    fn a_loop_that_passes_both_operands_around_is_proven() {
        for op in ["xor", "add", "or"] {
            let outcome = regrouped(op, ["v0", "0", "v9"]);
            assert_eq!(outcome.verdict, Verdict::Proven, "{op}");
        }
    }

    #[test]
    fn operands_that_do_not_make_the_parameter_are_not_taken_for_it() {
        for wrong in [["v1", "0", "v9"], ["v0", "1", "v9"], ["v0", "0", "v5"], ["v0", "0", "v4"]] {
            for op in ["xor", "add", "or"] {
                let outcome = regrouped(op, wrong);
                assert_ne!(outcome.verdict, Verdict::Proven, "{op} {wrong:?}");
            }
        }
    }
}
