//! Memory of other processes that this one has open (CUDA IPC) or has imported by descriptor ([`super::imports`]). The other side is
//! [`super::share`].
//!
//! There is one connection to each owner, kept while any of its memory is open here. If this process dies, the end of the connection shows
//! the owner that all of it is closed. Opened memory is not managed here. Its owner pauses it only while nobody has it open, or together
//! with the processes that have ([`super::aside`]).
//!
//! Lock order: a connection, then `BorrowedMemory`. An owner may take long to answer, and driver calls may block, so meanwhile only the
//! connection's lock is held.

use super::lender::{Answer, Lender, Refused, patiently};
use super::share::SharedHandle;
use crate::memory::registry::lending::Token;
use crate::memory::{Allocation, Memory};
use crate::{contexts, drain};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::{io, process};
use vramctl_control::door::Door;
use vramctl_driver::{self as driver, Access, Addresses, CUdevice, CUdeviceptr, Context, Current, Manner, Physical, Place, RelaxedCapture};
use vramctl_host::{Held, PerProcess, Unpoison, worker};
use vramctl_model::{self as model, Failure, Kind, Selection, Span, StatusCode, code};

/// The open memory, and the connections to its owners.
#[derive(Default)]
pub(super) struct BorrowedMemory {
    pub(super) open: HashMap<Token, Opened>,
    owners: HashMap<u32, Arc<Lease>>,
    /// The second sockets of owners, as their handles name them.
    doors: HashMap<u32, Door>,
    /// Counts opens and closes.
    changes: u64,
    /// Counts pauses that have set memory aside. Memory that an owner passed before such a pause may have been released by it since.
    pub(super) pauses: u64,
    /// The owners that a worker asks for memory that is set aside.
    pub(super) asked: HashMap<u32, Rounds>,
}

/// How often a worker has asked an owner for all of its memory that is set aside here.
#[derive(Default, Clone, Copy)]
pub(super) struct Rounds {
    pub(super) wanted: u64,
    pub(super) done: u64,
}

pub(super) static BORROWED: PerProcess<Mutex<BorrowedMemory>> = PerProcess::new(Mutex::default);

/// Memory of another process, opened or imported. Dropping it unmaps and releases it.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) lease: Arc<Lease>,
    pub(super) site: Site,
    /// Its tag in the owner. `None` if the owner does not report it.
    pub(super) tag: Option<String>,
    /// The device that it is on; after a move of the process, that is another GPU. `None` if the driver does not report it.
    pub(super) device: Option<CUdevice>,
    /// The owner's number of pauses when it passed the memory that is, or last was, here.
    pub(super) pauses: u64,
    pub(super) behind: Behind,
}

/// Where the program has it.
#[derive(Debug)]
pub(super) enum Site {
    /// At addresses of the library's, which `cuIpcOpenMemHandle` has returned.
    Opened(OpenSite),
    /// Behind a handle of the library's, which `cuMemImportFromShareableHandle` has returned, mapped by the program.
    Imported(Arc<Allocation>),
}

#[derive(Debug)]
pub(super) struct OpenSite {
    address: CUdeviceptr,
    /// How many opens have not been closed.
    count: usize,
    /// The value of [`BorrowedMemory::changes`] when that changed last.
    changed: u64,
    pub(super) place: Place,
    /// The devices with access.
    pub(super) devices: BTreeSet<CUdevice>,
    /// The contexts in which it was opened.
    contexts: BTreeSet<Context>,
    /// Never read: dropping it unmaps and releases it. `None` while nothing is there.
    pub(super) memory: Option<Physical>,
}

/// What backs the addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Behind {
    /// The owner's memory.
    Memory,
    /// Nothing: its owner has paused it, or is about to. Until this process is resumed, only memory newer than that pause is accepted.
    Paused { is_due: bool },
    /// Nothing: its owner has ended or freed it while it was paused. `is_reported`: a resume has said so.
    Gone { is_reported: bool },
}

impl Opened {
    /// Of memory that was opened by an IPC handle.
    fn open_site(&self) -> Option<&OpenSite> {
        if let Site::Opened(site) = &self.site { Some(site) } else { None }
    }

    fn open_site_mut(&mut self) -> Option<&mut OpenSite> {
        if let Site::Opened(site) = &mut self.site { Some(site) } else { None }
    }

