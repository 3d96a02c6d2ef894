//! What the program calls: the hooked CUDA functions ([`hooks`]), the C ABI ([`abi`]) and the C functions of
//! `torch_memory_saver` ([`tms`]).
//!
//! Of these, only the C ABI and `torch_memory_saver`'s functions are exported symbols; the preloaded library exports the hooks.

pub mod abi;
mod copies;
mod handlers;
pub mod hooks;
mod real;
pub mod table;
pub mod tms;
