//! Memory of other processes that this one has open (CUDA IPC). The other side is [`super::share`].
//!
//! There is one connection to each owner, kept while something of it is open: its end tells the owner that all of it is closed,
//! whatever becomes of this process. Opened memory is not managed here: the owner pauses it, and only while nobody has it open.

use super::Memory;
use super::share::{Ticket, Token};
use crate::{contexts, drain};
use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{io, process};
use vramctl_control::descriptors;
use vramctl_control::discovery::Directory;
use vramctl_control::protocol::{self, Message, Reply, Request, VERSION};
use vramctl_driver::{self as driver, Access, Addresses, CUdevice, CUdeviceptr, Context, Current, Physical, Place, RelaxedCapture};
use vramctl_host::{Held, PerProcess};
use vramctl_model::{Failure, StatusCode, code};

/// How long an owner may take to answer: it first finishes a pause or resume.
const PATIENCE: Duration = Duration::from_secs(120);

/// What is open, and from whom.
#[derive(Default)]
struct Borrowed {
    open: HashMap<Token, Opened>,
    owners: HashMap<u32, Held>,
}

static BORROWED: PerProcess<Mutex<Borrowed>> = PerProcess::new(Mutex::default);

/// Memory of another process. Dropping it unmaps and releases it.
#[derive(Debug)]
struct Opened {
    owner: u32,
    address: CUdeviceptr,
    /// How often it was opened and not closed.
    count: usize,
    place: Place,
    /// The devices that may use it.
    devices: BTreeSet<CUdevice>,
    /// The contexts in which it was opened.
    contexts: BTreeSet<Context>,
    _memory: Physical,
}

fn borrowed() -> MutexGuard<'static, Borrowed> {
    BORROWED.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// `cuIpcOpenMemHandle`, for a handle of the library's: the address of the allocation's first byte. Memory that is open already has
/// the same address.
pub fn open(handle: &Ticket, current: &Current) -> Result<CUdeviceptr, StatusCode> {
    // As the driver answers in the process that made the handle.
    if handle.owner == process::id() && Memory::existing().is_some_and(|memory| memory.has_given(&handle.token)) {
        return Err(code::INVALID_CONTEXT);
    }
    contexts::note(current);
    // From now on, resets of devices are seen.
    Memory::get();
    let _relaxed = RelaxedCapture::enter();
    let mut borrowed = borrowed();
    if let Some(opened) = borrowed.open.get_mut(&handle.token) {
        opened.open_to(current).map_err(|failure| failure.code)?;
        opened.count += 1;
        return Ok(opened.address);
    }
    let pieces = borrowed.ask(handle)?;
    match Opened::map(handle.owner, &pieces, current) {
        Ok(opened) => {
            let address = opened.address;
            borrowed.open.insert(handle.token, opened);
            Ok(address)
        }
        Err(failure) => {
            log::debug!("cannot open memory of process {}: {failure}", handle.owner);
            borrowed.give_back(handle.owner, &handle.token);
            Err(failure.code)
        }
    }
}

/// `cuIpcCloseMemHandle`; `None` if nothing that was opened here begins at the address. The last close waits for the work of the
/// contexts that have opened it, as a free would.
pub fn close(address: CUdeviceptr) -> Option<Result<(), StatusCode>> {
    let borrowed = BORROWED.existing()?;
    let lock = || borrowed.lock().unwrap_or_else(PoisonError::into_inner);
    let _relaxed = RelaxedCapture::enter();
    let find = |borrowed: &mut Borrowed| {
        let found = borrowed.open.iter_mut().find(|(_, opened)| opened.address == address);
        found.map(|(token, opened)| (*token, opened.contexts.clone(), opened.count))
    };
    let (_, contexts, count) = find(&mut lock())?;
    if count == 1
        && let Err(failure) = drain::wait(contexts)
    {
        return Some(Err(failure.code));
    }
    let mut borrowed = lock();
    // Another thread may have closed it meanwhile.
    let (token, ..) = find(&mut borrowed)?;
    let opened = borrowed.open.get_mut(&token)?;
    opened.count -= 1;
    if opened.count == 0
        && let Some(opened) = borrowed.open.remove(&token)
    {
        let owner = opened.owner;
        // Before the owner may pause it.
        drop(opened);
        borrowed.give_back(owner, &token);
    }
    Some(Ok(()))
}

/// Closes what was opened in contexts that are gone or about to go, as CUDA does.
///
/// Never waits for a thread that is opening something: that one may wait for the other process's pause, the caller may hold this
/// process's, and the other process may be doing the same. What stays open is closed the next time.
pub(super) fn forget_gone(doomed: Option<Context>) {
    let Some(Ok(mut borrowed)) = BORROWED.existing().map(Mutex::try_lock) else { return };
    for opened in borrowed.open.values_mut() {
        opened.contexts.retain(|context| Some(*context) != doomed && !context.is_gone());
    }
    let closed: Vec<_> = borrowed.open.extract_if(|_, opened| opened.contexts.is_empty()).collect();
    for (token, opened) in closed {
        let owner = opened.owner;
        drop(opened);
        borrowed.give_back(owner, &token);
    }
}

