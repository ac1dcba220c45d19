//! Where an assumption comes from: what it is about, which guest instruction asked for it, and where on the
//! recorded path that stands.
//!
//! Whoever builds an `assume` says so, and every pass keeps it: a guard that is moved keeps its origins, one that is
//! made of two has those of both. So a guard is told from others by its origins, whatever the passes have made
//! of it, and placements are compared guard by guard.
//!
//! Plain data, no lock. Invariant: an instruction that is no `assume` has none.
//!
//! ```text
//! assume v12 else a1 from branch 0x401136 step 3
//! assume v31 else a1 from branch 0x401136 step 3, alias 0x40114a      two that became one
//! ```

use smallvec::SmallVec;
use std::fmt;

/// What an assumption is about.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum OriginKind {
    /// The direction of a branch.
    Branch,
    /// The target of an indirect jump or call.
    Target,
    /// The target of a return.
    Return,
    /// The value of a register or of a computation.
    Value,
    /// The value of a word of memory.
    Memory,
    /// Accesses that share no byte, or exactly the same ones.
    Alias,
    /// Guest code in memory that the guest may write.
    Code,
    /// What another version assumes at its entry: the facts of its context, the place of an interpreted program.
    Context,
}

impl OriginKind {
    /// All kinds.
    pub const ALL: [OriginKind; 8] = [
        OriginKind::Branch,
        OriginKind::Target,
        OriginKind::Return,
        OriginKind::Value,
        OriginKind::Memory,
        OriginKind::Alias,
        OriginKind::Code,
        OriginKind::Context,
    ];

    /// The name in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            OriginKind::Branch => "branch",
            OriginKind::Target => "target",
            OriginKind::Return => "return",
            OriginKind::Value => "value",
            OriginKind::Memory => "memory",
            OriginKind::Alias => "alias",
            OriginKind::Code => "code",
            OriginKind::Context => "context",
        }
    }
}

/// Where one assumption comes from.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Origin {
    /// What it is about.
    pub kind: OriginKind,
    /// The guest instruction. Of an alias guard: the one at which its access would be executed again.
    pub pc: u64,
    /// The number of its block on the recorded path, from 0. None for what a pass has assumed.
    pub step: Option<u32>,
}

impl fmt::Display for Origin {
    /// `branch 0x401136 step 3`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Origin { kind, pc, step } = self;
        write!(f, "{} {pc:#x}", kind.name())?;
        step.map_or(Ok(()), |step| write!(f, " step {step}"))
    }
}

/// The origins of an `assume`, each once.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Origins(SmallVec<[Origin; 1]>);

impl Origins {
    /// These.
    pub fn of(origin: Origin) -> Origins {
        Origins(smallvec::smallvec![origin])
    }

    /// Adds those of another guard.
    pub fn join(&mut self, others: &Origins) {
        for origin in others.iter() {
            if !self.0.contains(origin) {
                self.0.push(*origin);
            }
        }
    }

    /// Adds one.
    pub fn push(&mut self, origin: Origin) {
        self.join(&Origins::of(origin));
    }

    /// In the order in which they were added.
    pub fn iter(&self) -> impl Iterator<Item = &Origin> {
        self.0.iter()
    }

    /// Are there none? Then nobody has said where the assumption comes from.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
