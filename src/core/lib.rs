//! The memory this process has under management and the operations on it: allocations by address ([`memory`]), the contexts whose work may
//! use them ([`contexts`]), pause and resume ([`transition`]), preparing for a checkpoint (`suspend`), and the control server ([`server`]). It
//! publishes what happens ([`events`]) and does not know who hears of it.

pub mod cache;
mod connection;
pub mod contexts;
mod detach;
mod door;
mod drain;
pub mod engine;
pub mod events;
pub mod gate;
mod holder;
mod lease;
pub mod limit;
pub mod member;
pub mod memory;
pub mod prefix_cache;
mod quiet;
mod requests;
mod room;
pub mod server;
mod status;
mod store;
mod suspend;
pub mod transition;
