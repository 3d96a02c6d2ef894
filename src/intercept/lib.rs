//! What the program calls: the hooked functions of the CUDA runtime ([`hooks`]) and of the driver ([`entries`]), the lookup functions
//! ([`resolve`]), `dlopen` ([`opens`]), the C ABI ([`abi`]) and the C functions of `torch_memory_saver` ([`tms`]).
//!
//! Of these, only the C ABI and `torch_memory_saver`'s functions are exported symbols; the preloaded library exports the rest.

pub mod abi;
mod alloc;
mod arrays;
mod call;
mod contexts;
mod copies;
mod driver_memory;
mod driver_originals;
pub mod entries;
mod entry;
mod exclude;
pub mod hooks;
mod index;
mod jump;
pub mod launch;
mod limited;
mod linked;
pub mod nccl;
pub mod opens;
mod paused;
mod peers;
mod pools;
mod proc_address;
mod queries;
mod reach;
mod ready;
mod real;
mod reentrancy;
mod refusal;
mod register;
pub mod resolve;
mod result;
mod room;
mod runtimes;
mod share;
mod streams;
pub mod table;
pub mod tms;
mod vmm;
