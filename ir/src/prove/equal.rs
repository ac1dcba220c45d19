//! What has to be equal in a proof: values, flags, memories, executions of natives.
//!
//! Each is first compared at sight; then facts are written into both; then the solver is asked.
//!
//! ```text
//! store.i64 [rdi], zext32 v        store.i64 [rdi], and w 0xffffffff
//! memories that differ by these are the same if the 8 bytes at rdi are
//! ```

use super::facts::Facts;
use super::frame::{Stuck, World};
use super::term::{App, AppNode, Memory, MemoryNode, Node, Term, Terms};
use crate::op::{ArgTy, Cond, FlagOp, Op};
use crate::types::Ty;

impl World<'_> {
    /// The execution that the version has made with the same inputs, if it can be shown; else another one.
    pub fn same_app(&mut self, facts: &Facts, node: AppNode) -> App {
        let candidates = self.executed.get(&node.ip).cloned().unwrap_or_default();
        for app in candidates.iter().rev() {
            let theirs = self.terms.app_node(*app).clone();
            let alike = theirs.in_place == node.in_place
                && theirs.inputs.len() == node.inputs.len()
                && (theirs.inputs.iter().zip(&node.inputs))
                    .all(|(a, b)| self.terms.bits(*a) == self.terms.bits(*b));
            if alike
                && (theirs.inputs.iter().zip(&node.inputs)).all(|(a, b)| self.equal(facts, *a, *b))
                && match (theirs.memory, node.memory) {
                    (Some(a), Some(b)) => self.same_memory(facts, a, b).is_ok(),
                    (a, b) => a == b,
                }
            {
                return *app;
            }
        }
        self.terms.app(node)
    }

    /// Are two terms equal?
    pub fn equal(&mut self, facts: &Facts, one: Term, two: Term) -> bool {
        if one == two {
            return true;
        }
        let (one, two) = (facts.seen(&mut self.terms, one), facts.seen(&mut self.terms, two));
        let goal = self.terms.equal(one, two);
        self.questions.follows(&mut self.terms, facts, goal)
    }

    /// Are two images of the flags equal?
    pub fn equal_flags(&mut self, facts: &Facts, one: Term, two: Term) -> bool {
        if one == two {
            return true;
        }
        let one = facts.rewritten(&mut self.terms, one);
        let two = facts.rewritten(&mut self.terms, two);
        // The same operation on the same operands leaves the same flags, those that are undefined as well.
        if let (Node::Pure(Op::Flags(a), ty, ours), Node::Pure(Op::Flags(b), width, theirs)) =
            (self.terms.node(one).clone(), self.terms.node(two).clone())
            && (a, ty) == (b, width)
        {
            let mut same = |pairs: &[(Term, Term)]| {
                pairs.iter().zip(a.args()).all(|((x, y), arg)| match arg {
                    // Of the flags before these keep CF.
                    ArgTy::Is(Ty::Flags) if matches!(a, FlagOp::Inc | FlagOp::Dec) => {
                        let [x, y] = [*x, *y]
                            .map(|flags| self.terms.pure(Op::Cond(Cond::B), Ty::I64, &[flags]));
                        self.equal(facts, x, y)
                    }
                    ArgTy::Is(Ty::Flags) => {
                        let goal = self.terms.equal_flags(*x, *y);
                        self.questions.follows(&mut self.terms, facts, goal)
                    }
                    _ => self.equal(facts, *x, *y),
                })
            };
            let pairs: Vec<(Term, Term)> =
                ours.iter().copied().zip(theirs.iter().copied()).collect();
            let crossed = || [(ours[0], theirs[1]), (ours[1], theirs[0])];
            if same(&pairs) || Op::Flags(a).is_commutative() && same(&crossed()) {
                return true;
            }
        }
        let goal = self.terms.equal_flags(one, two);
        self.questions.follows(&mut self.terms, facts, goal)
    }

    /// Do two memories hold the same?
    ///
    /// # Errors
    /// It cannot be shown: where.
    pub fn same_memory(&mut self, facts: &Facts, one: Memory, two: Memory) -> Result<(), Stuck> {
        if one == two {
            return Ok(());
        }
        // Both are made from a third one by stores, so they can only differ where those wrote.
        let mut stores = Vec::new();
        let chain = |terms: &Terms, from: Memory| {
            let mut chain = vec![from];
            let mut at = from;
            while let MemoryNode::Store { below, .. } = *terms.memory_node(at) {
                at = below;
                chain.push(at);
            }
            chain
        };
        let (first, second) = (chain(&self.terms, one), chain(&self.terms, two));
        let common = first.iter().find(|memory| second.contains(memory));
        let Some(common) = common else {
            return Err("memory after natives of unknown extent".to_string());
        };
        for way in [&first, &second] {
            for memory in way.iter().take_while(|memory| *memory != common) {
                if let MemoryNode::Store { address, bytes, .. } = *self.terms.memory_node(*memory) {
                    stores.push((address, bytes));
                }
            }
        }
        stores.sort();
        stores.dedup();
        for (address, bytes) in stores {
            let ours = self.read(facts, one, address, bytes);
            let theirs = self.read(facts, two, address, bytes);
            if !self.equal(facts, ours, theirs) {
                let words = self.terms.words(address, 3);
                return Err(format!("{bytes} bytes of memory at {words}"));
            }
        }
        Ok(())
    }
}
