//! The C ABI. `include/vramctl.h` is generated from this file.
//!
//! Every function may be called from any thread at any time, never ends the process, and returns a
//! [`VramctlResult`]; the text of the calling thread's last error is in [`vramctl_last_error`].

use std::cell::RefCell;
use std::ffi::{CStr, CString, OsStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::time::Duration;
use std::{ptr, slice};
use vramctl_control::protocol::Refusal;
use vramctl_core::engine;
use vramctl_core::memory::{Memory, region};
use vramctl_model::{Backup, Error, Kind, Report, Span, TransitionRequest};

/// What the functions return. A code never changes its meaning; new ones may be added.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VramctlResult {
    /// Done.
    Ok = 0,
    /// An argument makes no sense.
    Invalid = 1,
    /// No allocation has such a tag.
    UnknownTag = 2,
    /// Too little device memory.
    DeviceMemory = 3,
    /// Too little host memory.
    HostMemory = 4,
    /// The driver refused a call.
    Driver = 5,
    /// The program's own GPU work has failed; its context is lost.
    Work = 6,
    /// A stream is being captured into a graph.
    Capturing = 7,
    /// The device's work had not finished in time.
    Busy = 8,
    /// The device or driver lacks what is needed.
    Unsupported = 9,
    /// A defect of the library.
    Internal = 10,
    /// The address is not in a paused allocation whose contents were kept.
    NotPaused = 11,
    /// The buffer is too small; the size needed was written.
    BufferTooSmall = 12,
    /// A file for contents could not be made, written or read.
    Disk = 13,
    /// Over the socket only: a KV cache would be dropped that the engine's prefix cache still describes.
    PrefixCache = 14,
}

impl From<Kind> for VramctlResult {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Invalid => Self::Invalid,
            Kind::UnknownTag => Self::UnknownTag,
            Kind::DeviceMemory => Self::DeviceMemory,
            Kind::HostMemory => Self::HostMemory,
            Kind::Driver => Self::Driver,
            Kind::Work => Self::Work,
            Kind::Capturing => Self::Capturing,
            Kind::Busy => Self::Busy,
            Kind::Unsupported => Self::Unsupported,
            Kind::Internal => Self::Internal,
            Kind::NotPaused => Self::NotPaused,
            Kind::BufferTooSmall => Self::BufferTooSmall,
            Kind::Disk => Self::Disk,
            Kind::PrefixCache => Self::PrefixCache,
        }
    }
}

/// What becomes of contents while their memory is paused. Passed as an `int32_t`, so that a wrong number is an error and
/// not undefined behaviour.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VramctlBackup {
    /// As the environment variable `VRAMCTL_BACKUP` says for the tag, else kept in host memory.
    Default = 0,
    /// Dropped; after the resume the memory reads as zero.
    Discard = 1,
    /// Kept in host memory.
    Host = 2,
    /// Kept in a file, in the directory of `vramctl_set_disk_directory`, else of `VRAMCTL_DISK_DIR`.
    Disk = 3,
}

/// The library's version, such as `0.1.0`. A string of the library's own, valid for ever.
#[unsafe(no_mangle)]
pub extern "C" fn vramctl_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Begins a region of the calling thread: until the matching `vramctl_region_end`, its allocations get the tag `tag`.
/// Regions nest; the innermost counts. With a null `tag`, allocations in the region are left to CUDA.
///
/// `tag` is UTF-8 of at most 128 bytes without commas, equals signs and control characters, and is copied. `backup` is a
/// `VramctlBackup`. With `Discard`, neighbours share physical memory after a resume: what is freed of them goes back to the
/// driver with the last of them, at the next pause at the latest.
///
/// # Safety
/// `tag` must be null or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_region_begin(tag: *const c_char, backup: i32) -> VramctlResult {
    answer(|| {
        // SAFETY: the caller's promise.
        let tag = unsafe { text(tag)? };
        region::begin(tag, policy(backup)?)
    })
}

/// Ends the calling thread's innermost region. `Invalid`: it is in none.
#[unsafe(no_mangle)]
pub extern "C" fn vramctl_region_end() -> VramctlResult {
    answer(region::end)
}

