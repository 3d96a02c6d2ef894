//! `vramctl` takes the GPU memory of a running, unmodified program away and gives it back at the same addresses.
//!
//! The library is preloaded into the program (`LD_PRELOAD`), answers its CUDA allocation calls with virtual memory that
//! it tracks by tag, and listens on a Unix socket. To *pause* a tag is to keep its contents elsewhere (or discard them)
//! and give the physical memory back to the driver; to *resume* it is to put new physical memory at the same addresses
//! and bring the contents back. CUDA graphs and captured pointers stay valid, because no address changes.
//!
//! # From `cudaMalloc` to resume
//!
//! 1. [`interpose`]: the program's `cudaMalloc` finds the symbol of the same name here. What is not to be managed goes
//!    on to the real function.
//! 2. [`memory`]: [`memory::region`] says under which tag the calling thread allocates; the allocation is made and
//!    recorded by its address.
//! 3. [`driver`]: addresses are reserved, physical memory is created, mapped there and made accessible. This is the
//!    only module that calls CUDA's driver.
//! 4. [`control`] hears `pause` from the shell, [`abi`] from C or Python; both ask [`memory`], which waits for the
//!    device's work, has [`backup`] copy the contents to the host, unmaps and releases.
//! 5. A resume does the same the other way round.
//!
//! [`tms`] is the C interface of `torch_memory_saver`, for programs that were written for that.
//!
//! `docs/design.md` has the rules and the reasons.

pub mod abi;
pub mod backup;
pub mod config;
pub mod control;
pub mod driver;
pub mod error;
pub mod interpose;
mod logger;
pub mod memory;
pub mod process;
mod ranges;
pub mod tms;
pub mod units;

pub use error::Error;
