//! Guard placement: which assumptions a trace makes, and where their guards stand.
//!
//! A trace is right only under assumptions. A [`Placement`] decides three things: what is assumed
//! besides the directions of branches; to which anchor the guard of a branch falls back; and which
//! passes then move, merge or remove guards. All placements run the same programs with
//! the same results. They differ in how many guards are executed, what these cost, and how much is
//! repeated when one fails; `dynasour guards` measures that.
//!
//! ```text
//!               guest             eager                  anchored               hoisted
//! loop head:    mov  (%rdi),%rax  poll else a0           poll else a0           v5 = le.u v1, v2
//!               cmp  %rsi,%rdx    v7 = load [v0] !a0     v7 = load [v0] !a0     assume v5 else a9
//!               ja   out          v5 = le.u v1, v2       v5 = le.u v1, v2       loop: poll else a0
//!               add  %rcx,%rax    assume v5 else a2      v8 = add v7, v3        v7 = load [v0] !a0
//!               mov  %rax,(%rdi)  v8 = add v7, v3        assume v5 else a0      v8 = add v7, v3
//!                                 store [v0], v8 !a2     store [v0], v8 !a0     store [v0], v8 !a0
//! ```
//!
//! | placement | assumes | guards stand | branches fall back to |
//! | --- | --- | --- | --- |
//! | `eager` | stable registers | where the branch was, in every iteration | the branch itself |
//! | `anchored` | the same | before the first dependent use | the latest in reach |
//! | `hoisted` | the same | before the loop if steady | the branch itself, or the loop's entry |
//! | `merged` | the same | one for all on one anchor | the latest in reach |
//! | `control-only` | nothing | as `default` | the branch itself |
//! | `default` | also that stores miss slots | behind one peeled iteration | the branch itself |
//! | `combined` | as `default` | as `default`, then as `merged` | the latest in reach |
//!
//! "Nothing" means nothing about values: the directions of the recorded branches and the targets of
//! indirect jumps are always assumed. All other placements also assume the values on which the
//! dispatch of an interpreter depends, in traces of loops of its program ([`crate::guests`]).
//!
//! Data: none; a placement is a constant, so any thread may use it without a lock. Invariant: each
//! placement makes versions that are equivalent to `base` and transparent.

use crate::policy::RegisterUse;
use dynasour_ir::opt::{self, OptOptions, OptStats};
use dynasour_ir::{Gpr, Version};
use std::fmt;

/// Which anchor the guard of a conditional branch falls back to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BranchAnchor {
    /// An anchor at the branch itself: a failed guard repeats one instruction.
    Own,
    /// The latest anchor that reaches the branch: guards share anchors, and a failed guard repeats
    /// the instructions since.
    InReach,
}

/// A way to choose assumptions and to place their guards. A method must return the same answer at
/// each call.
pub trait Placement: Send + Sync {
    /// The name for `--policy`.
    fn name(&self) -> &'static str;

    /// One line of description.
    fn about(&self) -> &'static str;

    /// Should the trace assume that a register holds `value` at entry, as it did at the sampled
    /// executions of the head?
    fn speculate_register(&self, _gpr: Gpr, value: u64, usage: RegisterUse) -> bool {
        // A guard at the loop's entry makes the register an immediate operand inside. That pays for
        // values that become shift counts or factors. It does not pay for addresses, which differ
        // from call to call; values of 2^16 and above count as addresses (guess).
        !usage.written && usage.expensive && value < 1 << 16
    }

    /// May passes assume that stores through pointers miss the loop's slots?
    fn speculate_aliasing(&self) -> bool {
        true
    }

    /// May loops of interpreted programs ([`crate::guests`]) assume the values that drive their
    /// dispatch?
    fn speculate_guest_loops(&self) -> bool {
        true
    }

    /// The anchor to which the trace builder lets the guards of branches fall back.
    fn branch_anchor(&self) -> BranchAnchor {
        BranchAnchor::Own
    }

    /// The passes that a built trace goes through, in order.
    fn passes(&self) -> &'static [&'static str];

    /// Optimises a built trace. `options` are those of the run; a placement only forbids what they
    /// allow.
    fn optimise(&self, version: &mut Version, options: &OptOptions) -> OptStats {
        let mut options = options.clone();
        options.alias_guards &= self.speculate_aliasing();
        // An access behind a guard may be one that faults unless the guard holds, so the guard
        // stays before it.
        options.delay_past_faults = false;
        opt::run_pipeline(version, self.passes(), &options)
    }
}

impl fmt::Debug for dyn Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The passes that use facts of one iteration only: nothing moves between iterations.
macro_rules! one_iteration {
    ($($then:literal),*) => {
        &[
            "simplify", "params", "forward", "simplify", "params", "dce", $($then,)*
            "sink", "flagparams", "params", "dce",
        ]
    };
}

