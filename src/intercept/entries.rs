//! The functions that the program calls instead of the driver's, generated from the table `driver_functions!`.
//!
//! A program reaches these whether it links against the driver or looks the functions up, by `dlsym` or `cuGetProcAddress` (`resolve`).
//!
//! Allocating entries also pass the return address to their handler, which identifies the calling library. Lookup entries do the same,
//! because the answer may depend on the caller. A Rust function cannot see its return address, so these entries are a few instructions in
//! front of one.

use crate::call::{Api, Origin, answer, answer_as};
use crate::entry::{DriverFunction, jump, pass_caller, symbol};
use crate::index::{Index, Key};
use crate::peers::Peer;
use crate::table::{Effect, Flavour, IpcHandle};
use crate::vmm::part_of_endpoint;
use crate::{alloc, arrays, contexts, copies, driver_functions, driver_originals, launch};
use crate::{limited, peers, pools, proc_address, queries, ready, register, room, share, streams, vmm};
use std::arch::naked_asm;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr;
use vramctl_core::gate::{Gated, away};
use vramctl_core::memory::Binding;
use vramctl_driver::{
    CUarrayMapInfo, CUdevice, CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle as Handle, CUmemLocation,
    ContextHandle, Green, StreamHandle,
};
use vramctl_host::guarded;
use vramctl_model::{StatusCode, code};

/// Every hooked driver function: those of the table and the gated ones.
pub fn all() -> impl Iterator<Item = &'static DriverFunction> {
    FUNCTIONS.iter().chain(launch::GATED)
}

static BY_SYMBOL: Index = Index::new(Key::Symbol, [FUNCTIONS, launch::GATED]);
static BY_NAME: Index = Index::new(Key::Name, [FUNCTIONS, launch::GATED]);

/// The line of a symbol.
pub fn of_symbol(symbol: &CStr) -> Option<&'static DriverFunction> {
    BY_SYMBOL.find(symbol.to_bytes()).next()
}

macro_rules! entries {
    ($($effect:ident $symbol:ident $name:literal $version:literal $flavour:ident $arguments:tt $handler:tt;)*) => {
        $( entry! { $effect $symbol $arguments } )*

        /// The Rust functions behind the entries.
        #[allow(non_snake_case, clippy::too_many_arguments, clippy::wildcard_imports)]
        mod guarded {
            use super::*;
            $( guard! { $effect $symbol $flavour $arguments $handler } )*
        }

        /// The table.
        pub static FUNCTIONS: &[DriverFunction] = &[$( DriverFunction {
            effect: Effect::$effect,
            symbol: symbol(concat!(stringify!($symbol), "\0")),
            name: $name,
            version: $version,
            flavour: Flavour::$flavour,
            arguments: count! $arguments,
            entry: $symbol as *const c_void,
            original: &driver_originals::symbols::$symbol,
        } ),*];
    };
}

/// An exported function.
macro_rules! entry {
    (Allocates $symbol:ident $arguments:tt) => {
        entry! { @asks_who $symbol $arguments }
    };
    (Resolves $symbol:ident $arguments:tt) => {
        entry! { @asks_who $symbol $arguments }
    };
    (@asks_who $symbol:ident ($($argument:ident: $type:ty),*)) => {
        /// The driver's function of this name.
        ///
        /// # Safety
        /// As the driver's.
        #[allow(non_snake_case)]
        #[unsafe(naked)]
        pub unsafe extern "C-unwind" fn $symbol($($argument: $type),*) -> StatusCode {
            naked_asm!(".cfi_startproc", pass_caller!($($argument)*), jump!(), ".cfi_endproc", to = sym guarded::$symbol)
        }
    };
    ($effect:ident $symbol:ident ($($argument:ident: $type:ty),*)) => {
        /// The driver's function of this name.
        ///
        /// # Safety
        /// As the driver's.
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe extern "C-unwind" fn $symbol($($argument: $type),*) -> StatusCode {
            // SAFETY: the arguments are passed on unchanged.
            unsafe { guarded::$symbol($($argument),*) }
        }
    };
}

