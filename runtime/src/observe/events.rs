//! What happens to traces, told to the program that has started the guest
//! ([`crate::observe::channel`]).
//!
//! Data: the sender of the process, behind a lock that is taken last: nothing is locked while it is held. It may
//! wait for the receiver, and then other threads that come here wait, too.
//!
//! Invariants: without a subscriber [`emit`] loads one flag and does no more; it is called where traces are
//! made, linked and left, never in native code. Events are in the order in which they happened in the process.
//! Processes that the guest forks send nothing ([`disconnect`]); they never take the lock, which another thread may
//! have held at the fork. A child made by vfork is part of its parent's memory, and of its events. Not for signal
//! handlers.
//!
//! Example: the guard of a trace fails for the first time:
//! `{"Event":{"deopt":{"version":"t3","exit":2,"guard":"branch@401136.3","pc":4198713,"reason":"guard"}}}`.

use crate::observe::channel::Sender;
use crate::observe::stats::Stats;
use crate::sync::lock;
use dynasour_ir::opt::BrokenPass;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

/// What has happened.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    /// A trace was made.
    Made(Made),
    /// No trace was made of a head.
    Failed {
        /// The head.
        pc: u64,
        /// The reason's name: [`dynasour_tracer::AbortReason`].
        reason: String,
    },
    /// An exit, or the end of a trace, leads elsewhere than to the runtime from now on.
    Linked {
        /// The trace that it leaves.
        from: String,
        /// Its number among the exits of this trace.
        exit: u32,
        /// Where it leads.
        to: Target,
    },
    /// A trace is not entered any more.
    Invalidated {
        /// The trace.
        version: String,
        /// Its head.
        pc: u64,
        /// Why.
        why: Why,
    },
    /// A trace that was invalidated is entered again: its guest code is what it was.
    Revived {
        /// The trace.
        version: String,
        /// Its head.
        pc: u64,
    },
    /// A trace was left before its end, and the runtime has rebuilt the guest's state. (An exit that was linked leads
    /// to native code without the runtime, and there is no event.)
    Deopt {
        /// The trace.
        version: String,
        /// The number of the exit among those of the trace.
        exit: u32,
        /// The guard that failed, as in [`Guard::site`]; none for other reasons.
        guard: Option<String>,
        /// The guest's pc, where it goes on.
        pc: u64,
        /// Why.
        reason: Reason,
    },
    /// All traces were dropped, and the code cache is empty.
    Flush,
    /// A pass or a policy says something ([`note`]).
    Note {
        /// What it says.
        text: String,
    },
}

/// A trace that was made.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Made {
    /// The name of its version: `t1`, `t2`, …
    pub version: String,
    /// The guest pc at which it starts.
    pub pc: u64,
    /// Is it a loop?
    pub is_loop: bool,
    /// If it was made for an exit of another trace: that trace, and the number of the exit.
    pub side_of: Option<(String, u32)>,
    /// Guest instructions on its path.
    pub guest_instructions: u64,
    /// Instructions of its IR.
    pub ir_instructions: u64,
    /// Its guards.
    pub guards: Vec<Guard>,
    /// Bytes of native code.
    pub code_bytes: u64,
    /// Nanoseconds that building, optimising and emitting it took.
    pub compile_nanoseconds: u64,
}

/// A guard of a trace.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Guard {
    /// The number of its exit among those of the trace.
    pub exit: u32,
    /// Where it comes from: `branch@401136.3` is the branch at 0x401136 in step 3 of the path.
    pub site: String,
}

/// Where a link leads.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// To a trace.
    Trace(String),
    /// To what starts at this pc: a copied block, or guest code in place.
    Code(u64),
    /// Wherever the guest goes: the target is computed, and native code looks it up.
    Computed,
}

/// Why a trace is not entered any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// A page of the guest code that it was made from was written to or unmapped.
    CodeTouched,
    /// A value that it assumes is another one now.
    AssumptionFailed,
    /// The code that it was to replace was faster.
    LostRace,
    /// Its region has too many versions, and its code may have changed.
    Superseded,
    /// The guest's loop goes other ways now than when it was recorded.
    Outdated,
}

