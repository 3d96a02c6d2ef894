//! A simulated GPU: this library stands in for `libcuda.so.1`, and for the part of
//! `libnvidia-ml.so.1` that tells who uses a device's memory. Programs that allocate, copy, capture
//! and replay run on it unchanged on a machine without a GPU, and it enforces what the driver
//! enforces.
//!
//! # The way of a call
//! Every exported function is an entry of the table in [`exports`]: its name, its arguments, what it
//! needs and where it goes. [`driver::call`] counts it ([`faults`]), lets an injected fault happen,
//! checks what it needs (`cuInit`, a context, no capture in the way) and hands it on:
//!
//! - [`device`]: what the devices are and can do;
//! - [`context`]: primary and other contexts, one current per thread, sticky errors;
//! - [`vmm`]: reservations, physical memory, mappings and access; also the ground of plain memory;
//! - [`memory`]: `cuMemAlloc` and its kin, pointer attributes; [`pool`]: memory pools;
//! - [`host`]: pinned and registered host memory;
//! - [`kernel`]: modules and launches, of the kernels that are known here;
//! - [`stream`]: streams, events, and what waits for what; [`mod@copy`]: what streams do;
//! - [`capture`] and [`graph`]: operations that are kept, and run again;
//! - [`nvml`]: the monitoring functions.
//!
//! What the process has is one [`driver::State`] under one lock. What all processes of a simulated
//! machine share is how much of each device's capacity is taken, and by whom: [`machine`].
//!
//! Outside of CUDA's interface there are the environment ([`settings`]) and, for tests, the
//! functions of [`control`].

// Functions are called, and take what they take, as CUDA has it.
#![allow(non_snake_case, clippy::too_many_arguments, clippy::needless_pass_by_value, clippy::cast_lossless)]

pub mod abi;
pub mod capture;
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
pub mod nvml;
pub mod pool;
pub mod settings;
pub mod stream;
pub mod vmm;
