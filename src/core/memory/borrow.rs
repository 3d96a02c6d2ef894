//! Memory of other processes that this one has open (CUDA IPC). The other side is [`super::share`].
//!
//! There is one connection to each owner, kept while any of its memory is open here. If this process dies, the end of the connection tells
//! the owner that all of it is closed. Opened memory is not managed here. Its owner pauses it only while nobody has it open, or together
//! with the processes that have; then it is set aside here, and opened again later at the same addresses.
//!
//! Lock order: a connection, then `Borrowings`. An owner may take long to answer, and driver calls may block, so meanwhile only the
//! connection's lock is held.

use super::lending::Token;
use super::share::Ticket;
use super::{Memory, sightings};
use crate::{contexts, drain};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{io, process, thread};
use vramctl_control::descriptors;
use vramctl_control::discovery::Directory;
use vramctl_control::protocol::{self, Message, Reply, Request, VERSION};
use vramctl_driver::{self as driver, Access, Addresses, CUdevice, CUdeviceptr, Context, Current, Physical, Place, RelaxedCapture};
use vramctl_host::{Held, PerProcess, exit, worker};
use vramctl_model::{self as model, Failure, Kind, ObstacleKind, StatusCode, TransitionRequest, code};

/// How long an owner may take to answer: it first finishes a pause or resume.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long a close waits for the owner's confirmation. An owner that is stopped reads the request when it continues.
const NOTED_WITHIN: Duration = Duration::from_millis(500);
/// The first and the longest delay before a busy owner is asked again.
const ASK_AGAIN: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(100));
/// The same for an owner whose memory is still paused.
const LOOK_AGAIN: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// How long a resume waits for all owners' answers. Memory that is not back by then comes later.
const RETURNS_WITHIN: Duration = Duration::from_secs(5);
/// How often that wait checks whether anybody still waits for the resume.
const NOTICES_WITHIN: Duration = Duration::from_millis(50);

/// The open memory, and the connections to its owners.
#[derive(Default)]
struct Borrowings {
    open: HashMap<Token, Opened>,
    owners: HashMap<u32, Arc<Lease>>,
    /// Counts opens and closes.
    changes: u64,
    /// Counts pauses that have set memory aside. Memory that an owner passed before such a pause may have been released by it since.
    pauses: u64,
    /// The owners that a worker asks for memory that is set aside.
    asked: HashMap<u32, Rounds>,
}

/// How often a worker has asked an owner for all of its memory that is set aside here.
#[derive(Default, Clone, Copy)]
struct Rounds {
    wanted: u64,
    done: u64,
}

static BORROWED: PerProcess<Mutex<Borrowings>> = PerProcess::new(Mutex::default);
/// [`Borrowings::asked`] has changed.
static ASKED: PerProcess<Condvar> = PerProcess::new(Condvar::new);

/// Memory of another process. Dropping it unmaps and releases it.
#[derive(Debug)]
struct Opened {
    lease: Arc<Lease>,
    address: CUdeviceptr,
    /// How many opens have not been closed.
    count: usize,
    /// The value of [`Borrowings::changes`] when that changed last.
    changed: u64,
    place: Place,
    /// The devices with access.
    devices: BTreeSet<CUdevice>,
    /// The contexts in which it was opened.
    contexts: BTreeSet<Context>,
    /// Its tag in the owner. `None` if the owner does not report it.
    tag: Option<String>,
    /// The device that it is on; after a move of the process, that is another GPU. `None` if the driver does not report it.
    device: Option<CUdevice>,
    /// The owner's number of pauses when it passed the memory that is, or last was, here.
    pauses: u64,
    behind: Behind,
}

