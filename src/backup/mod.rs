//! Where contents go while their memory is paused, and how they are copied.
//!
//! [`save`] takes the contents of allocations to where their policy says, [`restore`] brings them back; `host` and `spill`
//! are the two places. `arena` has the host memory, `transfer` copies to and from it, `digest` tells what has changed,
//! `disk` is the file; `settings` has what was said of all this at run time.

mod arena;
pub mod digest;
pub mod disk;
mod host;
mod limits;
mod settings;
mod spill;
mod transfer;

pub use arena::ArenaStatus;
pub use settings::{disk_directory, retains, retains_by_default, set_disk_directory, set_retain};
pub use transfer::Part;

use crate::driver::{Context, Current};
use crate::error::Error;
use crate::memory::{Allocation, Backup, Progress, Stage};
use arena::Arena;
use std::sync::Arc;

/// The contents of one allocation, kept outside the device.
#[derive(Debug)]
pub enum Saved {
    /// In host memory.
    Host(host::Saved),
    /// In a file.
    Disk(spill::Saved),
}

impl Saved {
    /// The contents, where they are in host memory: readable for as long as the value lives.
    pub fn as_slice(&self) -> Option<&[u8]> {
        match self {
            Self::Host(saved) => Some(saved.as_slice()),
            Self::Disk(_) => None,
        }
    }
}

/// An allocation, and where its contents are or go.
pub type Item = (Arc<Allocation>, Arc<Saved>);

/// What was saved.
#[derive(Debug, Default)]
pub struct Kept {
    /// Where the contents are, in the order of the allocations.
    pub saved: Vec<Arc<Saved>>,
    /// Bytes that were not copied, because the backup had them already.
    pub unchanged_bytes: u64,
}

/// Copies the contents of active allocations to where the policies say. All or nothing: after an error no more memory or
/// disk is used than before. Everything that works on the allocations has finished, and nothing new is started meanwhile.
pub fn save(allocations: &[(Arc<Allocation>, Backup)], progress: &mut dyn FnMut(Progress)) -> Result<Kept, Error> {
    let of = |wanted: Backup| -> Vec<Arc<Allocation>> {
        allocations.iter().filter(|(_, policy)| *policy == wanted).map(|(allocation, _)| Arc::clone(allocation)).collect()
    };
    let (in_memory, unchanged_bytes) = host::save(&of(Backup::Host), progress)?;
    let on_disk = spill::save(&of(Backup::Disk), progress)?;
    let (mut in_memory, mut on_disk) = (in_memory.into_iter(), on_disk.into_iter());
    let next = |policy: Backup| if policy == Backup::Disk { on_disk.next() } else { in_memory.next() };
    Ok(Kept { saved: allocations.iter().map(|(_, policy)| *policy).filter_map(next).collect(), unchanged_bytes })
}

/// Copies saved contents back. `produce` puts memory at the addresses meanwhile, and hands over each item as soon as that
/// is done.
pub fn restore(
    items: &[Item],
    progress: &mut dyn FnMut(Progress),
    produce: impl FnOnce(&mut dyn FnMut(&Item)) -> Result<(), Error>,
) -> Result<(), Error> {
    let in_memory = items.iter().filter(|(_, saved)| matches!(**saved, Saved::Host(_))).map(|(allocation, _)| allocation.bytes()).sum();
    transfer::restore(in_memory, progress, |give| {
        produce(&mut |(allocation, saved)| {
            if let Saved::Host(saved) = &**saved {
                saved.parts(allocation).for_each(|part| give(vec![part]));
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
    host::forget_digests(context);
}

/// How much host memory there is for backups now.
pub fn status() -> ArenaStatus {
    Arena::status_of_process()
}

/// Waits until no host memory is being given back. For tests and measurements.
pub fn settle() {
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
