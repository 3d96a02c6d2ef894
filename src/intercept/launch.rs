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
                static HERE: Gated = Gated(stringify!($symbol));
                let Some(address) = originals::$symbol.address() else { return code::NOT_FOUND };
                // SAFETY: the driver's function takes these arguments, as `cuda.h` says.
                gate::pass(&HERE, || unsafe {
                    mem::transmute::<*mut c_void, unsafe extern "C" fn($(gated!(@width $argument)),*) -> StatusCode>(address.as_ptr())($($argument),*)
                })
            }
        )*

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
    (@width $argument:ident) => { usize };
}

gated_functions!(gated);
