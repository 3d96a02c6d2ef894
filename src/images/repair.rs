//! Connections that CRIU has left in the kernel's repair mode, in which a program can neither send nor receive: after a dump that leaves its processes
//! stopped, and whenever it was killed.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Ends that for all connections of processes. They must be stopped, or not run yet.
///
/// The kernel takes `SO_REUSEADDR` from a socket that leaves this mode. A connection that a listening socket has accepted had what that one has; without,
/// nobody could listen at its port for a minute after its end.
pub fn end(pids: &BTreeSet<u32>) {
    let all: Vec<_> = pids.iter().flat_map(|pid| sockets(*pid).into_iter().filter_map(|number| copy(*pid, number).ok())).collect();
    let is_on = |socket: &OwnedFd, level, option| matches!(get(socket, level, option), Some(1..));
    let repaired: Vec<_> = all.iter().filter(|socket| is_on(socket, libc::IPPROTO_TCP, libc::TCP_REPAIR)).collect();
    if repaired.is_empty() {
        return;
    }
    let listens = |socket: &&OwnedFd| is_on(socket, libc::SOL_SOCKET, libc::SO_ACCEPTCONN);
    let lets_others = |socket: &&OwnedFd| is_on(socket, libc::SOL_SOCKET, libc::SO_REUSEADDR);
    let ports: BTreeSet<_> = all.iter().filter(listens).filter(lets_others).filter_map(port).collect();
    for socket in repaired {
        // Without a probe of the other side.
        set(socket, libc::IPPROTO_TCP, libc::TCP_REPAIR, -1);
        if port(socket).is_some_and(|port| ports.contains(&port)) {
            set(socket, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1);
        }
    }
}

/// The port of a TCP socket here.
fn port(socket: &OwnedFd) -> Option<u16> {
    // SAFETY: plain data.
    let mut address: libc::sockaddr_in6 = unsafe { mem::zeroed() };
    let mut length = size_of_val(&address) as libc::socklen_t;
    // SAFETY: an address and its length, writable.
    let got = unsafe { libc::getsockname(socket.as_raw_fd(), (&raw mut address).cast(), &raw mut length) };
    let is_internet = [libc::AF_INET, libc::AF_INET6].contains(&address.sin6_family.into());
    // At the same place in both.
    (got == 0 && is_internet).then(|| u16::from_be(address.sin6_port))
}

/// An option of a socket. `None` if it is of another kind.
fn get(socket: &OwnedFd, level: libc::c_int, option: libc::c_int) -> Option<libc::c_int> {
    let (mut value, mut length): (libc::c_int, _) = (0, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: a number and its length, writable.
    let got = unsafe { libc::getsockopt(socket.as_raw_fd(), level, option, (&raw mut value).cast(), &raw mut length) };
    (got == 0).then_some(value)
}

fn set(socket: &OwnedFd, level: libc::c_int, option: libc::c_int, value: libc::c_int) {
    let length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: a number, readable.
    unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), length) };
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
