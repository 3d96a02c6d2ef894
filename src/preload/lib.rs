//! `libvramctl.so`: takes the GPU memory of a running, unmodified program away and gives it back at the same addresses.
//!
//! The library is preloaded into the program (`LD_PRELOAD`), answers its CUDA allocation calls with virtual memory that
//! it tracks by tag, and listens on a Unix socket. To *pause* a tag is to keep its contents elsewhere (or discard them)
//! and give the physical memory back to the driver; to *resume* it is to put new physical memory at the same addresses
//! and bring the contents back. CUDA graphs and captured pointers stay valid, because no address changes.
//!
//! This crate is no more than the exported names; `docs/design.md` says where what they call lives.

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
            // SAFETY: the arguments are handed on as they came.
            unsafe { hooks::$name($($argument),*) }
        }
    )* };
}

vramctl_intercept::hooked_functions!(exports);
