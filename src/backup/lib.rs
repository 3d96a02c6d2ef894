//! Backups: where contents go while their memory is paused, and how they are copied.
//!
//! [`save`] copies allocations' contents to where their policies say, and [`restore`] brings them back. `host` and `spill`
//! are the two destinations. `arena` manages host memory (`stock`: bookkeeping, `addresses`: system calls), `transfer`
//! copies to and from it (`copier`: without the copy engines), `loading` loads kernels, `digest` detects changes, `disk` is
//! the file, `stored` the image, `quiet` says when nothing of the program's can be held up, and `settings` holds run-time settings.

mod addresses;
mod arena;
pub mod copier;
pub mod digest;
pub mod disk;
mod host;
mod loading;
mod others;
pub mod quiet;
mod ranges;
mod settings;
mod spill;
mod stock;
mod stored;
mod transfer;

pub use arena::{PoolingStopped, piece_end};
pub use host::given_back;
pub use settings::{
    CopyBy, disk_directory, retains, retains_by_default, retains_unchanged, set_copy_by, set_disk_directory, set_host_keep, set_retain,
};
pub use stock::HOST_PIECE;
pub use stored::{Origin, close_origin, set_origin, store};
pub use transfer::{Flow, Part};

use arena::Arena;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use vramctl_config::Config;
use vramctl_driver::{CUdeviceptr, Context, Current, Extent};
use vramctl_host::limits;
use vramctl_model::{Error, HostRoom, HostStatus, Policy, Progress, Stage};

/// One allocation's contents, saved off the device.
#[derive(Debug)]
pub enum Backup {
    /// In host memory.
    Host(host::InMemory),
    /// In a file.
    Disk(spill::OnDisk),
    /// In an image.
    Stored(stored::Stored),
}

impl Backup {
    /// The contents kept in host memory from a byte of the allocation on; valid as long as the value.
    pub fn kept_from(&self, byte: usize) -> Option<&[u8]> {
        match self {
            Self::Host(saved) => saved.kept_from(byte),
            Self::Disk(_) | Self::Stored(_) => None,
        }
    }

    /// Bytes kept.
    pub fn kept_bytes(&self) -> u64 {
        match self {
            Self::Host(saved) => saved.kept_bytes(),
            Self::Disk(saved) => saved.kept_bytes(),
            Self::Stored(saved) => saved.kept_bytes(),
        }
    }

    /// Whether the next pause would find that most of it is still right, as far as is known: it would not know at all without digests.
    pub fn is_worth_keeping(&self) -> bool {
        if let Self::Host(saved) = self { saved.is_worth_keeping() } else { false }
    }

    /// Of these, bytes in a file.
    pub fn disk_bytes(&self) -> u64 {
        if let Self::Host(_) = self { 0 } else { self.kept_bytes() }
    }
}

impl Backup {
    /// Where it is in host memory, in bytes from the first. Backups beside each other share memory. `None` for a file.
    pub fn place(&self) -> Option<usize> {
        if let Self::Host(saved) = self { Some(saved.offset()) } else { None }
    }

    /// The parts of the allocation that are kept in host memory, as offsets into it.
    pub fn live(&self) -> &[Range<usize>] {
        if let Self::Host(saved) = self { saved.live() } else { &[] }
    }
}

/// An allocation's location and its backup.
pub type Item = (Extent, Arc<Backup>);

/// Contents to save.
#[derive(Debug)]
pub struct Wanted {
    /// Where they are.
    pub extent: Extent,
    /// Where they go.
    pub policy: Policy,
    /// Whether they stay in host memory after the resume, so that the next pause can detect changes.
    pub retain: bool,
    /// Whether their host memory is released before the resume returns.
    pub at_once: bool,
    /// The backup left from an earlier pause.
    pub before: Option<Arc<Backup>>,
    /// The parts to keep, as offsets into the allocation, in order. A file keeps everything.
    pub live: Vec<Range<usize>>,
}

impl Wanted {
    /// Whether they go to a file; if not, into host memory.
    fn goes_to_disk(&self) -> bool {
        match self.policy {
            Policy::Disk => true,
            Policy::Host | Policy::Discard => false,
        }
    }
}

