//! Bugs that the protocol once had, or would have without one of its rules: each is a switch of the
//! model.

/// One rule that is broken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bug {
    /// `mprotect` opened guarded pages before it dropped what was made from them.
    ProtectOpensFirst,
    /// `munmap` dropped code only after the call, when another thread could have the addresses
    /// already.
    UnmapDropsLate,
    /// Pages were opened for system calls that write before what was made from them was dropped.
    OutputsOpenFirst,
    /// A fragment came back from rest while the unmapping of its page was under way.
    WakesWhileChanging,
    /// Code that was read before another thread guarded its page was taken for guarded.
    TrustsOtherGuards,
    /// Bytes that were read before a change of mappings was published, and whose page is guarded
    /// after it, count as read after it.
    PublicationIgnored,
    /// The record of a mapping that was forgotten was taken for one that forbids.
    ForgottenForbids,
    /// Plans of traces were spoilt before threads were told to forget what they are made from.
    SpoilsBeforeTelling,
    /// A thread that found nothing left to drop went on while another was dropping it.
    DroppingNotAwaited,
    /// A store opened a guarded page before what was made from it was dropped.
    StoreOpensFirst,
    /// A store of the host's opened a page that another thread executes.
    HostStoreOpens,
    /// Code that is made from an announced range relies on guards and rights.
    AnnouncementIgnored,
    /// Code that was made during a change stays.
    NoSecondDrop,
    /// A new mapping loses guards that another thread has taken since.
    FreshLosesGuards,
    /// Changes are made without the exclusive right.
    NotExclusive,
    /// A patch is written without the exclusive right.
    PatchNotExclusive,
    /// Patches stay when code is dropped.
    PatchStays,
}
