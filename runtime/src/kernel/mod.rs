//! The kernel's and the processor's privileged functions, as the guest sees them.
//!
//! A folder imports only those above it in this table (`tests/layers.rs`). Their functions are
//! called by the guest's own thread, except the signal handler, which runs wherever a signal
//! interrupts the thread.
//!
//! | folder | what it does |
//! | --- | --- |
//! | [`release`] | which behaviour the running kernel's version has |
//! | [`xstate`] | the extended state (x87, SSE, AVX, PKRU) in signal frames and in a new process |
//! | `x87_pointer` | the x87 instruction pointer that the guest sees in its extended state |
//! | [`perf_event`] | events of the kernel's that sample a thread |
//! | [`entry`] | makes system calls for the guest, in windows that a signal can interrupt |
//! | [`signal`] | the host's signal handler, accepted and held signals, the guest's frames |
//! | [`process`] | state of a process and its threads; delivery of signals; fork, execve, exit |
//! | [`syscall`] | the guest's system calls, and instructions that the kernel emulates |

pub mod entry;
pub mod perf_event;
pub mod process;
mod release;
pub mod signal;
pub mod syscall;
pub mod x87_pointer;
pub(crate) mod xstate;
