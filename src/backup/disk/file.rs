//! How the file of a [`Spill`](super::Spill) is created, and how its page cache is emptied.

use super::{ALIGNMENT, names};
use std::collections::hash_map::RandomState;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, Hasher};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{io, mem, process};
use vramctl_host::{Held, log_once, system};
use vramctl_model::Bytes;

/// Creates a file of `bytes` bytes in `directory`, and returns whether it uses direct I/O. Leaves no file on error.
pub fn create(directory: &Path, name: Option<&str>, bytes: u64) -> io::Result<(Held, bool)> {
    let made = make(directory, name, bytes);
    if let (Err(error), Some(name)) = (&made, name)
        && error.kind() != io::ErrorKind::AlreadyExists
    {
        names::remove(&directory.join(name));
    }
    made
}

fn make(directory: &Path, name: Option<&str>, bytes: u64) -> io::Result<(Held, bool)> {
    let opened = name.map_or_else(|| open(directory), |name| names::open(&directory.join(name)));
    let held = opened.and_then(Held::new).map_err(|error| not_created(directory, &error))?;
    let file = held.as_type::<File>()?;
    warn_of_memory(&file);
    reserve(&file, directory, bytes).map_err(|error| not_reserved(directory, bytes, error))?;
    let direct = make_direct(&file, bytes).map_err(|error| in_directory(directory, "use", &error))?;
    Ok((held, direct))
}

fn in_directory(directory: &Path, what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot {what} a backup file in {}: {error}", directory.display()))
}

fn not_created(directory: &Path, error: &io::Error) -> io::Error {
    let remedy = match error.kind() {
        io::ErrorKind::NotFound => ". Create it (mkdir -m 700), or start the program with another VRAMCTL_DISK_DIR",
        io::ErrorKind::NotADirectory | io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            ". Start the program with a VRAMCTL_DISK_DIR in which it may create files"
        }
        _ => "",
    };
    io::Error::new(error.kind(), format!("{}{remedy}", in_directory(directory, "create", error)))
}

fn not_reserved(directory: &Path, bytes: u64, error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::StorageFull => error,
        _ => in_directory(directory, &format!("reserve {} for", Bytes(bytes)), &error),
    }
}

/// Whether files of these sizes can be created in the directory. Leaves nothing there.
pub fn check_room(directory: &Path, files: &[u64]) -> io::Result<()> {
    let file = open(directory).map_err(|error| not_created(directory, &error))?;
    let largest = files.iter().copied().max().unwrap_or(0);
    check_size(largest).map_err(|error| not_reserved(directory, largest, error))?;
    check_space(&file, directory, files.iter().sum())
}

/// Beyond this limit the kernel does not only refuse but sends a fatal signal.
fn check_size(bytes: u64) -> io::Result<()> {
    let is_too_large = system::resource_limit(libc::RLIMIT_FSIZE).is_some_and(|limit| bytes > limit);
    if is_too_large { Err(io::Error::from_raw_os_error(libc::EFBIG)) } else { Ok(()) }
}

fn check_space(file: &File, directory: &Path, bytes: u64) -> io::Result<()> {
    let short = available_bytes(file).filter(|available| *available < bytes);
    short.map_or(Ok(()), |available| Err(full(directory, bytes, available)))
}

fn full(directory: &Path, bytes: u64, available: u64) -> io::Error {
    let text = format!(
        "too little space in {} for a backup: {} needed, {} available. Free {}, or set VRAMCTL_DISK_DIR to another file system",
        directory.display(),
        Bytes(bytes),
        Bytes(available),
        Bytes(bytes.saturating_sub(available))
    );
    io::Error::new(io::ErrorKind::StorageFull, text)
}

/// Opens a file without a name. On file systems that do not support that (NFS, FUSE), opens a named one and unlinks it.
fn open(directory: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    match options.custom_flags(libc::O_TMPFILE | libc::O_EXCL).open(directory) {
        // A kernel that does not know the flag treats this as opening a directory for writing.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => open_and_unlink(directory),
        other => other,
    }
}

/// Opens a named file and unlinks it.
pub(super) fn open_and_unlink(directory: &Path) -> io::Result<File> {
    // `RandomState` has unpredictable keys, and even a correct guess would run into `create_new`.
    let name = format!(".vramctl-{}-{:016x}", process::id(), RandomState::new().build_hasher().finish());
    let path = directory.join(name);
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(0o600);
    let file = options.open(&path)?;
    fs::remove_file(&path)?;
    Ok(file)
}

/// Allocates the space and sets the file's size.
pub(super) fn reserve(file: &File, directory: &Path, bytes: u64) -> io::Result<()> {
    reserve_by(file, directory, bytes, allocate)
}