/// The tag that an allocation of the calling thread would get now, as a NUL-terminated string in `buffer`; the empty
/// string: it would be left to CUDA.
///
/// `needed`, where not null, gets the string's size in bytes with its NUL. `BufferTooSmall`: `capacity` is less than
/// that, and nothing was written to `buffer`.
///
/// # Safety
/// `buffer` must be writable for `capacity` bytes, and `needed` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_current_tag(buffer: *mut c_char, capacity: usize, needed: *mut usize) -> VramctlResult {
    answer(|| {
        let tag = region::current().map_or_else(String::new, |policy| policy.tag.to_string());
        // SAFETY: the caller's promise.
        unsafe { put(&tag, buffer, capacity, needed) }
    })
}

/// Pauses: waits for the device's work, keeps or discards contents, and gives the memory back to the driver. All or
/// nothing; what is paused already is left alone. The addresses must not be used until `vramctl_resume`.
///
/// `tag`: one tag, or null for all. `timeout_ms`: how long to wait for the device's work, in milliseconds; negative:
/// without limit. `backup`: a `VramctlBackup` for all of it, in place of each allocation's own policy; `Default` keeps
/// to the policies.
///
/// # Safety
/// `tag` must be null or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_pause(tag: *const c_char, timeout_ms: i64, backup: i32) -> VramctlResult {
    answer(|| {
        // SAFETY: the caller's promise.
        let request = TransitionRequest { backup: policy(backup)?, ..unsafe { request(tag, timeout_ms)? } };
        keep_report(Memory::get().pause(&request, &mut ())?);
        Ok(())
    })
}

/// A range of device memory.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct VramctlRange {
    /// Its first address.
    pub address: *const c_void,
    /// Its length in bytes.
    pub bytes: usize,
}

/// What a pause does with a tag.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct VramctlTag {
    /// The tag, NUL-terminated; null: every tag that is not named beside it.
    pub tag: *const c_char,
    /// A `VramctlBackup` in place of each allocation's own policy; `Default` keeps to the policies.
    pub backup: i32,
}

/// Pauses several tags at once, as `vramctl_pause` does one: all of them or, after an error, none.
///
/// `tags`: `count` of them, at least one. Beside a null tag, a named one need not be there; else it is `UnknownTag`.
/// `timeout_ms`: as for `vramctl_pause`.
///
/// `unused`: `unused_count` ranges of memory that nobody needs, such as what an allocator of the program's own holds as
/// free. Their contents are not kept: the whole pages of 2 MiB in them read as zero after the resume, unless they were kept
/// all the same (on disk, and where a tag's contents are retained). They must stay unused until this returns, whoever
/// waits for the device meanwhile. Ranges may overlap, and what of them is not managed is ignored.
///
/// # Safety
/// `tags` must be readable for `count` entries whose tags are null or NUL-terminated, and `unused` readable for
/// `unused_count` ranges (or null with an `unused_count` of 0).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_pause_tags(
    tags: *const VramctlTag,
    count: usize,
    timeout_ms: i64,
    unused: *const VramctlRange,
    unused_count: usize,
) -> VramctlResult {
    answer(|| {
        // SAFETY: the caller's promise.
        let (tags, unused) = unsafe { (array(tags, count, "tags")?, array(unused, unused_count, "ranges")?) };
        if tags.is_empty() {
            return Err(Error::Invalid("no tags; one that is null means all".into()));
        }
        let mut request = TransitionRequest {
            timeout: timeout(timeout_ms),
            unused: unused.iter().map(|range| Span { address: range.address as u64, bytes: range.bytes }).collect(),
            ..TransitionRequest::default()
        };
        for one in tags {
            // SAFETY: the caller's promise.
            match unsafe { text(one.tag)? } {
                Some(tag) => {
                    request.tags.push(tag.to_owned());
                    request.backups.insert(tag.to_owned(), policy(one.backup)?);
                }
                None => request.backup = policy(one.backup)?,
            }
        }
        if tags.iter().any(|one| one.tag.is_null()) {
            request.tags.clear();
        }
        keep_report(Memory::get().pause(&request, &mut ())?);
        Ok(())
    })
}

