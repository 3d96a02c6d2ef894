//! The functions that the program calls instead of the CUDA runtime's.
//!
//! They are generated from one table, `hooked_functions!`. A handler forwards to [`vramctl_core::memory`] or, for anything that
//! is not managed, to the real function, whose result is returned unchanged.
//!
//! If several copies of the library are loaded, all but the first only forward (`copies`).

use crate::entry::{jump, pass_caller};
use crate::real::originals;
use crate::table::{CudaError, CudaExtent, CudaPitchedPtr, CudaStream, Effect, IpcHandle};
use crate::{copies, handlers, hooked_functions, share};
use std::arch::naked_asm;
use std::ffi::{c_int, c_uint, c_void};
use vramctl_core::contexts;
use vramctl_host::guarded;
use vramctl_model::code;

macro_rules! exports {
    ($($(#[$doc:meta])* $effect:ident fn $name:ident($($argument:ident: $type:ty),* $(,)?) => $handler:path;)*) => {
        $( hook! { $effect $(#[$doc])* $name ($($argument: $type),*) $handler } )*

        /// The Rust functions behind those that allocate.
        #[allow(non_snake_case, clippy::wildcard_imports)]
        mod guarded {
            use super::*;
            $( guard! { $effect $name ($($argument: $type),*) $handler } )*
        }

        /// The names of the hooked functions.
        pub const HOOKED: &[&str] = &[$(stringify!($name)),*];
    };
}

macro_rules! hook {
    (Allocates $(#[$doc:meta])* $name:ident ($($argument:ident: $type:ty),*) $handler:path) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As the CUDA runtime's function of this name.
        #[allow(non_snake_case)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> CudaError {
            naked_asm!(".cfi_startproc", pass_caller!($($argument)*), jump!(), ".cfi_endproc", to = sym guarded::$name)
        }
    };
    ($effect:ident $(#[$doc:meta])* $name:ident ($($argument:ident: $type:ty),*) $handler:path) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As the CUDA runtime's function of this name.
        #[allow(non_snake_case)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> CudaError {
            // SAFETY: the arguments are passed on unchanged.
            unsafe { call(Effect::$effect, || originals::$name($($argument),*), || $handler($($argument),*)) }
        }
    };
}

macro_rules! guard {
    (Allocates $name:ident ($($argument:ident: $type:ty),*) $handler:path) => {
        pub unsafe extern "C" fn $name($($argument: $type,)* caller: *const c_void) -> CudaError {
            // SAFETY: the arguments are passed on unchanged.
            unsafe { call(Effect::Allocates, || originals::$name($($argument),*), || $handler($($argument,)* caller)) }
        }
    };
    ($effect:ident $name:ident $arguments:tt $handler:path) => {};
}

hooked_functions!(exports);

/// Runs a handler. If it panics, the call fails.
#[inline]
fn call(effect: Effect, original: impl FnOnce() -> CudaError, handler: impl FnOnce() -> CudaError) -> CudaError {
    let body = || {
        if copies::another_is_first() {
            return original();
        }
        let answer = handler();
        if answer == code::SUCCESS && effect.shows_the_context() {
            contexts::note_current();
        }
        answer
    };
    guarded(body).unwrap_or(code::UNKNOWN)
}
