//! A socket without a file, for who is told its number: opens memory that this process shares where the directory of the sockets cannot be used, or
//! is another one.
//!
//! It has an abstract name (`unix(7)`), which exists within one network namespace. The number is random, so that nobody else takes the name
//! before, and the PID namespace is part of it: processes that call each other by their pids reach each other.

use crate::address::namespace_of;
use crate::discovery::{connect_without_waiting, peer};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use vramctl_host::Held;
use vramctl_host::system::{fill_with_random, own_folder, user};

/// The number of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Door(u64);

impl Door {
    /// A number of a handle; `None` if it has none.
    pub fn of_number(number: u64) -> Option<Self> {
        (number != 0).then_some(Self(number))
    }

    /// For a handle.
    pub fn number(self) -> u64 {
        self.0
    }

    /// A new one.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; 8];
        fill_with_random(&mut bytes).map(|()| Self(u64::from_ne_bytes(bytes).max(1)))
    }

    /// Listens there, without waiting for a client.
    pub fn listen(self) -> io::Result<Held> {
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(self.name()?)?)?;
        listener.set_nonblocking(true)?;
        Held::new(listener)
    }

    /// Connects to the process of this pid that listens there, which must be this user's. `WouldBlock` if it has stopped accepting connections.
    pub fn connect(self, pid: u32) -> io::Result<UnixStream> {
        let stream = connect_without_waiting(&[b"\0", self.name()?.as_bytes()].concat())?;
        let peer = peer(&stream)?;
        let is_meant = peer.pid.cast_unsigned() == pid && [user(), 0].contains(&peer.uid);
        if is_meant { Ok(stream) } else { Err(io::ErrorKind::PermissionDenied.into()) }
    }

    fn name(self) -> io::Result<String> {
        let namespace = namespace_of(own_folder()).ok_or(io::ErrorKind::NotFound)?;
        Ok(format!("vramctl-{namespace}-{:016x}", self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Unix sockets")]
    fn who_knows_the_number_connects() {
        let (door, own) = (Door::random().unwrap(), std::process::id());
        assert_eq!(door.connect(own).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        let socket = door.listen().unwrap();
        assert_eq!(door.listen().unwrap_err().kind(), io::ErrorKind::AddrInUse);
        let stream = Door::of_number(door.number()).unwrap().connect(own).unwrap();
        let (accepted, _) = socket.as_type::<UnixListener>().unwrap().accept().unwrap();
        assert_eq!(peer(&accepted).unwrap().pid.cast_unsigned(), own);
        assert_eq!(door.connect(1).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        drop((socket, stream));
        assert!(door.connect(own).is_err() && Door::of_number(0).is_none());
    }
}