/// Resumes: puts new memory at the same addresses, and the kept contents into it; discarded contents read as zero. All
/// or nothing; what is active already is left alone.
///
/// `tag`: one tag, or null for all. `timeout_ms`: how long to wait for memory that other processes hold, in
/// milliseconds; 0: not at all; negative: without limit.
///
/// # Safety
/// `tag` must be null or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_resume(tag: *const c_char, timeout_ms: i64) -> VramctlResult {
    answer(|| {
        // SAFETY: the caller's promise.
        let mut request = unsafe { request(tag, timeout_ms)? };
        request.timeout = request.timeout.or(Some(Duration::MAX));
        keep_report(Memory::get().resume(&request, &mut ())?);
        Ok(())
    })
}

/// Resumes several tags at once, as `vramctl_resume` does one: all of them or, after an error, none.
///
/// `tags`: `count` of them, at least one; null among them means all. `timeout_ms`: as for `vramctl_resume`, for all of it.
///
/// # Safety
/// `tags` must be readable for `count` pointers that are null or to NUL-terminated strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_resume_tags(tags: *const *const c_char, count: usize, timeout_ms: i64) -> VramctlResult {
    answer(|| {
        // SAFETY: the caller's promise.
        let names = unsafe { array(tags, count, "tags")?.iter().map(|tag| text(*tag)).collect::<Result<Vec<_>, _>>()? };
        if names.is_empty() {
            return Err(Error::Invalid("no tags; null means all".into()));
        }
        let tags = names.into_iter().map(|name| name.map(str::to_owned)).collect::<Option<Vec<_>>>();
        let timeout = timeout(timeout_ms).or(Some(Duration::MAX));
        keep_report(
            Memory::get()
                .resume(&TransitionRequest { tags: tags.unwrap_or_default(), timeout, ..TransitionRequest::default() }, &mut ())?,
        );
        Ok(())
    })
}

/// What the calling thread's last successful pause or resume did, as a JSON object in `buffer`, NUL-terminated: the
/// fields of the control protocol's `done` reply (`docs/protocol.md`), in bytes and milliseconds; `{}` if there was none.
///
/// `needed`, where not null, gets the string's size in bytes with its NUL. `BufferTooSmall`: `capacity` is less than
/// that, and nothing was written to `buffer`.
///
/// # Safety
/// `buffer` must be writable for `capacity` bytes (or null with a `capacity` of 0), and `needed` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_last_report_json(buffer: *mut c_char, capacity: usize, needed: *mut usize) -> VramctlResult {
    answer(|| {
        let report = LAST.try_with(|last| last.try_borrow().map(|last| json(last.report.as_ref())));
        // SAFETY: the caller's promise.
        unsafe { put(&report.unwrap_or(Ok(json(None::<&Report>))).unwrap_or_default(), buffer, capacity, needed) }
    })
}

/// What is under management, as a JSON object in `buffer`, NUL-terminated: the fields of the control protocol's
/// `status` reply that concern memory (`docs/protocol.md`), sizes in bytes.
///
/// `needed`, where not null, gets the string's size in bytes with its NUL; it may differ at the next call.
/// `BufferTooSmall`: `capacity` is less than that, and nothing was written to `buffer`.
///
/// # Safety
/// `buffer` must be writable for `capacity` bytes (or null with a `capacity` of 0), and `needed` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_status_json(buffer: *mut c_char, capacity: usize, needed: *mut usize) -> VramctlResult {
    answer(|| {
        // SAFETY: the caller's promise.
        unsafe { put(&json(Some(&Memory::get().status())), buffer, capacity, needed) }
    })
}

/// What the calling thread's last failed call of this library failed on, for a reader; the empty string if none has
/// failed. Owned by the library and valid until the thread's next failed call.
#[unsafe(no_mangle)]
pub extern "C" fn vramctl_last_error() -> *const c_char {
    let text = LAST.try_with(|last| last.try_borrow().map_or(c"".as_ptr(), |last| last.error_text.as_ptr()));
    text.unwrap_or(c"".as_ptr())
}

/// The same with its numbers, as a JSON object in `buffer`, NUL-terminated: the fields of the control protocol's `error`
/// reply (`docs/protocol.md`), such as `code`, `message` and, where memory was short, `shortage` in bytes; `{}` if none has
/// failed.
///
/// `needed`, where not null, gets the string's size in bytes with its NUL. `BufferTooSmall`: `capacity` is less than
/// that, nothing was written to `buffer`, and the last error is still the one before.
///
/// # Safety
/// `buffer` must be writable for `capacity` bytes (or null with a `capacity` of 0), and `needed` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_last_error_json(buffer: *mut c_char, capacity: usize, needed: *mut usize) -> VramctlResult {
    let error = LAST.try_with(|last| last.try_borrow().ok().and_then(|last| last.error.clone())).ok().flatten();
    // Not through `answer`, which would remember this call's own failure in place of the one that is asked for.
    // SAFETY: the caller's promise.
    let outcome = panic::catch_unwind(|| unsafe { put(&json(error.as_ref().map(Refusal::from).as_ref()), buffer, capacity, needed) });
    outcome.map_or(VramctlResult::Internal, |outcome| outcome.map_or_else(|error| error.kind().into(), |()| VramctlResult::Ok))
}

