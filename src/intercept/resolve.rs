//! The lookup functions `dlsym` and `dlvsym`, and `dlerror`. If a lookup finds a driver function that has an entry ([`entries`]), it returns the
//! entry instead; the same goes for functions of NCCL ([`nccl`]).
//!
//! The real lookup always comes first. Its result is replaced only if it is exactly the function that the entry stands for. There is no
//! caching, and no lookup finds more than it would otherwise: this library's own export only if another library has the function, too.
//! Nothing here allocates or takes a lock of ours: a lookup may come from anywhere, including a constructor or an allocator.
//!
//! A library that an entry calls gets the real function: it comes later in the search order, has a function of that name of its own or
//! stands in for `libcuda.so.1`, and with our entry the two would call each other forever. It is recognised by the return address, so it
//! must do the lookup itself.
//!
//! Not covered:
//!
//! - `cuGetExportTable`, whose functions have no names, and a copy of `dlsym` from the C library's own handle;
//! - a library opened with `RTLD_DEEPBIND` or in a namespace of `dlmopen` ([`vramctl_host::opens`]);
//! - a weak reference of a library that is opened later than the program's start ([`vramctl_host::weak`]): it finds ours, and gets
//!   `CUDA_ERROR_NOT_FOUND` without a driver;
//! - a lookup in the default scope by such a library: it finds ours if the other library is loaded, even if for somebody else;
//! - a library with *variables* named like driver functions (CUEW and other loaders that fill in pointers) that does not hide them: they
//!   are bound to the exported functions, and the library crashes when it writes to them.

use crate::entry::DriverFunction;
use crate::hooks::HOOKED;
use crate::jump::{Ruling, jumps};
use crate::nccl::NcclFunction;
use crate::real::DRIVER;
use crate::{copies, entries, linked, nccl, runtimes};
use std::arch::naked_asm;
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic;
use std::ptr;
use vramctl_host::symbols::{self, Loaded};
use vramctl_host::worker;

/// The names of this module's functions that are exported in addition to the entries.
pub const RESOLVERS: [&str; 3] = ["dlsym", "dlvsym", "dlerror"];

/// Nothing is found, in the name of the program itself or of the calling library.
fn missing(name: &CStr, caller: *const c_void, is_program: bool) -> Ruling {
    if is_program || symbols::is_in_program(caller) {
        // The error names this library; `dlerror` knows that it is about the program.
        // SAFETY: `RTLD_NEXT` needs no handle.
        unsafe { symbols::dlsym(libc::RTLD_NEXT, name) };
    } else {
        linked::in_loaded(symbols::path_around(caller), name);
    }
    Ruling::answer(ptr::null_mut())
}

thread_local! {
    /// What [`dlerror`] has returned.
    static TEXT: Cell<[u8; 512]> = const { Cell::new([0; 512]) };
}

/// `dlerror`.
///
/// # Safety
/// As the C library's.
pub unsafe extern "C" fn dlerror() -> *mut c_char {
    let text = symbols::dlerror();
    panic::catch_unwind(|| as_of_program(text)).ok().flatten().unwrap_or(text)
}

/// The error as it is without this library, if the loader names this library in it: it has the functions that it exports.
fn as_of_program(text: *const c_char) -> Option<*mut c_char> {
    unsafe extern "C" {
        static program_invocation_name: *const c_char;
    }
    if text.is_null() {
        return None;
    }
    // SAFETY: the loader's texts are NUL-terminated, as is the C library's own variable.
    let (text, program) = unsafe { (CStr::from_ptr(text), CStr::from_ptr(program_invocation_name)) };
    let own = symbols::path_around(as_of_program as *const c_void);
    // SAFETY: null, or the loader's own text.
    let own = (!own.is_null()).then(|| unsafe { CStr::from_ptr(own) })?;
    let rest = text.to_bytes_with_nul().strip_prefix(own.to_bytes())?;
    let missing = CStr::from_bytes_with_nul(rest.strip_prefix(b": undefined symbol: ")?).ok()?;
    if !is_exported(missing) {
        return None;
    }
    let (name, place) = (program.to_bytes(), TEXT.with(Cell::as_ptr).cast::<u8>());
    // SAFETY: the thread's own, and as long as is checked.
    (name.len() + rest.len() <= 512).then(|| unsafe {
        place.copy_from_nonoverlapping(name.as_ptr(), name.len());
        place.add(name.len()).copy_from_nonoverlapping(rest.as_ptr(), rest.len());
        place.cast()
    })
}

jumps!(dlsym(handle: *mut c_void, name: *const c_char) => judge_dlsym);
jumps!(dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) => judge_dlvsym);

