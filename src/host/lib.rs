//! Living in somebody else's process.
//!
//! What any preloaded library has to get right, whatever it is for: nothing of ours survives a `fork` ([`PerProcess`]),
//! threads of ours do not get the program's signals ([`worker`]), nothing of ours is in the driver while the program ends
//! ([`exit`]), no descriptor of ours is mistaken for the program's ([`Held`]), and there is one way to speak ([`logger`]).
//! This crate knows no CUDA.

mod descriptor;
pub mod exit;
mod fork;
pub mod limits;
pub mod logger;
pub mod worker;

pub use descriptor::{Held, above_standard};
pub use fork::PerProcess;
