//! Images: saves a running program to disk, and starts it from there.
//!
//! CRIU writes the process. Its GPU memory is not in there: the library writes the contents of paused memory to the image by itself, and the
//! driver's checkpoint leaves the rest in the process. [`Save`] and [`Load`] have the steps.

mod bare;
mod content;
mod copies;
mod criu;
mod details;
pub mod guard;
pub mod init;
mod load;
mod look;
mod namespace;
mod own_files;
mod patch;
mod placement;
mod prepare;
mod read_ahead;
mod relay;
mod repair;
mod save;
mod shared;
mod surroundings;
mod tree;

pub use copies::{Agreement, Copies, Copy, NoCopies};
pub use criu::Criu;
pub use details::failed as store_failure;
pub use load::{Load, LoadOptions, Loaded, Streams, gpus_of_copies, known_of};
pub use prepare::prepare;
pub use relay::Port;
pub use save::{HowToSave, Save, Saved};
pub use vramctl_store as store;