unsafe extern "C" fn judge_dlsym(handle: *mut c_void, name: *const c_char, _: usize, caller: *const c_void) -> Ruling {
    // SAFETY: the program promises that the name is null or NUL-terminated.
    if let Some(own) = panic::catch_unwind(|| unsafe { asked_by_us(name, caller) }).ok().flatten() {
        return Ruling::answer(own);
    }
    // Without a real function there is nothing to find.
    let Some(real) = symbols::next_dlsym() else { return Ruling::answer(ptr::null_mut()) };
    let onward = real as *mut c_void;
    panic::catch_unwind(|| {
        // SAFETY: the program promises that the name is null or NUL-terminated, and its promises about the handle.
        unsafe { judge(name, handle, caller, onward, |handle| real(handle, name)) }
    })
    .unwrap_or(Ruling::onward(onward))
}

/// What Rust's standard library asks when a thread of this library's starts. A call of the program waits for that, so it must not need the loader's
/// lock, which the program's other thread may have.
unsafe fn asked_by_us(name: *const c_char, caller: *const c_void) -> Option<*mut c_void> {
    // SAFETY: the caller's promise.
    let is_asked = unsafe { begins_with(name, c"__pthread_get_minstack".to_bytes_with_nul()) };
    (is_asked && symbols::is_ours(caller)).then(worker::get_minstack)
}

/// Whether a name begins with these letters.
///
/// # Safety
/// `name` must be null or NUL-terminated.
unsafe fn begins_with(name: *const c_char, letters: &[u8]) -> bool {
    // SAFETY: NUL-terminated by the caller's promise, so each byte may be read if the ones before are not zero.
    !name.is_null() && letters.iter().enumerate().all(|(at, wanted)| unsafe { *name.add(at) as u8 } == *wanted)
}

unsafe extern "C" fn judge_dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char, caller: *const c_void) -> Ruling {
    let Some(real) = symbols::next_dlvsym() else { return Ruling::answer(ptr::null_mut()) };
    let onward = real as *mut c_void;
    panic::catch_unwind(|| {
        // SAFETY: as in `judge_dlsym`.
        if let Some(own) = unsafe { own_lookup(handle, name, caller) } {
            return Ruling::answer(own);
        }
        // SAFETY: as above.
        unsafe { judge(name, handle, caller, onward, |handle| real(handle, name, version)) }
    })
    .unwrap_or(Ruling::onward(onward))
}

/// Handles lookups of `dlsym` itself. Another preloaded library finds the next `dlsym` by asking `dlvsym` for the C library's version of
/// it. Our `dlsym` has no version, so it would be skipped. A library after this one must not find ours: the two would call each other
/// forever.
unsafe fn own_lookup(handle: *mut c_void, name: *const c_char, caller: *const c_void) -> Option<*mut c_void> {
    if handle != libc::RTLD_NEXT || name.is_null() || copies::another_answers() {
        return None;
    }
    // SAFETY: NUL-terminated by the caller's promise.
    let own = match unsafe { CStr::from_ptr(name) }.to_bytes() {
        b"dlsym" => dlsym as *mut c_void,
        b"dlvsym" => dlvsym as *mut c_void,
        _ => return None,
    };
    symbols::is_before_us(caller).then_some(own)
}

