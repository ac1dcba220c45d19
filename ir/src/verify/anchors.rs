//! The verifier's rules on anchors: varmap, total, position, reach, deferred.
//!
//! [`Checker::anchors`] runs after the rules on instructions have found no error, because the
//! analyses need valid block numbers and operand counts. It reads the version and appends errors;
//! the alias oracle lives for one call; no lock.
//!
//! ```text
//! anchor a0 = base.0x10 [rax = v1] stores [store.i64 [v0 - 8], 5]
//! poll else a0; v2 = load.i64 [v0 - 8] !a0    [deferred]: this touches a store, which a0 defers
//! ```

use super::{Checker, Rule, Where};
use crate::alias::{Access, Addresses, Guards, Location, Overlap, Values, access};
use crate::defs::Defs;
use crate::op::Op;
use crate::reach::{AnchorSet, Cfg, Def, Point, Reach, available, definitions};
use crate::types::{AnchorId, Gpr, Loc, Operand, Ty};
use crate::version::{Anchor, Effects, Inst, Term, Version};

impl Checker<'_> {
    pub(super) fn anchors(&mut self, cfg: &Cfg) {
        let version = self.version;
        let reach = Reach::new(version, cfg);
        let used: Vec<(AnchorId, &Anchor, Point)> = version
            .anchors
            .iter()
            .enumerate()
            .filter_map(|(i, a)| Some((AnchorId(i as u32), a, reach.positions[i]?)))
            .collect();
        // An unused anchor may be stale, but passes rename its operands with all others, so its
        // values must exist.
        for (i, anchor) in
            version.anchors.iter().enumerate().filter(|(i, _)| reach.positions[*i].is_none())
        {
            let values = anchor.operands().filter_map(|o| o.as_value());
            for v in values.filter(|v| v.index() >= version.types.len()) {
                self.error(
                    Rule::Varmap,
                    Where::Anchor(AnchorId(i as u32)),
                    format!("{v} does not exist"),
                );
            }
        }
        let defs = definitions(version);
        for (id, anchor, position) in &used {
            let before = self.errors.len();
            self.varmap(*id, anchor);
            self.deferred_shape(*id, anchor);
            if self.errors.len() == before {
                self.position(cfg, &defs, *id, anchor, *position);
            }
        }
        self.total(&used);
        self.reach(cfg, &reach);
        if self.errors.is_empty() && used.iter().any(|(_, a, _)| !a.stores.is_empty()) {
            self.deferred(cfg, &reach, &used);
        }
    }

    fn varmap(&mut self, id: AnchorId, anchor: &Anchor) {
        let at = Where::Anchor(id);
        self.check_ty(Rule::Varmap, at, anchor.target, Ty::I64, format_args!("target"));
        for pair in anchor.varmap.windows(2) {
            if pair[0].0 >= pair[1].0 {
                let what = format!("{} before {}: not sorted or repeated", pair[0].0, pair[1].0);
                self.error(Rule::Varmap, at, what);
            }
        }
        for (loc, operand) in &anchor.varmap {
            if loc.ssa_index().is_none() {
                self.error(Rule::Varmap, at, format!("{loc} is not an SSA location"));
            } else {
                self.check_ty(Rule::Varmap, at, *operand, loc.ty(), format_args!("{loc}"));
            }
        }
    }

    /// Every used anchor names each location that any used anchor names.
    fn total(&mut self, used: &[(AnchorId, &Anchor, Point)]) {
        let locs = |anchor: &Anchor| {
            anchor
                .varmap
                .iter()
                .filter_map(|(l, _)| l.ssa_index())
                .fold(0u64, |set, i| set | 1 << i)
        };
        let all = used.iter().fold(0, |set, (_, anchor, _)| set | locs(anchor));
        for (id, anchor, _) in used {
            let missing = all & !locs(anchor);
            for i in (0..Loc::SSA_COUNT).filter(|i| missing >> i & 1 != 0) {
                let names = |(_, a, _): &&(AnchorId, &Anchor, Point)| locs(a) >> i & 1 != 0;
                let Some((by, ..)) = used.iter().find(names) else { continue };
                let loc = Loc::from_ssa_index(i);
                self.error(
                    Rule::Total,
                    Where::Anchor(*id),
                    format!("{loc} is missing, which {by} names"),
                );
            }
        }
    }

    fn position(
        &mut self,
        cfg: &Cfg,
        defs: &[Option<Def>],
        id: AnchorId,
        anchor: &Anchor,
        position: Point,
    ) {
        for v in anchor.operands().filter_map(|o| o.as_value()) {
            match defs[v.index()] {
                None => {
                    self.error(Rule::Position, Where::Anchor(id), format!("{v} is not defined"))
                }
                Some(def) if !available(cfg, def, position) => {
                    let what = format!(
                        "{v} is not available at {position}, where the anchor's uses begin"
                    );
                    self.error(Rule::Position, Where::Anchor(id), what);
                }
                Some(_) => {}
            }
        }
    }

    fn reach(&mut self, cfg: &Cfg, reach: &Reach<'_>) {
        let mut broken = Vec::new();
        for block in &cfg.order {
            let body = &self.version.blocks[block.index()];
            reach.walk(*block, |point, in_reach| {
                let names = match body.insts.get(point.inst) {
                    Some(inst) => inst.anchor,
                    None => match body.term {
                        Term::Exit(anchor) => Some(anchor),
                        Term::Jump { .. } | Term::Branch { .. } | Term::Guest(_) => None,
                    },
                };
                broken.extend(names.filter(|a| !in_reach.contains(*a)).map(|a| (a, point)));
            });
        }
        for (anchor, point) in broken {
            let from =
                reach.positions[anchor.index()].map_or(String::new(), |p| format!(" since {p}"));
            self.error(
                Rule::Reach,
                Where::Point(point),
                format!("{anchor} is out of reach: an effect lies{from}"),
            );
        }
    }

    /// The operand types of deferred stores.
    fn deferred_shape(&mut self, id: AnchorId, anchor: &Anchor) {
        let at = Where::Anchor(id);
        for (i, store) in anchor.stores.iter().enumerate() {
            let store_number = i + 1;
            if !store.ty.is_machine_int() || !matches!(store.mem.scale, 1 | 2 | 4 | 8) {
                let what = format!("deferred store {store_number}, not a store");
                self.error(Rule::Deferred, at, what);
            }
            let types = [("base", Ty::I64), ("index", Ty::I64), ("value", store.ty)];
            for (operand, (part, ty)) in store.args.iter().zip(types) {
                let role = format_args!("deferred store {store_number}, {part}");
                self.check_ty(Rule::Type, at, *operand, ty, role);
            }
        }
    }

    /// Rules (a) and (b).
    fn deferred(&mut self, cfg: &Cfg, reach: &Reach<'_>, used: &[(AnchorId, &Anchor, Point)]) {
        let version = self.version;
        let defs = Defs::of(version);
        let values = Values { defs: &defs, replaced: &[] };
        let mut addresses = Addresses::default();
        let pending: Vec<(AnchorId, Vec<Location>)> = used
            .iter()
            .filter(|(_, a, _)| !a.stores.is_empty())
            .map(|(id, a, _)| {
                let locate = |s: &crate::DeferredStore| {
                    addresses.locate_parts(&values, &s.mem, s.args[0], s.args[1], s.ty.bytes())
                };
                (*id, a.stores.iter().map(locate).collect())
            })
            .collect();
        if !version.context.private_memory() {
            self.return_addresses(&values, used);
        }
        // The guards that hold at the end of each block, from which its children in the dominator
        // tree start.
        let mut at_end: Vec<Guards> = vec![Guards::default(); version.blocks.len()];
        for block in &cfg.order {
            let body = &version.blocks[block.index()];
            let parent = cfg.parent(*block);
            addresses
                .continue_with(parent.map_or_else(Guards::default, |p| at_end[p.index()].clone()));
            let mut found = Vec::new();
            reach.walk(*block, |point, in_reach| {
                let Some(inst) = body.insts.get(point.inst) else { return };
                if let Some(touch) = Touch::of(version, &values, &mut addresses, inst) {
                    for (id, stores) in &pending {
                        let what = stores.iter().find_map(|s| touch.conflict(&addresses, s));
                        if let Some(what) = what
                            && is_pending(version, cfg, reach, in_reach, *id, point)
                        {
                            found.push((point, format!("{what}, which {id} defers")));
                        }
                    }
                }
                if inst.op == Op::Assume {
                    addresses.learn(&values, inst.args[0]);
                }
            });
            at_end[block.index()] = addresses.guards();
            for (point, what) in found {
                self.error(Rule::Deferred, Where::Point(point), what);
            }
        }
    }

    /// Rule (a) if `private_memory` is not assumed.
    fn return_addresses(&mut self, values: &Values, used: &[(AnchorId, &Anchor, Point)]) {
        let stack = StackValues::new(self.version, values);
        for (id, anchor, _) in used {
            for (i, store) in anchor.stores.iter().enumerate() {
                let pushed = store.ty == Ty::I64
                    && store.args[1] == Operand::Const(0)
                    && store.args[2].as_const().is_some()
                    && stack.contains(values.root(store.args[0]).0);
                if !pushed {
                    let what = format!(
                        "deferred store {} is not a pushed return address, and private_memory is \
                            not assumed",
                        i + 1
                    );
                    self.error(Rule::Deferred, Where::Anchor(*id), what);
                }
            }
        }
    }
}

