//! The driver's own lookup, `cuGetProcAddress`: a function that has an entry is replaced by the entry. The runtime's
//! `cudaGetDriverEntryPoint` uses it, so it needs no hook.

use crate::entry::DriverFunction;
use crate::index::Index;
use crate::table::Flavour;
use crate::{copies, driver_originals};
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr;
use vramctl_model::{StatusCode, code};

/// The handler of `cuGetProcAddress`. `by_name` has all entries.
pub(crate) unsafe fn get_proc_address(
    name: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: c_ulonglong,
    caller: *const c_void,
    by_name: &'static Index,
) -> StatusCode {
    // SAFETY: the arguments are passed on unchanged; the program promises that the pointers are valid.
    unsafe {
        let answer = driver_originals::cuGetProcAddress(name, function, version, flags);
        replace_if(answer == code::SUCCESS, name, function, caller, by_name);
        answer
    }
}

/// The handler of `cuGetProcAddress_v2`.
pub(crate) unsafe fn get_proc_address_v2(
    name: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: c_ulonglong,
    status: *mut c_uint,
    caller: *const c_void,
    by_name: &'static Index,
) -> StatusCode {
    // SAFETY: as in `get_proc_address`.
    unsafe {
        let answer = driver_originals::cuGetProcAddress_v2(name, function, version, flags, status);
        replace_if(answer == code::SUCCESS, name, function, caller, by_name);
        answer
    }
}

/// Replaces a function that the driver has returned by its entry, if it has one.
///
/// The variant that a lookup gets depends on the requested version and flags, with rules that newer drivers extend. So the driver is asked
/// again: an entry replaces only the function that the driver returns for exactly the entry's version and flavour.
unsafe fn replace_if(is_found: bool, name: *const c_char, function: *mut *mut c_void, caller: *const c_void, by_name: &'static Index) {
    if !is_found || name.is_null() || function.is_null() || copies::another_answers() {
        return;
    }
    // SAFETY: after a success the name is NUL-terminated and the function readable and writable, by the program's promise.
    unsafe {
        let (name, found) = (CStr::from_ptr(name), *function);
        let mut same = versions_of(name, by_name);
        if !found.is_null()
            && let Some((line, _)) = same.find(|(line, version)| driver_function(name, *version, line.flavour) == found)
            && !line.is_behind(caller)
        {
            *function = line.entry.cast_mut();
        }
    }
}

/// The lines of the table that a name stands for, and the CUDA version since which it does: since CUDA 12, one name also stands for the function
/// of another, as in `cuda.h`.
fn versions_of(name: &CStr, by_name: &'static Index) -> impl Iterator<Item = (&'static DriverFunction, c_int)> {
    let also = if name == c"cuGraphInstantiate" { "cuGraphInstantiateWithFlags" } else { "" };
    let own = by_name.find(name.to_bytes()).map(|line| (line, line.version));
    own.chain(by_name.find(also.as_bytes()).map(|line| (line, 12000)))
}

/// The driver's function of a name, for programs built with this version of CUDA.
unsafe fn driver_function(name: &CStr, version: c_int, flavour: Flavour) -> *mut c_void {
    /// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`; 0 is the default.
    const PER_THREAD: c_ulonglong = 2;
    let (mut found, mut status) = (ptr::null_mut(), 0);
    let flags = if flavour == Flavour::PerThread { PER_THREAD } else { 0 };
    // SAFETY: the name is NUL-terminated, and both outputs are writable.
    unsafe {
        // Before CUDA 12 there is only the first version.
        match driver_originals::cuGetProcAddress_v2(name.as_ptr(), &raw mut found, version, flags, &raw mut status) {
            code::NOT_FOUND => driver_originals::cuGetProcAddress(name.as_ptr(), &raw mut found, version, flags),
            answer => answer,
        };
    }
    found
}
