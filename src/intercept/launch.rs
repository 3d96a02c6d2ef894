//! Functions that start device work, change device memory or describe work on memory, generated from the table `gated_functions!`. They wait at
//! the gate, and are otherwise unchanged, except that copies which the driver refuses may be made in another way (`reach.rs`).

use crate::entry::{DriverFunction, symbol};
use crate::real::Symbol;
use crate::table::{Effect, Flavour};
use crate::{gated_functions, reach};
use std::ffi::c_void;
use std::mem;
use vramctl_core::gate::{self, Gated};
use vramctl_core::memory::note_crossing;
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
                    if let Some(driver) = originals::$symbol.known() && let Some(inside) = gate::enter(&names::$symbol) {
                        gated!(@before $effect);
                        let answer = mem::transmute::<*mut c_void, gated!(@type $($argument)*)>(driver.as_ptr())($($argument),*);
                        drop(inside);
                        return gated!(@after $effect $symbol answer $($argument)*);
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
                    let answer = call::$symbol($($argument),*);
                    gated!(@after $effect $symbol answer $($argument)*)
                }
            )*
        }

        /// The calls themselves, once the gate is open.
        #[allow(non_snake_case, clippy::too_many_arguments, clippy::many_single_char_names, clippy::wildcard_imports)]
        mod call {
            use super::*;
            $(
                pub fn $symbol($($argument: usize),*) -> StatusCode {
                    let Some(driver) = originals::$symbol.address() else { return code::NOT_FOUND };
                    // SAFETY: only the entry calls this, with the program's arguments.
                    gate::pass(&names::$symbol, || unsafe {
                        gated!(@before $effect);
                        mem::transmute::<*mut c_void, gated!(@type $($argument)*)>(driver.as_ptr())($($argument),*)
                    })
                }
            )*
        }

        /// What becomes of calls that the driver has refused.
        #[allow(non_snake_case, clippy::too_many_arguments, clippy::many_single_char_names, clippy::wildcard_imports)]
        mod refused {
            use super::*;
            $( gated!(@refused $effect $symbol $($argument)*); )*
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
    (@before Crosses) => { note_crossing() };
    (@before $effect:ident) => {};
    (@after Copies $symbol:ident $answer:ident $($argument:ident)*) => {
        if $answer == code::INVALID_VALUE { refused::$symbol($($argument),*) } else { $answer }
    };
    (@after Describes $symbol:ident $answer:ident $($argument:ident)*) => { gated!(@after Copies $symbol $answer $($argument)*) };
    (@after Crosses $symbol:ident $answer:ident $($argument:ident)*) => { gated!(@after Copies $symbol $answer $($argument)*) };
    (@after $effect:ident $symbol:ident $answer:ident $($argument:ident)*) => { $answer };
    (@refused Copies $symbol:ident $($argument:ident)*) => {
        #[cold]
        pub fn $symbol($($argument: usize),*) -> StatusCode {
            // SAFETY: only the entry calls this, with arguments that the driver has got from the program.
            unsafe { reach::again(stringify!($symbol), &names::$symbol, &[$($argument),*], || call::$symbol($($argument),*)) }
        }
    };
    (@refused Describes $symbol:ident $($argument:ident)*) => { gated!(@refused Copies $symbol $($argument)*); };
    (@refused Crosses $symbol:ident $($argument:ident)*) => { gated!(@refused Copies $symbol $($argument)*); };
    (@refused $effect:ident $symbol:ident $($argument:ident)*) => {};
}

gated_functions!(gated);
