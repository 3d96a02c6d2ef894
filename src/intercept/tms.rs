//! The C functions of `torch_memory_saver` 0.0.10, with the names and types that its users rely on (`docs/torch_memory_saver.md`).
//!
//! They are a thin layer over [`crate::abi`] and [`region`]: a setting changes the calling thread's innermost region or, outside
//! of regions, the thread's own default. They are not in `include/vramctl.h`, because new programs do not need them.
//!
//! All functions are thread-safe, may be called at any time and never end the process. Errors are logged; for a pause or resume,
//! [`abi::vramctl_last_error`] has them too.

use crate::abi::{self, VramctlResult};
use crate::call::{Api, Call, Origin};
use crate::entry::{jump, pass_caller};
use crate::runtimes::Runtime;
use crate::table::{Effect, Flavour};
use crate::{alloc, copies};
use std::arch::naked_asm;
use std::cell::RefCell;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use vramctl_backup as backup;
use vramctl_config::{self as config, CpuBackupBackend};
use vramctl_core::memory::{Memory, region};
use vramctl_driver::RelaxedCapture;
use vramctl_model::{self as model, Error, Kind, Policy, StatusCode};

thread_local! {
    /// The string that [`tms_get_current_tag`] last returned.
    static TAG: RefCell<CString> = RefCell::default();
}

/// Pauses a tag, or all tags if it is null or empty. Returns 0 on success or if no allocation has the tag, else a
/// [`VramctlResult`]; nothing has changed then.
///
/// # Safety
/// `tag` must be null or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_pause(tag: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    code("tms_pause", unsafe { abi::vramctl_pause(one_or_all(tag), -1, 0) })
}

/// Resumes a tag, or all tags if it is null or empty. Returns 0 on success or if no allocation has the tag, else a
/// [`VramctlResult`]; nothing has changed then.
///
/// # Safety
/// `tag` must be null or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_resume(tag: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    code("tms_resume", unsafe { abi::vramctl_resume(one_or_all(tag), 0) })
}

/// The tag that the calling thread's allocations get when they are managed. Valid until the thread's next call.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_current_tag() -> *const c_char {
    guarded(c"default".as_ptr(), || {
        let tag = CString::new(&*region::prospective().tag).unwrap_or_default();
        TAG.try_with(|last| {
            *last.borrow_mut() = tag;
            last.borrow().as_ptr()
        })
        .unwrap_or(c"default".as_ptr())
    })
}

/// Sets the tag of the calling thread's managed allocations.
///
/// # Safety
/// `tag` must be null (an error) or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_set_current_tag(tag: *const c_char) {
    said("tms_set_current_tag", || {
        // SAFETY: the caller's promise.
        let tag = unsafe { text(tag, "the tag")? };
        region::set_tag(tag.to_str().map_err(|_| Error::Invalid("a tag must be UTF-8".into()))?)
    });
}

/// Whether the calling thread's allocations are managed, and not left to CUDA.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_interesting_region() -> bool {
    guarded(false, || region::current().is_some())
}

/// Sets whether the calling thread's allocations are managed or left to CUDA.
#[unsafe(no_mangle)]
pub extern "C" fn tms_set_interesting_region(managed: bool) {
    said("tms_set_interesting_region", || region::set_managed(managed));
}

/// Whether a pause keeps the contents of the calling thread's managed allocations in host memory.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_enable_cpu_backup() -> bool {
    guarded(false, || region::prospective().backup == Policy::Host)
}

/// Sets whether a pause keeps the contents of the calling thread's future allocations in host memory.
#[unsafe(no_mangle)]
pub extern "C" fn tms_set_enable_cpu_backup(keep: bool) {
    said("tms_set_enable_cpu_backup", || set_backup(Policy::Host, keep));
}

/// Whether a pause keeps the contents of the calling thread's managed allocations on disk.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_enable_disk_backup() -> bool {
    guarded(false, || region::prospective().backup == Policy::Disk)
}

/// Sets whether a pause keeps the contents of the calling thread's future allocations on disk.
#[unsafe(no_mangle)]
pub extern "C" fn tms_set_enable_disk_backup(keep: bool) {
    said("tms_set_enable_disk_backup", || set_backup(Policy::Disk, keep));
}

