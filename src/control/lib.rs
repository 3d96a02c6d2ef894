//! The control channel: how a process that has managed memory is found and told what to do.
//!
//! The protocol's types, the directory of sockets, and the client. The server lives in the program (`core`): nothing here
//! knows of allocations, so the command line links none of that.

pub mod client;
pub mod discovery;
pub mod protocol;
