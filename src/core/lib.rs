//! The memory this process has under management and the operations on it: allocations by address ([`memory`]), the contexts whose work may
//! use them ([`contexts`]), reports when memory runs out ([`out_of_memory`]), pause and resume ([`transition`]), preparing for a checkpoint
//! (`suspend`), and the control server ([`server`]).

mod allowance;
pub mod cache;
mod connection;
pub mod contexts;
mod drain;
pub mod engine;
pub mod events;
mod free;
pub mod gate;
mod holder;
mod lease;
pub mod memory;
pub mod out_of_memory;
mod quiet;
mod residue;
pub mod server;
mod status;
mod suspend;
mod totals;
pub mod transition;
pub mod watch;
