//! Functions that start device work, change device memory or describe work on memory, generated from the table `gated_functions!`. They wait at
//! the gate, and are otherwise unchanged, except that copies which the driver refuses may be made in another way (`reach.rs`), and that calls which
//! run out of memory may wait for room (`room.rs`).

use crate::entry::{DriverFunction, symbol};
use crate::real::Symbol;
use crate::table::{Effect, Flavour};
use crate::{gated_functions, reach, room};
use std::ffi::c_void;
use std::mem;
use vramctl_core::gate::{self, Gated, Inside, away};
use vramctl_core::memory::note_crossing;
use vramctl_model::{StatusCode, code};

/// A function that waits at the gate.
struct GatedFunction {
    effect: Effect,
    /// The mark of threads inside it.
    gated: Gated,
    original: Symbol,
}

impl Effect {
    /// Whether such a call may be made in another way if the driver refuses it.
    fn is_made_again(self) -> bool {
        matches!(self, Self::Copies | Self::Crosses | Self::Describes)
    }
}

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
                // SAFETY: the driver's function takes these arguments, as `cuda.h` says.
                unsafe {
                    if let Some(driver) = functions::$symbol.original.known() && let Some(inside) = enter(Effect::$effect, &functions::$symbol.gated) {
                        if let Effect::Crosses = Effect::$effect {
                            note_crossing();
                        }
                        let answer = as_function!(driver.as_ptr(), $($argument)*)($($argument),*);
                        drop(inside);
                        return if answer == code::SUCCESS { answer } else { failed(&functions::$symbol, &[$($argument),*], answer) };
                    }
                    wait_and_call(&functions::$symbol, &[$($argument),*])
                }
            }
        )*

        #[allow(non_upper_case_globals)]
        mod functions {
            use super::{Effect, Gated, GatedFunction, Symbol};
            $( pub static $symbol: GatedFunction = GatedFunction {
                effect: Effect::$effect,
                gated: Gated(stringify!($symbol)),
                original: Symbol::of_driver(concat!(stringify!($symbol), "\0")),
            }; )*
        }

        const _: () = assert!(true $( && [$(stringify!($argument)),*].len() <= 11 )*, "more arguments than `call` passes");

        /// The table.
        pub static GATED: &[DriverFunction] = &[$( DriverFunction {
            effect: Effect::$effect,
            symbol: symbol(concat!(stringify!($symbol), "\0")),
            name: $name,
            version: $version,
            flavour: Flavour::$flavour,
            arguments: [$(stringify!($argument)),*].len(),
            entry: $symbol as *const c_void,
            original: &functions::$symbol.original,
        } ),*];
    };
}

/// An address as a function with as many arguments.
macro_rules! as_function {
    ($address:expr, $($argument:ident)*) => {
        mem::transmute::<*mut c_void, unsafe extern "C" fn($(as_function!(@width $argument)),*) -> StatusCode>($address)
    };
    (@width $argument:ident) => { usize };
}

gated_functions!(gated);

/// Fast path: passes the gate, or what stands in its place.
#[inline]
fn enter(effect: Effect, gated: &'static Gated) -> Option<Inside> {
    if effect == Effect::Asks { away::enter(gated) } else { gate::enter(gated) }
}

/// The slow path: the first call of a thread or of the function, a nested call, a closed gate.
///
/// # Safety
/// The function takes these arguments.
#[cold]
unsafe fn wait_and_call(function: &'static GatedFunction, arguments: &[usize]) -> StatusCode {
    // SAFETY: the caller's promise.
    let answer = unsafe { call(function, arguments) };
    // SAFETY: as above.
    if answer == code::SUCCESS { answer } else { unsafe { failed(function, arguments, answer) } }
}

/// Makes a call that the driver has refused again: in another way if the library is the reason, or when there is room.
///
/// # Safety
/// As for [`wait_and_call`].
#[cold]
unsafe fn failed(function: &'static GatedFunction, arguments: &[usize], answer: StatusCode) -> StatusCode {
    match answer {
        // SAFETY: the arguments are those that the driver has got from the program.
        code::INVALID_VALUE if function.effect.is_made_again() => unsafe {
            reach::again(function.gated.0, &function.gated, arguments, &|| call(function, arguments))
        },
        // SAFETY: as above.
        code::OUT_OF_MEMORY => room::once_more(function.effect, answer, || unsafe { call(function, arguments) }),
        answer => answer,
    }
}

/// The call itself, once the gate is open.
///
/// # Safety
/// As for [`wait_and_call`].
unsafe fn call(function: &'static GatedFunction, arguments: &[usize]) -> StatusCode {
    let Some(driver) = function.original.address() else { return code::NOT_FOUND };
    macro_rules! by_count {
        ($(($($argument:ident)*))*) => {
            match *arguments {
                $( [$($argument),*] => as_function!(driver.as_ptr(), $($argument)*)($($argument),*), )*
                _ => unreachable!("no function has more, as is checked with the table"),
            }
        };
    }
    let make = || {
        if function.effect == Effect::Crosses {
            note_crossing();
        }
        // SAFETY: the caller's promise.
        unsafe {
            by_count! {
                (a) (a b) (a b c) (a b c d) (a b c d e) (a b c d e f) (a b c d e f g) (a b c d e f g h) (a b c d e f g h i)
                (a b c d e f g h i j) (a b c d e f g h i j k)
            }
        }
    };
    if function.effect == Effect::Asks { away::pass(&function.gated, make) } else { gate::pass(&function.gated, make) }
}