impl Opened {
    fn map(owner: u32, pieces: &[(OwnedFd, usize)], current: &Current) -> Result<Self, Failure> {
        let mut memory = Physical::import(pieces.iter().map(|(file, bytes)| (file.as_fd(), *bytes)))?;
        let addresses = Arc::new(Addresses::reserve(pieces.iter().map(|(_, bytes)| bytes).sum())?);
        let place = Place::of(&addresses);
        memory.map(&place)?;
        let own = memory.device()?;
        let (address, devices, contexts) = (addresses.base(), BTreeSet::new(), BTreeSet::new());
        let mut opened = Self { owner, address, count: 1, place, devices, contexts, _memory: memory };
        opened.open_to(current)?;
        // Copies between devices may run on the memory's own.
        if let Some(own) = own {
            opened.give_access(own)?;
        }
        Ok(opened)
    }

    fn open_to(&mut self, current: &Current) -> Result<(), Failure> {
        self.give_access(current.device())?;
        self.contexts.insert(current.context());
        Ok(())
    }

    fn give_access(&mut self, device: CUdevice) -> Result<(), Failure> {
        if !self.devices.contains(&device) {
            driver::open([(self.place.span(), [Access::of_device(device)].into())])?;
            self.devices.insert(device);
        }
        Ok(())
    }
}

impl Borrowed {
    /// Gets the memory behind a handle from its owner.
    fn ask(&mut self, handle: &Ticket) -> Result<Vec<(OwnedFd, usize)>, StatusCode> {
        let known = self.owners.contains_key(&handle.owner);
        let mut answer = self.try_ask(handle);
        if known && answer.is_err() {
            // The owner may have a new socket, or be another process with the same pid.
            answer = self.try_ask(handle);
        }
        let (reply, files) = answer.map_err(|error| {
            log::debug!("process {} does not share its memory: {error}", handle.owner);
            match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => code::OPERATING_SYSTEM,
                _ => code::INVALID_HANDLE,
            }
        })?;
        match reply {
            Reply::Opened { pieces } if pieces.len() == files.len() => {
                Ok(files.into_iter().zip(pieces).map(|(file, bytes)| (file, bytes as usize)).collect())
            }
            Reply::Error(refusal) => {
                if refusal.cuda_code == Some(code::ILLEGAL_STATE) {
                    log::warn!("the memory that process {} shares is paused; resume it before another process opens it", handle.owner);
                } else {
                    log::debug!("process {} does not share its memory: {}", handle.owner, refusal.message);
                }
                self.hang_up_if_unused(handle.owner);
                Err(refusal.cuda_code.unwrap_or(code::UNKNOWN))
            }
            _ => Err(code::UNKNOWN),
        }
    }

    fn try_ask(&mut self, handle: &Ticket) -> io::Result<(Reply, Vec<OwnedFd>)> {
        let asked = self.connection(handle.owner).and_then(|connection| {
            let connection = connection.as_type::<UnixStream>()?;
            exchange(&connection, Request::Open { token: handle.token.text() })
        });
        if asked.is_err() {
            self.owners.remove(&handle.owner);
        }
        asked
    }

    fn connection(&mut self, owner: u32) -> io::Result<&Held> {
        use std::collections::hash_map::Entry;
        match self.owners.entry(owner) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(place) => {
                let directory = Directory::open()?.ok_or(io::ErrorKind::NotFound)?;
                let stream = directory.connect(owner)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                stream.set_write_timeout(Some(PATIENCE))?;
                Ok(place.insert(Held::new(stream)?))
            }
        }
    }

    /// Tells the owner that memory is closed.
    fn give_back(&mut self, owner: u32, token: &Token) {
        // Also before hanging up: when this process goes on, the owner knows.
        let told = self.owners.get(&owner).map(|connection| {
            let connection = connection.as_type::<UnixStream>()?;
            exchange(&connection, Request::Close { token: token.text() })
        });
        if let Some(Err(error)) = told {
            log::debug!("process {owner} could not be told that its memory is closed: {error}");
        }
        self.hang_up_if_unused(owner);
    }

    fn hang_up_if_unused(&mut self, owner: u32) {
        if self.open.values().all(|opened| opened.owner != owner) {
            self.owners.remove(&owner);
        }
    }
}

/// Sends a request and receives the answer, with the descriptors that come with it.
fn exchange(stream: &UnixStream, request: Request) -> io::Result<(Reply, Vec<OwnedFd>)> {
    let line = protocol::line(&Message { version: VERSION, request });
    let mut sent = 0;
    while sent < line.len() {
        sent += retry(|| descriptors::send(stream, &line[sent..], &[]))?;
    }
    let (mut answer, mut files) = (Vec::new(), Vec::new());
    while answer.last() != Some(&b'\n') {
        let mut part = [0; 4096];
        match retry(|| descriptors::receive(stream, &mut part, &mut files))? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => answer.extend_from_slice(&part[..count]),
        }
    }
    Ok((serde_json::from_slice(&answer)?, files))
}

fn retry(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
            answer => return answer,
        }
    }
}
