//! What this process has under management, and what is done with it: allocations by address ([`memory`]), the contexts whose
//! work may use them ([`contexts`]), pause and resume ([`transition`]), and the server that hears of both ([`server`]).

pub mod contexts;
mod drain;
pub mod engine;
pub mod memory;
pub mod server;
pub mod transition;
