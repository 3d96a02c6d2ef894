//! The library's descriptors in somebody else's process.
//!
//! The program may close descriptors that it does not know (a daemon closes all) and reuse their numbers for its own files.
//! It may have closed its standard streams, whose numbers the next file gets. And its forked children inherit what is open.
//! Every descriptor of the library that outlives a call is a [`Held`].

use crate::{fork, system};
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, Ordering};
use std::{io, mem, ptr};

/// A descriptor of the library: above the standard streams, closed in forked children, and verified before each use and
/// before closing. If its number belongs to another file by now, that file is left alone.
///
/// The file must have an identity of its own, as regular files and sockets do. All eventfds share one.
#[derive(Debug)]
pub struct Held {
    number: RawFd,
    identity: Identity,
    generation: u32,
    slot: &'static Slot,
}

/// Device and inode of a file.
pub type Identity = (u64, u64);

/// A type of an open file that can be a [`Held`].
pub trait Opened: Into<OwnedFd> {
    /// Whether the type says that the file is a socket.
    const IS_SOCKET: bool;
}

impl Opened for OwnedFd {
    const IS_SOCKET: bool = false;
}

impl Opened for File {
    const IS_SOCKET: bool = false;
}

impl Opened for UnixListener {
    const IS_SOCKET: bool = true;
}

impl Opened for UnixStream {
    const IS_SOCKET: bool = true;
}

impl Opened for UnixDatagram {
    const IS_SOCKET: bool = true;
}

impl Held {
    /// Takes a descriptor with `O_CLOEXEC`. Call this right after the descriptor was opened. What happens in the microseconds between cannot be
    /// excluded unless the program waits for the library: a child that is forked inherits the descriptor, and a daemon that closes everything
    /// and opens its own files one by one may put one under the number. A socket's number that has another kind of file is left to the program.
    pub fn new<T: Opened>(descriptor: T) -> io::Result<Self> {
        Self::take(descriptor.into(), |(_, mode)| !T::IS_SOCKET || mode & libc::S_IFMT == libc::S_IFSOCK)
    }

    /// Takes a descriptor if the file behind it `may_be` the one that was opened.
    fn take(descriptor: OwnedFd, may_be: impl FnOnce((Identity, libc::mode_t)) -> bool) -> io::Result<Self> {
        let descriptor = above_standard(descriptor)?;
        // Not closed by us from here on, if it is not ours.
        let number = descriptor.into_raw_fd();
        let found = file_of(number).ok_or_else(io::Error::last_os_error)?;
        let (identity, _) = found;
        if !may_be(found) {
            return Err(closed_by_program());
        }
        Ok(Self { number, identity, generation: fork::generation(), slot: Slot::take(number, identity) })
    }

    /// The descriptor, for immediate use. Fails if the program has closed it, or in a forked child.
    pub fn get(&self) -> io::Result<BorrowedFd<'_>> {
        if !self.is_ours() {
            return Err(closed_by_program());
        }
        // SAFETY: open, as just checked, and the library does not close it while it is borrowed.
        Ok(unsafe { BorrowedFd::borrow_raw(self.number) })
    }

    /// The descriptor as a `File`, socket or other type. The caller does not close it.
    pub fn as_type<T: From<OwnedFd>>(&self) -> io::Result<ManuallyDrop<T>> {
        let number = self.get()?.as_raw_fd();
        // SAFETY: open, and never closed through this value.
        Ok(ManuallyDrop::new(T::from(unsafe { OwnedFd::from_raw_fd(number) })))
    }

    /// Another descriptor of the same open file.
    pub fn copy(&self) -> io::Result<Self> {
        let copy = self.get()?.try_clone_to_owned()?;
        Self::take(copy, |(identity, _)| identity == self.identity)
    }

    /// The same, under the number of `other`, whose file is closed.
    pub fn copy_to(&self, other: &Self) -> io::Result<Self> {
        // SAFETY: touches no memory. Both are ours, and `other` notices that its number has another file.
        let number = unsafe { libc::dup3(self.get()?.as_raw_fd(), other.get()?.as_raw_fd(), libc::O_CLOEXEC) };
        if number < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened, and nobody else's.
        let copy = unsafe { OwnedFd::from_raw_fd(number) };
        Self::take(copy, |(identity, _)| identity == self.identity)
    }

    /// Whether the number still belongs to the same file, in the same process.
    pub fn is_ours(&self) -> bool {
        self.generation == fork::generation() && identity(self.number) == Some(self.identity)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // In a forked child, the fork handler has closed it and freed the slot.
        if self.generation != fork::generation() {
            return;
        }
        // Out of the list first: once closed, the number may be reused at any moment.
        self.slot.number.store(FREE, Ordering::Release);
        if self.is_ours() {
            // SAFETY: ours, and not used again.
            unsafe { libc::close(self.number) };
        }
    }
}

