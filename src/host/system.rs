//! System calls that several parts of the library make.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

/// The calling thread's id.
pub fn thread_id() -> u32 {
    // SAFETY: touches no memory. (The function `gettid` would need glibc 2.30.)
    unsafe { libc::syscall(libc::SYS_gettid) as u32 }
}

/// A clock that all processes of the machine share, in nanoseconds.
#[inline]
pub fn now() -> u64 {
    nanoseconds(libc::CLOCK_MONOTONIC)
}

/// What a clock says that every system has.
#[inline]
pub fn nanoseconds(clock: libc::clockid_t) -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writable.
    unsafe { libc::clock_gettime(clock, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Waits for one of these `events` on a descriptor: at most so many milliseconds, or without limit if they are negative. Returns what
/// has happened; 0 at the end of the time.
pub fn poll(descriptor: BorrowedFd<'_>, events: libc::c_short, milliseconds: libc::c_int) -> io::Result<libc::c_short> {
    let mut waiting = libc::pollfd { fd: descriptor.as_raw_fd(), events, revents: 0 };
    // SAFETY: one writable entry.
    let found = unsafe { libc::poll(&raw mut waiting, 1, milliseconds) };
    if found < 0 { Err(io::Error::last_os_error()) } else { Ok(waiting.revents) }
}

/// The same on several descriptors, of which some may be missing.
pub fn poll_all<const N: usize>(
    descriptors: [Option<BorrowedFd<'_>>; N],
    events: libc::c_short,
    limit: Duration,
) -> io::Result<[libc::c_short; N]> {
    // The kernel skips negative numbers.
    let mut waiting = descriptors.map(|one| libc::pollfd { fd: one.map_or(-1, |one| one.as_raw_fd()), events, revents: 0 });
    // SAFETY: writable entries, as many as is said.
    let found = unsafe { libc::poll(waiting.as_mut_ptr(), N as libc::nfds_t, limit.as_millis() as libc::c_int) };
    if found < 0 { Err(io::Error::last_os_error()) } else { Ok(waiting.map(|one| one.revents)) }
}

/// The same on any number of descriptors. Returns for each whether something has happened.
pub fn poll_each(descriptors: &[BorrowedFd<'_>], events: libc::c_short, limit: Duration) -> io::Result<Vec<bool>> {
    let mut waiting: Vec<_> = descriptors.iter().map(|one| libc::pollfd { fd: one.as_raw_fd(), events, revents: 0 }).collect();
    let milliseconds = limit.as_micros().div_ceil(1000) as libc::c_int;
    // SAFETY: writable entries, as many as is said.
    let found = unsafe { libc::poll(waiting.as_mut_ptr(), waiting.len() as libc::nfds_t, milliseconds) };
    if found < 0 { Err(io::Error::last_os_error()) } else { Ok(waiting.into_iter().map(|one| one.revents != 0).collect()) }
}

/// A limit of this process (`RLIMIT_…`). `None` if there is none.
pub fn resource_limit(of: libc::__rlimit_resource_t) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: writable. Without an answer there is no limit.
    unsafe { libc::getrlimit(of, &raw mut limit) };
    Some(limit.rlim_cur).filter(|limit| *limit != libc::RLIM_INFINITY)
}

/// Raises this process's limit of open files as far as it may. Its children inherit that, and some programs fail with large numbers
/// (`select`): only for processes that start no program of others.
pub fn raise_descriptor_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writable, then readable.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
    }
}

/// The effective user, who owns this process's directories and sockets.
pub fn user() -> u32 {
    // SAFETY: cannot fail and touches no memory.
    unsafe { libc::geteuid() }
}

/// Fills memory with random bytes that nobody can guess.
pub fn fill_with_random(mut bytes: &mut [u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        // SAFETY: writable for its length.
        let filled = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        match usize::try_from(filled).map_err(|_| io::Error::last_os_error()) {
            Ok(filled) => bytes = &mut bytes[filled..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// This process's folder in `/proc`, as the calling thread sees it. `/proc/self` is the main thread's, most of which is gone if that has ended
/// and others go on.
pub fn own_folder() -> &'static Path {
    // Before Linux 3.17 there is only the other.
    ["/proc/thread-self", "/proc/self"].map(Path::new).into_iter().find(|folder| folder.exists()).unwrap_or(Path::new("/proc/self"))
}

/// A process's folder in `/proc`: that of one of its threads which lives, if its main thread has ended.
pub fn folder_of(pid: u32) -> PathBuf {
    let folder = PathBuf::from(format!("/proc/{pid}"));
    let lives = |folder: &PathBuf| state(folder).is_some_and(|state| !matches!(state, b'Z' | b'X'));
    if lives(&folder) {
        return folder;
    }
    let threads = fs::read_dir(folder.join("task")).into_iter().flatten().flatten();
    threads.map(|thread| thread.path()).find(lives).unwrap_or(folder)
}

/// Whether a process's main thread lives. `true` also for a process that has ended.
pub fn has_main_thread(pid: u32) -> bool {
    folder_of(pid) == Path::new(&format!("/proc/{pid}"))
}

/// The state of a process or thread, from its folder in `/proc`; `None` if it has ended.
fn state(folder: &Path) -> Option<u8> {
    let stat = fs::read(folder.join("stat")).ok()?;
    // The program's name, in brackets, may have any characters.
    let name_ends = stat.iter().rposition(|byte| *byte == b')')?;
    stat.get(name_ends + 2).copied()
}

/// Whether a process is stopped, by ^Z or a debugger, and answers nobody. `false` if that cannot be seen.
pub fn is_stopped(pid: u32) -> bool {
    matches!(state(&folder_of(pid)), Some(b'T' | b't'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::is_one_file;
    use std::os::fd::AsFd;
    use std::process::{Command, id};

    use std::{ptr, thread};

    #[test]
    fn a_stopped_process_is_told_from_one_that_sleeps() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id();
        assert!(!is_stopped(pid));
        // SAFETY: only the child is meant, and the status is not asked for.
        unsafe {
            libc::kill(pid.cast_signed(), libc::SIGSTOP);
            libc::waitpid(pid.cast_signed(), ptr::null_mut(), libc::WUNTRACED);
        }
        assert!(is_stopped(pid) && !is_stopped(id()) && !is_stopped(u32::MAX));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// What is in a folder of `/proc` of which there is one for each thread.
    fn is_whole(folder: &Path) -> bool {
        let has = |file: &str| fs::read(folder.join(file)).is_ok_and(|text| !text.is_empty());
        has("maps") && has("cmdline") && fs::read_link(folder.join("fd/0")).is_ok()
    }

    #[test]
    fn a_process_whose_main_thread_has_ended_is_seen_through_another() {
        let looks = || {
            while state(Path::new("/proc/self")) != Some(b'Z') {
                thread::yield_now();
            }
            let file = fs::File::open("/dev/null").unwrap();
            let is_one = is_one_file(file.as_fd(), file.try_clone().unwrap().as_fd());
            let is_seen = !is_whole(Path::new("/proc/self")) && is_whole(own_folder()) && is_whole(&folder_of(id()));
            // SAFETY: ends the child, without the exit handlers of the test harness.
            unsafe { libc::_exit(i32::from(!is_seen || is_one.is_ok_and(|is_one| !is_one))) };
        };
        // SAFETY: the child leaves by `_exit`, or by the alarm.
        let child = unsafe { libc::fork() };
        if child == 0 {
            thread::spawn(looks);
            // SAFETY: ends this thread alone. Nobody needs what it has on its stack.
            unsafe {
                libc::alarm(100);
                libc::syscall(libc::SYS_exit, 0);
            }
        }
        let mut status = -1;
        // SAFETY: a child of this process; `status` is writable.
        assert!(unsafe { libc::waitpid(child, &raw mut status, 0) } == child && status == 0, "{status:#x}");
    }

    #[test]
    fn the_clock_counts_nanoseconds_since_the_start_of_the_machine() {
        let seconds = || {
            let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: writable.
            unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
            Duration::from_secs(now.tv_sec as u64)
        };
        let (earliest, now, latest) = (seconds(), Duration::from_nanos(now()), seconds() + Duration::from_secs(1));
        assert!(earliest <= now && now <= latest, "{earliest:?} {now:?} {latest:?}");
    }
}
