//! Where contents go while their memory is paused, and how they are copied.

mod arena;
pub mod digest;
mod limits;
mod transfer;

pub use arena::ArenaStatus;
pub use transfer::Part;

use crate::config::Config;
use crate::driver::Context;
use crate::error::Error;
use crate::memory::{Allocation, Progress};
use crate::process::PerProcess;
use arena::{Arena, Range};
use std::sync::{Arc, Once};

/// The contents of one allocation, kept outside the device.
#[derive(Debug)]
pub struct Saved {
    range: Range,
}

impl Saved {
    /// The contents in host memory, readable for as long as the value lives.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: a value is made of ranges only that have been filled, and what is written to them later is written
        // while the allocation is active, when nobody reads them.
        unsafe { self.range.as_slice() }
    }
}

/// Copies the contents of active allocations to the host, in their order: over what was saved of them before, where that
/// was retained. All or nothing: after an error no more host memory is used than before. Everything that works on the
/// allocations has finished, and nothing new is started meanwhile.
pub fn save(allocations: &[Arc<Allocation>], progress: &mut dyn FnMut(Progress)) -> Result<Vec<Arc<Saved>>, Error> {
    let retained: Vec<_> = allocations.iter().map(|allocation| allocation.contents().saved.clone()).collect();
    let missing: Vec<_> =
        allocations.iter().zip(&retained).filter(|(_, saved)| saved.is_none()).map(|(allocation, _)| allocation.bytes()).collect();
    let mut fresh = if missing.is_empty() { Vec::new() } else { Arena::get()?.take(&missing)? }.into_iter();
    let saved: Vec<_> =
        retained.into_iter().filter_map(|saved| saved.or_else(|| fresh.next().map(|range| Arc::new(Saved { range })))).collect();
    let mut parts: Vec<_> = allocations.iter().zip(&saved).flat_map(|(allocation, saved)| all_parts(allocation, saved)).collect();
    parts.sort_unstable_by_key(|part| part.offset);
    transfer::save(&parts, progress)?;
    Ok(saved)
}

/// Copies saved contents back while `produce` is still putting memory at the addresses: it hands over each allocation as
/// soon as that is done.
pub fn restore(
    bytes: usize,
    progress: &mut dyn FnMut(Progress),
    produce: impl FnOnce(&mut dyn FnMut(&Allocation, &Saved)) -> Result<(), Error>,
) -> Result<(), Error> {
    transfer::restore(bytes, progress, |give| {
        produce(&mut |allocation, saved| all_parts(allocation, saved).for_each(|part| give(vec![part])))
    })
}

fn all_parts(allocation: &Allocation, saved: &Saved) -> impl Iterator<Item = Part> {
    transfer::parts(allocation.context(), allocation.address(), &saved.range, 0, allocation.bytes())
}

/// Prepares as much host memory as `VRAMCTL_PREWARM` says, in the background. The first call does it.
pub fn prewarm(context: Context) {
    static STARTED: PerProcess<Once> = PerProcess::new(Once::new);
    let bytes = Config::get().prewarm;
    if bytes > 0 {
        STARTED.get().call_once(|| match Arena::get() {
            Ok(arena) => arena.prewarm(bytes, context),
            Err(error) => log::warn!("{error}"),
        });
    }
}

/// Host memory that was registered in a context is no longer registered.
pub fn forget_context(context: Context) {
    Arena::forget_context(context);
}

/// How much host memory there is for backups now.
pub fn status() -> ArenaStatus {
    Arena::status_of_process()
}

/// Waits until no host memory is being given back. For tests and measurements.
pub fn settle() {
    Arena::settle();
}