fn closed_by_program() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the program has closed a descriptor that it did not open")
}

/// Whether a number is the library's. It is not if the program has closed that descriptor and has another file under the number.
pub fn is_held(number: RawFd) -> bool {
    Slot::all().any(|slot| {
        let [device, inode] = slot.identity.each_ref().map(|part| part.load(Ordering::Relaxed));
        slot.number.load(Ordering::Acquire) == number && identity(number) == Some((device, inode))
    })
}

/// Whether two descriptors of this process are of one open file: the same `open`, not only the same path (`KCMP_FILE`, `kcmp(2)`). An error
/// where the kernel does not say, as under some seccomp filters.
pub fn is_one_file(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> io::Result<bool> {
    const KCMP_FILE: libc::c_int = 0;
    // SAFETY: touches no memory.
    let answer = unsafe {
        // The process's id is that of its main thread, which has no files any more if it has ended.
        let own = system::thread_id();
        libc::syscall(libc::SYS_kcmp, own, own, KCMP_FILE, one.as_raw_fd() as libc::c_ulong, other.as_raw_fd() as libc::c_ulong)
    };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer == 0) }
}

/// Moves a file above the standard streams. If the program has closed one of those, a new file gets its number, and then
/// everything that the program prints.
pub fn above_standard(file: OwnedFd) -> io::Result<OwnedFd> {
    if file.as_raw_fd() > libc::STDERR_FILENO {
        return Ok(file);
    }
    // SAFETY: the call touches no memory.
    let copy = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, libc::STDERR_FILENO + 1) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

fn identity(descriptor: RawFd) -> Option<Identity> {
    file_of(descriptor).map(|(identity, _)| identity)
}

/// The file behind a number, and its kind and permissions (`st_mode`). `None` if there is none.
pub(crate) fn file_of(descriptor: RawFd) -> Option<(Identity, libc::mode_t)> {
    // SAFETY: plain data, for which all zeroes is a value.
    let mut found: libc::stat64 = unsafe { mem::zeroed() };
    // SAFETY: writable.
    let answer = unsafe { libc::fstat64(descriptor, &raw mut found) };
    (answer == 0).then_some(((found.st_dev, found.st_ino), found.st_mode))
}

/// An entry in the list of descriptors that forked children close. Left open in a child, a socket would keep clients waiting
/// for a dead server, and a file would keep its disk space after its owner was killed. Slots are reused, never freed.
#[derive(Debug)]
struct Slot {
    /// The descriptor, `FREE`, or `TAKEN` while the rest is being written.
    number: AtomicI32,
    identity: [AtomicU64; 2],
    next: AtomicPtr<Slot>,
}

const FREE: RawFd = -1;
const TAKEN: RawFd = -2;

static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());

impl Slot {
    fn take(number: RawFd, (device, inode): Identity) -> &'static Self {
        let slot = Self::all()
            .find(|slot| slot.number.compare_exchange(FREE, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok())
            .unwrap_or_else(Self::add);
        slot.identity[0].store(device, Ordering::Relaxed);
        slot.identity[1].store(inode, Ordering::Relaxed);
        slot.number.store(number, Ordering::Release);
        slot
    }

    /// Adds a slot at the head of the list, taken.
    fn add() -> &'static Self {
        static CLOSING: AtomicBool = AtomicBool::new(false);
        // Two threads may both register it, which is harmless. Neither may wait for the other (see `fork`).
        if !CLOSING.load(Ordering::Acquire) {
            fork::on_fork_in_child(close_in_child);
            CLOSING.store(true, Ordering::Release);
        }
        let slot: &'static Self = Box::leak(Box::new(Self {
            number: AtomicI32::new(TAKEN),
            identity: [const { AtomicU64::new(0) }; 2],
            next: AtomicPtr::new(ptr::null_mut()),
        }));
        let mut head = SLOTS.load(Ordering::Acquire);
        loop {
            slot.next.store(head, Ordering::Relaxed);
            let new = ptr::from_ref(slot).cast_mut();
            match SLOTS.compare_exchange_weak(head, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return slot,
                Err(other) => head = other,
            }
        }
    }

    fn all() -> impl Iterator<Item = &'static Self> {
        // SAFETY: pointers in the list are null or point to leaked slots.
        let follow = |at: &AtomicPtr<Self>| unsafe { at.load(Ordering::Acquire).as_ref() };
        std::iter::successors(follow(&SLOTS), move |slot| follow(&slot.next))
    }
}