/// `pinned` or `mmap`, as set by the calling thread or by `TMS_INIT_CPU_BACKUP_BACKEND`. The string is static.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_cpu_backup_backend() -> *const c_char {
    guarded(CpuBackupBackend::Pinned.name().as_ptr(), || region::backend().name().as_ptr())
}

/// Sets when the host memory for the calling thread's future allocations is freed. `mmap`: before a resume returns. `pinned`:
/// later, to speed up the next pause (`VRAMCTL_HOST_KEEP`). Either way it is pinned while in use.
///
/// # Safety
/// `backend` must be null (an error) or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_set_cpu_backup_backend(backend: *const c_char) {
    said("tms_set_cpu_backup_backend", || {
        // SAFETY: the caller's promise.
        let word = unsafe { text(backend, "the backend")? };
        let known = CpuBackupBackend::of_name(word);
        region::set_backend(known.ok_or_else(|| Error::Invalid(format!("'{}' is not pinned or mmap", word.to_string_lossy())))?)
    });
}

/// Whether backups in host memory are retained after a resume, for tags without a setting of their own.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_retain_cpu_backup() -> bool {
    guarded(false, backup::retains_by_default)
}

/// Sets whether future resumes retain backups in host memory, in the whole process, for tags without a setting of their own.
/// Unlike [`abi::vramctl_set_retain`], it drops retained backups only at the next resume.
#[unsafe(no_mangle)]
pub extern "C" fn tms_set_retain_cpu_backup(retain: bool) {
    said("tms_set_retain_cpu_backup", || Memory::get().set_retain_in_resumes(None, Some(retain)));
}

/// Sets the directory in which future pauses keep contents on disk. Creates it if missing. Each paused allocation has a file of its
/// own size in it. Files left behind by killed processes are removed.
///
/// # Safety
/// `directory` must be null (an error) or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_set_disk_backup_dir(directory: *const c_char) {
    said("tms_set_disk_backup_dir", || {
        // SAFETY: the caller's promise.
        let path = Path::new(OsStr::from_bytes(unsafe { text(directory, "the directory")? }.to_bytes()));
        // If this fails, the next call reports it.
        let _ = std::fs::create_dir_all(path);
        Memory::get().set_disk_directory(Some(path), true)
    });
}

/// Gives read access to the contents of `bytes` bytes at `address` in host memory. Null unless all of them are in one allocation
/// that is paused or retained. Valid until the allocation is freed, resumed without being retained, or its retained backup is
/// dropped because a pause needs the memory. The next pause overwrites a retained backup.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_cpu_backup_pointer(address: *const u8, bytes: u64) -> *const u8 {
    guarded(ptr::null(), || {
        let kept = Memory::get().registry.find(address as u64).and_then(|allocation| abi::kept_from(&allocation, address as u64));
        kept.filter(|(_, there)| bytes <= *there as u64).map_or(ptr::null(), |(found, _)| found)
    })
}

/// Sets a margin: a managed allocation that would leave less than `bytes` free on its device fails with out of memory.
#[unsafe(no_mangle)]
pub extern "C" fn set_memory_margin_bytes(bytes: u64) {
    code("set_memory_margin_bytes", abi::vramctl_set_memory_margin(bytes));
}

/// Allocates on a device for torch's pluggable allocator: managed memory if the calling thread's allocations are managed, else
/// CUDA's own. Null if out of memory.
///
/// Also works if the library was opened instead of preloaded.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub extern "C" fn tms_torch_malloc(bytes: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    naked_asm!(".cfi_startproc", pass_caller!(bytes device stream), jump!(), ".cfi_endproc", to = sym torch_malloc)
}

/// Frees memory of [`tms_torch_malloc`].
///
/// # Safety
/// `pointer` must be null or come from there, and must not have been freed.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn tms_torch_free(pointer: *mut c_void, bytes: isize, device: c_int, stream: *mut c_void) {
    naked_asm!(".cfi_startproc", pass_caller!(pointer bytes device stream), jump!(), ".cfi_endproc", to = sym torch_free)
}