/// What was saved.
#[derive(Debug, Default)]
pub struct Kept {
    /// Where the contents are.
    pub items: Vec<Item>,
    /// Bytes not copied because the backup already had them.
    pub unchanged_bytes: u64,
}

/// Receives the progress of copies. With an error, no more is copied.
pub type OnProgress<'a> = dyn FnMut(Progress) -> Result<(), Error> + 'a;

/// Saves the contents of active allocations as their policies say. All or nothing: on error, no more memory or disk is in
/// use than before. All work on the allocations must have finished, and none may start meanwhile.
///
/// While others are still being copied, `saved` receives the allocations that need no further access, with their backups. The rest
/// are saved when this returns. `flow`: whether the host memory must be there at the start. What goes to files needs little, at the end.
pub fn save(wanted: Vec<Wanted>, flow: Flow, progress: &mut OnProgress<'_>, saved: &mut dyn FnMut(&[&Item])) -> Result<Kept, Error> {
    // Before anything is copied.
    match admit(&wanted, flow).1 {
        Err(Error::HostMemory { capped: false, .. }) if Arena::others_may_help() => (),
        refused => refused?,
    }
    let (on_disk, in_memory): (Vec<_>, Vec<_>) = wanted.into_iter().partition(Wanted::goes_to_disk);
    let mut kept = host::save(&in_memory, flow, progress, saved)?;
    kept.items.extend(spill::save(&on_disk, progress)?);
    Ok(kept)
}

/// The host memory that saving these contents would take, and why it would be refused if host memory or disk space is short. Both a pause
/// and a dry run decide by this. If the memory comes piece by piece, any amount will be there.
pub fn admit(wanted: &[Wanted], flow: Flow) -> (HostRoom, Result<(), Error>) {
    let (on_disk, sizes) = needs(wanted);
    let need = match Arena::get().and_then(|arena| arena.need(&sizes, matches!(flow, Flow::Pieces { .. }))) {
        Ok(need) => need,
        Err(_) if sizes.is_empty() => return (HostRoom::default(), Ok(())),
        Err(error) => return (HostRoom::default(), Err(error)),
    };
    let room = HostRoom { needed_bytes: need.bytes, available_bytes: need.available };
    (room, need.check().and_then(|()| spill::check_room(&on_disk)))
}

/// Indices of the retained backups to drop to make room for `wanted`; `None` if dropping all would not be enough.
pub fn in_the_way(retained: &[Arc<Backup>], wanted: &[Wanted]) -> Option<Vec<usize>> {
    host::in_the_way(retained, &needs(wanted).1)
}

/// What saving these contents takes: the contents that go to files, and the sizes in bytes of the ranges of host memory.
fn needs(wanted: &[Wanted]) -> (Vec<&Wanted>, Vec<usize>) {
    let (on_disk, in_memory): (Vec<_>, Vec<_>) = wanted.iter().partition(|wanted| wanted.goes_to_disk());
    let mut sizes = host::sizes_of_new(&in_memory);
    sizes.extend(spill::size_of_staging(&on_disk));
    (on_disk, sizes)
}

/// Whether the host has room for copies of what is on a device, which only save time: it is not looked at where nobody would retain any.
pub fn has_room_for_copies() -> bool {
    Config::get().retains_unchanged && !limits::is_short()
}

/// Contents to copy back.
#[derive(Debug, Default)]
pub struct Due {
    /// What is in host memory.
    in_memory: Vec<Part>,
    /// What is in files.
    on_disk: Vec<Item>,
    /// What is in an image.
    stored: Vec<Item>,
}

impl Due {
    /// Adds one.
    pub fn add(&mut self, item: Item) {
        self.in_memory.extend(parts_in_memory(&item));
        match &*item.1 {
            Backup::Host(_) => (),
            Backup::Disk(_) => self.on_disk.push(item),
            Backup::Stored(_) => self.stored.push(item),
        }
    }
}

