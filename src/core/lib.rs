//! What this process has under management, and what is done with it: allocations by address ([`memory`]), pause and resume
//! ([`transition`]), and the server that hears of both ([`server`]).

mod drain;
pub mod engine;
pub mod memory;
pub mod server;
pub mod transition;
