//! What a call that is linked would reach if this library were not there. The caller decides: the loader looks in the libraries that are there
//! for all, then in those that the caller's library depends on, and takes only a symbol of the version that the library was linked with.

use crate::copies;
use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use vramctl_host::symbols::{self, Loaded};

/// The only library that has any of these functions, for one that is linked with this version of them. Then that is the one which the caller's is
/// linked with, wherever the loader would look. `None` if there are several, or none.
///
/// Unlike all else here, this does without the lock that a thread has while it opens a library: the library's constructors may wait for this thread.
pub fn only_one_with(names: &[&CStr], version: Option<&CStr>) -> Option<Loaded> {
    symbols::only_library(|library| {
        let mut there = names.iter().filter(|name| library.symbol(name).is_some());
        there.any(|name| version.is_none_or(|version| library.has_version(name, version))) && !copies::is_one(library)
    })
}

/// Where the functions of a caller's library come from.
#[derive(Debug)]
pub struct Linked {
    version: Option<&'static CStr>,
    /// A handle of the caller's library, or null.
    own: *mut c_void,
}

impl Linked {
    /// `caller`: a return address. `is_meant` tells the functions whose version counts.
    pub fn of(caller: *const c_void, is_meant: impl Fn(&CStr) -> bool) -> Self {
        let version = Loaded::around(caller).and_then(|library| library.version_needed(is_meant));
        let path = symbols::path_around(caller);
        // SAFETY: NUL-terminated. The library is loaded already, so no initialiser runs, and it stays, because the caller runs in it.
        let own = if path.is_null() { ptr::null_mut() } else { unsafe { libc::dlopen(path, libc::RTLD_LAZY | libc::RTLD_NOLOAD) } };
        Self { version, own }
    }

    /// The function of this name, or null.
    pub fn function(&self, name: &CStr) -> *mut c_void {
        // Another copy of this library would in turn look for what this one finds.
        let is_real = |found: &*mut c_void| !found.is_null() && !copies::contain(*found);
        let in_own = || Some(self.own).filter(|own| !own.is_null()).map(|own| self.look_up(own, name));
        Some(self.look_up(libc::RTLD_NEXT, name)).filter(is_real).or_else(in_own).filter(is_real).unwrap_or(ptr::null_mut())
    }

    fn look_up(&self, handle: *mut c_void, name: &CStr) -> *mut c_void {
        // SAFETY: the handle is open, or `RTLD_NEXT`.
        let found = unsafe { symbols::dlsym(handle, name) };
        match self.version {
            // This finds no symbol without a version, which the loader takes as well.
            // SAFETY: as above.
            Some(version) if Loaded::around(found).is_none_or(|library| !library.has_version(name, version)) => unsafe {
                symbols::dlvsym(handle, name, version)
            },
            _ => found,
        }
    }
}

impl Drop for Linked {
    fn drop(&mut self) {
        if !self.own.is_null() {
            // SAFETY: opened above.
            unsafe { libc::dlclose(self.own) };
        }
    }
}

/// A function of a loaded library, or of its dependencies.
pub fn in_loaded(library: *const c_char, name: &CStr) -> *mut c_void {
    if library.is_null() {
        return ptr::null_mut();
    }
    // SAFETY: a NUL-terminated name. The library is loaded already, so no initialiser runs, and the caller runs in it or uses it, so
    // that it stays.
    unsafe {
        let library = libc::dlopen(library, libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if library.is_null() {
            return ptr::null_mut();
        }
        // First: it would end the error of the look-up. The library stays.
        libc::dlclose(library);
        symbols::dlsym(library, name)
    }
}