/// The kept contents of a paused allocation, to read: `*pointer` gets the host address that holds what `address` held,
/// and `*bytes`, where not null, how many bytes follow there up to the allocation's end.
///
/// `address` may be anywhere in the allocation. The memory is the library's, and valid until the allocation is resumed or
/// freed. `NotPaused`: the address is in no paused allocation whose contents were kept in host memory.
///
/// # Safety
/// `pointer` must be writable, and `bytes` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_backup_pointer(address: *const c_void, pointer: *mut *const c_void, bytes: *mut usize) -> VramctlResult {
    answer(|| {
        if pointer.is_null() {
            return Err(Error::Invalid("no place for the pointer".into()));
        }
        let found = Memory::get().find(address as u64).filter(|allocation| allocation.is_paused());
        let Some((allocation, saved)) = found.and_then(|allocation| Some((allocation.clone(), allocation.contents().saved.clone()?)))
        else {
            return Err(Error::NotPaused(format!("{address:p} is in no paused allocation whose contents were kept")));
        };
        let Some(rest) = saved.kept_from((address as u64 - allocation.address()) as usize) else {
            return Err(Error::NotPaused(format!("the contents of {address:p} are not kept in host memory")));
        };
        // SAFETY: the caller's promise.
        unsafe {
            pointer.write(rest.as_ptr().cast());
            if !bytes.is_null() {
                bytes.write(rest.len());
            }
        }
        Ok(())
    })
}

/// From now on, a managed allocation that would leave less than `bytes` of its device free is answered with out of
/// memory. 0, as at first: no such margin.
#[unsafe(no_mangle)]
pub extern "C" fn vramctl_set_memory_margin(bytes: u64) -> VramctlResult {
    answer(|| {
        Memory::get().set_margin(bytes);
        Ok(())
    })
}

/// Says that an inference engine lives in this process, by its name (`vllm`, `sglang`): `vramctl status` shows it, and
/// `vramctl pause` does not discard the engine's `kv_cache` unless the engine forgets what its prefix cache says of it.
/// Null: none does any more.
///
/// `name` has 1 to 64 letters, digits, dots, dashes and underscores, and is copied.
///
/// # Safety
/// `name` must be null or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_set_engine(name: *const c_char) -> VramctlResult {
    answer(|| {
        // SAFETY: the caller's promise.
        let name = unsafe { text(name)? };
        let wrong =
            |name: &str| name.is_empty() || name.len() > 64 || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
        if name.is_some_and(wrong) {
            return Err(Error::Invalid("an engine's name has 1 to 64 letters, digits, dots, dashes and underscores".into()));
        }
        engine::set(name);
        Ok(())
    })
}

/// Says whether the contents that a pause saves of a tag in host memory stay there after the resume, so that the next
/// pause copies only what has changed since. What is not to stay any more is given up at once.
///
/// `tag`: one tag, or null for every tag without a setting of its own. `retain`: 1 they stay, 0 they do not, -1 takes the
/// setting back: what is said of every tag counts, and `VRAMCTL_RETAIN` where nothing is.
///
/// # Safety
/// `tag` must be null or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_set_retain(tag: *const c_char, retain: i32) -> VramctlResult {
    answer(|| {
        let keep = match retain {
            -1 => None,
            0 => Some(false),
            1 => Some(true),
            other => return Err(Error::Invalid(format!("{other} is not 1 (retain), 0 (do not) or -1 (as the environment says)"))),
        };
        // SAFETY: the caller's promise.
        let tag = unsafe { text(tag)? };
        Memory::get().set_retain(tag, keep)
    })
}

