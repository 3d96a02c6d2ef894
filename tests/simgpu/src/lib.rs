//! A simulated GPU. This library stands in for `libcuda.so.1` and for the part of `libnvidia-ml.so.1` that reports memory
//! use. It runs programs that allocate, copy, capture and replay, unchanged, on a machine without a GPU, and enforces the
//! driver's rules.
//!
//! # The path of a call
//! Every exported function is an entry in the table in [`exports`]: its name, its arguments, its requirements and its
//! implementation. [`driver::call`] counts the call, applies injected faults ([`faults`]), checks the requirements
//! (`cuInit`, a context, no conflicting capture) and calls the implementation:
//!
//! - [`device`]: devices and their attributes;
//! - [`context`]: primary and other contexts, one current per thread, sticky errors;
//! - [`vmm`]: reservations, physical memory, mappings and access; plain memory builds on it;
//! - [`sharing`]: memory that several processes use;
//! - [`memory`]: the `cuMemAlloc` family, pointer attributes; [`pool`]: memory pools;
//! - [`host`]: pinned and registered host memory;
//! - [`kernel`]: modules and launches of known kernels; [`waiting`]: those that wait for other processes or the host;
//! - [`stream`]: streams, events and synchronisation; [`mod@copy`]: stream operations; [`shaped`]: copies of several rows and contexts;
//! - [`capture`] and [`graph`]: operations that are recorded and replayed;
//! - [`checkpoint`]: what other processes do to a process;
//! - [`nodes`]: stand-ins for the driver's files;
//! - [`nvml`]: the monitoring functions.
//!
//! All per-process state is one [`driver::State`] under one lock. The processes on a simulated machine share only the use of
//! each device's capacity: [`machine`].
//!
//! Outside of CUDA's interface there are only environment variables ([`settings`]) and, for tests, the functions in
//! [`control`].

// Names and signatures are CUDA's.
#![allow(non_snake_case, clippy::too_many_arguments, clippy::needless_pass_by_value, clippy::cast_lossless)]

pub mod abi;
pub mod array;
pub mod capture;
pub mod checkpoint;
pub mod codes;
pub mod context;
pub mod control;
pub mod copy;
pub mod device;
pub mod driver;
pub mod exports;
pub mod faults;
pub mod graph;
pub mod host;
pub mod kernel;
pub mod machine;
pub mod memory;
pub mod nodes;
pub mod nvml;
pub mod pool;
pub mod restore_thread;
pub mod settings;
pub mod shaped;
pub mod sharing;
pub mod stream;
pub mod vmm;
pub mod waiting;

// As in the library: whoever resumes a program calls the driver while a thread of the program waits with the loader's lock,
// and a driver that needs that, too, would hide who else does.
vramctl_host::own_thread_exit!();