    fn bytes(&self) -> u64 {
        match &self.site {
            Site::Opened(site) => site.place.span().bytes as u64,
            Site::Imported(allocation) => allocation.bytes() as u64,
        }
    }

    /// The contexts whose work may use it.
    fn contexts(&self) -> BTreeSet<Context> {
        match &self.site {
            Site::Opened(site) => site.contexts.clone(),
            Site::Imported(allocation) => contexts::of_devices(&allocation.guests().into_iter().chain(self.device).collect()),
        }
    }

    /// Takes the memory away, to be dropped without a lock.
    pub(super) fn give_up(&mut self, behind: Behind) -> Option<Physical> {
        self.behind = behind;
        match &mut self.site {
            Site::Opened(site) => site.memory.take(),
            Site::Imported(allocation) => allocation.give_up(),
        }
    }

    /// Whether memory is newer than what was set aside here. `pauses`: how often its owner has paused it.
    pub(super) fn is_newer(&self, pauses: u64) -> bool {
        self.pauses != pauses || self.behind == Behind::Paused { is_due: true }
    }

    /// Whether it is open at these addresses.
    pub(super) fn is_at(&self, span: Span) -> bool {
        self.open_site().is_some_and(|site| site.place.span() == span)
    }

    pub(super) fn is_gone(&self) -> bool {
        matches!(self.behind, Behind::Gone { .. })
    }

    pub(super) fn is_paused(&self) -> bool {
        matches!(self.behind, Behind::Paused { .. })
    }

    /// Whether a pause of this memory, in which these partners take part, sets it aside.
    pub(super) fn is_paused_by(&self, meant: &Meant<'_>, partners: &[u32]) -> bool {
        partners.contains(&self.lease.lender.pid) && self.is_meant(meant)
    }

    fn is_on_host(&self) -> bool {
        matches!(&self.site, Site::Imported(allocation) if allocation.is_on_host())
    }

    /// Whether a pause that both this process and the owner take part in selects it. If its tag or device is unknown, it may be selected.
    pub(super) fn is_meant(&self, meant: &Meant<'_>) -> bool {
        self.tag.as_ref().is_none_or(|own| meant.selection.selects(own))
            && (!self.is_on_host() || meant.selection.is_everything())
            && self.device.is_none_or(|device| !meant.elsewhere.contains(&device))
    }
}

/// Selected memory. The driver is asked before the lock is taken.
pub(super) struct Meant<'a> {
    selection: &'a Selection,
    /// The devices that it does not select.
    elsewhere: BTreeSet<CUdevice>,
}

impl<'a> Meant<'a> {
    pub(super) fn by(selection: &'a Selection) -> Self {
        let is_elsewhere = |device: &CUdevice| driver::uuid(*device).is_some_and(|uuid| !selection.gpus.contains(&uuid));
        let elsewhere = if selection.gpus.is_empty() { BTreeSet::new() } else { driver::devices().filter(is_elsewhere).collect() };
        Self { selection, elsewhere }
    }
}

/// An allocation as its owner has passed it.
pub(super) struct Received {
    pub(super) pieces: Vec<(Held, usize)>,
    pub(super) tag: Option<String>,
    /// How often it has been paused.
    pub(super) pauses: u64,
}

impl Received {
    fn new(files: Vec<Held>, pieces: Vec<u64>, tag: Option<String>, pauses: u64) -> Self {
        let pieces = files.into_iter().zip(pieces).map(|(file, bytes)| (file, bytes as usize)).collect();
        Self { pieces, tag, pauses }
    }
}

/// A process's answer to the question whether it has exported a descriptor.
pub(super) enum Claimed {
    Yes(Token, Received),
    No,
    /// It is being paused or resumed, or takes no more connections.
    Busy,
    /// None in time.
    Silent,
}

/// A connection to an owner, kept as long as memory that was passed over it is open.
#[derive(Debug)]
pub(super) struct Lease {
    pub(super) lender: Lender,
    pub(super) state: Mutex<LeaseState>,
}

/// Whether a connection can still be used for requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LeaseState {
    Open,
    /// An answer is outstanding, or nothing is open any more.
    Retired,
}

pub(super) fn borrowed() -> MutexGuard<'static, BorrowedMemory> {
    BORROWED.get().lock().unpoisoned()
}

