//! The C functions of `torch_memory_saver` 0.0.10, by the names and types that its users rely on (`docs/torch_memory_saver.md`).
//!
//! They are another way to say what [`crate::abi`] and [`region`] say: a setting changes the region that the calling thread
//! is in, and outside of regions what the thread has as its own from then on. They are not in `include/vramctl.h`, because
//! programs that are written now need none of them.
//!
//! Every function may be called from any thread at any time and never ends the process. What goes wrong is logged; of a
//! pause and a resume, [`abi::vramctl_last_error`] has it too.

use crate::abi::{self, VramctlResult};
use crate::handlers;
use std::cell::RefCell;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::ptr;
use vramctl_backup as backup;
use vramctl_config::{self as config, CpuBackupBackend};
use vramctl_core::memory::{Memory, region};
use vramctl_model::{Backup, Error};

thread_local! {
    /// The string that the last call of [`tms_get_current_tag`] gave out.
    static TAG: RefCell<CString> = RefCell::default();
}

/// Pauses a tag, or with null or an empty one all of them. 0: done, or there was nothing to do. Otherwise a [`VramctlResult`]; nothing was
/// changed then.
///
/// # Safety
/// `tag` must be null or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_pause(tag: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    code("tms_pause", unsafe { abi::vramctl_pause(one_or_all(tag), -1, 0) })
}

/// Resumes a tag, or with null or an empty one all of them. 0: done, or there was nothing to do. Otherwise a [`VramctlResult`]; nothing was
/// changed then.
///
/// # Safety
/// `tag` must be null or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_resume(tag: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    code("tms_resume", unsafe { abi::vramctl_resume(one_or_all(tag), 0) })
}

/// The tag of the calling thread's managed allocations, whether or not they are managed now. Valid until the thread asks
/// again.
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

/// From now on, the calling thread's managed allocations get this tag.
///
/// # Safety
/// `tag` must be null (which is refused) or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_set_current_tag(tag: *const c_char) {
    said("tms_set_current_tag", || {
        // SAFETY: the caller's promise.
        let tag = unsafe { text(tag, "the tag")? };
        region::set_tag(tag.to_str().map_err(|_| Error::Invalid("a tag must be UTF-8".into()))?)
    });
}

/// Whether the calling thread's allocations are managed now, and not left to CUDA.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_interesting_region() -> bool {
    guarded(false, || region::current().is_some())
}

/// From now on, the calling thread's allocations are managed, or left to CUDA.
#[unsafe(no_mangle)]
pub extern "C" fn tms_set_interesting_region(managed: bool) {
    said("tms_set_interesting_region", || region::set_managed(managed));
}

/// Whether a pause keeps the contents of the calling thread's managed allocations in host memory.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_enable_cpu_backup() -> bool {
    guarded(false, || region::prospective().backup == Backup::Host)
}

/// From now on, a pause keeps the contents of what the calling thread allocates in host memory; or no longer does.
#[unsafe(no_mangle)]
pub extern "C" fn tms_set_enable_cpu_backup(keep: bool) {
    said("tms_set_enable_cpu_backup", || set_backup(Backup::Host, keep));
}

/// Whether a pause keeps the contents of the calling thread's managed allocations on disk.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_enable_disk_backup() -> bool {
    guarded(false, || region::prospective().backup == Backup::Disk)
}

/// From now on, a pause keeps the contents of what the calling thread allocates on disk; or no longer does.
#[unsafe(no_mangle)]
pub extern "C" fn tms_set_enable_disk_backup(keep: bool) {
    said("tms_set_enable_disk_backup", || set_backup(Backup::Disk, keep));
}

/// `pinned` or `mmap`: what the calling thread has set, or `TMS_INIT_CPU_BACKUP_BACKEND`. Valid for ever.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_cpu_backup_backend() -> *const c_char {
    guarded(CpuBackupBackend::Pinned.name().as_ptr(), || region::backend().name().as_ptr())
}

/// `mmap`: host memory for what the calling thread allocates from now on has gone back to the system when a resume returns.
/// `pinned`: it may stay for a while, for the next pause (`VRAMCTL_HOST_KEEP`). It is pinned while it is in use either way.
///
/// # Safety
/// `backend` must be null (which is refused) or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_set_cpu_backup_backend(backend: *const c_char) {
    said("tms_set_cpu_backup_backend", || {
        // SAFETY: the caller's promise.
        let word = unsafe { text(backend, "the backend")? };
        let known = CpuBackupBackend::of_name(word);
        region::set_backend(known.ok_or_else(|| Error::Invalid(format!("'{}' is not pinned or mmap", word.to_string_lossy())))?)
    });
}

/// Whether saved contents stay in host memory after a resume, for every tag of which nothing else was said.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_retain_cpu_backup() -> bool {
    guarded(false, backup::retains_by_default)
}

