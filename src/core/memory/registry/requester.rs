//! Who has asked for memory, and where in the program.

use std::ffi::c_void;
use std::sync::Arc;
use vramctl_config as config;
use vramctl_host::stack::Stack;

/// Who has asked for memory.
#[derive(Debug, Clone)]
pub struct Requester {
    /// The library that has called, by its file name.
    pub library: &'static str,
    /// The call stack. Recorded only for large requests, and only if report files are written (`VRAMCTL_REPORT_DIR`).
    pub stack: Option<Arc<Stack>>,
}

impl Requester {
    /// Only a library.
    pub fn of(library: &'static str) -> Self {
        Self { library, stack: None }
    }

    /// The requester of a request that the calling thread makes now. `caller`: the return address of its call.
    pub fn of_request(library: &'static str, bytes: usize, caller: *const c_void) -> Self {
        /// Smaller requests rarely explain a shortage, and there are too many of them to record each stack.
        const LARGE: usize = 64 << 20;
        const FRAMES: usize = 24;
        let is_reported = bytes >= LARGE && config::report_directory().is_some();
        Self { library, stack: is_reported.then(|| Arc::new(Stack::here(FRAMES, caller as usize))) }
    }
}
