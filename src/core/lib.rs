//! The memory this process has under management and the operations on it: allocations by address ([`memory`]), the contexts
//! whose work may use them ([`contexts`]), pause and resume ([`transition`]), and the control server ([`server`]).

pub mod contexts;
mod drain;
pub mod engine;
pub mod gate;
pub mod memory;
pub mod server;
pub mod transition;
