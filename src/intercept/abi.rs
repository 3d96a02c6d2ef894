//! The C ABI. `include/vramctl.h` is generated from this file: the documentation of its functions is for people who know C.
//!
//! All functions are thread-safe, may be called at any time and never end the process. Unless documented otherwise they return
//! a [`VramctlResult`]; [`vramctl_last_error`] has the text of the calling thread's last error.

pub use crate::result::VramctlResult;
use crate::room;
use std::cell::RefCell;
use std::ffi::{CStr, CString, OsStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;
use std::{mem::MaybeUninit, ptr, slice};
use vramctl_control::protocol::Refusal;
use vramctl_core::cache::{self, Errand, Segment};
use vramctl_core::memory::{Allocation, Memory, region};
use vramctl_core::transition::Pause;
use vramctl_core::{engine, prefix_cache};
use vramctl_host::guarded;
use vramctl_model::{Error, Kind, PauseOptions, PauseRequest, Policy, ResumeRequest, Selection, Span};
use vramctl_observe::watch;

/// What a pause does with contents. Passed as an `int32_t`, so that an invalid value is an error and not undefined
/// behaviour.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VramctlBackup {
    /// The tag's policy in the environment variable `VRAMCTL_BACKUP`, else `VRAMCTL_BACKUP_HOST`.
    Default = 0,
    /// Discard them; after the resume the memory reads as zero.
    Discard = 1,
    /// Keep them in host memory.
    Host = 2,
    /// Keep them in a file, in the directory set by `vramctl_set_disk_directory` or `VRAMCTL_DISK_DIR`.
    Disk = 3,
}

/// The library's version, such as `0.1.0`. The string is static.
#[unsafe(no_mangle)]
pub extern "C" fn vramctl_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Begins a region: until the matching `vramctl_region_end`, allocations of the calling thread get the tag `tag`.
/// Regions nest; the innermost one applies. With a null `tag`, allocations in the region are left to CUDA.
///
/// `tag` is UTF-8 of at most 128 bytes, without commas, equals signs and control characters. It is copied. `backup` is
/// a `VramctlBackup`.
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

/// Ends the calling thread's innermost region. Returns `VRAMCTL_RESULT_INVALID` if there is none.
#[unsafe(no_mangle)]
pub extern "C" fn vramctl_region_end() -> VramctlResult {
    answer(region::end)
}

/// Writes the tag that an allocation of the calling thread would get now to `buffer`, NUL-terminated. The string is
/// empty if the allocation would be left to CUDA.
///
/// If `needed` is not null, it receives the string's size in bytes, including the NUL. If `capacity` is smaller,
/// returns `VRAMCTL_RESULT_BUFFER_TOO_SMALL` and leaves `buffer` unchanged.
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
/// nothing. Pausing paused memory changes only one thing: if another process has paused it, it stays paused when that process
/// resumes the program. The program must not use the addresses until `vramctl_resume`.
///
/// `tag`: one tag, or null for all. `timeout_ms`: how long to wait for the device's work, in milliseconds; a negative
/// value means no limit. `backup`: a `VramctlBackup` that overrides the allocations' own policies; `VRAMCTL_BACKUP_DEFAULT` does not.
///
/// # Safety
/// `tag` must be null or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_pause(tag: *const c_char, timeout_ms: i64, backup: i32) -> VramctlResult {
    answer(|| {
        // SAFETY: the caller's promise.
        let selection = unsafe { selection(tag)? };
        let options = PauseOptions { backup: policy(backup)?, ..PauseOptions::default() };
        let request = PauseRequest { selection, options, timeout: timeout(timeout_ms), ..PauseRequest::default() };
        keep_report(&Memory::get().pause(&Pause { request, ..Pause::default() }, &mut ())?);
        Ok(())
    })
}

/// A range of device memory.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct VramctlRange {
    /// First address.
    pub address: *const c_void,
    /// Length in bytes.
    pub bytes: usize,
}

