//! Looks up, when CUDA starts, what the calls that follow need.
//!
//! A look-up takes the loader's lock. A thread that opens a library has it until the library's constructors have run, and these may wait for another
//! thread that calls CUDA: legal, because CUDA's own calls need no such lock once it has started.

use crate::copies;
use crate::entry::DriverFunction;
use crate::real::DRIVER;
use vramctl_core::{member, server};
use vramctl_driver::Driver;
use vramctl_host::symbols::Loaded;

/// Looks up these functions of the driver's, those that the library calls, and which copy of the library is the first.
pub fn look_up(functions: impl Iterator<Item = &'static DriverFunction>) {
    if let Some(driver) = loaded_driver() {
        // A look-up of a function that the driver does not have would leave an error for `dlerror`.
        let there = functions.filter(|function| driver.symbol(function.symbol).is_some());
        there.for_each(|function| _ = function.original.address());
        let _ = Driver::get();
    }
}

/// CUDA has started, and the program has no memory yet. Not before that: what the server registers for the exit has to run before the driver's end.
pub fn started() {
    if !copies::another_answers() && member::is_member() {
        // The scheduler has to know of the program before it takes memory.
        server::ensure_running();
    }
}

fn loaded_driver() -> Option<Loaded> {
    // SAFETY: a NUL-terminated name. The library is loaded already, or not at all, and its handle stays open.
    unsafe {
        let driver = libc::dlopen(DRIVER.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE);
        if driver.is_null() { None } else { Loaded::behind(driver) }
    }
}
