//! Passing file descriptors over a socket (`SCM_RIGHTS`).

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::{ptr, slice};
use vramctl_host::{Held, reserve};

/// The most descriptors that one message can have (`SCM_MAX_FD` in Linux).
pub const MOST: usize = 253;

/// As many descriptors come to a process that has none left: a decision, or the pieces of an allocation.
const MOST_PIECES: usize = 4;

/// Ancillary for a control message with `MOST` descriptors, aligned as it must be.
type Ancillary = [u64; 130];
const _: () = {
    // SAFETY: a calculation.
    assert!(unsafe { libc::CMSG_SPACE((MOST * size_of::<RawFd>()) as u32) } as usize <= size_of::<Ancillary>());
};

/// Sends bytes and, with the first of them, descriptors. Returns how many bytes were sent.
fn send(stream: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<usize> {
    if files.len() > MOST {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut room: Ancillary = [0; 130];
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: plain data, for which all zeroes is a value; the room is large enough and aligned; the bytes are only read.
    let sent = unsafe {
        let mut message: libc::msghdr = mem::zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        if !files.is_empty() {
            let length = size_of_val(files) as u32;
            message.msg_control = room.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(length) as _;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(length) as _;
            for (at, file) in files.iter().enumerate() {
                let place = libc::CMSG_DATA(header).add(at * size_of::<RawFd>());
                ptr::copy_nonoverlapping(file.as_raw_fd().to_ne_bytes().as_ptr(), place, size_of::<RawFd>());
            }
        }
        // The program may handle SIGPIPE.
        libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Sends all of a line and, with its first bytes, descriptors. The flags are those of `send`, for its beginning: once part of it
/// is sent, the rest must follow.
pub fn send_line(stream: &UnixStream, line: &[u8], files: &[BorrowedFd<'_>], flags: libc::c_int) -> io::Result<()> {
    let mut rest = line;
    if !files.is_empty() {
        rest = &rest[send(stream, rest, files)?..];
    }
    while !rest.is_empty() {
        let flags = if rest.len() == line.len() { flags } else { 0 };
        // SAFETY: `rest` is readable for its length. `MSG_NOSIGNAL`, because the program may handle SIGPIPE.
        let sent = unsafe { libc::send(stream.as_raw_fd(), rest.as_ptr().cast(), rest.len(), flags | libc::MSG_NOSIGNAL) };
        match usize::try_from(sent) {
            Ok(sent) => rest = &rest[sent..],
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => (),
                error => return Err(error),
            },
        }
    }
    Ok(())
}

/// The descriptors that have come with bytes.
#[derive(Debug, Default)]
pub struct Passed {
    /// In the order in which they were sent. A forked child does not keep them, nor the memory behind them.
    pub files: Vec<Held>,
    /// Whether some that were sent did not arrive: this process has reached its limit of open files, or may not receive them.
    pub lacks_some: bool,
}

/// Receives bytes, and the descriptors that came with them. 0 at the end.
pub fn receive(stream: &UnixStream, bytes: &mut [u8], passed: &mut Passed) -> io::Result<usize> {
    // Waits for them: the reserve is lent only for a moment.
    // SAFETY: `bytes` is writable for its length.
    let waiting = unsafe { libc::recv(stream.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len().min(1), libc::MSG_PEEK) };
    if waiting < 0 {
        return Err(io::Error::last_os_error());
    }
    reserve::lend(MOST_PIECES, || receive_now(stream, bytes, passed))
}

fn receive_now(stream: &UnixStream, bytes: &mut [u8], passed: &mut Passed) -> io::Result<usize> {
    let mut room: Ancillary = [0; 130];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: plain data, for which all zeroes is a value; the room is aligned, and the bytes are writable.
    let (received, message) = unsafe {
        let mut message: libc::msghdr = mem::zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = room.as_mut_ptr().cast();
        message.msg_controllen = size_of::<Ancillary>() as _;
        (libc::recvmsg(stream.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC), message)
    };
    let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
    passed.lacks_some |= message.msg_flags & libc::MSG_CTRUNC != 0;
    let mut files = Vec::new();
    // SAFETY: the kernel has filled the room with whole messages. The descriptors are new, and nobody else's.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let length = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                let numbers = slice::from_raw_parts(libc::CMSG_DATA(header), length).chunks_exact(size_of::<RawFd>());
                files.extend(numbers.filter_map(|number| Some(OwnedFd::from_raw_fd(RawFd::from_ne_bytes(number.try_into().ok()?)))));
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    for file in files {
        match Held::new(file) {
            Ok(file) => passed.files.push(file),
            Err(_) => passed.lacks_some = true,
        }
    }
    Ok(received)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::iter;
    use std::os::fd::AsFd;
    use std::process::Command;

    #[test]
    #[cfg_attr(miri, ignore = "Unix sockets")]
    fn descriptors_arrive_with_the_bytes_and_are_closed_on_exec() {
        let (here, there) = UnixStream::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"contents").unwrap();
        let many = vec![file.as_fd(); MOST];
        assert_eq!(send(&here, b"line\n", &many).unwrap(), 5);
        assert_eq!(send(&here, b"more\n", &[]).unwrap(), 5);
        assert!(send(&here, b"x", &vec![file.as_fd(); MOST + 1]).is_err());
        let (mut bytes, mut passed) = ([0; 64], Passed::default());
        let count = receive(&there, &mut bytes, &mut passed).unwrap();
        assert!(bytes[..count].starts_with(b"line\n"));
        let files = &mut passed.files;
        assert!(files.len() == MOST && !passed.lacks_some);
        // SAFETY: touches no memory.
        assert_eq!(unsafe { libc::fcntl(files[MOST - 1].get().unwrap().as_raw_fd(), libc::F_GETFD) }, libc::FD_CLOEXEC);
        let mut text = String::new();
        let held = files.pop().unwrap();
        let mut copy = held.as_type::<File>().unwrap();
        copy.rewind().unwrap();
        copy.read_to_string(&mut text).unwrap();
        assert_eq!(text, "contents");
        drop(here);
        while receive(&there, &mut bytes, &mut passed).unwrap() > 0 {}
    }

    /// Runs in a process of its own, whose descriptors it uses up.
    #[test]
    #[ignore = "run by the test below"]
    fn receives_at_the_limit() {
        let (here, there) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        reserve::fill();
        let mut all: Vec<_> = iter::from_fn(|| file.try_clone().ok()).collect();
        for left in 0..=MOST_PIECES {
            assert_eq!(send(&here, b"x", &[file.as_fd(); MOST_PIECES]).unwrap(), 1);
            let (mut bytes, mut passed) = ([0; 1], Passed::default());
            assert_eq!(receive(&there, &mut bytes, &mut passed).unwrap(), 1);
            assert!(passed.files.len() == MOST_PIECES && !passed.lacks_some, "{left} were left: {passed:?}");
            drop(passed);
            reserve::fill();
            all.pop();
        }
    }

    /// One that has some left, but too few, needs the reserve as much as one that has none.
    #[test]
    #[cfg_attr(miri, ignore = "another process")]
    fn descriptors_arrive_however_few_are_left() {
        let this = std::env::current_exe().unwrap();
        let ended = Command::new(this).args(["--ignored", "--exact", "descriptors::tests::receives_at_the_limit"]).output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
    }
}