/// What a pause does with a tag.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct VramctlTag {
    /// The tag, NUL-terminated; null means all tags not listed.
    pub tag: *const c_char,
    /// A `VramctlBackup` that overrides the allocations' own policies; `VRAMCTL_BACKUP_DEFAULT` does not.
    pub backup: i32,
}

/// What to pause, and how. Set all of it to zero, and `size` to `sizeof(VramctlPauseOptions)`; later versions may add fields at the end, and
/// zero means that a field is not used.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct VramctlPauseOptions {
    /// `sizeof(VramctlPauseOptions)`.
    pub size: usize,
    /// `tag_count` tags; none means all, with the allocations' own policies. A tag that no allocation has is
    /// `VRAMCTL_RESULT_UNKNOWN_TAG`, unless a null tag is listed too.
    pub tags: *const VramctlTag,
    /// How many.
    pub tag_count: usize,
    /// How long to wait for the device's work, in milliseconds; a negative value means no limit.
    pub timeout_ms: i64,
    /// `unused_count` ranges whose contents are not needed, such as the free blocks of the program's own allocator. Whole 2 MiB pages in them
    /// read as zero after the resume, unless their contents are kept anyway (on disk, or because the tag is retained). They must stay unused
    /// until the call returns. Ranges may overlap; unmanaged parts are ignored.
    pub unused: *const VramctlRange,
    /// How many.
    pub unused_count: usize,
}

/// Pauses several tags at once, as `vramctl_pause` does one. After an error, none of them is paused. `options`: null means everything,
/// without a limit.
///
/// # Safety
/// `options` must be null or readable for its size, `tags` for as many entries whose tags are null or NUL-terminated, and `unused` for as many
/// ranges.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_pause_with(options: *const VramctlPauseOptions) -> VramctlResult {
    answer(|| {
        let default = VramctlPauseOptions {
            size: size_of::<VramctlPauseOptions>(),
            tags: ptr::null(),
            tag_count: 0,
            timeout_ms: -1,
            unused: ptr::null(),
            unused_count: 0,
        };
        // SAFETY: the caller's promise; zero is a valid value of each field.
        let options = unsafe { sized(options)? }.unwrap_or(default);
        // SAFETY: as above.
        let (tags, unused) =
            unsafe { (array(options.tags, options.tag_count, "tags")?, array(options.unused, options.unused_count, "ranges")?) };
        // SAFETY: as above.
        let request = unsafe { pause_request(tags, options.timeout_ms)? };
        let unused = unused.iter().map(|range| Span { address: range.address as u64, bytes: range.bytes }).collect();
        keep_report(&Memory::get().pause(&Pause { request, unused, ..Pause::default() }, &mut ())?);
        Ok(())
    })
}

/// The request of a pause of several tags; none means all.
unsafe fn pause_request(tags: &[VramctlTag], timeout_ms: i64) -> Result<PauseRequest, Error> {
    let mut request = PauseRequest { timeout: timeout(timeout_ms), ..PauseRequest::default() };
    for one in tags {
        // SAFETY: the caller's promise.
        match unsafe { text(one.tag)? } {
            Some(tag) => {
                request.selection.tags.push(tag.to_owned());
                request.options.backups.insert(tag.to_owned(), policy(one.backup)?);
            }
            None => request.options.backup = policy(one.backup)?,
        }
    }
    if tags.iter().any(|one| one.tag.is_null()) {
        request.selection.tags.clear();
    }
    Ok(request)
}

/// Resumes: maps new memory at the same addresses and restores kept contents; discarded contents read as zero. All or
/// nothing. Resuming active memory is a no-op.
///
/// `tag`: one tag, or null for all. `timeout_ms`: how long to wait for memory held by other processes, in milliseconds;
/// 0 means not at all, a negative value no limit.
///
/// # Safety
/// `tag` must be null or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_resume(tag: *const c_char, timeout_ms: i64) -> VramctlResult {
    answer(|| {
        // SAFETY: the caller's promise.
        let selection = unsafe { selection(tag)? };
        let timeout = timeout(timeout_ms).or(Some(Duration::MAX));
        keep_report(&room::resume(&ResumeRequest { selection, timeout, ..ResumeRequest::default() })?);
        Ok(())
    })
}

