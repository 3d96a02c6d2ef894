//! Functions that start device work or change device memory, generated from the table `gated_functions!`. They pass the gate, and
//! are otherwise the driver's.

use crate::entries::{DriverFunction, symbol};
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
            /// As the driver's. The arguments are those of the program, whatever their types: each is in a register of its own, or
            /// in eight bytes of the stack, and so it is when passed on.
            #[allow(non_snake_case, clippy::too_many_arguments, clippy::many_single_char_names)]
            pub unsafe extern "C" fn $symbol($($argument: usize),*) -> StatusCode {
                // Nothing is saved on the way here that only the other way needs: that one has all arguments as they came.
                // SAFETY: the driver's function takes these arguments, as `cuda.h` says.
                unsafe {
                    if let Some(driver) = originals::$symbol.known() && let Some(_inside) = gate::enter(&names::$symbol) {
                        return mem::transmute::<*mut c_void, gated!(@type $($argument)*)>(driver.as_ptr())($($argument),*);
                    }
                    otherwise::$symbol($($argument),*)
                }
            }
        )*

        /// The functions' other way: the first call of a thread or of the function, a call within a call, a gate that is closed.
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

        /// What threads say that they are inside.
        #[allow(non_upper_case_globals)]
        mod names {
            use super::Gated;
            $( pub static $symbol: Gated = Gated(stringify!($symbol)); )*
        }

        /// Where the driver's functions are.
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