/// Where the pauses to come keep contents whose policy is `Disk`: an existing directory on a drive, not a `tmpfs`. Null:
/// as `VRAMCTL_DISK_DIR` says. What is in files already stays where it is. `Disk`: it is no directory.
///
/// # Safety
/// `directory` must be null or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_set_disk_directory(directory: *const c_char) -> VramctlResult {
    answer(|| {
        // SAFETY: NUL-terminated where not null, by the caller's promise.
        let path = (!directory.is_null()).then(|| Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(directory) }.to_bytes())));
        Memory::get().set_disk_directory(path)
    })
}

thread_local! {
    static LAST: RefCell<Last> = RefCell::default();
}

/// What a thread may still ask for.
#[derive(Default)]
struct Last {
    error: Option<Error>,
    /// The error's text, as C wants it.
    error_text: CString,
    report: Option<Report>,
}

/// For `vramctl_last_report_json`.
fn keep_report(report: Report) {
    let _ = LAST.try_with(|last| last.try_borrow_mut().map(|mut last| last.report = Some(report)));
}

fn json(value: Option<&impl serde::Serialize>) -> String {
    // Our own types cannot fail to be written.
    value.and_then(|value| serde_json::to_string(value).ok()).unwrap_or_else(|| "{}".into())
}

/// Runs the body of a function: errors become codes and texts, and so does a panic, which must not cross into C.
fn answer(body: impl FnOnce() -> Result<(), Error>) -> VramctlResult {
    let outcome = panic::catch_unwind(AssertUnwindSafe(body));
    let Err(error) = outcome.unwrap_or_else(|_| Err(Error::Internal("a call panicked".into()))) else {
        return VramctlResult::Ok;
    };
    let result = error.kind().into();
    let error_text = CString::new(error.to_string().replace('\0', " ")).unwrap_or_default();
    // Without thread-locals the thread is ending, and the code has to do.
    let _ = LAST.try_with(|last| {
        last.try_borrow_mut().map(|mut last| {
            last.error_text = error_text;
            last.error = Some(error);
        })
    });
    result
}

/// A C string; `None` for null.
unsafe fn text<'a>(pointer: *const c_char) -> Result<Option<&'a str>, Error> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: not null, and NUL-terminated by the caller's promise.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map(Some).map_err(|_| Error::Invalid("a tag must be UTF-8".into()))
}

unsafe fn request(tag: *const c_char, timeout_ms: i64) -> Result<TransitionRequest, Error> {
    // SAFETY: the caller's promise.
    let tag = unsafe { text(tag)? };
    Ok(TransitionRequest {
        tags: tag.map(str::to_owned).into_iter().collect(),
        timeout: timeout(timeout_ms),
        ..TransitionRequest::default()
    })
}

/// Negative: without limit.
fn timeout(ms: i64) -> Option<Duration> {
    u64::try_from(ms).ok().map(Duration::from_millis)
}

/// A C array; null is an empty one.
unsafe fn array<'a, T>(first: *const T, count: usize, what: &str) -> Result<&'a [T], Error> {
    match (first.is_null(), count) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(Error::Invalid(format!("no {what} where {count} are said to be"))),
        // SAFETY: readable for `count` values, by the caller's promise.
        (false, _) => Ok(unsafe { slice::from_raw_parts(first, count) }),
    }
}

fn policy(backup: i32) -> Result<Option<Backup>, Error> {
    match backup {
        0 => Ok(None),
        1 => Ok(Some(Backup::Discard)),
        2 => Ok(Some(Backup::Host)),
        3 => Ok(Some(Backup::Disk)),
        other => Err(Error::Invalid(format!("{other} is no VramctlBackup"))),
    }
}

/// Writes a NUL-terminated string into a caller's buffer, and its size.
unsafe fn put(text: &str, buffer: *mut c_char, capacity: usize, needed: *mut usize) -> Result<(), Error> {
    let size = text.len() + 1;
    // SAFETY: `needed` is null or writable, and `buffer` is writable for `capacity`, by the caller's promise.
    unsafe {
        if !needed.is_null() {
            needed.write(size);
        }
        if buffer.is_null() || capacity < size {
            return Err(Error::BufferTooSmall { needed: size, capacity });
        }
        let room = slice::from_raw_parts_mut(buffer.cast::<u8>(), size);
        ptr::copy_nonoverlapping(text.as_ptr(), room.as_mut_ptr(), text.len());
        room[text.len()] = 0;
    }
    Ok(())
}