/// May the anchor still be taken, with its stores not performed, during or after the instruction at
/// `point`? It may if it is in reach there and a path leads to one of its uses without passing its
/// position, where it would be set anew.
fn is_pending(
    version: &Version,
    cfg: &Cfg,
    reach: &Reach<'_>,
    in_reach: &AnchorSet,
    anchor: AnchorId,
    point: Point,
) -> bool {
    let Some(position) = reach.positions[anchor.index()].filter(|_| in_reach.contains(anchor))
    else {
        return false;
    };
    let uses = &reach.uses[anchor.index()];
    if uses.iter().any(|u| u.block == point.block && u.inst >= point.inst) {
        return true;
    }
    let mut seen = vec![false; version.blocks.len()];
    // In the position's own block the position comes before every use, so entering that block
    // passes it.
    seen[position.block.index()] = true;
    let mut stack = vec![point.block];
    while let Some(b) = stack.pop() {
        for next in crate::reach::successors(&version.blocks[b.index()].term) {
            if cfg.is_reachable(next) && !std::mem::replace(&mut seen[next.index()], true) {
                if uses.iter().any(|u| u.block == next) {
                    return true;
                }
                stack.push(next);
            }
        }
    }
    false
}

/// The effect of an instruction on pending stores.
enum Touch {
    /// Orders memory.
    Fence,
    /// Accesses memory of unknown extent.
    Unknown,
    /// Accesses this location; the flag says whether it is a store, which ends a pending store that
    /// it covers.
    Access(Location, bool),
}

