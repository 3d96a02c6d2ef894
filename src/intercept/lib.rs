//! What the program's calls find: the CUDA functions that are answered here ([`hooks`]), and the functions of the library's
//! own: the C ABI ([`abi`]) and that of `torch_memory_saver` ([`tms`]).
//!
//! Nothing here has a name that the program's linker finds, except the C ABI's: the preloaded library exports the hooks.

pub mod abi;
mod copies;
mod handlers;
pub mod hooks;
mod real;
pub mod table;
pub mod tms;