/// The Rust function behind an entry.
macro_rules! guard {
    (Resolves $symbol:ident $flavour:ident ($($argument:ident: $type:ty),*) { $($handler:ident)::+ }) => {
        pub unsafe extern "C-unwind" fn $symbol($($argument: $type,)* caller: *const c_void) -> StatusCode {
            // SAFETY: the arguments are passed on unchanged.
            guarded(|| unsafe { $($handler)::+($($argument,)* caller, &BY_NAME) }).unwrap_or(code::UNKNOWN)
        }
    };
    (Starts $symbol:ident $flavour:ident ($($argument:ident: $type:ty),*) { $($handler:ident)::+ }) => {
        pub unsafe extern "C-unwind" fn $symbol($($argument: $type),*) -> StatusCode {
            guarded(|| $($handler)::+(all()));
            // SAFETY: the arguments are passed on unchanged.
            let answer = unsafe { driver_originals::$symbol($($argument),*) };
            if answer == code::SUCCESS {
                guarded(ready::started);
            }
            answer
        }
    };
    (Synchronizes $symbol:ident $flavour:ident ($($argument:ident: $type:ty),*) { $($handler:ident)::+ unless $passes:expr }) => {
        pub unsafe extern "C-unwind" fn $symbol($($argument: $type),*) -> StatusCode {
            static GATED: Gated = Gated(stringify!($symbol));
            // Outside `guarded`, and without a destructor: a thread may be cancelled while it waits. Its mark ends with it.
            let mark = away::begin(&GATED);
            // SAFETY: the arguments are passed on unchanged.
            let answer = unsafe { driver_originals::$symbol($($argument),*) };
            if let Some(mark) = mark {
                mark.leave();
            }
            if !$passes && copies::activate() {
                guarded($($handler)::+);
            }
            answer
        }
    };
    (Measures $symbol:ident $flavour:ident ($($argument:ident: $type:ty),*) $handler:tt) => {
        pub unsafe extern "C-unwind" fn $symbol($($argument: $type),*) -> StatusCode {
            away::wait();
            guard! { @answer Measures $symbol $flavour ($($argument),*) $handler ptr::null() }
        }
    };
    (Allocates $symbol:ident $flavour:ident ($($argument:ident: $type:ty),*) $handler:tt) => {
        pub unsafe extern "C-unwind" fn $symbol($($argument: $type,)* caller: *const c_void) -> StatusCode {
            guard! { @answer Allocates $symbol $flavour ($($argument),*) $handler caller }
        }
    };
    ($effect:ident $symbol:ident $flavour:ident ($($argument:ident: $type:ty),*) $handler:tt) => {
        pub unsafe extern "C-unwind" fn $symbol($($argument: $type),*) -> StatusCode {
            guard! { @answer $effect $symbol $flavour ($($argument),*) $handler ptr::null() }
        }
    };
    (@answer $effect:ident $symbol:ident $flavour:ident ($($argument:ident),*) $handler:tt $caller:expr) => {{
        let origin = Origin { api: Api::Driver, effect: Effect::$effect, flavour: Flavour::$flavour, caller: $caller };
        // SAFETY: the arguments are passed on unchanged.
        unsafe { answer_as!($handler origin, driver_originals::$symbol($($argument),*), ($($argument),*)) }
    }};
}

macro_rules! count {
    ($($argument:ident: $type:ty),*) => { <[&str]>::len(&[$(stringify!($argument)),*]) };
}

