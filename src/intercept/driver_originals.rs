//! The originals of the entries in [`entries`](crate::entries): the functions that the program would have called.
//!
//! They are found in the next library in lookup order, which may be another preloaded one, else in the loaded `libcuda.so.1`, through the
//! next `dlsym`. A missing one returns [`code::NOT_FOUND`].

use crate::driver_functions;
use crate::real::Symbol;
use crate::table::IpcHandle;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::mem;
use vramctl_driver::{
    CUarrayMapInfo, CUdevice, CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle as Handle, CUmemLocation,
    ContextHandle, Green, StreamHandle,
};
use vramctl_model::{StatusCode, code};

macro_rules! originals {
    ($($effect:ident $symbol:ident $name:literal $version:literal $flavour:ident ($($argument:ident: $type:ty),*) $handler:tt;)*) => {
        /// Where they are.
        #[allow(non_upper_case_globals)]
        pub mod symbols {
            use super::Symbol;
            $( pub static $symbol: Symbol = Symbol::of_driver(concat!(stringify!($symbol), "\0")); )*
        }
        $(
        #[allow(non_snake_case, clippy::too_many_arguments)]
        #[inline]
        pub unsafe fn $symbol($($argument: $type),*) -> StatusCode {
            let Some(address) = symbols::$symbol.address() else { return code::NOT_FOUND };
            // SAFETY: the type matches the driver's function; the arguments are the caller's.
            unsafe { mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($($type),*) -> StatusCode>(address.as_ptr())($($argument),*) }
        }
        )*
    };
}
driver_functions!(originals);
