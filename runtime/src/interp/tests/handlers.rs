//! Each operation's handler computes what [`dynasour_ir::semantics`] says.

use super::*;

/// Lowers and runs a block that computes `op` of r8 and r9 into r10; returns r10. With `constant`,
/// the second operand is the constant `args[1]` in place of r9.
fn lowered_result(op: dynasour_ir::Op, ty: Ty, args: [u64; 2], constant: bool) -> u64 {
    use dynasour_ir::op::{ArgTy, ResultTy};
    use dynasour_ir::{Block, Builder, Gpr, GuestTerm, Loc, Operand, Term, Version};
    let mut version = Version::new("base", 0x1000);
    let mut b = Builder::new(&mut version);
    b.at(0x1000);
    let (signature, result) = op.signature();
    let operands: Vec<Operand> = signature
        .iter()
        .enumerate()
        .map(|(i, arg)| {
            let want = if let ArgTy::Is(t) = arg { *t } else { ty };
            if i == 1 && constant {
                return Operand::Const(args[1] & want.mask());
            }
            let full = b.get(Loc::Gpr(Gpr::new(8 + i as u8)));
            b.trunc(want, Ty::I64, full)
        })
        .collect();
    let v = b.pure(op, ty, &operands);
    let from = if let ResultTy::Is(t) = result { t } else { ty };
    let wide = b.zext(Ty::I64, from, v);
    b.put(Loc::Gpr(Gpr::new(10)), wide);
    let insts = b.insts;
    let term = Term::Guest(GuestTerm::Special { pc: 0x1001 });
    version.blocks.push(Block { params: Vec::new(), insts, term });
    let lowered = lower::lower(
        &version,
        None,
        &mut native::NativePool::new(),
        &mut lower::Workspace::default(),
    )
    .unwrap();

    let mut context = ThreadContext::new();
    context.gpr[8..10].copy_from_slice(&args);
    open(&mut context, std::ptr::null(), Watch::All);
    let words = std::ptr::from_mut(&mut *context).cast::<u64>();
    let mut next = lowered.code.as_ptr();
    while !code::ended(next) {
        // SAFETY: the operations of a lowered block, on a context.
        next = unsafe { ((*next).run)(words, next) };
    }
    context.gpr[10]
}

#[test]
fn handlers_compute_what_semantics_says() {
    use dynasour_ir::Op;
    use dynasour_ir::op::ArgTy;
    let mut seed = 3u64;
    let mut random = || {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let v = seed.rotate_left(23);
        if seed >> 62 == 0 { v & 0x8000_0000_ffff_80ff } else { v }
    };
    let mut ops: Vec<Op> =
        Op::PLAIN.into_iter().filter(|op| op.is_pure() && op.signature().0.len() <= 2).collect();
    ops.extend([Ty::I8, Ty::I16, Ty::I32].into_iter().flat_map(|t| [Op::Zext(t), Op::Sext(t)]));
    for op in ops {
        for ty in [Ty::I8, Ty::I16, Ty::I32, Ty::I64] {
            let narrowing =
                matches!(op, Op::Zext(from) | Op::Sext(from) if from.bits() >= ty.bits());
            let swap_too_narrow = op == Op::Bswap && ty.bits() < 32;
            if narrowing
                || swap_too_narrow
                || op == Op::FlagBits
                || op == Op::Trunc && ty == Ty::I64
            {
                continue;
            }
            for _ in 0..200 {
                let args = [random(), random()];
                let cut: Vec<u64> = op
                    .signature()
                    .0
                    .iter()
                    .zip(args)
                    .map(|(arg, v)| v & if let ArgTy::Is(t) = arg { t.mask() } else { ty.mask() })
                    .collect();
                let expected = dynasour_ir::semantics::eval(op, ty, &cut);
                for constant in [false, true] {
                    assert_eq!(
                        lowered_result(op, ty, args, constant),
                        expected,
                        "{op}.{ty} {args:x?} {constant}"
                    );
                }
            }
        }
    }
}