/// What to resume, and how. As with `VramctlPauseOptions`, zero means that a field is not used.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct VramctlResumeOptions {
    /// `sizeof(VramctlResumeOptions)`.
    pub size: usize,
    /// `tag_count` tags; none, or a null tag, means all.
    pub tags: *const *const c_char,
    /// How many.
    pub tag_count: usize,
    /// How long to wait for memory held by other processes, for all tags together, in milliseconds; a negative value means no limit.
    pub timeout_ms: i64,
}

/// Resumes several tags at once, as `vramctl_resume` does one. After an error, none of them is resumed. `options`: null means everything that
/// has room now.
///
/// # Safety
/// `options` must be null or readable for its size, and `tags` for as many pointers, each null or to a NUL-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_resume_with(options: *const VramctlResumeOptions) -> VramctlResult {
    answer(|| {
        let size = size_of::<VramctlResumeOptions>();
        let default = VramctlResumeOptions { size, tags: ptr::null(), tag_count: 0, timeout_ms: 0 };
        // SAFETY: the caller's promise; zero is a valid value of each field.
        let options = unsafe { sized(options)? }.unwrap_or(default);
        // SAFETY: as above.
        let names = unsafe { array(options.tags, options.tag_count, "tags")?.iter().map(|tag| text(*tag)).collect::<Result<Vec<_>, _>>()? };
        let tags = names.into_iter().map(|name| name.map(str::to_owned)).collect::<Option<Vec<_>>>().unwrap_or_default();
        let selection = Selection { tags, ..Selection::default() };
        let timeout = timeout(options.timeout_ms).or(Some(Duration::MAX));
        keep_report(&room::resume(&ResumeRequest { selection, timeout, ..ResumeRequest::default() })?);
        Ok(())
    })
}

/// Writes the report of the calling thread's last successful pause, resume or trim to `buffer`, as a NUL-terminated JSON
/// object: the fields of the control protocol's `done` or `trimmed` reply (`docs/protocol.md`), in bytes and milliseconds; `{}` if
/// there was none.
///
/// If `needed` is not null, it receives the string's size in bytes, including the NUL. If `capacity` is smaller,
/// returns `VRAMCTL_RESULT_BUFFER_TOO_SMALL` and leaves `buffer` unchanged.
///
/// # Safety
/// `buffer` must be writable for `capacity` bytes (or null if `capacity` is 0), and `needed` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_last_report_json(buffer: *mut c_char, capacity: usize, needed: *mut usize) -> VramctlResult {
    answer(|| {
        let report = LAST.try_with(|last| last.try_borrow().ok().and_then(|last| last.report.clone())).ok().flatten();
        // SAFETY: the caller's promise.
        unsafe { put(report.as_deref().unwrap_or("{}"), buffer, capacity, needed) }
    })
}

/// Writes the state of the managed memory to `buffer`, as a NUL-terminated JSON object: the memory fields of the
/// control protocol's `status` reply (`docs/protocol.md`), sizes in bytes.
///
/// If `needed` is not null, it receives the string's size in bytes, including the NUL; the size may change between
/// calls. If `capacity` is smaller, returns `VRAMCTL_RESULT_BUFFER_TOO_SMALL` and leaves `buffer` unchanged.
///
/// # Safety
/// `buffer` must be writable for `capacity` bytes (or null if `capacity` is 0), and `needed` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_status_json(buffer: *mut c_char, capacity: usize, needed: *mut usize) -> VramctlResult {
    answer(|| {
        // SAFETY: the caller's promise.
        unsafe { put(&json(Some(&Memory::get().status())), buffer, capacity, needed) }
    })
}

