//! The lookup functions `dlsym` and `dlvsym`. If a lookup finds a driver function that has an entry ([`entries`]), it returns the entry
//! instead; the same goes for functions of NCCL ([`nccl`]).
//!
//! The real lookup always comes first. Its result is replaced only if it is exactly the function that the entry stands for. There is no
//! caching, and no lookup finds more than it would otherwise. Nothing here allocates or takes a lock of ours: a lookup may come from
//! anywhere, including a constructor or an allocator.
//!
//! The meaning of `RTLD_NEXT` and `RTLD_DEFAULT` depends on the caller. So [`dlsym`] does not call the real one but jumps to it, which
//! leaves the program's return address in place.
//!
//! A library that an entry calls gets the real function: it comes later in the search order, has a function of that name of its own or
//! stands in for `libcuda.so.1`, and with our entry the two would call each other forever. It is recognised by the return address, so it
//! must do the lookup itself.
//!
//! Not covered:
//!
//! - `cuGetExportTable`, whose functions have no names, and a copy of `dlsym` from the C library's own handle;
//! - a library opened with `RTLD_DEEPBIND` or in a namespace of `dlmopen` ([`vramctl_host::opens`]);
//! - a weak reference to a driver function: it finds ours, and gets `CUDA_ERROR_NOT_FOUND` without a driver;
//! - a library with *variables* named like driver functions (CUEW and other loaders that fill in pointers) that does not hide them: they
//!   are bound to the exported functions, and the library crashes when it writes to them.

use crate::entries;
use crate::entry::DriverFunction;
use crate::nccl::NcclFunction;
use crate::real::DRIVER;
use crate::{copies, nccl};
use std::arch::naked_asm;
use std::ffi::{CStr, c_char, c_void};
use std::panic;
use std::ptr;
use vramctl_host::symbols::{self, Loaded};

/// The names of this module's functions that are exported in addition to the entries.
pub const RESOLVERS: [&str; 2] = ["dlsym", "dlvsym"];

/// The outcome of a lookup. Returned in two registers.
#[repr(C)]
struct Ruling {
    /// The answer, if `onward` is null.
    answer: *mut c_void,
    /// The real function to jump to, as if this library were not there; or null.
    onward: *mut c_void,
}

impl Ruling {
    fn answer(answer: *mut c_void) -> Self {
        Self { answer, onward: ptr::null_mut() }
    }

    fn onward(real: *mut c_void) -> Self {
        Self { answer: ptr::null_mut(), onward: real }
    }
}

/// `dlsym`.
///
/// # Safety
/// As the C library's.
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        ".cfi_startproc",
        // Who asks.
        "mov rdx, [rsp]",
        "push rdi",
        ".cfi_adjust_cfa_offset 8",
        "push rsi",
        ".cfi_adjust_cfa_offset 8",
        // Aligns the stack.
        "push rdx",
        ".cfi_adjust_cfa_offset 8",
        "call {judge}",
        "mov r11, rdx",
        "pop rdx",
        ".cfi_adjust_cfa_offset -8",
        "pop rsi",
        ".cfi_adjust_cfa_offset -8",
        "pop rdi",
        ".cfi_adjust_cfa_offset -8",
        "test r11, r11",
        "jz 2f",
        "jmp r11",
        "2: ret",
        ".cfi_endproc",
        judge = sym judge_dlsym,
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        ".cfi_startproc",
        "stp x29, x30, [sp, #-32]!",
        ".cfi_def_cfa_offset 32",
        ".cfi_offset 29, -32",
        ".cfi_offset 30, -24",
        "stp x0, x1, [sp, #16]",
        // Who asks.
        "mov x2, x30",
        "bl {judge}",
        "cbz x1, 2f",
        "mov x16, x1",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "br x16",
        "2: ldp x29, x30, [sp], #32",
        "ret",
        ".cfi_endproc",
        judge = sym judge_dlsym,
    );
}

/// `dlvsym`.
///
/// # Safety
/// As the C library's.
#[unsafe(naked)]
pub unsafe extern "C" fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void {
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        ".cfi_startproc",
        // Who asks.
        "mov rcx, [rsp]",
        "push rdi",
        ".cfi_adjust_cfa_offset 8",
        "push rsi",
        ".cfi_adjust_cfa_offset 8",
        "push rdx",
        ".cfi_adjust_cfa_offset 8",
        "call {judge}",
        "mov r11, rdx",
        "pop rdx",
        ".cfi_adjust_cfa_offset -8",
        "pop rsi",
        ".cfi_adjust_cfa_offset -8",
        "pop rdi",
        ".cfi_adjust_cfa_offset -8",
        "test r11, r11",
        "jz 2f",
        "jmp r11",
        "2: ret",
        ".cfi_endproc",
        judge = sym judge_dlvsym,
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        ".cfi_startproc",
        "stp x29, x30, [sp, #-48]!",
        ".cfi_def_cfa_offset 48",
        ".cfi_offset 29, -48",
        ".cfi_offset 30, -40",
        "stp x0, x1, [sp, #16]",
        "str x2, [sp, #32]",
        // Who asks.
        "mov x3, x30",
        "bl {judge}",
        "cbz x1, 2f",
        "mov x16, x1",
        "ldp x0, x1, [sp, #16]",
        "ldr x2, [sp, #32]",
        "ldp x29, x30, [sp], #48",
        "br x16",
        "2: ldp x29, x30, [sp], #48",
        "ret",
        ".cfi_endproc",
        judge = sym judge_dlvsym,
    );
}