/// Copies saved contents back. Meanwhile `produce` maps memory and hands over each item once its memory is mapped; `None` in place of an item has
/// what is restored so far reported. `restored` receives the address of each allocation whose contents in host memory are back. `idle`: contexts in
/// which nothing runs that could delay a kernel.
pub fn restore(
    due: &Due,
    flow: Flow,
    idle: &BTreeSet<Context>,
    progress: &mut OnProgress<'_>,
    restored: &mut dyn FnMut(CUdeviceptr),
    produce: impl FnOnce(&mut dyn FnMut(Option<&Item>)) -> Result<(), Error>,
) -> Result<(), Error> {
    let missing = RefCell::new(BTreeMap::new());
    let mut copied = |parts: &[Part]| {
        for part in parts {
            let mut missing = missing.borrow_mut();
            let Some((&address, left)) = missing.range_mut(..=part.device).next_back() else { continue };
            *left -= part.bytes;
            if *left == 0 {
                missing.remove(&address);
                drop(missing);
                restored(address);
            }
        }
    };
    transfer::restore(&due.in_memory, flow, idle, progress, &mut copied, |send| {
        produce(&mut |item| {
            let Some(item) = item else { return send(Vec::new()) };
            let parts: Vec<_> = parts_in_memory(item).collect();
            if !parts.is_empty() {
                missing.borrow_mut().insert(item.0.address, parts.iter().map(|part| part.bytes).sum::<usize>());
            }
            for part in parts {
                send(vec![part]);
            }
        })
    })?;
    spill::restore(&due.on_disk, progress)?;
    stored::restore(&due.stored, progress)
}

/// Keeps no host memory in the pool until the value is dropped: another process waits for it.
pub fn stop_pooling() -> Result<PoolingStopped, Error> {
    Arena::get().map(Arena::stop_pooling)
}

/// An item's contents in host memory, split at the arena's pieces.
fn parts_in_memory((extent, saved): &Item) -> impl Iterator<Item = Part> {
    let in_memory = if let Backup::Host(saved) = &**saved { Some(saved) } else { None };
    in_memory.into_iter().flat_map(|saved| saved.parts(*extent))
}

/// Prepares for later pauses of a tag's allocations in the current context: host memory (`VRAMCTL_PREWARM`), and the hashing
/// kernel, because the device may be full by then.
pub fn get_ready(current: &Current, tag: &str) {
    host::prewarm(current.context());
    if retains(tag) {
        host::prepare_digests(current);
    }
}

/// Forgets what was registered or loaded in a destroyed context.
pub fn forget_context(context: Context) {
    Arena::forget_context(context);
    copier::forget_context(context);
    host::forget_digests(context);
}

/// Draws another secret, for a process that goes on from an image beside others.
pub fn draw_secret() {
    digest::forget_key();
}

/// Leaves the driver as little host memory as possible to checkpoint: backups stay, but are not registered until they are used.
pub fn unregister_all() {
    Arena::unregister_all();
}

/// Current use of host memory for backups.
pub fn status() -> HostStatus {
    Arena::status_of_process()
}

/// Waits until background work is done: no host memory being released, no kernel loading. Memory kept for the next pause
/// stays. For tests and measurements.
pub fn settle() {
    copier::settle();
    host::settle_digests();
    Arena::settle();
}

/// Accumulates and reports copy progress.
struct Meter<'a> {
    now: Progress,
    on_progress: &'a mut OnProgress<'a>,
}

impl<'a> Meter<'a> {
    fn new(stage: Stage, total: usize, on_progress: &'a mut OnProgress<'a>) -> Self {
        Self { now: Progress { stage, done: 0, total: total as u64 }, on_progress }
    }

    fn add(&mut self, bytes: usize) -> Result<(), Error> {
        self.now.done += bytes as u64;
        (self.on_progress)(self.now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_meter_reports_what_has_been_copied_so_far() {
        let mut reported = Vec::new();
        let mut on_progress = |progress: Progress| {
            reported.push((progress.done, progress.total));
            Ok(())
        };
        let mut meter = Meter::new(Stage::Save, 10, &mut on_progress);
        meter.add(3).unwrap();
        meter.add(7).unwrap();
        assert_eq!(reported, [(3, 10), (10, 10)]);
    }
}