/// The error message of the calling thread's last failed call; empty if none has failed. Owned by the library and valid
/// until the thread's next failed call.
#[unsafe(no_mangle)]
pub extern "C" fn vramctl_last_error() -> *const c_char {
    let text = LAST.try_with(|last| last.try_borrow().map_or(c"".as_ptr(), |last| last.error_text.as_ptr()));
    text.unwrap_or(c"".as_ptr())
}

/// Writes the calling thread's last error to `buffer`, as a NUL-terminated JSON object: the fields of the control
/// protocol's `error` reply (`docs/protocol.md`), such as `code`, `message` and, if memory was short, `shortage` in
/// bytes; `{}` if none has failed.
///
/// If `needed` is not null, it receives the string's size in bytes, including the NUL. If `capacity` is smaller,
/// returns `VRAMCTL_RESULT_BUFFER_TOO_SMALL`, leaves `buffer` unchanged and keeps the last error.
///
/// # Safety
/// `buffer` must be writable for `capacity` bytes (or null if `capacity` is 0), and `needed` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_last_error_json(buffer: *mut c_char, capacity: usize, needed: *mut usize) -> VramctlResult {
    let error = LAST.try_with(|last| last.try_borrow().ok().and_then(|last| last.error.clone())).ok().flatten();
    // Not through `answer`, which would replace the last error by this call's own.
    // SAFETY: the caller's promise.
    let outcome = guarded(|| unsafe { put(&json(error.as_ref().map(Refusal::from).as_ref()), buffer, capacity, needed) });
    outcome.map_or(Kind::Internal.into(), |outcome| outcome.map_or_else(|error| error.kind().into(), |()| VramctlResult::OK))
}

/// Gives read access to the kept contents of a paused allocation: `*pointer` receives the host address of the byte that
/// was at `address` and, if `bytes` is not null, `*bytes` the number of bytes from there to the end of the allocation.
///
/// `address` may be anywhere in the allocation. The memory belongs to the library and is valid until the allocation is
/// resumed or freed. Returns `VRAMCTL_RESULT_NOT_PAUSED` unless the address is in a paused allocation whose contents are in host
/// memory.
///
/// # Safety
/// `pointer` must be writable, and `bytes` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_backup_pointer(address: *const c_void, pointer: *mut *const c_void, bytes: *mut usize) -> VramctlResult {
    answer(|| {
        if pointer.is_null() {
            return Err(Error::Invalid("`pointer` is null".into()));
        }
        let found = Memory::get().registry.find(address as u64).filter(|allocation| allocation.contents().state.saved().is_some());
        let Some((kept, rest)) = found.and_then(|allocation| kept_from(&allocation, address as u64)) else {
            return Err(Error::NotPaused(format!("{address:p} is not in a paused allocation whose contents are in host memory")));
        };
        // SAFETY: the caller's promise.
        unsafe {
            pointer.write(kept.cast());
            if !bytes.is_null() {
                bytes.write(rest);
            }
        }
        Ok(())
    })
}

/// The backup of an allocation in host memory from `address` on: host address and length in bytes. Of active memory, that is what the last pause
/// has saved, if it is retained.
pub(crate) fn kept_from(allocation: &Allocation, address: u64) -> Option<(*const u8, usize)> {
    let offset = allocation.offset_of(address)?;
    let contents = allocation.contents();
    let rest = contents.state.backup()?.kept_from(offset)?;
    Some((rest.as_ptr(), rest.len()))
}

/// Sets a margin: a managed allocation that would leave less than `bytes` free on its device fails with out of memory.
/// The default is 0.
#[unsafe(no_mangle)]
pub extern "C" fn vramctl_set_memory_margin(bytes: u64) -> VramctlResult {
    answer(|| {
        Memory::get().set_margin(bytes);
        Ok(())
    })
}