extern "C" fn torch_malloc(bytes: isize, device: c_int, _stream: *mut c_void, caller: *const c_void) -> *mut c_void {
    let none = ptr::null_mut();
    let Ok(bytes) = usize::try_from(bytes) else { return none };
    guarded(none, || {
        let Some(runtime) = Runtime::of(caller) else {
            log::error!("cannot allocate on device {device}: no CUDA runtime is loaded");
            return none;
        };
        // For its own allocator, torch allows allocations in a capture, too.
        let _relaxed = RelaxedCapture::enter();
        let before = runtime.current_device();
        if before != Some(device) && !runtime.set_device(device) {
            log::error!("cannot allocate on device {device}: it does not exist");
            return none;
        }
        let mut pointer = none;
        let place = &raw mut pointer;
        // SAFETY: `pointer` is writable.
        let answer = as_hooked(Effect::Allocates, runtime, &mut || unsafe { runtime.cudaMalloc(place, bytes) }, |call| unsafe {
            alloc::malloc(call, place.cast(), bytes)
        });
        if let Some(before) = before.filter(|before| *before != device) {
            runtime.set_device(before);
        }
        if answer == model::code::SUCCESS { pointer } else { none }
    })
}

unsafe extern "C" fn torch_free(pointer: *mut c_void, _bytes: isize, _device: c_int, _stream: *mut c_void, caller: *const c_void) {
    guarded((), || {
        let Some(runtime) = Runtime::of(caller) else { return };
        let _relaxed = RelaxedCapture::enter();
        // SAFETY: the caller's promise.
        let answer =
            as_hooked(Effect::Frees, runtime, &mut || unsafe { runtime.cudaFree(pointer) }, |call| alloc::free(call, pointer as u64));
        // At exit the runtime may shut down before torch's pools; everything is freed then anyway.
        if !matches!(answer, model::code::SUCCESS | model::code::DEINITIALIZED) {
            log::error!("cannot free the memory at {pointer:p} (CUDA error {answer})");
        }
    });
}

/// Makes a call of the runtime's as if the program had made it.
fn as_hooked(
    effect: Effect,
    runtime: &'static Runtime,
    real: &mut dyn FnMut() -> StatusCode,
    handler: impl FnOnce(&mut Call) -> StatusCode,
) -> StatusCode {
    let origin = Origin { api: Api::Runtime(runtime), effect, flavour: Flavour::Plain, caller: ptr::null() };
    if copies::activate() { handler(&mut Call::new(origin, real)) } else { real() }
}

/// Switches a policy on or off. The policies exclude each other: switching one on switches the other off, and switching the
/// current one off leaves `Discard`.
fn set_backup(backup: Policy, keep: bool) -> Result<(), Error> {
    if keep {
        region::set_backup(backup)
    } else if region::prospective().backup == backup {
        region::set_backup(Policy::Discard)
    } else {
        Ok(())
    }
}

/// Converts an empty tag to null, [`abi`]'s way to say all tags.
unsafe fn one_or_all(tag: *const c_char) -> *const c_char {
    // SAFETY: the caller promises a NUL, so the first byte is readable.
    if !tag.is_null() && unsafe { *tag } == 0 { ptr::null() } else { tag }
}

/// A C string that must not be null.
unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Result<&'a CStr, Error> {
    if pointer.is_null() {
        return Err(Error::Invalid(format!("{what} is null")));
    }
    // SAFETY: not null, and NUL-terminated by the caller's promise.
    Ok(unsafe { CStr::from_ptr(pointer) })
}

/// Converts and logs a result. An unknown tag is a success: engines pause every tag they know, used or not.
fn code(function: &str, result: VramctlResult) -> c_int {
    if result == VramctlResult::OK || result == Kind::UnknownTag {
        return 0;
    }
    config::set_up_logger();
    // SAFETY: a NUL-terminated string of the library's own, valid until this thread's next failure.
    let text = unsafe { CStr::from_ptr(abi::vramctl_last_error()) };
    log::error!("{function}: {}", text.to_string_lossy());
    result.number()
}

/// Runs the body of a function that cannot return an error, and logs it.
fn said(function: &str, body: impl FnOnce() -> Result<(), Error>) {
    guarded((), || {
        if let Err(error) = body() {
            config::set_up_logger();
            log::error!("{function}: {error}");
        }
    });
}

/// Returns `otherwise` if `body` panics.
fn guarded<R>(otherwise: R, body: impl FnOnce() -> R) -> R {
    vramctl_host::guarded(body).unwrap_or(otherwise)
}
