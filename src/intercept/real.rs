//! The real functions behind the hooks. They are looked up lazily, because a preloaded library is loaded before the runtime.

use crate::decided::pass_by;
use crate::hooked_functions;
use crate::table::{CudaError, CudaExtent, CudaPitchedPtr, CudaStream, IpcHandle};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};
use vramctl_driver::{CUdevice, Current, RelaxedCapture};
use vramctl_host::symbols;
use vramctl_model::code;

macro_rules! originals {
    ($($(#[$doc:meta])* $effect:ident fn $name:ident($($argument:ident: $type:ty),* $(,)?) => $handler:path $(, unless $passes:tt)?;)*) => {
        /// The runtime's own functions. A missing one returns [`code::SHARED_OBJECT_SYMBOL_NOT_FOUND`].
        #[allow(non_snake_case, clippy::wildcard_imports)]
        pub mod originals {
            use super::*;
            $(
                #[inline]
                pub unsafe fn $name($($argument: $type),*) -> CudaError {
                    static SYMBOL: Symbol = Symbol::of_runtime(concat!(stringify!($name), "\0"));
                    let Some(address) = SYMBOL.address() else { return code::SHARED_OBJECT_SYMBOL_NOT_FOUND };
                    // SAFETY: the type matches the runtime's function; the arguments are the caller's.
                    unsafe { mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($($type),*) -> CudaError>(address.as_ptr())($($argument),*) }
                }
            )*
        }
    };
}
hooked_functions!(originals);

/// The runtime's current device on this thread.
pub fn current_device() -> Option<CUdevice> {
    static SYMBOL: Symbol = Symbol::of_runtime("cudaGetDevice\0");
    let address = SYMBOL.address()?;
    let mut device = 0;
    // SAFETY: the type matches the runtime's function, and `device` is writable.
    let answer = unsafe { mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int) -> CudaError>(address.as_ptr())(&raw mut device) };
    (answer == code::SUCCESS).then_some(device)
}

/// Sets the runtime's current device on this thread. Returns whether that succeeded.
pub fn set_device(device: CUdevice) -> bool {
    static SYMBOL: Symbol = Symbol::of_runtime("cudaSetDevice\0");
    let Some(address) = SYMBOL.address() else { return false };
    // SAFETY: the type matches the runtime's function.
    unsafe { mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int) -> CudaError>(address.as_ptr())(device) == code::SUCCESS }
}

/// The context in which the runtime would allocate on this thread. The runtime creates it if it does not exist yet or was reset,
/// as it would for a real allocation.
///
/// The hooked driver functions cannot replace this: only the runtime knows which context it would use on a thread without one, and a
/// runtime whose driver calls do not reach the entries (`RTLD_DEEPBIND`) is seen only through the runtime's functions.
pub fn current_context() -> Result<Current, CudaError> {
    let _relaxed = RelaxedCapture::enter();
    // SAFETY: freeing null only initialises the context.
    match pass_by(|| unsafe { originals::cudaFree(ptr::null_mut()) }) {
        code::SUCCESS => Current::of_thread().map_err(|failure| failure.code)?.ok_or(code::INVALID_CONTEXT),
        error => Err(error),
    }
}

/// Makes `cudaGetLastError` report an out of memory, as after a failure of the runtime itself. Only the runtime can set its last error, so
/// this requests an impossible size from it. A failure in a driver entry would also make the runtime set it, but not if the runtime's calls
/// do not reach the entries.
pub fn leave_out_of_memory_as_last_error() {
    let _relaxed = RelaxedCapture::enter();
    let mut never = ptr::null_mut();
    // SAFETY: `never` is writable. No device has this much memory.
    pass_by(|| unsafe { originals::cudaMalloc(&raw mut never, usize::MAX >> 2) });
}

/// A function of CUDA, looked up at first use. A miss is not cached: the library may be loaded later.
#[derive(Debug)]
pub struct Symbol {
    name: &'static CStr,
    /// Another place to look for it.
    elsewhere: fn(&CStr) -> Option<NonNull<c_void>>,
    found: AtomicPtr<c_void>,
}

impl Symbol {
    /// A function of the runtime. `name` must end with a NUL.
    pub const fn of_runtime(name: &'static str) -> Self {
        Self::or_from(name, in_loaded_runtime)
    }

    /// A function of the driver. `name` must end with a NUL.
    pub const fn of_driver(name: &'static str) -> Self {
        Self::or_from(name, in_loaded_driver)
    }

    const fn or_from(name: &'static str, elsewhere: fn(&CStr) -> Option<NonNull<c_void>>) -> Self {
        let Ok(name) = CStr::from_bytes_with_nul(name.as_bytes()) else { panic!("no NUL in a symbol") };
        Self { name, elsewhere, found: AtomicPtr::new(ptr::null_mut()) }
    }

    /// The address; `None` if no runtime or driver is loaded or it lacks the function.
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
        let found = next.inspect(|address| keep_loaded(*address)).or_else(|| (self.elsewhere)(self.name))?;
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
    let path = symbols::path_around(address.as_ptr());
    if !path.is_null() {
        // SAFETY: NUL-terminated. The library is loaded already, so no initialiser runs.
        unsafe { libc::dlopen(path, libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) };
    }
}

/// Looks the symbol up in a libcudart that is loaded outside the global scope, as Python's are. The driver's entries do not make this
/// unnecessary: a library with such a runtime calls the exported function, which must forward to that runtime.
fn in_loaded_runtime(name: &CStr) -> Option<NonNull<c_void>> {
    let mut path = Path { bytes: [0; libc::PATH_MAX as usize] };
    // SAFETY: the callback copies into `path`, which outlives the call.
    let found = unsafe { libc::dl_iterate_phdr(Some(note_runtime), (&raw mut path).cast()) };
    if found == 0 {
        return None;
    }
    // SAFETY: a NUL-terminated path. The library is loaded already, so no initialiser runs, and `RTLD_NODELETE` keeps the
    // address valid.
    unsafe {
        let library = libc::dlopen(path.bytes.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE);
        if library.is_null() { None } else { NonNull::new(symbols::dlsym(library, name)) }
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

struct Path {
    bytes: [c_char; libc::PATH_MAX as usize],
}

/// Records the path of the first loaded libcudart. Must not allocate, because the loader's lock is held.
unsafe extern "C" fn note_runtime(info: *mut libc::dl_phdr_info, _size: libc::size_t, path: *mut c_void) -> c_int {
    // SAFETY: the loader passes a complete entry whose name is null or NUL-terminated.
    let name = unsafe {
        let name = (*info).dlpi_name;
        if name.is_null() {
            return 0;
        }
        CStr::from_ptr(name)
    };
    let file = name.to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    // SAFETY: `path` is the `Path` that `in_loaded_runtime` passed.
    let bytes = unsafe { &mut (*path.cast::<Path>()).bytes };
    let name = name.to_bytes_with_nul();
    // `libcudart.so.13`, or `libcudart-d0da41ae.so.11.0` as bundled in wheels.
    if !(file.starts_with(b"libcudart.so") || file.starts_with(b"libcudart-")) || name.len() > bytes.len() {
        return 0;
    }
    for (to, from) in bytes.iter_mut().zip(name) {
        *to = *from as c_char;
    }
    1
}
