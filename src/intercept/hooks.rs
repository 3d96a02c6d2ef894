//! The functions that the program calls instead of the CUDA runtime's.
//!
//! They are generated from one table, `hooked_functions!`. A handler forwards to [`vramctl_core::memory`] or, for anything that
//! is not managed, to the real function, whose result is returned unchanged.
//!
//! If several copies of the library are loaded, all but the first only forward (`copies`).

use crate::call::{call, passes};
use crate::entry::{jump, pass_caller};
use crate::real::originals;
use crate::table::{CudaError, CudaExtent, CudaPitchedPtr, CudaStream, Effect, IpcHandle};
use crate::{alloc, handlers, hooked_functions, peers, share};
use std::arch::naked_asm;
use std::ffi::{c_int, c_uint, c_void};

macro_rules! exports {
    ($($(#[$doc:meta])* $effect:ident fn $name:ident($($argument:ident: $type:ty),* $(,)?) => $handler:path $(, unless $passes:tt)?;)*) => {
        $( hook! { $effect $(#[$doc])* $name ($($argument: $type),*) $handler $(, $passes)? } )*

        /// The Rust functions behind those that allocate.
        #[allow(non_snake_case, clippy::wildcard_imports)]
        mod guarded {
            use super::*;
            $( guard! { $effect $name ($($argument: $type),*) $handler $(, $passes)? } )*
        }

        /// The names of the hooked functions.
        pub const HOOKED: &[&str] = &[$(stringify!($name)),*];
    };
}

macro_rules! hook {
    (Allocates $(#[$doc:meta])* $name:ident ($($argument:ident: $type:ty),*) $handler:path $(, $passes:tt)?) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As the CUDA runtime's function of this name.
        #[allow(non_snake_case)]
        #[unsafe(naked)]
        pub unsafe extern "C-unwind" fn $name($($argument: $type),*) -> CudaError {
            naked_asm!(".cfi_startproc", pass_caller!($($argument)*), jump!(), ".cfi_endproc", to = sym guarded::$name)
        }
    };
    ($effect:ident $(#[$doc:meta])* $name:ident ($($argument:ident: $type:ty),*) $handler:path $(, $passes:tt)?) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As the CUDA runtime's function of this name.
        #[allow(non_snake_case)]
        pub unsafe extern "C-unwind" fn $name($($argument: $type),*) -> CudaError {
            // SAFETY: the arguments are passed on unchanged.
            unsafe { call(Effect::$effect, passes!($($passes)?), || originals::$name($($argument),*), || $handler($($argument),*)) }
        }
    };
}

macro_rules! guard {
    (Allocates $name:ident ($($argument:ident: $type:ty),*) $handler:path $(, $passes:tt)?) => {
        pub unsafe extern "C-unwind" fn $name($($argument: $type,)* caller: *const c_void) -> CudaError {
            // SAFETY: the arguments are passed on unchanged.
            unsafe { call(Effect::Allocates, passes!($($passes)?), || originals::$name($($argument),*), || $handler($($argument,)* caller)) }
        }
    };
    ($effect:ident $name:ident $arguments:tt $handler:path $(, $passes:tt)?) => {};
}

hooked_functions!(exports);
