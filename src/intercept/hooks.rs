//! What the program calls in place of the CUDA runtime's functions of the same names.
//!
//! One table (`hooked_functions!`) declares them; the functions here, those that the preloaded library exports, the lookups of
//! the real functions and the list of names all come from it. Each handler is a few lines that forward to
//! [`vramctl_core::memory`] or to the real function. Whatever is not
//! known to be managed goes to the real function, and its result comes back unchanged.
//!
//! Where several copies of the library are loaded, the first answers and the others only forward (`copies`).

use crate::real::originals;
use crate::table::{CudaError, CudaExtent, CudaPitchedPtr, CudaStream};
use crate::{copies, handlers, hooked_functions};
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
                // A panic must not cross into the program. It is a defect; the call is answered as failed.
                panic::catch_unwind(|| {
                    if copies::another_is_first() {
                        // SAFETY: the arguments are handed on as they came.
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

        /// The names of all hooked functions.
        pub const HOOKED: &[&str] = &[$(stringify!($name)),*];
    };
}

hooked_functions!(exports);
