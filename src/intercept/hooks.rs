//! The functions that the program calls instead of the CUDA runtime's.
//!
//! They are generated from one table, `hooked_functions!`. A handler forwards to [`vramctl_core::memory`] or, for anything that
//! is not managed, to the real function, whose result is returned unchanged. Which runtime that is depends on the caller
//! (`Runtime::of`), so each function is a few instructions that pass the return address, in front of one in Rust.
//!
//! If several copies of the library are loaded, all but the first only forward (`copies`).

use crate::call::{call, passes};
use crate::entry::{jump, pass_caller};
use crate::runtimes::Runtime;
use crate::table::{CudaError, CudaExtent, CudaPitchedPtr, CudaStream, Effect, IpcHandle};
use crate::{alloc, contexts, copies, handlers, hooked_functions, peers, share};
use std::arch::naked_asm;
use std::ffi::{c_int, c_uint, c_void};
use vramctl_host::guarded;
use vramctl_model::code;

macro_rules! exports {
    ($($(#[$doc:meta])* $effect:ident fn $name:ident($($argument:ident: $type:ty),* $(,)?) => $handler:path $(, unless $passes:tt)?;)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// As the CUDA runtime's function of this name.
            #[allow(non_snake_case)]
            #[unsafe(naked)]
            pub unsafe extern "C-unwind" fn $name($($argument: $type),*) -> CudaError {
                naked_asm!(".cfi_startproc", pass_caller!($($argument)*), jump!(), ".cfi_endproc", to = sym behind::$name)
            }
        )*

        /// The Rust functions behind them.
        #[allow(non_snake_case, clippy::wildcard_imports)]
        mod behind {
            use super::*;
            $(
                pub unsafe extern "C-unwind" fn $name($($argument: $type,)* caller: *const c_void) -> CudaError {
                    let Some(runtime) = Runtime::of(caller) else { return without_runtime() };
                    // SAFETY: the arguments are passed on unchanged.
                    let answer = unsafe {
                        let original = || runtime.$name($($argument),*);
                        call(Effect::$effect, passes!($($passes)?), original, || handle!($effect $handler, runtime $($argument)*, caller))
                    };
                    if answer != code::SUCCESS {
                        runtime.has_answered(answer);
                    }
                    answer
                }
            )*
        }

        /// The names of the hooked functions.
        pub const HOOKED: &[&str] = &[$(stringify!($name)),*];
    };
}

/// The answer where no runtime is loaded.
#[cold]
fn without_runtime() -> CudaError {
    // The first call tells of mistakes in the environment.
    guarded(copies::another_is_first);
    code::SHARED_OBJECT_SYMBOL_NOT_FOUND
}

/// Calls the handler, which gets the return address if it allocates.
macro_rules! handle {
    (Allocates $handler:path, $runtime:ident $($argument:ident)*, $caller:ident) => { $handler($runtime, $($argument,)* $caller) };
    ($effect:ident $handler:path, $runtime:ident $($argument:ident)*, $caller:ident) => { $handler($runtime $(, $argument)*) };
}

hooked_functions!(exports);