/// Why a trace was left.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// A guard failed.
    Guard,
    /// A guard was made to fail (`--chaos`).
    Chaos,
    /// An access to memory or an instruction faulted.
    Fault,
    /// A signal had arrived.
    Poll,
}

/// What a guest's process tells the one that has started it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Message {
    /// Something has happened that the receiver wants to know.
    Event(Event),
    /// The counts at the end.
    Statistics(Value),
    /// A pass has broken a version, of which no trace was made.
    Broken {
        /// The pass, or the placement.
        pass: String,
        /// The version.
        version: String,
        /// What is wrong.
        why: String,
    },
    /// The guest was not started.
    NotStarted {
        /// As of [`crate::RunError::exit_status`].
        status: i32,
        /// What is wrong.
        why: String,
    },
}

/// Where messages go.
static SENDER: OnceLock<Mutex<Sender>> = OnceLock::new();
/// Is there a receiver?
static IS_CONNECTED: AtomicBool = AtomicBool::new(false);
/// Does the receiver want events?
static IS_WANTED: AtomicBool = AtomicBool::new(false);

/// Messages of this process go to `sender` from now on, with or without events. Called once, before the guest starts.
pub fn connect(sender: Sender, with_events: bool) {
    if SENDER.set(Mutex::new(sender)).is_ok() {
        IS_WANTED.store(with_events, Ordering::Relaxed);
        IS_CONNECTED.store(true, Ordering::Relaxed);
    }
}

/// In a forked child, which tells nothing.
pub(crate) fn disconnect() {
    IS_WANTED.store(false, Ordering::Relaxed);
    IS_CONNECTED.store(false, Ordering::Relaxed);
}

/// Has someone subscribed to events?
pub(crate) fn are_wanted() -> bool {
    IS_WANTED.load(Ordering::Relaxed)
}

/// Sends the event that `event` makes, if someone has subscribed.
pub(crate) fn emit(event: impl FnOnce() -> Event) {
    if are_wanted() {
        send(&Message::Event(event()));
    }
}

/// Tells a subscriber `text`: for passes and policies of a program's own. Outside a guest's process it does nothing.
pub fn note(text: impl Into<String>) {
    emit(|| Event::Note { text: text.into() });
}

/// Sends the counts of the run.
pub(crate) fn statistics(stats: impl FnOnce() -> Stats) {
    if IS_CONNECTED.load(Ordering::Relaxed) {
        send(&Message::Statistics(serde_json::to_value(stats()).unwrap_or_default()));
    }
}

/// Reports a pass that has broken a version.
pub(crate) fn broken(broken: &BrokenPass) {
    let BrokenPass { pass, version, why } = broken;
    send(&Message::Broken { pass: pass.to_string(), version: version.clone(), why: why.clone() });
}

/// Sends a message, if there is someone to tell.
pub fn send(message: &Message) {
    if !IS_CONNECTED.load(Ordering::Relaxed) {
        return;
    }
    let (Some(sender), Ok(text)) = (SENDER.get(), serde_json::to_vec(message)) else { return };
    if lock(sender).send(&text).is_err() {
        disconnect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::channel::channel;
    use crate::testing::in_child;
    use std::time::Duration;

    #[test]
    fn messages_survive_the_way() {
        let status = in_child(|| {
            let (sender, mut receiver) = channel().expect("memory");
            emit(|| unreachable!("nobody has subscribed"));
            connect(sender, true);
            emit(|| Event::Flush);
            note("hello");
            let deopt = Event::Deopt {
                version: "t1".into(),
                exit: 2,
                guard: Some("branch@401136.3".into()),
                pc: u64::MAX,
                reason: Reason::Guard,
            };
            emit(|| deopt.clone());
            statistics(Stats::default);
            disconnect();
            emit(|| unreachable!("disconnected"));
            let got: Vec<Message> = (receiver.receive(Duration::ZERO).iter())
                .map(|message| serde_json::from_slice(message).expect("a message"))
                .collect();
            let note = Event::Note { text: "hello".into() };
            let events = [Event::Flush, note, deopt].map(Message::Event);
            assert_eq!(got[..3], events);
            assert!(matches!(&got[3], Message::Statistics(stats) if stats["fragments"] == 0));
            0
        });
        assert_eq!(status, 0);
    }
}