/// What backs the addresses at which memory was opened.
#[derive(Debug)]
enum Behind {
    /// Never read: dropping it unmaps and releases it.
    Memory(#[expect(dead_code)] Physical),
    /// Nothing: its owner has paused it, or is about to. Until this process is resumed, only memory newer than that pause is accepted.
    Paused { is_due: bool },
    /// Nothing: its owner has ended or freed it while it was paused.
    Gone,
}

impl Opened {
    fn is_paused(&self) -> bool {
        matches!(self.behind, Behind::Paused { .. })
    }

    /// Whether this pause sets it aside.
    fn is_paused_by(&self, pause: &Meant<'_>) -> bool {
        pause.request.partners.contains(&self.lease.owner) && self.is_meant(pause)
    }

    /// Whether a pause that both this process and the owner take part in selects it. If its tag or device is unknown, it may be selected.
    fn is_meant(&self, meant: &Meant<'_>) -> bool {
        let tags = &meant.request.tags;
        (tags.is_empty() || self.tag.as_ref().is_none_or(|own| tags.contains(own)))
            && self.device.is_none_or(|device| !meant.elsewhere.contains(&device))
    }
}

/// The memory that a request selects. The driver is asked before the lock is taken.
struct Meant<'a> {
    request: &'a TransitionRequest,
    /// The devices that it does not select.
    elsewhere: BTreeSet<CUdevice>,
}

impl<'a> Meant<'a> {
    fn by(request: &'a TransitionRequest) -> Self {
        let is_elsewhere = |device: &CUdevice| driver::uuid(*device).is_some_and(|uuid| !request.gpus.contains(&uuid));
        let elsewhere = if request.gpus.is_empty() { BTreeSet::new() } else { driver::devices().filter(is_elsewhere).collect() };
        Self { request, elsewhere }
    }
}

/// What an owner passes for an allocation.
struct WhatIsLent {
    pieces: Vec<(OwnedFd, usize)>,
    tag: Option<String>,
    /// How often it has been paused.
    pauses: u64,
}

/// A connection to an owner, kept as long as memory is open that came over it.
#[derive(Debug)]
struct Lease {
    owner: u32,
    connection: Held,
    state: Mutex<LeaseState>,
}

/// Whether a connection can still be used for requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LeaseState {
    Open,
    /// An answer is outstanding, or nothing is open any more.
    Retired,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

fn borrowed() -> MutexGuard<'static, Borrowings> {
    lock(BORROWED.get())
}

/// `cuIpcOpenMemHandle`, for a handle of the library's: the address of the allocation's first byte. Memory that is open already has
/// the same address.
pub fn open(handle: &Ticket, current: &Current) -> Result<CUdeviceptr, StatusCode> {
    // As the driver answers in the process that made the handle.
    if handle.owner == process::id() && Memory::existing().is_some_and(|memory| memory.has_given(&handle.token)) {
        return Err(code::INVALID_CONTEXT);
    }
    contexts::note(current);
    // From now on, the library sees device resets.
    Memory::get();
    let _relaxed = RelaxedCapture::enter();
    patiently(|| try_open(handle, current))
}

/// Retries what an owner has refused for now.
fn patiently<R>(mut attempt: impl FnMut() -> Result<R, Refused>) -> Result<R, StatusCode> {
    let deadline = Instant::now() + PATIENCE;
    let mut pause = ASK_AGAIN.0;
    loop {
        match attempt() {
            Err(Refused::Finally(code)) => return Err(code),
            Err(Refused::ForNow) if Instant::now() >= deadline => return Err(code::OPERATING_SYSTEM),
            Err(Refused::ForNow) => {
                thread::sleep(pause);
                pause = (2 * pause).min(ASK_AGAIN.1);
            }
            Ok(done) => return Ok(done),
        }
    }
}

/// Gives up the memory that the request's partners pause, and keeps the addresses. No work uses it any more.
pub(crate) fn set_aside(request: &TransitionRequest) {
    let Some(existing) = BORROWED.existing() else { return };
    let meant = Meant::by(request);
    let memories: Vec<_> = {
        let mut borrowed = lock(existing);
        borrowed.pauses += 1;
        let due = || Behind::Paused { is_due: request.is_borrower };
        let there = borrowed.open.values_mut().filter(|opened| !matches!(opened.behind, Behind::Gone) && opened.is_paused_by(&meant));
        there.map(|opened| std::mem::replace(&mut opened.behind, due())).collect()
    };
    // Unmaps and releases them.
    drop(memories);
}