/// `cuIpcOpenMemHandle`, for a handle of the library's: the address of the allocation's first byte. Memory that is open already has
/// the same address.
pub fn open(handle: &SharedHandle, current: &Current) -> Result<CUdeviceptr, StatusCode> {
    // As the driver answers in the process that made the handle.
    if handle.owner == process::id() && Memory::existing().is_some_and(|memory| memory.registry.with_token(&handle.token).is_some()) {
        return Err(code::INVALID_CONTEXT);
    }
    contexts::note(current);
    // From now on, the library sees device resets.
    Memory::get();
    let _relaxed = RelaxedCapture::enter();
    patiently(&mut || true, || try_open(handle, current)).map_err(|code| {
        if is_of_open(code) {
            return code;
        }
        log::warn!("the memory that process {} shares cannot be mapped here (CUDA error {code})", handle.owner);
        code::MAP_FAILED
    })
}

/// Whether the driver's own `cuIpcOpenMemHandle` may answer this, or the answer is this library's own, for paused memory and an owner that
/// does not answer. Programs are prepared for no others.
fn is_of_open(code: StatusCode) -> bool {
    let is_documented = matches!(
        code,
        code::INVALID_VALUE
            | code::OUT_OF_MEMORY
            | code::NOT_INITIALIZED
            | code::DEINITIALIZED
            | code::INVALID_CONTEXT
            | code::MAP_FAILED
            | code::INVALID_HANDLE
            | code::TOO_MANY_PEERS
    );
    let is_ours = matches!(code, code::ILLEGAL_STATE | code::OPERATING_SYSTEM);
    is_documented || is_ours || Failure { call: "cuIpcOpenMemHandle", code }.is_of_earlier_work()
}

