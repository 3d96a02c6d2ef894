//! The namespaces of processes: what a process is called in its own, and running a command in there.

use std::fs::{self, File};
use std::io;
use std::mem;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::thread;

/// The id of a process in its own PID namespace.
pub fn pid_there(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("NSpid:"))?.split_whitespace().last()?.parse().ok()
}

fn is_own(pid: u32, kind: &str) -> io::Result<bool> {
    let inode = |of: &str| fs::metadata(format!("/proc/{of}/ns/{kind}")).map(|namespace| namespace.ino());
    Ok(inode("self")? == inode(&pid.to_string())?)
}

/// Starts a command in the network, PID and mount namespaces of a process.
pub fn spawn_beside(pid: u32, command: &mut Command) -> io::Result<Child> {
    let kinds = [("net", libc::CLONE_NEWNET), ("pid", libc::CLONE_NEWPID), ("mnt", libc::CLONE_NEWNS)];
    let mut others = Vec::new();
    for (kind, flag) in kinds {
        if !is_own(pid, kind)? {
            others.push((File::open(format!("/proc/{pid}/ns/{kind}"))?, flag));
        }
    }
    let enter = || {
        for (file, flag) in &others {
            // SAFETY: touches no memory. Concerns this thread alone.
            let entered = unsafe { libc::unshare(libc::CLONE_FS) == 0 && libc::setns(file.as_raw_fd(), *flag) == 0 };
            if !entered {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    spawn_after(enter, command)
}

/// Starts a command in a PID and a mount namespace of its own, of which it is the first process.
pub fn spawn_apart(command: &mut Command) -> io::Result<Child> {
    let enter = || {
        // SAFETY: touches no memory. Concerns this thread alone.
        let entered = unsafe { libc::unshare(libc::CLONE_NEWPID | libc::CLONE_NEWNS) };
        if entered == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    spawn_after(enter, command)
}

/// Takes this process into a network namespace of its own, with a loopback device and nothing else.
pub fn leave_network() -> io::Result<()> {
    // SAFETY: touches no memory.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // SAFETY: plain data.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(*b"lo") {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = libc::IFF_UP as libc::c_short;
    // SAFETY: an open socket, and a request with a NUL-terminated name.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// In a thread of its own, which ends with its namespaces.
fn spawn_after(enter: impl FnOnce() -> io::Result<()> + Send, command: &mut Command) -> io::Result<Child> {
    // SAFETY: does nothing. With it, the child is made by `fork`, which another PID namespace needs.
    unsafe { command.pre_exec(|| Ok(())) };
    thread::scope(|scope| {
        let started = thread::Builder::new().spawn_scoped(scope, || enter().and_then(|()| command.spawn()))?;
        started.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
    })
}
