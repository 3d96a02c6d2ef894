//! Plans and runs operations on jobs: pause, resume, swap, suspend and move.
//!
//! The command line uses it, and prints what it returns. This crate prints nothing: whoever runs an operation reports it through an
//! [`Reporter`].

pub mod account;
pub mod audit;
pub mod barrier;
pub mod checkpoint;
pub mod communicators;
pub mod deadline;
pub mod engine;
pub mod failure;
mod figures;
pub mod forecast;
pub mod gpus;
mod hooks;
mod job;
pub mod lock;
pub mod nodes;
pub mod operation;
pub mod outcome;
pub mod parallel;
mod passing;
mod patience;
pub mod plan;
pub mod proc;
pub mod process;
pub mod processes;
pub mod queue;
mod relocate;
mod reporter;
pub mod retry;
mod room;
pub mod shared;
pub mod starting;
mod stuck;
mod suspend;
mod swap;
pub mod target;
pub mod text;

pub use operation::{Hold, Operation, Scope};
pub use outcome::Outcome;
pub use passing::Passing;
pub use plan::{Consent, Left, Plan};
pub use relocate::{Move, Relocation};
pub use reporter::Reporter;
pub use suspend::Suspend;
pub use swap::{Room, Swap, Swapped};