/// A task for the program's own allocator, from `vramctl_cache_wait`.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VramctlCacheTask {
    /// Report what there is.
    Report = 1,
    /// Report the allocator's memory, return what can be returned to CUDA, and report again.
    Trim = 2,
}

/// A piece of memory that the program's own allocator got from CUDA.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct VramctlSegment {
    /// First address.
    pub address: *const c_void,
    /// Length in bytes.
    pub bytes: usize,
    /// Bytes of it that are in use. If 0, all of it counts as cached; else the rest counts as fragmented.
    pub live_bytes: usize,
}

/// For a program whose own allocator caches free memory: waits for a request to report it (`vramctl gpus`) or to return it
/// (`vramctl trim`, `vramctl_trim`), and writes a `VramctlCacheTask` to `task`. The Python package does all this for torch.
///
/// One thread of the program calls this in a loop and does nothing else. After each call it does the task, calling `vramctl_cache_report`
/// before and after it returns memory, and then calls `vramctl_cache_answer`. From the first task on, its stream capture mode
/// (`cuThreadExchangeStreamCaptureMode`) is relaxed, so that its frees do not invalidate captures of other threads. If a report fails,
/// nobody waits for the task any more: skip the work and call `vramctl_cache_answer`.
///
/// # Safety
/// `task` must be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_cache_wait(task: *mut i32) -> VramctlResult {
    answer(|| {
        if task.is_null() {
            return Err(Error::Invalid("`task` is null".into()));
        }
        let wanted = match cache::wait() {
            Errand::Report => VramctlCacheTask::Report,
            Errand::Trim => VramctlCacheTask::Trim,
        };
        // SAFETY: the caller's promise.
        unsafe { task.write(wanted as i32) };
        Ok(())
    })
}

/// For the thread that calls `vramctl_cache_wait`: reports the memory that the allocator has from CUDA now.
///
/// # Safety
/// `segments` must be readable for `count` entries (or null if `count` is 0).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_cache_report(segments: *const VramctlSegment, count: usize) -> VramctlResult {
    answer(|| {
        // SAFETY: the caller's promise.
        let segments = unsafe { array(segments, count, "segments")? };
        let segment =
            |of: &VramctlSegment| Segment { address: of.address as u64, bytes: of.bytes as u64, live_bytes: of.live_bytes as u64 };
        cache::report(&segments.iter().map(segment).collect::<Vec<_>>())
    })
}

/// For the thread that calls `vramctl_cache_wait`: finishes the task; `problem` is null if it succeeded, else it says why not. A call
/// before the first task announces that the thread exists, even if it does not wait yet.
///
/// # Safety
/// `problem` must be null or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_cache_answer(problem: *const c_char) -> VramctlResult {
    answer(|| {
        // SAFETY: NUL-terminated where not null, by the caller's promise.
        let problem = (!problem.is_null()).then(|| unsafe { CStr::from_ptr(problem) }.to_string_lossy());
        cache::answer(problem.as_deref());
        Ok(())
    })
}

/// For an inference engine in a program that shares its GPUs or is to be saved (`vramctl run --share`, `--image`): waits until somebody is about to
/// take memory of it, and writes the request's number to `number`. The Python package does all this for the engines that it knows.
///
/// One thread of the program calls this in a loop and does nothing but pass the number on to the engine's own loop. If no request uses the KV
/// cache, that loop resets the engine's prefix cache, and then calls `vramctl_prefix_cache_answer`, within 0.2 s. Then the contents of the tag
/// `kv_cache` are not kept, unless a call has started device work meanwhile.
///
/// # Safety
/// `number` must be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_prefix_cache_wait(number: *mut u64) -> VramctlResult {
    answer(|| {
        if number.is_null() {
            return Err(Error::Invalid("`number` is null".into()));
        }
        wants_prefix_cache()?;
        // SAFETY: the caller's promise.
        unsafe { number.write(prefix_cache::wait()) };
        Ok(())
    })
}

