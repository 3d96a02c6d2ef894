//! What a library needs to live in somebody else's process: nothing unwinds through it into or out of the program ([`guarded`]), its state
//! does not survive a `fork` ([`PerProcess`]), its threads do not take the program's signals ([`worker`]), none of its work is in the
//! driver while the program exits ([`exit`]), its descriptors are not confused with the program's ([`Held`]), all output goes through one
//! [`logger`], and it finds other libraries' functions past its own ([`symbols`]). This crate knows no CUDA.

pub mod allocator;
mod boundary;
mod descriptor;
pub mod directory;
pub mod exit;
pub mod file_lock;
mod fork;
pub mod futex;
mod hash;
pub mod limits;
mod lock;
pub mod logger;
pub mod opens;
mod program;
pub mod reserve;
pub mod schedule;
pub mod stack;
pub mod symbols;
pub mod system;
pub mod thread_exit;
pub mod weak;
pub mod worker;

pub use boundary::guarded;
pub use descriptor::{Held, Identity, Opened, above_standard, is_held, is_one_file};
pub use fork::{PerProcess, on_fork_in_child};
pub use hash::fnv1a;
pub use lock::Unpoison;
pub use program::{own_program, program_of, program_of_words};