/// Async-signal-safe: a walk along a list of atomics, `fstat` and `close`.
extern "C" fn close_in_child() {
    for slot in Slot::all() {
        let number = slot.number.swap(FREE, Ordering::AcqRel);
        let inherited = (slot.identity[0].load(Ordering::Relaxed), slot.identity[1].load(Ordering::Relaxed));
        if number >= 0 && identity(number) == Some(inherited) {
            // SAFETY: the library's descriptor, inherited; the thread that used it does not exist in the child.
            unsafe { libc::close(number) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    fn held() -> Held {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"ours", 0).unwrap();
        Held::new(file).unwrap()
    }

    /// A daemon closes descriptors that it does not know, and its next file gets the number.
    #[test]
    fn a_reused_descriptor_number_is_left_alone() {
        let held = held();
        let number = held.get().unwrap().as_raw_fd();
        let programs = tempfile::tempfile().unwrap();
        // SAFETY: replaces the library's, as a program that closed it would.
        assert_eq!(unsafe { libc::dup2(programs.as_raw_fd(), number) }, number);
        assert!(held.get().is_err() && held.as_type::<File>().is_err());
        drop(held);
        // SAFETY: the program's, and still open.
        let program = unsafe { File::from_raw_fd(number) };
        assert_eq!(program.metadata().unwrap().len(), 0);
    }

    /// A daemon closes everything and opens its files one by one: the library's new socket has just got a number that the daemon uses next.
    #[test]
    fn a_number_that_the_program_takes_before_it_is_looked_at_is_left_alone() {
        let programs = tempfile::tempfile().unwrap();
        let held = Held::new(UnixDatagram::unbound().unwrap()).unwrap();
        let take_number = |number| {
            // SAFETY: replaces the library's, as a program that closed it would.
            assert_eq!(unsafe { libc::dup2(programs.as_raw_fd(), number) }, number);
        };
        let socket = UnixDatagram::unbound().unwrap();
        let number = socket.as_raw_fd();
        take_number(number);
        assert_eq!(Held::new(socket).unwrap_err().kind(), io::ErrorKind::NotConnected);
        let copy = held.get().unwrap().try_clone_to_owned().unwrap();
        let other = copy.as_raw_fd();
        take_number(other);
        assert!(Held::take(copy, |(identity, _)| identity == held.identity).is_err());
        for number in [number, other] {
            // SAFETY: the program's, and still open.
            let program = unsafe { File::from_raw_fd(number) };
            assert_eq!(program.metadata().unwrap().len(), 0);
        }
    }

    #[test]
    fn a_forked_child_finds_it_closed_and_the_parent_does_not() {
        let held: Vec<_> = (0..100).map(|_| held()).collect();
        // SAFETY: the child calls nothing but `fstat` and leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let open = held.iter().filter(|held| identity(held.number) == Some(held.identity) || held.is_ours()).count();
            // SAFETY: ends the child without running the test harness's exit handlers.
            unsafe { libc::_exit(i32::from(open > 0)) };
        }
        let mut status = -1;
        // SAFETY: `child` is ours and `status` is writable.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
        assert!(held.iter().all(Held::is_ours));
    }

    #[test]
    fn a_held_descriptor_is_closed_on_drop() {
        let held = held();
        let (number, identity_before) = (held.number, held.identity);
        // Keeps its inode, which another test's file could get, under the same number.
        let _copy = held.get().unwrap().try_clone_to_owned().unwrap();
        drop(held);
        assert_ne!(identity(number), Some(identity_before));
    }

    #[test]
    fn the_numbers_of_standard_streams_are_not_taken() {
        // SAFETY: the child closes its own streams and leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            let above = unsafe {
                for stream in 0..3 {
                    libc::close(stream);
                }
                let file = libc::memfd_create(c"ours".as_ptr(), libc::MFD_CLOEXEC);
                file == 0 && Held::new(OwnedFd::from_raw_fd(file)).is_ok_and(|held| held.number > 2)
            };
            // SAFETY: as above.
            unsafe { libc::_exit(i32::from(!above)) };
        }
        let mut status = -1;
        // SAFETY: `child` is ours and `status` is writable.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
    }
}