/// For an inference engine's loop: answers a request (`vramctl_prefix_cache_wait`). `is_reset`: 1 if it has just reset its prefix cache, and no
/// request uses the KV cache; else 0. After a 1, this waits until the program is held, at most 0.2 s, so that the loop does not use the KV cache
/// again at once.
#[unsafe(no_mangle)]
pub extern "C" fn vramctl_prefix_cache_answer(number: u64, is_reset: i32) -> VramctlResult {
    answer(|| {
        prefix_cache::answer(number, truth("is_reset", is_reset)?);
        Ok(())
    })
}

/// For an inference engine's loop: whether it has no requests now (1) or has some (0). Called when that changes; until the first call, it has
/// some. `VRAMCTL_RESULT_INVALID`: the program neither shares its GPUs nor was started for images, or keeps its cache (`--keep-cache`),
/// so nobody will ask.
#[unsafe(no_mangle)]
pub extern "C" fn vramctl_prefix_cache_idle(is_idle: i32) -> VramctlResult {
    answer(|| {
        wants_prefix_cache()?;
        prefix_cache::set_idle(truth("is_idle", is_idle)?);
        Ok(())
    })
}

/// For an inference engine that is about to allocate its KV cache (tag `kv_cache`), and to fill it with zeros: until
/// `vramctl_cache_unused_end`, whatever is written there is worth nothing, because there has been no request. So others get its memory without
/// a copy (`vramctl run --share`), a save does not write it (`--image`), and it is zero when it is back. Writes to `counts` whether that is
/// so: 0 if there is memory of that tag already, which may be another engine's. `VRAMCTL_RESULT_INVALID` as for `vramctl_prefix_cache_idle`.
///
/// # Safety
/// `counts` must be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_cache_unused_begin(counts: *mut i32) -> VramctlResult {
    answer(|| {
        if counts.is_null() {
            return Err(Error::Invalid("`counts` is null".into()));
        }
        wants_prefix_cache()?;
        // SAFETY: the caller's promise.
        unsafe { counts.write(i32::from(prefix_cache::begin_unused())) };
        Ok(())
    })
}

/// For an inference engine that is about to use its KV cache for its first request: from then on it is worth something.
#[unsafe(no_mangle)]
pub extern "C" fn vramctl_cache_unused_end() -> VramctlResult {
    answer(|| {
        prefix_cache::end_unused();
        Ok(())
    })
}

fn truth(name: &str, value: i32) -> Result<bool, Error> {
    match value {
        0 | 1 => Ok(value == 1),
        _ => Err(Error::Invalid(format!("`{name}` is {value}, not 1 or 0"))),
    }
}

fn wants_prefix_cache() -> Result<(), Error> {
    if prefix_cache::is_wanted() {
        return Ok(());
    }
    let why = "the program was started with neither --share nor --image, or keeps its KV cache (--keep-cache)";
    Err(Error::Invalid(why.into()))
}

/// Has the program's own allocator return cached memory to CUDA, and waits for that. Must not be called from the thread that calls
/// `vramctl_cache_wait`, which does the work. `vramctl_last_report_json` then has the fields of the control protocol's `trimmed` reply
/// (`docs/protocol.md`).
///
/// `timeout_ms`: how long to wait, in milliseconds; a negative value means 10 seconds. Returns `VRAMCTL_RESULT_BUSY` after that, and
/// `VRAMCTL_RESULT_INVALID` if no thread serves or the program is held.
#[unsafe(no_mangle)]
pub extern "C" fn vramctl_trim(timeout_ms: i64) -> VramctlResult {
    answer(|| {
        keep_report(&cache::trim(timeout(timeout_ms).unwrap_or(Duration::from_secs(10)))?);
        Ok(())
    })
}