impl Touch {
    fn of(
        version: &Version,
        values: &Values,
        addresses: &mut Addresses,
        inst: &Inst,
    ) -> Option<Touch> {
        let effects = inst.native.and_then(|n| version.natives.get(n.index())).map(|n| n.effects);
        if effects.is_some_and(|e| e.intersects(Effects::FENCE | Effects::LOCKED)) {
            return Some(Touch::Fence);
        }
        let here = match access(version, inst) {
            Access::None => return None,
            Access::Read(size) | Access::Write(size) => addresses.locate(values, inst, size),
            Access::ReadUnknown | Access::Barrier => None,
        };
        Some(here.map_or(Touch::Unknown, |here| Touch::Access(here, inst.op == Op::Store)))
    }

    /// The conflict with a pending store, if there may be one.
    fn conflict(&self, addresses: &Addresses, pending: &Location) -> Option<&'static str> {
        let (here, kills) = match self {
            Touch::Fence => return Some("a fence or locked operation passes a store"),
            Touch::Unknown => return Some("an access of unknown extent may touch a store"),
            Touch::Access(here, kills) => (here, *kills),
        };
        match addresses.overlap(pending, here) {
            Overlap::Disjoint => None,
            // The pending store is performed here, or this store overwrites it.
            Overlap::Covered if kills => None,
            Overlap::Covered | Overlap::Partial => Some("this touches a store"),
            Overlap::Unknown => Some("this may touch a store"),
        }
    }
}

/// The values that are the guest's stack pointer plus a constant, also through block parameters.
struct StackValues(Vec<bool>);

impl StackValues {
    fn new(version: &Version, values: &Values) -> StackValues {
        let rsp = Loc::Gpr(Gpr::RSP);
        let mut derived = vec![false; version.types.len()];
        // Assume it for all parameters but the entry's, then withdraw it until the table is
        // consistent.
        for (b, block) in version.blocks.iter().enumerate() {
            for (i, v) in block.params.iter().enumerate() {
                derived[v.index()] =
                    if b == 0 { version.entry_locs.get(i) == Some(&rsp) } else { true };
            }
        }
        let mut changed = true;
        while changed {
            changed = false;
            for block in &version.blocks {
                let edges = block.term.edges();
                for (param, arg) in
                    edges.flat_map(|(to, args)| version.blocks[to.index()].params.iter().zip(args))
                {
                    let stays =
                        values.root(*arg).0.as_value().is_some_and(|root| derived[root.index()]);
                    if derived[param.index()] && !stays {
                        derived[param.index()] = false;
                        changed = true;
                    }
                }
            }
        }
        StackValues(derived)
    }

    fn contains(&self, root: Operand) -> bool {
        root.as_value().is_some_and(|v| self.0[v.index()])
    }
}
