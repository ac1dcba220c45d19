//! The side conditions of the passes, by name: what must hold for a transformation to be right.
//!
//! A pass asks `holds(SideCondition::X, condition)`, whose result is `condition`. In this crate's
//! own tests one side condition can be switched off on the current thread (`without`), so that
//! `holds` returns true for it. [`super`]'s mutation tests do this for each and show that the
//! verifier or the checker ([`crate::eval::check`]) notices. A condition whose loss nothing notices
//! either only decides what pays, and then is not listed here, or shows a hole in the checks.
//!
//! The only data is the thread-local switch of the tests; no lock.
//!
//! ```text
//! if !holds(SideCondition::SinkPrivate, version.context.private_memory()) { return 0 }
//! ```

macro_rules! side_conditions {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// One side condition.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(crate) enum SideCondition { $($(#[$doc])* $name,)* }

        #[cfg(test)]
        impl SideCondition {
            /// All of them.
            pub(crate) const ALL: &[SideCondition] = &[$(SideCondition::$name,)*];
        }
    };
}

side_conditions! {
    /// simplify: facts enter an anchor's varmap at its first use only, because the first use
    /// dominates the others.
    SimplifyFirstUse,
    /// dce: an instruction that has an effect, may fault or is an assume stays.
    DceEffects,
    /// dce: the operands of a live anchor's varmap are used.
    DceVarmapIsUse,
    /// params: a class of parameters is its entry argument only if every back edge keeps it there.
    ParamsInvariant,
    /// params: parameters are one only as long as their back-edge arguments are in one class.
    ParamsSplit,
    /// forward: a load is removed because of an earlier load only with `private_memory`.
    ForwardPrivateLoad,
    /// forward: memory is carried around a loop only with `private_memory`.
    ForwardPrivateLoop,
    /// forward: a store kills every slot that it may touch.
    ForwardKill,
    /// forward: fences and writes of unknown extent kill every slot.
    ForwardBarrier,
    /// forward: a slot is carried around a loop only if it is still known at the loop's end.
    ForwardSurvives,
    /// flagparams: the same operation on both edges.
    FlagsSameOperation,
    /// sink: deferring needs `private_memory`.
    SinkPrivate,
    /// sink: nothing is deferred yet (the anchors' first uses say what was stored before them).
    SinkOnce,
    /// sink: every other access of the loop misses a carried location.
    SinkCarriedDisjoint,
    /// sink: an access that passes a store to be overwritten must miss its bytes.
    SinkPendingDisjoint,
    /// sink: no access of unknown extent, fence or locked operation passes such a store.
    SinkBarrier,
    /// sink: the store that overwrites covers all bytes.
    SinkCovered,
    /// sink: the location was written before in this entry, so performing the store cannot fault.
    SinkWritten,
    /// constants: what an anchor names is a constant only if it is at the anchor's position.
    ConstantsPosition,
    /// constants: no store is deferred, because alias guards and addresses must stay written in the
    /// values that anchors name.
    ConstantsNothingWaits,
    /// facts: where paths meet only what holds on all of them is known.
    FactsJoin,
    /// params: of versions with branches: every edge passes the same operand.
    ParamsTrivial,
    /// redundant: the predicate is known to hold.
    RedundantKnown,
    /// redundant: no store is deferred, because the removed guard may be the proof that an access
    /// misses it.
    RedundantNothingWaits,
    /// inject: the anchor reaches the point.
    InjectReach,
    /// inject: nothing has happened since the entry whose anchor is used.
    InjectUntouched,
    /// inject: nothing outside SSA happens between the start of a block and the anchor whose state
    /// a predecessor takes over.
    InjectHeader,
    /// hoist, licm: what moves out of a loop does not vary in it.
    LoopsSteady,
    /// licm: loads move only with `private_memory`.
    LicmPrivate,
    /// licm: nothing in the loop may write what the load reads.
    LicmDisjoint,
    /// licm: no write of unknown extent, fence or locked operation in the loop.
    LicmBarrier,
    /// merge: the guards speak of the same value.
    MergeSameValue,
    /// merge: no store is deferred, because either guard may be the proof that an access misses it.
    MergeNothingWaits,
    /// delay: no effect outside SSA is passed.
    DelayEffect,
    /// delay: no use of another anchor is passed.
    DelayAnchor,
    /// delay: no access is passed while stores are deferred, because the guard may be the proof
    /// that it misses them.
    DelayDeferred,
    /// delay: a successor is entered from this block only.
    DelayOnlyEntry,
    /// conjoin: the guards fall back to the same anchor.
    ConjoinAnchor,
    /// frames: `private_memory`, or a return address.
    FramesPrivate,
    /// frames: no later access may touch the deferred store.
    FramesDisjoint,
    /// frames: no later access of unknown extent, fence, locked operation or event.
    FramesBarrier,
    /// frames: the location was written before in this entry, so performing the store cannot fault.
    FramesWritten,
    /// inline: the callee's facts about registers are checked.
    InlineContext,
    /// inline: stores that the caller defers may stay deferred through the callee.
    InlinePending,
    /// continuation: no pass has used facts that hold only on the way from the version's entry.
    ContinuationFresh,
    /// continuation: a location mapped to a constant holds it.
    ContinuationCheck,
    /// slots: resolving needs `private_memory`.
    SlotsPrivate,
    /// slots: every access is the slot or misses it.
    SlotsAlone,
    /// slots: no write of unknown extent, fence or locked operation.
    SlotsBarrier,
    /// slots: the load at the entry stays if a load that it replaces may fault.
    SlotsFirstLoad,
    /// monitor: the address is fixed.
    MonitorFixed,
    /// alias oracle: accesses relative to different segments are not compared.
    AliasSegment,
    /// alias oracle: ranges at a constant distance do not overlap.
    AliasDistance,
    /// alias oracle: a guard's distance is enough for both sizes.
    AliasGuardSize,
    /// alias oracle: a guard that always holds says nothing.
    AliasSaysSomething,
    /// alias oracle: the ranges in which two addresses lie do not overlap.
    AliasRanges,
}

/// Does this side condition hold?
#[cfg(not(test))]
#[inline(always)]
pub(crate) fn holds(_side: SideCondition, condition: bool) -> bool {
    condition
}

#[cfg(test)]
pub(crate) use tests::holds;

#[cfg(test)]
pub(crate) mod tests {
    use super::SideCondition;
    use std::cell::Cell;

    thread_local! {
        static OFF: Cell<Option<SideCondition>> = const { Cell::new(None) };
        /// How often the switched-off condition was false.
        static HITS: Cell<u64> = const { Cell::new(0) };
    }

    pub(crate) fn holds(name: SideCondition, condition: bool) -> bool {
        let off = OFF.get() == Some(name);
        if off && !condition {
            HITS.set(HITS.get() + 1);
        }
        condition || off
    }

    /// Runs `f` on this thread as if `name` always held. Also returns how often the condition was
    /// false.
    pub(crate) fn without<T>(name: SideCondition, f: impl FnOnce() -> T) -> (T, u64) {
        OFF.set(Some(name));
        HITS.set(0);
        let result = f();
        OFF.set(None);
        (result, HITS.get())
    }
}