/// Watches how much memory is free on each device: when less than `below` bytes are free, logs once who uses the memory. Logs again only
/// after free memory has recovered. 0 ends the watch. `VRAMCTL_WATCH` sets it from the start.
///
/// `trim`: 1 to also have the program's own allocator return what it has cached (`vramctl_cache_wait`), 0 not to.
#[unsafe(no_mangle)]
pub extern "C" fn vramctl_set_watch(below: u64, trim: i32) -> VramctlResult {
    answer(|| {
        watch::set(below, truth("trim", trim)?);
        Ok(())
    })
}

/// Declares that this process runs an inference engine (`vllm`, `sglang`). `vramctl status` shows its name, and
/// `vramctl pause` refuses to discard the engine's `kv_cache` unless the engine resets its prefix cache. Null withdraws
/// the declaration.
///
/// `name` has 1 to 64 letters, digits, dots, dashes and underscores. It is copied.
///
/// # Safety
/// `name` must be null or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_set_engine(name: *const c_char) -> VramctlResult {
    answer(|| {
        // SAFETY: the caller's promise.
        let name = unsafe { text(name)? };
        if name.is_some_and(|name| {
            name.is_empty() || name.len() > 64 || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        }) {
            return Err(Error::Invalid("an engine's name has 1 to 64 letters, digits, dots, dashes and underscores".into()));
        }
        engine::set(name);
        Ok(())
    })
}

/// Declares whether all of the engine's KV cache has the tag `kv_cache`. Without this, `vramctl pause` takes everything but `weights` and
/// `cuda_graph` for the cache, and refuses to discard it.
///
/// `tags`: 1 if it does, 0 if not.
#[unsafe(no_mangle)]
pub extern "C" fn vramctl_set_engine_tags_cache(tags: i32) -> VramctlResult {
    answer(|| {
        engine::set_tags_cache(truth("tags", tags)?);
        Ok(())
    })
}

/// Declares that a thread has entered a memory pool of torch's, or has left it. While any thread of the process is in one, torch returns no free
/// memory to CUDA and does not ask again after an error. So in a program that shares its GPUs (`vramctl run --share`), torch's requests then wait
/// for room at once, instead of getting an error first. The Python package declares its own pools.
///
/// `entered`: 1 if it has entered the pool, 0 if it has left it.
#[unsafe(no_mangle)]
pub extern "C" fn vramctl_note_torch_pool(entered: i32) -> VramctlResult {
    answer(|| {
        room::note_torch_pool(truth("entered", entered)?);
        Ok(())
    })
}

/// Sets whether a tag's backups in host memory are retained after a resume, so that the next pause copies only what has
/// changed. Drops retained backups that are no longer wanted.
///
/// `tag`: one tag, or null for every tag without a setting of its own. `retain`: 1 to retain, 0 not to, -1 to remove
/// the setting. Without one, the setting for null applies, then `VRAMCTL_RETAIN`.
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
            other => return Err(Error::Invalid(format!("`retain` is {other}, not 1 (retain), 0 (do not) or -1 (no setting)"))),
        };
        // SAFETY: the caller's promise.
        let tag = unsafe { text(tag)? };
        Memory::get().set_retain(tag, keep)
    })
}

/// Sets the directory in which future pauses keep contents with the policy `VRAMCTL_BACKUP_DISK`. It must exist and should be on a
/// drive, not a `tmpfs`. Null restores `VRAMCTL_DISK_DIR`. Existing backups stay where they are. Returns `VRAMCTL_RESULT_DISK` if it
/// is not a directory.
///
/// # Safety
/// `directory` must be null or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramctl_set_disk_directory(directory: *const c_char) -> VramctlResult {
    answer(|| {
        // SAFETY: NUL-terminated where not null, by the caller's promise.
        let path = (!directory.is_null()).then(|| Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(directory) }.to_bytes())));
        Memory::get().set_disk_directory(path, false)
    })
}

thread_local! {
    static LAST: RefCell<Last> = RefCell::default();
}

/// A thread's last error and report.
#[derive(Default)]
struct Last {
    error: Option<Error>,
    /// The error's message as a C string.
    error_text: CString,
    /// As JSON.
    report: Option<String>,
}

