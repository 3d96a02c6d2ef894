//! Memory that processes share: by CUDA IPC, or by a descriptor.
//!
//! The owner lends it ([`share`]); a process that opens ([`borrow`]) or imports ([`imports`]) it asks the owner over its control socket, and sets
//! it aside while the owner has paused it ([`aside`]).

pub mod aside;
pub mod borrow;
pub mod imports;
mod lender;
pub mod share;
