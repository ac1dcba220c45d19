//! A model of one thread, the kernel's queue and the handler.
//!
//! The kernel has instances of a queued signal, and gives the thread one whenever its mask allows,
//! between any two steps of the thread: the handler accepts it. The thread does what the code does
//! that is named at each step: it delivers, changes its mask, returns from the guest's handler, makes
//! a call during which the gate is closed, faults. Every interleaving is explored. Each instance must
//! reach the guest, and the guest must be able to go on.

use std::collections::HashSet;

/// Instances that are sent.
const SENT: u8 = 3;

/// Where the thread is: the next step.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum At {
    /// The guest's code runs. The thread leaves it if a signal is pending, and else as it likes.
    Guest,
    /// A fault is delivered: the frame of one of the six is built. Its handler's mask blocks the
    /// signal.
    Fault,
    /// `deliver_pending` has begun: `pending` becomes 0.
    Deliver,
    /// The accepted signal is looked for, and its frame is built.
    Take,
    /// In the window of [`super::open`]: `pending` is read.
    WindowCheck(Then),
    /// In the window, before the call: if a signal comes here, the call is not made.
    WindowCall(Then),
    /// After the call: the end of `deliver_pending`.
    Delivered,
    /// [`super::Closed::close`] begins.
    Close,
    /// [`super::Closed::close`] has blocked the signals: `pending` is read.
    ClosedCheck,
    /// The gate is about to open again.
    ClosedCall,
    /// [`super::with_all_blocked`] begins.
    Block,
    /// It has asked for the mask, but not blocked the signals.
    Asked,
    /// The mask that was there is about to be set again.
    Restore,
}

/// What follows the window.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Then {
    /// The end of `deliver_pending`.
    Deliver,
    /// `change_mask`: the guest's mask becomes this one.
    Mask(bool),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct State {
    at: At,
    /// Instances in the kernel's queue.
    queued: u8,
    accepted: bool,
    pending: bool,
    /// Does the kernel block the signal?
    kernel_blocks: bool,
    /// Did it, when `with_all_blocked` began?
    kernel_blocked: bool,
    /// Does the guest's mask block the signal?
    guest_blocks: bool,
    /// Instances that the guest has seen.
    seen: u8,
    /// Instances that were dropped, because one was accepted already.
    lost: bool,
}

/// A rule that is left out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Bug {
    /// After a delivery the mask is set whether or not a signal has been accepted.
    OpensAlways,
    /// The handler does not block the others.
    HandlerLeavesOpen,
    /// The window is no window: a signal before the call does not keep the call from being made.
    NoWindow,
    /// A caller that closes the gate does not look whether a signal was accepted before.
    ClosesBlindly,
    /// The guest's mask is opened although it lets an accepted signal in.
    LetsInHeld,
    /// The mask is set before the frame is built.
    OpensEarly,
    /// The mask that is to be set again is asked for before the signals are blocked.
    AsksFirst,
}

/// The kernel gives the thread a signal.
fn handler(state: State, bug: Option<Bug>) -> Option<State> {
    if state.queued == 0 || state.kernel_blocks {
        return None;
    }
    let at = match state.at {
        At::WindowCheck(then) | At::WindowCall(then)
            if bug != Some(Bug::NoWindow) && !is_blind(then, bug) =>
        {
            not_entered(then)
        }
        at => at,
    };
    Some(State {
        at,
        queued: state.queued - 1,
        lost: state.lost || state.accepted,
        accepted: true,
        pending: true,
        kernel_blocks: bug != Some(Bug::HandlerLeavesOpen),
        ..state
    })
}

/// Where the thread goes on if a window's call was not made.
fn not_entered(then: Then) -> At {
    match then {
        Then::Deliver => At::Deliver,
        // The guest's call is made again, after the delivery.
        Then::Mask(_) => At::Guest,
    }
}

