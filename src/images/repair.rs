//! Connections that CRIU has left in the kernel's repair mode, in which a program can neither send nor receive: after a dump that leaves its processes
//! stopped, and whenever it was killed.

use std::fs;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Ends that for all connections of a process. It must be stopped, or not run yet.
pub fn end(pid: u32) {
    for number in sockets(pid) {
        if let Ok(socket) = copy(pid, number)
            && is_repaired(&socket)
        {
            // Without a probe of the other side.
            let off: libc::c_int = -1;
            // SAFETY: a number, readable.
            unsafe {
                libc::setsockopt(
                    socket.as_raw_fd(),
                    libc::IPPROTO_TCP,
                    libc::TCP_REPAIR,
                    (&raw const off).cast(),
                    size_of::<libc::c_int>() as libc::socklen_t,
                );
            }
        }
    }
}

fn sockets(pid: u32) -> Vec<RawFd> {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let is_socket = |file: &fs::DirEntry| fs::read_link(file.path()).is_ok_and(|link| link.to_string_lossy().starts_with("socket:"));
    files.filter(is_socket).filter_map(|file| file.file_name().to_str()?.parse().ok()).collect()
}

/// Another process's descriptor.
fn copy(pid: u32, number: RawFd) -> io::Result<OwnedFd> {
    let opened = |number: libc::c_long| {
        // SAFETY: just opened, and nobody else's.
        if number < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { OwnedFd::from_raw_fd(number as RawFd) }) }
    };
    // SAFETY: touches no memory.
    let process = opened(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    // SAFETY: as above.
    opened(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) })
}

fn is_repaired(socket: &OwnedFd) -> bool {
    let (mut is_on, mut length): (libc::c_int, _) = (0, mem::size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: a number and its length, writable. Of other sockets, the kernel refuses it.
    let got =
        unsafe { libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_REPAIR, (&raw mut is_on).cast(), &raw mut length) };
    got == 0 && is_on != 0
}