/// The same, with another function in the place of [`allocate`], for tests.
pub(super) fn reserve_by(
    file: &File,
    directory: &Path,
    bytes: u64,
    mut allocate: impl FnMut(&File, u64, u64) -> io::Result<()>,
) -> io::Result<()> {
    /// Small enough that frequent signals, each of which restarts the call, cannot stall it forever.
    const STEP: u64 = 256 << 20;
    check_size(bytes)?;
    // First, so that a disk that is too small is not filled up before the error.
    check_space(file, directory, bytes)?;
    let (mut at, mut was_full) = (0, false);
    while at < bytes {
        let step = STEP.min(bytes - at);
        let Err(error) = allocate(file, at, step) else {
            at += step;
            continue;
        };
        match error.raw_os_error().unwrap_or(0) {
            libc::EINTR => {}
            libc::ENOSPC | libc::EDQUOT => match available_bytes(file).unwrap_or(0) {
                left if left < bytes - at => return Err(full(directory, bytes, at + left)),
                // Another backup that came at the same time had the space, and has given up.
                _ if !was_full => was_full = true,
                // There is a limit that the file system does not report, such as a quota.
                _ => return Err(full(directory, bytes, at)),
            },
            // The file system does not support it; the first check must do.
            libc::EOPNOTSUPP | libc::ENOSYS => return file.set_len(bytes),
            _ => return Err(error),
        }
    }
    Ok(())
}

fn allocate(file: &File, at: u64, bytes: u64) -> io::Result<()> {
    // SAFETY: the call touches no memory.
    match unsafe { libc::fallocate(file.as_raw_fd(), 0, at as libc::off_t, bytes as libc::off_t) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

const NOT_SET: u64 = u64::MAX;
static AVAILABLE: AtomicU64 = AtomicU64::new(NOT_SET);

/// Overrides the available bytes, for tests. `None` restores the real value.
pub fn set_available(bytes: Option<u64>) {
    AVAILABLE.store(bytes.unwrap_or(NOT_SET), Ordering::Relaxed);
}

/// Bytes this user can still allocate, if the file system reports that.
fn available_bytes(file: &File) -> Option<u64> {
    let available = AVAILABLE.load(Ordering::Relaxed);
    if available != NOT_SET {
        return Some(available);
    }
    // SAFETY: plain data, valid as all zeros, and writable.
    let statistics = unsafe {
        let mut statistics: libc::statvfs64 = mem::zeroed();
        if libc::fstatvfs64(file.as_raw_fd(), &raw mut statistics) != 0 {
            return None;
        }
        statistics
    };
    (statistics.f_blocks > 0).then(|| statistics.f_bavail * statistics.f_frsize)
}

/// Enables direct I/O if the file system supports it: some refuse the flag, others the first request.
fn make_direct(file: &File, bytes: u64) -> io::Result<bool> {
    #[repr(align(4096))]
    struct Block([u8; ALIGNMENT]);

    if bytes < ALIGNMENT as u64 || !set_direct(file, true) {
        return Ok(false);
    }
    let block = Block([0; ALIGNMENT]);
    loop {
        // SAFETY: the block is readable for its length.
        let written = unsafe { libc::pwrite64(file.as_raw_fd(), block.0.as_ptr().cast(), ALIGNMENT, 0) };
        if written == ALIGNMENT as isize {
            return Ok(true);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) if written < 0 => {}
            Some(libc::EINVAL | libc::EOPNOTSUPP) if written < 0 => return Ok(!set_direct(file, false)),
            _ if written < 0 => return Err(error),
            _ => return Err(io::ErrorKind::WriteZero.into()),
        }
    }
}

/// Returns whether the flag was set as requested.
pub(super) fn set_direct(file: &File, direct: bool) -> bool {
    // SAFETY: these calls touch no memory.
    unsafe {
        let flags = libc::fcntl(file.as_raw_fd(), libc::F_GETFL);
        let flags = if direct { flags | libc::O_DIRECT } else { flags & !libc::O_DIRECT };
        libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags) == 0
    }
}

/// Warns about a directory that is itself in memory and so saves none.
fn warn_of_memory(file: &File) {
    // SAFETY: plain data, valid as all zeros, and writable.
    let kind = unsafe {
        let mut statistics: libc::statfs64 = mem::zeroed();
        libc::fstatfs64(file.as_raw_fd(), &raw mut statistics);
        statistics.f_type
    };
    if kind == libc::TMPFS_MAGIC {
        log_once!(log::Level::Warn, "the directory for disk backups is a tmpfs, so contents stay in host memory");
    }
}

/// Writes a range back and drops it from the page cache. Errors come from the write-back.
pub fn leave_no_cache(file: &File, offset: u64, bytes: u64) -> io::Result<()> {
    const WRITE_AND_WAIT: libc::c_uint = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    let (offset, bytes) = (offset as libc::off64_t, bytes as libc::off64_t);
    loop {
        // SAFETY: the call touches no memory.
        if unsafe { libc::sync_file_range(file.as_raw_fd(), offset, bytes, WRITE_AND_WAIT) } == 0 {
            break;
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            // Not supported here; the system writes back in its own time.
            Some(libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP) => break,
            _ => return Err(error),
        }
    }
    // SAFETY: the call touches no memory. Best effort: what stays cached is dropped under memory pressure.
    unsafe { libc::posix_fadvise64(file.as_raw_fd(), offset, bytes, libc::POSIX_FADV_DONTNEED) };
    Ok(())
}
