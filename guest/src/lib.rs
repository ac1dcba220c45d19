//! What a guest is: ELF images, address space, CPU state, decoding, lifting (DESIGN sections 1 and 3).

pub mod context;
pub mod decode;
pub mod image;
pub mod lift;
pub mod space;
pub mod symbols;

pub use context::ThreadContext;
