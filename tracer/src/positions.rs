//! Which values of a path are positions in the program that the guest interprets.
//!
//! A dispatch jumps to where a *fetch* says: a load from the position, or from a table with an index that was
//! loaded from the position. So a value to which such a load adds no more than a constant is a position.
//!
//! ```text
//!   op = load32 [pc]; jmp [table + op * 8]          pc
//!   op = load64 [op]; jmp [op + 16]                 each op
//! ```
//!
//! A position that is loaded from a field of an object, such as that to which an interpreted function returns,
//! is another one the next time, and so is the object. It says where the program is by itself, whatever object it
//! comes from.
//!
//! Data: none; the caller has the definitions. Callers: [`crate::guests`], for itself and for [`crate::build`]; no lock.

use crate::definitions::Definitions;
use dynasour_ir::{Op, Operand, Value};
use rustc_hash::FxHashSet;

/// Most values visited for a jump's target (guess; bounds the time of a search).
const MOST_VISITED: usize = 40;

/// The positions from which the targets of these jumps are fetched, without what is added to them.
pub(crate) fn positions(defs: &Definitions<'_>, targets: &[Operand]) -> FxHashSet<Value> {
    let mut found = FxHashSet::default();
    for target in targets {
        let mut work = vec![*target];
        for _ in 0..MOST_VISITED {
            let Some(operand) = work.pop() else { break };
            let Operand::Value(v) = operand else { continue };
            let Some(inst) = defs.inst(v).filter(|i| i.op == Op::Load || i.op.is_pure()) else {
                continue;
            };
            if inst.op != Op::Load {
                work.extend_from_slice(&inst.args);
            } else if inst.args[1].as_const().is_none() {
                // An element of a table.
                work.push(inst.args[1]);
            } else if let Some(root) = defs.root(inst.args[0]) {
                match defs.inst(root).filter(|i| i.op.is_pure()) {
                    None => drop(found.insert(root)),
                    Some(sum) if sum.op == Op::Add => {
                        work.extend(sum.args.iter().copied().filter(|arg| is_scaled(defs, *arg)))
                    }
                    Some(_) => {}
                }
            }
        }
    }
    found
}

/// Is the operand the offset of an element in a table?
fn is_scaled(defs: &Definitions<'_>, operand: Operand) -> bool {
    let inst = operand.as_value().and_then(|v| defs.inst(v));
    inst.is_some_and(|inst| matches!(inst.op, Op::Shl | Op::Mul))
}
