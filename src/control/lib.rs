//! The control channel, by which clients find and control managed processes.
//!
//! Has the protocol's types, the directory of sockets, and the client. The server is in `core`: this crate knows no
//! allocations, so the command line does not link that code.

pub mod absence;
pub mod address;
pub mod client;
pub mod decision;
pub mod descriptors;
pub mod discovery;
pub mod door;
pub mod folder;
pub mod gauge;
mod listeners;
mod presence;
pub mod protocol;
