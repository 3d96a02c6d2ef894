//! `libvramctl.so`: takes the GPU memory of a running, unmodified program away and gives it back at the same addresses.
//!
//! The library is preloaded into the program (`LD_PRELOAD`), serves its CUDA allocation calls with virtual memory that it
//! tracks by tag, and listens on a Unix socket. *Pausing* a tag saves (or discards) its contents and releases its physical memory
//! to the driver. *Resuming* it maps new physical memory at the same addresses and restores the contents. No address changes, so
//! CUDA graphs and captured pointers stay valid.
//!
//! This crate only exports the symbols; `docs/design.md` describes the code behind them.

use std::ffi::{c_int, c_uint, c_void};
use vramctl_intercept::hooks;
use vramctl_intercept::table::{CudaError, CudaExtent, CudaPitchedPtr, CudaStream};

macro_rules! exports {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) => $handler:path;)*) => { $(
        $(#[$doc])*
        ///
        /// # Safety
        /// As the CUDA runtime's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> CudaError {
            // SAFETY: the arguments are passed on unchanged.
            unsafe { hooks::$name($($argument),*) }
        }
    )* };
}

vramctl_intercept::hooked_functions!(exports);
