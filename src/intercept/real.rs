//! The real functions of the driver. They are looked up lazily, because a preloaded library is loaded before the driver.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};
use vramctl_host::symbols;

/// A function of the driver, looked up at first use. A miss is not cached: the library may be loaded later.
#[derive(Debug)]
pub struct Symbol {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Symbol {
    /// A function of the driver. `name` must end with a NUL.
    pub const fn of_driver(name: &'static str) -> Self {
        let Ok(name) = CStr::from_bytes_with_nul(name.as_bytes()) else { panic!("no NUL in a symbol") };
        Self { name, found: AtomicPtr::new(ptr::null_mut()) }
    }

    /// The address; `None` if no driver is loaded, or none with the function.
    #[inline]
    pub fn address(&self) -> Option<NonNull<c_void>> {
        self.known().or_else(|| self.look_up())
    }

    /// The address, if it has been looked up before.
    #[inline]
    pub fn known(&self) -> Option<NonNull<c_void>> {
        NonNull::new(self.found.load(Ordering::Relaxed))
    }

    #[cold]
    fn look_up(&self) -> Option<NonNull<c_void>> {
        // SAFETY: `RTLD_NEXT` needs no handle.
        let next = NonNull::new(unsafe { symbols::dlsym(libc::RTLD_NEXT, self.name) });
        let found = next.inspect(|address| keep_loaded(*address)).or_else(|| in_loaded_driver(self.name))?;
        // A call of ours that ended up here again would never return.
        if symbols::is_ours(found.as_ptr()) {
            return None;
        }
        self.found.store(found.as_ptr(), Ordering::Relaxed);
        Some(found)
    }
}

/// Pins the library that contains `address`, because the cached address must stay valid.
fn keep_loaded(address: NonNull<c_void>) {
    /// The path of the last one, which stays where it is with its library.
    static LAST: AtomicPtr<c_char> = AtomicPtr::new(ptr::null_mut());
    let path = symbols::path_around(address.as_ptr()).cast_mut();
    if !path.is_null() && LAST.swap(path, Ordering::Relaxed) != path {
        // SAFETY: NUL-terminated. The library is loaded already, so no initialiser runs.
        unsafe { libc::dlopen(path, libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) };
    }
}

/// Looks the symbol up in the loaded driver. Another preloaded library may answer instead.
fn in_loaded_driver(name: &CStr) -> Option<NonNull<c_void>> {
    let dlsym = symbols::next_dlsym()?;
    // SAFETY: NUL-terminated names. The library is loaded already, so no initialiser runs, and `RTLD_NODELETE` keeps the address
    // valid.
    unsafe {
        let library = libc::dlopen(DRIVER.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE);
        if library.is_null() { None } else { NonNull::new(dlsym(library, name.as_ptr())) }
    }
}

/// The driver's name.
pub const DRIVER: &CStr = c"libcuda.so.1";
