//! What a guest is: ELF images, address space, CPU state, decoding and lifting (docs/design.md,
//! "One semantics").
//!
//! | module | what it answers |
//! | --- | --- |
//! | [`image`] | Can this file be executed, and how does it become a process? |
//! | [`space`] | Which addresses belong to guest images, which to the code cache? What is mapped? |
//! | [`context`] | What is the state of one guest thread, as memory? |
//! | [`cost`] | How long does machine code take, roughly? |
//! | [`decode`] | Which instruction stands at this guest pc? |
//! | [`lift`] | What does that instruction mean, as IR? |
//! | [`symbols`] | What do people call this guest address? |
//!
//! The crate knows the machine and the IR's builder. It knows nothing of interpreters, traces or
//! code caches: those are the crates above it.

pub mod context;
pub mod cost;
pub mod decode;
pub mod image;
pub mod lift;
pub mod space;
pub mod symbols;

pub use context::ThreadContext;
