//! The namespaces of processes: what a process is called in its own, running a command in there, and what is mounted there.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::{ptr, thread};

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

/// Takes this process into a network namespace of its own, with a loopback device that has these addresses, and nothing else.
pub fn leave_network(addresses: &BTreeSet<IpAddr>) -> io::Result<()> {
    // SAFETY: touches no memory.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    let mut request = request_of("lo");
    request.ifr_ifru.ifru_flags = libc::IFF_UP as libc::c_short;
    ask(&socket, libc::SIOCSIFFLAGS, &request)?;
    // An IPv6 socket may have one of IPv4.
    let addresses: BTreeSet<_> = addresses.iter().map(IpAddr::to_canonical).collect();
    let others = addresses.iter().filter(|address| !address.is_loopback() && !address.is_unspecified() && !address.is_multicast());
    for (number, address) in others.enumerate() {
        match address {
            IpAddr::V4(address) => {
                let mut request = request_of(&format!("lo:{number}"));
                for (call, octets) in [(libc::SIOCSIFADDR, address.octets()), (libc::SIOCSIFNETMASK, [255; 4])] {
                    // SAFETY: plain data.
                    let mut value: libc::sockaddr_in = unsafe { mem::zeroed() };
                    value.sin_family = libc::AF_INET as libc::sa_family_t;
                    value.sin_addr.s_addr = u32::from_ne_bytes(octets);
                    // SAFETY: both are plain data of the same size.
                    request.ifr_ifru.ifru_addr = unsafe { mem::transmute::<libc::sockaddr_in, libc::sockaddr>(value) };
                    ask(&socket, call, &request)?;
                }
            }
            IpAddr::V6(address) => {
                let request = libc::in6_ifreq {
                    ifr6_addr: libc::in6_addr { s6_addr: address.octets() },
                    ifr6_prefixlen: 128,
                    // Of each namespace's loopback device.
                    ifr6_ifindex: 1,
                };
                ask(&UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))?, libc::SIOCSIFADDR, &request)?;
            }
        }
    }
    Ok(())
}

/// Mounts something in this namespace. `kind`: of a file system, which has this name.
pub fn mount(what: impl AsRef<Path>, place: &Path, kind: Option<&str>, flags: libc::c_ulong) -> io::Result<()> {
    let [what, place] = [what.as_ref(), place].map(|path| CString::new(path.as_os_str().as_bytes()));
    let (what, place, kind) = (what?, place?, kind.map(CString::new).transpose()?);
    let kind_or_null = kind.as_ref().map_or(ptr::null(), |kind| kind.as_ptr());
    // SAFETY: NUL-terminated names, or null where the kernel ignores them.
    let mounted = unsafe { libc::mount(what.as_ptr(), place.as_ptr(), kind_or_null, flags, ptr::null()) };
    if mounted == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Takes away what is mounted there. What is bound elsewhere stays.
pub fn unmount(place: &Path) -> io::Result<()> {
    let place = CString::new(place.as_os_str().as_bytes())?;
    // SAFETY: a NUL-terminated name.
    if unsafe { libc::umount2(place.as_ptr(), 0) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// About a device, of which nothing is said yet.
fn request_of(device: &str) -> libc::ifreq {
    // SAFETY: plain data.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from.cast_signed();
    }
    request
}

/// Makes a request of this call's kind.
fn ask<T>(socket: &UdpSocket, call: libc::Ioctl, request: &T) -> io::Result<()> {
    // SAFETY: an open socket, and a request of the call's kind with a NUL-terminated name.
    if unsafe { libc::ioctl(socket.as_raw_fd(), call, ptr::from_ref(request)) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
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