/// The steps that the thread can take.
fn steps(state: State, bug: Option<Bug>) -> Vec<State> {
    let to = |at| State { at, ..state };
    match state.at {
        At::Guest if state.pending => vec![to(At::Deliver), to(At::Fault)],
        At::Guest => vec![
            // A thread that was called out finds nothing to deliver.
            to(At::Deliver),
            to(At::Fault),
            // `rt_sigprocmask`, and the return from a handler, which unblocks its signal.
            to(At::WindowCheck(Then::Mask(true))),
            to(At::WindowCheck(Then::Mask(false))),
            // A call during which the gate is closed: `fork`.
            to(At::Close),
            // The helper thread is started.
            to(At::Block),
        ],
        At::Fault => vec![State { guest_blocks: true, ..to(At::Deliver) }],
        At::Deliver => vec![State { pending: false, ..to(At::Take) }],
        At::Take => vec![take(state, bug)],
        At::WindowCheck(then) if state.pending && !is_blind(then, bug) => {
            vec![to(not_entered(then))]
        }
        At::WindowCheck(then) => vec![to(At::WindowCall(then))],
        At::WindowCall(Then::Deliver) => {
            vec![State { kernel_blocks: state.guest_blocks, ..to(At::Delivered) }]
        }
        At::WindowCall(Then::Mask(blocks)) => {
            let lets_in_held = state.accepted && !blocks && bug != Some(Bug::LetsInHeld);
            vec![State {
                kernel_blocks: blocks || lets_in_held,
                guest_blocks: blocks,
                pending: state.pending || state.accepted && !blocks,
                ..to(At::Guest)
            }]
        }
        At::Delivered if state.pending => vec![to(At::Deliver)],
        At::Delivered => vec![to(At::Guest)],
        At::Close => vec![State { kernel_blocks: true, ..to(At::ClosedCheck) }],
        At::ClosedCheck if state.pending && bug != Some(Bug::ClosesBlindly) => vec![to(At::Guest)],
        At::ClosedCheck => vec![to(At::ClosedCall)],
        At::ClosedCall => vec![State { kernel_blocks: state.guest_blocks, ..to(At::Guest) }],
        At::Block => {
            let kernel_blocked = state.kernel_blocks;
            vec![match bug {
                Some(Bug::AsksFirst) => State { kernel_blocked, ..to(At::Asked) },
                _ => State { kernel_blocked, kernel_blocks: true, ..to(At::Restore) },
            }]
        }
        At::Asked => vec![State { kernel_blocks: true, ..to(At::Restore) }],
        At::Restore => vec![State {
            kernel_blocks: state.kernel_blocked,
            kernel_blocked: false,
            ..to(At::Guest)
        }],
    }
}

/// Does this call of the window look at `pending` no more?
fn is_blind(then: Then, bug: Option<Bug>) -> bool {
    then == Then::Deliver && bug == Some(Bug::OpensAlways)
}

/// The frame of the accepted signal is built, if the guest's mask allows.
fn take(state: State, bug: Option<Bug>) -> State {
    let at = At::WindowCheck(Then::Deliver);
    if !state.accepted || state.guest_blocks {
        return State { at, ..state };
    }
    let kernel_blocks = state.kernel_blocks && bug != Some(Bug::OpensEarly);
    if bug == Some(Bug::OpensEarly) && state.kernel_blocks {
        return State { at: At::Take, kernel_blocks, ..state };
    }
    // The guest's handler runs with its own signal blocked.
    let seen = state.seen + 1;
    State { at, accepted: false, guest_blocks: true, kernel_blocks, seen, ..state }
}

/// Explores every state; returns their number, or what is wrong.
fn explore(bug: Option<Bug>) -> Result<usize, String> {
    let start = State {
        at: At::Guest,
        queued: SENT,
        accepted: false,
        pending: false,
        kernel_blocks: false,
        kernel_blocked: false,
        guest_blocks: false,
        seen: 0,
        lost: false,
    };
    let mut seen = HashSet::from([start]);
    let mut todo = vec![start];
    let mut edges = Vec::new();
    while let Some(state) = todo.pop() {
        if state.lost {
            return Err(format!("an instance is lost at {state:?}"));
        }
        for next in steps(state, bug).into_iter().chain(handler(state, bug)) {
            edges.push((next, state));
            if seen.insert(next) {
                todo.push(next);
            }
        }
    }
    // From every state the guest can still get all instances.
    let mut ends: HashSet<State> = seen.iter().filter(|s| s.seen == SENT).copied().collect();
    loop {
        let more: Vec<State> =
            edges.iter().filter(|(to, _)| ends.contains(to)).map(|(_, from)| *from).collect();
        let before = ends.len();
        ends.extend(more);
        if ends.len() == before {
            break;
        }
    }
    match seen.iter().find(|state| !ends.contains(state)) {
        Some(state) => Err(format!("no way on from {state:?}")),
        None => Ok(seen.len()),
    }
}

#[test]
fn every_signal_reaches_the_guest() {
    let states = explore(None).unwrap_or_else(|e| panic!("{e}"));
    assert!(states > 100, "{states} states");
}

#[test]
fn each_rule_is_needed() {
    let bugs = [
        Bug::OpensAlways,
        Bug::HandlerLeavesOpen,
        Bug::NoWindow,
        Bug::ClosesBlindly,
        Bug::LetsInHeld,
        Bug::OpensEarly,
        Bug::AsksFirst,
    ];
    for bug in bugs {
        assert!(explore(Some(bug)).is_err(), "{bug:?} is not noticed");
    }
}