/// From the next resume on, saved contents stay in host memory, or do not: in the whole process, for every tag of which nothing
/// else was said. Unlike [`abi::vramctl_set_retain`], it leaves what is retained now until the next resume.
#[unsafe(no_mangle)]
pub extern "C" fn tms_set_retain_cpu_backup(retain: bool) {
    said("tms_set_retain_cpu_backup", || Memory::get().set_retain_in_resumes(None, Some(retain)));
}

/// Where contents are kept that are kept on disk, from the next pause on; made if it is not there. Each paused allocation has a
/// file in it, as large as itself. Those that killed processes have left there are removed.
///
/// # Safety
/// `directory` must be null (which is refused) or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_set_disk_backup_dir(directory: *const c_char) {
    said("tms_set_disk_backup_dir", || {
        // SAFETY: the caller's promise.
        let path = Path::new(OsStr::from_bytes(unsafe { text(directory, "the directory")? }.to_bytes()));
        // Where it cannot be made, the next call says so.
        let _ = std::fs::create_dir_all(path);
        Memory::get().set_disk_directory(Some(path), true)
    });
}

/// The kept contents of `bytes` bytes at `address`, to read; null if they are not in an allocation whose contents are in host
/// memory, paused or retained. Valid until the allocation is resumed and not retained, or freed, or another pause is short of
/// host memory; a pause writes over what is retained.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_cpu_backup_pointer(address: *const u8, bytes: u64) -> *const u8 {
    guarded(ptr::null(), || {
        let kept = Memory::get().find(address as u64).and_then(|allocation| abi::kept_from(&allocation, address as u64));
        kept.filter(|(_, there)| bytes <= *there as u64).map_or(ptr::null(), |(found, _)| found)
    })
}

/// From now on, a managed allocation that would leave less than `bytes` of its device free is answered with out of memory.
#[unsafe(no_mangle)]
pub extern "C" fn set_memory_margin_bytes(bytes: u64) {
    code("set_memory_margin_bytes", abi::vramctl_set_memory_margin(bytes));
}

/// Memory on a device for torch's pluggable allocator: managed where the calling thread is in a region, CUDA's own
/// elsewhere. Null: there is none.
///
/// Works in a library that was opened and not preloaded, too.
#[unsafe(no_mangle)]
pub extern "C" fn tms_torch_malloc(bytes: isize, device: c_int, _stream: *mut c_void) -> *mut c_void {
    let none = ptr::null_mut();
    guarded(none, || usize::try_from(bytes).map_or(none, |bytes| handlers::torch_malloc(bytes, device)))
}

/// Frees memory of [`tms_torch_malloc`].
///
/// # Safety
/// `pointer` must be null or from there, and not freed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_torch_free(pointer: *mut c_void, _bytes: isize, _device: c_int, _stream: *mut c_void) {
    // SAFETY: the caller's promise.
    guarded((), || unsafe { handlers::torch_free(pointer) });
}

/// Of the three things that can become of contents, one is said at a time: keeping them here is no longer keeping them
/// there.
fn set_backup(backup: Backup, keep: bool) -> Result<(), Error> {
    if keep {
        region::set_backup(backup)
    } else if region::prospective().backup == backup {
        region::set_backup(Backup::Discard)
    } else {
        Ok(())
    }
}

/// A tag as [`abi`] takes it: null for all.
unsafe fn one_or_all(tag: *const c_char) -> *const c_char {
    // SAFETY: a string that is not null has at least its NUL, by the caller's promise.
    if !tag.is_null() && unsafe { *tag } == 0 { ptr::null() } else { tag }
}

/// A C string that must be there.
unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Result<&'a CStr, Error> {
    if pointer.is_null() {
        return Err(Error::Invalid(format!("{what} is null")));
    }
    // SAFETY: not null, and NUL-terminated by the caller's promise.
    Ok(unsafe { CStr::from_ptr(pointer) })
}

/// The code of what was done. A tag that nothing has is nothing to do: engines ask for every tag that they know.
fn code(function: &str, result: VramctlResult) -> c_int {
    if matches!(result, VramctlResult::Ok | VramctlResult::UnknownTag) {
        return 0;
    }
    config::set_up_logger();
    // SAFETY: a NUL-terminated string of the library's own, valid until this thread's next failure.
    let text = unsafe { CStr::from_ptr(abi::vramctl_last_error()) };
    log::error!("{function}: {}", text.to_string_lossy());
    result as c_int
}

/// Runs the body of a function that cannot say what went wrong.
fn said(function: &str, body: impl FnOnce() -> Result<(), Error>) {
    guarded((), || {
        if let Err(error) = body() {
            config::set_up_logger();
            log::error!("{function}: {error}");
        }
    });
}

/// A panic must not cross into C. It is a defect; the call answers `otherwise`.
fn guarded<R>(otherwise: R, body: impl FnOnce() -> R) -> R {
    panic::catch_unwind(AssertUnwindSafe(body)).unwrap_or(otherwise)
}