/// Stores a report for `vramctl_last_report_json`.
fn keep_report(report: &impl serde::Serialize) {
    let _ = LAST.try_with(|last| last.try_borrow_mut().map(|mut last| last.report = Some(json(Some(report)))));
}

fn json(value: Option<&impl serde::Serialize>) -> String {
    // Serialising our own types cannot fail.
    value.and_then(|value| serde_json::to_string(value).ok()).unwrap_or_else(|| "{}".into())
}

/// Runs the body of a function. Turns errors, and panics, into a result code and stores the error.
fn answer(body: impl FnOnce() -> Result<(), Error>) -> VramctlResult {
    match guarded(body) {
        Some(Ok(())) => VramctlResult::OK,
        Some(Err(error)) => keep_error(error),
        None => keep_error(Error::Internal("a call panicked".into())),
    }
}

/// Stores an error for `vramctl_last_error`. Not inline: it would be in each function.
#[inline(never)]
fn keep_error(error: Error) -> VramctlResult {
    let result = error.kind().into();
    let error_text = CString::new(error.to_string().replace('\0', " ")).unwrap_or_default();
    // On a thread whose thread-locals are already destroyed, the code has to suffice.
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

/// One tag, or all for null.
unsafe fn selection(tag: *const c_char) -> Result<Selection, Error> {
    // SAFETY: the caller's promise.
    let tag = unsafe { text(tag)? };
    Ok(Selection { tags: tag.map(str::to_owned).into_iter().collect(), ..Selection::default() })
}

/// `None` (no limit) if negative.
fn timeout(ms: i64) -> Option<Duration> {
    u64::try_from(ms).ok().map(Duration::from_millis)
}

/// Options of a caller whose header may be older or newer; `None` for null. Fields that the caller does not know are zero, and those that this
/// library does not know must be.
///
/// # Safety
/// `options` must be null or begin with its size and be readable for that. Zero must be a valid value of each field.
unsafe fn sized<T: Copy>(options: *const T) -> Result<Option<T>, Error> {
    if options.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let size = unsafe { options.cast::<usize>().read() };
    if size < size_of::<usize>() || size > 4096 {
        return Err(Error::Invalid(format!("`size` of the options is {size}; it has to be their size in bytes")));
    }
    // SAFETY: as above.
    let bytes = unsafe { slice::from_raw_parts(options.cast::<u8>(), size) };
    let known = size.min(size_of::<T>());
    if bytes[known..].iter().any(|byte| *byte != 0) {
        return Err(Error::Invalid("this version of the library does not know all of the options".into()));
    }
    let mut own = MaybeUninit::<T>::zeroed();
    // SAFETY: as many bytes of both. All bytes of `own` are initialised, and each field is copied whole or zero: fields do not change their size.
    unsafe {
        ptr::copy_nonoverlapping(bytes.as_ptr(), own.as_mut_ptr().cast(), known);
        Ok(Some(own.assume_init()))
    }
}

/// A C array, which may be null if it is empty.
unsafe fn array<'a, T>(first: *const T, count: usize, what: &str) -> Result<&'a [T], Error> {
    match (first.is_null(), count) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(Error::Invalid(format!("the array of {count} {what} is null"))),
        // SAFETY: readable for `count` values, by the caller's promise.
        (false, _) => Ok(unsafe { slice::from_raw_parts(first, count) }),
    }
}

fn policy(backup: i32) -> Result<Option<Policy>, Error> {
    match backup {
        0 => Ok(None),
        1 => Ok(Some(Policy::Discard)),
        2 => Ok(Some(Policy::Host)),
        3 => Ok(Some(Policy::Disk)),
        other => Err(Error::Invalid(format!("{other} is not a VramctlBackup"))),
    }
}

/// Writes a NUL-terminated string to a caller's buffer, and its size to `needed`.
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