unsafe extern "C" fn judge_dlsym(handle: *mut c_void, name: *const c_char, caller: *const c_void) -> Ruling {
    // Without a real function there is nothing to find.
    let Some(real) = symbols::next_dlsym() else { return Ruling::answer(ptr::null_mut()) };
    let onward = real as *mut c_void;
    panic::catch_unwind(|| {
        // SAFETY: the program promises that the name is null or NUL-terminated, and its promises about the handle.
        unsafe { judge(name, handle, caller, onward, |handle| real(handle, name)) }
    })
    .unwrap_or(Ruling::onward(onward))
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

/// Judges a lookup.
unsafe fn judge(
    name: *const c_char,
    handle: *mut c_void,
    caller: *const c_void,
    onward: *mut c_void,
    real: impl Fn(*mut c_void) -> *mut c_void,
) -> Ruling {
    // SAFETY: NUL-terminated by the caller's promise, so each byte may be read if the ones before are not zero.
    let letter = |at| unsafe { *name.add(at) as u8 };
    let begins_with = |letters: &[u8]| letters.iter().enumerate().all(|(at, wanted)| letter(at) == *wanted);
    // SAFETY: as above.
    let whole = || unsafe { CStr::from_ptr(name) };
    if name.is_null() {
        return Ruling::onward(onward);
    }
    if begins_with(b"cu")
        && letter(2).is_ascii_uppercase()
        && let Some(function) = entries::of_symbol(whole())
    {
        // SAFETY: the caller's promises.
        return unsafe { judge_driver(function, handle, caller, onward, real) };
    }
    if begins_with(b"nccl")
        && let Some(function) = nccl::of_symbol(whole())
    {
        return judge_nccl(function, handle, caller, onward, &real);
    }
    Ruling::onward(onward)
}

/// Judges the lookup of a function of NCCL's.
fn judge_nccl(
    function: &NcclFunction,
    handle: *mut c_void,
    caller: *const c_void,
    onward: *mut c_void,
    real: &impl Fn(*mut c_void) -> *mut c_void,
) -> Ruling {
    if handle == libc::RTLD_NEXT || copies::another_answers() {
        return Ruling::onward(onward);
    }
    let mut found = real(handle);
    if symbols::is_ours(found) {
        // Our own export was found: programs look for NCCL this way, and it may not be loaded.
        found = nccl::linked_for(caller, function.symbol);
        if found.is_null() {
            // Leaves the loader's error for `dlerror`.
            // SAFETY: `RTLD_NEXT` needs no handle.
            unsafe { symbols::dlsym(libc::RTLD_NEXT, function.symbol) };
        }
    } else if handle == libc::RTLD_DEFAULT {
        // The default scope depends on the caller.
        return Ruling::onward(onward);
    }
    Ruling::answer(if found.is_null() { found } else { function.in_place_of(found) })
}

/// Judges the lookup of a function of the table.
unsafe fn judge_driver(
    function: &DriverFunction,
    handle: *mut c_void,
    caller: *const c_void,
    onward: *mut c_void,
    real: impl Fn(*mut c_void) -> *mut c_void,
) -> Ruling {
    if handle == libc::RTLD_NEXT || copies::another_answers() {
        return Ruling::onward(onward);
    }
    let (found, default) = (real(handle), handle == libc::RTLD_DEFAULT);
    if symbols::is_ours(found) && !is_function_elsewhere(function) {
        // Our own export was found in a process without a driver: programs check for one this way.
        return Ruling::answer(ptr::null_mut());
    }
    // SAFETY: the lookup succeeded, so the handle is open.
    if !default && !found.is_null() && unsafe { is_of_driver(found, function, handle) } && !function.is_behind(caller) {
        return Ruling::answer(function.entry.cast_mut());
    }
    // If nothing was found, the real function's error stays unchanged. The default scope depends on the caller.
    if default { Ruling::onward(onward) } else { Ruling::answer(found) }
}

/// Whether the found function is the driver's, through any handle, or the one that another library puts in its place.
unsafe fn is_of_driver(found: *mut c_void, function: &DriverFunction, handle: *mut c_void) -> bool {
    let itself = |driver: Loaded| driver.is_named(DRIVER) && driver.symbol(function.symbol) == Some(found);
    // SAFETY: the caller's promise.
    let through_its_handle = || unsafe { Loaded::behind(handle) }.is_some_and(|library| library.is_named(DRIVER));
    through_its_handle() || Loaded::around(found).is_some_and(itself)
}

/// Whether any other library has the function. If not, leaves the loader's error for `dlerror`.
fn is_function_elsewhere(function: &DriverFunction) -> bool {
    // SAFETY: a NUL-terminated name; `RTLD_NEXT` needs no handle. A library that is loaded already stays loaded and is not initialised
    // again.
    unsafe {
        let driver = libc::dlopen(DRIVER.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE);
        !driver.is_null() || !symbols::dlsym(libc::RTLD_NEXT, function.symbol).is_null()
    }
}