driver_functions!(entries);

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::hint::black_box;
    use std::ptr;

    /// A call as its handler sees it.
    struct Seen {
        arguments: Vec<usize>,
        caller: *const c_void,
        backtrace: Vec<*mut c_void>,
    }

    thread_local! {
        /// The last call.
        static SEEN: Cell<Option<Seen>> = const { Cell::new(None) };
    }

    fn backtrace() -> Vec<*mut c_void> {
        let mut frames = vec![ptr::null_mut(); 64];
        // SAFETY: writable for as many.
        let count = unsafe { libc::backtrace(frames.as_mut_ptr(), 64) };
        frames.truncate(count as usize);
        frames
    }

    /// Functions with each argument list of the table; their handlers record what they get.
    macro_rules! shapes {
        ($($symbol:ident($($argument:ident),*);)*) => {
            #[allow(clippy::wildcard_imports, clippy::items_after_statements)]
            mod guarded {
                use super::*;
                $( pub unsafe extern "C" fn $symbol($($argument: usize,)* caller: *const c_void) -> StatusCode {
                    SEEN.set(Some(Seen { arguments: vec![$($argument),*], caller, backtrace: backtrace() }));
                    7
                } )*
            }
            $( entry! { Allocates $symbol ($($argument: usize),*) } )*
        };
    }
    shapes! {
        one(a);
        two(a, b);
        three(a, b, c);
        four(a, b, c, d);
        five(a, b, c, d, e);
        six(a, b, c, d, e, f);
    }

    #[inline(never)]
    fn calls(call: impl FnOnce() -> StatusCode, count: usize) {
        // Not a tail call, so that the return address is in this function.
        assert_eq!(black_box(call)(), 7);
        let Seen { arguments, caller, backtrace: inside } = SEEN.take().unwrap();
        assert_eq!(arguments, (1..=count).collect::<Vec<_>>());
        // Without this function's own frame, which was in another place then, and what it has called here.
        let here = backtrace();
        assert!(inside.contains(&caller.cast_mut()) && inside.ends_with(&here[2..]), "{inside:?} {here:?}");
        // SAFETY: plain data, and writable.
        let near = unsafe {
            let mut info: libc::Dl_info = std::mem::zeroed();
            libc::dladdr(caller, &raw mut info) != 0 && vramctl_host::symbols::is_ours(caller)
        };
        assert!(near, "{caller:p} is not in the program that called");
    }

    /// A handler that got the wrong register would attribute memory to the wrong library.
    #[test]
    fn allocating_entries_pass_the_arguments_and_the_caller() {
        // SAFETY: the functions take any numbers.
        unsafe {
            calls(|| one(1), 1);
            calls(|| two(1, 2), 2);
            calls(|| three(1, 2, 3), 3);
            calls(|| four(1, 2, 3, 4), 4);
            calls(|| five(1, 2, 3, 4, 5), 5);
            calls(|| six(1, 2, 3, 4, 5, 6), 6);
        }
    }

    /// Two call sites in one function are distinguished, and each is recognised every time.
    #[test]
    fn a_call_site_is_known_by_its_address() {
        let site = || {
            // SAFETY: as above.
            unsafe { assert_eq!(black_box(two as unsafe extern "C-unwind" fn(usize, usize) -> StatusCode)(1, 2), 7) };
            SEEN.take().unwrap().caller
        };
        let mut sites: Vec<_> = (0..3).map(|_| site()).collect();
        sites.dedup();
        assert_eq!(sites.len(), 1);
        // SAFETY: as above.
        unsafe { assert_eq!(black_box(two as unsafe extern "C-unwind" fn(usize, usize) -> StatusCode)(1, 2), 7) };
        assert_ne!(SEEN.take().unwrap().caller, sites[0]);
    }

    #[test]
    fn no_symbol_is_twice_in_the_table() {
        let mut symbols: Vec<_> = FUNCTIONS.iter().map(|function| function.symbol).collect();
        symbols.sort_unstable();
        symbols.dedup();
        assert_eq!(symbols.len(), FUNCTIONS.len());
        assert!(symbols.iter().all(|symbol| of_symbol(symbol).is_some_and(|function| function.symbol == *symbol)));
        assert!(of_symbol(c"cuMemAlloc").is_none() && of_symbol(c"").is_none());
    }
}
