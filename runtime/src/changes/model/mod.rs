//! The protocol of changes of code as an explicit-state model: every interleaving of small programs
//! of two and three threads is explored, and the invariants of [`super`] are checked in each state.
//!
//! A model thread takes the steps of the real code, one at a time. What the real code does under
//! one lock is one step. All data is in the model's state; nothing of the real process is touched.
//!
//! | file | |
//! | --- | --- |
//! | [`state`] | what the threads share, and what each of them knows |
//! | [`steps`] | the operations, step by step |
//! | [`calls`] | those that are system calls, and stores of the host's |
//! | [`dropping`] | dropping code and waiting for other threads, as the dispatcher does |
//! | [`search`] | the exploration |
//! | [`bug`] | bugs that the protocol once had, or would have without one of its rules |
//! | `tests` | programs that hold, and the shortest program that finds each bug |
//!
//! **What is modelled.** Pages with contents (a version that counts up), the guest's rights, the
//! kernel's, and the record; guards, announcements and the exclusive right; blocks of the
//! interpreter (one thread's own), copied blocks (all threads'), fragments that rest and come back,
//! traces that are compiled outside; jumps that are patched into code where it stands; where each
//! thread is, what was posted to it, and which pages were read.
//!
//! **What is checked.** Code that begins to run was read after each operation that has completed
//! and that changed the page's contents or took the right to execute it. A store, a fetch or a
//! system call fails only if the guest's rights forbade it at some time during the operation. A
//! patch stands only in code that is mapped, that the guest may not write to, and that is as it was
//! when it was patched. In each state at least one thread can go on, unless all have ended.

mod bug;
mod calls;
mod dropping;
mod search;
mod state;
mod steps;
mod tests;
