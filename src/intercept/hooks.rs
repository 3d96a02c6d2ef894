//! The functions that the program calls instead of the CUDA runtime's.
//!
//! They are generated from one table, `hooked_functions!`. A handler forwards to [`vramctl_core::memory`] or, for anything that
//! is not managed, to the real function, whose result is returned unchanged.
//!
//! If several copies of the library are loaded, all but the first only forward (`copies`).

use crate::real::originals;
use crate::table::{CudaError, CudaExtent, CudaPitchedPtr, CudaStream, IpcHandle};
use crate::{copies, handlers, hooked_functions, share};
use std::ffi::{c_int, c_uint, c_void};
use std::panic;
use vramctl_core::contexts;
use vramctl_model::code;

macro_rules! exports {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) => $handler:path;)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// As the CUDA runtime's function of this name.
            #[allow(non_snake_case)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> CudaError {
                // A panic must not unwind into the program: the call fails instead.
                panic::catch_unwind(|| {
                    if copies::another_is_first() {
                        // SAFETY: the arguments are passed on unchanged.
                        return unsafe { originals::$name($($argument),*) };
                    }
                    // SAFETY: as above.
                    let answer = unsafe { $handler($($argument),*) };
                    if answer == code::SUCCESS {
                        contexts::note_current();
                    }
                    answer
                })
                .unwrap_or(code::UNKNOWN)
            }
        )*

        /// The names of the hooked functions.
        pub const HOOKED: &[&str] = &[$(stringify!($name)),*];
    };
}

hooked_functions!(exports);