/// A function that this library exports in place of another's.
enum Exported {
    Runtime,
    Driver(&'static DriverFunction),
    Nccl(&'static NcclFunction),
}

impl Exported {
    /// # Safety
    /// `name` must be null or NUL-terminated.
    unsafe fn named<'name>(name: *const c_char) -> Option<(Self, &'name CStr)> {
        // SAFETY: the caller's promise.
        if unsafe { !(begins_with(name, b"cu") || begins_with(name, b"nccl")) } {
            return None;
        }
        // SAFETY: as above.
        let name = unsafe { CStr::from_ptr(name) };
        let function = match name.to_bytes() {
            [b'c', b'u', b'A'..=b'Z', ..] => Self::Driver(entries::of_symbol(name)?),
            [b'n', ..] => Self::Nccl(nccl::of_symbol(name)?),
            bytes => HOOKED.iter().any(|hooked| hooked.as_bytes() == bytes).then_some(Self::Runtime)?,
        };
        Some((function, name))
    }

    /// Whether a library is loaded whose function this could be, for anybody.
    fn is_loaded(&self) -> bool {
        match self {
            Self::Runtime => runtimes::is_loaded(),
            Self::Driver(_) => is_driver_loaded(),
            Self::Nccl(function) => !nccl::linked_for(ptr::null(), function.symbol).is_null(),
        }
    }
}

fn is_driver_loaded() -> bool {
    let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
    // SAFETY: a NUL-terminated name. A library that is loaded already stays loaded and is not initialised again.
    !unsafe { libc::dlopen(DRIVER.as_ptr(), flags) }.is_null()
}

/// Whether this library exports the function in place of CUDA's or NCCL's.
pub fn is_exported(name: &CStr) -> bool {
    // SAFETY: NUL-terminated.
    unsafe { Exported::named(name.as_ptr()) }.is_some()
}

/// Judges a lookup.
unsafe fn judge(
    name: *const c_char,
    handle: *mut c_void,
    caller: *const c_void,
    onward: *mut c_void,
    real: impl Fn(*mut c_void) -> *mut c_void,
) -> Ruling {
    // SAFETY: the caller's promise.
    let Some((function, name)) = (unsafe { Exported::named(name) }) else { return Ruling::onward(onward) };
    if copies::another_answers() {
        return Ruling::onward(onward);
    }
    // A lookup changes nothing but what `dlerror` tells.
    let _errno = Errno::keep();
    if handle == libc::RTLD_NEXT {
        let is_missing = symbols::is_next_after(caller, name) && !is_behind_us(name);
        return if is_missing { missing(name, caller, false) } else { Ruling::onward(onward) };
    }
    let found = real(handle);
    // SAFETY: the caller's promise.
    if symbols::is_ours(found) && !unsafe { is_there(&function, name, handle, caller) } {
        // SAFETY: the caller's promise.
        return missing(name, caller, unsafe { symbols::is_program(handle) });
    }
    let is_default = handle == libc::RTLD_DEFAULT;
    match function {
        // SAFETY: the caller's promises.
        Exported::Driver(function) if unsafe { has_entry(function, found, handle, caller) } => Ruling::answer(function.entry.cast_mut()),
        Exported::Nccl(function) if symbols::is_ours(found) => {
            Ruling::answer(function.in_place_of(nccl::linked_for(caller, function.symbol)))
        }
        Exported::Nccl(function) if !is_default && !found.is_null() => Ruling::answer(function.in_place_of(found)),
        // The default scope depends on the caller. If nothing was found, the real function's error stays unchanged.
        _ if is_default => Ruling::onward(onward),
        _ => Ruling::answer(found),
    }
}

/// Whether a lookup that has found this library's function would find another without it.
unsafe fn is_there(function: &Exported, name: &CStr, handle: *mut c_void, caller: *const c_void) -> bool {
    if is_behind_us(name) {
        return true;
    }
    let is_default = handle == libc::RTLD_DEFAULT;
    // SAFETY: the caller's promise.
    if unsafe { symbols::is_program(handle) } || is_default && symbols::is_before_us(caller) {
        return false;
    }
    // Any other handle is one of this library's. In the default scope of a library is what came with it. It is not known what that was, so
    // everything that is loaded counts, and what the library depends on.
    let is_there = !is_default || function.is_loaded() || !linked::in_loaded(symbols::path_around(caller), name).is_null();
    if is_there {
        symbols::dlerror();
    }
    is_there
}

/// Whether a library after this one has the function, for everybody.
fn is_behind_us(name: &CStr) -> bool {
    // SAFETY: `RTLD_NEXT` needs no handle.
    !unsafe { symbols::dlsym(libc::RTLD_NEXT, name) }.is_null()
}

/// Whether a lookup that has found this function gets the entry instead.
unsafe fn has_entry(function: &DriverFunction, found: *mut c_void, handle: *mut c_void, caller: *const c_void) -> bool {
    // SAFETY: the lookup succeeded, so the handle is open.
    handle != libc::RTLD_DEFAULT && !found.is_null() && unsafe { is_of_driver(found, function, handle) } && !function.is_behind(caller)
}

/// Whether the found function is the driver's, through any handle, or the one that another library puts in its place.
unsafe fn is_of_driver(found: *mut c_void, function: &DriverFunction, handle: *mut c_void) -> bool {
    // SAFETY: the caller's promise.
    unsafe { Loaded::behind(handle) }.is_some_and(|library| library.is_named(DRIVER))
        || Loaded::around(found).is_some_and(|driver| driver.is_named(DRIVER) && driver.symbol(function.symbol) == Some(found))
}

/// Leaves the thread's error number as it is.
struct Errno(c_int);

impl Errno {
    fn keep() -> Self {
        // SAFETY: the C library's own place for it.
        Self(unsafe { *libc::__errno_location() })
    }
}

impl Drop for Errno {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { *libc::__errno_location() = self.0 };
    }
}