/// Memory of other processes that is open here, by owner and GPU.
pub(crate) fn status() -> Vec<model::Borrowed> {
    listed(|_| true)
}

/// Memory that the request selects and that is set aside.
pub(crate) fn missing(request: &TransitionRequest) -> Vec<model::Borrowed> {
    let meant = Meant::by(request);
    listed(|opened| opened.is_paused() && opened.is_meant(&meant))
}

/// Memory that is open and `meant`, by owner and GPU.
fn listed(meant: impl Fn(&Opened) -> bool) -> Vec<model::Borrowed> {
    let Some(existing) = BORROWED.existing() else { return Vec::new() };
    let mut sums = BTreeMap::<_, (u64, u64)>::new();
    for opened in lock(existing).open.values().filter(|opened| !matches!(opened.behind, Behind::Gone) && meant(opened)) {
        let bytes = opened.place.span().bytes as u64;
        let (all, paused) = sums.entry((opened.lease.owner, opened.device)).or_default();
        *all += bytes;
        *paused += if opened.is_paused() { bytes } else { 0 };
    }
    let one = |((owner, device), (bytes, paused_bytes)): (_, (u64, u64))| {
        let gpu = Option::and_then(device, driver::uuid);
        model::Borrowed { owner, gpu, bytes, paused_bytes }
    };
    sums.into_iter().map(one).collect()
}

/// Whether anything is set aside.
pub(crate) fn any_set_aside() -> bool {
    BORROWED.existing().is_some_and(|existing| lock(existing).open.values().any(Opened::is_paused))
}

/// The contexts in which memory is open.
pub(crate) fn contexts() -> BTreeSet<Context> {
    BORROWED
        .existing()
        .map(|existing| lock(existing).open.values().flat_map(|opened| opened.contexts.clone()).collect())
        .unwrap_or_default()
}