fn try_open(handle: &SharedHandle, current: &Current) -> Result<CUdeviceptr, Refused> {
    let lease = {
        let mut borrowed = borrowed();
        if let Some(address) = borrowed.open_again(&handle.token, current)? {
            return Ok(address);
        }
        borrowed.doors.extend(handle.door.map(|door| (handle.owner, door)));
        borrowed.lease(handle.owner).map_err(|error| Refused::because(handle.owner, &error))?
    };
    let mut state = lease.state.lock().unpoisoned();
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
    // What a driver refuses once, it may grant a moment later.
    let map = || Opened::map(&lease, &lent, current);
    match map().or_else(|failure| if failure.is_refusal() { map() } else { Err(failure) }) {
        Ok(opened) => {
            let address = opened.open_site().map_or(0, |site| site.address);
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

/// `cuIpcCloseMemHandle`; `None` if no opened memory begins at the address. The last close waits for the work of the contexts that have
/// opened it, as a free would.
pub fn close(address: CUdeviceptr) -> Option<Result<(), StatusCode>> {
    let existing = BORROWED.existing()?;
    let _relaxed = RelaxedCapture::enter();
    let mut waited = None;
    loop {
        let (token, lease, contexts, changed) = {
            let mut borrowed = existing.lock().unpoisoned();
            let now = borrowed.changes + 1;
            let (token, opened) =
                borrowed.open.iter_mut().find(|(_, opened)| opened.open_site().is_some_and(|site| site.address == address))?;
            let lease = Arc::clone(&opened.lease);
            let site = opened.open_site_mut()?;
            if site.count > 1 {
                site.count -= 1;
                site.changed = now;
                borrowed.changes = now;
                return Some(Ok(()));
            }
            (*token, lease, site.contexts.clone(), site.changed)
        };
        // A thread that closed it before, or opened it meanwhile, may have left work that was not waited for.
        if waited != Some(changed) {
            if let Err(failure) = drain::wait(contexts, Manner::AsFree) {
                return Some(Err(failure.code));
            }
            waited = Some(changed);
        }
        if lease.end(&token, |opened| opened.open_site().is_some_and(|site| site.changed == changed)) {
            return Some(Ok(()));
        }
    }
}

/// The program has released what it had imported.
pub(crate) fn released(token: &Token) {
    let lease = borrowed().open.get(token).map(|opened| Arc::clone(&opened.lease));
    if let Some(lease) = lease {
        lease.end(token, |opened| matches!(opened.site, Site::Imported(_)));
    }
}

/// Closes memory that was opened in contexts that are destroyed, as CUDA does.
///
/// Never waits for a thread that is opening memory, which could deadlock: that thread may wait for the other process's pause while the
/// caller is part of this process's pause, and the other process may be doing the same. Memory that is being opened now is closed the next
/// time.
pub(crate) fn forget_gone() {
    let Some(Ok(mut borrowed)) = BORROWED.existing().map(Mutex::try_lock) else { return };
    for site in borrowed.open.values_mut().filter_map(Opened::open_site_mut) {
        site.contexts.retain(|context| !context.is_gone());
    }
    let unused = |opened: &Opened| opened.open_site().is_some_and(|site| site.contexts.is_empty());
    let closed: Vec<_> =
        borrowed.open.iter().filter(|(_, opened)| unused(opened)).map(|(token, opened)| (*token, Arc::clone(&opened.lease))).collect();
    drop(borrowed);
    for (token, lease) in closed {
        lease.end(&token, unused);
    }
}

/// Memory of other processes that is open here, by owner and GPU.
pub(crate) fn status() -> Vec<model::Borrowed> {
    listed(|opened| !opened.is_gone())
}

/// Memory that is open and `meant`, by owner and GPU.
pub(super) fn listed(meant: impl Fn(&Opened) -> bool) -> Vec<model::Borrowed> {
    BORROWED.existing().map_or_else(Vec::new, |existing| existing.lock().unpoisoned().listed(meant))
}

impl BorrowedMemory {
    /// The same.
    pub(super) fn listed(&self, meant: impl Fn(&Opened) -> bool) -> Vec<model::Borrowed> {
        let mut sums = BTreeMap::<_, (u64, u64)>::new();
        for opened in self.open.values().filter(|opened| meant(opened)) {
            let bytes = opened.bytes();
            let (all, paused) = sums.entry((opened.lease.lender.pid, opened.device.filter(|_| !opened.is_on_host()))).or_default();
            *all += bytes;
            *paused += if opened.is_paused() { bytes } else { 0 };
        }
        let one = |((owner, device), (bytes, paused_bytes)): (_, (u64, u64))| {
            let gpu = Option::and_then(device, driver::uuid);
            model::Borrowed { owner, gpu, bytes, paused_bytes }
        };
        sums.into_iter().map(one).collect()
    }
}

/// The contexts in which memory is open.
pub(crate) fn contexts() -> BTreeSet<Context> {
    BORROWED.existing().map(|existing| existing.lock().unpoisoned().open.values().flat_map(Opened::contexts).collect()).unwrap_or_default()
}

/// Memory that is open, as queries see it.
pub struct OpenMemory {
    /// Its addresses.
    pub span: Span,
    /// A context in which it was opened.
    pub context: Option<Context>,
    /// The device that it is on.
    pub device: CUdevice,
    /// Whether it is set aside.
    pub is_paused: bool,
}

/// The open memory that contains an address. `None` if there is none, or if the driver does not report its device.
pub fn at(address: CUdeviceptr) -> Option<OpenMemory> {
    let borrowed = BORROWED.existing()?.lock().unpoisoned();
    let contains = |span: Span| address.checked_sub(span.address).is_some_and(|offset| offset < span.bytes as u64);
    let sites = borrowed.open.values().filter_map(|opened| Some((opened, opened.open_site()?)));
    let (opened, site) = sites.into_iter().find(|(_, site)| contains(site.place.span()))?;
    Some(OpenMemory {
        span: site.place.span(),
        context: site.contexts.first().copied(),
        device: opened.device?,
        is_paused: opened.behind != Behind::Memory,
    })
}

/// How many allocations of other processes are open here and would not be set aside by a pause of this memory with these partners.
pub fn count_after(selection: &Selection, partners: &[u32]) -> usize {
    let meant = Meant::by(selection);
    let is_there = |opened: &&Opened| opened.behind == Behind::Memory && !opened.is_paused_by(&meant, partners);
    BORROWED.existing().map_or(0, |borrowed| borrowed.lock().unpoisoned().open.values().filter(is_there).count())
}

impl Opened {
    fn map(lease: &Arc<Lease>, Received { pieces, tag, pauses }: &Received, current: &Current) -> Result<Self, Failure> {
        let mut memory = Physical::import(pieces)?;
        let addresses = Arc::new(Addresses::reserve(pieces.iter().map(|(_, bytes)| bytes).sum())?);
        let place = Place::of(&addresses);
        memory.map(&place)?;
        let own = memory.device()?;
        let mut site = OpenSite {
            address: addresses.base(),
            count: 1,
            changed: 0,
            place,
            devices: BTreeSet::new(),
            contexts: BTreeSet::new(),
            memory: Some(memory),
        };
        site.open_to(current)?;
        // Copies between devices may run on the memory's own device.
        if let Some(own) = own {
            site.give_access(own)?;
        }
        let (lease, site) = (Arc::clone(lease), Site::Opened(site));
        Ok(Self { lease, site, tag: tag.clone(), device: own, pauses: *pauses, behind: Behind::Memory })
    }
}

impl OpenSite {
    fn open_to(&mut self, current: &Current) -> Result<(), Failure> {
        self.give_access(current.device())?;
        self.contexts.insert(current.owner());
        Ok(())
    }

    fn give_access(&mut self, device: CUdevice) -> Result<(), Failure> {
        if !self.devices.contains(&device) {
            if self.memory.is_some() {
                driver::open([(self.place.span(), [Access::of_device(device)].into())])?;
            }
            self.devices.insert(device);
        }
        Ok(())
    }
}

impl BorrowedMemory {
    /// Opens memory that is open already.
    fn open_again(&mut self, token: &Token, current: &Current) -> Result<Option<CUdeviceptr>, Failure> {
        let Some(site) = self.open.get_mut(token).and_then(Opened::open_site_mut) else { return Ok(None) };
        site.open_to(current)?;
        site.count += 1;
        self.changes += 1;
        site.changed = self.changes;
        Ok(Some(site.address))
    }

    fn insert(&mut self, token: Token, mut opened: Opened) {
        self.changes += 1;
        let changes = self.changes;
        opened.open_site_mut().into_iter().for_each(|site| site.changed = changes);
        self.open.insert(token, opened);
    }

    /// The connection for requests to an owner.
    pub(super) fn lease(&mut self, owner: u32) -> io::Result<Arc<Lease>> {
        use std::collections::hash_map::Entry;
        match self.owners.entry(owner) {
            Entry::Occupied(known) => Ok(Arc::clone(known.get())),
            Entry::Vacant(place) => {
                let lease = Lease { lender: Lender::connect(owner, self.doors.get(&owner).copied())?, state: Mutex::new(LeaseState::Open) };
                Ok(Arc::clone(place.insert(Arc::new(lease))))
            }
        }
    }
}

/// Hangs up on all owners. What is set aside stays so, and is asked for over new connections. Nothing may be open: its owner would take that for closed.
pub(crate) fn hang_up() {
    let Some(existing) = BORROWED.existing() else { return };
    let before: Vec<_> = {
        let mut borrowed = existing.lock().unpoisoned();
        let known = std::mem::take(&mut borrowed.owners).into_values();
        let without = |pid| Arc::new(Lease { lender: Lender::without_connection(pid), state: Mutex::new(LeaseState::Retired) });
        let hang_up = |opened: &mut Opened| {
            let new = without(opened.lease.lender.pid);
            std::mem::replace(&mut opened.lease, new)
        };
        borrowed.open.values_mut().map(hang_up).chain(known).collect()
    };
    // Closes the connections.
    drop(before);
}

/// Called with the connection locked, so that an open and a close of the same memory do not overlap.
impl Lease {
    /// Gets the memory behind a handle from its owner.
    pub(super) fn ask(self: &Arc<Self>, state: &mut LeaseState, token: &Token) -> Result<Received, Refused> {
        let (reply, files) = self.lender.open(token).map_err(|error| {
            self.retire(state);
            if error.kind() == io::ErrorKind::TimedOut {
                // The owner may still lend it.
                self.lender.close_unconfirmed(token);
            }
            Refused::because(self.lender.pid, &error)
        })?;
        match reply {
            Answer::Opened { pieces, tag, pauses, .. } if pieces.len() == files.len() => Ok(Received::new(files, pieces, tag, pauses)),
            Answer::Error { code: kind, message, cuda_code } => {
                log::debug!("process {} does not share its memory: {message}", self.lender.pid);
                self.retire_if_unused(state);
                match cuda_code {
                    Some(code) => Err(Refused::Finally(code)),
                    None if kind == Kind::Busy => {
                        // It has hung up.
                        self.retire(state);
                        Err(Refused::ForNow)
                    }
                    None => Err(Refused::Finally(code::UNKNOWN)),
                }
            }
            _ => {
                // Not all descriptors fit into this process.
                log::debug!("process {} shares its memory, but not all of it arrived", self.lender.pid);
                drop(files);
                self.give_back(state, token);
                Err(Refused::Finally(code::UNKNOWN))
            }
        }
    }

    /// Asks a process whether it has exported a descriptor.
    pub(super) fn claim(self: &Arc<Self>, state: &mut LeaseState, file: BorrowedFd<'_>) -> Claimed {
        let answer = match self.lender.claim(file) {
            Ok((Answer::Opened { pieces, tag, pauses, token: Some(token) }, files)) if files.len() == pieces.len() => {
                Token::parse(&token).map_or(Claimed::No, |token| Claimed::Yes(token, Received::new(files, pieces, tag, pauses)))
            }
            Ok((Answer::Opened { token, .. }, files)) => {
                // Not all descriptors fit into this process.
                drop(files);
                token.as_deref().and_then(Token::parse).into_iter().for_each(|token| self.give_back(state, &token));
                Claimed::No
            }
            Ok((Answer::Error { code: Kind::Busy, .. }, _)) => Claimed::Busy,
            Ok(_) => Claimed::No,
            Err(error) => {
                self.retire(state);
                match Refused::because(self.lender.pid, &error) {
                    _ if error.kind() == io::ErrorKind::TimedOut => Claimed::Silent,
                    Refused::ForNow => Claimed::Busy,
                    Refused::Finally(_) => Claimed::No,
                }
            }
        };
        if !matches!(answer, Claimed::Yes(..)) {
            self.retire_if_unused(state);
        }
        answer
    }

    /// Closes memory if it is still open and `meant`. Returns whether it was. Does not wait for others who use the connection.
    fn end(self: &Arc<Self>, token: &Token, meant: impl Fn(&Opened) -> bool) -> bool {
        let opened = {
            let mut borrowed = borrowed();
            if !borrowed.open.get(token).is_some_and(|opened: &Opened| Arc::ptr_eq(&opened.lease, self) && meant(opened)) {
                return false;
            }
            borrowed.open.remove(token)
        };
        // Before the owner may pause it.
        drop(opened);
        if let Ok(mut state) = self.state.try_lock() {
            self.inform_owner(&mut state, token);
            return true;
        }
        // The thread that uses the connection may be waiting for the owner, which may be paused or stopped for long.
        let (lease, its) = (Arc::clone(self), *token);
        if let Err(error) = worker::spawn("vramctl-borrow", move || lease.inform_owner(&mut lease.state.lock().unpoisoned(), &its)) {
            log::debug!("no thread to inform process {} that its memory is closed: {error}", self.lender.pid);
            self.inform_owner(&mut self.state.lock().unpoisoned(), token);
        }
        true
    }

    /// Informs the owner that memory is closed, unless it has been opened again since.
    pub(super) fn inform_owner(self: &Arc<Self>, state: &mut LeaseState, token: &Token) {
        let is_open = borrowed().open.get(token).is_some_and(|opened| Arc::ptr_eq(&opened.lease, self));
        if !is_open {
            self.give_back(state, token);
        }
    }

    /// Informs the owner that memory is closed.
    pub(super) fn give_back(self: &Arc<Self>, state: &mut LeaseState, token: &Token) {
        // Waits for the answer, even before disconnecting: when this process continues, the owner knows, unless it is stopped.
        if *state == LeaseState::Retired {
            self.lender.close_unconfirmed(token);
        } else if let Err(error) = self.lender.close(token) {
            log::debug!("process {} could not be informed that its memory is closed: {error}", self.lender.pid);
            self.retire(state);
        }
        self.retire_if_unused(state);
    }

    /// Sends no more requests over this connection. It stays open while memory that was passed over it is open.
    fn retire(self: &Arc<Self>, state: &mut LeaseState) {
        *state = LeaseState::Retired;
        let mut borrowed = borrowed();
        if borrowed.owners.get(&self.lender.pid).is_some_and(|current| Arc::ptr_eq(current, self)) {
            borrowed.owners.remove(&self.lender.pid);
        }
    }

    fn retire_if_unused(self: &Arc<Self>, state: &mut LeaseState) {
        let used = borrowed().open.values().any(|opened| Arc::ptr_eq(&opened.lease, self));
        if !used {
            self.retire(state);
        }
    }
}
