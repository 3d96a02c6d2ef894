//! The functions that the program calls instead of the CUDA runtime's, generated from the table `hooked_functions!`.
//!
//! A handler forwards to [`vramctl_core::memory`] or, for anything that is not managed, to the real function, whose result is returned
//! unchanged. Which runtime that is depends on the caller (`Runtime::of`), so each function is a few instructions that pass the return
//! address, in front of one in Rust.
//!
//! If several copies of the library are loaded, all but the first only forward (`copies`).

use crate::call::{Api, Origin, answer, answer_as};
use crate::entry::{jump, pass_caller};
use crate::peers::Peer;
use crate::runtimes::Runtime;
use crate::table::{CudaError, CudaExtent, CudaPitchedPtr, Effect, Flavour, IpcHandle};
use crate::{alloc, contexts, copies, hooked_functions, peers, share};
use std::arch::naked_asm;
use std::ffi::{c_int, c_uint, c_void};
use vramctl_driver::StreamHandle;
use vramctl_host::guarded;
use vramctl_model::code;

macro_rules! exports {
    ($($effect:ident $name:ident $flavour:ident ($($argument:ident: $type:ty),*) $handler:tt;)*) => {
        $(
            /// The runtime's function of this name.
            ///
            /// # Safety
            /// As the runtime's.
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
                    let origin = Origin { api: Api::Runtime(runtime), effect: Effect::$effect, flavour: Flavour::$flavour, caller };
                    // SAFETY: the arguments are passed on unchanged.
                    let answer = unsafe { answer_as!($handler origin, runtime.$name($($argument),*), ($($argument),*)) };
                    if answer != code::SUCCESS {
                        runtime.note_error(answer);
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
    guarded(copies::activate);
    code::SHARED_OBJECT_SYMBOL_NOT_FOUND
}

hooked_functions!(exports);