/// Opens memory again that was set aside, if its owners have resumed it. Waits a limited time for their answers, and only while `wanted`
/// says so.
pub(crate) fn bring_back(wanted: &mut dyn FnMut() -> bool) {
    let Some(existing) = BORROWED.existing() else { return };
    let deadline = Instant::now() + RETURNS_WITHIN;
    let mut borrowed = lock(existing);
    borrowed.open.values_mut().filter(|opened| opened.is_paused()).for_each(|opened| opened.behind = Behind::Paused { is_due: true });
    let rounds = borrowed.ask(|rounds| rounds.wanted += 1);
    ASKED.get().notify_all();
    while rounds.iter().any(|(owner, round)| borrowed.asked.get(owner).is_some_and(|now| now.done < round.wanted)) {
        if Instant::now() >= deadline || !wanted() {
            break;
        }
        borrowed = ASKED.get().wait_timeout(borrowed, NOTICES_WITHIN).unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// Starts asking for memory that is set aside, so that it comes back once its owners have resumed it, unless the program stays held anyway.
pub(crate) fn keep_asking() {
    if let Some(existing) = BORROWED.existing() {
        let mut borrowed = lock(existing);
        if is_worth_asking() {
            borrowed.ask(|_| ());
        }
    }
}

/// Whether the program can continue once nothing is set aside any more.
fn is_worth_asking() -> bool {
    !exit::is_ending() && !Memory::get().has_paused()
}

/// Asks an owner repeatedly for its memory that is set aside, until none is.
fn ask_owner(owner: u32) {
    let mut pause = LOOK_AGAIN.0;
    let mut borrowed = borrowed();
    while let Some(&Rounds { wanted, .. }) = borrowed.asked.get(&owner) {
        let aside: Vec<_> = borrowed.aside().filter(|(_, its)| *its == owner).map(|(token, _)| token).collect();
        if aside.is_empty() || !is_worth_asking() {
            break;
        }
        drop(borrowed);
        // While the process is suspended, it cannot open anything.
        if !exit::is_resting() {
            for token in &aside {
                bring_one_back(token, owner);
            }
            Memory::get().let_go();
        }
        borrowed = self::borrowed();
        let Some(rounds) = borrowed.asked.get_mut(&owner) else { break };
        rounds.done = wanted;
        ASKED.get().notify_all();
        let is_rest = |borrowed: &mut Borrowings| borrowed.asked.get(&owner).is_some_and(|rounds| rounds.wanted == wanted);
        borrowed = ASKED.get().wait_timeout_while(borrowed, pause, is_rest).unwrap_or_else(PoisonError::into_inner).0;
        pause = (2 * pause).min(LOOK_AGAIN.1);
    }
    borrowed.asked.remove(&owner);
    ASKED.get().notify_all();
}

fn bring_one_back(token: &Token, owner: u32) {
    let _relaxed = RelaxedCapture::enter();
    match patiently(|| try_bring_back(token, owner)) {
        Ok(()) => (),
        Err(code::INVALID_HANDLE) => {
            log::error!("process {owner} has ended or freed memory, while it was paused, that this process has open; it is lost");
            if let Some(opened) = borrowed().open.get_mut(token) {
                opened.behind = Behind::Gone;
            }
        }
        Err(code) => log::debug!("memory of process {owner} that this process has open is not back (code {code})"),
    }
}

fn try_bring_back(token: &Token, owner: u32) -> Result<(), Refused> {
    let lease = borrowed().lease(owner).map_err(|error| Refused::because(owner, &error))?;
    let mut state = lock(&lease.state);
    if *state == LeaseState::Retired {
        return Err(Refused::ForNow);
    }
    let pauses = borrowed().pauses;
    let WhatIsLent { pieces, pauses: of_piece, .. } = lease.ask(&mut state, token)?;
    // Noted as an obstacle until it is recorded as open: a suspend sees one or the other.
    sightings::making(ObstacleKind::Shared, || {
        let mut memory = Physical::import(pieces.iter().map(|(file, bytes)| (file.as_fd(), *bytes)))?;
        // Without the lock, which the program's calls need: during a suspend, this thread may block for long. The addresses stay reserved
        // even if the program closes the memory meanwhile.
        let found = borrowed().open.get(token).filter(|opened| opened.is_paused()).map(|opened| {
            let is_new = opened.pauses != of_piece || matches!(opened.behind, Behind::Paused { is_due: true });
            (opened.place.clone(), opened.devices.clone(), is_new)
        });
        if let Some((place, devices, true)) = &found {
            memory.map(place)?;
            driver::open([(place.span(), devices.iter().map(|device| Access::of_device(*device)).collect())])?;
        }
        let mut borrowed = borrowed();
        if borrowed.pauses != pauses {
            return Err(Refused::ForNow);
        }
        let now = borrowed.open.get_mut(token).filter(|opened| opened.is_paused());
        let both = now.zip(found.as_ref()).filter(|(opened, (place, ..))| opened.place.span() == place.span());
        let Some((opened, (_, devices, is_new))) = both else {
            // Closed meanwhile.
            drop(borrowed);
            drop(memory);
            lease.tell_closed(&mut state, token);
            return Ok(());
        };
        if opened.devices != *devices {
            // Opened for another device meanwhile.
            return Err(Refused::ForNow);
        }
        if *is_new {
            (opened.behind, opened.pauses) = (Behind::Memory(memory), of_piece);
        }
        let before = std::mem::replace(&mut opened.lease, Arc::clone(&lease));
        drop(borrowed);
        // Another connection, which may have nothing left.
        drop(before);
        Ok(())
    })
}

/// Why memory could not be opened.
enum Refused {
    /// The program gets this code.
    Finally(StatusCode),
    /// The owner has too many connections, or has disconnected; another process may be listening.
    ForNow,
}

impl From<Failure> for Refused {
    fn from(failure: Failure) -> Self {
        Self::Finally(failure.code)
    }
}

impl Refused {
    fn because(owner: u32, error: &io::Error) -> Self {
        use io::ErrorKind as Why;
        log::debug!("process {owner} does not share its memory: {error}");
        match error.kind() {
            // `WouldBlock` comes from `connect`: the queue is full.
            Why::WouldBlock | Why::UnexpectedEof | Why::BrokenPipe | Why::ConnectionReset | Why::NotConnected => Self::ForNow,
            // There is no such process any more, or another one has its id.
            Why::NotFound | Why::ConnectionRefused | Why::PermissionDenied => Self::Finally(code::INVALID_HANDLE),
            // It does not answer in time, or this process is short of descriptors; that does not mean the memory is lost.
            _ => Self::Finally(code::OPERATING_SYSTEM),
        }
    }
}

fn try_open(handle: &Ticket, current: &Current) -> Result<CUdeviceptr, Refused> {
    let lease = {
        let mut borrowed = borrowed();
        if let Some(address) = borrowed.open_again(&handle.token, current)? {
            return Ok(address);
        }
        borrowed.lease(handle.owner).map_err(|error| Refused::because(handle.owner, &error))?
    };
    let mut state = lock(&lease.state);
    // Another thread may have opened it meanwhile, or have lost the connection.
    if let Some(address) = borrowed().open_again(&handle.token, current)? {
        return Ok(address);
    }
    if *state == LeaseState::Retired {
        return Err(Refused::ForNow);
    }
    let pauses = borrowed().pauses;
    let lent = lease.ask(&mut state, &handle.token).inspect_err(|refused| {
        if matches!(refused, Refused::Finally(code::ILLEGAL_STATE)) {
            log::warn!("the memory that process {} shares is paused; resume it before another process opens it", handle.owner);
        }
    })?;
    match Opened::map(&lease, lent, current) {
        Ok(opened) => {
            let address = opened.address;
            let mut borrowed = borrowed();
            if borrowed.pauses == pauses {
                borrowed.insert(handle.token, opened);
                return Ok(address);
            }
            drop(borrowed);
            drop(opened);
            lease.give_back(&mut state, &handle.token);
            Err(Refused::ForNow)
        }
        Err(failure) => {
            log::debug!("cannot open memory of process {}: {failure}", handle.owner);
            lease.give_back(&mut state, &handle.token);
            Err(failure.into())
        }
    }
}

/// How many allocations of other processes are open here and would not be set aside by this pause.
pub fn count_after(pause: &TransitionRequest) -> usize {
    let meant = Meant::by(pause);
    let is_there = |opened: &&Opened| matches!(opened.behind, Behind::Memory(_)) && !opened.is_paused_by(&meant);
    BORROWED.existing().map_or(0, |borrowed| lock(borrowed).open.values().filter(is_there).count())
}

/// `cuIpcCloseMemHandle`; `None` if no opened memory begins at the address. The last close waits for the work of the contexts that have
/// opened it, as a free would.
pub fn close(address: CUdeviceptr) -> Option<Result<(), StatusCode>> {
    let existing = BORROWED.existing()?;
    let _relaxed = RelaxedCapture::enter();
    let mut waited = None;
    loop {
        let (token, lease, contexts, changed) = {
            let mut borrowed = lock(existing);
            let now = borrowed.changes + 1;
            let (token, opened) = borrowed.open.iter_mut().find(|(_, opened)| opened.address == address)?;
            if opened.count > 1 {
                opened.count -= 1;
                opened.changed = now;
                borrowed.changes = now;
                return Some(Ok(()));
            }
            (*token, Arc::clone(&opened.lease), opened.contexts.clone(), opened.changed)
        };
        // A thread that closed it before, or opened it meanwhile, may have left work that was not waited for.
        if waited != Some(changed) {
            if let Err(failure) = drain::wait(contexts) {
                return Some(Err(failure.code));
            }
            waited = Some(changed);
        }
        if lease.end(&token, |opened| opened.changed == changed) {
            return Some(Ok(()));
        }
    }
}

/// Closes memory that was opened in contexts that are destroyed or about to be, as CUDA does.
///
/// Never waits for a thread that is opening memory, which could deadlock: that thread may wait for the other process's pause while the
/// caller is part of this process's pause, and the other process may be doing the same. Memory that is being opened now is closed the next
/// time.
pub(super) fn forget_gone(doomed: Option<Context>) {
    let Some(Ok(mut borrowed)) = BORROWED.existing().map(Mutex::try_lock) else { return };
    for opened in borrowed.open.values_mut() {
        opened.contexts.retain(|context| Some(*context) != doomed && !context.is_gone());
    }
    let unused = |opened: &Opened| opened.contexts.is_empty();
    let closed: Vec<_> =
        borrowed.open.iter().filter(|(_, opened)| unused(opened)).map(|(token, opened)| (*token, Arc::clone(&opened.lease))).collect();
    drop(borrowed);
    for (token, lease) in closed {
        lease.end(&token, unused);
    }
}

impl Opened {
    fn map(lease: &Arc<Lease>, WhatIsLent { pieces, tag, pauses }: WhatIsLent, current: &Current) -> Result<Self, Failure> {
        let mut memory = Physical::import(pieces.iter().map(|(file, bytes)| (file.as_fd(), *bytes)))?;
        let addresses = Arc::new(Addresses::reserve(pieces.iter().map(|(_, bytes)| bytes).sum())?);
        let place = Place::of(&addresses);
        memory.map(&place)?;
        let own = memory.device()?;
        let mut opened = Self {
            lease: Arc::clone(lease),
            address: addresses.base(),
            count: 1,
            changed: 0,
            place,
            devices: BTreeSet::new(),
            contexts: BTreeSet::new(),
            tag,
            device: own,
            pauses,
            behind: Behind::Memory(memory),
        };
        opened.open_to(current)?;
        // Copies between devices may run on the memory's own device.
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
            if matches!(self.behind, Behind::Memory(_)) {
                driver::open([(self.place.span(), [Access::of_device(device)].into())])?;
            }
            self.devices.insert(device);
        }
        Ok(())
    }
}

impl Borrowings {
    /// Memory that is set aside, with its owner.
    fn aside(&self) -> impl Iterator<Item = (Token, u32)> {
        self.open.iter().filter(|(_, opened)| opened.is_paused()).map(|(token, opened)| (*token, opened.lease.owner))
    }

    /// Has a worker ask each owner of memory that is set aside. Returns the owners and their rounds.
    fn ask(&mut self, more: impl Fn(&mut Rounds)) -> BTreeMap<u32, Rounds> {
        let owners: BTreeSet<_> = self.aside().map(|(_, owner)| owner).collect();
        let mut asked = BTreeMap::new();
        for owner in owners {
            let known = self.asked.get(&owner).copied();
            let mut rounds = known.unwrap_or_default();
            more(&mut rounds);
            if known.is_none()
                && let Err(error) = worker::spawn("vramctl-borrow", move || ask_owner(owner))
            {
                log::warn!("memory of process {owner} that this process has open stays paused: could not start a thread: {error}");
                continue;
            }
            self.asked.insert(owner, rounds);
            asked.insert(owner, rounds);
        }
        asked
    }

    /// Opens memory that is open already.
    fn open_again(&mut self, token: &Token, current: &Current) -> Result<Option<CUdeviceptr>, Failure> {
        let Some(opened) = self.open.get_mut(token) else { return Ok(None) };
        opened.open_to(current)?;
        opened.count += 1;
        self.changes += 1;
        opened.changed = self.changes;
        Ok(Some(opened.address))
    }

    fn insert(&mut self, token: Token, opened: Opened) {
        self.changes += 1;
        self.open.insert(token, Opened { changed: self.changes, ..opened });
    }

    /// The connection for requests to an owner.
    fn lease(&mut self, owner: u32) -> io::Result<Arc<Lease>> {
        use std::collections::hash_map::Entry;
        match self.owners.entry(owner) {
            Entry::Occupied(known) => Ok(Arc::clone(known.get())),
            Entry::Vacant(place) => {
                let directory = Directory::open()?.ok_or(io::ErrorKind::NotFound)?;
                let stream = directory.connect(owner)?;
                let connection = Held::new(stream)?;
                Ok(Arc::clone(place.insert(Arc::new(Lease { owner, connection, state: Mutex::new(LeaseState::Open) }))))
            }
        }
    }
}

/// Called with the connection locked, so that an open and a close of the same memory do not overlap.
impl Lease {
    /// Gets the memory behind a handle from its owner.
    fn ask(self: &Arc<Self>, state: &mut LeaseState, token: &Token) -> Result<WhatIsLent, Refused> {
        let (reply, files) = self.exchange(Request::Open { token: token.text() }, PATIENCE).map_err(|error| {
            self.retire(state);
            if error.kind() == io::ErrorKind::TimedOut {
                // The owner may still lend it.
                self.say(Request::Close { token: token.text() });
            }
            Refused::because(self.owner, &error)
        })?;
        match reply {
            Reply::Opened { pieces, tag, pauses } if pieces.len() == files.len() => {
                let pieces = files.into_iter().zip(pieces).map(|(file, bytes)| (file, bytes as usize)).collect();
                Ok(WhatIsLent { pieces, tag, pauses })
            }
            Reply::Error(refusal) => {
                log::debug!("process {} does not share its memory: {}", self.owner, refusal.message);
                self.retire_if_unused(state);
                match refusal.cuda_code {
                    Some(code) => Err(Refused::Finally(code)),
                    None if refusal.code == Kind::Busy => {
                        // It has hung up.
                        self.retire(state);
                        Err(Refused::ForNow)
                    }
                    None => Err(Refused::Finally(code::UNKNOWN)),
                }
            }
            _ => {
                // Not all descriptors fit into this process.
                log::debug!("process {} shares its memory, but not all of it arrived", self.owner);
                drop(files);
                self.give_back(state, token);
                Err(Refused::Finally(code::UNKNOWN))
            }
        }
    }

    /// Closes memory if it is still open and `meant`. Returns whether it was. Does not wait for others who use the connection.
    fn end(self: &Arc<Self>, token: &Token, meant: impl Fn(&Opened) -> bool) -> bool {
        let opened = {
            let mut borrowed = borrowed();
            let is_meant = |opened: &Opened| Arc::ptr_eq(&opened.lease, self) && meant(opened);
            if !borrowed.open.get(token).is_some_and(is_meant) {
                return false;
            }
            borrowed.open.remove(token)
        };
        // Before the owner may pause it.
        drop(opened);
        if let Ok(mut state) = self.state.try_lock() {
            self.tell_closed(&mut state, token);
            return true;
        }
        // The thread that uses the connection may be waiting for the owner, which may be paused or stopped for long.
        let (lease, its) = (Arc::clone(self), *token);
        if let Err(error) = worker::spawn("vramctl-borrow", move || lease.tell_closed(&mut lock(&lease.state), &its)) {
            log::debug!("no thread to tell process {} that its memory is closed: {error}", self.owner);
            self.tell_closed(&mut lock(&self.state), token);
        }
        true
    }

    /// Tells the owner that memory is closed, unless it has been opened again since.
    fn tell_closed(self: &Arc<Self>, state: &mut LeaseState, token: &Token) {
        let is_open = borrowed().open.get(token).is_some_and(|opened| Arc::ptr_eq(&opened.lease, self));
        if !is_open {
            self.give_back(state, token);
        }
    }

    /// Tells the owner that memory is closed.
    fn give_back(self: &Arc<Self>, state: &mut LeaseState, token: &Token) {
        let request = Request::Close { token: token.text() };
        // Waits for the answer, even before disconnecting: when this process continues, the owner knows, unless it is stopped.
        if *state == LeaseState::Retired {
            self.say(request);
        } else if let Err(error) = self.exchange(request, NOTED_WITHIN) {
            log::debug!("process {} could not be told that its memory is closed: {error}", self.owner);
            self.retire(state);
        }
        self.retire_if_unused(state);
    }

    /// Sends no more requests over this connection. It stays open while memory is open that came over it.
    fn retire(self: &Arc<Self>, state: &mut LeaseState) {
        *state = LeaseState::Retired;
        let mut borrowed = borrowed();
        if borrowed.owners.get(&self.owner).is_some_and(|current| Arc::ptr_eq(current, self)) {
            borrowed.owners.remove(&self.owner);
        }
    }

    fn retire_if_unused(self: &Arc<Self>, state: &mut LeaseState) {
        let used = borrowed().open.values().any(|opened| Arc::ptr_eq(&opened.lease, self));
        if !used {
            self.retire(state);
        }
    }

    /// Sends a request whose answer does not matter.
    fn say(&self, request: Request) {
        let said = self.connection.as_type::<UnixStream>().and_then(|stream| {
            stream.set_write_timeout(Some(NOTED_WITHIN))?;
            send(&stream, &line_of(request))
        });
        if let Err(error) = said {
            log::debug!("process {}: {error}", self.owner);
        }
    }

    /// Sends a request and receives the answer, with the descriptors that come with it. `TimedOut` if there is none in time.
    fn exchange(&self, request: Request, within: Duration) -> io::Result<(Reply, Vec<OwnedFd>)> {
        let stream = self.connection.as_type::<UnixStream>()?;
        stream.set_read_timeout(Some(within))?;
        stream.set_write_timeout(Some(within))?;
        let in_time = |error: io::Error| if error.kind() == io::ErrorKind::WouldBlock { io::ErrorKind::TimedOut.into() } else { error };
        match send(&stream, &line_of(request)) {
            // An owner that is busy says so without reading the request, and disconnects.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => receive(&stream).map_err(|_| error),
            Err(error) => Err(in_time(error)),
            Ok(()) => receive(&stream).map_err(in_time),
        }
    }
}

fn line_of(request: Request) -> Vec<u8> {
    protocol::line(&Message { version: VERSION, request })
}

fn send(stream: &UnixStream, line: &[u8]) -> io::Result<()> {
    let mut sent = 0;
    while sent < line.len() {
        sent += retry(|| descriptors::send(stream, &line[sent..], &[]))?;
    }
    Ok(())
}

fn receive(stream: &UnixStream) -> io::Result<(Reply, Vec<OwnedFd>)> {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory that is set aside and whose handle is stale is given up for good.
    #[test]
    fn only_a_missing_owner_makes_a_handle_stale() {
        let code = |error: io::Error| match Refused::because(1, &error) {
            Refused::Finally(code) => Some(code),
            Refused::ForNow => None,
        };
        for number in [libc::ENOENT, libc::ECONNREFUSED] {
            assert_eq!(code(io::Error::from_raw_os_error(number)), Some(code::INVALID_HANDLE));
        }
        for number in [libc::EMFILE, libc::ENFILE, libc::ENOMEM] {
            assert_eq!(code(io::Error::from_raw_os_error(number)), Some(code::OPERATING_SYSTEM));
        }
        assert_eq!(code(io::ErrorKind::UnexpectedEof.into()), None);
    }
}
