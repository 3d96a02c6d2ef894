//! Obstacles: what the driver checkpoints but cannot restore. A process with an obstacle would be lost, so they must be known before a
//! suspend.
//!
//! Driver 580 refuses to restore processes with imported memory (tried on H100s and H200s), which NCCL works with. The rest counts as an obstacle
//! because nobody has shown that a driver restores it: NVIDIA excludes unified memory as of driver 570 (NVIDIA/cuda-checkpoint), and newer ones
//! were not tried; nor were registered memory, multicast objects and shared pools. An obstacle is reported as long as it may exist: too long
//! rather than too short.

pub mod communicators;
mod refusals;
mod registered;
pub mod sightings;
pub mod unmanaged;

pub(crate) use refusals::Refusals;
pub use registered::{Binding, RegisteredUntil, Registrations};

use super::{Allocation, Memory};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use vramctl_driver as driver;
use vramctl_model::{Obstacle, ObstacleKind, Participants, support};

/// What becomes of memory that processes under the library share by CUDA IPC.
const UNLESS_TOGETHER: &str = "unless one command takes all of these processes (--all, or a name that they have in common)";

/// The communicators whose creation was seen, by their number of ranks.
fn known_communicators() -> Option<String> {
    let mut times = BTreeMap::<_, BTreeSet<_>>::new();
    for one in communicators::list() {
        times.entry(one.ranks).or_default().insert(one.id);
    }
    let text = |(ranks, ids): (u32, BTreeSet<String>)| match ranks {
        0 => format!("{} of unknown size", ids.len()),
        1 => format!("{} of 1 rank", ids.len()),
        ranks => format!("{} of {ranks} ranks", ids.len()),
    };
    let texts: Vec<_> = times.into_iter().map(text).collect();
    if texts.is_empty() { None } else { Some(texts.join(", ")) }
}

/// What would prevent a suspend of this process after a pause of these allocations. `borrowed`: how many allocations of other processes would
/// then be open here.
pub(crate) fn after(memory: &Memory, paused: &[Arc<Allocation>], borrowed: usize) -> Vec<Obstacle> {
    let paused: BTreeSet<_> = paused.iter().map(Arc::as_ptr).collect();
    let mut found = Vec::new();
    let mut add = |kind, what: String, bytes| found.push(Obstacle { kind, what, bytes });
    // Where NCCL's memory is managed, the ranks give up their memory of each other together.
    let mut known = known_communicators();
    for owner in unmanaged::status() {
        if sightings::is_communicator(&owner.owner) {
            let which = if owner.owner.starts_with("libnccl") { known.take() } else { None };
            let which = which.map_or_else(String::new, |which| format!(": {which}"));
            add(ObstacleKind::Communicator, format!("communicators of {}{which}", owner.owner), owner.bytes);
        }
    }
    let (mut lent, mut registered) = (0, BTreeMap::<_, u64>::new());
    for allocation in memory.registry.snapshot().iter().filter(|allocation| !paused.contains(&Arc::as_ptr(allocation))) {
        let (bytes, contents) = (allocation.bytes() as u64, allocation.contents());
        // Paused allocations have no memory that anybody could refer to.
        if contents.state.memory().is_none() {
            continue;
        }
        if !contents.lent_to_others(&Participants::default()).is_empty() {
            lent += bytes;
        } else if let Some(registrant) = contents.registrant() {
            *registered.entry(registrant).or_default() += bytes;
        }
    }
    if lent > 0 {
        add(ObstacleKind::Shared, format!("memory that other processes have open, {UNLESS_TOGETHER}, or --shared holds them"), lent);
    }
    if borrowed > 0 {
        let pieces = if borrowed == 1 { "piece" } else { "pieces" };
        add(ObstacleKind::Shared, format!("{borrowed} {pieces} of other processes' memory, {UNLESS_TOGETHER}"), 0);
    }
    if driver::has_leftover_imports() {
        add(ObstacleKind::Shared, "memory of other processes that the driver has refused to release".into(), 0);
    }
    for (registrant, bytes) in registered {
        add(ObstacleKind::Registered, format!("memory registered by {registrant}"), bytes);
    }
    for (kind, what) in sightings::counted() {
        add(kind, what, 0);
    }
    // Access to plain memory comes back (driver 580, two H100); to pools, nobody has tried.
    let pools: Vec<_> = memory.peers.of_pools().into_iter().map(|(device, owner)| format!("{device} to {owner}")).collect();
    if !pools.is_empty() {
        add(ObstacleKind::Peers, format!("access to a pool of GPU {}", pools.join(", ")), 0);
    }
    // Also for a process without memory here: it may still have contexts.
    if driver::devices().any(driver::is_behind_mps) {
        add(ObstacleKind::Mps, support::BEHIND_MPS.into(), 0);
    }
    found
}