/// See the table of the module.
pub struct Eager;

impl Placement for Eager {
    fn name(&self) -> &'static str {
        "eager"
    }

    fn about(&self) -> &'static str {
        "each guard where its branch was, in every iteration"
    }

    fn passes(&self) -> &'static [&'static str] {
        one_iteration!()
    }
}

/// See the table of the module.
pub struct Anchored;

impl Placement for Anchored {
    fn name(&self) -> &'static str {
        "anchored"
    }

    fn about(&self) -> &'static str {
        "below the latest anchor that reaches, at the first use"
    }

    fn branch_anchor(&self) -> BranchAnchor {
        BranchAnchor::InReach
    }

    fn passes(&self) -> &'static [&'static str] {
        &[
            "simplify",
            "params",
            "forward",
            "simplify",
            "params",
            "dce",
            "sink",
            "flagparams",
            "params",
            "dce",
            "delay",
        ]
    }
}

/// See the table of the module.
pub struct Hoisted;

impl Placement for Hoisted {
    fn name(&self) -> &'static str {
        "hoisted"
    }

    fn about(&self) -> &'static str {
        "predicates that do not vary in a loop are checked before it"
    }

    fn passes(&self) -> &'static [&'static str] {
        one_iteration!("licm", "hoist", "simplify", "params", "dce")
    }
}

/// The passes of `merged`: `redundant` and `merge` combine guards on one value; `delay` makes
/// guards of one anchor adjacent, and `conjoin` makes one guard of them.
const MERGE: &[&str] = &[
    "simplify",
    "params",
    "forward",
    "simplify",
    "params",
    "dce",
    "redundant",
    "merge",
    "simplify",
    "dce",
    "sink",
    "flagparams",
    "params",
    "dce",
    "delay",
    "conjoin",
];

/// See the table of the module.
pub struct Merged;

impl Placement for Merged {
    fn name(&self) -> &'static str {
        "merged"
    }

    fn about(&self) -> &'static str {
        "guards of one value, then all guards of one anchor, become one"
    }

    fn branch_anchor(&self) -> BranchAnchor {
        BranchAnchor::InReach
    }

    fn passes(&self) -> &'static [&'static str] {
        MERGE
    }
}

/// See the table of the module.
pub struct ControlOnly;

impl Placement for ControlOnly {
    fn name(&self) -> &'static str {
        "control-only"
    }

    fn about(&self) -> &'static str {
        "as default, but nothing is assumed about values"
    }

    fn speculate_register(&self, _gpr: Gpr, _value: u64, _use: RegisterUse) -> bool {
        false
    }

    fn speculate_aliasing(&self) -> bool {
        false
    }

    fn speculate_guest_loops(&self) -> bool {
        false
    }

    fn passes(&self) -> &'static [&'static str] {
        opt::PIPELINE
    }
}

/// See the table of the module.
pub struct Peeled;

impl Placement for Peeled {
    fn name(&self) -> &'static str {
        "default"
    }

    fn about(&self) -> &'static str {
        "one iteration peeled: what it checked need not be checked in the loop"
    }

    fn passes(&self) -> &'static [&'static str] {
        opt::PIPELINE
    }
}

/// See the table of the module.
pub struct Combined;

impl Placement for Combined {
    fn name(&self) -> &'static str {
        "combined"
    }

    fn about(&self) -> &'static str {
        "as default, then one guard for all on one anchor"
    }

    fn branch_anchor(&self) -> BranchAnchor {
        BranchAnchor::InReach
    }

    fn passes(&self) -> &'static [&'static str] {
        &COMBINED
    }
}

/// The default pipeline, followed by the last two passes of [`MERGE`].
const COMBINED: [&str; opt::PIPELINE.len() + 2] = {
    let mut all = ["delay"; opt::PIPELINE.len() + 2];
    let mut i = 0;
    while i < opt::PIPELINE.len() {
        all[i] = opt::PIPELINE[i];
        i += 1;
    }
    all[i + 1] = "conjoin";
    all
};

/// Every placement, in the order of the table.
pub const PLACEMENTS: &[&dyn Placement] =
    &[&Eager, &Anchored, &Hoisted, &Merged, &ControlOnly, &Peeled, &Combined];

/// The placement that is used if the user names none.
pub const DEFAULT: &dyn Placement = &Peeled;

/// The placement with this name.
///
/// # Errors
/// No placement has this name; the message lists all names.
pub fn placement(name: &str) -> Result<&'static dyn Placement, String> {
    PLACEMENTS.iter().find(|p| p.name() == name).copied().ok_or_else(|| {
        let names: Vec<_> = PLACEMENTS.iter().map(|p| p.name()).collect();
        format!("unknown policy; expected one of {}", names.join(", "))
    })
}
