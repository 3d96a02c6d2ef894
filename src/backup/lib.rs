//! Where contents go while their memory is paused, and how they are copied.
//!
//! [`save`] takes the contents of allocations to where their policy says, [`restore`] brings them back; `host` and `spill`
//! are the two places. `arena` has the host memory (`numa`: which), `transfer` copies to and from it (`copier`: when not
//! by the copy engines), `digest` tells what has changed, `disk` is the file; `settings` has what was said of all this at run time.

mod arena;
pub mod copier;
pub mod digest;
pub mod disk;
mod host;
mod numa;
mod ranges;
mod settings;
mod spill;
mod transfer;

pub use arena::HOST_PIECE;
pub use settings::{disk_directory, retains, retains_by_default, set_copy_by, set_disk_directory, set_retain};
pub use transfer::Part;

use arena::Arena;
use std::ops::Range;
use std::sync::Arc;
use vramctl_driver::{CUdeviceptr, Context, Current, Extent};
use vramctl_model::{Backup, Error, HostStatus, Progress, Stage};

/// The contents of one allocation, kept outside the device.
#[derive(Debug)]
pub enum Saved {
    /// In host memory.
    Host(host::InMemory),
    /// In a file.
    Disk(spill::OnDisk),
}

impl Saved {
    /// What is kept from a byte of the allocation on, where it is in host memory: readable for as long as the value lives.
    pub fn kept_from(&self, byte: usize) -> Option<&[u8]> {
        match self {
            Self::Host(saved) => saved.kept_from(byte),
            Self::Disk(_) => None,
        }
    }

    /// How many bytes it keeps.
    pub fn kept_bytes(&self) -> u64 {
        match self {
            Self::Host(saved) => saved.kept_bytes(),
            Self::Disk(saved) => saved.kept_bytes(),
        }
    }
}

/// Where an allocation is, and where its contents are or go.
pub type Item = (Extent, Arc<Saved>);

/// Contents to save.
#[derive(Debug)]
pub struct Wanted {
    /// Where they are.
    pub extent: Extent,
    /// Where to.
    pub policy: Backup,
    /// Whether they stay in host memory after the resume, so that the next pause can tell what has changed.
    pub retain: bool,
    /// What is still there of an earlier pause.
    pub before: Option<Arc<Saved>>,
    /// The parts of it that somebody needs, in bytes from its beginning, in order. More may be saved: a file gets all.
    pub live: Vec<Range<usize>>,
}

/// What was saved.
#[derive(Debug, Default)]
pub struct Kept {
    /// Where the contents are.
    pub items: Vec<Item>,
    /// Bytes that were not copied, because the backup had them already.
    pub unchanged_bytes: u64,
}

/// Copies the contents of active allocations to where the policies say. All or nothing: after an error no more memory or
/// disk is used than before. Everything that works on the allocations has finished, and nothing new is started meanwhile.
///
/// `saved` is told the addresses of allocations that need not be looked at again, while others are still being copied. Not of
/// all of them: what it was not told of is saved when this returns.
pub fn save(wanted: Vec<Wanted>, progress: &mut dyn FnMut(Progress), saved: &mut dyn FnMut(&[CUdeviceptr])) -> Result<Kept, Error> {
    let (on_disk, in_memory): (Vec<_>, Vec<_>) = wanted.into_iter().partition(|wanted| wanted.policy == Backup::Disk);
    let mut kept = host::save(&in_memory, progress, saved)?;
    kept.items.extend(spill::save(&on_disk, progress)?);
    Ok(kept)
}

/// Copies saved contents back. `produce` puts memory at the addresses meanwhile, and hands over each item as soon as that
/// is done.
pub fn restore(
    items: &[Item],
    progress: &mut dyn FnMut(Progress),
    produce: impl FnOnce(&mut dyn FnMut(&Item)) -> Result<(), Error>,
) -> Result<(), Error> {
    let in_memory = |(_, saved): &Item| if let Saved::Host(saved) = &**saved { saved.kept_bytes() } else { 0 };
    let bytes = items.iter().map(in_memory).sum::<u64>() as usize;
    transfer::restore(bytes, progress, |give| {
        produce(&mut |(extent, saved)| {
            if let Saved::Host(saved) = &**saved {
                saved.parts(*extent).for_each(|part| give(vec![part]));
            }
        })
    })?;
    spill::restore(items, progress)
}

/// Makes ready what is better made in advance, for a tag's allocations in the current context: host memory
/// (`VRAMCTL_PREWARM`), and the digests' kernel, because a device that is to be paused may be full.
pub fn get_ready(current: &Current, tag: &str) {
    host::prewarm(current.context());
    if retains(tag) {
        host::prepare_digests(current);
    }
}

/// What was registered or loaded in a context is gone with it.
pub fn forget_context(context: Context) {
    Arena::forget_context(context);
    copier::forget_context(context);
    host::forget_digests(context);
}

/// Bytes of host memory that it would take to save these contents, besides what is retained of them.
pub fn fresh_host_bytes(wanted: &Wanted) -> u64 {
    if wanted.policy == Backup::Host { host::fresh_bytes(wanted) } else { 0 }
}

/// Bytes of contents that there is host memory for now.
pub fn available_host_bytes() -> u64 {
    Arena::available_to_process()
}

/// How much host memory there is for backups now.
pub fn status() -> HostStatus {
    Arena::status_of_process()
}

/// Waits until nothing is being done in the background: no host memory given back, no kernel loaded. For tests and
/// measurements.
pub fn settle() {
    copier::settle();
    Arena::settle();
}

/// Adds up what a copy reports.
struct Meter<'a> {
    now: Progress,
    tell: &'a mut dyn FnMut(Progress),
}

impl<'a> Meter<'a> {
    fn new(stage: Stage, total: usize, tell: &'a mut dyn FnMut(Progress)) -> Self {
        Self { now: Progress { stage, done: 0, total: total as u64 }, tell }
    }

    fn add(&mut self, bytes: usize) {
        self.now.done += bytes as u64;
        (self.tell)(self.now);
    }
}
