//! Ports of a program that has a network of its own: whoever connects to one outside is connected to the program's.

use crate::criu::keep_to_itself;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::str::FromStr;
use std::thread;
use std::time::Duration;

/// A port of the program, and where it is outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// In the program.
    pub old: u16,
    /// Outside.
    pub new: SocketAddr,
}

impl FromStr for Port {
    type Err = String;

    /// `OLD=NEW` or `OLD=ADDRESS:NEW`.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text} is no pair of ports, such as 8000=8001 or 8000=0.0.0.0:8001");
        let (old, new) = text.split_once('=').ok_or_else(wrong)?;
        let local = || Some(SocketAddr::from((Ipv4Addr::LOCALHOST, new.parse().ok()?)));
        let new = new.parse().ok().or_else(local).ok_or_else(wrong)?;
        Ok(Self { old: old.parse().map_err(|_| wrong())?, new })
    }
}

impl Port {
    /// That of another copy: so many further.
    pub fn further(&self, by: u16) -> Option<Self> {
        let mut new = self.new;
        new.set_port(new.port().checked_add(by)?);
        Some(Self { new, ..self.clone() })
    }

    /// Listens there.
    pub fn listen(&self) -> io::Result<TcpListener> {
        TcpListener::bind(self.new)
    }
}

/// From now on, relays what arrives at this socket to a port in the network of this thread.
pub fn start(listener: RawFd, port: u16) -> io::Result<()> {
    // SAFETY: opened for this process alone.
    let listener = unsafe { TcpListener::from_raw_fd(listener) };
    keep_to_itself(listener.as_raw_fd())?;
    thread::Builder::new().name("relay".into()).spawn(move || accept(&listener, port)).map(drop)
}

fn accept(listener: &TcpListener, port: u16) {
    /// After a failure, such as too many open files.
    const TRY_AGAIN: Duration = Duration::from_millis(100);
    loop {
        let relayed = listener.accept().and_then(|(outside, _)| {
            let inside = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).or_else(|_| TcpStream::connect((Ipv6Addr::LOCALHOST, port)))?;
            join(outside, inside)
        });
        // Whoever has connected is disconnected, if the program does not listen.
        if relayed.is_err_and(|error| error.kind() != io::ErrorKind::ConnectionRefused) {
            thread::sleep(TRY_AGAIN);
        }
    }
}

/// Copies in both directions until each has ended.
fn join(one: TcpStream, other: TcpStream) -> io::Result<()> {
    for stream in [&one, &other] {
        stream.set_nodelay(true)?;
    }
    let back = (other.try_clone()?, one.try_clone()?);
    for (from, to) in [(one, other), back] {
        thread::Builder::new().spawn(move || pass(from, to))?;
    }
    Ok(())
}

fn pass(mut from: TcpStream, mut to: TcpStream) {
    let _ = io::copy(&mut from, &mut to);
    // The other direction may go on.
    let _ = to.shutdown(Shutdown::Write);
    let _ = from.shutdown(Shutdown::Read);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::IntoRawFd;

    #[test]
    fn a_port_outside_is_this_machines_own_unless_an_address_is_given() {
        let port = |text: &str| text.parse::<Port>().map(|port| (port.old, port.new.to_string()));
        assert_eq!(port("8000=8001"), Ok((8000, "127.0.0.1:8001".into())));
        assert_eq!(port("8000=0.0.0.0:8001"), Ok((8000, "0.0.0.0:8001".into())));
        assert_eq!(port("8000=[::1]:8001"), Ok((8000, "[::1]:8001".into())));
        assert!(["8000", "8000=", "=1", "8000=99999", "x=1"].iter().all(|text| port(text).is_err()));
        let first: Port = "1=65534".parse().unwrap();
        assert_eq!(first.further(1).map(|port| port.new.port()), Some(65535));
        assert_eq!(first.further(2), None);
    }

    #[test]
    fn both_directions_are_relayed_and_end_by_themselves() {
        let program = TcpListener::bind("127.0.0.1:0").unwrap();
        let outside = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, address) = (program.local_addr().unwrap().port(), outside.local_addr().unwrap());
        start(outside.into_raw_fd(), port).unwrap();
        let mut client = TcpStream::connect(address).unwrap();
        let (mut server, _) = program.accept().unwrap();
        client.write_all(b"question").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let mut asked = String::new();
        server.read_to_string(&mut asked).unwrap();
        server.write_all(b"answer").unwrap();
        drop(server);
        let mut answered = String::new();
        client.read_to_string(&mut answered).unwrap();
        assert_eq!([asked, answered], ["question", "answer"]);
        // Without anybody who listens, the client is disconnected.
        drop(program);
        assert!(!matches!(TcpStream::connect(address).unwrap().read(&mut [0]), Ok(1..)));
    }
}
