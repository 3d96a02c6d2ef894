//! The control channel: how a process that has managed memory is found and told what to do.

pub mod client;
pub mod discovery;
pub mod protocol;
mod server;

pub use server::ensure_running;
