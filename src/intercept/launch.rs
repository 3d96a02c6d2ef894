//! Functions that start device work or change device memory, generated from the table `gated_functions!`. They wait at the gate, and are
//! otherwise unchanged.

use crate::entry::{DriverFunction, symbol};
use crate::gated_functions;
use crate::real::Symbol;
use crate::table::{Effect, Flavour};
use std::ffi::c_void;
use std::mem;
use vramctl_core::gate::{self, Gated};
use vramctl_model::{StatusCode, code};

macro_rules! gated {
    ($($effect:ident $symbol:ident $name:literal $version:literal $flavour:ident ($($argument:ident)*);)*) => {
        $(
            /// The driver's function of this name.
            ///
            /// # Safety
            /// As the driver's. The arguments are passed on without regard to their types: each occupies one register, or eight bytes of
            /// the stack, both on the way in and on the way out.
            #[allow(non_snake_case, clippy::too_many_arguments, clippy::many_single_char_names)]
            pub unsafe extern "C" fn $symbol($($argument: usize),*) -> StatusCode {
                // The fast path saves nothing that only the slow path needs: the slow path gets all arguments unchanged. SAFETY: the
                // driver's function takes these arguments, as `cuda.h` says.
                unsafe {
                    if let Some(driver) = originals::$symbol.known() && let Some(_inside) = gate::enter(&names::$symbol) {
                        return mem::transmute::<*mut c_void, gated!(@type $($argument)*)>(driver.as_ptr())($($argument),*);
                    }
                    otherwise::$symbol($($argument),*)
                }
            }
        )*

        /// The slow path: the first call of a thread or of the function, a nested call, a closed gate.
        #[allow(non_snake_case, clippy::too_many_arguments, clippy::many_single_char_names, clippy::wildcard_imports)]
        mod otherwise {
            use super::*;
            $(
                #[cold]
                pub unsafe extern "C" fn $symbol($($argument: usize),*) -> StatusCode {
                    let Some(driver) = originals::$symbol.address() else { return code::NOT_FOUND };
                    // SAFETY: as above.
                    gate::pass(&names::$symbol, || unsafe {
                        mem::transmute::<*mut c_void, gated!(@type $($argument)*)>(driver.as_ptr())($($argument),*)
                    })
                }
            )*
        }

        /// The marks of threads inside these functions.
        #[allow(non_upper_case_globals)]
        mod names {
            use super::Gated;
            $( pub static $symbol: Gated = Gated(stringify!($symbol)); )*
        }

        /// The driver's functions.
        #[allow(non_upper_case_globals)]
        mod originals {
            use super::Symbol;
            $( pub static $symbol: Symbol = Symbol::of_driver(concat!(stringify!($symbol), "\0")); )*
        }

        /// The table.
        pub static GATED: &[DriverFunction] = &[$( DriverFunction {
            effect: Effect::$effect,
            symbol: symbol(concat!(stringify!($symbol), "\0")),
            name: $name,
            version: $version,
            flavour: Flavour::$flavour,
            arguments: [$(stringify!($argument)),*].len(),
            entry: $symbol as *const c_void,
            original: &originals::$symbol,
        } ),*];
    };
    (@type $($argument:ident)*) => { unsafe extern "C" fn($(gated!(@width $argument)),*) -> StatusCode };
    (@width $argument:ident) => { usize };
}

gated_functions!(gated);
